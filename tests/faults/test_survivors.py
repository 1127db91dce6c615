"""A rank dies while the others are wherever a program can be: all are told, and all end."""

from __future__ import annotations

import ctypes
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from hvd_strategy import open_session
from tests.faults.fork_server import ForkServer
from tests.faults.ranks import Training, say

GRACE = 1.5  # abort_grace_seconds
VICTIM = 5


class SlowData(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        time.sleep(600)
        return index


def survivors_everywhere() -> None:
    session = open_session(abort_grace_seconds=GRACE)
    training = Training(session)
    training.step()
    session.barrier()
    rank = session.rank
    loader: Any = DataLoader(SlowData(), num_workers=1, multiprocessing_context="fork")
    say("ready")
    if rank == 0:
        time.sleep(600)
    elif rank == 1:
        while True:
            pass
    elif rank == 2:
        ctypes.PyDLL(None).sleep(600)  # keeps the GIL
    elif rank == 3:
        next(iter(loader))
    elif rank == 4:
        dist.all_reduce(torch.ones(1))
    else:
        signal.pause()


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "sockets"])
def test_survivors_everywhere(server: ForkServer, pidfd: bool) -> None:
    env = {} if pidfd else {"HVD_DISABLE_PIDFD": "1"}
    with server.start_function(survivors_everywhere, ranks=6, env=env) as ranks:
        for rank in range(6):
            ranks.wait_for("ready", rank)
        time.sleep(0.3)  # until they are where they go
        killed = ranks.kill(VICTIM)
        dead = f"rank {VICTIM} (pid {ranks.pids[VICTIM]}) "
        took = [
            ranks.wait_for(f"hvd_strategy: [rank {rank}] {dead}", rank).seconds - killed
            for rank in range(VICTIM)
        ]
        print(f"named after {max(took):.3f} s")
        # Those that would never come back are ended; Gloo's wait ends by itself, or is ended.
        assert ranks.wait() == [1, 1, 1, 1, 1, -signal.SIGKILL]
        for rank in range(4):
            ranks.wait_for("(abort_grace_seconds) after that failure; ending this process", rank)
        # torch's workers look for their parent every five seconds.
        ranks.assert_nothing_left(timeout=12)


def hung_rank() -> None:
    session = open_session(
        stall_warning_seconds=0.3, stall_abort_seconds=0.8, abort_grace_seconds=GRACE
    )
    training = Training(session)
    training.step()
    if session.rank == 1:
        session.set_activity("a long sleep")
        say("hangs")
        time.sleep(600)
    training.step()


def test_hung_rank_is_not_left_behind(server: ForkServer) -> None:
    """The others give up; the one that they waited for is ended after the grace."""
    with server.start_function(hung_rank, ranks=3) as ranks:
        ranks.wait_for("hangs", 1)
        for rank in (0, 2):
            error = ranks.wait_for(f"StallError: rank {rank} cannot go on: ", rank)
            assert "the end of backward 1 on rank 1" in error.text
            assert f"rank 1 (pid {ranks.pids[1]}, sleeping) is in: a long sleep (for " in error.text
        ended = ranks.wait_for("(abort_grace_seconds) after that failure; ending this process", 1)
        print(f"gave up at {error.seconds:.2f}, the hung rank ended at {ended.seconds:.2f}")
        assert ranks.wait() == [1, 1, 1]
        assert "hvd_strategy: [rank 1] rank " in ranks.output(1)


def interrupted() -> None:
    session = open_session(stall_warning_seconds=0.3)
    training = Training(session)
    training.step()
    say("ready")
    if session.rank == 1:
        time.sleep(600)
    training.step()


def test_ctrl_c_during_a_stall(server: ForkServer) -> None:
    """As a terminal sends it: to all ranks, two of which wait for the third."""
    with server.start_function(interrupted, ranks=3) as ranks:
        for rank in range(3):
            ranks.wait_for("ready", rank)
        ranks.wait_for("has been waiting for", 0)
        sent = time.monotonic()
        for rank in range(3):
            ranks.kill(rank, signal.SIGINT)
        ended = [ranks.wait_for("KeyboardInterrupt", rank).seconds for rank in range(3)]
        print(f"interrupted after {max(ended) - sent:.3f} s")
        # A signal, as the interpreter does it for a KeyboardInterrupt that nobody catches; a rank
        # that had been told of another's before has ended by that.
        assert set(ranks.wait()) <= {-signal.SIGINT, 1}
