"""Checkpoints: written once, resumed exactly, and interchangeable with DDP's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multi.pool import Ranks
from tests.multi.test_trainer_optimization import AdamRegression
from tests.multi.trainer_cases import (
    Outcome,
    assert_ranks_agree,
    loader,
    make_trainer,
    outcome,
    own_rank,
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
