"""What the ranks tell each other with the gradients of a training step, in automatic optimization.

Each rank tells, with the record that it exchanges at the end of backward anyway, in which batches
of the accumulation window it took part. Lightning refuses a `training_step` that returns None on
one of several ranks, because the others would wait for its gradients. Here it is a rank with weight
0 in the reduction, as is one that has run out of batches; the mean over all ranks is one over those
that took part, and where nobody did, no parameter gets a gradient and the optimizer has nothing to
do.

Which of the ranks have a batch is known before a step; whose `training_step` will return None is
not. So in a window the former is exact: each batch counts as the mean over its ranks, as in one
process. The latter makes it the mean over all that took part in the window, which is the same where
as many ranks took part in each of its batches.

The record tells besides whether a rank has logged values of the step that are to be brought
together. If any has, all meet; so one that has not is found out, instead of leaving the others
waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_strategy.engine import GradientReducer

# Stands for None between the training step and the place where Lightning takes the loss from it.
_SKIPPED = object()

_HAS_LOGGED = 1
_FIRST_BATCH = 2  # the bit of a window's first batch; those of the others are above it
_MOST_BATCHES = 62  # of a window, that have bits; the last one stands for all that follow


class StepVotes:
    """The votes of one rank.

    Args:
        reducer: what reduces the gradients.
        size: number of ranks.
        has_logged: whether this rank has logged, in the running step, what all bring together.
        active: how many ranks have a batch in the running step.
        after_backward: called where this rank has joined a backward of others, with its gradients.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        size: int,
        has_logged: Callable[[], bool],
        active: Callable[[], int],
        after_backward: Callable[[], object],
    ) -> None:
        self._reducer = reducer
        self._size = size
        self._has_logged = has_logged
        self._active = active
        self._after_backward = after_backward
        self._skipped = False
        self._owes_backward = False
        self._logged: bool | None = None
        self._factor = 1.0
        self._ends_window = False
        self._reductions = 0  # before the running step
        self._begin_window()

    def _begin_window(self) -> None:
        self._ends_window = False
        self._batches = 0
        self._active_first = self._size  # ranks with a batch in the window's first one
        self._share = 1.0  # by what a loss is multiplied, so that each batch counts as much
        self._shares = 0.0  # sum, over the batches in which this rank took part
        self._took_part = 0  # bits

    @property
    def skipped(self) -> bool:
        """Whether this rank took no part in the last training step."""
        return self._skipped

    @property
    def logged(self) -> bool | None:
        """Whether any rank had logged values before its backward; None where they did not vote."""
        return self._logged

    @property
    def factor(self) -> float:
        """What makes a mean over all ranks one over those that took part in the last step."""
        return self._factor

    def note(self) -> int:
        """What this rank tells with the reduction."""
        return self._took_part | (_HAS_LOGGED if self._has_logged() else 0)

    def begin_batch(self) -> None:
        """Forgets the votes of the last batch."""
        self._logged = None
        self._skipped = False
        if self._ends_window:  # and was not counted: the user's code did not step
            self._begin_window()

    def stand_in(self, output: Any, gradients_stay_local: bool) -> Any:
        """Returns what Lightning is to get for the output of a training step.

        Args:
            output: of the step; None for none, which then has no backward of its own.
            gradients_stay_local: whether the window goes on.
        """
        active = self._active()
        if not self._batches:
            self._active_first = active
        # With means over items each rank's share is its number of items.
        self._share = 1.0 if self._reducer.averages_items else self._active_first / active
        self._skipped = output is None
        if output is not None:
            self._shares += self._share
            self._took_part |= _FIRST_BATCH << min(self._batches, _MOST_BATCHES)
        self._batches += 1
        self._ends_window = not gradients_stay_local
        self._reductions = self._reducer.reductions
        self._owes_backward = output is None and not gradients_stay_local
        return _SKIPPED if output is None else output

    def weighted(self, loss: Tensor, gradients_stay_local: bool) -> Tensor:
        """Returns the loss as it counts, and tells the reducer what the window's losses weigh."""
        if not gradients_stay_local:
            self._tell_weight()
        return loss if self._share == 1.0 else loss * self._share

    def _tell_weight(self) -> None:
        if self._shares != self._batches and not self._reducer.averages_items:
            self._reducer.set_weight(self._shares / self._batches, 1.0 if self._shares else 0.0)

    def join(self) -> None:
        """Takes part in the reduction of the others' gradients, with none of the running batch.

        Does nothing where the rank has had a backward of its own.
        """
        if self._owes_backward:
            self._owes_backward = False
            self._tell_weight()
            self._reducer.join_backward()
            if any(vote & self._last_batch for _, vote in self._reducer.notes):
                # The others' hooks may have changed the gradients, which are these.
                self._after_backward()

    @property
    def _last_batch(self) -> int:
        """The bit of the last batch so far."""
        return _FIRST_BATCH << min(max(self._batches - 1, 0), _MOST_BATCHES)

    def count(self, optimizer: Optimizer, loss: Any) -> Any:
        """Counts the votes after a reduced backward.

        Args:
            optimizer: whose gradients they are.
            loss: what Lightning's closure returned.

        Returns:
            The loss; 0 on a rank that skipped a step which others took, because None would keep a
            scaler of the loss from stepping on this rank alone.
        """
        reduced = self._reducer.reductions != self._reductions
        # Where Lightning left backward out, nobody has told anything.
        votes = [note for _, note in self._reducer.notes] if reduced else []
        last = self._last_batch
        counted = _FIRST_BATCH << min(self._batches, _MOST_BATCHES + 1)
        batches = self._batches
        self._begin_window()
        together = 0
        for vote in votes:
            together |= vote
        self._logged = bool(together & _HAS_LOGGED) if votes else None
        took_part = sum(bool(vote & last) for vote in votes)
        self._factor = self._size / took_part if took_part else 1.0
        together &= -_FIRST_BATCH & (counted - 1)
        if not together:
            return loss
        missing = min(batches, _MOST_BATCHES + 1) - together.bit_count()
        if missing and not self._reducer.averages_items:
            # Batches that all ranks skipped: nobody could know it, so the others count too much.
            correction = (batches - missing) / batches
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(correction)
        return torch.zeros(()) if loss is None else loss


def accepting_skipped(output_class: Any) -> Any:
    """Returns the class by which Lightning takes the loss, so that it knows `stand_in`'s object."""

    class Output(output_class):
        @classmethod
        def from_training_step_output(cls, output: Any, *args: Any, **kwargs: Any) -> Any:
            output = None if output is _SKIPPED else output
            return output_class.from_training_step_output(output, *args, **kwargs)

    return Output


__all__ = ["StepVotes", "accepting_skipped"]
