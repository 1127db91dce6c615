"""Sparse gradients, as `nn.Embedding(sparse=True)` gives them: averaged, and still sparse.

They do not go through buckets: how many rows a rank has differs from step to step. A rank that has
some says so in the record that ends its backward; then, and only then, the ranks tell each other
which parameters and how many rows, gather indices and values of all ranks, and add them up in the
order of the ranks, so that all of them hold the same bits. The result is coalesced.

A parameter whose gradient is sparse on some ranks and dense on others gets a dense one on all.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_strategy.errors import MismatchError
from hvd_strategy.parameters import zeros
from hvd_strategy.session import Session

# What gradients are added up in, by default and where fp64 is asked for.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_WIDEST = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class SparseGradients:
    """Reduces what the core leaves in place.

    Args:
        session: The ranks.
        as_dense: Whether to turn sparse gradients into dense ones, which the core reduces.
        sum_in_f64: Whether to add up in fp64.

    Attributes:
        pending: Numbers of the parameters with a sparse gradient in this backward.
        as_dense: As given.
    """

    def __init__(self, session: Session, as_dense: bool, sum_in_f64: bool = False) -> None:
        self._session = session
        self._wide = _WIDEST if sum_in_f64 else _WIDE
        self.as_dense = as_dense
        self.pending: set[int] = set()

    def reduce(
        self, parameters: Sequence[Tensor], names: Sequence[str], factor: float = 1.0
    ) -> list[int]:
        """Puts the mean into `p.grad` of all parameters that are pending on any rank. Collective.

        Args:
            parameters: All parameters, by number.
            names: Their names.
            factor: What this rank's gradients are multiplied by first.

        Returns:
            Their numbers.

        Raises:
            MismatchError: A parameter has another shape or dtype on another rank; on every rank.
        """
        exchange = self._session.communicator.exchange
        pending: set[int] = set()
        for record in exchange(pickle.dumps(sorted(self.pending))):
            pending.update(pickle.loads(record))
        indices = sorted(pending)
        gradients = {index: _coalesced(parameters[index].grad) for index in indices}
        if factor != 1.0:
            gradients = {
                index: gradient if gradient is None else gradient * factor
                for index, gradient in gradients.items()
            }
        own = [_describe(parameters[index], gradients[index]) for index in indices]
        by_rank = [pickle.loads(record) for record in exchange(pickle.dumps(own))]
        of_index = {index: [of[n] for of in by_rank] for n, index in enumerate(indices)}
        self._require_same(of_index, names)
        sparse = {}
        for index, described in of_index.items():
            dimensions = {described_one[2] for described_one in described} - {None}
            if len(dimensions) == 1 and 0 not in dimensions:
                sparse[index] = dimensions.pop()
            else:
                parameters[index].grad = self._dense_mean(parameters[index], factor)
        for index, mean in self._sparse_means(parameters, gradients, sparse, of_index).items():
            parameters[index].grad = mean
        self.pending.clear()
        return indices

    def _require_same(self, of_index: dict[int, list[Any]], names: Sequence[str]) -> None:
        for index, described in of_index.items():
            for rank, (shape, dtype, _, _) in enumerate(described):
                if (shape, dtype) != described[0][:2]:
                    raise MismatchError(
                        f"Rank {self._session.rank}: the sparse gradient of '{names[index]}' is a "
                        f"{described[0][0]} {described[0][1]} on rank 0, but a {shape} {dtype} on "
                        f"rank {rank}. All ranks have to build the same model."
                    )

    def _dense_mean(self, parameter: Tensor, factor: float) -> Tensor:
        gradient = zeros(parameter)
        if parameter.grad is not None:
            gradient.copy_(parameter.grad.to_dense())
        # Other types than these the session adds up in their own precision at least.
        wide = gradient.to(self._wide.get(gradient.dtype, gradient.dtype))
        if factor != 1.0:
            wide.mul_(factor)
        return gradient.copy_(self._session.allreduce(wide, "mean"))

    def _sparse_means(
        self,
        parameters: Sequence[Tensor],
        gradients: dict[int, Tensor | None],
        sparse: dict[int, int],
        of_index: dict[int, list[Any]],
    ) -> dict[int, Tensor]:
        """`sparse`: number of sparse dimensions by parameter."""
        if not sparse:
            return {}
        rows = {index: [entry[3] for entry in of_index[index]] for index in sparse}
        places = self._gather(
            [_indices(gradients[index], sparse[index]) for index in sparse],
            [[count * sparse[index] for count in rows[index]] for index in sparse],
        )
        values: dict[int, list[Tensor]] = {}
        for dtype in sorted({parameters[index].dtype for index in sparse}, key=str):
            chosen = [index for index in sparse if parameters[index].dtype is dtype]
            widths = [math.prod(parameters[index].shape[sparse[index] :]) for index in chosen]
            found = self._gather(
                [_values(gradients[index], dtype) for index in chosen],
                [
                    [count * width for count in rows[index]]
                    for index, width in zip(chosen, widths, strict=True)
                ],
            )
            values.update(zip(chosen, found, strict=True))
        return {
            index: _mean(
                parameters[index], sparse[index], rows[index], place, values[index], self._wide
            )
            for index, place in zip(sparse, places, strict=True)
        }

    def _gather(self, own: list[Tensor], counts: list[list[int]]) -> list[list[Tensor]]:
        """Flat pieces of all ranks, by piece and rank, in one collective.

        `counts`: elements by piece and rank.
        """
        by_rank = self._session.allgather(torch.cat(own))
        pieces = [
            flat.split([of_piece[rank] for of_piece in counts]) for rank, flat in enumerate(by_rank)
        ]
        return [[of_rank[number] for of_rank in pieces] for number in range(len(own))]


def _coalesced(gradient: Tensor | None) -> Tensor | None:
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return gradient
    return gradient.detach().coalesce()


def _describe(parameter: Tensor, gradient: Tensor | None) -> tuple[Any, ...]:
    """Shape and dtype; number of sparse dimensions (None: no gradient, 0: a dense one); rows."""
    sparse_dim, rows = None, 0
    if gradient is not None:
        is_sparse = gradient.layout is torch.sparse_coo
        sparse_dim = gradient.sparse_dim() if is_sparse else 0
        rows = gradient.values().shape[0] if is_sparse else 0
    return tuple(parameter.shape), str(parameter.dtype), sparse_dim, rows


def _indices(gradient: Tensor | None, sparse_dim: int) -> Tensor:
    if gradient is None:
        return torch.empty(0, dtype=torch.int64)
    return gradient.indices().reshape(-1)


def _values(gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        return torch.empty(0, dtype=dtype)
    return gradient.values().resolve_conj().resolve_neg().reshape(-1)


def _mean(
    parameter: Tensor,
    sparse_dim: int,
    rows: list[int],
    places: list[Tensor],
    values: list[Tensor],
    wide: dict[torch.dtype, torch.dtype],
) -> Tensor:
    """Adds up the ranks' rows in their order; each rank has a row at most once."""
    shape, dtype = parameter.shape, parameter.dtype
    sizes = shape[:sparse_dim]
    keys = torch.cat([_flat_key(place.view(sparse_dim, -1), sizes) for place in places])
    known, targets = torch.unique(keys, return_inverse=True)
    total = torch.zeros((len(known), *shape[sparse_dim:]), dtype=wide.get(dtype, dtype))
    for count, target, value in zip(rows, targets.split(rows), values, strict=True):
        total.index_add_(0, target, value.view(count, *shape[sparse_dim:]).to(total.dtype))
    return torch.sparse_coo_tensor(
        torch.stack(torch.unravel_index(known, sizes)),
        (total * (1.0 / len(rows))).to(dtype),
        shape,
        is_coalesced=True,  # `unique` sorts
        check_invariants=False,
    )


def _flat_key(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    key = torch.zeros(indices.shape[1], dtype=torch.int64)
    for row, size in zip(indices, sizes, strict=True):
        key = key * size + row
    return key


__all__ = ["SparseGradients"]
