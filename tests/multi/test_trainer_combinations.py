"""Uneven data together with everything else that weighs, scales, rounds or looks at gradients.

The reference is one process that trains in each step on the batches of all ranks that have one.
Batches differ in their number of items, some steps return None, and some overflow.
"""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from hvd_strategy import GradientReducer, HvdStrategy, ScheduledPrecision
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    FEATURES,
    Outcome,
    assert_as_single_process,
    assert_ranks_agree,
    make_trainer,
    outcome,
    own_rank,
)
from tests.multi.uneven_cases import ROWS, Uneven, loader_of, together


class Combined(Uneven):
    """Logs its loss: one over items, where the gradients are."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.norms: list[float] = []

    def loss_of(self, batch: list[Tensor], batch_idx: int, items: int | None) -> Tensor:
        if self.case.average == "ranks":
            items = None  # all rows
        inputs, targets = (part[:items] for part in batch)
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.mse_loss(self.head(self.body(inputs)), targets)
        return loss * math.inf if batch_idx in self.case.overflow else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        items = self.case.weight(self.global_rank, batch_idx)
        if not items:
            return None
        loss = self.loss_of(batch, batch_idx, items)
        self.log_loss(loss)
        if self.case.average == "ranks":
            return loss
        return {"loss": loss, "num_items": items * self.case.items_per_row}

    def log_loss(self, loss: Tensor, **weight: Any) -> None:
        value = loss.detach().nan_to_num(0.0, 0.0)
        self.log("loss", value, on_step=True, on_epoch=True, sync_dist=True, **weight)

    def on_train_batch_end(self, *_: Any) -> None:
        norm = self.norm_of_step
        self.norms.append(math.nan if norm is None else norm)

    @property
    def norm_of_step(self) -> float | None:
        return self.trainer.strategy.grad_norm

    def of_all(self, batch: list[list[Tensor]], batch_idx: int, weights: list[int]) -> Tensor:
        """The mean over all ranks that have a batch; `batch` and `weights` are theirs."""
        losses = [
            self.loss_of(share, batch_idx, weight) * weight
            for share, weight in zip(batch, weights, strict=True)
            if weight
        ]
        return torch.stack(losses).sum() / sum(weights)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Single:
    """What makes a model the reference."""

    def training_step(self: Any, batch: list[list[Tensor]], batch_idx: int) -> Tensor | None:
        case = self.case
        present = [rank for rank, count in enumerate(case.counts) if count > batch_idx]
        weights = [case.weight(rank, batch_idx) for rank in present]
        if not any(weights):
            return None
        loss = self.of_all(batch, batch_idx, weights)
        self.log_loss(loss, batch_size=sum(weights))
        if case.average == "ranks":
            return loss
        in_window = sum(
            case.weight(rank, index)
            for rank in range(len(case.counts))
            for index in case.window(batch_idx)
        )
        return loss * sum(weights) / in_window * case.accumulate

    norm_of_step: float | None = None

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        self.norm_of_step = float(nn.utils.get_total_norm(values))


class Edits(Combined):
    """Changes the gradients behind each backward, and logs."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad *= 0.5
        self.log("edited", 1.0, sync_dist=True)


class Fused(Combined):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5, fused=True)


class Sparse(Combined):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.table = nn.Embedding(5, FEATURES, sparse=True)

    def loss_of(self, batch: list[Tensor], batch_idx: int, items: int | None) -> Tensor:
        inputs, targets = batch
        looked_up = self.table((3 * inputs[:, 0].abs()).long() % 5)
        return super().loss_of([inputs + looked_up, targets], batch_idx, items)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Plain(Combined):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Searching(Combined):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=2)


