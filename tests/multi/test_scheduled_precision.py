"""Schedules of compute precision: as one process with the same schedule, and that as torch by hand.

Steps are few and the nets small, but the precisions are real: fp16 and bf16 autocast on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from hvd_strategy import MismatchError, ScheduledPrecision
from tests.multi.pool import Ranks
from tests.multi.test_trainer_checkpoints import SaveAt, StatefulLoader
from tests.multi.trainer_cases import (
    BATCH,
    Outcome,
    Recorder,
    Regression,
    assert_as_single_process,
    assert_ranks_agree,
    loader,
    make_trainer,
    outcome,
    own_rank,
    rows,
    shuffled_loader,
)

COUNT = 48  # rows; with two ranks six steps in an epoch
SINGLE_TO_MIXED = {0: "32-true", 3: "bf16-mixed"}
SINGLE_TO_SCALED = {0: "32-true", 3: "16-mixed"}
DOUBLE_TO_SCALED = {0: "64-true", 2: "32-true", 5: "16-mixed"}
THERE_AND_BACK = {0: "16-mixed", 2: "64-true", 5: "16-mixed", 9: "32-true"}
HALF_FIRST = {0: "bf16-true", 3: "64-true", 8: "bf16-mixed"}
SCHEDULES = [SINGLE_TO_MIXED, SINGLE_TO_SCALED, DOUBLE_TO_SCALED, THERE_AND_BACK, HALF_FIRST]


class Net(Regression):
    """With moments, a buffer that the loss depends on, one of integers, and a logged loss."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.register_buffer("average", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        loss = super().rank_loss(inputs, targets, rank, batch_idx)
        return loss + (self.head.bias * self.average).sum()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch, batch_idx)
        self.average = 0.9 * self.average + 0.1 * self.head.bias.detach()
        self.count += 1
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Fused(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


class TwoNets(Net):
    """Manual optimization: two optimizers of their own pace, and a window of two batches."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        body, head = self.optimizers()
        if batch_idx % 2 == 0:
            body.zero_grad()
            head.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        if batch_idx % 2 == 1:
            body.step()
            head.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.body.parameters(), lr=0.02),
            torch.optim.SGD(self.head.parameters(), lr=0.02, momentum=0.9),
        )


class TwoPaces(TwoNets):
    """The window of one optimizer goes on over steps of the other, and over a phase's beginning."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        body, head = self.optimizers()
        self.manual_backward(self.loss(batch, batch_idx))
        head.step()
        head.zero_grad()
        if batch_idx % 2 == 1:
            body.step()
            body.zero_grad()


class Searching(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


def plugin_of(schedule: dict[int, str]) -> Any:
    scales = "16-mixed" in schedule.values()
    return ScheduledPrecision(dict(schedule), scaler=scaler() if scales else None)


class Watch(Recorder):
    """Global step, precision and dtype of the parameters, whenever a batch or validation starts."""

    def __init__(self) -> None:
        super().__init__(look, "on_train_batch_start", "on_validation_start", "on_validation_end")


def look(trainer: Any, module: Any) -> tuple[int, str, torch.dtype]:
    return trainer.global_step, trainer.precision, module.head.weight.dtype


def run(model: Any, data: Any, schedule: dict[int, str], strategy: Any, **more: Any) -> Outcome:
    watch, plugin = Watch(), plugin_of(schedule)
    before = plugin.loss_scaler
    arguments = {"val_check_interval": 3, **more}
    trainer = make_trainer(strategy, plugins=[plugin], callbacks=[watch], **arguments)
    trainer.fit(model, data, data)
    # The user's objects are the user's again, and know the scale.
    assert plugin.loss_scaler is before
    assert "clip_grad_by_norm" not in vars(plugin)
    assert torch.get_default_dtype() is torch.float32
    scale = None if before is None else before.state_dict()
    return outcome(trainer, model, (watch.seen, scale))


def fit(model_class: type[Net], schedule: dict[int, str], arguments: dict[str, Any]) -> Outcome:
    torch.manual_seed(own_rank())
    return run(model_class(), loader(COUNT), schedule, "hvd", **arguments)


def reference(
    model_class: type[Net], schedule: dict[int, str], arguments: dict[str, Any], ranks: int = 2
) -> Outcome:
    torch.manual_seed(0)
    data = shuffled_loader(COUNT, BATCH * ranks)
    return run(model_class(ranks), data, schedule, "auto", devices=1, **arguments)


def compare(outcomes: list[Outcome], expected: Outcome) -> None:
    for result in outcomes:
        assert result.extra == expected.extra
    for name, tensor in expected.state.items():
        assert outcomes[0].state[name].dtype is tensor.dtype
    for name, tensor in expected.optimizer_state.items():
        assert outcomes[0].optimizer_state[name].dtype is tensor.dtype, name
    assert_as_single_process(outcomes, expected)


def names(schedule: Any) -> str:
    return "-".join(schedule.values()) if isinstance(schedule, dict) else ""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=names)
def test_as_in_a_single_process(ranks: Ranks, schedule: dict[int, str]) -> None:
    expected = reference(Net, schedule, {})
    seen = {entry[1] for _, entry in expected.extra[0]}
    assert seen == set(schedule.values())
    compare(ranks(fit, Net, schedule, {}), expected)


def test_a_world_of_one(ranks: Ranks) -> None:
    outcomes = ranks.run(1, fit, Net, DOUBLE_TO_SCALED, {"devices": 1})
    compare(outcomes, reference(Net, DOUBLE_TO_SCALED, {}, ranks=1))


class Uncast(Net):
    """Its loss is computed without rounding to 16 bit, which would enlarge the last bits' errors.

    The norm is one sum here, and one over blocks in a single process.
    """

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().rank_loss(inputs, targets, rank, batch_idx)


class Overflowing(Uncast):
    """Rank 1's loss is infinite in one batch of an epoch, where the loss is scaled."""

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        loss = super().rank_loss(inputs, targets, rank, batch_idx)
        overflows = (batch_idx, rank, self.trainer.precision) == (1, 1, "16-mixed")
        return loss * math.inf if overflows and self.trainer.training else loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch, batch_idx)


