"""Backwards in several threads: one reducer refuses a second one, reducers of their own work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvd_strategy import GradientReducer, HvdError, RankFailedError, open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    FEATURES,
    TINY,
    Side,
    State,
    Together,
    assert_equal,
    assert_ranks_agree,
    check,
    gradients,
    parameters,
    small_net,
    square_error,
)
from tests.multi.test_reducer_errors import trains

DEADLINE = 60


class Waits(torch.autograd.Function):
    """Says in its backward where it is, and goes on when it is told to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, here: threading.Event, go_on: threading.Event) -> Tensor:
        ctx.events = here, go_on
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        here, go_on = ctx.events
        here.set()
        assert go_on.wait(DEADLINE)
        return grad.clone(), None, None


def in_thread(body: Callable[[], None], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def two_at_once(cap: float | None, on: list[int]) -> None:
    """A second thread's backward begins while the first one's has fired half of its hooks."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer, bucket_cap_mb=cap)
    here, go_on = threading.Event(), threading.Event()

    def halfway(inputs: Tensor) -> Tensor:
        return model[4](model[3](Waits.apply(model[2](model[1](model[0](inputs))), here, go_on)))

    for step in range(2):  # the second one with buckets
        square_error(model, step, session.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    if session.rank in on:
        errors: list[BaseException] = []
        thread = in_thread(lambda: square_error(halfway, 2, session.rank).backward(), errors)
        assert here.wait(DEADLINE)
        with pytest.raises(HvdError, match="second thread while another thread ran a backward"):
            square_error(model, 3, session.rank).backward()
        with pytest.raises(HvdError, match=r"step\(\) in one thread"):
            optimizer.step()
        go_on.set()
        thread.join(DEADLINE)
        assert [type(error) for error in errors] == [HvdError]
        assert f"Rank {session.rank}" in str(errors[0])
        assert "a model and a reducer of its own" in str(errors[0])
    else:
        with pytest.raises(RankFailedError, match=f"rank {on[0]}.*second thread"):
            square_error(model, 2, session.rank).backward()
    optimizer.zero_grad()
    square_error(model, 4, session.rank).backward()
    optimizer.step()
    assert_ranks_agree(session, parameters(model))
    reducer.close()
    trains(session)


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=str)
@pytest.mark.parametrize("cap", [TINY, None])
def test_two_threads_and_one_reducer(ranks: Ranks, cap: float | None, on: list[int]) -> None:
    ranks(two_at_once, cap, on)


def a_reducer_each() -> None:
    """Every thread trains its own model, in whatever order the threads run."""
    session = open_session()
    torch.manual_seed(0)
    models = [small_net() for _ in range(3)]
    reducers = [GradientReducer(model.named_parameters(), bucket_cap_mb=TINY) for model in models]
    errors: list[BaseException] = []

    def train(model: nn.Module) -> None:
        for step in range(8):
            model.zero_grad()
            square_error(model, step, session.rank).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad

    for thread in [in_thread(lambda m=model: train(m), errors) for model in models]:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert errors == []
    for model in models:
        assert_ranks_agree(session, parameters(model))
    torch.manual_seed(0)
    for model in models:
        alone = small_net()
        for step in range(8):
            alone.zero_grad()
            losses = [square_error(alone, step, rank) for rank in range(session.size)]
            torch.stack(losses).mean().backward()
            with torch.no_grad():
                for parameter in alone.parameters():
                    parameter -= 0.1 * parameter.grad
        assert_equal(parameters(model), parameters(alone))
    for reducer in reducers:
        reducer.close()


def test_a_reducer_for_each_thread(ranks: Ranks) -> None:
    ranks(a_reducer_each)


def deeply_nested(side: Side) -> State:
    """Autograd runs the innermost of so many backwards in a thread of its own."""
    model = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, bucket_cap_mb=TINY)

    def nest(depth: int, inputs: Tensor) -> Tensor:
        if depth == 0:
            return torch.tanh(model[0](inputs))
        return checkpoint(nest, depth - 1, inputs, use_reentrant=True)

    for step in range(3):
        optimizer.zero_grad()
        side.backward(
            lambda rank, s=step: square_error(lambda x: model[1](nest(70, model[0](x))), s, rank)
        )
        optimizer.step()
    return {**parameters(model), **gradients(model)}


def test_deeply_nested_backwards(ranks: Ranks) -> None:
    ranks(check, deeply_nested)


def one_after_the_other() -> None:
    """Threads that take turns may share a reducer: a loop that moves to another thread, say."""
    session = open_session()
    torch.manual_seed(0)
    side = Together(session)
    model = small_net()
    side.reduce(model)
    errors: list[BaseException] = []
    for step in range(4):
        model.zero_grad()
        thread = in_thread(lambda s=step: square_error(model, s, session.rank).backward(), errors)
        thread.join(DEADLINE)
        assert errors == []
        assert_ranks_agree(session, gradients(model))
    side.close()


def test_threads_that_take_turns(ranks: Ranks) -> None:
    ranks(one_after_the_other)
