"""A session of one rank, and what a session does at the end of its process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hvd_strategy import session as session_module
from hvd_strategy.errors import HvdError
from hvd_strategy.session import Session, current_session, open_session
from hvd_strategy.world import World


@pytest.fixture
def session() -> Iterator[Session]:
    assert current_session() is None
    with open_session(World.single()) as opened:
        yield opened
    assert current_session() is None


def test_a_world_of_one_works_like_any_other(session: Session) -> None:
    assert (session.rank, session.size, session.local_rank, session.local_size) == (0, 1, 0, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for op in ("sum", "mean") if dtype.is_complex else ("sum", "mean", "min", "max"):
            value = torch.tensor([0, 1, 3]).to(dtype)
            expected = value.clone()
            result = session.allreduce(value, op)
            assert torch.equal(result.to(dtype), expected)
    assert session.allreduce(torch.tensor([3]), "mean").dtype == torch.float32
    [gathered] = session.allgather(torch.ones(2, 0, 3))
    assert gathered.shape == (2, 0, 3)
    assert session.broadcast(torch.ones(2)).tolist() == [1, 1]
    assert session.broadcast_object({"a": 1}) == {"a": 1}
    assert session.allgather_object("x") == ["x"]
    session.barrier()


def _sockets() -> set[str]:
    links = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.add(os.readlink(entry))
    return {link for link in links if link.startswith("socket:")}


def test_a_world_of_one_opens_nothing() -> None:
    before = _sockets()
    with open_session(World.single()):
        assert _sockets() == before
        assert not dist.is_initialized()


def test_open_returns_the_live_session(session: Session) -> None:
    assert open_session() is session
    assert open_session(World.single()) is session
    assert open_session(timeout=timedelta(minutes=30)) is session
    with pytest.raises(HvdError, match="close that one first"):
        open_session(World(0, 2, 0, 2))
    with pytest.raises(HvdError, match="stall_abort_seconds=1800"):
        open_session(stall_abort_seconds=5)


def test_options_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_TIMEOUT", "12")
    with open_session(World.single()) as session:
        assert session.timeout == timedelta(seconds=12)
    with open_session(World.single(), timeout=timedelta(seconds=3)) as session:
        assert session.timeout == timedelta(seconds=3)
    with open_session(World.single(), timeout=timedelta.max) as session:
        session.barrier()
    monkeypatch.setenv("HVD_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="HVD_TIMEOUT='soon'"):
        open_session(World.single())
    assert current_session() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", timedelta(0)),
        ("stall_warning_seconds", -1),
        ("stall_abort_seconds", "x"),
        ("abort_grace_seconds", float("nan")),
        ("process_group_backend", "mpi"),
    ],
)
def test_bad_options_are_named_before_anything_is_opened(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*it takes"):
        open_session(World.single(), **{name: value})  # type: ignore[arg-type]
    assert current_session() is None


def test_a_closed_session_says_so(session: Session) -> None:
    session.close()
    session.close()
    assert session.closed
    assert "closed" in repr(session)
    for call in (session.barrier, lambda: session.allreduce(torch.ones(1))):
        with pytest.raises(HvdError, match=r"closed.*open_session"):
            call()


def test_what_is_not_supported_yet_is_refused(session: Session) -> None:
    with pytest.raises(HvdError, match="GPUs and other devices are not supported yet"):
        session.allreduce(torch.ones(1, device="meta"))
    with pytest.raises(TypeError, match="sparse"):
        session.allgather(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="src=1"):
        session.broadcast(torch.ones(1), 1)


def test_the_world_of_a_group_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(session_module, "detect_world", World.single)
    world = session_module._own_world()
    assert world == World(2, 4, 2, 4)
    assert world.launcher == "torch"
    launched = World(2, 4, 0, 2, 1, "torchrun")
    monkeypatch.setattr(session_module, "detect_world", lambda: launched)
    assert session_module._own_world() is launched


def _program(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).resolve().parents[2],
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": "/usr/bin:/bin"},
    )


def test_the_exception_that_ends_a_process_is_posted(tmp_path: Path) -> None:
    """The session learns of it, whether a script ends by it or a worker of multiprocessing."""
    done = _program(
        tmp_path,
        """
import multiprocessing, sys
from hvd_strategy.session import Session, open_session
from hvd_strategy.world import World

def report(self, text):
    print("posted:", text, flush=True)

Session.post_error = report

def worker(end):
    open_session(World.single())
    if end == "raise":
        raise ArithmeticError("in a worker")
    if end == "exit in handler":  # as torch.multiprocessing's workers do
        try:
            raise ArithmeticError("in torch's worker")
        except ArithmeticError:
            sys.exit(1)
    if end == "exit":
        sys.exit(0)

if __name__ == "__main__":
    open_session(World.single())
    for end in ("raise", "exit in handler", "exit", "return"):
        process = multiprocessing.get_context("fork").Process(target=worker, args=(end,))
        process.start()
        process.join()
    raise ArithmeticError("in the script")
""",
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "posted: ArithmeticError: in a worker",
        "posted: ArithmeticError: in torch's worker",
        "posted: ArithmeticError: in the script",
    ], done.stderr


def test_importing_the_world_needs_only_the_standard_library(tmp_path: Path) -> None:
    done = _program(
        tmp_path,
        """
import sys
import hvd_strategy.world, hvd_strategy.options
print(sorted(name for name in ("torch", "numpy", "lightning", "mpi4py") if name in sys.modules))
""",
    )
    assert done.stdout == "[]\n", done.stderr
