"""What the strategy attaches to a Trainer for one run, where Lightning has no hook for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from hvd_strategy._private_api import (
    lightning_checkpoint_connector,
    lightning_evaluation_loops,
    lightning_result_collections,
)
from hvd_strategy.engine import GradientReducer
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.data_shards import DataShards
from hvd_strategy.lightning.logged_metrics import LoggedMetrics
from hvd_strategy.lightning.metric_states import MetricStates
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.lightning.step_votes import StepVotes, accepting_skipped
from hvd_strategy.lightning.uneven_inputs import UnevenInputs
from hvd_strategy.session import Session


class Attachments:
    """Everything attached to one Trainer, until `detach`.

    Args:
        trainer: the Trainer, set up.
        module: the model of the run.
        session: the ranks, more than one.
        tree: the Lightning package of the Trainer.
        together: whether the ranks can still meet.
        data: what each rank reads.
        inputs: which ranks have a batch.
        items: the number of items that the running step has reported; None where steps do not.
    """

    def __init__(
        self,
        trainer: Any,
        module: nn.Module,
        session: Session,
        tree: ClassTree,
        together: Callable[[], bool],
        data: DataShards,
        inputs: UnevenInputs,
        items: Callable[[], float | None],
    ) -> None:
        self._replacements = Replacements()
        self._metrics = LoggedMetrics(trainer, session, tree, together, items)
        self._states = MetricStates(module)
        self._data = data
        self._inputs = inputs
        self._took_part = False  # in any step of this epoch, as far as this run makes it
        for loop, method, results in lightning_evaluation_loops(trainer):
            end_epoch = partial(self._end_evaluation, results)
            self._replacements.before(loop, method, self._data.compare_draws, end_epoch)

    def _end_evaluation(self, results: Any) -> None:
        self._metrics.end_epoch(results, self._inputs.had_batches_to_evaluate())

    def attach_to_fit(
        self,
        trainer: Any,
        broadcast_buffers: Callable[[], None],
        votes: StepVotes,
        reducer: GradientReducer,
    ) -> None:
        """Adds what only a fit needs.

        Args:
            trainer: the Trainer.
            broadcast_buffers: makes the buffers equal. Called before any callback can look at the
                model: at the start of a validation, at the end of an epoch and of the training, and
                where the contents of a checkpoint are collected.
            votes: what this rank tells the others with its gradients.
            reducer: what reduces these.
        """
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        before, around = self._replacements.before, self._replacements.around
        training, *_ = lightning_result_collections(trainer)

        def end_epoch() -> None:
            took_part, self._took_part = self._took_part, False
            self._metrics.end_epoch(training, took_part)

        before(epoch.val_loop, "on_run_start", broadcast_buffers)
        before(fit, "on_advance_end", broadcast_buffers, end_epoch)
        before(fit, "on_run_end", broadcast_buffers)
        before(lightning_checkpoint_connector(trainer), "dump_checkpoint", broadcast_buffers)

        def automatic_step(run: Callable[..., Any], *args: Any) -> Any:
            votes.begin_batch()
            self._metrics.begin_step()
            output = run(*args)
            # Where the user's code called the closure without stepping.
            votes.join()
            self._took_part |= not votes.skipped
            self._inputs.learn_from_reduction(reducer)
            absent = bool(self._inputs.absent)
            self._metrics.end_step(votes.skipped, votes.logged, training, absent, True)
            return output

        def manual_step(run: Callable[..., Any], *args: Any) -> Any:
            self._metrics.begin_step()
            output = run(*args)
            self._took_part = True
            self._inputs.learn_from_reduction(reducer)
            self._metrics.end_step()
            return output

        automatic = epoch.automatic_optimization
        accepting = accepting_skipped(automatic.output_result_cls)
        self._replacements.put(automatic, "output_result_cls", accepting)
        around(automatic, "run", automatic_step)
        around(epoch.manual_optimization, "run", manual_step)

    @property
    def has_logged(self) -> bool:
        """Whether this rank has logged, in the running step, what the ranks bring together."""
        return self._metrics.has_logged

    def on_train_batch_start(self, batch: Any) -> None:
        """Looks whether the ranks read data of their own. Collective."""
        self._data.on_train_batch_start(batch)

    def detach(self) -> None:
        """Gives Trainer and metrics back as they were. Idempotent."""
        self._replacements.detach()
        self._metrics.detach()
        self._states.detach()


__all__ = ["Attachments"]
