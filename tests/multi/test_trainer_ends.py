"""How a run ends before its time: a signal, or an exception on one rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from hvd_strategy import RankFailedError, current_session
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import Recorder, Regression, loader, make_trainer, own_rank


def signal_at(hook: str, batch: int, signalled: list[int]) -> Recorder:
    def send(trainer: Trainer, module: LightningModule) -> None:
        if own_rank() in signalled and trainer.fit_loop.epoch_loop.batch_idx == batch:
            os.kill(os.getpid(), signal.SIGTERM)

    return Recorder(send, hook)


def stopped(
    hook: str, batch: int, signalled: list[int], arguments: dict[str, Any]
) -> tuple[str, int, dict[str, Tensor]]:
    model = Regression()
    callback = signal_at(hook, batch, signalled)
    trainer = make_trainer(callbacks=[callback], max_epochs=20, **arguments)
    try:
        trainer.fit(model, loader(160), loader(16))
    except SystemExit as error:
        ended = type(error).__name__
    else:
        ended = "finished"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    return ended, trainer.global_step, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("signalled", [[0], [1], [0, 1]])
@pytest.mark.parametrize(
    ("hook", "batch", "arguments"),
    [
        ("on_train_batch_end", 6, {}),
        ("on_train_batch_start", 0, {"accumulate_grad_batches": 40}),
        ("on_validation_end", 19, {}),
    ],
)
def test_sigterm_ends_all_ranks_after_the_same_batch(
    ranks: Ranks, signalled: list[int], hook: str, batch: int, arguments: dict[str, Any]
) -> None:
    (ended, steps, state), (other_ended, other_steps, other_state) = ranks(
        stopped, hook, batch, signalled, arguments
    )
    assert ended == other_ended == "SIGTERMException"
    assert steps == other_steps
    assert steps < 2 * 20
    assert all(torch.equal(tensor, other_state[name]) for name, tensor in state.items())


def signalled_late() -> str:
    callback = signal_at("on_train_batch_end", 3, [1])
    trainer = make_trainer(callbacks=[callback], max_epochs=1)
    try:
        trainer.fit(Regression(), loader(32))
    except SystemExit as error:
        return f"{type(error).__name__} after {trainer.global_step}"
    return "finished"


def test_sigterm_in_the_last_batch(ranks: Ranks) -> None:
    assert ranks(signalled_late) == ["SIGTERMException after 4"] * 2


def fit_after_a_stop() -> list[Any]:
    first = stopped("on_train_batch_end", 2, [0], {})
    model = Regression()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, loader(32))
    return [first[0], trainer.global_step]


def test_next_run_after_a_stop_is_complete(ranks: Ranks) -> None:
    assert ranks(fit_after_a_stop) == [["SIGTERMException", 4]] * 2


class Failing(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            raise ZeroDivisionError("one rank only")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.global_rank == 0:
            raise ZeroDivisionError("while testing")
        super().test_step(batch, batch_idx)


def failing(run: str) -> list[Any]:
    session = None
    trainer = make_trainer()
    try:
        getattr(trainer, run)(Failing(), loader(32))
    except (ZeroDivisionError, RankFailedError) as error:
        session = current_session()
        text = f"{type(error).__name__}: {error}"
    model = Regression()
    again = make_trainer(max_epochs=1)
    again.fit(model, loader(32))
    return [text, session is None, again.global_step]


@pytest.mark.parametrize(("run", "rank"), [("fit", 1), ("test", 0)])
def test_exception_on_one_rank_reaches_the_others(ranks: Ranks, run: str, rank: int) -> None:
    results = ranks(failing, run)
    failed, other = results[rank], results[1 - rank]
    assert failed[0].startswith("ZeroDivisionError: ")
    told = f"rank {1 - rank} cannot go on: rank {rank} failed: ZeroDivisionError: "
    assert other[0].startswith(f"RankFailedError: {told}")
    # The session is over, and the next run has a new one.
    assert failed[1:] == other[1:] == [True, 4]


class FailingLater(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == 1:
            raise ZeroDivisionError("one rank only")
        return super().training_step(batch, batch_idx)


def last_checkpoint(directory: str, signalled: bool) -> str:
    saving = OnExceptionCheckpoint(directory)
    callbacks = [saving, signal_at("on_train_batch_end", 3, [1])] if signalled else [saving]
    trainer = make_trainer(max_epochs=20, enable_checkpointing=True, callbacks=callbacks)
    try:
        trainer.fit(Regression() if signalled else FailingLater(), loader(160))
    except (ZeroDivisionError, RankFailedError, SystemExit) as error:
        return type(error).__name__
    return "finished"


@pytest.mark.parametrize("signalled", [False, True])
def test_callbacks_can_save_a_last_checkpoint(
    ranks: Ranks, tmp_path: Path, signalled: bool
) -> None:
    """Although ranks that failed cannot meet any more."""
    ended = ranks(last_checkpoint, str(tmp_path), signalled)
    assert ended == (
        ["SIGTERMException"] * 2 if signalled else ["RankFailedError", "ZeroDivisionError"]
    )
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] >= 3


def signalled_while_testing() -> str:
    def send(trainer: Trainer, module: LightningModule) -> None:
        if own_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(callbacks=[Recorder(send, "on_test_batch_start")])
    try:
        trainer.test(Regression(), loader(64), verbose=False)
    except (SystemExit, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def test_sigterm_while_testing_reaches_the_others(ranks: Ranks) -> None:
    other, signalled = ranks(signalled_while_testing)
    assert signalled.startswith("SIGTERMException")
    assert other == "RankFailedError: rank 0 cannot go on: rank 1 failed: SIGTERMException"
