"""Means over items in the Trainer: ragged batches, against one process that has all of them.

Each rank takes a number of rows of its share of a batch that depends on batch and rank, none
sometimes. The reference's loss is the sum over all items of all ranks and batches of a window,
over their number.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from hvd_strategy import HvdError, HvdStrategy
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    BATCH,
    Outcome,
    Regression,
    assert_as_single_process,
    loader,
    make_trainer,
    outcome,
    own_rank,
    shuffled_loader,
)

BATCHES = 5
COUNTS = ((1, 4, 2), (3, 0, 1), (4, 2, 4), (0, 1, 3), (2, 2, 0))  # by batch and rank


class Ragged(Regression):
    """Reports by the key. Logs its loss, whose mean over all items the reference logs."""

    counts = COUNTS
    reports = "key"

    def items(self, batch_idx: int, rank: int) -> int:
        return self.counts[batch_idx % len(self.counts)][rank]

    def of_rank(self, batch: list[Tensor], batch_idx: int, rank: int) -> Tensor:
        """Mean over the items; nan where there is none."""
        inputs, targets = (part[: self.items(batch_idx, rank)] for part in batch)
        with torch.autocast("cpu", enabled=False):
            return nn.functional.mse_loss(self.head(self.body(inputs)), targets)

    def window(self, batch_idx: int) -> range:
        size = self.trainer.accumulate_grad_batches
        first = batch_idx - batch_idx % size
        return range(first, min(first + size, BATCHES))

    def of_all(self, batch: list[Tensor], batch_idx: int) -> tuple[Tensor, int]:
        """Sum over all items, and their number."""
        total, number = torch.zeros(()), 0
        for rank in range(self.ranks):
            share = [part[rank :: self.ranks] for part in batch]
            items = self.items(batch_idx, rank)
            if items:
                total = total + self.of_rank(share, batch_idx, rank) * items
                number += items
        return total, number

    def loss(self, batch: list[Tensor], batch_idx: int) -> Any:
        if not self.ranks:
            return self.of_rank(batch, batch_idx, self.global_rank)
        total, number = self.of_all(batch, batch_idx)
        if not number:
            return None
        self.log_loss(total / number, batch_size=number)
        window = self.window(batch_idx)
        everything = sum(self.items(index, r) for index in window for r in range(self.ranks))
        return total / everything * self.trainer.accumulate_grad_batches

    def log_loss(self, loss: Tensor, **weight: Any) -> None:
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, **weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        if self.ranks:
            return loss
        items = self.items(batch_idx, self.global_rank)
        if self.reports == "set_items":
            self.trainer.strategy.set_items(torch.tensor(items))
        self.log_loss(loss)
        return {"loss": loss, "num_items": items} if self.reports == "key" else loss

    def validation_step(self, *_: Any) -> None:
        return None


class BySetItems(Ragged):
    reports = "set_items"


class NoneForNothing(BySetItems):
    """Returns None where it has no items, before it logs anything."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if not self.ranks and not self.items(batch_idx, self.global_rank):
            return None
        return super().training_step(batch, batch_idx)


class Searching(Ragged):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class AdamWithNorms(Ragged):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class LooksBetween(AdamWithNorms):
    """Keeps the scale in the gradients after backward."""

    def on_after_backward(self) -> None:
        assert self.head.weight.grad is not None


class ByHand(Ragged):
    """Two optimizers, each with a backward and an accumulation window of its own."""

    plain = False

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if not self.ranks:
            self.trainer.strategy.set_items(self.items(batch_idx, self.global_rank))
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss_of_step(batch, batch_idx))
            self.clip_gradients(optimizer, 0.4, self.clips_by)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    clips_by = "norm"

    def loss_of_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not self.ranks:
            return self.of_rank(batch, batch_idx, self.global_rank)
        total, number = self.of_all(batch, batch_idx)
        return total / number

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.body.parameters(), lr=0.1),
            torch.optim.Adam(self.head.parameters(), lr=0.01),
        )


