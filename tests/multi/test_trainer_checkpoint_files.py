"""The Trainer's checkpoints where ranks see different files, and where files or plugins fail."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from hvd_strategy import HvdError
from tests.multi.pool import Ranks
from tests.multi.test_trainer_optimization import AdamRegression
from tests.multi.trainer_cases import (
    loader,
    make_trainer,
    own_rank,
)


@contextmanager
def own_folder(parent: str) -> Iterator[None]:
    """Another working directory on every rank: a relative path exists for rank 0 only."""
    folder = Path(parent, f"rank{own_rank()}")
    folder.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def fitted(save: str | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(own_rank())
    trainer = make_trainer(**arguments)
    trainer.fit(AdamRegression(), loader(32))
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer


def weights(module: LightningModule) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


# ---- files that only rank 0 has ------------------------------------------------------------------


def each_function(parent: str) -> list[Any]:
    """The weights that every function of the Trainer works with, from rank 0's file."""
    found = []
    with own_folder(parent):
        saved = weights(fitted("end.ckpt").lightning_module)
        assert Path("end.ckpt").exists() == (own_rank() == 0)
        for name in ("fit", "validate", "test", "predict"):
            torch.manual_seed(100 + own_rank())
            model = AdamRegression()
            # Its epochs are over: fit loads everything and returns.
            trainer = make_trainer(max_epochs=2)
            verbose = {"verbose": False} if name in ("validate", "test") else {}
            path: Any = "end.ckpt" if name != "test" else Path("end.ckpt")
            getattr(trainer, name)(model, loader(16), ckpt_path=path, weights_only=False, **verbose)
            assert trainer.ckpt_path is not None
            assert all(map(torch.equal, weights(model), saved)), name
            found.append(trainer.global_step)
    return found


