"""Loss scaling and clipping in the Trainer, where the reduction does the work, and where not.

The loss is computed in fp32 inside of autocast, so that rounding to 16 bit does not hide what is
compared: scale, skipped steps, norm and clipping.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

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


class Scaled(Regression):
    """One rank's loss overflows in one batch."""

    overflow_at = 4

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            loss = super().rank_loss(inputs, targets, rank, batch_idx)
            return loss * math.inf if (batch_idx, rank) == (self.overflow_at, 1) else loss

    def validation_step(self, *_: Any) -> None:
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class LooksAfterBackward(Scaled):
    """What it sees is the scaled mean, as with one process."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.seen: list[float] = []

    def on_after_backward(self) -> None:
        assert self.head.bias.grad is not None
        self.seen.append(self.head.bias.grad.item())


class EditsBeforeStep(Scaled):
    """The edit leaves no trace, and counts."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.data *= 3


class ByHand(Scaled):
    """Manual optimization, with clipping on unscaled gradients."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()


class ClipsByHand(ByHand):
    """Two optimizers, both clipped before one of them steps: what is clipped is unscaled."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):  # Lightning's is around this backward
            self.manual_backward(self.loss(batch, batch_idx))
        for optimizer, algorithm in zip(optimizers, ("norm", "value"), strict=True):
            self.clip_gradients(optimizer, 0.2, algorithm)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.body.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        )


