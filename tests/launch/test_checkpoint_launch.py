"""Checkpoints of ranks that the Trainer starts in processes of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.faults.processes import start_launcher

JOB = str(Path(__file__).with_name("checkpoint_job.py"))


def test_the_best_checkpoint_is_the_same_for_all_ranks(tmp_path: Path) -> None:
    with start_launcher(sys.executable, JOB, "hvd_fork", str(tmp_path)) as job:
        assert job.wait(timeout=90) == [0], job.report()
        [line] = [line.text for line in job.lines if line.text.startswith("[")]
    best, loss, expected = json.loads(line)
    assert best == str(tmp_path / "epoch=0-own=0.0.ckpt")
    assert loss == pytest.approx(expected, rel=1e-5)
    saved = {path.name for path in tmp_path.iterdir()}
    assert saved == {"epoch=0-own=0.0.ckpt", "epoch=1-own=1.0.ckpt"}
