"""Data, models and runs that the tests of ranks with different numbers of batches share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
)
from torchmetrics import MeanAbsoluteError

from tests.multi.trainer_cases import (
    FEATURES,
    Outcome,
    Regression,
    make_trainer,
    outcome,
    own_rank,
)

ROWS = 4  # of a batch


def batch_of(rank: int, index: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    return [inputs, inputs.sum(1, keepdim=True)]


def batches_of(rank: int, count: int) -> list[list[Tensor]]:
    return [batch_of(rank, index) for index in range(count)]


def together(counts: list[int]) -> DataLoader:
    """What one process trains on: in each step the batches of all ranks that have one."""
    steps = [
        [batch_of(rank, index) for rank, count in enumerate(counts) if count > index]
        for index in range(max(counts))
    ]
    return DataLoader(steps, None)


class Foreign:
    """A loader of another make, with a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Stream(IterableDataset):
    """The rows of some batches, with or without a length; it may be a wrong one."""

    def __init__(self, batches: list[list[Tensor]], length: int | None) -> None:
        self.batches = batches
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for inputs, targets in self.batches:
            yield from zip(inputs, targets, strict=True)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("unknown")
        return self.length


def loader_of(kind: str, rank: int, count: int) -> Any:
    batches = batches_of(rank, count)
    if kind == "batches":
        return DataLoader(batches, None)
    if kind == "foreign":
        return Foreign(batches)
    if kind == "map":
        inputs = torch.cat([batch[0] for batch in batches])
        targets = torch.cat([batch[1] for batch in batches])
        return DataLoader(TensorDataset(inputs, targets), ROWS)
    if kind == "stream":
        return DataLoader(Stream(batches, None), ROWS)
    if kind == "sized stream":
        return DataLoader(Stream(batches, count * ROWS), ROWS)
    assert kind == "wrongly sized stream"
    return DataLoader(Stream(batches, 10 * ROWS), ROWS)


class Uneven(Regression):
    """In the reference the loss is the mean of those of the ranks that have a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.hooks: list[tuple[str, int, int, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.trained.append(batch_idx)
        shares = batch if isinstance(batch[0], list) else [batch]
        losses = [self.rank_loss(*share, 0, batch_idx) for share in shares]
        return torch.stack(losses).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.rank_loss(*batch, 0, batch_idx), sync_dist=True)


class Momentum(Uneven):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


class Scheduled(Uneven):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def run(
    model: Uneven, data: Any, validation: Any = None, test: Any = None, **arguments: Any
) -> Outcome:
    trainer = make_trainer(use_distributed_sampler=False, **arguments)
    trainer.fit(model, data, validation)
    return outcome(trainer, model, extra=model.trained)


def fit_uneven(
    model: type[Uneven], kind: str, counts: list[int], arguments: dict[str, Any]
) -> Outcome:
    torch.manual_seed(own_rank())
    return run(model(), loader_of(kind, own_rank(), counts[own_rank()]), **arguments)


def one_process(model: type[Uneven], counts: list[int], **arguments: Any) -> Outcome:
    torch.manual_seed(0)
    return run(model(), together(counts), strategy="auto", devices=1, **arguments)


class Evaluating(Uneven):
    """Validates, tests and predicts; with a metric of torchmetrics besides the logged mean."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanAbsoluteError()
        self.evaluated = 0

    def _evaluate(self, name: str, batch: list[Tensor]) -> None:
        self.evaluated += len(batch[0])
        predicted = self.head(self.body(batch[0]))
        self.error(predicted, batch[1])
        self.log(f"{name}_error", self.error)
        self.log(f"{name}_loss", nn.functional.mse_loss(predicted, batch[1]), sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)