class Normalized(Combined):
    """A layer that works with the ranks that have a batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.body.append(nn.BatchNorm1d(8))

    def of_all(self, batch: list[list[Tensor]], batch_idx: int, weights: list[int]) -> Tensor:
        shares = [
            [part[:weight] for part in share] for share, weight in zip(batch, weights, strict=True)
        ]
        return self.loss_of([torch.cat(p) for p in zip(*shares, strict=True)], batch_idx, None)


@dataclass(frozen=True)
class Case:
    """What is combined."""

    counts: tuple[int, ...] = (2, 5)  # batches, by rank
    average: str = "items"
    kind: str = "map"  # of data
    model: type[Combined] = Combined
    accumulate: int = 1
    items_per_row: int = 1
    none: tuple[tuple[int, int], ...] = ()  # rank and batch for which training_step returns None
    overflow: tuple[int, ...] = ()  # batches with a loss of inf
    scale: float = 0.0  # at first, of a scaler
    precisions: dict[int, str] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    rounds: float = 0.0  # by how much parameters may differ from the reference's, besides 1e-6

    def weight(self, rank: int, batch_idx: int) -> int:
        """What a batch counts; what is left out counts nothing."""
        if batch_idx >= self.counts[rank] or (rank, batch_idx) in self.none:
            return 0
        return 1 + (3 * rank + batch_idx) % ROWS if self.average == "items" else 1

    def window(self, batch_idx: int) -> range:
        """The batches of an optimizer step."""
        first = batch_idx - batch_idx % self.accumulate
        return range(first, min(first + self.accumulate, max(self.counts)))


def run(case: Case, model: Combined, data: Any, **arguments: Any) -> Outcome:
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale or 1.0, growth_interval=3)
    plugins: list[Any] = []
    if case.precisions:
        given = scaler if "16-mixed" in case.precisions.values() else None
        plugins = [ScheduledPrecision(case.precisions, scaler=given)]
    elif case.scale:
        plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    trainer = make_trainer(
        use_distributed_sampler=False,
        plugins=plugins,
        accumulate_grad_batches=case.accumulate,
        **{**case.trainer, **arguments},
    )
    trainer.fit(model, data)
    return outcome(trainer, model, extra=(scaler.get_scale(), model.norms))


def fit(case: Case) -> Outcome:
    torch.manual_seed(own_rank())
    strategy = HvdStrategy(gradient_average=case.average, log_grad_norm=True, **case.strategy)
    data = loader_of(case.kind, own_rank(), case.counts[own_rank()])
    return run(case, case.model(case), data, strategy=strategy)


def reference(case: Case) -> Outcome:
    torch.manual_seed(0)
    model: Any = type("Reference", (Single, case.model), {})(case)
    arguments = {key: value for key, value in case.trainer.items() if key != "sync_batchnorm"}
    case = Case(**{**vars(case), "trainer": arguments})
    return run(case, model, together(list(case.counts)), strategy="auto", devices=1)


CLIPS = {"gradient_clip_val": 0.3}
PARTLY_NONE = ((0, 0), (1, 1), (1, 3), (1, 4))
CHANGES = {0: "32-true", 4: "64-true", 8: "32-true"}
SCALES_LATER = {0: "32-true", 4: "16-mixed", 8: "bf16-mixed"}
CASES = {
    "items": Case(strategy={"consistency_check_every_n_steps": 1}),
    "items, windows": Case((7, 3), accumulate=4, trainer=CLIPS),
    "items, None": Case(none=PARTLY_NONE, accumulate=2, kind="stream"),
    "items, none ever": Case((0, 4), kind="batches", scale=1024.0, trainer=CLIPS),
    # Nobody logs in the first step; then one rank alone, in a batch whose gradients stay local.
    "items, late": Case((3, 6), none=((0, 0), (1, 0), (1, 2)), accumulate=2, kind="stream"),
    "ranks, late": Case((3, 6), "ranks", none=((0, 0), (1, 0), (1, 1), (0, 1)), accumulate=2),
    "items, layers": Case(
        model=Normalized, trainer={"sync_batchnorm": True, "precision": "64-true"}
    ),
    "items, overflow": Case((2, 6), scale=1024.0, overflow=(1, 4), trainer=CLIPS, accumulate=2),
    "items, scaler, None": Case((2, 5), none=PARTLY_NONE, scale=1024.0),
    "ranks, scaler, None": Case((2, 5), "ranks", none=PARTLY_NONE, scale=1024.0),
    "ranks, overflow": Case((2, 6), "ranks", scale=1024.0, overflow=(0, 4), trainer=CLIPS),
    "ranks, none ever": Case((0, 4), "ranks", "batches", Fused, scale=1024.0),
    "items, fused": Case((2, 6), model=Fused, scale=1024.0, overflow=(4,)),
    "ranks, edits": Case((2, 5), "ranks", "stream", Edits, none=PARTLY_NONE, trainer=CLIPS),
    "items, edits": Case((2, 5), model=Edits, none=PARTLY_NONE, accumulate=2),
    "items, edits, scaler": Case((2, 5), model=Edits, scale=1024.0, overflow=(3,), trainer=CLIPS),
    "items, sparse": Case((2, 5), model=Sparse, none=PARTLY_NONE, accumulate=2),
    "items, precisions": Case((2, 6), precisions=CHANGES, accumulate=2),
    "items, scaler comes": Case((2, 6), precisions=SCALES_LATER, scale=1024.0),
    "ranks, scaler comes": Case((2, 6), "ranks", precisions=SCALES_LATER, scale=1024.0),
    "items, wire": Case((2, 6), strategy={"wire_dtype": {0: None, 4: "bf16"}}, rounds=1e-2),
    "items, wire, scaler": Case(
        (2, 6),
        strategy={"wire_dtype": {0: "fp16", 4: None}},
        scale=2.0**16,
        rounds=1e-2,
        trainer=CLIPS,
    ),
    "many items": Case(
        (2, 5),
        model=Plain,
        items_per_row=2**14,
        none=((0, 0),),
        accumulate=2,
        trainer={"precision": "16-true"},
        rounds=1e-2,
    ),
    # Quasi-Newton steps amplify the rounding of the gradients.
    "ranks, search": Case((2, 4), "ranks", model=Searching, rounds=1e-4),
    "items, search": Case((2, 4), model=Searching, none=((1, 0),), rounds=1e-4),
    "three ranks": Case((4, 1, 2), scale=1024.0, overflow=(2,), trainer=CLIPS, accumulate=2),
}


@pytest.mark.parametrize("name", CASES)
def test_as_one_process(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    results = ranks.run(len(case.counts), fit, case)
    expected = reference(case)
    if 0 in case.counts:
        del expected.metrics["loss_step"]  # such a rank gets those of the epoch only
    for result in results:
        scale, norms = result.extra
        assert scale == expected.extra[0]
        if case.model not in (Fused, Searching):  # whose gradients Lightning shows otherwise
            assert norms == pytest.approx(expected.extra[1], rel=5e-3, nan_ok=True)
    if not case.rounds:
        assert_as_single_process(results, expected)
        return
    assert_ranks_agree(results)
    assert results[0].global_step == expected.global_step
    for key, tensor in expected.state.items():
        torch.testing.assert_close(results[0].state[key], tensor, rtol=0, atol=case.rounds)


def first_gradient_in_16_bits(expects: bool) -> bool:
    layer = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float16)
    reducer = GradientReducer(layer.named_parameters(), gradient_average="items")
    if expects:
        reducer.expect_items(2**15)
    loss = (layer(torch.ones(1, FEATURES, dtype=torch.float16)) - 4.0).square().mean()
    reducer.backward(loss, items=2**15 + own_rank())
    reducer.close()
    assert layer.weight.grad is not None
    return bool(layer.weight.grad.isfinite().all())


def test_the_first_gradients_of_a_loop_of_ones_own(ranks: Ranks) -> None:
    for expects in (False, True):
        assert ranks(first_gradient_in_16_bits, expects) == [expects] * 2


# ---- ends and beginnings in the middle of an epoch


def fit_without_items(average: str) -> dict[str, float]:
    """Rank 0 has batches, and says None to all of them."""
    case = Case((3, 3), average, none=((0, 0), (0, 1), (0, 2)))
    return fit(case).metrics


@pytest.mark.parametrize("average", ["items", "ranks"])
def test_a_rank_that_skips_all_batches(ranks: Ranks, average: str) -> None:
    first, second = ranks(fit_without_items, average)
    assert first == pytest.approx({name: second[name] for name in first})
    assert "loss_epoch" in first


def fit_and_resume(folder: str, case: Case) -> list[Outcome]:
    outcomes = []
    for path in (None, f"{folder}/step=2.ckpt"):
        torch.manual_seed(own_rank())
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(
            strategy=HvdStrategy(gradient_average=case.average),
            use_distributed_sampler=False,
            enable_checkpointing=not path,
            callbacks=[] if path else [saves],
            accumulate_grad_batches=case.accumulate,
        )
        model = Combined(case)
        data = loader_of(case.kind, own_rank(), case.counts[own_rank()])
        trainer.fit(model, data, ckpt_path=path, weights_only=False)
        outcomes.append(outcome(trainer, model))
    return outcomes


@pytest.mark.parametrize("counts", [(3, 6), (6, 3)])
def test_resumed_where_a_rank_has_run_out(
    ranks: Ranks, counts: tuple[int, int], tmp_path: Path
) -> None:
    results = ranks(fit_and_resume, str(tmp_path), Case(counts, accumulate=2))
    for outcomes in zip(*results, strict=True):
        assert_ranks_agree(list(outcomes))
        assert outcomes[0].metrics == pytest.approx(outcomes[1].metrics)
        assert outcomes[0].global_step == 6


class Signalled(Combined):
    """Gets SIGTERM in batch 3: while it is idle, or while another one waits for it."""

    signalled = 0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        progress = self.trainer.fit_loop.epoch_loop.batch_idx
        if self.global_rank == self.signalled and progress == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_signalled(signalled: int, kind: str) -> tuple[str, int]:
    case = Case((2, 6), kind=kind)
    model = Signalled(case)
    model.signalled = signalled
    strategy = HvdStrategy(gradient_average="items")
    trainer = make_trainer(strategy=strategy, use_distributed_sampler=False, max_epochs=5)
    try:
        trainer.fit(model, loader_of(kind, own_rank(), case.counts[own_rank()]))
    except SystemExit as error:
        return type(error).__name__, trainer.global_step
    return "finished", trainer.global_step


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("signalled", [0, 1])
def test_sigterm_while_a_rank_is_idle(ranks: Ranks, signalled: int, kind: str) -> None:
    (ended, step), other = ranks(fit_signalled, signalled, kind)
    assert (ended, step) == other
    assert ended == "SIGTERMException"
    assert step <= 6
