"""The part of the strategy in which steps report: how many items they had, and their norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from hvd_strategy.engine import GradientReducer
from hvd_strategy.errors import HvdError
from hvd_strategy.lightning.collective_strategy import CollectiveStrategy
from hvd_strategy.lightning.grad_norm import GradNorm
from hvd_strategy.lightning.item_counts import ItemCounts


class ReportingStrategy(CollectiveStrategy):
    """Means over items, and the norm of the gradients."""

    _options: dict[str, Any]
    _item_counts: ItemCounts | None = None
    _grad_norm: GradNorm | None = None

    # ---- for users

    def set_items(self, items: float) -> None:
        """Reports how many items (tokens, samples) the loss of the running step is the mean of.

        With `gradient_average="items"`, in place of the key "num_items" in what the step returns.
        In manual optimization it is called before `manual_backward`, and stands for all that follow
        in the step until it is called again.

        Args:
            items: 0 or more, whole or not; 0: this rank has no items in this micro-batch, and its
                loss has no say. A tensor of one element will do.

        Raises:
            ValueError: it is no number of items.
            HvdError: the mean is taken over the ranks, or nothing runs.
        """
        if self._item_counts is None:
            raise HvdError(
                "set_items() tells what the mean over items is taken of. Use it inside of a step, "
                "with HvdStrategy(gradient_average='items')."
            )
        self._item_counts.set_items(items)

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the gradients of the last optimizer step; needs `log_grad_norm=True`.

        That of the unscaled mean gradients before clipping, the same number on all ranks; with
        several optimizers of the one that has stepped last; inf or nan where a scaler of the loss
        has skipped the step. It can be read from the step's clipping on (in
        `on_train_batch_end`, say) until the next one or the end of the fit; None otherwise.
        """
        return None if self._grad_norm is None else self._grad_norm.value

    # ---- life

    def _begin_reports(self, trainer: Any) -> None:
        if self._options["gradient_average"] == "items":
            self._item_counts = ItemCounts(trainer, self.global_rank)

    def _attach_reports(self, trainer: Any, reducer: GradientReducer) -> None:
        if self._item_counts is not None:
            self._item_counts.attach_to_fit(self.precision_plugin, reducer)
        if self._options["log_grad_norm"]:
            self._grad_norm = GradNorm(trainer, self.precision_plugin, reducer, self._tree)

    def _end_reports(self) -> None:
        for attached in (self._grad_norm, self._item_counts):
            if attached is not None:
                attached.detach()
        self._grad_norm = self._item_counts = None

    def _items_of_step(self) -> float | None:
        return None if self._item_counts is None else self._item_counts.items

    def _tell_first_items(self) -> None:
        module = self.lightning_module
        if self._item_counts is None or module is None or not module.automatic_optimization:
            return
        assert self._session is not None
        self._item_counts.tell_first(self._session)

    # ---- what Lightning calls

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the training step, which may have to report."""
        if self._item_counts is None:
            return super().training_step(*args, **kwargs)
        return self._item_counts.training_step(super().training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the validation step, which may report."""
        if self._item_counts is None:
            return super().validation_step(*args, **kwargs)
        return self._item_counts.evaluation_step(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the test step, which may report."""
        if self._item_counts is None:
            return super().test_step(*args, **kwargs)
        return self._item_counts.evaluation_step(super().test_step, *args, **kwargs)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Steps, and logs the norm with which it did."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._grad_norm is not None:
            self._grad_norm.step_is_over(optimizer)
        return result

    def _after_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        module = self.lightning_module
        if self._item_counts is None or module is None or not module.automatic_optimization:
            return closure
        scaler = getattr(self.precision_plugin, "scaler", None)
        return partial(self._item_counts.after_closure, optimizer, closure, scaler)


__all__ = ["ReportingStrategy"]