CLIP = {"gradient_clip_val": 0.3}
BY_VALUE = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
WINDOWS = {"accumulate_grad_batches": 4}  # the second of an epoch is short


@pytest.mark.parametrize("arguments", [CLIP, BY_VALUE, WINDOWS, {**CLIP, **WINDOWS}], ids=str)
@pytest.mark.parametrize("schedule", [DOUBLE_TO_SCALED, THERE_AND_BACK], ids=names)
def test_clipping_and_windows(
    ranks: Ranks, schedule: dict[int, str], arguments: dict[str, Any]
) -> None:
    if "accumulate_grad_batches" in arguments:
        schedule = {step // 3: name for step, name in schedule.items()}
    expected = reference(Overflowing, schedule, arguments)
    assert expected.optimizer_state["0.0.step"] < expected.global_step  # the scaler skipped one
    compare(ranks(fit, Overflowing, schedule, arguments), expected)


@pytest.mark.parametrize("model_class", [TwoNets, Fused])
@pytest.mark.parametrize("schedule", [SINGLE_TO_SCALED, DOUBLE_TO_SCALED], ids=names)
def test_other_optimizers(ranks: Ranks, model_class: type[Net], schedule: dict[int, str]) -> None:
    compare(ranks(fit, model_class, schedule, {}), reference(model_class, schedule, {}))


@pytest.mark.parametrize("start", [7, 8])  # at the end of a window, and inside of one
def test_gradients_kept_from_an_earlier_phase(ranks: Ranks, start: int) -> None:
    schedule = {0: "64-true", start: "32-true", 12: "64-true"}
    compare(ranks(fit, TwoPaces, schedule, {}), reference(TwoPaces, schedule, {}))


def test_line_search(ranks: Ranks) -> None:
    schedule = {0: "64-true", 9: "32-true"}
    compare(ranks(fit, Searching, schedule, {}), reference(Searching, schedule, {}))


def test_three_ranks(ranks: Ranks) -> None:
    outcomes = ranks.run(3, fit, Overflowing, DOUBLE_TO_SCALED, CLIP)
    compare(outcomes, reference(Overflowing, DOUBLE_TO_SCALED, CLIP, ranks=3))


# ---- what a schedule means


def by_hand(schedule: dict[int, str], clip: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training as a loop of plain torch, each phase written out."""
    torch.manual_seed(0)
    model = Net()
    optimizer = model.configure_optimizers()
    scaling, step, dtype = scaler(), 0, torch.float32
    for _ in range(2):
        for inputs, targets in loader(COUNT):
            precision = [name for start, name in sorted(schedule.items()) if start <= step][-1]
            wanted = {"64-true": torch.float64}.get(precision, torch.float32)
            if wanted is not dtype:
                model = model.to(wanted)
                for parameter, state in optimizer.state.items():
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = state[key].to(parameter.dtype)
                dtype = wanted
            mixed = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
            optimizer.zero_grad()
            with torch.autocast("cpu", mixed, enabled=mixed is not None, cache_enabled=False):
                output = model.head(model.body(inputs.to(dtype)))
                loss = nn.functional.mse_loss(output, targets.to(dtype))
                loss = loss + (model.head.bias * model.average).sum()
            model.average = 0.9 * model.average + 0.1 * model.head.bias.detach()
            model.count += 1
            if precision == "16-mixed":
                scaling.scale(loss).backward()
                scaling.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaling.step(optimizer)
                scaling.update()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            step += 1
    return model, optimizer


@pytest.mark.parametrize("schedule", [SINGLE_TO_MIXED, DOUBLE_TO_SCALED, THERE_AND_BACK], ids=names)
def test_as_plain_torch(schedule: dict[int, str]) -> None:
    torch.manual_seed(0)
    model = Net()
    trained = run(model, loader(COUNT), schedule, "auto", devices=1, gradient_clip_val=0.3)
    expected, optimizer = by_hand(schedule, 0.3)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(trained.state[name], tensor), name
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(trained.optimizer_state[f"0.{index}.{key}"], value), key


def test_phases_begin_with_a_batch() -> None:
    """A validation is still in the precision of the steps before it, also on a boundary."""
    seen, _ = reference(Net, DOUBLE_TO_SCALED, {"accumulate_grad_batches": 2}).extra
    double, single, scaled = (
        (name, dtype)
        for name, dtype in zip(
            ("64-true", "32-true", "16-mixed"),
            (torch.float64, torch.float32, torch.float32),
            strict=True,
        )
    )
    batches = [entry for hook, entry in seen if hook == "on_train_batch_start"]
    assert batches == [
        (batch // 2, *(double if batch < 4 else single if batch < 10 else scaled))
        for batch in range(12)
    ]
    validations = [entry for hook, entry in seen if hook == "on_validation_start"]
    assert validations == [(1, *double), (3, *single), (4, *single), (6, *scaled)]
    on_boundary = reference(Net, {0: "64-true", 3: "32-true"}, {}).extra[0]
    assert ("on_validation_end", (3, *double)) in on_boundary
    assert ("on_train_batch_start", (3, *single)) in on_boundary


# ---- checkpoints


def train(
    schedule: dict[int, str], saves: dict[int, str], resume: str | None, strategy: str
) -> Outcome:
    torch.manual_seed(own_rank() + 10 * (resume is not None))
    plugin = plugin_of(schedule)
    watch = Watch()
    callbacks: list[Callback] = [watch, *(SaveAt(*save) for save in saves.items())]
    alone = {"devices": 1} if strategy == "auto" else {}
    trainer = make_trainer(strategy, plugins=[plugin], callbacks=callbacks, **alone)
    model = Net()
    data = StatefulLoader(rows(COUNT), BATCH, shuffle=strategy != "auto")
    trainer.fit(model, data, ckpt_path=resume, weights_only=False if resume else None)
    scale = None if plugin.loss_scaler is None else plugin.loss_scaler.state_dict()
    return outcome(trainer, model, (watch.seen, scale))


@pytest.mark.parametrize("schedule", [DOUBLE_TO_SCALED, THERE_AND_BACK], ids=names)
def test_resumed_run_equals_uninterrupted_run(
    ranks: Ranks, tmp_path: Path, schedule: dict[int, str]
) -> None:
    """Before, at and behind each boundary."""
    saves = {step: str(tmp_path / f"{step}.ckpt") for step in (1, 2, 3, 5, 9, 10)}
    whole = ranks(train, schedule, saves, None, "hvd")
    for step, path in saves.items():
        resumed = ranks(train, schedule, {}, path, "hvd")
        assert_ranks_agree([*whole, *resumed])
        for ours, theirs in zip(whole, resumed, strict=True):
            seen, scale = ours.extra
            assert theirs.extra == (seen[step:], scale)


def test_resumed_in_a_single_process(tmp_path: Path) -> None:
    saves = {step: str(tmp_path / f"{step}.ckpt") for step in (2, 4, 9)}
    whole = train(THERE_AND_BACK, saves, None, "auto")
    for path in saves.values():
        assert_ranks_agree([whole, train(THERE_AND_BACK, {}, path, "auto")])


def resume_with(plugin: Any, path: str, strategy: str) -> Outcome:
    torch.manual_seed(own_rank() + 20)
    trainer = make_trainer(strategy, devices=2, plugins=[plugin])
    model = Net()
    trainer.fit(model, StatefulLoader(rows(COUNT), BATCH), ckpt_path=path, weights_only=False)
    assert plugin.scaler is not None
    return outcome(trainer, model, plugin.scaler.state_dict())


def from_mixed_precision(plain_strategy: str, path: str, other: str) -> None:
    """A run that begins with Lightning's plugin goes on with a schedule, and the other way."""
    torch.manual_seed(own_rank())
    trainer = make_trainer(
        plain_strategy,
        devices=2,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler())],
        max_epochs=1,
    )
    trainer.fit(Net(), StatefulLoader(rows(COUNT), BATCH))
    trainer.save_checkpoint(path)
    plain = resume_with(MixedPrecision("16-mixed", "cpu", scaler()), path, plain_strategy)
    scheduled = resume_with(ScheduledPrecision({0: "32-true", 3: "16-mixed"}), path, "hvd")
    assert scheduled.extra == plain.extra
    assert_ranks_agree([plain, scheduled])
    schedule = {0: "32-true", 1: "16-mixed"}
    train(schedule, {6: other}, None, "hvd")
    ours = resume_with(plugin_of(schedule), other, "hvd")
    theirs = resume_with(MixedPrecision("16-mixed", "cpu"), other, plain_strategy)
    assert ours.extra == theirs.extra
    assert_ranks_agree([ours, theirs])


