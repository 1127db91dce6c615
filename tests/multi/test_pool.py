"""The worker pool itself: what tests get from it, and that no failure of theirs outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from hvd_strategy import current_session, open_session
from tests.faults.processes import start_launcher
from tests.multi.pool import Ranks, RanksFailedError, WorkerPool


def describe(extra: str) -> tuple[int, int, dict[str, str], str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    environment = {name: os.environ[name] for name in names}
    return distributed.get_rank(), distributed.get_world_size(), environment, extra


def add_ranks(value: float) -> torch.Tensor:
    tensor = torch.full((3,), value + distributed.get_rank())
    distributed.all_reduce(tensor)
    return tensor


def own_pid() -> int:
    return os.getpid()


def disturb() -> float:
    os.environ["LEFT_BY_A_TEST"] = "1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    return float(torch.rand(()))


def look() -> tuple[str | None, bool, float, int]:
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    random = float(torch.rand((), dtype=torch.float64))
    return os.environ.get("LEFT_BY_A_TEST"), default, random, torch.get_num_threads()


def fail_on(failing: list[int]) -> None:
    print(f"rank {distributed.get_rank()} was here")
    if distributed.get_rank() in failing:
        raise ValueError(f"wrong on {distributed.get_rank()}")
    distributed.barrier()


def hang_on_one() -> None:
    if distributed.get_rank() == 1:
        wait_for_nothing()


def wait_for_nothing() -> None:
    threading.Event().wait()


def die_with(signum: int) -> None:
    if distributed.get_rank() == 0:
        print("about to die")
        os.kill(os.getpid(), signum)
    distributed.barrier()


def unpicklable() -> object:
    return lambda: None


def leave_group() -> None:
    distributed.destroy_process_group()


def start_child() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def session_state() -> tuple[bool, float, int]:
    """Whether a session was open already, the sum of the ranks in it, and its identity."""
    was_open = current_session() is not None
    session = open_session()
    total = session.allreduce(torch.tensor(float(session.rank)))
    return was_open, float(total), id(session)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)
def test_every_rank_has_its_place(ranks: Ranks) -> None:
    results = ranks(describe, "x")
    for rank, (own_rank, size, environment, extra) in enumerate(results):
        assert (own_rank, size, extra) == (rank, ranks.size, "x")
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks.size),
            "LOCAL_WORLD_SIZE": str(ranks.size),
            "MASTER_ADDR": "127.0.0.1",
        }


def test_collectives_and_tensors_as_results(ranks: Ranks) -> None:
    for _ in range(2):
        for tensor in ranks(add_ranks, 1.5):
            torch.testing.assert_close(tensor, torch.full((3,), 4.0))
    assert torch.equal(ranks.run(3, add_ranks, 0.0)[2], torch.full((3,), 3.0))


def test_workers_are_started_once_and_calls_are_fast(ranks: Ranks) -> None:
    first = ranks(own_pid)
    start = time.monotonic()
    for _ in range(20):
        assert ranks(own_pid) == first
    assert (time.monotonic() - start) / 20 < 1  # 0.01 s; starting one takes several seconds


def test_state_is_put_back(ranks: Ranks) -> None:
    seeds = ranks(disturb)
    assert seeds[0] == seeds[1]
    before = ranks(look)
    assert before == ranks(look)
    variable, default, _, threads = before[0]
    assert (variable, default, threads) == (None, True, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_session_stays_open_between_tests_unless_fresh(ranks: Ranks) -> None:
    total = float(sum(range(ranks.size)))
    first = ranks(session_state)
    assert [value for _, value, _ in first] == [total] * ranks.size
    assert ranks(session_state) == [(True, total, identity) for _, _, identity in first]
    for _ in range(2):
        states = ranks(session_state, fresh=True)
        assert [state[:2] for state in states] == [(False, total)] * ranks.size
    assert not any(was_open for was_open, _, _ in ranks(session_state))


def test_output_of_the_last_call(ranks: Ranks) -> None:
    ranks(fail_on, [])
    assert ranks.output == ["rank 0 was here\n", "rank 1 was here\n"]
    ranks(own_pid)
    assert ranks.output == ["", ""]


def test_exceptions_come_back_from_all_ranks(ranks: Ranks) -> None:
    before = ranks(own_pid)
    with pytest.raises(RanksFailedError) as caught:
        ranks(fail_on, [0, 1])
    message = str(caught.value)
    for rank in (0, 1):
        assert f"rank {rank} of 2 raised" in message
        assert f"ValueError: wrong on {rank}" in caught.value.failures[rank]
        assert f"rank {rank} was here" in message
    assert "in fail_on" in message
    # The next test finds new workers.
    assert not set(before) & set(ranks(own_pid))


def test_others_do_not_wait_long_for_a_failed_rank(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 of 2 still waited") as caught:
        ranks(fail_on, [0])
    assert time.monotonic() - start < 30
    assert "ValueError: wrong on 0" in caught.value.failures[0]


def test_hung_rank_shows_its_stack(ranks: Ranks) -> None:
    pids = ranks(own_pid)
    with pytest.raises(RanksFailedError, match="rank 1 of 2 gave no answer in 2") as caught:
        ranks(hang_on_one, timeout=2)
    assert list(caught.value.failures) == [1]
    assert "in wait_for_nothing" in caught.value.failures[1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert ranks(own_pid)


def test_death_of_a_rank(ranks: Ranks) -> None:
    ranks(own_pid)
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 0 of 2 died with signal SIGKILL") as caught:
        ranks(die_with, signal.SIGKILL)
    assert time.monotonic() - start < 30
    assert "about to die" in caught.value.failures[0]


def test_results_must_pickle(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError, match="pickle"):
        ranks(unpicklable)


def test_functions_must_be_at_module_level(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="must be a module-level function"):
        ranks(lambda: None)


def test_destroyed_group_does_not_reach_the_next_test(ranks: Ranks) -> None:
    before = ranks(own_pid)
    ranks(leave_group)
    assert not set(before) & set(ranks(own_pid))


def test_what_a_test_leaves_behind_is_found() -> None:
    pool = WorkerPool()
    pool.run(1, start_child)
    problems = pool.close()
    assert len(problems) == 1
    assert "sleep 600" in problems[0]
    assert pool.close() == []


def test_workers_die_with_the_test_run(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal, sys
            from tests.multi.pool import WorkerPool
            from tests.multi.test_pool import own_pid
            if __name__ == "__main__":
                print("workers", *WorkerPool().run(2, own_pid), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    with start_launcher(sys.executable, script) as run:
        line = run.wait_for("workers", timeout=60)
        assert run.wait() == [-signal.SIGKILL]
        deadline = time.monotonic() + 5
        pids = [int(word) for word in line.text.split()[1:]]
        while any(_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "workers outlived the test run"
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
