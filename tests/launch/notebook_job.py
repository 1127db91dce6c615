"""What test_notebook_launcher.py starts: a script without a guard, as the cells of a notebook are.

`notebook_job.py PHASE` runs one of the phases below with `strategy="hvd_notebook"`. The ranks never
import this file: all that they know of it was sent to them.
"""

import copy
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_strategy import HvdError, RankFailedError

# One of the phases is about the other package of the same code.
TREE = "pytorch_lightning" if sys.argv[1] == "failing" else "lightning.pytorch"
pl: Any = import_module(TREE)

FACTOR = 3.0


@dataclass
class Settings:
    rate: float


def scaled(values: torch.Tensor) -> torch.Tensor:
    """A function of the notebook, which uses what the notebook defines."""
    return values * FACTOR


class Model(pl.LightningModule):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.layer(scaled(inputs)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self(batch[0]) ** 2).mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"outputs": self(batch[0]), "settings": self.hparams["settings"]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.hparams["settings"].rate, momentum=0.9
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Remembers(pl.Callback):
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.module: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert not torch.cuda._is_in_bad_fork()  # nothing is inherited

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(trainer.current_epoch)
        self.module = pl_module
        print(f"epoch {trainer.current_epoch} of rank {trainer.global_rank}")
        warnings.warn(f"odd epoch {trainer.current_epoch}", stacklevel=1)


DATA = TensorDataset(torch.arange(96.0).view(24, 4) / 96)


def loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size)


def loader_alone() -> DataLoader[Any]:
    """For a single process: each batch has the samples of the batches of 2 of both ranks."""
    sampler = DistributedSampler(DATA, num_replicas=1, rank=0, seed=0)
    return DataLoader(DATA, 4, sampler=sampler)


def trainer(strategy: str, devices: int, *callbacks: Any, **arguments: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        callbacks=list(callbacks),
        enable_model_summary=False,
        max_epochs=1,
        log_every_n_steps=1,
        **arguments,
    )


def warm_up() -> None:
    """What Lightning opens for its first Trainer, and torch for its first store, stays open."""
    trainer("hvd_notebook", 2, logger=False)
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def state_of_process() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "handlers": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "python": random.getstate(),
        "numpy": [
            part if i != 1 else part.tolist() for i, part in enumerate(np.random.get_state())
        ],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().tolist(),
        "folder": os.getcwd(),
        "threads": threading.enumerate(),
        "torch_threads": torch.get_num_threads(),
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ),
        "processes": (
            multiprocessing.active_children(),
            Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        ),
    }


@contextmanager
def process_unchanged() -> Iterator[None]:
    before = state_of_process()
    yield
    after = state_of_process()
    for name, value in before.items():
        assert after[name] == value, (name, value, after[name])


def equal(model: Any, reference: Any) -> None:
    found, expected = model.state_dict(), reference.state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def good_runs() -> None:
    folder = sys.argv[2]
    # The state by which torch and Lightning know that CUDA was used before a fork.
    torch.cuda._is_in_bad_fork = lambda: True
    with pytest.raises(RuntimeError, match="CUDA"):
        trainer("hvd_fork", 2, logger=False).fit(Model(Settings(0.1)), loader(2))
    model = Model(Settings(0.1))
    layer, weight = model.layer, model.layer.weight
    alone = copy.deepcopy(model)
    remembers = Remembers()
    reference = trainer("auto", 1, logger=False, enable_progress_bar=False, default_root_dir=folder)
    logger = pl.loggers.CSVLogger(folder)
    ours = trainer("hvd_notebook", 2, remembers, logger=logger)
    warm_up()
    with process_unchanged():
        ours.fit(model, loader(2))
    reference.fit(alone, loader_alone())
    equal(model, alone)
    assert model.layer is layer
    assert layer.weight is weight
    assert model.tied.weight is weight
    assert (ours.global_step, ours.current_epoch) == (6, 1)
    assert ours.state.finished
    assert len(model.losses) == 6
    assert set(ours.callback_metrics) == {"loss", "loss_step", "loss_epoch"}
    first = Path(ours.checkpoint_callback.best_model_path)
    assert first.is_file()
    assert remembers.epochs == [0]
    assert remembers.module is model

    for each in (ours, reference):
        each.fit_loop.max_epochs = 2
    with process_unchanged():
        ours.fit(model, loader(2))
    reference.fit(alone, loader_alone())
    equal(model, alone)
    assert (ours.global_step, ours.current_epoch) == (12, 2)
    assert remembers.epochs == [0, 1]
    assert len(model.losses) == 12
    assert Path(ours.checkpoint_callback.best_model_path) != first
    metrics = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert len(metrics.splitlines()) == 1 + 12 + 2, metrics

    # A checkpoint from here is as complete as one from there.
    ours.save_checkpoint(f"{folder}/here.ckpt")
    here = torch.load(f"{folder}/here.ckpt", weights_only=False)
    there = torch.load(ours.checkpoint_callback.best_model_path, weights_only=False)
    assert here["hyper_parameters"]["settings"] == Settings(0.1)
    assert here["global_step"] == there["global_step"] == 12
    torch.testing.assert_close(
        here["optimizer_states"][0]["state"], there["optimizer_states"][0]["state"]
    )
    assert here["lr_schedulers"] == there["lr_schedulers"]

    predictions = ours.predict(model, loader(2))
    assert len(predictions) == 6
    assert isinstance(predictions[0]["settings"], Settings)
    torch.testing.assert_close(predictions[0]["outputs"], model(torch.tensor(
        [[0.0, 1, 2, 3], [8, 9, 10, 11]]
    ) / 96))  # fmt: skip
    assert len(remembers.epochs) == 2


class Breaks(Model):
    how = "raise"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            if self.how == "raise":
                raise ArithmeticError("the fourth bearing is hot")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def failing_runs() -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    warm_up()
    model = Breaks(Settings(0.1))

    def fit() -> None:
        trainer("hvd_notebook", 2, **quiet).fit(model, loader(2))

    with process_unchanged(), pytest.raises(RankFailedError) as caught:
        fit()
    text = str(caught.value)
    assert "rank 1 failed: ArithmeticError: the fourth bearing is hot" in text
    assert "in training_step" in text
    assert isinstance(caught.value.__cause__, ArithmeticError)
    model.how = "kill"
    with process_unchanged(), pytest.raises(RankFailedError) as caught:
        fit()
    assert "rank 1 (pid " in str(caught.value)
    assert "was killed by SIGKILL" in str(caught.value)
    model.extra = threading.Lock()
    with process_unchanged(), pytest.raises(HvdError, match="cannot be sent to the ranks"):
        fit()


class Endless(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            print(json.dumps({"rank": self.global_rank, "pid": os.getpid()}))
        return super().training_step(batch, batch_idx)


def endless_run() -> None:
    """Until somebody ends it."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    ours = trainer("hvd_notebook", 2, **quiet)
    ours.fit_loop.max_epochs = -1
    data = TensorDataset(torch.ones(1_000_000, 4))
    model = Endless(Settings(0.1))
    try:
        ours.fit(model, DataLoader(data, 2, num_workers=1))
    except SystemExit as error:  # as Lightning ends a process on Ctrl-C
        print(f"SystemExit {error.code}, {ours.state.status.value}, {len(model.losses) >= 3}")
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)


{"good": good_runs, "failing": failing_runs, "endless": endless_run}[sys.argv[1]]()