@pytest.mark.parametrize("strategy", ["hvd", "ddp"])
def test_exchanged_with_mixed_precision(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    plain, scheduled = str(tmp_path / "plain.ckpt"), str(tmp_path / "scheduled.ckpt")
    ranks(from_mixed_precision, strategy, plain, scheduled)
    states = [torch.load(path, weights_only=False)["MixedPrecision"] for path in (plain, scheduled)]
    assert states[0].keys() == states[1].keys() == scaler().state_dict().keys()


def from_an_earlier_phase(path: str) -> tuple[list[Outcome], list[Any]]:
    """The same Trainer, model and plugin, which are in a later phase by then."""
    torch.manual_seed(own_rank())
    watch, model = Watch(), Net()
    trainer = make_trainer(
        plugins=[plugin_of(DOUBLE_TO_SCALED)], callbacks=[watch, SaveAt(1, path)]
    )
    trainer.fit(model, loader(COUNT))
    first = outcome(trainer, model)
    trainer.fit(model, loader(COUNT), ckpt_path=path, weights_only=False)
    second = outcome(trainer, model)
    trainer.validate(model, loader(COUNT), ckpt_path=path, verbose=False, weights_only=False)
    assert model.head.weight.dtype is torch.float64
    saved = torch.load(path, weights_only=True)
    assert saved["ScheduledPrecision"] == {"schedule": DOUBLE_TO_SCALED, "precision": "64-true"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved["state_dict"][name]), name
    return [first, second], watch.seen


def test_a_checkpoint_of_an_earlier_phase(ranks: Ranks, tmp_path: Path) -> None:
    for outcomes, seen in ranks(from_an_earlier_phase, str(tmp_path / "early.ckpt")):
        # The data of the first epoch begin anew behind a plain loader's checkpoint.
        assert outcomes[0].global_step == 12
        precisions = [(hook, entry[:2]) for hook, entry in seen]
        after = precisions.index(("on_train_batch_start", (1, "64-true")), 12)
        assert precisions[after + 1][1] == (2, "32-true")
        assert precisions[-1] == ("on_validation_end", (outcomes[1].global_step, "64-true"))


def with_another_schedule(path: str) -> tuple[Outcome, Outcome]:
    train(DOUBLE_TO_SCALED, {4: path}, None, "hvd")
    return (
        train({0: "64-true", 8: "bf16-mixed"}, {}, path, "hvd"),
        train({0: "32-true", 8: "bf16-mixed"}, {}, path, "hvd"),
    )


def test_the_schedule_of_the_trainer_counts(ranks: Ranks, tmp_path: Path) -> None:
    for doubled, single in ranks(with_another_schedule, str(tmp_path / "other.ckpt")):
        at = [entry for hook, entry in doubled.extra[0] if hook == "on_train_batch_start"]
        assert at[0] == (4, "64-true", torch.float64)
        assert at[4] == (8, "bf16-mixed", torch.float32)
        at = [entry for hook, entry in single.extra[0] if hook == "on_train_batch_start"]
        assert at[0] == (4, "32-true", torch.float32)


# ---- with the strategy


def early_or_not() -> list[bool]:
    class Reads(Callback):
        def __init__(self) -> None:
            self.early: list[bool] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.early.append(trainer.strategy.reducer.unscaled_early)

    reads = Reads()
    trainer = make_trainer(plugins=[plugin_of(SINGLE_TO_SCALED)], callbacks=[reads], max_epochs=1)
    trainer.fit(Uncast(), loader(COUNT))
    return reads.early


def test_the_reduction_undoes_the_scale_where_there_is_one(ranks: Ranks) -> None:
    assert ranks(early_or_not) == [[False] * 3 + [True] * 3] * 2


class TakesBatches(Net):
    """Its step takes the batch itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        dtype = self.head.weight.dtype
        return self.loss([tensor.to(dtype) for tensor in batch], batch_idx)

    def validation_step(self, *_: Any) -> None:
        return None


def test_steps_that_take_batches_themselves(ranks: Ranks) -> None:
    compare(
        ranks(fit, TakesBatches, DOUBLE_TO_SCALED, {}),
        reference(TakesBatches, DOUBLE_TO_SCALED, {}),
    )


def message_of(strategy: str, schedule: dict[int, str], model: Net, **arguments: Any) -> str:
    trainer = make_trainer(strategy, plugins=[ScheduledPrecision(schedule)], **arguments)
    try:
        trainer.fit(model, loader(COUNT))
    except (ValueError, MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def with_its_own_schedule() -> tuple[str, str]:
    rank = own_rank()
    return (
        message_of("hvd", {0: "32-true", 3 + rank: "bf16-mixed"}, Net()),
        message_of("hvd", {0: ("64-true", "32-true")[rank]}, Net()),
    )


def test_schedules_that_differ(ranks: Ranks) -> None:
    for rank, (steps, dtypes) in enumerate(ranks(with_its_own_schedule, fresh=True)):
        assert steps.startswith(
            f"MismatchError: Rank {rank}: ranks compute in different precisions"
        )
        assert "rank 1 has ScheduledPrecision({0: '32-true', 4: 'bf16-mixed'})" in steps
        assert dtypes.startswith("MismatchError")
        assert "float64 where rank 1 has" in dtypes


def what_would_fail_later() -> list[str]:
    return [
        message_of("hvd", SINGLE_TO_SCALED, Searching()),
        message_of("hvd", SINGLE_TO_SCALED, Fused(), gradient_clip_val=0.5),
        message_of("ddp", {0: "64-true", 3: "32-true"}, Net(), devices=2),
        # What need not fail does not.
        message_of("hvd", SINGLE_TO_MIXED, Searching(), max_epochs=1),
        message_of("hvd", SINGLE_TO_MIXED, Fused(), gradient_clip_val=0.5, max_epochs=1),
        message_of("ddp", SINGLE_TO_SCALED, Net(), devices=2, max_epochs=1),
    ]


def test_what_would_fail_in_a_later_phase_fails_at_the_start(ranks: Ranks) -> None:
    for searching, fused, ddp, *fine in ranks(what_would_fail_later, fresh=True):
        assert "LBFGS calls its closure several times in a step" in searching
        assert "AdamW undoes the scale itself (fused=True)" in fused
        assert "which DistributedDataParallel cannot follow" in ddp
        assert fine == ["no error"] * 3