class ByHandAccumulating(ByHand):
    """Two batches a step; the first one's gradients stay local."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if not self.ranks:
            self.trainer.strategy.set_items(self.items(batch_idx, self.global_rank))
        optimizer = self.optimizers()
        steps = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=steps):
            self.manual_backward(self.loss_of_step(batch, batch_idx))
            if steps:
                optimizer.step()
                optimizer.zero_grad()

    def loss_of_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not self.ranks:
            return super().loss_of_step(batch, batch_idx)
        first = batch_idx - batch_idx % 2
        number = sum(self.items(first + i, rank) for i in (0, 1) for rank in range(self.ranks))
        return self.of_all(batch, batch_idx)[0] / number

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Normalised(Ragged):
    """A layer that waits for the other ranks in its backward, also on one without items."""

    counts = ((1, 4), (3, 0), (4, 2), (0, 3), (2, 2))

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body.append(nn.BatchNorm1d(8))

    def of_all(self, batch: list[Tensor], batch_idx: int) -> tuple[Tensor, int]:
        parts = [
            [part[rank :: self.ranks][: self.items(batch_idx, rank)] for part in batch]
            for rank in range(self.ranks)
        ]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = nn.functional.mse_loss(self.head(self.body(inputs)), targets, reduction="sum")
        return loss, len(inputs)


def scaled() -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


def run(model: Ragged, data: Any, strategy: Any, scaler: bool, **arguments: Any) -> Outcome:
    plugins = scaled() if scaler else []
    trainer = make_trainer(strategy=strategy, plugins=plugins, **{"max_epochs": 2, **arguments})
    trainer.fit(model, data)
    scale = plugins[0].scaler.get_scale() if scaler else None
    return outcome(trainer, model, scale)


def fit(model_class: type[Ragged], scaler: bool, arguments: dict[str, Any]) -> Outcome:
    torch.manual_seed(own_rank())
    ranks = int(os.environ["WORLD_SIZE"])
    data = loader(BATCHES * BATCH * ranks)
    return run(model_class(), data, HvdStrategy(gradient_average="items"), scaler, **arguments)


def reference(
    model_class: type[Ragged], ranks: int, scaler: bool = False, **arguments: Any
) -> Outcome:
    torch.manual_seed(0)
    data = shuffled_loader(BATCHES * BATCH * ranks, BATCH * ranks)
    arguments = {key: value for key, value in arguments.items() if key != "sync_batchnorm"}
    return run(model_class(ranks), data, "auto", scaler, devices=1, **arguments)


def compare(outcomes: list[Outcome], expected: Outcome) -> None:
    assert_as_single_process(outcomes, expected)
    assert {result.extra for result in outcomes} == {expected.extra}


@pytest.mark.parametrize(
    ("model_class", "arguments"),
    [
        (Ragged, {}),
        (BySetItems, {"accumulate_grad_batches": 2}),
        (NoneForNothing, {"accumulate_grad_batches": 3}),
        (AdamWithNorms, {"gradient_clip_val": 0.3}),
        (Ragged, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        # In 64 bit, because normalisation of few rows amplifies rounding.
        (Normalised, {"sync_batchnorm": True, "precision": "64-true"}),
    ],
)
def test_as_in_a_single_process(
    ranks: Ranks, model_class: type[Ragged], arguments: dict[str, Any]
) -> None:
    expected = reference(model_class, 2, **arguments)
    assert "loss_epoch" in expected.metrics
    compare(ranks(fit, model_class, False, arguments), expected)


@pytest.mark.parametrize("model_class", [AdamWithNorms, LooksBetween])
def test_with_loss_scaling(ranks: Ranks, model_class: type[Ragged]) -> None:
    """The scale is undone in the reduction, and after it."""
    arguments = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    expected = reference(model_class, 2, True, **arguments)
    compare(ranks(fit, model_class, True, arguments), expected)


def test_three_ranks(ranks: Ranks) -> None:
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    compare(ranks.run(3, fit, Ragged, False, arguments), reference(Ragged, 3, **arguments))


@pytest.mark.parametrize("model_class", [ByHand, ByHandAccumulating])
def test_manual_optimization(ranks: Ranks, model_class: type[Ragged]) -> None:
    arguments = {"limit_train_batches": 4}
    compare(ranks(fit, model_class, False, arguments), reference(model_class, 2, **arguments))


def test_line_search(ranks: Ranks) -> None:
    """The optimizer is given the weighted mean of the losses."""
    expected = reference(Searching, 2, max_epochs=1)
    results = ranks(fit, Searching, False, {"max_epochs": 1})
    for result in results:
        for name, tensor in expected.state.items():
            # Quasi-Newton steps amplify the rounding of the gradients.
            torch.testing.assert_close(result.state[name], tensor, rtol=0, atol=1e-4)


class NothingAtTimes(BySetItems):
    """No rank has items in some batches: no step, which AdamW and the scaler would see."""

    counts = ((1, 4), (0, 0), (0, 0), (2, 3), (0, 0))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


def without_logs(result: Outcome) -> Outcome:
    result.metrics = {}
    return result


@pytest.mark.parametrize("scaler", [False, True])
def test_batches_without_any_items(ranks: Ranks, scaler: bool) -> None:
    torch.manual_seed(0)
    # In the reference the batches are left out, because None there does not clear the gradients.
    expected = without_logs(reference(NothingAtTimes, 2, scaler, limit_train_batches=1))
    results = [
        without_logs(result)
        for result in ranks(fit, NothingAtTimes, scaler, {"limit_train_batches": 3})
    ]
    for result in results:
        result.global_step = expected.global_step
    compare(results, expected)


class Watch(Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.step_values: list[float] = []

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        self.outputs.append(outputs)
        self.step_values.append(float(trainer.progress_bar_metrics.get("shown", math.nan)))


class Shows(Ragged):
    """Logs in several ways."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        items = self.items(batch_idx, self.global_rank)
        if not items:
            self.log_values(math.nan)
            return {"loss": torch.zeros(()), "num_items": 0}
        self.log_values(10.0 * batch_idx + self.global_rank)
        return {"loss": self.of_rank(batch, batch_idx, self.global_rank), "num_items": items}

    def log_values(self, value: float) -> None:
        self.log("shown", value, prog_bar=True, sync_dist=True)
        self.log("twice", value, on_step=False, on_epoch=True, sync_dist=True)
        self.log("twice", value + 1, on_step=False, on_epoch=True, sync_dist=True)
        weight = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("given", 0.0 if math.isnan(value) else value, batch_size=2, **weight)
        self.log("greatest", 0.0 if math.isnan(value) else value, reduce_fx="max", **weight)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        value = 10.0 * batch_idx + self.global_rank
        self.trainer.strategy.set_items(2.5 if self.global_rank else 0.5)
        self.log("val", value, sync_dist=True)


