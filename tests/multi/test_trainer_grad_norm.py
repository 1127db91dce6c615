"""`log_grad_norm` and `strategy.grad_norm`: the norm of the unscaled mean gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from hvd_strategy import HvdStrategy
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    BATCH,
    Regression,
    loader,
    make_trainer,
    own_rank,
    shuffled_loader,
)

STEPS = 6


class Kept(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        found = {key: value for key, value in metrics.items() if key.startswith("hvd/")}
        if found:
            assert step is not None
            self.entries.append((step, found))


class InFp32(Regression):
    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().rank_loss(inputs, targets, rank, batch_idx)

    def validation_step(self, *_: Any) -> None:
        return None


class Edits(InFp32):
    """What the hook makes of the gradients counts."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)


class Fused(InFp32):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, fused=True)


class ByHand(InFp32):
    """Two optimizers, of which one clips by hand."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        body, head = self.optimizers()
        for optimizer in (body, head):
            optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):  # Lightning's is around this backward
            self.manual_backward(self.loss(batch, batch_idx))
        self.clip_gradients(head, 0.1, "value")
        body.step()
        head.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.body.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        )


class Norms(Callback):
    """What `strategy.grad_norm` is after each batch."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy.grad_norm)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy.grad_norm)


def mixed() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))


def observed(model_class: type[InFp32], scaler: bool, arguments: dict[str, Any]) -> Any:
    """What was logged, and seen; and how often the norm was read from memory."""
    torch.manual_seed(own_rank())
    logger, norms = Kept(), Norms()
    trainer = make_trainer(
        strategy=HvdStrategy(log_grad_norm=True), logger=logger, log_every_n_steps=2, max_epochs=1,
        callbacks=[norms], plugins=[mixed()] if scaler else [], **arguments,
    )  # fmt: skip
    trainer.fit(model_class(), loader(STEPS * BATCH * 2))
    assert trainer.strategy.grad_norm is None
    return logger.entries, norms.seen


def expected_norms(model_class: type[InFp32], clip: float | None) -> list[list[float]]:
    """By step and optimizer, with torch in one process."""
    torch.manual_seed(0)
    model = model_class(2)
    configured = model.configure_optimizers()
    optimizers = configured if isinstance(configured, tuple) else (configured,)
    norms = []
    for batch in shuffled_loader(STEPS * BATCH * 2, BATCH * 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.loss(batch, 0).backward()
        if isinstance(model, Edits):
            model.on_before_optimizer_step(None)
        of_step = []
        for optimizer in optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            limit = float("inf") if clip is None else clip
            of_step.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
            if model_class is ByHand and optimizer is optimizers[1]:
                torch.nn.utils.clip_grad_value_(parameters, 0.1)
            optimizer.step()
        norms.append(of_step)
    return norms


@pytest.mark.parametrize(
    ("model_class", "scaler", "clip"),
    [
        (InFp32, False, None),
        (InFp32, False, 0.5),
        (InFp32, True, 0.5),
        (Edits, True, None),
        (Fused, True, None),
        (ByHand, False, None),
        (ByHand, True, None),
    ],
)
def test_norm_before_clipping(
    ranks: Ranks, model_class: type[InFp32], scaler: bool, clip: float | None
) -> None:
    arguments = {} if clip is None else {"gradient_clip_val": clip}
    norms = expected_norms(model_class, clip)
    results = ranks(observed, model_class, scaler, arguments)
    for _, seen in results:
        assert seen[0] is None
        assert seen[1:] == pytest.approx([of_step[-1] for of_step in norms], rel=1e-4)
    assert results[0][1] == results[1][1]
    logged = [(step, entry) for step, entry in results[0][0]]
    keys = ["hvd/grad_norm"] if len(norms[0]) == 1 else ["hvd/grad_norm/0", "hvd/grad_norm/1"]
    wanted = [
        (step, {key: pytest.approx(norm, rel=1e-4)})
        for step in (1, 3, 5)
        for key, norm in zip(keys, norms[step], strict=True)
    ]
    assert logged == wanted
    assert results[1][0] == []


def known_or_read(model_class: type[InFp32]) -> int:
    """How many gradients were read for their norm."""
    import hvd_strategy.gradient_passes as passes

    read = 0
    rescale = passes.rescale

    def counting(gradients: Any, factor: float) -> Any:
        nonlocal read
        read += len(gradients)
        return rescale(gradients, factor)

    passes.rescale = counting
    try:
        observed(model_class, False, {})
    finally:
        passes.rescale = rescale
    return read


def test_without_a_pass_of_its_own(ranks: Ranks) -> None:
    assert ranks(known_or_read, InFp32) == [0, 0]
    assert ranks(known_or_read, Edits) == [STEPS * 4] * 2
