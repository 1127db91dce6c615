"""Scripts with a Trainer, started in every way: exactly the ranks asked for, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.processes import RankProcesses, clean_environment, start_launcher
from tests.launch.test_launchers import MPIEXEC, TORCHRUN, needs_mpiexec

JOB = str(Path(__file__).with_name("trainer_job.py"))


def script(*arguments: str) -> RankProcesses:
    return start_launcher(sys.executable, JOB, *arguments)


def reports(job: RankProcesses, status: int = 0) -> list[dict[str, Any]]:
    """Waits for the end, and returns what the ranks reported, in rank order."""
    assert job.wait(timeout=90) == [status], job.report()
    return reports_of(job)


def reports_of(job: RankProcesses) -> list[dict[str, Any]]:
    lines = [json.loads(line.text) for line in job.lines if line.text.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def assert_trained(found: list[dict[str, Any]], size: int = 2, **expected: Any) -> None:
    assert [(line["rank"], line["size"]) for line in found] == [(r, size) for r in range(size)]
    assert len({line["weights"] for line in found}) == 1
    for line in found:
        assert line["steps"] == 24 // size
        assert expected.items() <= line.items()


def assert_trained_in_workers(found: list[dict[str, Any]]) -> None:
    """One report more: the parent has the weights of rank 0 afterwards."""
    assert [line["rank"] for line in found] == [0, 0, 1]
    assert len({line["weights"] for line in found}) == 1


def test_plain_python() -> None:
    with script() as job:
        found = reports(job)
        assert_trained(found, strategy="hvd_strategy.lightning.HvdStrategy")
        assert [line["imported without collections"] for line in found] == [False, True]
        assert found[0]["collector"] == found[1]["collector"]
        assert sum("tested on rank" in line.text for line in job.lines) == 2


CLI = """
import os
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    def on_fit_end(self):
        session = self.trainer.strategy.session
        os.write(1, f"rank {session.rank} of {session.size} {session.timeout}\\n".encode())

if __name__ == "__main__":
    LightningCLI(Model, BoringDataModule, save_config_callback=None)
"""
CLI_CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy:
    class_path: hvd_strategy.HvdStrategy
    init_args:
      timeout: "0:01:40"
"""


def test_command_line_with_a_configuration_file(tmp_path: Path) -> None:
    """Every rank reads the same options."""
    program, config = tmp_path / "program.py", tmp_path / "config.yaml"
    program.write_text(CLI)
    config.write_text(CLI_CONFIG)
    with start_launcher(sys.executable, program, "fit", "--config", config) as job:
        assert job.wait(timeout=90) == [0], job.report()
        for rank in (0, 1):
            assert f"rank {rank} of 2 0:01:40" in job.output()


def test_spawn_in_the_other_package() -> None:
    with script("--strategy", "hvd_spawn", "--tree", "pytorch_lightning") as job:
        found = reports(job)
        assert_trained_in_workers(found)
        expected = "hvd_strategy.lightning.pytorch_lightning.HvdStrategy"
        assert {line["strategy"] for line in found} == {expected}
        assert sum(line["imported without collections"] for line in found) == 2
        assert len({tuple(line["collector"]) for line in found}) == 1
        assert "without leaving the job" not in job.output()


def test_two_jobs_at_once() -> None:
    with script() as one, script("--strategy", "hvd_fork") as other:
        assert_trained(reports(one))
        assert_trained_in_workers(reports(other))
        assert "without leaving the job" not in other.output()


def test_torchrun() -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", JOB, "--devices", "1"]
    with start_launcher(*command) as job:
        assert_trained(reports(job), environment="TorchElasticEnvironment")


@needs_mpiexec
def test_mpirun() -> None:
    pytest.importorskip("mpi4py")
    with start_launcher(str(MPIEXEC), "-n", "2", sys.executable, JOB, "--devices", "1") as job:
        assert_trained(reports(job), environment="MPIEnvironment")


@needs_mpiexec
def test_mpirun_without_mpi4py() -> None:
    command = [str(MPIEXEC), "-n", "3", sys.executable, JOB, "--devices", "auto"]
    with start_launcher(*command, "--without-mpi4py") as job:
        assert_trained(reports(job), size=3, environment="LauncherEnvironment")


def by_hand(variables: list[dict[str, str]], *arguments: str, **common: str) -> RankProcesses:
    """One rank for each set of variables, as a launcher would start it."""
    command = [sys.executable, JOB, *arguments]
    return RankProcesses(
        [command] * len(variables), [{**clean_environment(), **common, **own} for own in variables]
    )


def test_variables_of_open_mpi() -> None:
    variables = [
        {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        for rank in range(2)
    ]
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with by_hand(variables, "--devices", "2", "--without-mpi4py", **size) as job:
        assert job.wait(timeout=90) == [0, 0], job.report()
        assert_trained(reports_of(job), environment="LauncherEnvironment")


def slurm_job_id() -> int:
    """One from which Lightning makes the number of a free port."""
    while True:
        port = random.randrange(15_000, 25_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return 770_000 + port - 15_000


def slurm(folder: Path, *arguments: str) -> RankProcesses:
    """Two tasks of a job step on one host."""
    variables = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    job = {
        "SLURM_JOB_ID": str(slurm_job_id()),
        "SLURM_JOB_NAME": "training",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    return by_hand(variables, "--directory", str(folder), *arguments, **job)


def test_slurm_saves_and_requeues_before_the_end_of_the_job(tmp_path: Path) -> None:
    """SLURM tells one rank; all of them save one checkpoint, with which the next job goes on."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    with slurm(tmp_path, "--announce", "1") as job:
        assert job.wait(timeout=90) == [0, 0], job.report()
        assert_trained(reports_of(job), environment="SLURMEnvironment", first_step=0)
    assert (tmp_path / "asked").read_text().startswith("requeue 77")
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"]
    assert 2 <= saved < 12
    with slurm(tmp_path) as job:
        assert job.wait(timeout=90) == [0, 0], job.report()
        found = reports_of(job)
        assert [line["first_step"] for line in found] == [saved, saved]
        assert len({line["weights"] for line in found}) == 1
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_exception_on_one_rank_ends_the_job() -> None:
    with script("--fail", "1") as job:
        assert reports(job, status=1) == []
        output = job.output()
        assert "ArithmeticError: the fourth bearing is hot" in output
        assert "RankFailedError: rank 0 cannot go on: rank 1 failed: ArithmeticError" in output


@pytest.mark.parametrize("strategy", ["hvd", "hvd_fork"])
def test_sigterm_of_one_rank_ends_the_job(strategy: str) -> None:
    with script("--terminate", "1", "--strategy", strategy) as job:
        # A parent of workers ends by the exception that tells their exit status.
        status = 128 + signal.SIGTERM if strategy == "hvd" else 1
        assert reports(job, status) == []
        assert "without leaving the job" not in job.output()
