"""What the ranks of the fault tests have in common: a small training whose outcome is known.

Functions that run on the ranks stand in the test files next to the tests; `start_function` calls
them in fresh processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_strategy import GradientReducer, Session


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("in the middle of backward")


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _loss(
    model: nn.Module,
    rank: int,
    step: int,
    *,
    failing: bool = False,
    in_backward: Callable[[], None] | None = None,
) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    hidden = model[0](torch.randn(5, 8, generator=generator))  # type: ignore[index]
    if failing:
        hidden = _Failing.apply(hidden)
    if in_backward is not None:
        hidden.register_hook(lambda _: in_backward())
    return model[2](model[1](hidden)).square().mean()  # type: ignore[index,no-any-return]


class Training:
    """A model that every rank trains on data of its own, through a GradientReducer.

    `check` compares it with what one process computes from the data of all ranks.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.model = _model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.reducer = GradientReducer(
            self.model.named_parameters(), self.optimizer, session=session
        )
        self.steps: list[int] = []  # those that changed the parameters
        self.next = 0

    def step(self, *, failing: bool = False, in_backward: Callable[[], None] | None = None) -> None:
        """One step; `in_backward` is called when half of the gradients are there."""
        number, self.next = self.next, self.next + 1
        self.optimizer.zero_grad()
        rank = self.session.rank
        _loss(self.model, rank, number, failing=failing, in_backward=in_backward).backward()
        self.optimizer.step()
        self.steps.append(number)

    def check(self) -> None:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in self.steps:
            optimizer.zero_grad()
            losses = [_loss(model, rank, number) for rank in range(self.session.size)]
            torch.stack(losses).mean().backward()
            optimizer.step()
        for (name, ours), right in zip(
            self.model.named_parameters(), model.parameters(), strict=True
        ):
            difference = (ours - right).abs().max().item()
            assert difference <= 1e-6, f"{name} is {difference} off after {len(self.steps)} steps"


def say(text: str) -> None:
    """One line; a process that is killed the next moment has said it."""
    print(text, flush=True)


def compute_until(path: str) -> None:
    """Stays outside the engine until the test makes the file."""
    matrix = torch.eye(64)
    while not Path(path).exists():
        matrix = matrix @ matrix
        time.sleep(0.001)
