"""`wire_dtype` in the Trainer: a schedule by step, with loss scaling and clipping, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from hvd_strategy import HvdStrategy, MismatchError
from tests.multi.pool import Ranks
from tests.multi.test_trainer_precision import Plain, Scaled
from tests.multi.trainer_cases import (
    BATCH,
    Outcome,
    assert_as_single_process,
    assert_ranks_agree,
    loader,
    make_trainer,
    outcome,
    own_rank,
    shuffled_loader,
)
from tests.multi.wire_cases import dtype_at, mean_by_wire

SCHEDULE: dict[int, str | None] = {0: None, 3: "bf16", 8: "fp16"}


class ByWire(Scaled):
    """Its reference rounds each rank's gradient before it takes the mean."""

    schedule = SCHEDULE

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        loss = super().rank_loss(inputs, targets, rank, batch_idx)
        self.losses = [*(self.losses if rank else ()), loss]
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.ranks:
            super().backward(loss, *args, **kwargs)
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        parameters = list(self.parameters())
        by_rank = [torch.autograd.grad(of_rank * scale, parameters) for of_rank in self.losses]
        dtype = dtype_at(self.schedule, self.trainer.global_step)
        for parameter, gradients in zip(parameters, zip(*by_rank, strict=True), strict=True):
            parameter.grad = mean_by_wire(gradients, dtype)

    losses: Any = ()


class LooksAfterBackward(ByWire):
    """So that the scale is not undone in the reduction."""

    def on_after_backward(self) -> None:
        assert self.head.bias.grad is not None


class WithoutOverflow(ByWire, Plain):
    pass


def plugins(scaled: bool) -> list[Any]:
    if not scaled:
        return []
    # A scaled gradient is far beyond the range of fp16.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


def fit(model_class: type[ByWire], scaled: bool, arguments: dict[str, Any]) -> Outcome:
    torch.manual_seed(own_rank())
    model = model_class()
    strategy = HvdStrategy(wire_dtype=model.schedule)
    trainer = make_trainer(strategy, plugins=plugins(scaled), **arguments)
    trainer.fit(model, loader(48))
    return outcome(trainer, model)


@pytest.mark.parametrize(
    ("model_class", "scaled", "clip"),
    [
        (ByWire, True, 0.3),
        (LooksAfterBackward, True, 0.3),
        (ByWire, True, None),
        (WithoutOverflow, False, 0.1),
        (WithoutOverflow, False, None),
    ],
)
def test_schedule_with_loss_scaling_and_clipping(
    ranks: Ranks, model_class: type[ByWire], scaled: bool, clip: float | None
) -> None:
    arguments = {} if clip is None else {"gradient_clip_val": clip}
    outcomes = ranks(fit, model_class, scaled, arguments)
    torch.manual_seed(0)
    model = model_class(2)
    trainer = make_trainer("auto", devices=1, plugins=plugins(scaled), **arguments)
    trainer.fit(model, shuffled_loader(48, BATCH * 2))
    assert_as_single_process(outcomes, outcome(trainer, model))


def train(epochs: int, resume: str | None, save: str | None, wire_dtype: Any) -> Outcome:
    torch.manual_seed(own_rank())
    model = Plain()
    trainer = make_trainer(HvdStrategy(wire_dtype=wire_dtype), devices=2, max_epochs=epochs)
    trainer.fit(model, loader(32), ckpt_path=resume, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(trainer, model)


def test_resumed_run_equals_uninterrupted_run(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    schedule = {0: "fp16", 2: None, 5: "bf16", 9: None}  # resumed at step 8, in bf16
    whole = ranks(train, 4, None, None, schedule)
    ranks(train, 2, None, path, schedule)
    resumed = ranks(train, 4, path, None, schedule)
    assert_ranks_agree([*whole, *resumed])
    assert resumed[0].global_step == 16
    exact = ranks(train, 4, path, None, None)
    assert any(not tensor.equal(exact[0].state[name]) for name, tensor in resumed[0].state.items())


def other_precision() -> str:
    wire_dtype = "bf16" if own_rank() == 0 else {0: None, 5: "bf16"}
    with pytest.raises(MismatchError) as caught:
        make_trainer(HvdStrategy(wire_dtype=wire_dtype)).fit(Plain(), loader(8))
    return str(caught.value)


def test_ranks_that_disagree(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks.run(2, other_precision, fresh=True)):
        assert f"Rank {rank}: wire_dtype is 'bf16' on rank 0, but '0:none,5:bf16' on rank 1" in text


def from_the_environment() -> tuple[Any, Any]:
    strategy = HvdStrategy()
    return strategy._options["wire_dtype"], strategy._options["sum_dtype"]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_the_environment() == ("none", "none")
    monkeypatch.setenv("HVD_WIRE_DTYPE", "0:none, 1000:bf16")
    monkeypatch.setenv("HVD_SUM_DTYPE", "fp64")
    assert from_the_environment() == ("0:none,1000:bf16", "fp64")
    assert HvdStrategy(wire_dtype="none")._options["wire_dtype"] == "none"
