"""What a GradientReducer does with gradients that are reduced: norm, clipping, undoing a scale."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_strategy._private_api import set_versions, tensor_version
from hvd_strategy.arguments import require, require_kind, require_positive
from hvd_strategy.contribution import Contribution
from hvd_strategy.gradient_passes import Products, clip_factor, measure, rescale, total_norm
from hvd_strategy.parameter_table import ParameterTable

# Apart from the numbers that the core gives to what it has reduced.
_versions = itertools.count((1 << 30) + (1 << 29))


class ReducedGradients:
    """The part of GradientReducer that works on finished gradients, without communication."""

    _core: Any
    _table: ParameterTable
    _contribution: Contribution
    _gradient_norms: bool  # whether edits that leave no trace are ruled out
    _given: list[Tensor]  # the parameters at the creation
    _rescaled: dict[int, tuple[int, int, Products]]

    if TYPE_CHECKING:

        @property
        def active(self) -> bool:
            """See GradientReducer."""

        def join(self, optimizer: Optimizer) -> None:
            """See GradientReducer."""

    def grad_norm(self, of: Optimizer | Iterable[Tensor] | None = None) -> float:
        """The 2-norm of the reduced gradients together, as if they were one vector.

        The same number on every rank. With `gradient_norms=True` it is known from the reduction,
        except for gradients that were written to since.

        Args:
            of: An optimizer, whose parameters count, or parameters; all of this reducer's when not
                given.
        """
        products, _ = self._measure(self._chosen(of))
        return total_norm(products)

    def clip_grad_norm_(self, of: Optimizer | Iterable[Tensor] | None, max_norm: float) -> float:
        """Multiplies the gradients so that their norm is no more than `max_norm`.

        As `torch.nn.utils.clip_grad_norm_`, with the norm known from the reduction where it can be,
        and without a pass over the gradients where it is below the limit.

        Args:
            of: see `grad_norm`.
            max_norm: The largest norm, 0 or more.

        Returns:
            The norm before.

        Raises:
            ValueError: `max_norm` is not a number from 0 on.
        """
        fits = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
        if not fits or not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm!r} is not accepted: it takes a number from 0 on.")
        products, gradients = self._measure(self._chosen(of))
        norm = total_norm(products)
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            rescale(gradients, factor)
        return norm

    def unscale_(self, optimizer: Optimizer, factor: float) -> bool:
        """Multiplies the optimizer's gradients by `factor`, unless their scale is undone already.

        Returns:
            Whether one of them holds an inf or a nan; the same on all ranks.
        """
        require_kind(Optimizer, "optimizer", optimizer, "a torch.optim.Optimizer")
        require_positive("factor", factor)
        numbered = self._chosen(optimizer)
        if self._contribution.unscaled_early:
            factor = 1.0
        if factor == 1.0:
            products, _ = self._measure(numbered)
            return not all(finite for _, finite in products)
        numbered = [(index, parameter) for index, parameter in numbered if _has_gradient(parameter)]
        gradients = [parameter.grad for _, parameter in numbered if parameter.grad is not None]
        products = rescale(gradients, factor)
        if self._gradient_norms:
            self._remember(numbered, gradients, products)
        return not all(finite for _, finite in products)

    def scale_kept(self, scale: float) -> None:
        """Gives gradients whose scale was undone in the reduction a scale again.

        For gradients that are kept while a loss with a scale adds to them.
        """
        require_positive("scale", scale)
        if not self._contribution.unscaled_early:
            return
        self._contribution.unscaled_early = False
        kept = [p.grad for p in self._table.parameters if p.grad is not None]
        if kept:
            rescale(kept, scale)

    def _chosen(self, of: Optimizer | Iterable[Tensor] | None) -> list[tuple[int | None, Tensor]]:
        if isinstance(of, Optimizer):
            self.join(of)
            parameters = [p for group in of.param_groups for p in group["params"]]
        elif of is None:
            parameters = list(self._table.parameters) if self.active else list(self._given)
        else:
            accepts = "an optimizer, parameters, or None for all parameters"
            require(isinstance(of, Iterable) and not isinstance(of, str), "of", of, accepts)
            parameters = list(of)
            require(all(isinstance(p, Tensor) for p in parameters), "of", of, accepts)
        if not self.active:
            return [(None, parameter) for parameter in parameters]
        return [(self._table.index_of(parameter), parameter) for parameter in parameters]

    def _measure(
        self, numbered: Sequence[tuple[int | None, Tensor]]
    ) -> tuple[list[Products], list[Tensor]]:
        known = {}
        if self._rescaled:
            for index, parameter in numbered:
                entry = None if index is None else self._rescaled.get(index)
                gradient = parameter.grad
                if (
                    entry is not None
                    and gradient is not None
                    and entry[:2] == (gradient.data_ptr(), tensor_version(gradient))
                ):
                    known[id(parameter)] = entry[2]
        core = self._core if self.active and self._gradient_norms else None
        return measure(core, numbered, known)

    def _remember(
        self,
        numbered: Sequence[tuple[int | None, Tensor]],
        gradients: Sequence[Tensor],
        products: Sequence[Products],
    ) -> None:
        version = next(_versions)
        dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
        set_versions(dense, version)
        self._rescaled.clear()
        for (index, _), gradient, of in zip(numbered, gradients, products, strict=True):
            if index is not None and gradient.layout is torch.strided:
                self._rescaled[index] = (gradient.data_ptr(), version, of)


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None
