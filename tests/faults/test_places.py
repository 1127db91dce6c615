"""A fault at each place of a training, on one of three ranks; the rounds of the soak test, chosen.

`soak.play` judges: the exit status of every rank, that the survivors name rank, process id and
signal (with pidfds and without), that exceptions are known by their text, that a stopped and
resumed job has the right result, and that no process, socket or shared memory is left.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.faults.fork_server import ForkServer
from tests.faults.soak import Round, play
from tests.faults.soak_job import Fault

Loop = partial(Fault, "loop")
Trainer = partial(Fault, "trainer")


def check(server: ForkServer, action: str, fault: Fault, pidfd: bool = True) -> None:
    round_ = Round(0, action, fault, after=0, stopped=0.7, pidfd=pidfd)
    outcome = play(server, round_, 3, None)
    assert not outcome.problems, "\n".join(outcome.problems)
    print(f"{round_}: named after", [f"{seconds:.3f} s" for seconds in outcome.named])


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "sockets"])
@pytest.mark.parametrize(
    "fault",
    [
        Loop("kill", 1, "flush", 4),  # in our engine
        Loop("kill", 0, "torch.distributed", 2),  # in Gloo
        Loop("kill", 2, "loading", 1, workers=True),  # its workers live on
        Loop("kill", 1, "holding the GIL", 3),
        Trainer("kill", 1, "flush", 1),
    ],
    ids=lambda fault: f"{fault.program}: {fault.place}",
)
def test_killed_wherever_it_is(server: ForkServer, fault: Fault, pidfd: bool) -> None:
    check(server, "kill", fault, pidfd)


@pytest.mark.parametrize(
    "fault",
    [
        Loop("kill", 1, "start"),  # has not said who it is: missed when time is up
        Loop("kill", 2, "handshake"),
        Loop("kill", 0, "opened"),
        Trainer("kill", 1, "handshake"),
        Trainer("kill", 2, "setup"),
    ],
    ids=lambda fault: f"{fault.program}: {fault.place}",
)
def test_killed_during_start_up(server: ForkServer, fault: Fault) -> None:
    check(server, "kill", fault)


@pytest.mark.parametrize(
    "fault",
    [
        Loop("kill", 0, "checkpoint", 4),
        Trainer("kill", 0, "writing", 1),
        Trainer("kill", 1, "checkpoint", 1),
        Trainer("kill", 1, "validation", 1),
    ],
    ids=lambda fault: f"{fault.program}: {fault.place} on rank {fault.rank}",
)
def test_killed_around_a_checkpoint(server: ForkServer, fault: Fault) -> None:
    check(server, "kill", fault)


@pytest.mark.parametrize(
    "fault",
    [
        Loop("kill", 1, "checked"),
        Loop("kill", 0, "closing"),
        Loop("kill", 1, "exit"),
        Trainer("kill", 1, "fit end"),
        Trainer("kill", 0, "exit"),
    ],
    ids=lambda fault: f"{fault.program}: {fault.place}",
)
def test_killed_during_teardown(server: ForkServer, fault: Fault) -> None:
    check(server, "kill", fault)


@pytest.mark.parametrize(
    ("action", "fault"),
    [
        ("term", Loop("term", 1, "barrier", 2)),
        ("_exit", Loop("_exit", 0, "flush", 1)),
        ("exit", Loop("exit", 2, "between", 3)),
        ("_exit", Trainer("_exit", 1, "backward", 5)),
        ("raise", Loop("raise", 1, "forward", 4)),
        ("raise", Loop("raise", 1, "backward", 4)),
        ("raise", Trainer("raise", 2, "backward", 1)),
        ("raise", Trainer("raise", 0, "validation", 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.program}: {value.place}",
)
def test_other_ends_of_one_rank(server: ForkServer, action: str, fault: Fault) -> None:
    check(server, action, fault)


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "sockets"])
@pytest.mark.parametrize(
    "fault",
    [Loop("stop", 1, "flush", 4), Trainer("stop", 0, "backward", 5)],
    ids=lambda fault: f"{fault.program}: {fault.place}",
)
def test_stopped_and_resumed(server: ForkServer, fault: Fault, pidfd: bool) -> None:
    check(server, "resume", fault, pidfd)


def test_stopped_for_good(server: ForkServer) -> None:
    """The others give up and say whom they waited for; the stopped rank is woken, to end."""
    check(server, "abandon", Loop("stop", 1, "between", 3))


@pytest.mark.parametrize(
    "fault",
    [
        Trainer("term", 1, "forward", 1),
        Trainer("term", 2, "flush", 5),
        Trainer("term", 0, "writing"),
        Trainer("term", 1, "validation end", 0),
    ],
    ids=lambda fault: fault.place,
)
def test_sigterm_ends_all_ranks_after_the_same_batch(server: ForkServer, fault: Fault) -> None:
    check(server, "term", fault)
