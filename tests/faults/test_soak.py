"""A short run of the soak test, of the same faults each time, and what it makes of a bad job."""

from __future__ import annotations

import pytest

from tests.faults import soak
from tests.faults.fork_server import ForkServer
from tests.faults.soak_job import Fault


def test_short_soak(server: ForkServer, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = soak.soak(8, seed=7, seconds_limit=20, server=server)
    printed = capsys.readouterr().out
    assert wrong == 0, printed
    assert "all as it should be" in printed
    print(printed)


def test_what_is_wrong_is_found(server: ForkServer) -> None:
    """A job of one rank that knows nothing of the others: nobody is told of a death."""
    round_ = soak.Round(0, "kill", Fault("loop", "kill", 0, "forward", 1), 0, 0, True)
    outcome = soak.play(server, round_, 1, None)
    assert not outcome.problems
    # The same fault, judged as if another had been planned.
    other = soak.Round(0, "resume", Fault("loop", "kill", 0, "forward", 1), 0, 0.1, True)
    outcome = soak.play(server, other, 1, None)
    assert any("is not right" in problem for problem in outcome.problems)
    never = soak.Round(0, "kill", Fault("loop", "kill", 0, "forward", 99), 0, 0, True)
    outcome = soak.play(server, never, 1, None)
    assert any("never came to" in problem for problem in outcome.problems)
