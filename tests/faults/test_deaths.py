"""A rank dies, or goes without a word: who is told what, and when."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hvd_strategy import HvdError, RankFailedError, _core, open_session
from tests.faults.fork_server import ForkServer
from tests.faults.processes import start_function
from tests.faults.ranks import Training, compute_until, say
from tests.faults.soak_job import Fault, run

GRACE = 2.0  # abort_grace_seconds

# ---- killed while the others do all sorts of things ----------------------------------------------


def four_witnesses(printed: str) -> None:
    session = open_session(abort_grace_seconds=GRACE)
    training = Training(session)
    training.step()
    training.step()
    session.barrier()
    if session.rank == 0:
        say("ready")
        training.step()  # waits for rank 3 at the end of backward
    elif session.rank == 1:
        say("ready")
        compute_until(printed)
        try:
            session.barrier()
        except RankFailedError as error:
            say(f"raised: {error}")
        signal.pause()  # it has been told: nobody ends it
    elif session.rank == 2:
        say("ready")
        dist.recv(torch.ones(1), src=1)  # never comes, and the connection stays
    else:
        # Forked while the session was open; they outlive this process by some seconds.
        numbers: list[int] = list(range(1000))
        loader: DataLoader[int] = DataLoader(
            numbers,  # type: ignore[arg-type]
            num_workers=2,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
        next(batches)
        say("ready")
        time.sleep(600)


@pytest.mark.parametrize("pidfd", [True, False])
def test_killed_rank(tmp_path: Path, pidfd: bool) -> None:
    printed = tmp_path / "printed"
    env = {} if pidfd else {"HVD_DISABLE_PIDFD": "1"}
    with start_function(four_witnesses, str(printed), ranks=4, env=env) as ranks:
        for rank in range(4):
            ranks.wait_for("ready", rank)
        dead = f"rank 3 (pid {ranks.pids[3]}) was killed by signal {signal.SIGKILL:d} (Killed)"
        killed = ranks.kill(3)
        if pidfd:
            # Waited for, there is no zombie any more: the kernel tells through the pidfd.
            ranks.processes[3].wait()
        # Rank 0 may have raised it, and closed its session, before its watch thread came to print.
        texts = [dead, f"hvd_strategy: [rank 1] {dead}", f"hvd_strategy: [rank 2] {dead}"]
        took = [
            ranks.wait_for(text, rank, timeout=5).seconds - killed
            for rank, text in enumerate(texts)
        ]
        assert max(took) < 1, took
        print(f"named after {max(took):.3f} s")
        # In a flush: raised at once.
        raised = ranks.wait_for("RankFailedError: rank 0 cannot go on: " + dead, 0, timeout=5)
        assert raised.stream == "stderr"
        # Outside the engine: raised by the next call.
        printed.touch()
        ranks.wait_for("raised: rank 1 cannot go on: " + dead, 1, timeout=5)
        # In torch.distributed, for ever: ended from outside.
        ended = ranks.wait_for("(abort_grace_seconds) after that failure; ending this process", 2)
        assert GRACE - 0.2 < ended.seconds - killed < GRACE + 2
        ranks.kill(1, signal.SIGTERM)
        assert ranks.wait() == [1, -signal.SIGTERM, 1, -signal.SIGKILL]
        assert "abort_grace" not in ranks.output(1)
        # torch's workers look for their parent every five seconds.
        ranks.assert_nothing_left(timeout=10)


# ---- gone with status 0 --------------------------------------------------------------------------


def two_ways_to_leave() -> None:
    session = open_session()
    training = Training(session)
    training.step()
    if session.rank == 1:
        session.close()
    else:
        try:
            training.step()
        except RankFailedError as error:
            say(f"raised: {error}")
        session.close()
    try:
        training.step()
    except HvdError as error:
        say(f"afterwards: {error}")
    session = open_session()
    training = Training(session)
    training.step()
    training.check()
    say("second session")
    if session.rank == 1:
        os._exit(0)
    training.step()


def test_rank_that_leaves_early() -> None:
    with start_function(two_ways_to_leave) as ranks:
        left = ranks.wait_for("raised: rank 0 cannot go on: rank 1 has left the job", 0)
        assert "the end of backward 1 on rank 1" in left.text
        for rank in range(2):
            ranks.wait_for("afterwards: ", rank)
            ranks.wait_for("second session", rank)
        named = f"rank 1 (pid {ranks.pids[1]}) exited with status 0 without leaving the job"
        ranks.wait_for(f"hvd_strategy: [rank 0] {named}", 0)
        ranks.wait_for(f"RankFailedError: rank 0 cannot go on: {named}", 0)
        assert ranks.wait() == [1, 0]


# ---- dead before the session stands --------------------------------------------------------------


def die_before_the_roll_call() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    open_session(timeout=timedelta(seconds=3))


def test_death_before_the_roll_call(server: ForkServer) -> None:
    with server.start_function(die_before_the_roll_call, ranks=3) as ranks:
        assert ranks.wait() == [1, 3, 1]
        for rank in (0, 2):
            assert "HvdTimeoutError: " in ranks.output(rank)
            assert "rank 0's wait for ranks 1 did not end within 3 s" in ranks.output(rank)


def die_before_the_handshake() -> None:
    if os.environ["RANK"] == "1":

        def die(*_: object, **__: object) -> None:
            say("dies")
            os._exit(3)

        _core.Session = die  # type: ignore[misc,assignment]
    open_session()


def test_death_before_the_handshake(server: ForkServer) -> None:
    with server.start_function(die_before_the_handshake, ranks=3) as ranks:
        died = ranks.wait_for("dies", 1).seconds
        for rank in (0, 2):
            line = ranks.wait_for(f"RankFailedError: rank {rank} cannot join the others: ", rank)
            assert "rank 1 " in line.text
            # Not at the deadline; the rest is the end of Python.
            assert line.seconds - died < 3
        assert ranks.wait() == [1, 3, 1]


@pytest.mark.parametrize("place", ["start", "handshake"])
def test_death_of_the_rank_that_serves_the_store(server: ForkServer, place: str) -> None:
    """Without torchrun's agent the job's store ends with rank 0."""
    fault = Fault("loop", "kill", 0, place)
    with server.start_function(run, fault, "", 1.0, 30.0, ranks=3, agent_store=False) as ranks:
        killed = float(ranks.wait_for("FAULT ", 0).text.split()[1])
        for rank in (1, 2):
            line = ranks.wait_for("hvd_strategy.errors.", rank)
            assert "rank 0" in line.text
            print(f"told after {line.seconds - killed:.3f} s")
        assert ranks.wait() == [-signal.SIGKILL, 1, 1]
