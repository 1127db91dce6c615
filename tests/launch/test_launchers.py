"""Jobs as users start them: fresh processes under real launchers.

Each start costs the imports of torch, so there is one job per way of starting, and each of them
checks all that can be checked there.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
# Variables of a launcher that may have started the tests themselves.
_LAUNCHER_PREFIXES = ("PMI", "OMPI_", "MPI_", "SLURM_", "HOROVOD_", "TORCHELASTIC_", "MASTER_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def _find_mpiexec() -> str | None:
    # The wheel of MPICH puts it beside the interpreter; mpiexec.hydra is MPICH's and Intel's.
    folder = sysconfig.get_path("scripts")
    return shutil.which("mpiexec.hydra", path=folder) or shutil.which("mpiexec.hydra")


MPIEXEC = _find_mpiexec()
needs_mpiexec = pytest.mark.skipif(
    MPIEXEC is None, reason="needs MPICH's mpiexec: pip install mpich"
)


class Job:
    """A command and all processes that it starts; nothing of them outlives the block."""

    def __init__(
        self, command: Sequence[str], results: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.results = results
        results.mkdir(parents=True, exist_ok=True)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
        }
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environ or {})},
            start_new_session=True,
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        # Launchers put ranks into process groups of their own, but leave them in the session.
        for _ in range(2):
            for pid in self._members():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait(timeout=10)

    def wait(self, timeout: float = 60) -> str:
        """Waits for the end of the command; returns all that the job printed."""
        output, _ = self.process.communicate(timeout=timeout)
        return output

    def answers(self) -> list[dict[str, Any]]:
        """What the ranks found, by rank, after a good end of the job."""
        output = self.wait()
        assert self.process.returncode == 0, output
        assert not self._members()
        answers = [json.loads(path.read_text()) for path in sorted(self.results.iterdir())]
        assert [answer["rank"] for answer in answers] == list(range(len(answers)))
        return answers

    def _members(self) -> list[int]:
        """Processes of the session that the command leads."""
        members = []
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            # A process that has ended is no member, even while nobody has waited for it.
            if entry.name.isdigit() and fields[3] == str(self.process.pid) and fields[0] != "Z":
                members.append(int(entry.name))
        return members


def mpiexec(size: int, results: Path, task: str = "greet", **environ: str) -> Job:
    assert MPIEXEC is not None
    return Job(
        [MPIEXEC, "-n", str(size), sys.executable, str(JOB), str(results), task], results, environ
    )


def check_greeting(
    answers: list[dict[str, Any]], size: int, launcher: str, mark: str | None = None
) -> None:
    """Exactly `size` ranks met, on one host, and left the environment alone."""
    assert len(answers) == size
    for rank, answer in enumerate(answers):
        assert answer["size"] == answer["local_size"] == size
        assert answer["local_rank"] == rank
        assert answer["launcher"] == launcher
        assert answer["sum"] == [size * (size + 1) / 2, float("1" * size)]
        assert answer["marks"] == [mark] * size
        assert answer["group"] == [rank, size]
        assert answer["environment_unchanged"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_torchrun(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", str(JOB), str(tmp_path), "greet"]
    with Job(command, tmp_path) as job:
        check_greeting(job.answers(), 2, "torchrun")


def test_torchrun_with_a_group_of_the_users(tmp_path: Path) -> None:
    task = "meet_in_users_group"
    command = [*TORCHRUN, "--nproc-per-node", "2", str(JOB), str(tmp_path), task]
    with Job(command, tmp_path) as job:
        check_greeting(job.answers(), 2, "torchrun")


def by_hand(rank: int, results: Path, port: int, task: str = "greet") -> Job:
    environ = {"RANK": str(rank), "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Job([sys.executable, str(JOB), str(results), task], results, environ)


def test_ranks_started_by_hand(tmp_path: Path) -> None:
    with by_hand(0, tmp_path, port := free_port()) as first, by_hand(1, tmp_path, port) as second:
        output = second.wait()
        assert second.process.returncode == 0, output
        check_greeting(first.answers(), 2, "env")


def test_one_process_alone(tmp_path: Path) -> None:
    with Job([sys.executable, str(JOB), str(tmp_path), "greet"], tmp_path) as job:
        [answer] = job.answers()
    assert (answer["rank"], answer["size"], answer["launcher"]) == (0, 1, "single")
    assert answer["group"] is None
    assert answer["environment_unchanged"]


@needs_mpiexec
def test_two_mpi_jobs_at_once_without_mpi4py(tmp_path: Path) -> None:
    """Nothing but the launcher's process tells them apart."""
    with (
        mpiexec(2, tmp_path / "a", TEST_MARK="a", TEST_WITHOUT_MPI4PY="1") as first,
        mpiexec(3, tmp_path / "b", TEST_MARK="b", TEST_WITHOUT_MPI4PY="1") as second,
        mpiexec(2, tmp_path / "c", TEST_MARK="c", TEST_WITHOUT_MPI4PY="1") as third,
    ):
        for job, size, mark in ((first, 2, "a"), (second, 3, "b"), (third, 2, "c")):
            answers = job.answers()
            check_greeting(answers, size, "mpich", mark)
            assert not any(answer["mpi4py"] for answer in answers)


