"""Files of checkpoints, in one process."""

from __future__ import annotations

import os
import pickle
import stat
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_strategy
from hvd_strategy import CheckpointNotFoundError, HvdError, checkpoint, open_session
from hvd_strategy.world import World


def test_a_world_of_one_needs_no_agreement(tmp_path: Path) -> None:
    with open_session(World.single()) as session:
        checkpoint.save({"a": torch.ones(2)}, tmp_path / "one.pt", session=session)
        assert checkpoint.load(tmp_path / "one.pt", session=session)["a"].tolist() == [1, 1]
        # The errors are torch's and the system's own.
        with pytest.raises(FileNotFoundError) as caught:
            checkpoint.load(tmp_path / "missing.pt", session=session)
        assert not isinstance(caught.value, HvdError)


def test_the_module_is_an_attribute_of_the_package() -> None:
    assert vars(hvd_strategy).get("checkpoint") is checkpoint
    assert hvd_strategy.checkpoint is checkpoint


def test_a_missing_file_is_both_errors() -> None:
    error = pickle.loads(pickle.dumps(CheckpointNotFoundError("not there")))
    assert isinstance(error, FileNotFoundError)
    assert isinstance(error, HvdError)
    assert str(error) == "not there"


def test_files_have_the_usual_permissions_and_replace_others(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    checkpoint.write_atomically(1, path)
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    with path.open("rb") as old:
        checkpoint.write_atomically({"a": torch.arange(5)}, path)
        # Who has the old file open keeps its content.
        assert torch.load(old) == 1
    assert torch.load(path)["a"].tolist() == [0, 1, 2, 3, 4]
    assert {entry.name for entry in tmp_path.iterdir()} == {"file.pt", "ordinary"}


@pytest.mark.parametrize("broken", [False, True])
def test_where_files_cannot_be_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """As on a network file system, which refuses O_TMPFILE."""

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real_open(path, flags, *args, **kwargs)

    real_open = os.open
    monkeypatch.setattr(os, "open", refuse)
    path = tmp_path / "file.pt"
    if broken:
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            checkpoint.write_atomically(lambda: 0, path)
        assert list(tmp_path.iterdir()) == []
    else:
        checkpoint.write_atomically([1, 2], path)
        assert torch.load(path) == [1, 2]
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("module", "tree"),
    [
        ("hvd_strategy.lightning", "lightning.fabric"),
        ("hvd_strategy.lightning.pytorch_lightning", "lightning_fabric"),
    ],
)
def test_the_trainers_files_are_written_so_too(tmp_path: Path, module: str, tree: str) -> None:
    io = pickle.loads(pickle.dumps(import_module(module).AtomicCheckpointIO()))
    assert isinstance(io, import_module(f"{tree}.plugins").TorchCheckpointIO)
    path = tmp_path / "new" / "file.ckpt"
    io.save_checkpoint({"a": torch.ones(1)}, path)
    assert io.load_checkpoint(path)["a"].tolist() == [1]
    assert list(path.parent.iterdir()) == [path]
    # What is not local is Lightning's business, and so are options.
    io.save_checkpoint({"a": 2}, "memory://run/file.ckpt")
    assert io.load_checkpoint("memory://run/file.ckpt") == {"a": 2}
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, path, storage_options={})