class LooksBeforeStep(Scaled):
    """What it sees is the unscaled mean, before it is clipped."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.head.bias.grad is not None
        self.seen.append(self.head.bias.grad.item())


class Fused(Scaled):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def plugin(scale: float = 2.0**12) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


def run(model: Any, data: Any, strategy: Any, **arguments: Any) -> Outcome:
    mixed = plugin()
    before = mixed.scaler
    trainer = make_trainer(strategy=strategy, plugins=[mixed], max_epochs=2, **arguments)
    trainer.fit(model, data)
    # The user's objects are the user's again, and know the scale.
    assert mixed.scaler is before
    assert "clip_grad_by_norm" not in vars(mixed)
    scale = trainer.precision_plugin.state_dict()
    seen = getattr(model, "seen", None)
    return outcome(trainer, model, (scale["scale"], scale["_growth_tracker"], seen))


def fit(model_class: type[Scaled], arguments: dict[str, Any]) -> Outcome:
    torch.manual_seed(own_rank())
    return run(model_class(), loader(48), "hvd", **arguments)


def reference(model_class: type[Scaled], ranks: int, **arguments: Any) -> Outcome:
    torch.manual_seed(0)
    data = shuffled_loader(48, BATCH * ranks)
    return run(model_class(ranks), data, "auto", devices=1, **arguments)


def compare(outcomes: list[Outcome], expected: Outcome) -> None:
    for result in outcomes:
        scale, growth, seen = result.extra
        assert (scale, growth) == expected.extra[:2]
        if seen is not None:
            assert seen == pytest.approx(expected.extra[2], rel=1e-4, abs=1e-3, nan_ok=True)
    assert_as_single_process(outcomes, expected)


@pytest.mark.parametrize(
    ("model_class", "clip"),
    [
        *(
            (name, clip)
            for name in (Scaled, LooksAfterBackward, LooksBeforeStep, EditsBeforeStep)
            for clip in (None, 0.3, 1000.0)
        ),
        (ByHand, None),
    ],
)
def test_as_in_a_single_process(
    ranks: Ranks, model_class: type[Scaled], clip: float | None
) -> None:
    arguments = {} if clip is None else {"gradient_clip_val": clip}
    compare(ranks(fit, model_class, arguments), reference(model_class, 2, **arguments))


@pytest.mark.parametrize("model_class", [Scaled, LooksBeforeStep])
def test_clipping_by_value_and_accumulation(ranks: Ranks, model_class: type[Scaled]) -> None:
    arguments = {
        "gradient_clip_val": 0.1,
        "gradient_clip_algorithm": "value",
        "accumulate_grad_batches": 2,
    }
    compare(ranks(fit, model_class, arguments), reference(model_class, 2, **arguments))


class OverflowsNever(ClipsByHand):
    overflow_at = -1


@pytest.mark.parametrize("model_class", [ClipsByHand, OverflowsNever])
def test_clipping_by_hand(ranks: Ranks, model_class: type[ClipsByHand]) -> None:
    """Lightning alone would clip the scaled gradients, so the reference is a loop."""
    torch.manual_seed(0)
    model = model_class(2)
    optimizers = model.configure_optimizers()
    scaler = plugin().scaler
    assert scaler is not None
    for epoch in range(2):
        data = shuffled_loader(48, BATCH * 2)
        data.sampler.set_epoch(epoch)
        for batch_idx, batch in enumerate(data):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(model.loss(batch, batch_idx)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.body.parameters(), 0.2)
            torch.nn.utils.clip_grad_value_(model.head.parameters(), 0.2)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    results = ranks(fit, model_class, {})
    for result in results:
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(result.state[name], tensor, rtol=0, atol=1e-5)
            assert torch.equal(result.state[name], results[0].state[name])


def test_three_ranks_and_accumulation(ranks: Ranks) -> None:
    arguments = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3}
    outcomes = ranks.run(3, fit, Scaled, arguments)
    compare(outcomes, reference(Scaled, 3, **arguments))


def test_an_optimizer_that_unscales_by_itself(ranks: Ranks) -> None:
    compare(ranks(fit, Fused, {}), reference(Fused, 2))


def resumed(strategy: str, epochs: int, resume: str | None, save: str | None) -> Outcome:
    """One process where the strategy is Lightning's."""
    ranks = 2 if strategy == "auto" else 0
    torch.manual_seed(own_rank())
    model, mixed = Scaled(ranks), plugin() if resume is None else plugin(2.0**3)
    alone = {"devices": 1} if ranks else {}
    trainer = make_trainer(strategy, plugins=[mixed], max_epochs=epochs, **alone)
    data = shuffled_loader(48, BATCH * ranks) if ranks else loader(48)
    trainer.fit(model, data, ckpt_path=resume, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    scale = mixed.state_dict()
    return outcome(trainer, model, (scale["scale"], scale["_growth_tracker"], None))


def test_checkpoints_keep_the_scale(ranks: Ranks, tmp_path: Path) -> None:
    """Those of one process and of hvd, read by the other."""
    expected = resumed("auto", 3, None, None)
    alone, ours = str(tmp_path / "alone.ckpt"), str(tmp_path / "ours.ckpt")
    resumed("auto", 1, None, alone)
    compare(ranks(resumed, "hvd", 3, alone, None), expected)
    ranks(resumed, "hvd", 1, None, ours)
    compare([resumed("auto", 3, ours, None)], expected)


def fit_from_other_scales(model_class: type[Scaled]) -> Outcome:
    torch.manual_seed(own_rank())
    mixed = plugin(2.0 ** (12 + own_rank()))
    trainer = make_trainer(plugins=[mixed], max_epochs=2)
    model = model_class()
    trainer.fit(model, loader(48))
    scale = mixed.state_dict()
    return outcome(trainer, model, (scale["scale"], scale["_growth_tracker"], None))


class LooksOnly(Scaled):
    def on_after_backward(self) -> None:
        return None


@pytest.mark.parametrize("model_class", [Scaled, LooksOnly])
def test_scales_that_differ_at_the_start(ranks: Ranks, model_class: type[Scaled]) -> None:
    compare(ranks(fit_from_other_scales, model_class), reference(model_class, 2))


class Norms(Callback):
    """How the reducer came to its norms: what was read from memory."""

    def __init__(self) -> None:
        self.early: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.early.append(trainer.strategy.reducer.unscaled_early)


def early_or_not(model_class: type[Scaled]) -> set[bool]:
    watch = Norms()
    run(model_class(), loader(16), "hvd", callbacks=[watch])
    return set(watch.early)


def test_early_only_where_nobody_looks(ranks: Ranks) -> None:
    assert ranks(early_or_not, Scaled) == [{True}] * 2
    assert ranks(early_or_not, Fused) == [{True}] * 2
    assert ranks(early_or_not, LooksAfterBackward) == [{False}] * 2
    assert ranks(early_or_not, ByHand) == [{False}] * 2


def clip_without_scaler(clip: float) -> Outcome:
    torch.manual_seed(own_rank())
    model = Regression()
    trainer = make_trainer(gradient_clip_val=clip)
    trainer.fit(model, loader(48))
    return outcome(trainer, model)


@pytest.mark.parametrize("clip", [0.1, 1000.0])
def test_clipping_without_a_scaler(ranks: Ranks, clip: float) -> None:
    torch.manual_seed(0)
    model = Regression(2)
    trainer = make_trainer(strategy="auto", devices=1, gradient_clip_val=clip)
    trainer.fit(model, shuffled_loader(48, BATCH * 2))
    assert_as_single_process(ranks(clip_without_scaler, clip), outcome(trainer, model))


class Plain(Scaled):
    overflow_at = -1


def fit_in(precision: str, ranks: int) -> Outcome:
    torch.manual_seed(own_rank())
    alone = {"strategy": "auto", "devices": 1} if ranks else {}
    trainer = make_trainer(precision=precision, gradient_clip_val=0.3, **alone)
    model = Plain(ranks)
    trainer.fit(model, shuffled_loader(48, BATCH * ranks) if ranks else loader(48))
    return outcome(trainer, model)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions_without_a_scaler(ranks: Ranks, precision: str) -> None:
    assert_as_single_process(ranks(fit_in, precision, 0), fit_in(precision, 2))


class Narrow(Plain):
    """Parameters of 16 bit, and data to go with them."""

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().loss([part.bfloat16() for part in batch], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def fit_narrow() -> Outcome:
    torch.manual_seed(own_rank())
    model = Narrow()
    trainer = make_trainer(precision="bf16-true", gradient_clip_val=0.3)
    trainer.fit(model, loader(48))
    return outcome(trainer, model)


def test_parameters_of_16_bit(ranks: Ranks) -> None:
    """Bit-equal to one process that takes the mean of the ranks' gradients in fp32."""
    torch.manual_seed(0)
    model = Narrow().bfloat16()
    optimizer = model.configure_optimizers()
    for epoch in range(2):
        data = shuffled_loader(48, BATCH * 2)
        data.sampler.set_epoch(epoch)
        for batch_idx, batch in enumerate(data):
            of_ranks = []
            for rank in range(2):
                optimizer.zero_grad()
                share = [part[rank::2].bfloat16() for part in batch]
                model.rank_loss(*share, rank, batch_idx).backward()
                of_ranks.append([p.grad.float() for p in model.parameters()])
            for parameter, *gradients in zip(model.parameters(), *of_ranks, strict=True):
                parameter.grad = (sum(gradients) / 2).bfloat16()
            squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
            factor = 0.3 / (math.sqrt(squares) + 1e-6)
            if factor < 1:
                for parameter in model.parameters():
                    parameter.grad = (parameter.grad.float() * factor).bfloat16()
            optimizer.step()
    for result in ranks(fit_narrow):
        for name, tensor in model.state_dict().items():
            assert result.state[name].dtype == torch.bfloat16
            assert torch.equal(result.state[name], tensor), name
