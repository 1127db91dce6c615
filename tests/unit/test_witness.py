"""Who is missed before the core's session stands, and what a failed rank is said to have said."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from hvd_strategy import RankFailedError
from hvd_strategy.explanation import add_explanation
from hvd_strategy.roll_call import host_record, roll_call
from hvd_strategy.witness import Witness, process_record


class Neighbour:
    """Another process, and its record."""

    def __init__(self) -> None:
        code = "import sys; print('up', flush=True); sys.stdin.read()"
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        with open(f"/proc/{self.process.pid}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
        self.record = {**host_record(), "pid": self.process.pid, "started": started}

    def kill(self) -> None:
        """Leaves a zombie: nobody waits for it yet."""
        self.process.kill()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with open(f"/proc/{self.process.pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
            time.sleep(0.005)
        raise AssertionError("it does not end")


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    neighbour = Neighbour()
    yield neighbour
    neighbour.process.kill()
    neighbour.process.communicate()


class TestWitness:
    def test_sees_the_end_of_a_process(self, neighbour: Neighbour) -> None:
        witness = Witness(0)
        witness.learn(0, host_record())
        witness.learn(3, neighbour.record)
        assert witness.failure("a test") is None
        neighbour.kill()
        failure = witness.failure("a test")
        assert str(failure) == (
            f"rank 0 cannot go on: rank 3 (pid {neighbour.process.pid}) ended during a test; look "
            "at what it printed last."
        )
        neighbour.process.communicate()  # not even a zombie any more
        assert witness.dead() == (3, neighbour.process.pid)

    def test_all_blame_the_rank_that_ended_first(self, neighbour: Neighbour) -> None:
        store = dist.HashStore()
        first, second, third = Witness(0), Witness(1), Witness(4)
        for witness in (first, second, third):
            witness.meet_at(store)
        assert third.blamed() is None
        neighbour.kill()
        first.learn(3, neighbour.record)
        assert first.failure("the first meeting") is not None
        # Another rank has left as well since, and is seen before.
        second.learn(2, {**host_record(), "started": "1"})
        second.learn(3, neighbour.record)
        assert second.dead() == (2, os.getpid())
        pid = neighbour.process.pid
        blamed = f"rank 3 (pid {pid}) ended during the first meeting; look at what it printed last."
        assert str(second.failure("the second")) == f"rank 1 cannot go on: {blamed}"
        assert third.blamed() == blamed

    def test_another_process_of_the_same_number_does_not_count(self) -> None:
        witness = Witness(0)
        record = {**host_record(), "started": "1"}
        assert int(process_record()["started"]) > 1
        witness.learn(1, record)
        assert witness.dead() == (1, os.getpid())

    @pytest.mark.parametrize(
        "changes",
        [{"boot": "another host"}, {"pid_namespace": "another container"}, {"started": ""}],
    )
    def test_processes_that_cannot_be_seen_are_left_alone(
        self, neighbour: Neighbour, changes: dict[str, Any]
    ) -> None:
        witness = Witness(0)
        witness.learn(1, {**neighbour.record, **changes})
        neighbour.kill()
        assert witness.failure("a test") is None

    def test_a_roll_call_ends_when_somebody_who_came_has_ended(self, neighbour: Neighbour) -> None:
        store = dist.HashStore()
        neighbour.kill()
        raised: dict[int, str] = {}

        def call(rank: int, record: dict[str, Any]) -> None:
            with pytest.raises(RankFailedError) as caught:
                roll_call(
                    store, rank, 4, record, lambda _: None, timeout=60, warn_after=0, what="a test"
                )
            raised[rank] = str(caught.value)

        store.set("rank/1", str(neighbour.record).replace("'", '"'))
        threads = [
            threading.Thread(target=call, args=(rank, host_record()), daemon=True)
            for rank in (0, 2)  # rank 3 never comes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert set(raised) == {0, 2}
        for text in raised.values():
            assert f"rank 1 (pid {neighbour.process.pid}) ended during a test" in text


class FakeSession:
    """As far as `add_explanation` looks at one."""

    def __init__(self, answers: list[str | None]) -> None:
        self.closed = False
        self.core = self
        self.answers = answers

    def failure(self) -> str | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


UNEXPLAINED = (
    "backward 3 failed on rank 1: an exception inside backward; see the output of that rank"
)


class TestExplanation:
    def test_comes_a_moment_later(self) -> None:
        session: Any = FakeSession([None, None, "rank 1 failed: ZeroDivisionError: x"])
        error = RankFailedError(UNEXPLAINED)
        assert add_explanation(session, error) == "rank 1 failed: ZeroDivisionError: x"
        assert str(error) == f"{UNEXPLAINED} (rank 1 failed: ZeroDivisionError: x)"

    @pytest.mark.parametrize(
        "error", [None, ValueError(UNEXPLAINED), RankFailedError("rank 1 was killed")]
    )
    def test_other_errors_are_left_alone(self, error: BaseException | None) -> None:
        session: Any = FakeSession(["rank 1 failed"])
        before = str(error)
        assert add_explanation(session, error) is None
        assert str(error) == before

    def test_is_added_once(self) -> None:
        session: Any = FakeSession(["rank 1 failed: ZeroDivisionError: x"])
        error = RankFailedError(UNEXPLAINED)
        assert add_explanation(session, error) is not None
        text = str(error)
        assert add_explanation(session, error) is None
        assert str(error) == text

    def test_what_another_victim_said_explains_nothing(self) -> None:
        session: Any = FakeSession([f"rank 0 failed: RankFailedError: {UNEXPLAINED}"])
        error = RankFailedError(UNEXPLAINED)
        assert add_explanation(session, error) is None
        assert str(error) == UNEXPLAINED

    def test_is_not_waited_for_in_a_closed_session(self) -> None:
        session: Any = FakeSession([None])
        session.closed = True
        assert add_explanation(session, RankFailedError(UNEXPLAINED)) is None
