"""The part of the strategy that Lightning's loops call: steps, batches, and the ends of a loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hvd_strategy.engine import GradientReducer
from hvd_strategy.lightning.attachments import Attachments
from hvd_strategy.lightning.graceful_stop import GracefulStop
from hvd_strategy.lightning.module_state import ModuleState
from hvd_strategy.lightning.replica_check import ReplicaCheck
from hvd_strategy.lightning.step_reports import ReportingStrategy
from hvd_strategy.lightning.step_votes import StepVotes
from hvd_strategy.lightning.uneven_inputs import UnevenInputs


class LoopStrategy(ReportingStrategy):
    """Training and evaluation, step by step, with what the set-up of the run has made."""

    _reducer: GradientReducer | None = None
    _state: ModuleState | None = None
    _stop: GracefulStop | None = None
    _replica_check: ReplicaCheck | None = None
    _attachments: Attachments | None = None
    _votes: StepVotes | None = None
    _inputs: UnevenInputs | None = None
    _gradients_stay_local = False

    # ---- optimizer steps

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Steps; an optimizer that searches along the loss is given the mean over the ranks.

        With its own rank's loss it would decide differently on each rank.
        """
        if self._voting():
            closure = partial(self._count_votes, optimizer, closure)
        closure = self._after_closure(optimizer, closure)
        if isinstance(optimizer, torch.optim.LBFGS) and self._session is not None:
            closure = partial(self._mean_of_closure, closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _mean_of_closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if not isinstance(loss, Tensor):
            return loss
        if self._item_counts is not None:
            return self._item_counts.mean_loss(loss, partial(self.reduce, reduce_op="sum"))
        mean = self.reduce(loss.detach().clone())
        return mean if self._votes is None else mean * self._votes.factor

    # ---- votes that travel with the gradients

    def _voting(self) -> bool:
        """Whether ranks vote in their steps: where there are several, and Lightning runs them."""
        return (
            self._votes is not None
            and self._attachments is not None
            and self.lightning_module is not None
            and self.lightning_module.automatic_optimization
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the training step; None is accepted from it in automatic optimization."""
        inputs = self._inputs
        if inputs is None or not inputs.absent:
            output = super().training_step(*args, **kwargs)
        elif inputs.idle:
            output = None
            if self._item_counts is not None:
                self._item_counts.begin_idle_step()
        else:
            with inputs.among_active():
                output = super().training_step(*args, **kwargs)
        self._tell_first_items()
        if not self._voting():
            return output
        assert self._votes is not None
        if self._item_counts is not None and self._item_counts.skipped:
            output = None
        return self._votes.stand_in(output, self._gradients_stay_local)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiates the loss, as it counts among those of the ranks that have a batch."""
        if self._voting():
            assert self._votes is not None
            closure_loss = self._votes.weighted(closure_loss, self._gradients_stay_local)
        if self._inputs is None or not self._inputs.absent:
            return super().backward(closure_loss, *args, **kwargs)
        with self._inputs.among_active():
            return super().backward(closure_loss, *args, **kwargs)

    def _count_votes(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        assert self._votes is not None
        loss = closure()
        self._votes.join()
        return self._votes.count(optimizer, loss)

    def _after_joined_backward(self) -> None:
        """Calls `on_after_backward`, as Lightning does behind a backward."""
        assert self.lightning_module is not None
        self.precision_plugin.post_backward(torch.zeros(()), self.lightning_module)

    # ---- ranks with different numbers of batches

    @property
    def idle(self) -> bool:
        """Whether this rank has run out of batches in the running training step."""
        return self._inputs is not None and self._inputs.idle

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Moves the batch; what stands for one on a rank that has run out stays as it is."""
        return batch if self.idle else super().batch_to_device(batch, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._inputs is None:
            return super().validation_step(*args, **kwargs)
        with self._inputs.evaluating():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._inputs is None:
            return super().test_step(*args, **kwargs)
        with self._inputs.evaluating():
            return super().test_step(*args, **kwargs)

    # ---- the course of the loops

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps gradients local in the block: the earlier batches of an accumulation."""
        self._gradients_stay_local = True
        try:
            with nullcontext() if self._reducer is None else self._reducer.no_sync():
                yield
        finally:
            self._gradients_stay_local = False

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Makes buffers equal that this batch may read, and looks whether training is to end."""
        super().on_train_batch_start(batch, batch_idx)
        self._is_in(f"the forward of batch {batch_idx}")
        if self._state is not None:
            self._state.broadcast_written_buffers()
            if self._inputs is not None:
                # Whoever trains on this batch has the statistics of it.
                self._state.source = self._inputs.first_active
        if self._replica_check is not None:
            self._replica_check.on_batch_start()
        if self._attachments is not None:
            self._attachments.on_train_batch_start(batch)
        if self._stop is not None:
            self._stop.on_batch_start()

    @override
    def on_validation_start(self) -> None:
        """Lets all ranks know of a SIGTERM that one received."""
        super().on_validation_start()
        self._is_in("validation")
        if self._reducer is not None and self._stop is not None:
            self._stop.reach_point()

    @override
    def on_validation_end(self) -> None:
        """Ends training here on all ranks, if one received SIGTERM meanwhile."""
        super().on_validation_end()
        self._is_in("what follows validation")
        if self._reducer is not None and self._stop is not None:
            self._stop.reach_point()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._is_in("the test")

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._is_in("prediction")

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._is_in("backward")

    @override
    def on_train_end(self) -> None:
        """Ends all ranks by a SIGTERM that one received."""
        super().on_train_end()
        self._is_in("the end of training")
        if self._replica_check is not None:
            self._replica_check.on_train_end()
        if self._stop is not None and self._stop.reach_point():
            raise self._tree.pytorch_name("utilities.exceptions", "SIGTERMException")


__all__ = ["LoopStrategy"]
