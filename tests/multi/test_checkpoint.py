"""`checkpoint.load` and `checkpoint.save`: one file of rank 0, the same outcome on every rank."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import (
    CheckpointNotFoundError,
    GradientReducer,
    HvdError,
    MismatchError,
    checkpoint,
    open_session,
)
from tests.multi.pool import Ranks


@contextmanager
def own_folder(parent: str) -> Iterator[None]:
    """Another working directory on every rank: a relative path exists for rank 0 only."""
    folder = Path(parent, f"rank{open_session().rank}")
    folder.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def train(parent: str, steps: int, load: bool, save: bool) -> dict[str, Tensor]:
    """From another model on each rank; the state after that many steps in total."""
    session = open_session()
    torch.manual_seed(session.rank + 10 * load)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    with own_folder(parent):
        if load:
            state = checkpoint.load("half.pt")
            assert Path("half.pt").exists() == (session.rank == 0)
            first = state["step"]
            for name, part in parts.items():
                part.load_state_dict(state[name])
        reducer = GradientReducer(model.named_parameters(), optimizer, module=model)
        for step in range(first, steps):
            generator = torch.Generator().manual_seed(100 * step + session.rank)
            optimizer.zero_grad()
            model(torch.randn(6, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        reducer.close()
        if save:
            state = {name: part.state_dict() for name, part in parts.items()}
            checkpoint.save({**state, "step": steps}, "half.pt")
    moments = {
        f"{number}.{name}": value
        for number, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    return {
        **dict(model.named_parameters()),
        **moments,
        "lr": torch.tensor(scheduler.get_last_lr()),
    }


def test_a_loop_resumes_as_if_it_had_not_ended(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(train, str(tmp_path), 6, False, False)
    ranks(train, str(tmp_path), 3, False, True)
    resumed = ranks(train, str(tmp_path), 6, True, False)
    for state in [*whole, *resumed]:
        assert state.keys() == whole[0].keys()
        for name, tensor in whole[0].items():
            assert torch.equal(state[name], tensor), name


class Custom:
    """What `weights_only` does not let through."""


def outcome_of_loading(path: str, weights_only: bool) -> tuple[str, str, bool]:
    session = open_session()
    try:
        checkpoint.load(path, weights_only=weights_only)
    except HvdError as error:
        # The session goes on.
        session.barrier()
        return type(error).__name__, str(error), isinstance(error, FileNotFoundError)
    return "", "", False


def test_files_that_cannot_be_read_are_one_error_on_every_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    good = tmp_path / "good.pt"
    torch.save({"a": torch.arange(10_000)}, good)
    content = good.read_bytes()
    (tmp_path / "truncated.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "garbage.pt").write_bytes(b"this is no checkpoint" * 100)
    # Inside the pickle, the first file of the archive.
    start = content.index(b"data.pkl") + 60
    (tmp_path / "damaged.pt").write_bytes(content[:start] + b"\xff" * 16 + content[start + 16 :])
    torch.save(Custom(), tmp_path / "object.pt")
    (tmp_path / "folder.pt").mkdir()
    for name, reason in [
        ("missing.pt", "FileNotFoundError: "),
        ("folder.pt", "IsADirectoryError: "),
        ("truncated.pt", "The file is truncated"),
        ("empty.pt", "The file is empty"),
        ("garbage.pt", "The file is no archive"),
        ("damaged.pt", "Error: "),
        ("object.pt", "weights_only"),
    ]:
        path = str(tmp_path / name)
        outcomes = ranks(outcome_of_loading, path, True)
        kind, text, is_missing = outcomes[0]
        assert all(outcome == outcomes[0] for outcome in outcomes), name
        assert text.startswith(
            f"Rank 0, which reads for all ranks, cannot read the checkpoint '{path}': "
        )
        assert reason in text
        assert (kind == "CheckpointNotFoundError") == is_missing == (name == "missing.pt")
    assert [kind for kind, _, _ in ranks(outcome_of_loading, str(good), True)] == ["", ""]
    assert [
        kind for kind, _, _ in ranks(outcome_of_loading, str(tmp_path / "object.pt"), False)
    ] == ["", ""]


def arguments(folder: str) -> None:
    session = open_session()
    checkpoint.save({"rank": session.rank}, f"{folder}/new/deep/file.pt")
    assert checkpoint.load(Path(folder, "new", "deep", "file.pt")) == {"rank": 0}
    checkpoint.save({"rank": 5}, f"file://{folder}/url.pt")
    assert checkpoint.load(f"{folder}/url.pt", torch.device("cpu")) == {"rank": 5}
    # A file system that only rank 0's process has.
    checkpoint.save(torch.arange(3), "memory://run/tensor.pt")
    assert checkpoint.load("memory://run/tensor.pt").tolist() == [0, 1, 2]
    with pytest.raises(MismatchError, match=r"rank 0 has '/0\.pt', rank 1 has '/1\.pt'"):
        checkpoint.load(f"/{session.rank}.pt")
    with pytest.raises(TypeError, match=r"map_location=.* the device on which this rank"):
        checkpoint.load("file.pt", {"cuda:0": "cpu"})  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError, match=r"'missing\.pt'"):
        checkpoint.load("missing.pt")


def test_arguments(ranks: Ranks, tmp_path: Path) -> None:
    ranks(arguments, str(tmp_path))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can become larger than that many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def outcomes_of_saving(folder: str) -> list[str]:
    session = open_session()
    texts = []
    content = {"a": torch.ones(1_000_000)}
    with full_disk(1 << 20):
        for obj, path in [
            (content, f"{folder}/old.pt"),
            (content, f"{folder}/old.pt/below.pt"),
            (content, f"{folder}/folder.pt"),
            (lambda: 0, f"{folder}/old.pt"),
        ]:
            try:
                checkpoint.save(obj, path)
            except HvdError as error:
                texts.append(str(error))
    session.barrier()
    assert checkpoint.load(f"{folder}/old.pt") == "old content"
    return texts


def test_failed_writes_are_one_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    torch.save("old content", tmp_path / "old.pt")
    (tmp_path / "folder.pt").mkdir()
    texts = ranks(outcomes_of_saving, str(tmp_path))
    assert texts[0] == texts[1]
    told = "Rank 0, which writes for all ranks, cannot write the checkpoint "
    assert texts[0][0] == f"{told}'{tmp_path}/old.pt': OSError: [Errno 27] File too large"
    assert texts[0][1].startswith(f"{told}'{tmp_path}/old.pt/below.pt': FileExistsError")
    assert texts[0][2].startswith(f"{told}'{tmp_path}/folder.pt': ")
    assert "lambda" in texts[0][3]
    # Nothing of the attempts is left.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.pt", "old.pt"]
