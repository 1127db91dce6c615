"""What the tests of GradientReducer share: one training script, run twice.

A test writes its loop once, against a `Side`. `Together` is a rank with a GradientReducer, whose
loss is that of its own data; `Alone` is the reference, one process whose loss is the mean over all
ranks' losses. `check` runs both and compares what they return: equal to 1e-6, and bit-equal between
the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hvd_strategy import GradientReducer, Session, open_session

FEATURES = 5
ROWS = 4  # per rank and micro-batch
TINY = 1e-5  # MiB: every parameter in a bucket of its own

RankLoss = Callable[[int], "Tensor | None"]
State = dict[str, Tensor]


class Alone:
    """The reference: one process with the data of all ranks."""

    reducer: GradientReducer | None = None

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = range(size)

    def reduce(self, model: nn.Module, *optimizers: Any, **arguments: Any) -> None:
        return None

    def adopt(self, optimizer: Any) -> None:
        return None

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def loss(self, rank_loss: RankLoss) -> Tensor | None:
        """Mean over the ranks; a rank without a loss, or without a graph, adds nothing to it."""
        losses = [rank_loss(rank) for rank in self.ranks]
        parts = [loss for loss in losses if loss is not None and loss.requires_grad]
        return sum(parts[1:], parts[0]) / self.size if parts else None

    def backward(self, rank_loss: RankLoss) -> None:
        loss = self.loss(rank_loss)
        if loss is not None:
            loss.backward()

    def mean(self, rank_value: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([rank_value(rank) for rank in self.ranks]).mean(0)

    def close(self) -> None:
        return None


class Together(Alone):
    """One rank among several, whose gradients are reduced."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.size)
        self.session = session
        self.rank = session.rank
        self.reducers: list[GradientReducer] = []

    def reduce(self, model: nn.Module, *optimizers: Any, **arguments: Any) -> None:
        self.reducer = GradientReducer(model.named_parameters(), optimizers, **arguments)
        self.reducers.append(self.reducer)

    def adopt(self, optimizer: Any) -> None:
        assert self.reducer is not None
        self.reducer.add_optimizer(optimizer)

    def no_sync(self) -> AbstractContextManager[Any]:
        assert self.reducer is not None
        return self.reducer.no_sync()

    def loss(self, rank_loss: RankLoss) -> Tensor | None:
        loss = rank_loss(self.rank)
        return loss if loss is not None and loss.requires_grad else None

    def mean(self, rank_value: Callable[[int], Tensor]) -> Tensor:
        return self.session.allreduce(rank_value(self.rank).clone(), "mean")

    def close(self) -> None:
        for reducer in self.reducers:
            reducer.close()


Side = Alone
Script = Callable[..., State]


def check(script: Script, *args: Any, tolerance: float = 1e-6) -> None:
    """Runs the script on this rank and as the reference; compares what both return."""
    session = open_session()
    together = Together(session)
    torch.manual_seed(0)
    try:
        ours = script(together, *args)
        torch.manual_seed(0)
        expected = script(Alone(session.size), *args)
    finally:
        together.close()
    assert_equal(ours, expected, tolerance)
    assert_ranks_agree(session, ours)


def assert_equal(found: State, expected: State, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=0,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_ranks_agree(session: Session, state: State) -> None:
    """Every tensor has the same bits on all ranks."""
    everybody = session.allgather_object(state)
    for rank, other in enumerate(everybody):
        assert other.keys() == state.keys()
        for name, tensor in state.items():
            same = bits(tensor) == bits(other[name])
            assert same, f"{name} differs between rank {session.rank} and rank {rank}"


def bits(tensor: Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(dense.view(-1).view(torch.uint8).tolist()) if dense.numel() else b""


def batch(step: int, rank: int, micro: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs (rows, FEATURES) and targets (rows, 1) of one rank's micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + torch.randn(rows, 1, generator=generator)


def square_error(model: Callable[[Tensor], Tensor], step: int, rank: int, micro: int = 0) -> Tensor:
    inputs, targets = batch(step, rank, micro)
    return nn.functional.mse_loss(model(inputs), targets)


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)
    )


class Branches(nn.Module):
    """A trunk, and branches that a test may use or leave out."""

    def __init__(self, *branches: str) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 1)
        self.branches = nn.ModuleDict({name: nn.Linear(FEATURES, 1) for name in branches})

    def forward(self, inputs: Tensor, use: Iterable[str] = ()) -> Tensor:
        output = self.trunk(inputs)
        for name in use:
            output = output + self.branches[name](inputs)
        return output


def error_with(model: Branches, use: Iterable[str], step: int, rank: int, micro: int = 0) -> Tensor:
    return square_error(lambda inputs: model(inputs, use), step, rank, micro)


def parameters(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: nn.Module, prefix: str = "grad.") -> State:
    """Gradients there are; a parameter without one has no entry."""
    return {
        prefix + name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
