"""The session: everything that depends on the world, in one object.

`open_session` finds out who this process is (`world`), lets the ranks meet (`rendezvous`), and
connects them through the C++ core. A session can be closed and opened again any number of times in
one process, while model, optimizer and hooks stay. A world of one opens no process group, no socket
and no server. What the ranks of a session do together is in `collectives`.

A process forked from one with a session has none: it may open its own, and what it inherited does
nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hvd_strategy import _core, log
from hvd_strategy.arguments import require, require_kind
from hvd_strategy.collectives import Collectives, seconds_of, text_of
from hvd_strategy.connect import connect_ranks
from hvd_strategy.errors import HvdError
from hvd_strategy.explanation import add_explanation
from hvd_strategy.options import resolve
from hvd_strategy.world import World, detect_world

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Session", "current_session", "open_session"]


class Session(Collectives):
    """The ranks of a job, connected. Made by `open_session`; usable as a context manager.

    Leaving a `with` block by an exception tells the other ranks of it, which then raise
    `RankFailedError` with its text.

    Attributes:
        world: Who this process is.
        timeout: Deadline of every collective here.
        core: The C++ session.
        communicator: The core's communicator of all ranks, used by the collectives.
    """

    def __init__(
        self,
        world: World,
        core: _core.Session,
        communicator: _core.Communicator,
        options: dict[str, Any],
    ) -> None:
        super().__init__(world, communicator, options["timeout"])
        self.core = core
        self._options = options

    @property
    def closed(self) -> bool:
        """Whether the session has ended, or belongs to the process this one was forked from."""
        return self._closed_because is not None

    def post_error(self, text: str) -> None:
        """Tells the other ranks that this one failed: they raise `RankFailedError` with `text`.

        Not collective. The session is at its end afterwards. Does nothing once it is closed.
        """
        require_kind(str, "text", text, "a str")
        if not self.closed:
            self.core.post_error(f"rank {self.rank} failed: {text}")

    def post_exception(self, error: BaseException) -> str | None:
        """Tells the other ranks by which exception this one ends. Not collective.

        Unless it comes of another rank's end: then that is what everybody is told. Does nothing
        once the session is closed.

        Returns:
            What has been added to the exception's text, see `explanation`.
        """
        require_kind(BaseException, "error", error, "an exception")
        said = add_explanation(self, error)
        if not self.closed and not isinstance(error, HvdError):
            self.core.await_culprit()
        self.post_error(text_of(error) or "")
        return said

    def set_activity(self, text: str) -> None:
        """Says what this rank is about ("validation"), for the stall reports of the others.

        They print it when they wait for this rank for long. Stands until the next call; takes well
        under a microsecond. At most 190 bytes are kept. Does nothing once the session is closed.
        """
        require_kind(str, "text", text, "a str")
        if not self.closed:
            self.core.set_activity(text)

    def close(self) -> None:
        """Ends the session. Idempotent; not collective, but ranks that still need us will fail.

        Happens by itself when the process exits. torch.distributed's default group stays.
        """
        if self.closed:
            return
        self._closed_because = "it has been closed"
        _forget(self)
        self.core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.post_exception(error)
        self.close()

    def __repr__(self) -> str:
        state = f", {self._closed_because}" if self.closed else ""
        return f"Session(rank {self.rank} of {self.size}{state})"


# ---- the session of this process -----------------------------------------------------------------


class _Process:
    """What this process has opened."""

    def __init__(self, opened: int = 0) -> None:
        self.lock = threading.RLock()
        self.session: Session | None = None
        self.opened = opened  # sessions of more than one rank so far, failed attempts included
        self.closes_at_exit = False


_process = _Process()


def current_session() -> Session | None:
    """The session of this process, or None when there is none."""
    return _process.session


def open_session(
    world: World | None = None,
    *,
    timeout: timedelta | None = None,
    stall_warning_seconds: float | None = None,
    stall_abort_seconds: float | None = None,
    abort_grace_seconds: float | None = None,
    process_group_backend: str | None = None,
    address: tuple[str, int] | None = None,
) -> Session:
    """Opens this process's session, or returns the one that is open. Collective.

    Every option has an environment variable, `HVD_` and the name in capitals; an argument beats it.

    Args:
        world: Who this process is. By default torch.distributed's default group tells, where it
            exists, otherwise the launcher's environment variables.
        timeout: Deadline of a collective, and of the meeting of the ranks; 30 minutes by default.
        stall_warning_seconds: After this time a wait prints which ranks are missing, the first step
            after ten times this time; 60 by default, 0 for never.
        stall_abort_seconds: After this time such a wait is an error; 1800 by default, 0 for never.
        abort_grace_seconds: How long this process may go on after another rank failed before it is
            ended, and how long a wait may go on without progress after SIGTERM; 30 by default, 0
            for ever.
        process_group_backend: Backend of torch.distributed's default group where that does not
            exist yet: "auto" (Gloo), "gloo", "nccl", or pairs such as "cpu:gloo,cuda:nccl".
        address: Host and port where the ranks meet, for callers that know better than MASTER_ADDR
            and MASTER_PORT.

    Returns:
        The session; the same object until it is closed.

    Raises:
        ValueError: An option is not acceptable.
        HvdError: The environment contradicts itself, the ranks cannot meet, they are on several
            hosts, or another session is open: with other ranks, or with other options than those
            given here.
        HvdTimeoutError: Ranks are missing at the deadline.
    """
    require(world is None or isinstance(world, World), "world", world, "a hvd_strategy.world.World")
    require(
        address is None or _is_address(address),
        "address",
        address,
        'a pair of host and port, such as ("127.0.0.1", 29500)',
    )
    given = {
        "timeout": timeout,
        "stall_warning_seconds": stall_warning_seconds,
        "stall_abort_seconds": stall_abort_seconds,
        "abort_grace_seconds": abort_grace_seconds,
        "process_group_backend": process_group_backend,
    }
    options = {name: resolve(name, value) for name, value in given.items()}
    log.set_level()
    with _process.lock:
        live = _process.session
        if live is not None:
            _require_fitting(
                live, world, {n: options[n] for n, v in given.items() if v is not None}
            )
            return live
        world = world or _own_world()
        log.set_rank(world.rank, world.size)
        number = _process.opened
        # Counted first: an attempt that fails on some ranks counts on all, so numbers stay equal.
        _process.opened += world.size > 1
        core = connect_ranks(world, options, address, number)
        try:
            communicator = core.communicator(
                list(range(world.size)), timeout=seconds_of(options["timeout"])
            )
        except BaseException:
            core.close()
            raise
        session = Session(world, core, communicator, options)
        _process.session = session
        log.set_session(core.first_to_say)
        if not _process.closes_at_exit:
            # Workers of multiprocessing leave without running atexit's functions, but run these.
            multiprocessing.util.Finalize(None, _close_at_exit, exitpriority=100)
            atexit.register(_close_at_exit)
            _process.closes_at_exit = True
        return session


def _is_address(address: Any) -> bool:
    if not isinstance(address, (tuple, list)) or len(address) != 2:
        return False
    host, port = address
    known = isinstance(host, str) and host != ""
    return known and isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536


def _require_fitting(live: Session, world: World | None, given: dict[str, Any]) -> None:
    if world is not None and (world.rank, world.size) != (live.rank, live.size):
        raise HvdError(
            f"This process has an open session as rank {live.rank} of {live.size}, and cannot be "
            f"rank {world.rank} of {world.size} at the same time: close that one first."
        )
    for name, value in given.items():
        if value != live._options[name]:
            raise HvdError(
                f"Rank {live.rank}'s session is open with {name}={live._options[name]}, and does "
                f"not change to {value}: close it first, or leave {name} out."
            )


def _own_world() -> World:
    if not (dist.is_available() and dist.is_initialized()):
        return detect_world()
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        world = detect_world()
    except HvdError:
        world = World.single()  # the group tells what counts
    if (world.rank, world.size) == (rank, size):
        return world
    return World(rank, size, local_rank=rank, local_size=size, launcher="torch")


# ---- the end of the process, and forks -----------------------------------------------------------


def _forget(session: Session) -> None:
    if _process.session is session:
        _process.session = None
        log.set_session(None)


def _close_at_exit() -> None:
    session = _process.session
    if session is None:
        return
    error = _exit_exception()
    if error is not None:
        with contextlib.suppress(Exception):
            said = session.post_exception(error)
            if said is not None and _is_printed(error):
                print(f"hvd_strategy: [rank {session.rank}] {said}", file=sys.stderr)
    session.close()


def _is_printed(error: BaseException) -> bool:
    """Whether the interpreter has printed the exception already."""
    return error is getattr(sys, "last_value", None)


def _exit_exception() -> BaseException | None:
    """The exception by which this process ends."""
    error = sys.exc_info()[1]  # a worker of multiprocessing ends inside its handler
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None  # torch's workers exit in their handler
    if error is None and not hasattr(sys, "ps1"):
        # What the interpreter printed last; in an interactive one it may be long past.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def _after_fork_in_child() -> None:
    global _process
    session = _process.session
    if session is not None:
        session._closed_because = (
            f"it belongs to process {os.getppid()}, from which process {os.getpid()} was forked"
        )
    _process = _Process(_process.opened)


os.register_at_fork(after_in_child=_after_fork_in_child)
