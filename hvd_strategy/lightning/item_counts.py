"""Means over items (tokens, samples) in the Trainer: what a step reports, and what follows from it.

A training step says how many items its loss is the mean of. From that the loss is weighted just
before it is differentiated, after everything that looks at it; Lightning's division by
`accumulate_grad_batches` is undone there, because the reduction divides by the number of items of
all ranks and batches of the window, however many batches these are. What the step logs is weighted
in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_strategy.contribution import require_items
from hvd_strategy.engine import GradientReducer
from hvd_strategy.errors import HvdError
from hvd_strategy.lightning.logged_items import LoggedItems
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.session import Session

KEY = "num_items"


class ItemCounts:
    """What the steps of this rank report, during one run of a Trainer.

    Args:
        trainer: the Trainer, set up.
        rank: this rank.
    """

    def __init__(self, trainer: Any, rank: int) -> None:
        self._trainer = trainer
        self._rank = rank
        self._reducer: GradientReducer | None = None
        self._items: float | None = None  # of the running step
        self._skipped = False
        self._first = True  # no rank has told of any items
        self._replacements = Replacements()
        self._logged = LoggedItems(trainer, lambda: self._items)

    def attach_to_fit(self, plugin: Any, reducer: GradientReducer) -> None:
        """Weights what is differentiated from now on.

        Args:
            plugin: the Trainer's precision plugin; of this one object, `backward` is replaced.
            reducer: takes the mean over items.
        """
        self._reducer = reducer
        self._replacements.around(plugin, "backward", self._weigh)

        def without_result(run: Callable[..., Any], *args: Any) -> Any:
            output = run(*args)
            return {} if self._skipped else output

        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
        self._replacements.around(automatic, "run", without_result)

    def detach(self) -> None:
        """Gives plugin, loops and results their own functions back. Idempotent."""
        self._replacements.detach()
        self._logged.detach()

    # ---- what a step reports

    @property
    def items(self) -> float | None:
        """What the running or the last step has reported; None before it has."""
        return self._items

    def set_items(self, items: Any) -> None:
        """See `HvdStrategy.set_items`."""
        self._items = _number(items)

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a training step, which has to report unless it returns None."""
        output = self._run(step, *args, **kwargs)
        automatic = self._trainer.lightning_module.automatic_optimization
        self._skipped = output is None and automatic
        if self._skipped:
            # No items, and so no say. Where nobody votes, in a world of one, a loss without a graph
            # gets to where it is weighted, and the window's other batches count.
            self._items = 0.0
            output = torch.zeros(())
        elif self._items is None and automatic:
            raise HvdError(
                f"Rank {self._rank}: the training step did not report how many items its loss is "
                f"the mean of, which gradient_average='items' needs. Return it under the key "
                f"'{KEY}' beside 'loss', or call self.trainer.strategy.set_items(n) in the step."
            )
        self._logged.settle()
        return output

    def evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step of validation or test, which may report, for what it logs."""
        output = self._run(step, *args, **kwargs)
        self._logged.settle()
        return output

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._items = None
        self._logged.begin()
        output = step(*args, **kwargs)
        if isinstance(output, Mapping) and KEY in output:
            returned = _number(output[KEY])
            if self._items not in (None, returned):
                raise HvdError(
                    f"Rank {self._rank}: the step returned {KEY}={returned:g}, but set_items() was "
                    f"called with {self._items:g}. Report the number of items in one way."
                )
            self._items = returned
        return output

    @property
    def skipped(self) -> bool:
        """Whether the last training step returned None, in automatic optimization."""
        return self._skipped

    def begin_idle_step(self) -> None:
        """For a step that this rank has no batch for."""
        self._items = 0.0
        self._skipped = True

    def tell_first(self, session: Session) -> None:
        """Lets the ranks know how many items there are, before the first backward. Collective.

        To be called after a training step in automatic optimization, before its backward. Does
        nothing once any rank has had some.
        """
        if not self._first:
            return
        told = session.exchange("items of the first batch", [self._items])
        items = sum(number for (number,) in told)
        self._first = not items
        if items:
            assert self._reducer is not None
            self._reducer.expect_items(items / session.size * self._divided_by())

    # ---- what follows

    def _weigh(
        self,
        backward: Callable[..., Any],
        loss: Tensor,
        model: Any,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self._items is None:
            raise HvdError(
                f"Rank {self._rank}: manual_backward() does not know how many items its loss is "
                "the mean of, which gradient_average='items' needs. Call "
                "self.trainer.strategy.set_items(n) before it."
            )
        assert self._reducer is not None
        self._reducer.weigh_backward(
            loss,
            self._items,
            lambda weighted: backward(weighted, model, optimizer, *args, **kwargs),
            times=self._divided_by(),
        )

    def _divided_by(self) -> float:
        """What Lightning has divided the loss by."""
        automatic = self._trainer.lightning_module.automatic_optimization
        return float(self._trainer.accumulate_grad_batches) if automatic else 1.0

    def after_closure(self, optimizer: Optimizer, closure: Callable[[], Any], scaler: Any) -> Any:
        """Runs Lightning's closure. A step in which no rank has items is none.

        Returns:
            What the closure returns; None, where a scaler of the loss must not step.
        """
        loss = closure()
        assert self._reducer is not None
        if self._reducer.total_weight:
            return loss
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # zeros, where the user clears them so: not a gradient of 0
        if scaler is not None:
            return None
        return torch.zeros(()) if loss is None else loss  # LBFGS takes no None

    def mean_loss(self, loss: Tensor, sum_of_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean over the items of all ranks, of what Lightning's closure returned."""
        assert self._reducer is not None
        total = self._reducer.total_weight
        weight = (self._items or 0.0) * self._divided_by()
        # Not multiplied by 0: the loss of no items may be nan.
        weighted = loss.double() * weight if weight else torch.zeros((), dtype=torch.float64)
        summed = sum_of_ranks(weighted)
        return (summed / total if total else summed).to(loss.dtype)


def _number(items: Any) -> float:
    if isinstance(items, Tensor) and items.numel() == 1:
        items = items.item()
    require_items(KEY, items)
    return float(items)


__all__ = ["ItemCounts"]
