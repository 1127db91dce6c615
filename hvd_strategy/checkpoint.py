"""Checkpoints for training loops of your own: written once, read once, the same on every rank.

    from hvd_strategy import checkpoint

    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    ...
    state = checkpoint.load(path)
    model.load_state_dict(state["model"])

Both functions are collective. Only rank 0 touches the file, so it need not exist for the others; it
is sent to them as `object_stream` describes. What goes wrong on one rank is the same error on all
of them, and the session stays usable: the program may go on with another file.

The Lightning strategy reads and writes through the same functions, with the user's CheckpointIO.

Files are read into memory, and not mapped: optimizers keep the tensors that they are given, and a
mapped file that somebody overwrites in place would change or kill a training that loaded it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from hvd_strategy.errors import CheckpointNotFoundError, HvdError, MismatchError
from hvd_strategy.object_stream import stream_object, text_of
from hvd_strategy.session import Session, open_session


def load(
    path: str | os.PathLike[str],
    map_location: str | torch.device = "cpu",
    weights_only: bool = True,
    *,
    session: Session | None = None,
) -> Any:
    """Returns what a file that `torch.save` or `save` has written holds, on every rank. Collective.

    Rank 0 reads the file. The others need the memory of the result and nothing beside it; no rank
    keeps the file open or mapped.

    Args:
        path: Where the file is for rank 0, the same text on every rank. Anything that fsspec can
            open, "s3://..." for example; a path without a protocol is a local one.
        map_location: The device on which this rank wants the tensors.
        weights_only: As in `torch.load`: read tensors and plain containers only, which cannot run
            code. Rank 0's counts.
        session: The ranks; what `open_session()` returns, when not given.

    Raises:
        MismatchError: The ranks name different files.
        CheckpointNotFoundError: There is no such file; a `FileNotFoundError` as well.
        HvdError: The file cannot be read, or a rank cannot rebuild what is in it. On every rank,
            with the path and the reason.
        TypeError: `map_location` is no device: functions and mappings of `torch.load` are not
            taken, because every rank has devices of its own.
    """
    session = open_session() if session is None else session
    device = _device(map_location)

    def read() -> Any:
        with _opened(os.fspath(path)) as file:
            return torch.load(file, map_location=device, weights_only=weights_only)

    return read_on_rank_zero(session, path, read, device)


def save(obj: Any, path: str | os.PathLike[str], *, session: Session | None = None) -> None:
    """Writes `obj` to a file with `torch.save`, on rank 0. Collective.

    The file has its old content or the new one at any time, also if the process is killed in the
    middle, and the new one survives a crash of the machine once this returns. Folders are made.

    Args:
        obj: What to save; rank 0's counts.
        path: As in `load`; rank 0's counts. Files that are not local are as atomic as their
            file system makes them.
        session: The ranks; what `open_session()` returns, when not given.

    Raises:
        HvdError: The file could not be written. On every rank, with the path and the reason.
    """
    session = open_session() if session is None else session
    write_on_rank_zero(session, path, lambda: write_atomically(obj, path))


# ---- agreement between the ranks -----------------------------------------------------------------


def read_on_rank_zero(
    session: Session,
    path: str | os.PathLike[str],
    read: Callable[[], Any],
    device: torch.device | None = None,
) -> Any:
    """Returns what `read()` returns on rank 0, on every rank. Collective.

    Args:
        session: The ranks.
        path: What is read; compared between the ranks, and named in errors.
        read: Called on rank 0 only. What it raises is raised on every rank.
        device: As in `stream_object`.
    """
    if session.size == 1:
        return read()
    paths = session.allgather_object(str(path))
    for rank, other in enumerate(paths):
        if other != paths[0]:
            raise MismatchError(
                f"The ranks are to load different checkpoints: rank 0 has {paths[0]!r}, rank "
                f"{rank} has {other!r}. Give all of them the same path; only rank 0 needs the file."
            )
    result, failure = None, None
    if session.rank == 0:
        try:
            result = read()
        except Exception as error:  # whatever the file or the reader holds
            failure = error
    problem = text_of(failure)
    if problem is not None:
        problem += _damage(paths[0])
    problem, missing = session.broadcast_object((problem, isinstance(failure, FileNotFoundError)))
    if problem is not None:
        kind = CheckpointNotFoundError if missing else HvdError
        raise kind(
            f"Rank 0, which reads for all ranks, cannot read the checkpoint {paths[0]!r}: {problem}"
        ) from failure
    try:
        return stream_object(session, result, device=device)
    except HvdError as error:
        if type(error) is HvdError:
            raise HvdError(f"The checkpoint {paths[0]!r} cannot be loaded. {error}") from error
        raise


def write_on_rank_zero(
    session: Session, path: str | os.PathLike[str], write: Callable[[], None]
) -> None:
    """Calls `write()` on rank 0, and returns on every rank once it is done. Collective.

    Args:
        session: The ranks.
        path: What is written, for errors; rank 0's counts.
        write: What it raises is raised on every rank.
    """
    if session.size == 1:
        write()
        return
    failure = None
    if session.rank == 0:
        try:
            write()
        except Exception as error:  # whatever the object or the writer holds
            failure = error
    name, problem = session.broadcast_object((str(path), text_of(failure)))
    if problem is not None:
        raise HvdError(
            f"Rank 0, which writes for all ranks, cannot write the checkpoint {name!r}: {problem}"
        ) from failure


# ---- files ---------------------------------------------------------------------------------------


def write_atomically(obj: Any, path: str | os.PathLike[str]) -> None:
    """Writes `obj` with `torch.save`; the file has its old content or the new one at any time.

    A local file is written under another name in the same folder, or under none where the file
    system can do that, flushed to the disk, and renamed. Nothing is copied in memory.
    """
    file_system, name = _located(os.fspath(path))
    if file_system is None:
        target = Path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target) as file:
            _dump(obj, file)
        return
    with file_system.transaction, file_system.open(name, "wb") as file:
        _dump(obj, file)


def _dump(obj: Any, file: IO[bytes]) -> None:
    writer: Any = _Writer(file)
    try:
        torch.save(obj, writer)
    except RuntimeError as error:
        # torch closes its archive also after a failed write, and complains about that.
        if writer.failure is not None and error is not writer.failure:
            raise writer.failure from error
        raise


class _Writer:
    """Passes writes on, and keeps the first exception: torch may report another in its place."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `target` when the block ends well."""
    # Not made from the target's name: Lightning finds checkpoints by parts of their names.
    name = f".hvd-{secrets.token_hex(8)}.tmp"
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _new_file(folder, name) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not _has_name(file):
                # Any folder will do beside an absolute path, but one there must be: without it
                # the link would be one to the symbolic link.
                os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=folder)
        os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        # So that the new name survives a crash, too, where the file system knows how.
        with contextlib.suppress(OSError):
            os.fsync(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def _new_file(folder: int, name: str) -> IO[bytes]:
    """A file in a folder, without a name where possible: it is gone when its process is."""
    if os.path.isdir("/proc/self/fd"):
        # Not on every file system.
        with contextlib.suppress(OSError):
            return open(os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o666, dir_fd=folder), "wb")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    return open(os.open(name, flags, 0o666, dir_fd=folder), "wb")


