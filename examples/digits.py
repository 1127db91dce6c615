"""Trains a small convolutional net on scikit-learn's digits with `Trainer(strategy="hvd")`.

    python examples/digits.py                       # two CPU processes
    python examples/digits.py --devices 4 --epochs 6
    mpirun -n 2 python examples/digits.py           # the launcher decides how many
    torchrun --nproc-per-node 2 examples/digits.py

It validates after each epoch, writes checkpoints, goes on from the last one for another epoch, and
fails when the accuracy stays below 95 %.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

BATCH_SIZE = 32  # per process
REQUIRED_ACCURACY = 0.95


class DigitsNet(LightningModule):
    """Classifies 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Measurements(Callback):
    """Throughput, and how much of the communication went on behind the computation."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.communication = {}

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        # The first steps warm up caches, and form the buckets.
        if trainer.global_step > 5:
            self.samples += len(batch[0]) * trainer.world_size
            self.seconds += now - self.last
        self.last = now

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        reducer = getattr(trainer.strategy, "reducer", None)
        if reducer is not None:
            self.communication = reducer.statistics()

    def __str__(self) -> str:
        if not self.samples:
            return "measured in the processes that fork or spawn started"
        text = f"{self.samples / self.seconds:.0f} samples/s"
        if steps := self.communication.get("backwards"):
            milliseconds = 1000 * self.communication["communication_seconds"] / steps
            hidden = self.communication["hidden_share"]
            text += f", {milliseconds:.2f} ms of communication per step, {hidden:.0%} of it hidden"
        return text


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels, dtype=torch.int64)
    parts = train_test_split(inputs, targets, test_size=0.25, random_state=0, stratify=labels)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--strategy", default="hvd", help="for comparison: ddp")
    parser.add_argument("--directory", default="checkpoints/digits", help="for the checkpoints")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # One bucket of the usual 25 MiB would hold all gradients of this small net, and leave only when
    # the last of them is there.
    os.environ.setdefault("HVD_BUCKET_CAP_MB", "0.3")

    seed_everything(0)
    train_set, test_set = digits()
    loaders = (
        DataLoader(train_set, BATCH_SIZE, shuffle=True),
        DataLoader(test_set, 64),
    )

    def trainer(epochs: int) -> Trainer:
        checkpoints = ModelCheckpoint(
            args.directory,
            filename="best",
            monitor="val_accuracy",
            mode="max",
            save_last=True,
            enable_version_counter=False,
        )
        return Trainer(
            accelerator="cpu",
            devices=args.devices,
            strategy=args.strategy,
            max_epochs=epochs,
            callbacks=[checkpoints, measurements],
            logger=False,
            log_every_n_steps=5,
        )

    measurements = Measurements()
    first = trainer(args.epochs)
    first.fit(DigitsNet(), *loaders)

    # From the checkpoint, with a new net and a new Trainer.
    second = trainer(args.epochs + 1)
    second.fit(DigitsNet(), *loaders, ckpt_path=f"{args.directory}/last.ckpt", weights_only=False)

    accuracy = float(second.callback_metrics["val_accuracy"])
    if second.is_global_zero:
        print(
            f"accuracy {accuracy:.3f} after {args.epochs + 1} epochs on {second.world_size} "
            f"processes, {measurements}"
        )
    if accuracy < REQUIRED_ACCURACY:
        raise SystemExit(
            f"The accuracy is {accuracy:.3f}, and {REQUIRED_ACCURACY} was expected: train for more "
            "epochs (--epochs), or look for what is wrong."
        )


if __name__ == "__main__":
    main()