@needs_mpiexec
def test_mpi_with_mpi4py(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    with mpiexec(2, tmp_path, "greet_mpi4py") as job:
        answers = job.answers()
    check_greeting(answers, 2, "mpich")
    assert [answer["mpi"] for answer in answers] == [[0, 2, 3], [1, 2, 3]]


@needs_mpiexec
def test_mpi_through_a_shell(tmp_path: Path) -> None:
    """Every rank has a parent of its own; the launcher is found behind it."""
    assert MPIEXEC is not None
    line = f'"{sys.executable}" "{JOB}" "{tmp_path}" greet; exit $?'
    with Job([MPIEXEC, "-n", "2", "/bin/sh", "-c", line], tmp_path) as job:
        check_greeting(job.answers(), 2, "mpich")


@needs_mpiexec
def test_mpi_with_an_address_in_the_environment(tmp_path: Path) -> None:
    with mpiexec(2, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())) as job:
        check_greeting(job.answers(), 2, "mpich")


@needs_mpiexec
def test_two_mpi_jobs_with_one_address(tmp_path: Path) -> None:
    """At least one fails and says why; no rank works with one of the other job."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HVD_TIMEOUT": "20"}
    with (
        mpiexec(2, tmp_path / "a", TEST_MARK="a", **address) as first,
        mpiexec(2, tmp_path / "b", TEST_MARK="b", **address) as second,
    ):
        outputs = [first.wait(), second.wait()]
    failed = [job.process.returncode != 0 for job in (first, second)]
    assert any(failed), outputs
    assert "MASTER_PORT" in "".join(outputs)
    for job, mark in ((first, "a"), (second, "b")):
        for path in job.results.iterdir():
            assert json.loads(path.read_text())["marks"] == [mark, mark]


def test_an_exception_reaches_the_other_rank(tmp_path: Path) -> None:
    # By hand, because a launcher would end rank 0 as well before it can tell.
    with by_hand(0, tmp_path, port := free_port(), "fail") as first:
        with by_hand(1, tmp_path, port, "fail") as second:
            output = second.wait()
            assert second.process.returncode == 1
        assert "ArithmeticError: the fourth bearing is hot" in output
        [answer] = first.answers()
    assert answer["failure"] == "rank 1 failed: ArithmeticError: the fourth bearing is hot"
    assert answer["seconds"] < 10


def test_contradictions_end_the_process(tmp_path: Path) -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "2"}
    with Job([sys.executable, str(JOB), str(tmp_path), "greet"], tmp_path, environ) as job:
        output = job.wait()
    assert job.process.returncode == 1
    assert "HvdError: RANK=2 does not fit WORLD_SIZE=2" in output


def test_ranks_without_a_place_to_meet(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    with Job([sys.executable, str(JOB), str(tmp_path), "greet"], tmp_path, environ) as job:
        output = job.wait()
    assert job.process.returncode == 1
    assert "set MASTER_ADDR and MASTER_PORT" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_waiting_for_the_other_rank(tmp_path: Path, rank: int) -> None:
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "HVD_STALL_WARNING_SECONDS": "0.1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with Job([sys.executable, str(JOB), str(tmp_path), "greet"], tmp_path, environ) as job:
        assert job.process.stdout is not None
        while f"rank {rank}'s wait for " not in job.process.stdout.readline():
            assert job.process.poll() is None
        started = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        output = job.wait(10)
        assert time.monotonic() - started < 3  # 0.1 s on a quiet machine
    assert "KeyboardInterrupt" in output
    assert job.process.returncode == -signal.SIGINT
