"""HvdMonitor: figures in the loggers of the user, the slowest rank named."""

from __future__ import annotations

import csv
import math
import os
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_strategy.lightning.pytorch_lightning
from hvd_strategy import HvdMonitor
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import FEATURES, Regression, loader, make_trainer, rows

KEYS = {
    "hvd/samples_per_second",
    "hvd/communication_ms",
    "hvd/exposed_ms",
    "hvd/slowest_rank",
    "hvd/wait_for_slowest_ms",
}
SLEEP = 0.1
Entry = tuple[int, dict[str, float]]


class Recording(Logger):
    """Keeps what is logged on every rank; loggers of Lightning write on rank 0 only."""

    name = "recording"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        if "hvd/exposed_ms" in metrics:
            self.entries.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        return


class Slow(Regression):
    """One rank needs longer than the others: in forward, or to get its data."""

    slow_rank: int | None = None
    place = "forward"
    validation_sleep = 0.0

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        if self.training and rank == self.slow_rank and self.place == "forward":
            time.sleep(SLEEP)
        return super().rank_loss(inputs, targets, rank, batch_idx)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.training and self.global_rank == self.slow_rank and self.place == "data":
            time.sleep(SLEEP)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        time.sleep(self.validation_sleep)
        self.validation_sleep = 0.0
        super().validation_step(batch, batch_idx)


def entries_of(
    model: Regression, count: int, monitor: Any = None, batches: Any = None, **arguments: Any
) -> list[Entry]:
    logger = Recording()
    trainer = make_trainer(
        logger=logger,
        callbacks=[monitor or HvdMonitor()],
        **{"max_epochs": 1, "log_every_n_steps": 4, **arguments},
    )
    trainer.fit(model, batches or loader(count), loader(8))
    return logger.entries


def with_a_slow_rank(slow_rank: int, place: str) -> list[Entry]:
    model = Slow()
    model.slow_rank, model.place = slow_rank, place
    return entries_of(model, 4 * 3 * 8)


@pytest.mark.parametrize("place", ["forward", "data"])
@pytest.mark.parametrize("slow_rank", [0, 2])
def test_the_slowest_rank_is_named(ranks: Ranks, slow_rank: int, place: str) -> None:
    results = ranks.run(3, with_a_slow_rank, slow_rank, place)
    assert results[0] == results[1] == results[2]
    entries = results[0]
    assert [step for step, _ in entries] == [3, 7]
    for _, figures in entries:
        assert figures.keys() == KEYS
        assert all(math.isfinite(value) for value in figures.values())
        assert figures["hvd/slowest_rank"] == slow_rank
        # Loose: the machine may hold up any rank a little, and every rank as a whole.
        assert figures["hvd/wait_for_slowest_ms"] > 0.2 * SLEEP * 1000
        # 4 rows on each of 3 ranks in a step that takes at least the sleep.
        assert 0 < figures["hvd/samples_per_second"] <= 12 / SLEEP
        assert figures["hvd/communication_ms"] > 0
        assert figures["hvd/exposed_ms"] > 0
        if place == "forward":
            assert figures["hvd/exposed_ms"] > 0.2 * SLEEP * 1000


def figures_add_up(**arguments: Any) -> tuple[list[Entry], float, dict[str, float]]:
    started = time.monotonic()
    seen: dict[str, float] = {}

    class Look(Regression):
        def on_train_end(self) -> None:
            seen.update(self.trainer.strategy.reducer.statistics())

    entries = entries_of(Look(), 64, **arguments)
    return entries, time.monotonic() - started, seen


def test_figures_add_up(ranks: Ranks) -> None:
    check_sums(ranks(figures_add_up), steps=[3, 7], samples=32)


def test_steps_of_an_accumulation(ranks: Ranks) -> None:
    # 8 batches, 4 steps, all of them in one entry.
    check_sums(ranks(accumulated), steps=[3], samples=64)


def accumulated() -> tuple[list[Entry], float, dict[str, float]]:
    return figures_add_up(accumulate_grad_batches=2)


def check_sums(results: list[Any], steps: list[int], samples: int) -> None:
    entries, seconds, _ = results[0]
    assert [step for step, _ in entries] == steps
    took = [samples / figures["hvd/samples_per_second"] for _, figures in entries]
    assert 0 < sum(took) < seconds
    for name in ("communication", "exposed"):
        logged = sum(figures[f"hvd/{name}_ms"] * 4 for _, figures in entries)
        counted = [1000 * seen[f"{name}_seconds"] for *_, seen in results]
        assert math.isclose(logged, sum(counted) / len(results), rel_tol=1e-6)


class TwoOptimizers(Regression):
    """Lightning counts two steps of a batch in global_step, and one for the loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> list[Any]:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.body, self.head)]


def intervals() -> list[list[int]]:
    found = []
    for model, arguments in (
        (TwoOptimizers(), {}),
        (Regression(), {"log_every_n_steps": 2}),
        (Regression(), {"log_every_n_steps": 0}),
        (Regression(), {"monitor": HvdMonitor(log_every_n_steps=3), "max_epochs": 2}),
    ):
        found.append([step for step, _ in entries_of(model, 64, **arguments)])
    return found


def test_how_often_it_logs(ranks: Ranks) -> None:
    assert ranks(intervals)[0] == [[3, 7], [1, 3, 5, 7], [], [2, 5, 8, 11, 14]]


def with_slow_validation() -> list[Entry]:
    model = Slow()
    model.validation_sleep = 2.0
    return entries_of(model, 32, log_every_n_steps=2, val_check_interval=2)


def test_validation_is_not_counted(ranks: Ranks) -> None:
    entries = ranks(with_slow_validation)[0]
    assert len(entries) == 2
    _, figures = entries[1]  # there is a validation of 2 s before it
    assert figures["hvd/samples_per_second"] > 16 / 2.0


class Nested:
    """What a data set may return that nobody can count."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.pair = [inputs, targets]