def test_every_function_loads_a_file_that_only_rank_0_has(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(each_function, str(tmp_path))
    assert first == second == [8, 0, 0, 0]


def named_checkpoints(parent: str) -> list[Any]:
    seen = []
    with own_folder(parent):
        callback = ModelCheckpoint("kept", save_last=True)
        trainer = fitted(enable_checkpointing=True, callbacks=[callback], default_root_dir=".")
        saved = weights(trainer.lightning_module)
        trainer.save_checkpoint("hpc_ckpt_3.ckpt")
        # The folders of other ranks are empty, or hold what is out of date.
        if own_rank() == 1:
            Path("kept").mkdir(exist_ok=True)
            torch.save("of another job", "kept/last.ckpt")
        for path in ("last", "hpc", "best", None):
            torch.manual_seed(100 + own_rank())
            callback = ModelCheckpoint("kept", save_last=True)
            trainer = make_trainer(
                max_epochs=2,
                enable_checkpointing=True,
                callbacks=[callback],
                default_root_dir=".",
            )
            if path == "best":
                callback.best_model_path = "hpc_ckpt_3.ckpt" if own_rank() == 0 else "elsewhere"
            if path is None:
                # What people write so that a first run starts from nothing.
                path = "hpc_ckpt_3.ckpt" if Path("hpc_ckpt_3.ckpt").exists() else None
            model = AdamRegression()
            trainer.fit(model, loader(32), ckpt_path=path, weights_only=False)
            assert all(map(torch.equal, weights(model), saved)), path
            seen.append((trainer.global_step, str(trainer.ckpt_path)))
    return seen


def test_rank_0_finds_the_checkpoint_for_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(named_checkpoints, str(tmp_path))
    assert first == second
    last = str(tmp_path / "rank0" / "kept" / "last.ckpt")
    assert [step for step, _ in first] == [8] * 4
    assert [path for _, path in first] == [last, "./hpc_ckpt_3.ckpt"] + ["hpc_ckpt_3.ckpt"] * 2


# ---- failures ------------------------------------------------------------------------------------


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (HvdError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Refusing(TorchCheckpointIO):
    """A plugin that cannot read, and cannot write either once it is told."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise PermissionError("the store is locked")


class NotForOthers:
    """Picklable, and not on rank 1."""

    def __init__(self) -> None:
        self.state = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        if own_rank() == 1:
            raise ImportError("no such class here")
        vars(self).update(state)


def failing_loads(folder: str) -> list[str]:
    good = f"{folder}/good.ckpt"
    trainer = fitted(good)
    content = Path(good).read_bytes()
    if own_rank() == 0:
        Path(folder, "truncated.ckpt").write_bytes(content[:-100])
        Path(folder, "garbage.ckpt").write_bytes(b"nothing of use" * 50)
        torch.save({"state_dict": {}, "x": NotForOthers()}, f"{folder}/object.ckpt")
    trainer.strategy.barrier()
    texts = []

    def attempt(path: Any, **arguments: Any) -> None:
        trainer = make_trainer(**arguments)
        run = trainer.fit if len(texts) % 2 == 0 else trainer.validate
        texts.append(error_of(run, AdamRegression(), loader(8), ckpt_path=path, weights_only=False))

    attempt(f"{folder}/missing.ckpt")
    attempt(f"{folder}/truncated.ckpt")
    attempt(f"{folder}/garbage.ckpt")
    attempt(f"{folder}/object.ckpt")
    attempt(good, plugins=[Refusing()])
    attempt(f"{folder}/{own_rank()}.ckpt")
    attempt("last" if own_rank() else good)
    attempt("hpc", default_root_dir=folder)
    # And then it works.
    trainer = make_trainer(max_epochs=3)
    trainer.fit(AdamRegression(), loader(32), ckpt_path=good, weights_only=False)
    return [*texts, str(trainer.global_step)]


def test_failed_loads_are_one_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(failing_loads, str(tmp_path))
    assert first == second
    missing, truncated, garbage, foreign, plugin, different, by_name, hpc, steps = first
    told = "Rank 0, which reads for all ranks, cannot read the checkpoint "
    assert missing == (
        f"CheckpointNotFoundError: {told}'{tmp_path}/missing.ckpt': FileNotFoundError: "
        f"Checkpoint file not found: {tmp_path}/missing.ckpt"
    )
    assert truncated.startswith(f"HvdError: {told}'{tmp_path}/truncated.ckpt': ")
    assert "The file is truncated" in truncated
    assert garbage.startswith(f"HvdError: {told}'{tmp_path}/garbage.ckpt': ")
    assert foreign == (
        f"HvdError: The checkpoint '{tmp_path}/object.ckpt' cannot be loaded. Rank 1 cannot "
        "rebuild an object that rank 0 sent to it: ImportError: no such class here"
    )
    assert plugin == (
        f"HvdError: {told}'{tmp_path}/good.ckpt': PermissionError: the store is locked"
    )
    assert different.startswith("MismatchError: The ranks were given different checkpoints")
    assert f"'{tmp_path}/0.ckpt' on rank 0 and '{tmp_path}/1.ckpt' on rank 1" in different
    assert f"'{tmp_path}/good.ckpt' on rank 0 and 'last' on rank 1" in by_name
    assert hpc.startswith('ValueError: `.validate(ckpt_path="hpc")` is set but no HPC')
    assert steps == "12"


def limit_files(size: int) -> None:
    """No file can become larger than that many bytes: what a full disk looks like."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


class FullDisk(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        limit_files(1000)


def failing_saves(folder: str) -> list[str]:
    trainer = make_trainer(
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, save_last=True), FullDisk()],
    )
    try:
        texts = [error_of(trainer.fit, AdamRegression(), loader(32))]
        limit_files(resource.RLIM_INFINITY)
        trainer = fitted(f"{folder}/good.ckpt")
        limit_files(1000)
        # The old file stays, and a program that catches the error can go on.
        texts.append(error_of(trainer.save_checkpoint, f"{folder}/good.ckpt"))
    finally:
        limit_files(resource.RLIM_INFINITY)
    trainer.save_checkpoint(f"{folder}/more.ckpt")
    return texts


def test_failed_saves_are_one_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(failing_saves, str(tmp_path))
    assert first == second
    told = "HvdError: Rank 0, which writes for all ranks, cannot write the checkpoint "
    assert first[0].startswith(f"{told}'{tmp_path}/epoch=0-step=4.ckpt': OSError: [Errno 27]")
    assert first[1].startswith(f"{told}'{tmp_path}/good.ckpt': OSError: [Errno 27]")
    assert {path.name for path in tmp_path.iterdir()} == {"good.ckpt", "more.ckpt"}
    assert torch.load(tmp_path / "good.ckpt", weights_only=False)["global_step"] == 8


class FailingOnOne(AdamRegression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == 1:
            raise ZeroDivisionError("one rank only")
        return super().training_step(batch, batch_idx)


def saved_on_exception(folder: str) -> str:
    callback = ModelCheckpoint(folder, save_on_exception=True, save_last=True)
    trainer = make_trainer(enable_checkpointing=True, callbacks=[callback])
    try:
        trainer.fit(FailingOnOne(), loader(64))
    except (ZeroDivisionError, HvdError) as error:
        return type(error).__name__
    return "finished"


def test_model_checkpoint_saves_on_an_exception(ranks: Ranks, tmp_path: Path) -> None:
    """Without the rank that failed, with which nothing can be agreed any more."""
    ended = ranks(saved_on_exception, str(tmp_path))
    assert ended == ["RankFailedError", "ZeroDivisionError"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3


# ---- ranks that monitor different values ---------------------------------------------------------


class OwnValue(AdamRegression):
    """Logs a value of its own on every rank: where rank 0's falls, rank 1's rises."""

    def on_validation_epoch_end(self) -> None:
        number = self.trainer.global_step // 2
        value = [3.0, 1.0, 2.0, 5.0, 0.0, 4.0][number % 6]
        self.log("own", 3 * value if self.global_rank == 0 else -value)


def monitored(folder: str, filename: str, k: int) -> list[Any]:
    callback = ModelCheckpoint(folder, filename, monitor="own", save_top_k=k, save_last=True)
    trainer = make_trainer(
        max_epochs=3, enable_checkpointing=True, callbacks=[callback], val_check_interval=2
    )
    torch.manual_seed(own_rank())
    model = OwnValue()
    trainer.fit(model, loader(32), loader(8))
    trainer.test(model, loader(8), ckpt_path="best", verbose=False, weights_only=False)
    # Nothing of ours stays on the user's objects.
    assert "_monitor_candidates" not in vars(callback)
    assert not {"_select_ckpt_path", "resume_start"} & vars(trainer._checkpoint_connector).keys()
    best = {path: float(value) for path, value in callback.best_k_models.items()}
    return [callback.best_model_path, float(callback.best_model_score), best]


@pytest.mark.parametrize(("filename", "k"), [("same", 2), ("{own:.1f}", 1), ("{step}", 3)])
def test_ranks_that_monitor_different_values_save_alike(
    ranks: Ranks, tmp_path: Path, filename: str, k: int
) -> None:
    first, second = ranks(monitored, str(tmp_path), filename, k)
    assert first == second
    # What is monitored is brought together: the means of the six validations after steps 2 to 12.
    assert sorted(first[2].values()) == [0.0, 1.0, 2.0, 3.0][:k]
    saved = {path.name for path in tmp_path.iterdir()}
    assert saved == {"last.ckpt", *(Path(path).name for path in first[2])}


# ---- the user's own CheckpointIO -----------------------------------------------------------------


class Recording(CheckpointIO):
    """Keeps what it is asked for; writes files of its own format."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", Path(path).name, storage_options))
        torch.save({"wrapped": checkpoint}, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.calls.append(("load", Path(path).name, weights_only))
        return torch.load(path, weights_only=False)["wrapped"]

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name))
        os.unlink(path)


def with_plugin(folder: str) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    plugin = Recording()
    callback = ModelCheckpoint(folder, filename="{epoch}")
    trainer = fitted(enable_checkpointing=True, callbacks=[callback], plugins=[plugin])
    trainer.save_checkpoint(f"{folder}/own.ckpt", storage_options={"speed": "high"})
    assert trainer.strategy.checkpoint_io is plugin
    saved = weights(trainer.lightning_module)
    model = AdamRegression()
    make_trainer(plugins=[plugin]).validate(
        model, loader(8), ckpt_path=f"{folder}/own.ckpt", weights_only=False, verbose=False
    )
    return plugin.calls, saved, weights(model)


def test_the_users_plugin_works_on_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    (calls, *own), (other_calls, *others) = ranks(with_plugin, str(tmp_path))
    assert calls == [
        ("save", "epoch=0.ckpt", None),
        ("save", "epoch=1.ckpt", None),
        ("remove", "epoch=0.ckpt"),
        ("save", "own.ckpt", {"speed": "high"}),
        ("load", "own.ckpt", False),
    ]
    assert other_calls == []
    for tensors in zip(*own, *others, strict=True):
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors)


class Held(TorchCheckpointIO):
    """Writes when it is allowed to; fails for a path that says so."""

    def __init__(self) -> None:
        self.allowed = threading.Event()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.allowed.wait(30)
        if "bad" in str(path):
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


class Release(Callback):
    """Looks whether the file is there when saving has returned, then lets it be written."""

    def __init__(self, held: Held, path: str) -> None:
        self.held, self.path = held, path
        self.early: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
            self.early.append(os.path.exists(self.path))
            trainer.strategy.barrier()
            self.held.allowed.set()


def asynchronous(folder: str) -> tuple[list[bool], bool, list[int]]:
    held, path = Held(), f"{folder}/late.ckpt"
    release = Release(held, path)
    trainer = make_trainer(max_epochs=1, callbacks=[release], plugins=[AsyncCheckpointIO(held)])
    trainer.fit(AdamRegression(), loader(32))
    # Not before the file is complete: teardown has waited, for other ranks as well.
    written = os.path.exists(path)
    steps = []
    for plugin in ([AsyncCheckpointIO()], []):
        trainer = make_trainer(max_epochs=2, plugins=plugin)
        trainer.fit(AdamRegression(), loader(32), ckpt_path=path, weights_only=False)
        steps.append(trainer.global_step)
    return release.early, written, steps


def test_asynchronous_plugin(ranks: Ranks, tmp_path: Path) -> None:
    # From step 2 of the first epoch to the end of the second.
    assert ranks(asynchronous, str(tmp_path)) == [([False], True, [8, 8])] * 2


def failing_later(folder: str, saves: int) -> list[str]:
    """Saving has returned; the error comes with the next save, or with the end of the run."""
    held = Held()
    held.allowed.set()

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            if trainer.global_step <= saves:
                trainer.save_checkpoint(f"{folder}/bad{trainer.global_step}.ckpt")

    trainer = make_trainer(max_epochs=1, callbacks=[Saving()], plugins=[AsyncCheckpointIO(held)])
    text = error_of(trainer.fit, AdamRegression(), loader(32))
    return [text, str(fitted().global_step)]


@pytest.mark.parametrize("saves", [1, 4])
def test_errors_of_an_asynchronous_plugin_come_out_on_every_rank(
    ranks: Ranks, tmp_path: Path, saves: int
) -> None:
    first, second = ranks(failing_later, str(tmp_path), saves)
    assert first == second
    assert first[0].startswith(
        f"HvdError: Rank 0, which writes for all ranks, cannot write the checkpoint '{tmp_path}/bad"
    )
    assert first[0].endswith("OSError: [Errno 28] No space left on device")
    assert first[1] == "8"


def default_plugin() -> list[str]:
    trainer = make_trainer(devices=2)
    kept = make_trainer(plugins=[plugin := TorchCheckpointIO()])
    assert kept.strategy.checkpoint_io is plugin
    assert isinstance(trainer.strategy.checkpoint_io, TorchCheckpointIO)
    wrapper = make_trainer(plugins=[AsyncCheckpointIO()]).strategy.checkpoint_io
    assert isinstance(wrapper, AsyncCheckpointIO)
    return [type(io).__name__ for io in (trainer.strategy.checkpoint_io, wrapper.checkpoint_io)]


def test_files_are_written_atomically_by_default(ranks: Ranks) -> None:
    assert ranks(default_plugin) == [["AtomicCheckpointIO"] * 2] * 2
