"""Finds replicas that have drifted apart, and repairs them.

In data-parallel training all ranks hold the same parameters and the same optimizer state, bit for
bit. A flipped bit, a stray `random()` or a hook that runs on one rank only breaks that silently.
`check_consistency` compares a 64-bit hash of every tensor over the ranks: one read of the memory
and a few bytes on the wire, no copy of a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_strategy import _core
from hvd_strategy.errors import DivergenceError, MismatchError
from hvd_strategy.options import resolve
from hvd_strategy.session import Session

__all__ = ["Divergence", "check_consistency", "named_state"]

# How many tensors a message names.
_NAMED = 5


@dataclass(frozen=True)
class Divergence:
    """One tensor that is not the same on all ranks.

    Attributes:
        name: The tensor, as `named_state` calls it.
        groups: The ranks that agree with each other, the largest group first; among groups of one
            size the one with the lowest rank.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def reference(self) -> int:
        """The rank that the others are repaired from: the lowest one of the largest group."""
        return self.groups[0][0]

    def __str__(self) -> str:
        described = " and ".join(_ranks(group) for group in self.groups)
        return f"'{self.name}' ({described} hold different values)"


def check_consistency(
    session: Session,
    tensors: Iterable[tuple[str, Any]],
    *,
    on_divergence: str | None = None,
    when: str = "",
) -> list[Divergence]:
    """Compares tensors over the ranks, bit by bit through a hash. Collective.

    Args:
        session: The ranks.
        tensors: Pairs of a name and a tensor or number: the same names on every rank, in any
            order. `named_state` gives those of a module and its optimizers. Tensors that only
            differ in the order of their memory are different.
        on_divergence: "error" raises; "repair" gives every rank the value of the largest group of
            ranks that agree (of the lowest rank where no group is larger) and returns what was
            repaired. HVD_ON_DIVERGENCE, or "error", when not given.
        when: For the message, "optimizer step 120" for example.

    Returns:
        What differed and was repaired, in the order of the names; the same on every rank.

    Raises:
        DivergenceError: On every rank, naming the first tensors that differ and the ranks.
        MismatchError: The ranks came with other names, shapes or dtypes.
    """
    policy = resolve("on_divergence", on_divergence)
    if session.size == 1:
        return []
    named = sorted(tensors, key=lambda pair: pair[0])
    _require_same_structure(session, named)
    hashes = torch.tensor(_signed(_hashes([value for _, value in named])), dtype=torch.int64)
    gathered = session.allgather(hashes)
    by_rank = torch.stack(list(gathered))  # (ranks, tensors)
    differing = (by_rank != by_rank[0]).any(dim=0).nonzero().flatten().tolist()
    found = [
        Divergence(named[index][0], _groups(by_rank[:, index].tolist())) for index in differing
    ]
    if not found:
        return found
    if policy == "error":
        raise DivergenceError(
            f"Rank {session.rank}: the ranks have drifted apart{_at(when)}: {_listed(found)}. "
            "Something changed them on some ranks only: a hook or callback that depends on the "
            "rank, random numbers that are not seeded alike, an operation that is not "
            "deterministic, or faulty memory. on_divergence='repair' overwrites the minority and "
            "goes on."
        )
    _repair(session, [named[index] for index in differing], found)
    return found


def named_state(
    module: nn.Module | None,
    optimizers: Sequence[Optimizer] = (),
    *,
    buffers: bool = True,
) -> list[tuple[str, Any]]:
    """Names parameters, buffers and optimizer state, as `check_consistency` takes them.

    Args:
        module: Its parameters and buffers; None for none.
        optimizers: Their state, by the names of the parameters where the module has them. State
            that is no tensor and no number is left out.
        buffers: Whether the module's buffers count.
    """
    named: dict[str, Any] = {}
    names: dict[int, str] = {}
    if module is not None:
        for name, parameter in module.named_parameters():
            named[name] = parameter
            names[id(parameter)] = name
        if buffers:
            named.update(module.named_buffers())
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer {number}" if len(optimizers) > 1 else "optimizer"
        position = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), f"parameter {position}")
                position += 1
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, (Tensor, int, float, bool)):
                        named[f"{prefix}: {key} of {name}"] = value
    return list(named.items())


# ---- hashes


def _hashes(values: Sequence[Any]) -> list[int]:
    kept: list[Tensor] = []  # alive until their memory has been read
    pieces: list[tuple[int, int]] = []
    for value in values:
        tensor = _dense(value)
        kept.append(tensor)
        pieces.append((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return _core.hash_memory(pieces)


def _dense(value: Any) -> Tensor:
    """The value as a tensor whose elements lie in one piece of memory; a copy only where needed."""
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    if tensor.layout is not torch.strided:
        tensor = torch.cat(
            [part.reshape(-1).contiguous().view(torch.uint8) for part in _parts(tensor)]
        )
    tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    # Channels-last weights and the like: dense, in another order.
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    return tensor.permute(order).contiguous()


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    return [tensor.to_dense()]


def _signed(hashes: Sequence[int]) -> list[int]:
    return [value - (1 << 64) if value >= 1 << 63 else value for value in hashes]


# ---- structure, groups, repair


def _require_same_structure(session: Session, named: Sequence[tuple[str, Any]]) -> None:
    own = [f"'{name}', {_kind(value)}" for name, value in named]
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    digests = session.allgather_object(digest)
    if all(other == digests[0] for other in digests):
        return
    everybody: list[list[str]] = session.allgather_object(own)
    other = next(rank for rank, lines in enumerate(everybody) if lines != everybody[0])
    missing = sorted(set(everybody[0]) ^ set(everybody[other]))
    holder = 0 if missing[0] in everybody[0] else other
    raise MismatchError(
        f"Rank {session.rank}: the ranks do not hold the same tensors: rank {holder} has "
        f"{missing[0]}, rank {other if holder == 0 else 0} does not. An optimizer that has stepped "
        "on some ranks only, or another model, makes such a difference."
    )


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _groups(hashes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(hashes):
        ranks.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(group) for group in ranks.values()), key=lambda g: (-len(g), g[0])))


def _repair(
    session: Session, named: Sequence[tuple[str, Any]], found: Sequence[Divergence]
) -> None:
    for divergence, (_, value) in zip(found, named, strict=True):
        if not isinstance(value, Tensor):
            raise DivergenceError(
                f"Rank {session.rank}: the ranks have drifted apart in {divergence}, which is no "
                "tensor and cannot be repaired in place. Restart from a checkpoint."
            )
    with torch.no_grad():
        for divergence, (_, value) in zip(found, named, strict=True):
            received = session.broadcast(value.detach().clone(), divergence.reference)
            if session.rank not in divergence.groups[0]:
                value.detach().copy_(received)


def _at(when: str) -> str:
    return f" (found after {when})" if when else ""


def _listed(found: Sequence[Divergence]) -> str:
    text = ", ".join(str(divergence) for divergence in found[:_NAMED])
    more = len(found) - _NAMED
    return text if more <= 0 else f"{text}, and {more} more"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks)
