"""Keeps parameters and buffers of a module equal on all ranks.

Parameters need that once, at the start: from then on every rank applies the same gradients. Buffers
change in forward, on each rank from its own data, and rank 0's count, as with
DistributedDataParallel. Two kinds are treated differently:

* Running statistics of normalization layers are not read while training. They are broadcast when
  somebody may look at them: before a validation, before a checkpoint, at the end.
* Any other buffer may be read by the next training step (a codebook, a moving average), which would
  let the ranks compute with different models. Such a buffer is broadcast at the start of the next
  batch after it was written on any rank. One that is never written (a mask, a table of positions)
  costs one byte per batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvd_strategy._private_api import (
    names_ignored_by_ddp,
    normalization_layers,
    tensor_version,
)
from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.session import Session

# Tensors from this size on are broadcast in place, smaller ones packed together.
_PACKED_BELOW_BYTES = 1 << 20
_PACK_BYTES = 16 << 20


class ModuleState:
    """The parameters and buffers of one module, over the ranks of a session.

    Every method is collective: all ranks call the same one. What
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` named is left alone.

    Args:
        module: a module that is built alike on all ranks.
        session: the ranks.

    Attributes:
        source: the rank whose buffers count: 0, unless it has had no batch since they were equal.

    Raises:
        HvdError: a parameter is not initialized yet (a lazy module), or on the meta device.
        MismatchError: names, shapes or dtypes differ between ranks.
    """

    def __init__(self, module: nn.Module, session: Session) -> None:
        self._module = module
        self._session = session
        self.source = 0
        self._watched: list[_WatchedBuffer] = []
        require_content(self._named_tensors(), session.rank)
        if session.size > 1:
            self._check_structure(self._named_tensors())
            self._watch()

    def broadcast(self) -> None:
        """Gives every rank the parameters and buffers of rank 0."""
        self._broadcast(tensor for _, tensor in self._named_tensors())

    def broadcast_buffers(self) -> None:
        """Gives every rank the buffers of the source.

        Raises:
            MismatchError: names, shapes or dtypes differ between ranks by now.
        """
        if self._session.size == 1:
            return
        buffers = self._named_buffers()
        self._check_structure(buffers)
        self._broadcast(tensor for _, tensor in buffers)
        # The module may have been changed since the last time; anew, with the current versions.
        self._watch()

    def broadcast_written_buffers(self) -> None:
        """Does so with what was written since the last call, except running statistics.

        Raises:
            MismatchError: the shape or dtype of one differs between ranks by now.
        """
        if not self._watched:
            return
        written = torch.tensor([watched.written() for watched in self._watched], dtype=torch.uint8)
        self._session.allreduce(written, "max")
        if written.any():
            changed = [
                watched
                for watched, flag in zip(self._watched, written.tolist(), strict=True)
                if flag
            ]
            named = [(watched.name, watched.tensor) for watched in changed]
            present = [(name, tensor) for name, tensor in named if tensor is not None]
            self._check_structure(present)
            self._broadcast(tensor for _, tensor in present)
            for watched in changed:
                watched.note()

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        if self._session.size > 1:
            broadcast_tensors(self._session, list(tensors), self.source)

    def _watch(self) -> None:
        layers = dict(self._module.named_modules())
        self._watched = []
        for name, buffer in self._named_buffers():
            prefix, _, own_name = name.rpartition(".")
            layer = layers[prefix]
            if buffer.numel() and not isinstance(layer, normalization_layers()):
                self._watched.append(_WatchedBuffer(name, layer, own_name))

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self._sorted(self._module.named_parameters()), *self._named_buffers()]

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        return self._sorted(self._module.named_buffers())

    def _sorted(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        # By name: ranks may have registered them in another order.
        ignored = names_ignored_by_ddp(self._module)
        return sorted(
            ((name, tensor) for name, tensor in named if name not in ignored),
            key=lambda pair: pair[0],
        )

    def _check_structure(self, named: list[tuple[str, Tensor]]) -> None:
        own = [
            f"{name!r}: {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            for name, tensor in named
        ]
        digest = hashlib.sha256("\n".join(own).encode()).digest()
        digests = self._session.allgather_object(digest)
        if all(other == digest for other in digests):
            return
        everybody: list[list[str]] = self._session.allgather_object(own)
        rank = next(rank for rank, other in enumerate(everybody) if other != everybody[0])
        ours, theirs = _first_difference(everybody[0], everybody[rank])
        raise MismatchError(
            f"The module differs between ranks: rank 0 has {ours} where rank {rank} has {theirs}. "
            "Build the same module on every rank."
        )


def require_content(named: Iterable[tuple[str, Tensor]], rank: int) -> None:
    """Raises where a parameter or buffer has no content that could be made equal.

    Raises:
        HvdError: One is not initialized, or on the meta device; names it.
    """
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        if is_lazy(tensor):
            raise HvdError(
                f"{name!r} is not initialized on rank {rank}: run a forward with a sample batch "
                "first (in `configure_model`, say), so that lazy modules know their shapes."
            )
        if tensor.is_meta:
            raise HvdError(
                f"{name!r} is on the meta device on rank {rank} and has no content: materialize "
                "the module first, in `configure_model` (with `self.to_empty(device='cpu')`, say, "
                "and its initialization)."
            )


class _WatchedBuffer:
    """One buffer, found by its place: assigning to it replaces the tensor."""

    def __init__(self, name: str, module: nn.Module, own_name: str) -> None:
        self.name = name
        self._module = module
        self._own_name = own_name
        self.note()

    @property
    def tensor(self) -> Tensor | None:
        """None once the module has dropped it."""
        tensor: Tensor | None = getattr(self._module, self._own_name, None)
        return tensor

    def note(self) -> None:
        self._noted = self.tensor
        self._version = None if self._noted is None else tensor_version(self._noted)

    def written(self) -> bool:
        tensor = self.tensor
        if tensor is not self._noted:
            return True
        return tensor is not None and tensor_version(tensor) != self._version


def broadcast_tensors(session: Session, tensors: Sequence[Tensor], src: int = 0) -> None:
    """Gives every rank the values that rank `src` has, in as few collectives as reasonable.

    Collective. Takes every dtype, empty, non-contiguous and expanded tensors; the same shapes and
    dtypes on all ranks. The tensors of rank `src` are read only.
    """
    pack: list[Tensor] = []
    pack_bytes = 0
    with torch.no_grad():
        for tensor in tensors:
            if tensor.layout != torch.strided:
                value = session.broadcast_object(tensor.detach().cpu(), src)
                if session.rank != src:
                    # Not of a detached one, which would get indices and values of its own.
                    tensor.copy_(value)
                continue
            target = _without_repetition(tensor.detach())
            bytes_needed = target.numel() * target.element_size()
            if bytes_needed >= _PACKED_BELOW_BYTES and target.is_contiguous():
                session.broadcast(target, src)
            elif bytes_needed:
                pack.append(target)
                pack_bytes += bytes_needed
                if pack_bytes >= _PACK_BYTES:
                    _broadcast_pack(session, pack, src)
                    pack, pack_bytes = [], 0
        if pack:
            _broadcast_pack(session, pack, src)


def _broadcast_pack(session: Session, tensors: Sequence[Tensor], src: int) -> None:
    if session.rank == src:
        packed = torch.cat([_as_bytes(tensor) for tensor in tensors])
        session.broadcast(packed, src)
        return
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    session.broadcast(packed, src)
    for tensor, piece in zip(tensors, packed.split(sizes), strict=True):
        # Cloned, because a piece may start at an address that the dtype does not allow.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)


def _without_repetition(tensor: Tensor) -> Tensor:
    """The elements an expanded tensor really has: the others cannot be written to."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for our, their in zip(ours, theirs, strict=False):
        if our != their:
            return our, their
    shorter = min(len(ours), len(theirs))
    return (
        ours[shorter] if len(ours) > shorter else "nothing more",
        theirs[shorter] if len(theirs) > shorter else "nothing more",
    )


__all__ = ["ModuleState", "broadcast_tensors", "require_content"]
