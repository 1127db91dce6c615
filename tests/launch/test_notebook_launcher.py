"""Ranks in fresh interpreters, started from a script that could not be run once per rank."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.faults.processes import RankProcesses, start_launcher

# Several runs in a row, each of which imports torch and Lightning in new processes.
pytestmark = pytest.mark.timeout(240)

JOB = str(Path(__file__).with_name("notebook_job.py"))


def job(*arguments: str) -> RankProcesses:
    return start_launcher(sys.executable, JOB, *arguments)


def test_runs_leave_the_trained_objects_and_an_unchanged_process(tmp_path: Path) -> None:
    """Two fits and a prediction on one Trainer, against a single process."""
    with job("good", str(tmp_path)) as script:
        assert script.wait(timeout=200) == [0], script.report()
        shown = script.output(stream="stdout").splitlines()
        # In the middle of the lines that the progress bar writes over.
        assert sum("epoch 0 of rank 0" in line for line in shown) == 1
        assert shown.count("[rank 1] epoch 0 of rank 1") == 1
        assert "[rank 1] " in script.output(stream="stderr")
        assert "UserWarning: odd epoch 1" in script.output()
        assert "6/6" in script.output(stream="stdout")


def test_failures_are_raised_with_rank_and_reason() -> None:
    with job("failing") as script:
        assert script.wait(timeout=200) == [0], script.report()


def test_ctrl_c_and_the_death_of_the_launcher_leave_no_process() -> None:
    """With DataLoader workers, both."""
    with job("endless") as interrupted, job("endless") as killed:
        for script in (interrupted, killed):
            for rank in (0, 1):
                script.wait_for(f'"rank": {rank}')
        interrupted.kill(0, signal.SIGINT)
        killed.kill(0, signal.SIGKILL)
        assert killed.wait(timeout=30) == [-signal.SIGKILL]
        killed.assert_nothing_left(timeout=15)  # the workers look for their parents now and then
        assert interrupted.wait(timeout=60) == [0], interrupted.report()
        assert "SystemExit 1, interrupted, True\nTrue\n" in interrupted.output(stream="stdout")
