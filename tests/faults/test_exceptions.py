"""An exception on one rank: the others are told, and go on where that is possible."""

from __future__ import annotations

from pathlib import Path

from hvd_strategy import HvdError, open_session
from tests.faults.fork_server import ForkServer
from tests.faults.ranks import Training, compute_until, say


def exceptions(printed: str) -> None:
    session = open_session()
    rank = session.rank
    training = Training(session)
    for number in range(6):
        # In the first step no bucket has been formed yet, later they are on their way.
        try:
            training.step(failing=rank == 1 and number in (0, 3))
        except (ZeroDivisionError, HvdError) as error:
            say(f"step {number}: {type(error).__name__}: {error}")
    training.check()
    assert training.steps == [1, 2, 4, 5]
    say("went on")
    session.barrier()
    if rank == 1:
        raise ValueError("the disk is f\N{LATIN SMALL LETTER U WITH DIAERESIS}ll")
    if rank == 2:
        compute_until(printed)
    training.step()


def test_exceptions(server: ForkServer, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    with server.start_function(exceptions, str(printed), ranks=3) as ranks:
        for rank in range(3):
            ranks.wait_for("went on", rank)
            for step in (0, 3):
                text = ranks.wait_for(f"step {step}: ", rank).text
                if rank == 1:
                    assert "ZeroDivisionError: in the middle of backward" in text
                else:
                    assert f"RankFailedError: backward {step} failed on rank 1: " in text
        # Unhandled: the process ends by it.
        raised = ranks.wait_for("ValueError: the disk is f\xfcll", 1).seconds
        told = "rank 1 failed: ValueError: the disk is f\xfcll"
        waiting = ranks.wait_for(f"RankFailedError: rank 0 cannot go on: {told}", 0)
        assert waiting.seconds - raised < 1
        # Outside the engine: printed by the watch, raised by the next call.
        line = ranks.wait_for(f"hvd_strategy: [rank 2] {told}", 2)
        assert line.seconds - raised < 2  # from the traceback to the exit of Python
        printed.touch()
        ranks.wait_for(f"RankFailedError: rank 2 cannot go on: {told}", 2)
        assert ranks.wait() == [1, 1, 1]
