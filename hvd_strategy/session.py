"""The session: everything that depends on the world, in one object.

`open_session` finds out who this process is (`world`), lets the ranks meet (`rendezvous`), and
connects them through the C++ core. A session can be closed and opened again any number of times in
one process, while model, optimizer and hooks stay. A world of one opens no process group, no socket
and no server.

Collectives of a `Session` are called by all ranks in the same order, by one thread at a time. A
process forked from one with a session has none: it may open its own, and what it inherited does
nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import multiprocessing.util
import os
import pickle
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hvd_strategy import _core, log
from hvd_strategy.arguments import require, require_kind
from hvd_strategy.connect import connect_ranks
from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.explanation import add_explanation
from hvd_strategy.options import resolve
from hvd_strategy.world import World, detect_world

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Session", "current_session", "open_session"]

T = TypeVar("T")

# Element types that the core can add up, by the names it knows them under.
_ELEMENT_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_OPERATIONS = ("sum", "mean", "min", "max")
_RECORD = "a list of what JSON can write: numbers, text, True, False, None, lists, dicts"
# Beyond this the core's nanoseconds would overflow; ten years are never.
_LONGEST_SECONDS = 10 * 365 * 86400.0


class Session:
    """The ranks of a job, connected. Made by `open_session`; usable as a context manager.

    Leaving a `with` block by an exception tells the other ranks of it, which then raise
    `RankFailedError` with its text.

    Attributes:
        world: Who this process is.
        timeout: Deadline of every collective here.
        core: The C++ session.
        communicator: The core's communicator of all ranks, used by the collectives below.
    """

    def __init__(
        self,
        world: World,
        core: _core.Session,
        communicator: _core.Communicator,
        options: dict[str, Any],
    ) -> None:
        self.world = world
        self.timeout: timedelta = options["timeout"]
        self.core = core
        self.communicator = communicator
        self._options = options
        self._seconds = _seconds(self.timeout)
        self._closed_because: str | None = None
        # Set by whoever runs something in which some ranks are not: what collectives raise there.
        self.absent: str | None = None
        # And the ranks that are, None for all.
        self.active_ranks: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """0 <= rank < size."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def local_rank(self) -> int:
        """Rank among the ranks of this host, as the launcher counts."""
        return self.world.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this host, as the launcher counts."""
        return self.world.local_size

    @property
    def closed(self) -> bool:
        """Whether the session has ended, or belongs to the process this one was forked from."""
        return self._closed_because is not None

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces a tensor over all ranks, in place. Collective.

        Args:
            tensor: Dense tensor on the CPU, of the same shape and dtype on all ranks; any floating,
                complex, integer or bool dtype that torch can add, with any strides.
            op: "sum", "mean", "min" or "max". For bool, "sum" and "max" are the logical or, "min"
                the logical and. Complex numbers have no order, so no minimum or maximum.

        Returns:
            `tensor`. Only the mean of integers or bools is another one: a new float32 tensor,
            computed from the sum in int64; `tensor` then keeps its content.

        Raises:
            MismatchError: Another rank came with another collective, shape, dtype or op; raised on
                every rank, and the session stays usable.
            RankFailedError, StallError, HvdTimeoutError: See there; the session is at its end.
            HvdError: The tensor is not on the CPU, or the session is closed.
        """
        self._require_open()
        if op not in _OPERATIONS:
            raise ValueError(f"op={op!r} is not accepted: it takes {', '.join(_OPERATIONS)}.")
        _require_dense_on_cpu(tensor)
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            total = tensor.detach().to(
                torch.int64, memory_format=torch.contiguous_format, copy=True
            )
            self._reduce(total, "sum", 1.0)
            return (total.to(torch.float64) / self.size).to(torch.float32)
        dense = _dense(tensor)
        if op == "mean":
            self._reduce(dense, "sum", 1.0 / self.size)
        else:
            self._reduce(dense, op, 1.0)
        _written(tensor, dense)
        return tensor

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, in rank order. Collective.

        Args:
            tensor: Dense tensor on the CPU; the dtype must be the same on all ranks, the shape need
                not be.

        Returns:
            New contiguous tensors, one per rank.

        Raises:
            MismatchError: The dtypes differ; on every rank, and the session stays usable.
            RankFailedError, StallError, HvdTimeoutError: See there; the session is at its end.
            HvdError: The tensor is not on the CPU, or the session is closed.
        """
        self._require_open()
        _require_dense_on_cpu(tensor)
        dense = _dense(tensor)
        described = self.exchange("allgather", [str(tensor.dtype), list(tensor.shape)])
        self._require_same("allgather", "dtypes", [dtype for dtype, _ in described])
        # One tensor each: views of a common one would share its version counter, and keep all of
        # it alive.
        parts = [torch.empty(shape, dtype=tensor.dtype) for _, shape in described]
        sizes = [part.numel() * part.element_size() for part in parts]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        self.communicator.allgather(
            dense.data_ptr(), sizes[self.rank], received.data_ptr(), sizes, self._seconds
        )
        for part, data in zip(parts, received.split(sizes), strict=True):
            part.view(-1).view(torch.uint8).copy_(data)
        return parts

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Gives every rank the content of rank `src`'s tensor, in place. Collective.

        Args:
            tensor: Dense tensor on the CPU, of the same shape and dtype on all ranks; any dtype,
                with any strides.
            src: The rank whose content counts.

        Returns:
            `tensor`.

        Raises:
            MismatchError: Shape, dtype or `src` differ; on every rank, and the session stays
                usable.
            RankFailedError, StallError, HvdTimeoutError: See there; the session is at its end.
            HvdError: The tensor is not on the CPU, or the session is closed.
        """
        self._require_open()
        self._require_rank(src)
        _require_dense_on_cpu(tensor)
        described = self.exchange("broadcast", [src, str(tensor.dtype), list(tensor.shape)])
        self._require_same("broadcast", "sources", [source for source, _, _ in described])
        self._require_same(
            "broadcast", "tensors", [f"{dtype} {shape}" for _, dtype, shape in described]
        )
        dense = _dense(tensor)
        self.communicator.broadcast(
            dense.data_ptr(), dense.numel() * dense.element_size(), src, self._seconds
        )
        if self.rank != src:
            _written(tensor, dense)
        return tensor

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Returns rank `src`'s object on every rank, sent by pickle. Collective.

        Args:
            obj: The object on rank `src`; ignored on the others.
            src: The rank whose object counts.

        Raises:
            MismatchError: `src` differs between the ranks.
            HvdError: On the other ranks, when the object cannot be pickled; `src` raises the
                original exception. The session stays usable.
        """
        self._require_open()
        self._require_rank(src)
        if self.size == 1:
            return obj
        payload, failure = _pickled(obj) if self.rank == src else (bytearray(), None)
        told = self.exchange("broadcast_object", [src, len(payload), _text_of(failure)])
        self._require_same("broadcast_object", "sources", [source for source, _, _ in told])
        _, size, problem = told[src]
        if problem is not None:
            raise failure or HvdError(f"Rank {src} cannot broadcast its object: {problem}")
        if self.rank != src:
            payload = bytearray(size)
        buffer = torch.frombuffer(payload, dtype=torch.uint8)
        self.communicator.broadcast(buffer.data_ptr(), size, src, self._seconds)
        result: T = obj if self.rank == src else pickle.loads(payload)
        return result

    def allgather_object(self, obj: T) -> list[T]:
        """Returns the objects of all ranks, in rank order, sent by pickle. Collective.

        Raises:
            HvdError: An object cannot be pickled; its rank raises the original exception. The
                session stays usable.
        """
        self._require_open()
        if self.size == 1:
            return [obj]
        payload, failure = _pickled(obj)
        told = self.exchange("allgather_object", [len(payload), _text_of(failure)])
        if failure is not None:
            raise failure
        for rank, (_, problem) in enumerate(told):
            if problem is not None:
                raise HvdError(f"Rank {rank} cannot give its object to the others: {problem}")
        sizes = [size for size, _ in told]
        received = bytearray(sum(sizes))
        source = torch.frombuffer(payload, dtype=torch.uint8)
        target = torch.frombuffer(received, dtype=torch.uint8)
        self.communicator.allgather(
            source.data_ptr(), len(payload), target.data_ptr(), sizes, self._seconds
        )
        view, objects = memoryview(received), []
        for rank, size in enumerate(sizes):
            objects.append(obj if rank == self.rank else pickle.loads(view[:size]))
            view = view[size:]
        return objects

    def exchange(self, purpose: str, record: list[Any]) -> list[list[Any]]:
        """Returns the small records of all ranks, in rank order, sent as JSON. Collective.

        Args:
            purpose: What the exchange is for; the same on all ranks.
            record: This rank's record.

        Raises:
            MismatchError: Another rank came with another purpose; raised on every rank, and the
                session stays usable.
            TypeError: JSON cannot write the record.
        """
        self._require_open()
        require_kind(str, "purpose", purpose, "a str")
        require_kind(list, "record", record, _RECORD)
        try:
            line = json.dumps([purpose, record]).encode()
        except (TypeError, ValueError):  # an object of another class, or a list that holds itself
            require(False, "record", record, _RECORD)
        answers = self.communicator.exchange(line, self._seconds)
        told = [json.loads(answer) for answer in answers]
        self._require_same("a collective", "purposes", [other for other, _ in told])
        return [other for _, other in told]

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self._require_open()
        self.communicator.barrier(self._seconds)

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
        self.post_error(_text_of(error) or "")
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

    def _require_open(self) -> None:
        if self._closed_because is not None:
            raise HvdError(
                f"Rank {self.rank}'s session cannot be used: {self._closed_because}. Open a new "
                "one with hvd_strategy.open_session."
            )
        if self.absent is not None:
            raise HvdError(f"Rank {self.rank}: {self.absent}.")

    def _require_rank(self, src: int) -> None:
        require_kind(int, "src", src, f"a rank from 0 to {self.size - 1}")
        if not 0 <= src < self.size:
            raise ValueError(
                f"src={src!r} is not accepted: it takes a rank from 0 to {self.size - 1}."
            )

    def _reduce(self, dense: torch.Tensor, op: str, post: float) -> None:
        name = _ELEMENT_NAMES.get(dense.dtype)
        if name is None:
            if not dense.is_complex():
                raise TypeError(f"allreduce takes no tensor of {dense.dtype}: convert it first.")
            if op != "sum":
                raise TypeError(
                    f"allreduce takes no op={op!r} for {dense.dtype}: no order is defined."
                )
            dense = torch.view_as_real(dense)
            name = _ELEMENT_NAMES[dense.dtype]
        self.communicator.allreduce(
            dense.data_ptr(), dense.numel(), name, op, 1.0, post, self._seconds
        )

    def _require_same(self, what: str, of_what: str, values: list[Any]) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise MismatchError(
                    f"{what} on rank {self.rank}: the ranks have different {of_what}: rank 0 has "
                    f"{values[0]}, rank {rank} has {value}. They must be the same on all ranks."
                )


# ---- tensors and objects as memory ---------------------------------------------------------------


def _require_dense_on_cpu(tensor: torch.Tensor) -> None:
    require_kind(torch.Tensor, "tensor", tensor, "a dense torch.Tensor on the CPU")
    if not tensor.is_cpu:
        raise HvdError(
            f"The tensor is on {tensor.device}, which is not accepted: it takes a dense "
            "torch.Tensor on the CPU. GPUs and other devices are not supported yet."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"tensor of layout {tensor.layout} is not accepted: it takes a dense torch.Tensor on "
            "the CPU."
        )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its elements lie in memory one after another, otherwise a copy."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # Without its graph, so that nobody records what is only a look at the memory.
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _written(tensor: torch.Tensor, dense: torch.Tensor) -> None:
    """Lets torch know that the core has written to `dense`, made from `tensor` by `_dense`."""
    if dense is not tensor and (
        dense.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg()
    ):
        with torch.no_grad():
            tensor.copy_(dense)
    elif not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _seconds(timeout: timedelta) -> float:
    return min(timeout.total_seconds(), _LONGEST_SECONDS)


def _pickled(obj: object) -> tuple[bytearray, Exception | None]:
    stream = io.BytesIO()
    try:
        pickle.dump(obj, stream, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the object's own code raises
        return bytearray(), error
    return bytearray(stream.getbuffer()), None


def _text_of(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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
                list(range(world.size)), timeout=_seconds(options["timeout"])
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
