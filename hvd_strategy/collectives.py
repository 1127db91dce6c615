"""What the ranks of a session do together, with tensors and with objects.

Collectives of a `Session` are called by all ranks in the same order, by one thread at a time.
"""

from __future__ import annotations

import io
import json
import pickle
from datetime import timedelta
from typing import Any, TypeVar

import torch

from hvd_strategy import _core
from hvd_strategy.arguments import require, require_kind
from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.world import World

__all__ = ["Collectives", "seconds_of", "text_of"]

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


class Collectives:
    """What a `Session` is derived from: its collectives.

    Attributes:
        world: Who this process is.
        timeout: Deadline of every collective here.
        communicator: The core's communicator of all ranks.
    """

    def __init__(self, world: World, communicator: _core.Communicator, timeout: timedelta) -> None:
        self.world = world
        self.timeout = timeout
        self.communicator = communicator
        self._seconds = seconds_of(self.timeout)
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
        told = self.exchange("broadcast_object", [src, len(payload), text_of(failure)])
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
        told = self.exchange("allgather_object", [len(payload), text_of(failure)])
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


def seconds_of(timeout: timedelta) -> float:
    """The deadline as the core takes it."""
    return min(timeout.total_seconds(), _LONGEST_SECONDS)


def _pickled(obj: object) -> tuple[bytearray, Exception | None]:
    stream = io.BytesIO()
    try:
        pickle.dump(obj, stream, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the object's own code raises
        return bytearray(), error
    return bytearray(stream.getbuffer()), None


def text_of(error: BaseException | None) -> str | None:
    """What an exception says, with its type; None for none."""
    if error is None:
        return None
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
