"""Which data each rank gets, and steps that a rank skips."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hvd_strategy import MismatchError, RankFailedError
from hvd_strategy.data import shard
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    Outcome,
    Regression,
    assert_as_single_process,
    assert_ranks_agree,
    fit,
    make_trainer,
    outcome,
    own_rank,
    reference,
    rows,
)

ROWS = 24


class Numbered(Dataset):
    """Rows that tell their number."""

    def __init__(self, count: int = ROWS) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return (*self.rows[index], index)


class Seeing(Regression):
    """Keeps the numbers of the rows it was shown, by epoch and batch."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[list[list[int]]] = []
        self.validated: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.trained.append([])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trained[-1].append(batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(batch[2].tolist())


class Shuffled(Sampler):
    """Draws with Python's and NumPy's random numbers as well."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.data)))
        random.shuffle(order)
        return iter([order[i] for i in numpy.random.permutation(len(order))])


class Ascending(Sampler):
    """An order that means something: a curriculum, say."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data)))


class Buckets:
    """A batch sampler of another make: neighbours together, buckets in any order."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in torch.randperm(len(self)).tolist():
            first = start * self.size
            yield list(range(first, min(first + self.size, self.count)))


class RankSampler(Shuffled):
    """Draws from a generator that each rank seeded for itself."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(own_rank())
        return iter(torch.randperm(len(self.data), generator=generator).tolist())


def loader_of(kind: str) -> Any:
    data = Numbered()
    if kind == "plain":
        return DataLoader(data, 3)
    if kind == "shuffled":
        return DataLoader(data, 3, shuffle=True)
    if kind == "subset":
        return DataLoader(data, 3, sampler=SubsetRandomSampler(range(0, ROWS, 2)))
    if kind == "weighted":
        weights = [0.0] * 12 + [1.0] * 12
        return DataLoader(data, 3, sampler=WeightedRandomSampler(weights, ROWS))
    if kind == "own":
        return DataLoader(data, 3, sampler=Shuffled(data))
    if kind == "ascending":
        return DataLoader(data, 3, sampler=Ascending(data))
    if kind == "workers":
        return DataLoader(data, 3, sampler=Shuffled(data), num_workers=1)
    if kind == "batches":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 3, False))
    if kind == "weighted batches":
        weights = [0.0] * 12 + [1.0] * 12
        sampler = WeightedRandomSampler(weights, ROWS)
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 3, False))
    if kind == "buckets":
        return DataLoader(data, batch_sampler=Buckets(ROWS, 3))
    if kind == "uneven buckets":
        return DataLoader(Numbered(21), batch_sampler=Buckets(21, 3))
    assert kind == "by rank"
    return DataLoader(data, 3, sampler=RankSampler(data))


def see(kinds: list[str]) -> list[Any]:
    results = []
    for kind in kinds:
        # As different as random states and seeds of ranks can be.
        os.environ["PL_GLOBAL_SEED"] = str(own_rank())
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(own_rank())
        model = Seeing()
        loader = loader_of(kind)
        batch_sampler = loader.batch_sampler
        trainer = make_trainer(max_epochs=3)
        trainer.fit(model, loader, loader)
        assert loader.batch_sampler is batch_sampler  # the user's loader is left alone
        assert all(len(epoch) == len(trainer.train_dataloader) for epoch in model.trained)
        results.append([model.trained, model.validated])
    return results


KINDS = (
    "plain",
    "shuffled",
    "subset",
    "weighted",
    "own",
    "ascending",
    "workers",
    "batches",
    "weighted batches",
    "buckets",
    "uneven buckets",
)


def flat(epochs: Any) -> list[int]:
    return [number for epoch in epochs for number in epoch]


def test_shares_of_every_kind_of_sampler(ranks: Ranks) -> None:
    kinds = list(KINDS)
    results = ranks(see, kinds)
    for place, kind in enumerate(kinds):
        trained = [result[place][0] for result in results]
        epochs = [
            [flat(rank[epoch]) for rank in trained] for epoch in range(3)
        ]  # by epoch and rank
        wanted = set(range(ROWS))
        if kind == "subset":
            wanted = set(range(0, ROWS, 2))
        elif kind == "uneven buckets":
            wanted = set(range(21))
        for shares in epochs:
            assert len(shares[0]) == len(shares[1]), kind
            together = shares[0] + shares[1]
            if kind.startswith("weighted"):
                assert set(together) <= set(range(12, ROWS)), kind
                assert len(together) == ROWS, kind
            else:
                assert set(together) == wanted, kind
                # What does not go round is repeated.
                repeated = 3 if kind == "uneven buckets" else 0
                assert len(together) == len(wanted) + repeated, kind
        if kind != "ascending":
            assert epochs[0] != epochs[1], kind
            assert epochs[1] != epochs[2], kind
        validated = [flat(result[place][1]) for result in results]
        if not kind.startswith("weighted"):
            assert set(validated[0]) | set(validated[1]) == wanted, kind
    bucket = results[0][kinds.index("buckets")][0][0][0]
    assert bucket == list(range(bucket[0], bucket[0] + 3))
    ascending = [result[kinds.index("ascending")][0][0] for result in results]
    assert ascending[0][0] == [0, 2, 4]
    assert ascending[1][0] == [1, 3, 5]


def predict_shuffled(kind: str) -> list[int]:
    torch.manual_seed(own_rank())
    model = Predicting()
    trainer = make_trainer()
    predictions = trainer.predict(model, loader_of(kind))
    return torch.cat(predictions).tolist()


