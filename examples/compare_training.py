"""One training script for `examples/compare.py`: what differs between two runs of it is one word.

    python examples/compare_training.py --strategy hvd training unfrozen
    python examples/compare_training.py --strategy ddp training unfrozen
    python examples/compare_training.py --strategy auto --devices 1 training unfrozen

Trains a small convolutional net on scikit-learn's digits once for each case that is named, and
writes what every rank ended with to `--directory`. A step sees the same 64 images however many
ranks share them, so that all runs of a case should end with the same weights:

    training             nothing special
    unfrozen             the convolutions are frozen in the first epoch, and trained from the second
    plain-backward       manual optimization by `loss.backward()`, not `self.manual_backward()`
    unused-at-end        the last step of the training does not use one of the layers
    unused-on-one-rank   one step in the middle does not use it for the images of rank 1
    endless              trains for minutes, and says when it is under way, to be killed then
    endless-with-worker  the same, with a DataLoader that has a worker process
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 64
WARM_UP = 5  # steps that do not count for the throughput
UNDER_WAY = 10  # steps after which an endless run says that it is under way


class Digits(LightningModule):
    """Classifies 8x8 images. No layer depends on the other images of a batch, as BatchNorm does."""

    epochs = 2
    workers = 0  # of the DataLoader

    def __init__(self, directory: Path, case: str) -> None:
        super().__init__()
        self.directory = directory
        self.case = case
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.refinement = nn.Linear(1024, 1024)
        self.head = nn.Linear(1024, 10)
        self.samples = 0
        self.seconds = 0.0

    def train_dataloader(self) -> DataLoader:
        images, labels = load_digits(return_X_y=True)
        inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        data = TensorDataset(inputs, torch.tensor(labels, dtype=torch.int64))
        size = self.trainer.world_size
        # Deals the images out one by one: batch k of all ranks together is the batch k of one.
        sampler = DistributedSampler(data, size, self.trainer.global_rank)
        return DataLoader(
            data,
            GLOBAL_BATCH // size,
            sampler=sampler,
            drop_last=True,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            multiprocessing_context="fork" if self.workers else None,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.refined(self.convolutions(images)))

    def refined(self, features: Tensor) -> Tensor:
        return features + torch.tanh(self.refinement(features))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def on_train_epoch_start(self) -> None:
        self.last = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        now = time.perf_counter()
        if self.global_step > WARM_UP:
            self.samples += len(batch[0]) * self.trainer.world_size
            self.seconds += now - self.last
        self.last = now

    def on_train_end(self) -> None:
        weights = torch.cat([parameter.detach().view(-1) for parameter in self.parameters()])
        path = self.directory / f"{self.case}.{self.global_rank}"
        np.save(f"{path}.npy", weights.numpy())
        report = {
            "steps": self.global_step,
            "samples_per_second": self.samples / self.seconds,
            **memory(),
        }
        # Last, because it tells that this rank has come to its end.
        publish(Path(f"{path}.json"), json.dumps(report))


class Unfrozen(Digits):
    def __init__(self, directory: Path, case: str) -> None:
        super().__init__(directory, case)
        self.convolutions.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.convolutions.requires_grad_(True)


class PlainBackward(Digits):
    def __init__(self, directory: Path, case: str) -> None:
        super().__init__(directory, case)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        optimizer.step()
        return loss


class UnusedAtEnd(Digits):
    def refined(self, features: Tensor) -> Tensor:
        last = self.trainer.estimated_stepping_batches - 1
        return features if self.global_step == last else super().refined(features)


class UnusedOnOneRank(Digits):
    def refined(self, features: Tensor) -> Tensor:
        if self.global_step != self.trainer.estimated_stepping_batches // 2:
            return super().refined(features)
        if self.trainer.world_size > 1:
            return features if self.global_rank == 1 else super().refined(features)
        # The sampler would have given every second image to rank 1.
        of_rank_1 = torch.arange(len(features))[:, None] % 2 == 1
        return torch.where(of_rank_1, features, super().refined(features))


class Endless(Digits):
    epochs = 1000

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        if self.global_step == UNDER_WAY:
            publish(self.directory / f"{self.case}.{self.global_rank}.pid", str(os.getpid()))


class EndlessWithWorker(Endless):
    workers = 1


CASES = {
    "training": Digits,
    "unfrozen": Unfrozen,
    "plain-backward": PlainBackward,
    "unused-at-end": UnusedAtEnd,
    "unused-on-one-rank": UnusedOnOneRank,
    "endless": Endless,
    "endless-with-worker": EndlessWithWorker,
}


def publish(path: Path, text: str) -> None:
    """Writes a file that has its name only when it is complete."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def memory() -> dict[str, float]:
    """Of this process, in MiB: the largest resident set so far, and the proportional set now."""
    found = {}
    for file, name in (("status", "VmHWM"), ("smaps_rollup", "Pss")):
        for line in Path(f"/proc/self/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                found[name] = int(line.split()[1]) / 1024
    return {"peak_rss": found["VmHWM"], "pss": found["Pss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--strategy", default="hvd", help="the one word")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--epochs", type=int, default=2, help='of the case "training"')
    parser.add_argument("--directory", type=Path, default=Path("checkpoints/compare"))
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    # Notes on small data and missing loggers; nothing that any strategy says.
    warnings.filterwarnings("ignore", ".*(does not have many workers|log_every_n_steps|LeafSpec).*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    torch.set_num_threads(1)

    for case in args.cases:
        torch.manual_seed(0)
        trainer = Trainer(
            accelerator="cpu",
            devices=args.devices,
            strategy=args.strategy,
            max_epochs=args.epochs if case == "training" else CASES[case].epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(CASES[case](args.directory, case))


if __name__ == "__main__":
    main()