def _has_name(file: IO[bytes]) -> bool:
    return os.fstat(file.fileno()).st_nlink > 0


def _opened(path: str) -> Any:
    file_system, name = _located(path)
    return open(name, "rb") if file_system is None else file_system.open(name, "rb")


def _damage(path: str) -> str:
    """What can be seen to be wrong with a file, which the error of the reader may not tell."""
    # Only to say more: no file, or one that cannot be looked at, is what the reader says already.
    with contextlib.suppress(Exception):
        file_system, name = _located(path)
        if file_system is not None:
            return ""
        with open(name, "rb") as file:
            start = file.read(4)
        if not start:
            return " (The file is empty.)"
        if start != b"PK\x03\x04":
            return " (The file is no archive as torch.save writes them.)"
        if not zipfile.is_zipfile(name):
            return " (The file is truncated: it starts like a checkpoint, and its end is missing.)"
    return ""


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of this machine's file system."""
    return _located(os.fspath(path))[0] is None


def _located(path: str) -> tuple[Any, str]:
    """The file system of a path and the name in it; None for the local one."""
    if "://" not in path and "::" not in path:
        return None, path
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    file_system, name = url_to_fs(path)
    return None if isinstance(file_system, LocalFileSystem) else file_system, name


def _device(map_location: Any) -> torch.device:
    if not isinstance(map_location, str | torch.device):
        raise TypeError(
            f"map_location={map_location!r} is not accepted: it takes the device on which this "
            'rank wants its tensors, such as "cpu".'
        )
    return torch.device(map_location)


__all__ = [
    "is_local",
    "load",
    "read_on_rank_zero",
    "save",
    "write_atomically",
    "write_on_rank_zero",
]
