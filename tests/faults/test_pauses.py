"""Ranks that are away for a while: what is said about them, and when nothing is."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_strategy import open_session
from hvd_strategy.lightning import HvdStrategy
from tests.faults.fork_server import ForkServer
from tests.faults.ranks import Training, say

PAUSE = 1.5


class Pausing(LightningModule):
    """`away` says where which rank pauses."""

    def __init__(self, away: dict[str, int]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.away = away

    def pause(self, place: str) -> None:
        if self.away.get(place) == int(os.environ["RANK"]):
            say(f"pauses in {place}")
            time.sleep(PAUSE)

    def prepare_data(self) -> None:
        self.pause("prepare_data")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.pause("forward")
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.pause("validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowDisk(TorchCheckpointIO):
    def __init__(self, model: Pausing) -> None:
        super().__init__()
        self.model = model

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.model.pause("checkpoint")
        super().save_checkpoint(*args, **kwargs)


def fit(folder: str, away: dict[str, int], options: dict[str, Any]) -> None:
    model = Pausing(away)
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 96).view(24, 4)), 4)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HvdStrategy(**options),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        plugins=[SlowDisk(model)],
        callbacks=[ModelCheckpoint(folder)],
        default_root_dir=folder,
    )
    trainer.fit(model, data, data)
    say(f"finished after {trainer.global_step} steps")


def test_reports_say_where_the_missing_rank_is(server: ForkServer, tmp_path: Path) -> None:
    away = {"forward": 1, "validation": 1, "checkpoint": 0}
    options = {"stall_warning_seconds": 0.4, "stall_abort_seconds": 60}
    with server.start_function(fit, str(tmp_path), away, options) as ranks:
        assert ranks.wait() == [0, 0], ranks.report()
        pids = ranks.pids
        waiting = "hvd_strategy: [rank 0] has been waiting for "
        line = ranks.wait_for(f"rank 1 (pid {pids[1]}, sleeping) is in: the forward of batch 2", 0)
        assert line.text.startswith(waiting)
        assert "for the end of backward 2 on rank 1 (last seen " in line.text
        line = ranks.wait_for(f"rank 1 (pid {pids[1]}, sleeping) is in: validation (for ", 0)
        assert line.text.startswith(waiting)
        line = ranks.wait_for("is in: the saving of a checkpoint (for ", 1)
        assert f"rank 0 (pid {pids[0]}, sleeping) " in line.text
        for rank in range(2):
            ranks.wait_for("goes on after ", rank)
            ranks.wait_for("finished after 3 steps", rank)


def test_legitimate_pauses_raise_no_alarm(server: ForkServer, tmp_path: Path) -> None:
    away = {"prepare_data": 0, "forward": 1, "validation": 0, "checkpoint": 0}
    with server.start_function(fit, str(tmp_path), away, {"stall_warning_seconds": 30}) as ranks:
        assert ranks.wait() == [0, 0], ranks.report()
        ranks.wait_for("pauses in prepare_data", 0)
        assert "hvd_strategy: [rank" not in ranks.output()
        for rank in range(2):
            ranks.wait_for("finished after 3 steps", rank)


def different_places() -> None:
    session = open_session(stall_warning_seconds=0.3, stall_abort_seconds=1.0)
    training = Training(session)
    training.step()
    if session.rank == 1:
        session.barrier()
    else:
        training.step()


def test_ranks_that_wait_for_each_other(server: ForkServer) -> None:
    with server.start_function(different_places) as ranks:
        assert ranks.wait() == [1, 1], ranks.report()
        line = ranks.wait_for("hvd_strategy: [rank 0] has been waiting for", 0)
        assert "the end of backward 1 on rank 1" in line.text
        # It wakes now and then to look for signals.
        assert re.search(rf"rank 1 \(pid {ranks.pids[1]}, \w+\) waits for barrier", line.text)
        line = ranks.wait_for("hvd_strategy: [rank 1] has been waiting for", 1)
        assert "barrier, which has not been called by rank 0" in line.text
        assert "waits for the end of backward 1 on rank 1" in line.text
        for rank in range(2):
            ranks.wait_for("StallError: ", rank)


def stopped_together() -> None:
    session = open_session(stall_warning_seconds=0.5, stall_abort_seconds=1.0)
    training = Training(session)
    for number in range(30):
        if number == 3:
            say("in the middle")
        if number > 3:
            time.sleep(0.02)
        training.step()
    training.check()
    say("right")


def test_a_job_that_is_stopped_as_a_whole_goes_on(server: ForkServer) -> None:
    """Ctrl-Z: the time counts against nobody, although some rank was waiting for another."""
    with server.start_function(stopped_together, ranks=3) as ranks:
        ranks.wait_for("in the middle", 0)
        for rank in range(3):
            ranks.kill(rank, signal.SIGSTOP)
        time.sleep(2.5)
        # Not all at once, as a shell does it either.
        for rank in (2, 0, 1):
            ranks.kill(rank, signal.SIGCONT)
        assert ranks.wait() == [0, 0, 0], ranks.report()
        for rank in range(3):
            ranks.wait_for("right", rank)


def test_sigterm_during_a_stall(server: ForkServer, tmp_path: Path) -> None:
    """It does not wait for the limit of stalls, and the stopped rank does not stay."""
    options = {"stall_warning_seconds": 0.3, "abort_grace_seconds": 1.0}
    with server.start_function(fit_and_stop, str(tmp_path), options) as ranks:
        ranks.wait_for("stops", 1)
        warning = ranks.wait_for("hvd_strategy: [rank 0] has been waiting for", 0)
        assert f"rank 1 (pid {ranks.pids[1]}, stopped by a signal) is in: " in warning.text
        sent = ranks.kill(0, signal.SIGTERM)
        error = ranks.wait_for("StallError: rank 0 cannot go on: rank 0 waited for ", 0)
        assert "was asked to end and nothing moved for 1 s (abort_grace_seconds)" in error.text
        print(f"ended after {error.seconds - sent:.2f} s")
        statuses = ranks.wait()
        assert 0 not in statuses, ranks.report()


class Stopping(Pausing):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            say("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def fit_and_stop(folder: str, options: dict[str, Any]) -> None:
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 96).view(24, 4)), 4)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HvdStrategy(**options),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(Stopping({}), data)
