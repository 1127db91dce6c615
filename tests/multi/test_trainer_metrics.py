"""What `self.log` and torchmetrics give: one value for all ranks, that of all samples."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import classification

from hvd_strategy import MismatchError, RankFailedError
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import FEATURES, Regression, loader, make_trainer, own_rank

ROWS = 7  # of all ranks together; no number of ranks divides it


class Uneven(IterableDataset):
    """Batches of different sizes, and not equally many on each rank."""

    def __init__(self, ranks: int, rank: int | None = None, equally_many: bool = False) -> None:
        self.ranks = ranks
        self.rank = rank
        self.equally_many = equally_many

    def __iter__(self) -> Any:
        for rank in range(self.ranks) if self.rank is None else [self.rank]:
            for number in range(3 if self.equally_many else 1 + 2 * rank):
                generator = torch.Generator().manual_seed(100 * rank + number)
                yield torch.randn(1 + rank + number, FEATURES, generator=generator)


def batches(ranks: int, rank: int | None, equally_many: bool = False) -> DataLoader:
    return DataLoader(Uneven(ranks, rank, equally_many), batch_size=None)


OPERATIONS = ("mean", "sum", "min", "max")


class LogsEverything(Regression):
    """Logs the mean, sum, minimum and maximum of its samples, in every way there is."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log_all("train", batch, on_step=True, on_epoch=True)
        self.log("step_only", batch[:, 0].mean(), sync_dist=True, on_step=True, on_epoch=False)
        return self.head(self.body(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_all("val", batch)
        self.log("integer", len(batch), sync_dist=True, reduce_fx="sum")
        self.log("integer_mean", torch.tensor(len(batch)), sync_dist=True)

    def log_all(self, stage: str, batch: Tensor, **options: Any) -> None:
        values = batch[:, 0]
        for operation in OPERATIONS:
            value = getattr(values, operation)()
            self.log(f"{stage}_{operation}", value, reduce_fx=operation, sync_dist=True, **options)


class Collector(Callback):
    """Keeps the metrics that callbacks see, at hooks where rank 0's progress bar looks, too."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, float]]] = []

    def look(self, hook: str, trainer: Trainer) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((hook, metrics))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.look("batch", trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        # A rank that looks alone must not wait for the others.
        if trainer.global_rank == 0:
            assert trainer.progress_bar_metrics is not None
        self.look("epoch", trainer)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.look("validation", trainer)


def log_everything(ranks: int) -> list[tuple[str, dict[str, float]]]:
    collector = Collector()
    trainer = make_trainer(callbacks=[collector], max_epochs=1)
    trainer.fit(LogsEverything(), batches(ranks, own_rank(), True), batches(ranks, own_rank()))
    return [*collector.seen, ("end", {k: float(v) for k, v in trainer.callback_metrics.items()})]


def samples(ranks: int, equally_many: bool) -> list[list[Tensor]]:
    """First feature of all samples, by rank and batch."""
    return [[b[:, 0] for b in Uneven(ranks, rank, equally_many)] for rank in range(ranks)]


def expected(ranks: int, stage: str, shown: list[list[Tensor]]) -> dict[str, float]:
    together = torch.cat([batch for rank in shown for batch in rank]).double()
    return {f"{stage}_{name}": float(getattr(together, name)()) for name in OPERATIONS}


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_logged_values_are_those_of_all_samples(ranks: Ranks) -> None:
    results = ranks(log_everything, ranks.size)
    for other in results[1:]:
        assert other == results[0]  # bit-equal at every look
    validated = samples(ranks.size, equally_many=False)
    trained = samples(ranks.size, equally_many=True)
    end = results[0][-1][1]
    for name, value in expected(ranks.size, "val", validated).items():
        assert end[name] == pytest.approx(value, rel=1e-5), name
    counts = [len(batch) for rank in validated for batch in rank]
    assert end["integer"] == sum(counts)
    assert end["integer_mean"] == pytest.approx(sum(n * n for n in counts) / sum(counts))
    for name, value in expected(ranks.size, "train", trained).items():
        assert end[f"{name}_epoch"] == pytest.approx(value, rel=1e-5), name
    steps = [seen for hook, seen in results[0] if hook == "batch"]
    assert len(steps) == 3
    for number, seen in enumerate(steps):
        shown = [[rank[number]] for rank in trained]
        for name, value in expected(ranks.size, "train", shown).items():
            assert seen[f"{name}_step"] == pytest.approx(value, rel=1e-5), (number, name)
        assert seen["step_only"] == pytest.approx(seen["train_mean_step"])


class LogsElsewhere(Regression):
    """Logs in hooks around the steps, with rank 0 in another order."""

    def on_train_start(self) -> None:
        self.log("at_start", float(self.global_rank), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        self.log("at_epoch_start", float(self.global_rank), sync_dist=True, reduce_fx="max")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", float(self.global_rank + 1), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("after_batch", float(self.global_rank + 2), sync_dist=True, on_step=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for name in ("a", "b")[:: 1 if self.global_rank else -1]:
            value = {"a": 1.0, "b": 10.0}[name] * (1 + self.global_rank)
            self.log(name, value, sync_dist=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("at_validation_end", float(self.global_rank), sync_dist=True, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", float(self.global_rank), sync_dist=True)


def log_elsewhere() -> dict[str, float]:
    trainer = make_trainer(max_epochs=1, enable_progress_bar=True)
    trainer.fit(LogsElsewhere(), loader(16), loader(16))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_logging_in_other_hooks_and_in_another_order(ranks: Ranks) -> None:
    first, second = ranks(log_elsewhere)
    assert first == second
    for name, value in {
        "at_start": 0.5,
        "at_epoch_start": 1,
        "norm": 1.5,
        "after_batch": 2.5,
        "a_step": 1.5,
        "a_epoch": 1.5,
        "b_step": 15,
        "b_epoch": 15,
        "at_validation_end": 1,
        "at_epoch_end": 0.5,
    }.items():
        assert first[name] == pytest.approx(value), name


class LogsSteps(Regression):
    """Values of steps where ranks do not vote: optimization by hand, batches of a window."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        self.log("value", float(10 * batch_idx + self.global_rank), sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["value"]))


def log_steps(by_hand: bool, window: int) -> list[float]:
    model = LogsSteps(by_hand)
    make_trainer(max_epochs=1, accumulate_grad_batches=window).fit(model, loader(40))
    return model.seen


@pytest.mark.parametrize(("by_hand", "window"), [(True, 1), (False, 2)])
def test_values_of_steps_without_votes(ranks: Ranks, by_hand: bool, window: int) -> None:
    assert ranks(log_steps, by_hand, window) == [[0.5, 10.5, 20.5, 30.5, 40.5]] * 2


class LogsOtherKeys(Regression):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.accuracy = torchmetrics.MeanMetric()
        self.other = torchmetrics.SumMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first = self.global_rank == 0
        if self.case == "step":
            self.log("loss_a" if first else "loss_b", 1.0, sync_dist=True)
        elif (self.case, first, batch_idx) in (
            ("step on one rank", True, batch_idx),
            ("late on one rank", False, 1),
        ):
            self.log("loss_a", 1.0, sync_dist=True)
        elif self.case == "epoch":
            self.log("loss_a" if first else "loss_b", 1.0, sync_dist=True, on_epoch=True)
        elif self.case == "reduce_fx":
            self.log("loss_a", 1.0, sync_dist=True, reduce_fx="mean" if first else "sum")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first = self.global_rank == 0
        if self.case == "validation":
            self.log("loss_a" if first else "loss_b", 1.0, sync_dist=True)
        elif self.case == "uneven":
            self.log("loss_a", 1.0, sync_dist=True, on_step=True)
        elif self.case == "sync_dist":
            self.log("loss_a", 1.0, sync_dist=first)
        elif self.case == "metric":
            name = "accuracy" if first else "other"
            getattr(self, name).update(1.0)
            self.log("loss_a" if first else "loss_b", getattr(self, name))

    def on_validation_epoch_end(self) -> None:
        if self.case == "epoch end":
            self.log("loss_a" if self.global_rank == 0 else "loss_b", 1.0, sync_dist=True)


def log_other_keys(cases: list[str]) -> list[str]:
    told = []
    for case in cases:
        try:
            validation = batches(2, own_rank()) if case == "uneven" else loader(16)
            make_trainer(max_epochs=1).fit(LogsOtherKeys(case), loader(16), validation)
        except (MismatchError, RankFailedError) as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("nothing")
    return told


def test_other_keys_are_an_error_that_names_them(ranks: Ranks) -> None:
    cases = [
        "step",
        "step on one rank",
        "late on one rank",
        "uneven",
        "epoch",
        "reduce_fx",
        "validation",
        "sync_dist",
        "metric",
        "epoch end",
    ]
    for texts in ranks(log_other_keys, cases):
        for case, text in zip(cases, texts, strict=True):
            assert text.startswith("MismatchError: The ranks logged different metrics"), case
            if case == "uneven":
                assert "rank 0: at the end of an epoch, rank 1: in a batch" in text
                continue
            assert "loss_a" in text, case
            having = {"step on one rank": [0], "sync_dist": [0], "late on one rank": [1]}
            for rank in range(2):
                told = f"only rank {rank} logged" in text
                assert told == (rank in having.get(case, [0, 1])), (case, text)


class Unsynchronised(Regression):
    """Logs its own rank's values only, of which rank 0's get better and rank 1's get worse."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        epoch = self.current_epoch
        self.log("watched", float(4 - epoch if self.global_rank == 0 else 10 + 3 * epoch))
        self.log("not_watched", float(self.global_rank))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "watched"},
        }


def watch(directory: str) -> dict[str, Any]:
    torch.manual_seed(0)
    stopping = EarlyStopping("watched", patience=3)
    saving = ModelCheckpoint(directory, "{epoch}-{watched}", monitor="watched", save_top_k=2)
    trainer = make_trainer(max_epochs=8, enable_checkpointing=True, callbacks=[stopping, saving])
    model = Unsynchronised()
    trainer.fit(model, loader(16), loader(16))
    return {
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "epochs": trainer.current_epoch,
        "best": saving.best_model_path,
        "score": float(saving.best_model_score),
        "kept": sorted(saving.best_k_models),
        "waited": stopping.wait_count,
        "watched": float(trainer.callback_metrics["watched"]),
        "weights": model.head.weight.tolist(),
    }


def test_monitored_metrics_are_the_same_on_all_ranks(ranks: Ranks, tmp_path: Any) -> None:
    first, second = ranks(watch, str(tmp_path))
    assert first == second
    # The mean of both ranks: 7 in the first epoch, and 1 more in each that follows.
    assert first["score"] == 7
    assert first["epochs"] == 4
    assert first["watched"] == 10
    assert first["rate"] == 0.125
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.rpartition("/")[2] for path in first["kept"]
    )
    assert ranks.output[0].count("'watched' is monitored") == 1
    assert "'watched' is monitored" not in ranks.output[1]


class Longest(torchmetrics.Metric):
    """Keeps its samples entry by entry, as retrieval metrics do; two lists that belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)
        self.add_state("lengths", [], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.values.append(values)
        self.lengths.append(torch.tensor(len(values)))

    def compute(self) -> Tensor:
        assert [len(values) for values in self.values] == [int(n) for n in self.lengths]
        longest = max(range(len(self.values)), key=lambda place: int(self.lengths[place]))
        return self.values[longest].sum() + len(self.values)


METRICS: dict[str, Callable[[], torchmetrics.Metric]] = {
    "sum": torchmetrics.SumMetric,
    "mean": torchmetrics.MeanMetric,
    "max": torchmetrics.MaxMetric,
    "list": torchmetrics.CatMetric,
    "entries": Longest,
    "correlation": torchmetrics.PearsonCorrCoef,
    "rank_correlation": torchmetrics.SpearmanCorrCoef,
    "error": torchmetrics.MeanSquaredError,
    "accuracy": classification.BinaryAccuracy,
    "matrix": classification.BinaryConfusionMatrix,
    "area": classification.BinaryAUROC,
}
SCALARS = (
    "sum",
    "mean",
    "max",
    "entries",
    "correlation",
    "rank_correlation",
    "error",
    "accuracy",
    "area",
)


class Measured(Regression):
    """Metrics of torchmetrics, logged as objects, in a collection, and computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.logged = nn.ModuleDict({name: make() for name, make in METRICS.items()})
        self.by_hand = nn.ModuleDict({name: make() for name, make in METRICS.items()})
        self.collection = torchmetrics.MetricCollection(
            [classification.BinaryAccuracy(), classification.BinaryF1Score()], prefix="both_"
        )
        self.computed: dict[str, Tensor] = {}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for metrics in (self.logged, self.by_hand):
            for name, metric in metrics.items():
                update(name, metric, batch)
        self.collection.update(*scored(batch))
        for name in SCALARS:
            self.log(name, self.logged[name])
        self.log_dict(self.collection)

    def on_validation_epoch_end(self) -> None:
        # Copies, as callbacks make of the whole model, are metrics of their own.
        copied = copy.deepcopy(self.by_hand)
        copied["entries"].reset()
        self.computed = {name: metric.compute() for name, metric in self.by_hand.items()}
        pickle.dumps(self.by_hand)


def scored(batch: Tensor) -> tuple[Tensor, Tensor]:
    return batch[:, 0].sigmoid(), (batch[:, 1] > 0).long()


def update(name: str, metric: Any, batch: Tensor) -> None:
    if name in ("sum", "mean", "max", "list", "entries"):
        metric.update(batch[:, 0])
    elif name in ("correlation", "rank_correlation", "error"):
        metric.update(batch[:, 0], batch[:, 1])
    else:
        metric.update(*scored(batch))


def measure(ranks: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    model = Measured()
    trainer = make_trainer()
    trainer.validate(model, batches(ranks, own_rank()), verbose=False)
    for metric in model.logged.values():
        assert metric.dist_sync_fn is None
        assert "_sync_dist" not in vars(metric)
    return {k: float(v) for k, v in trainer.callback_metrics.items()}, model.computed


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_torchmetrics(ranks: Ranks) -> None:
    results = ranks(measure, ranks.size)
    alone = Measured()
    for batch in Uneven(ranks.size):
        for name, metric in alone.by_hand.items():
            update(name, metric, batch)
        alone.collection.update(*scored(batch))
    for logged, computed in results:
        assert logged == results[0][0]
        for name, metric in alone.by_hand.items():
            torch.testing.assert_close(computed[name], metric.compute(), rtol=1e-5, atol=1e-6)
            if name in SCALARS:
                assert logged[name] == pytest.approx(float(metric.compute()), rel=1e-5), name
        for name, value in alone.collection.compute().items():
            assert logged[name] == pytest.approx(float(value)), name


class Sparse(Measured):
    """Rank 1 sees nothing for its list states, which are of integers."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.global_rank == 0:
            update("area", self.by_hand["area"], batch[0])
        self.by_hand["sum"].update(1.0)

    def on_validation_epoch_end(self) -> None:
        self.computed = {name: self.by_hand[name].compute() for name in ("area", "sum")}


def measure_sparsely() -> list[float]:
    model = Sparse()
    make_trainer().validate(model, loader(16), verbose=False)
    return [float(model.computed["area"]), float(model.computed["sum"])]


def test_a_rank_without_data_for_a_metric(ranks: Ranks) -> None:
    first, second = ranks(measure_sparsely)
    assert first == second
    assert not math.isnan(first[0])
    assert first[1] == 4
