"""Ranks that wait for each other in different places are told so; nobody else is.

The Trainer's cases are in tests/faults/test_deadlocks.py.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvd_strategy import GradientReducer, MismatchError, open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import FEATURES

BEGINNING = r"rank {} cannot go on: the ranks wait for each other in different places, "
END = r"all ranks have to do the same things in the same order"
AWAY = 3.0  # seconds; a deadlock is found after two


class Net:
    """A layer with a reducer; `name` begins the names of its parameters."""

    def __init__(self, name: str) -> None:
        layer = nn.Linear(FEATURES, 1)
        self.layer = layer
        self.optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        named = [(f"{name}.{key}", parameter) for key, parameter in layer.named_parameters()]
        self.reducer = GradientReducer(named, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.layer(torch.ones(2, FEATURES)).sum().backward()
        self.optimizer.step()


def collective_against_backward() -> None:
    session = open_session()
    net = Net("net")
    net.step()
    with pytest.raises(
        MismatchError,
        match=BEGINNING.format(session.rank)
        + r".*rank 0 waits for the end of backward 1 on rank 1 .*gradient bucket 0 \(net\.bias, "
        r"net\.weight\); rank 1 waits for barrier, which has not been called by rank 0; " + END,
    ):
        (session.barrier if session.rank == 1 else net.step)()


def reducers_in_another_order() -> None:
    session = open_session()
    nets = [Net("generator"), Net("discriminator")]
    # In the very first backwards there are no buckets yet that could tell the reducers apart.
    with pytest.raises(
        MismatchError,
        match=r"rank 0 waits for the end of backward 0 on rank 1 \(last seen \d s ago\), with "
        r"gradients of generator\..*; rank 1 waits for the end of backward 0 on rank 0 \(last seen "
        r"\d s ago\), with gradients of discriminator\..*; " + END,
    ):
        nets[session.rank].step()


def three_places() -> None:
    session = open_session()
    first, second = Net("first"), Net("second")
    places = [first.step, session.barrier, second.step]
    with pytest.raises(MismatchError) as caught:
        places[session.rank]()
    # A rank that came only just now may be missing.
    told = [
        "rank 0 waits for the end of backward 0 on rank 1 (last seen ",
        "rank 1 waits for barrier, which has not been called by rank 0, 2; ",
        "rank 2 waits for the end of backward 0 on rank 0 (last seen ",
    ]
    assert sum(part in str(caught.value) for part in told) >= 2


def reducer_against_collective() -> None:
    session = open_session()
    act = (lambda: Net("net")) if session.rank == 1 else session.barrier
    with pytest.raises(MismatchError, match="rank 1 waits for a communicator or reducer to be "):
        act()


@pytest.mark.parametrize(
    "function", [collective_against_backward, reducers_in_another_order, reducer_against_collective]
)
def test_two_ranks(ranks: Ranks, function: object) -> None:
    ranks.run(2, function, fresh=True)


def test_three_ranks(ranks: Ranks) -> None:
    ranks.run(3, three_places, fresh=True)


def away_in_torch_distributed() -> None:
    """Rank 0 waits in the engine for both, rank 1 in torch.distributed for rank 2, which works."""
    session = open_session()
    net = Net("net")
    net.step()
    if session.rank == 1:
        dist.recv(torch.empty(1), src=2)
    elif session.rank == 2:
        time.sleep(AWAY)
        dist.send(torch.ones(1), dst=1)
    net.step()
    session.barrier()


def threads_with_other_parts() -> None:
    """What the main thread of one rank does, a thread of the other one does, and that is slow."""
    session = open_session()
    nets = [Net("a"), Net("b")]
    mine, other = nets[session.rank], nets[1 - session.rank]

    def steps() -> None:
        other.step()
        time.sleep(AWAY)
        other.step()

    errors: list[BaseException] = []

    def run() -> None:
        try:
            steps()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    mine.step()
    mine.step()
    thread.join()
    assert not errors
    session.barrier()


def test_no_alarm(ranks: Ranks) -> None:
    ranks.run(3, away_in_torch_distributed, fresh=True)
    ranks.run(2, threads_with_other_parts, fresh=True)
