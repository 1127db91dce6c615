"""Checkpoints: written once, resumed exactly, and interchangeable with DDP's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.multi.pool import Ranks
from tests.multi.test_trainer_optimization import AdamRegression
from tests.multi.trainer_cases import (
    BATCH,
    Outcome,
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


def train(strategy: str, epochs: int, resume: str | None, save: str | None) -> Outcome:
    torch.manual_seed(own_rank())
    model = AdamRegression()
    trainer = make_trainer(strategy, devices=2, max_epochs=epochs)
    trainer.fit(model, loader(32), ckpt_path=resume, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(trainer, model, extra=trainer.current_epoch)


def shape(value: Any) -> Any:
    """Keys and types of a checkpoint, all the way down."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(entry) for entry in value]
    return type(value)


def test_resumed_run_equals_uninterrupted_run(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = ranks(train, "hvd", 4, None, None)
    ranks(train, "hvd", 2, None, path)
    resumed = ranks(train, "hvd", 4, path, None)
    assert_ranks_agree([*whole, *resumed])
    assert resumed[0].extra == 4
    assert resumed[0].global_step == 16


@pytest.mark.parametrize(("writer", "reader"), [("ddp", "hvd"), ("hvd", "ddp")])
def test_checkpoints_are_interchangeable_with_ddp(
    ranks: Ranks, tmp_path: Path, writer: str, reader: str
) -> None:
    path = str(tmp_path / "half.ckpt")
    ranks(train, writer, 2, None, path)
    resumed = ranks(train, reader, 4, path, str(tmp_path / "end.ckpt"))
    assert_ranks_agree(resumed)
    expected = ranks(train, "ddp", 4, None, str(tmp_path / "ddp.ckpt"))
    for name, tensor in expected[0].state.items():
        torch.testing.assert_close(resumed[0].state[name], tensor, rtol=0, atol=1e-5)
    loaded = [torch.load(tmp_path / name, weights_only=False) for name in ("end.ckpt", "ddp.ckpt")]
    assert shape(loaded[0]) == shape(loaded[1])


def callback(directory: str) -> tuple[str, list[str]]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.manual_seed(own_rank())
    model = AdamRegression()
    checkpoint = ModelCheckpoint(directory, monitor="val_loss", save_last=True, save_top_k=2)
    trainer = make_trainer(max_epochs=3, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(model, loader(32), loader(16))
    tested = trainer.test(model, loader(16), ckpt_path="best", verbose=False, weights_only=False)
    assert tested[0]["test_loss"] == pytest.approx(float(checkpoint.best_model_score))
    return checkpoint.best_model_path, sorted(path.name for path in Path(directory).iterdir())


def test_model_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(callback, str(tmp_path))
    assert first == second
    assert "last.ckpt" in first[1]
    assert len(first[1]) == 3


class Scheduled(Regression):
    """What a checkpoint has to bring back: buffers, two moments, a schedule, the epoch's order."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body.append(nn.BatchNorm1d(8, affine=False, momentum=0.3))
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.seen.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class StatefulLoader(DataLoader):
    """One that can start in the middle of an epoch, as Lightning asks for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = 0
        self._skip = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skip = state["given"] % len(self)  # all of them: the next epoch is not begun

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        self._given = 0
        for batch in super().__iter__():
            self._given += 1
            if self._given > skip:
                yield batch


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def run_scheduled(path: str, save_at: int, resume: bool) -> Outcome:
    torch.manual_seed(own_rank() + 10 * resume)
    model = Scheduled()
    callbacks = [] if resume else [SaveAt(save_at, path)]
    trainer = make_trainer(max_epochs=3, callbacks=callbacks)
    # Shuffled by the sampler that Lightning injects, in another order each epoch.
    trainer.fit(
        model,
        StatefulLoader(rows(40), BATCH, shuffle=True),
        ckpt_path=path if resume else None,
        weights_only=False,
    )
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return outcome(trainer, model, extra=[rate, model.seen])


# Of five steps an epoch: in the middle of the first and second, and at the end of one.
@pytest.mark.parametrize("step", [2, 8, 10])
def test_resumed_run_goes_on_where_it_was(ranks: Ranks, tmp_path: Path, step: int) -> None:
    path = str(tmp_path / "part.ckpt")
    whole = ranks(run_scheduled, path, step, False)
    resumed = ranks(run_scheduled, path, step, True)
    for ours, theirs in zip(whole, resumed, strict=True):
        rate, seen = ours.extra
        assert theirs.extra == [rate, seen[step:]]
    assert_ranks_agree([*whole, *resumed])
    assert whole[0].global_step == 15


class Normless(Scheduled):
    """Without statistics of its own batches, which one process computes from larger ones."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        del self.body[-1]


def interchange(strategy: str, epochs: int, resume: str | None, save: str | None) -> Outcome:
    ranks = 2 if strategy == "auto" else 0
    torch.manual_seed(0)
    model = Normless(ranks)
    arguments = {"devices": 1} if ranks else {}
    trainer = make_trainer(strategy, max_epochs=epochs, **arguments)
    data = shuffled_loader(48, 2 * BATCH) if ranks else loader(48)
    trainer.fit(model, data, ckpt_path=resume, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(trainer, model)


def test_checkpoints_are_interchangeable_with_a_single_process(
    ranks: Ranks, tmp_path: Path
) -> None:
    single, ours = str(tmp_path / "single.ckpt"), str(tmp_path / "hvd.ckpt")
    expected = interchange("auto", 4, None, None)
    interchange("auto", 2, None, single)
    assert_as_single_process(ranks(interchange, "hvd", 4, single, None), expected)
    ranks(interchange, "hvd", 2, None, ours)
    assert_as_single_process([interchange("auto", 4, ours, None)], expected)
