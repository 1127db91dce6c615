"""examples/ragged_tokens.py: the mean over items equals one process, that over ranks does not."""

from __future__ import annotations

import sys

from tests.faults.processes import ROOT, start_launcher


def test_ragged_tokens() -> None:
    with start_launcher(sys.executable, str(ROOT / "examples" / "ragged_tokens.py")) as job:
        assert job.wait(timeout=120) == [0], job.report()
        printed = job.output(stream="stdout")
    assert "The mean over items is the training of one process" in printed
