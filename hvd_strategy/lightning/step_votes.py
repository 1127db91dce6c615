"""What the ranks tell each other with the gradients of a training step.

A vote is a parameter of no model that is added to the loss: its gradient is 1 on a rank that gives
the vote, and after the reduction every rank reads in it how many did. It travels with the other
gradients, without another exchange. There are two:

* Who takes part. Lightning refuses a `training_step` that returns None on one of several ranks,
  because the others would wait for its gradients. Here it is a rank without that vote, and the mean
  over all ranks becomes the one over those that took part. Where none did, no parameter has got a
  gradient, and the optimizer has nothing to do.
* Who has logged values of the step that are to be brought together. If any rank has, all meet; so
  one that has not is found out, instead of leaving the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Stands for None between the training step and the place where Lightning takes the loss from it.
_SKIPPED = object()


class StepVotes:
    """The votes of one rank, in automatic optimization.

    Args:
        size: number of ranks.
        scaled: multiplies a loss by the scale that all losses get.
    """

    def __init__(self, size: int, scaled: Callable[[Tensor], Tensor]) -> None:
        self._size = size
        self._scaled = scaled
        self._takes_part = nn.Parameter(torch.zeros(()))
        self._has_logged = nn.Parameter(torch.zeros(()))
        self._micro_batches = 0  # of the running accumulation window
        self._skipped = False
        self._owes_backward = False
        self._logged: bool | None = None
        self._factor = 1.0

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the reducer has to know besides the parameters of the model."""
        return [
            ("(vote: takes part in the step)", self._takes_part),
            ("(vote: has logged values of the step)", self._has_logged),
        ]

    @property
    def skipped(self) -> bool:
        """Whether the last training step of this rank returned None."""
        return self._skipped

    @property
    def logged(self) -> bool | None:
        """Whether any rank had logged values before its backward; None where they did not vote."""
        return self._logged

    @property
    def factor(self) -> float:
        """What makes the last mean over all ranks one over those that took part."""
        return self._factor

    def begin_batch(self) -> None:
        """Forgets the votes of the last batch."""
        self._logged = None
        self._skipped = False

    def stand_in(self, output: Any, gradients_stay_local: bool) -> Any:
        """Returns what Lightning is to get for the output of a training step."""
        self._micro_batches += 1
        self._skipped = output is None
        self._owes_backward = self._skipped and not gradients_stay_local
        return _SKIPPED if self._skipped else output

    def add_to(self, loss: Tensor, has_logged: bool) -> Tensor:
        """Returns the loss with this rank's votes; its value is the same."""
        loss = loss + self._takes_part
        return loss + self._has_logged if has_logged else loss

    def join(self, has_logged: bool) -> None:
        """Takes part in the reduction of the others' gradients, with none of its own.

        Does nothing where the rank has had a backward of its own.
        """
        if self._owes_backward:
            self._owes_backward = False
            # Some optimizers call their closure without gradients.
            with torch.enable_grad():
                nothing = 0 * self._takes_part
                loss = nothing + self._has_logged if has_logged else nothing
                # Not for its value: so that this rank's gradients count as scaled like the others'.
                self._scaled(loss).backward()

    def count(self, optimizer: Optimizer, loss: Any, scale: float) -> Any:
        """Counts the votes after a reduced backward, and corrects the gradients accordingly.

        Args:
            optimizer: whose gradients they are.
            loss: what Lightning's closure returned.
            scale: the factor by which the gradients are multiplied.

        Returns:
            The loss; 0 on a rank that skipped a step which others took, because None would keep a
            scaler of the loss from stepping on this rank alone.
        """
        expected, self._micro_batches = self._micro_batches * self._size, 0
        given, logged = self._takes_part.grad, self._has_logged.grad
        self._takes_part.grad = self._has_logged.grad = None
        self._logged = logged is not None and bool(logged)
        self._factor = 1.0
        votes = 0 if given is None else round(given.item() / scale * self._size)
        if not votes:
            return loss
        if votes < expected:
            self._factor = expected / votes
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self._factor)
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
