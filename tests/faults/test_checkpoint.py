"""A rank dies while a checkpoint is written, or while it is sent to the others."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from hvd_strategy import checkpoint, open_session
from hvd_strategy.object_stream import stream_object
from tests.faults.processes import start_function
from tests.faults.ranks import say


def killed_in_the_middle_of_writing(path: str) -> None:
    session = open_session()
    checkpoint.save({"a": torch.zeros(1_000_000)}, path)
    if session.rank == 0:
        # The kernel kills a process that goes beyond the limit, at just that byte.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
    say("ready")
    checkpoint.save({"a": torch.ones(1_000_000)}, path)


def test_killed_while_writing(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with start_function(killed_in_the_middle_of_writing, str(path)) as ranks:
        ranks.wait_for("ready", 0)
        number = int(signal.SIGXFSZ)
        ranks.wait_for("RankFailedError: rank 1 cannot go on: rank 0 (pid", 1)
        assert f"was killed by signal {number}" in ranks.output(1)
        assert ranks.wait() == [-number, 1]
    # The file is the old one, and nothing is left of the new one.
    assert torch.load(path)["a"].sum() == 0
    assert list(tmp_path.iterdir()) == [path]


class KillsItsProcess:
    def __getstate__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class KillsItsReceiver:
    def __init__(self) -> None:
        self.state = 1

    def __setstate__(self, state: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in_the_middle_of_sending(victim: int) -> None:
    session = open_session()
    content = [torch.ones(10_000_000), [KillsItsProcess, KillsItsReceiver][victim]()]
    stream_object(session, [content, torch.ones(10_000_000)] if session.rank == 0 else None)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_sending(victim: int) -> None:
    with start_function(killed_in_the_middle_of_sending, victim) as ranks:
        other = 1 - victim
        line = f"RankFailedError: rank {other} cannot go on: rank {victim} (pid"
        ranks.wait_for(line, other)
        statuses = ranks.wait()
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[other] == 1
