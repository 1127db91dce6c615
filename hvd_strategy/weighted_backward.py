"""Backward with a weight: means over items, ranks that count more than others, scaled losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hvd_strategy.arguments import require, require_kind, require_positive
from hvd_strategy.contribution import Contribution
from hvd_strategy.errors import HvdError
from hvd_strategy.parameter_table import ParameterTable
from hvd_strategy.session import Session

if TYPE_CHECKING:
    from hvd_strategy.grad_scaler import GradScaler


class WeightedBackward:
    """The part of GradientReducer that says what this rank's gradients count."""

    _core: Any
    _table: ParameterTable
    _session: Session
    _contribution: Contribution
    _flushes: int

    if TYPE_CHECKING:  # GradientReducer has it

        def _flush(self, flags: int = 0) -> None: ...

        def _require_open(self) -> None: ...

        @property
        def active(self) -> bool:
            """See GradientReducer."""

    def backward(self, loss: Tensor, items: float | None = None, **arguments: Any) -> None:
        """`loss.backward()`, with `gradient_average="items"` weighted by the number of items.

        Args:
            loss: The mean of the loss over the items of this rank in this micro-batch.
            items: How many that are; 0 where a rank has none, whose loss is not looked at.
            arguments: Those of `Tensor.backward`.

        Raises:
            ValueError: `items` is missing, or is no number of items, or is given where the average
                is that of the ranks.
            HvdError: Reduced gradients of the last step are kept; they are a mean already, to
                which no sum can be added.
        """
        require_kind(Tensor, "loss", loss, "a torch.Tensor")
        contribution = self._contribution
        if not contribution.by_items:
            if items is not None:
                raise ValueError(
                    f"items={items!r} is not accepted by a reducer with gradient_average='ranks': "
                    "create it with gradient_average='items'."
                )
            loss.backward(**arguments)
            return
        if items is None:
            raise ValueError(
                "items=None is not accepted with gradient_average='items': it takes the number of "
                "items that the loss is the mean of."
            )
        if not contribution.items:
            self._require_cleared()
        contribution.add_items(items)
        if items:
            contribution.in_weighted_backward = True
            try:
                (loss * items).backward(**arguments)
            finally:
                contribution.in_weighted_backward = False
        elif not self._core.local:
            self._flush()

    def _require_cleared(self) -> None:
        numbered = [(index, p) for index, p in enumerate(self._table.parameters)]
        for index, products in enumerate(self._core.known_products(numbered)):
            if products is not None:
                raise HvdError(
                    f"Rank {self._session.rank}: '{self._table.names[index]}' still has the "
                    "gradient of the last step, which is a mean over items, while a backward adds "
                    "a sum. Clear the gradients (optimizer.zero_grad()) after each step."
                )

    def attach_scaler(self, scaler: GradScaler | None) -> None:
        """Works together with a scaler from now on; called by `GradScaler.attach`."""
        fits = scaler is None or hasattr(scaler, "undoes_early")
        require(fits, "scaler", scaler, "a hvd_strategy.GradScaler, or None")
        self._contribution.attach_scaler(scaler)

    def set_scale(self, scale: float) -> None:
        """Tells by what the next loss is multiplied; called by `GradScaler.scale`."""
        require_positive("scale", scale)
        self._contribution.set_scale(scale)

    def set_weight(self, weight: float, factor: float | None = None) -> None:
        """Sets the weight of this rank in the mean of the next reduction; 1 otherwise.

        Args:
            weight: 0 or more; a rank with 0 takes part without a say. The ranks' gradients are
                multiplied by it, and their sum is divided by the sum of the weights.
            factor: What this rank's gradients are multiplied by instead of the weight: 1 for
                gradients that are a weighted sum already.
        """
        for name, value in (("weight", weight), ("factor", weight if factor is None else factor)):
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = fits and math.isfinite(value) and value >= 0
            require(fits, name, value, "a number from 0 on")
        self._contribution.set_weight(weight, factor)

    def join_backward(self) -> None:
        """Takes part in the reduction of a backward that this rank does not run. Collective.

        Local gradients of earlier backwards count. Does nothing inside of `no_sync`.
        """
        self._require_open()
        if self.active and not self._core.local:
            self._flush()

    def attach_notes(self, write: Callable[[], tuple[int, int]] | None) -> None:
        """Lets each rank tell all others two numbers (64 bits, unsigned) with each reduction.

        Args:
            write: Called just before this rank tells the others what it has; None for no notes.
        """
        require(
            write is None or callable(write), "write", write, "a function that returns two numbers"
        )
        self._contribution.attach_notes(write)

    @property
    def notes(self) -> list[tuple[int, int]]:
        """What the ranks told in the last reduction, by rank; empty before the first."""
        told: list[tuple[int, int]] = self._core.notes if self.active else []
        return told

    @property
    def reductions(self) -> int:
        """How many reductions there have been, failed ones included."""
        return self._flushes

    @property
    def averages_items(self) -> bool:
        """Whether the mean is one over items."""
        return self._contribution.by_items

    @property
    def unscaled_early(self) -> bool:
        """Whether the last reduction has undone the scale of the loss."""
        return self._contribution.unscaled_early
