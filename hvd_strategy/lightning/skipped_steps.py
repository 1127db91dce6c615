"""`training_step` returning None: the rank has no say in that step.

Lightning refuses that with more than one rank, because the others would wait for its gradients.
Here each rank gives one vote with its loss: a parameter of no model, added to the loss, whose
gradient is therefore the number of votes and travels with the others. A rank that skips gives none.
All ranks read in the reduced gradient how many took part, without another exchange, and turn the
mean over the ranks into that over those which took part. Where none did, no parameter has got a
gradient, and the optimizer has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Stands for None between the training step and the place where Lightning takes the loss from it.
_SKIPPED = object()


class SkippedSteps:
    """Votes of one rank, in automatic optimization.

    Args:
        size: number of ranks.
    """

    # By this name the reducer knows the votes, next to the parameters of the model.
    NAME = "(votes for taking part in the step)"

    def __init__(self, size: int) -> None:
        self._size = size
        self.votes = nn.Parameter(torch.zeros(()))
        self._micro_batches = 0  # of the running accumulation window
        self._skipped = False
        self._owes_backward = False
        self.factor = 1.0

    @property
    def skipped(self) -> bool:
        """Whether the last training step of this rank returned None."""
        return self._skipped

    def stand_in(self, output: Any, gradients_stay_local: bool) -> Any:
        """Returns what Lightning is to get for the output of a training step."""
        self._micro_batches += 1
        self._skipped = output is None
        self._owes_backward = self._skipped and not gradients_stay_local
        return _SKIPPED if self._skipped else output

    def add_vote(self, loss: Tensor) -> Tensor:
        """Returns the loss with this rank's vote; its value is the same."""
        return loss + self.votes

    def join(self) -> None:
        """Takes part in the reduction of the others' gradients, with nothing.

        Does nothing where the rank has had a backward of its own.
        """
        if self._owes_backward:
            self._owes_backward = False
            (0 * self.votes).backward()

    def count(
        self, optimizer: Optimizer, closure: Callable[[], Any], scale: Callable[[], float]
    ) -> Any:
        """Calls the closure, which leaves the mean over all ranks, and corrects the gradients.

        Args:
            optimizer: whose gradients they are.
            closure: Lightning's, with training step and backward.
            scale: the factor by which the loss is multiplied before backward.

        Returns:
            What the closure returned; 0 on a rank that skipped a step which others took, because
            None would keep a scaler of the loss from stepping on this rank alone.
        """
        loss = closure()
        self.join()
        expected, self._micro_batches = self._micro_batches * self._size, 0
        given, self.votes.grad = self.votes.grad, None
        votes = 0 if given is None else round(float(given) / scale() * self._size)
        self.factor = 1.0
        if not votes:
            return loss
        if votes < expected:
            self.factor = expected / votes
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.factor)
        return torch.zeros(()) if loss is None else loss


def accepting_skipped(output_class: Any) -> Any:
    """Returns the class by which Lightning takes the loss, so that it knows `stand_in`'s object."""

    class Output(output_class):
        @classmethod
        def from_training_step_output(cls, output: Any, *args: Any, **kwargs: Any) -> Any:
            output = None if output is _SKIPPED else output
            return output_class.from_training_step_output(output, *args, **kwargs)

    return Output


__all__ = ["SkippedSteps", "accepting_skipped"]