def nested(samples: list[Any]) -> Nested:
    return Nested(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


class OfNested(Regression):
    def training_step(self, batch: Nested, batch_idx: int) -> Tensor:
        return super().training_step(batch.pair, batch_idx)


def batch_sizes() -> tuple[list[float], str]:
    counted = []
    for arguments in ({}, {"batch_size": 8}, {"batch_size": _twice}):
        monitor = HvdMonitor(**arguments)
        entries_of(Regression(), 16, monitor)
        counted.append(monitor._counters.samples)
    batches = DataLoader(rows(16), 4, collate_fn=nested)
    entries = entries_of(
        OfNested(), 0, HvdMonitor(1, batch_size=_of_nested), batches, limit_val_batches=0
    )
    assert entries
    with pytest.raises(ValueError, match="HvdMonitor cannot tell how many") as caught:
        entries_of(OfNested(), 0, HvdMonitor(), batches, limit_val_batches=0)
    return counted, str(caught.value)


def _twice(batch: list[Tensor]) -> int:
    return 2 * len(batch[0])


def _of_nested(batch: Nested) -> int:
    return len(batch.pair[0])


def test_batch_sizes(ranks: Ranks) -> None:
    for counted, error in ranks(batch_sizes):
        assert counted == [8, 16, 16]  # two batches of four rows
        assert error == (
            "HvdMonitor cannot tell how many samples a batch of type Nested has. Say it: "
            "HvdMonitor(batch_size=...) takes a number or a function of the batch."
        )


def with_files(folder: str) -> None:
    loggers = [CSVLogger(folder, "csv", ""), CSVLogger(folder, "again", "")]
    trainer = make_trainer(
        logger=loggers, callbacks=[HvdMonitor()], max_epochs=1, log_every_n_steps=4
    )
    trainer.fit(Regression(), loader(64), loader(8))


def test_loggers_of_lightning(ranks: Ranks, tmp_path: Path) -> None:
    ranks(with_files, str(tmp_path))
    for name in ("csv", "again"):
        with open(tmp_path / name / "metrics.csv", newline="") as file:
            lines = [line for line in csv.DictReader(file) if line["hvd/exposed_ms"]]
        assert [int(line["step"]) for line in lines] == [3, 7]
        assert lines[0].keys() >= KEYS


def with_pytorch_lightning(monitor_of: str) -> int:
    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(FEATURES, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = hvd_strategy.lightning.pytorch_lightning.HvdMonitor()
    if monitor_of == "lightning":
        monitor = HvdMonitor()
    assert isinstance(monitor, pytorch_lightning.Callback) == (monitor_of == "pytorch_lightning")

    class Logger(Recording, pytorch_lightning.loggers.Logger):  # type: ignore[misc]
        pass

    logger = Logger()
    trainer = pytorch_lightning.Trainer(
        strategy="hvd",
        accelerator="cpu",
        logger=logger,
        callbacks=[monitor],
        max_epochs=1,
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader(32))
    return len(logger.entries)


@pytest.mark.parametrize("monitor_of", ["pytorch_lightning", "lightning"])
def test_the_other_lightning(ranks: Ranks, monitor_of: str) -> None:
    assert ranks(with_pytorch_lightning, monitor_of) == [2, 2]


def test_one_rank(ranks: Ranks) -> None:
    entries = ranks.run(1, figures_add_up)[0][0]
    for _, figures in entries:
        assert figures.pop("hvd/samples_per_second") > 0
        assert set(figures.values()) == {0.0}


@pytest.mark.parametrize(
    "arguments",
    [
        {"log_every_n_steps": 0},
        {"log_every_n_steps": 2.5},
        {"log_every_n_steps": True},
        {"batch_size": 0},
        {"batch_size": "8"},
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not accepted: it takes")):
        HvdMonitor(**arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"strategy": "auto"}, "this Trainer's strategy is SingleDeviceStrategy"),
        ({"strategy": "ddp"}, "this Trainer's strategy is DDPStrategy"),
        ({"logger": False}, "writes to the Trainer's loggers, but it has none"),
    ],
    ids=str,
)
def test_nothing_to_monitor(
    arguments: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning's own launcher leaves variables behind, and this process would look like a rank.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    trainer = make_trainer(
        **{"logger": Recording(), "devices": 1, "callbacks": [HvdMonitor()], **arguments}
    )
    data = DataLoader(TensorDataset(torch.zeros(4, FEATURES), torch.zeros(4, 1)))
    with pytest.raises(ValueError, match=problem):
        trainer.fit(Regression(), data)


def test_without_training_it_does_not_mind() -> None:
    trainer = make_trainer("auto", devices=1, callbacks=[HvdMonitor()])
    trainer.validate(Regression(), loader(8), verbose=False)
    trainer.predict(Regression(), loader(8))


def test_it_goes_to_other_processes() -> None:
    monitor = pickle.loads(pickle.dumps(HvdMonitor(5, batch_size=3)))
    assert (monitor._every, monitor._batch_size) == (5, 3)
    assert type(monitor) is HvdMonitor
    assert HvdMonitor.__module__ == "hvd_strategy.lightning"
    assert HvdMonitor.__doc__ is not None