class Predicting(Seeing):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[2]


@pytest.mark.parametrize("kind", ["shuffled", "own"])
def test_predictions_of_shuffled_data_are_complete(ranks: Ranks, kind: str) -> None:
    first, second = ranks(predict_shuffled, kind)
    assert sorted(first + second) == list(range(ROWS))


def refused() -> str:
    try:
        see(["by rank"])
    except (MismatchError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_samplers_that_draw_differently_are_refused_on_every_rank(ranks: Ranks) -> None:
    for text in ranks(refused):
        assert text.startswith("MismatchError: A sampler or batch sampler draws other samples")


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(Numbered(16)[index] for index in range(16))


class Foreign:
    """A loader of another make."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def stream(split: bool, foreign: bool) -> list[int]:
    data = Stream()
    loader: Any = DataLoader(shard(data) if split else data, 4)
    if foreign:
        loader = Foreign(loader)
    model = Seeing()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(model, loader)
    return flat(model.trained[0])


@pytest.mark.parametrize(("split", "foreign"), [(True, False), (False, False), (False, True)])
def test_iterable_data(ranks: Ranks, split: bool, foreign: bool) -> None:
    results = ranks(stream, split, foreign)
    warning = "The first training batch is the same on ranks 0, 1"
    told = [output.count(warning) for output in ranks.output]
    if split:
        assert sorted(results[0] + results[1]) == list(range(16))
        assert told == [0, 0]
    else:
        assert results == [list(range(16))] * 2
        assert told == [1, 0]


# ---- training_step returns None


class Skipping(Regression):
    """Some ranks skip some batches; all skip the fourth."""

    def skips(self, rank: int, batch_idx: int) -> bool:
        return batch_idx == 3 or (batch_idx % 2 == 1 and rank == self.current_epoch % 2)

    def loss(self, batch: list[Tensor], batch_idx: int) -> Any:
        inputs, targets = batch
        ranks = range(self.ranks) if self.ranks else [self.global_rank]
        step = max(self.ranks, 1)
        losses = [
            self.rank_loss(inputs[place::step], targets[place::step], rank, batch_idx)
            for place, rank in enumerate(ranks)
            if not (self.trainer.training and self.skips(rank, batch_idx))
        ]
        return torch.stack(losses).mean() if losses else None

    def configure_optimizers(self) -> Any:
        # Momentum and decay would show a step with gradients of zero.
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


class SkippingClipped(Skipping):
    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        return 50 * super().rank_loss(inputs, targets, rank, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class RankZeroSkips(Skipping):
    """Always the same rank; the layer behind its loss is used by the others only."""

    def skips(self, rank: int, batch_idx: int) -> bool:
        return rank == 0


class AllSkip(Skipping):
    def skips(self, rank: int, batch_idx: int) -> bool:
        return True


def fit_skipping(model: type[Regression], arguments: dict[str, Any]) -> Outcome:
    return fit(model, 48, **arguments)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (Skipping, {}),
        (SkippingClipped, {"gradient_clip_val": 1.0}),
        (RankZeroSkips, {}),
        (AllSkip, {}),
    ],
)
def test_skipped_steps(ranks: Ranks, model: type[Regression], arguments: dict[str, Any]) -> None:
    results = ranks(fit_skipping, model, arguments)
    assert_as_single_process(results, reference(model, ranks.size, **arguments))


class SkipsTogether(Skipping):
    """All ranks skip the same batches."""

    def skips(self, rank: int, batch_idx: int) -> bool:
        return batch_idx in (1, 3, 4, 5)


def skip_together(accumulate_grad_batches: int) -> Outcome:
    return fit(SkipsTogether, 64, accumulate_grad_batches=accumulate_grad_batches)


def test_batches_of_a_window_that_all_ranks_skip(ranks: Ranks) -> None:
    for window in (2, 3):
        results = ranks(skip_together, window)
        expected = reference(SkipsTogether, ranks.size, 64, accumulate_grad_batches=window)
        assert_as_single_process(results, expected)


def skip_with_accumulation() -> Outcome:
    return fit(Skipping, 64, accumulate_grad_batches=2)


def test_skipped_steps_in_an_accumulation_window(ranks: Ranks) -> None:
    assert_ranks_agree(ranks(skip_with_accumulation))


def skip_with_loss_scaling() -> Outcome:
    torch.manual_seed(own_rank())
    model = SkippingClipped()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = make_trainer(plugins=[precision])
    trainer.fit(model, DataLoader(rows(48), 4))
    return outcome(trainer, model, extra=scaler.get_scale())


def test_skipped_steps_with_loss_scaling(ranks: Ranks) -> None:
    results = ranks(skip_with_loss_scaling)
    assert_ranks_agree(results)
    assert results[0].extra == results[1].extra


class LogsAndSkips(Skipping):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch, batch_idx)
        if loss is not None:
            value = float(10 * batch_idx + self.global_rank)
            self.log("value", value, sync_dist=True, on_step=True, on_epoch=True)
        return loss


def log_and_skip() -> list[Any]:
    model = LogsAndSkips()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, DataLoader(rows(ROWS), 4))
    return [float(trainer.callback_metrics[name]) for name in ("value_step", "value_epoch")]


def test_a_skipped_step_logs_nothing(ranks: Ranks) -> None:
    # Batches 0 and 2 on both ranks, batch 1 on rank 1 only.
    step, epoch = 20.5, (0 + 1 + 20 + 21 + 11) / 5
    for values in ranks(log_and_skip):
        assert values == pytest.approx([step, epoch])
