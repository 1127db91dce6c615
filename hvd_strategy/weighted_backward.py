"""Backward with a weight: means over items, ranks that count more than others, scaled losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hvd_strategy.arguments import require, require_kind, require_positive
from hvd_strategy.contribution import Contribution, require_items
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

        def _unreduced(self) -> list[int]: ...

        def _fail(self, text: str) -> None: ...
        def _require_open(self) -> None: ...

        @property
        def active(self) -> bool:
            """See GradientReducer."""

    def backward(self, loss: Tensor, items: float | None = None, **arguments: Any) -> None:
        """`loss.backward()`, with `gradient_average="items"` weighted by the number of items.

        Args:
            loss: The mean of the loss over the items of this rank in this micro-batch.
            items: How many that are. Where a rank has none (0), its loss has no say, whatever it
                is; its backward runs only for the sake of collectives in it.
            arguments: Those of `Tensor.backward`.

        Raises:
            ValueError: `items` is missing, or is no number of items, or is given where the average
                is that of the ranks.
            HvdError: Reduced gradients of the last step are kept; they are a mean already, to
                which no sum can be added.
        """
        self.weigh_backward(loss, items, lambda weighted: weighted.backward(**arguments))

    def weigh_backward(
        self,
        loss: Tensor,
        items: float | None,
        run: Callable[[Tensor], object],
        times: float = 1.0,
    ) -> None:
        """Has `run` differentiate the weighted loss; for fronts that have a backward of their own.

        Args:
            loss: As for `backward`.
            items: As for `backward`.
            run: Called with the weighted loss. Not called where there are no items and no graph.
            times: Another factor, for a loss that has been divided by it.

        Raises:
            ValueError: As for `backward`.
            HvdError: As for `backward`.
        """
        contribution = self._contribution
        require_kind(Tensor, "loss", loss, "a torch.Tensor")
        require(callable(run), "run", run, "a function of the weighted loss")
        require_positive("times", times)
        if not contribution.by_items:
            if items is not None:
                raise ValueError(
                    f"items={items!r} is not accepted by a reducer with gradient_average='ranks': "
                    "create it with gradient_average='items'."
                )
            run(loss)
            return
        if items is None:
            raise ValueError(
                "items=None is not accepted with gradient_average='items': it takes the number of "
                "items that the loss is the mean of."
            )
        require_items("items", items)
        if not items:
            self._backward_without_say(loss, run)
            return
        if contribution.items and not self._unreduced():
            contribution.items = 0.0  # the gradients of the batches before have been cleared
        if not contribution.items:
            self._require_cleared()
        weight = contribution.add_items(items) * times
        contribution.in_weighted_backward = True
        self._core.local = contribution.stays_local
        try:
            run(loss * weight)
        finally:
            self._core.local = False
            contribution.in_weighted_backward = False

    def expect_items(self, items: float) -> None:
        """Tells, before the first backward, about how many items a rank has in a reduction.

        Later on the last reduction tells. Without it the first losses are multiplied by their
        number of items, with which 16-bit gradients may overflow. The same on all ranks.

        Args:
            items: The number, above 0.

        Raises:
            TypeError: It is none.
        """
        require_positive("items", items)
        self._contribution.expect_items(items)

    def _backward_without_say(self, loss: Tensor, run: Callable[[Tensor], object]) -> None:
        """Runs a backward for the sake of collectives in it, drops its gradients, and reduces.

        A layer such as SyncBatchNorm waits for all ranks in its backward. The gradients may well
        be nan, and must not get into those of the other batches.
        """
        synchronises = not self._contribution.stays_local
        if loss.requires_grad:
            before = set(self._core.dirty())
            parameters = list(self._table.parameters)
            kept = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            self._core.local = True
            try:
                run(loss * 0.0)
            except BaseException:
                if synchronises:
                    self._fail("an exception inside backward; see the output of that rank")
                raise
            finally:
                self._core.local = False
                for index in set(self._core.dirty()) - before:
                    self._core.set_dirty(index, False)
                for parameter, gradient in zip(parameters, kept, strict=True):
                    parameter.grad = gradient
        if synchronises:
            self._flush()

    @property
    def total_weight(self) -> float:
        """Sum of the ranks' weights in the last reduction: with "items", the number of items."""
        return 0.0 if self._core is None else float(self._core.total_weight)

    @property
    def _stays_local(self) -> bool:
        return bool(self._core.local) or self._contribution.stays_local

    def _stay_local(self, local: bool) -> None:
        if self._contribution.by_items:
            # The core is told in weighted backwards only, so that it notices all others.
            self._contribution.stays_local = local
        else:
            self._core.local = local

    def _require_cleared(self) -> None:
        numbered = [(index, p) for index, p in enumerate(self._table.parameters)]
        for index, products in enumerate(self._core.known_products(numbered)):
            if products is not None:
                raise HvdError(
                    f"Rank {self._session.rank}: '{self._table.names[index]}' still has the "
                    "gradient of the last reduction, a mean over items, while a backward adds a "
                    "sum. Clear the gradients of all optimizers (optimizer.zero_grad()) after "
                    "each step, and add losses of one step up before a single backward."
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
        if self.active and not self._stays_local:
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
    def averages_items(self) -> bool:
        """Whether the mean is one over items."""
        return self._contribution.by_items

    @property
    def unscaled_early(self) -> bool:
        """Whether the last reduction has undone the scale of the loss."""
        return self._contribution.unscaled_early