def show() -> tuple[list[float], dict[str, float], list[Any]]:
    watch = Watch()
    trainer = make_trainer(
        strategy=HvdStrategy(gradient_average="items"), max_epochs=1, callbacks=[watch]
    )
    trainer.fit(Shows(), loader(BATCHES * BATCH * 2), loader(BATCHES * BATCH * 2))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return watch.step_values, metrics, watch.outputs


def test_what_is_logged(ranks: Ranks) -> None:
    counts = [list(of_batch[:2]) for of_batch in COUNTS]

    def mean(values_and_weights: list[tuple[float, float]]) -> float:
        total = sum(value * weight for value, weight in values_and_weights if weight)
        return total / sum(weight for _, weight in values_and_weights)

    by_batch = [
        [(10.0 * number + rank, float(n)) for rank, n in enumerate(of_batch)]
        for number, of_batch in enumerate(counts)
    ]
    every = [pair for of_batch in by_batch for pair in of_batch]
    for shown, metrics, outputs in ranks(show):
        assert shown == pytest.approx([mean(of_batch) for of_batch in by_batch])
        assert metrics["twice"] == pytest.approx(mean(every) + 0.5)
        given = [(value if n else 0.0, 2.0) for value, n in every]
        assert metrics["given"] == pytest.approx(mean(given))
        assert metrics["greatest"] == 41.0
        validated = [(10.0 * n + r, 2.5 if r else 0.5) for n in range(BATCHES) for r in (0, 1)]
        assert metrics["val"] == pytest.approx(mean(validated))
        assert all("num_items" in output for output in outputs)


def alone() -> Outcome:
    """A world of one: several batches a step are weighted all the same."""
    torch.manual_seed(0)
    strategy = HvdStrategy(gradient_average="items")
    return run(
        Ragged(), shuffled_loader(BATCHES * BATCH, BATCH), strategy, False,
        devices=1, accumulate_grad_batches=2, gradient_clip_val=0.3,
    )  # fmt: skip


def test_a_world_of_one(ranks: Ranks) -> None:
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    compare(ranks.run(1, alone), reference(Ragged, 1, **arguments))


class Silent(Ragged):
    reports = "nothing"


class Contradicts(Ragged):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.trainer.strategy.set_items(7)
        return super().training_step(batch, batch_idx)


class WithoutCount(ByHand):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.of_rank(batch, 0, 0))


class PlainBackward(ByHand):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.trainer.strategy.set_items(3)
        with self.trainer.strategy.block_backward_sync():
            self.of_rank(batch, 0, 0).backward()


class Keeps(Ragged):
    def optimizer_zero_grad(self, *_: Any) -> None:
        return None


class Negative(Ragged):
    def items(self, batch_idx: int, rank: int) -> int:
        return -1


def refused(model_class: type[Ragged], average: str) -> str:
    trainer = make_trainer(strategy=HvdStrategy(gradient_average=average))
    with pytest.raises((HvdError, ValueError)) as caught:
        trainer.fit(model_class(), loader(8 * BATCH))
    return str(caught.value)  # that of the rank which raised first; the others have its text


@pytest.mark.parametrize(
    ("model_class", "average", "message"),
    [
        (Silent, "items", "Return it under the key 'num_items' beside 'loss'"),
        (Contradicts, "items", r"returned num_items=\d, but set_items\(\) was called with 7"),
        (WithoutCount, "items", r"Call self\.trainer\.strategy\.set_items\(n\) before it"),
        (PlainBackward, "items", r"strategy\.set_items\(n\), and then self\.manual_backward"),
        (Keeps, "items", r"Clear the gradients of all optimizers"),
        (Negative, "items", "num_items=-1 is not accepted: it takes a number of items"),
        (BySetItems, "ranks", r"HvdStrategy\(gradient_average='items'\)"),
    ],
)
def test_refused(ranks: Ranks, model_class: type[Ragged], average: str, message: str) -> None:
    for text in ranks(refused, model_class, average):
        assert re.search(message, text), text
