"""A rank that is stopped: warnings, the limit, and Ctrl-C while the others wait for it."""

from __future__ import annotations

import os
import signal
import time

from hvd_strategy import HvdError, open_session
from tests.faults.fork_server import ForkServer
from tests.faults.processes import RankProcesses
from tests.faults.ranks import Training, say

WARNING = 1.0
ABORT = 2.0


def train(training: Training, steps: int) -> None:
    """Rank 1 stops in the middle, until the test lets it go on."""
    for number in range(steps):
        if number == steps // 2 and training.session.rank == 1:
            say("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        training.step()
    training.check()


def stalls() -> None:
    session = open_session(stall_warning_seconds=WARNING)
    training = Training(session)
    if session.rank == 1:
        time.sleep(1.5 * WARNING)
    training.step()
    say("first step")
    session.barrier()
    train(training, 20)
    say("right")
    try:
        train(training, 4)
    except (KeyboardInterrupt, HvdError) as error:
        say(f"ended by {type(error).__name__}: {error}")
    session.close()
    session = open_session(stall_warning_seconds=WARNING, stall_abort_seconds=ABORT)
    train(Training(session), 4)


def next_stop(ranks: RankProcesses, before: list[float]) -> float:
    """When rank 1 stopped for the next time."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ranks.drain()
        for line in list(ranks.lines):
            if line.rank == 1 and line.text == "stops" and line.seconds > before[-1]:
                return line.seconds
        time.sleep(0.01)
    raise AssertionError(f"rank 1 did not stop again\n{ranks.report()}")


def test_stalls(server: ForkServer) -> None:
    with server.start_function(stalls) as ranks:
        for rank in range(2):
            ranks.wait_for("first step", rank)
        assert "has been waiting" not in ranks.output()  # the first step may take longer

        stops = [ranks.wait_for("stops", 1).seconds]
        warning = ranks.wait_for("hvd_strategy: [rank 0] has been waiting for 1", 0, timeout=10)
        assert WARNING - 0.1 < warning.seconds - stops[0] < WARNING + 1
        assert "for the end of backward 11 on rank 1 (last seen 1 s ago)" in warning.text
        assert "not there yet: gradient bucket 0 (2." in warning.text
        ranks.kill(1, signal.SIGCONT)
        for rank in range(2):
            ranks.wait_for("right", rank)

        stops.append(next_stop(ranks, stops))
        time.sleep(0.3)
        interrupted = ranks.kill(0, signal.SIGINT)
        ended = ranks.wait_for("ended by KeyboardInterrupt", 0, timeout=5)
        assert ended.seconds - interrupted < 1
        ranks.kill(1, signal.SIGCONT)
        told = ranks.wait_for("ended by RankFailedError: rank 1 cannot go on: rank 0 was inter", 1)
        assert "the end of backward" in told.text

        stops.append(next_stop(ranks, stops))
        limit = f"gave up after {ABORT:g} s (stall_abort_seconds)"
        raised = ranks.wait_for("StallError: rank 0 cannot go on: rank 0 waited for ", 0)
        assert ABORT - 0.1 < raised.seconds - stops[-1] < ABORT + 2
        assert limit in raised.text
        assert "rank 1 (last seen 2 s ago)" in raised.text
        ranks.kill(1, signal.SIGCONT)
        raised = ranks.wait_for("StallError: rank 1 cannot go on: rank 0 waited for ", 1)
        assert limit in raised.text
        assert ranks.wait() == [1, 1]
