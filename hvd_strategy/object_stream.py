"""Sends an object that holds tensors from one rank to the others, in bounded memory.

The object is pickled without the memory of its tensors: that of every storage, and of large numpy
arrays, goes after it in chunks, each straight from the sender's memory into the receiver's. So the
receiver needs no more than what the object itself takes, however large it is, and what goes through
pickle is small. It is torch's own pickling, cut where `torch.save` cuts it. So every kind of tensor
that can be saved can be sent, and what shared memory before (views, tied weights) shares it after.

A receiver gets the memory of a storage at the moment when unpickling asks for it, because an
object's `__setstate__` may look at its tensors. Both sides meet storages in the same order, which
makes the stream one sequence of bytes that both cut into the same chunks.

The ranks of a job trust each other: what the sender has, the others unpickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_strategy._private_api import (
    forget_rebuilt_sparse_tensors,
    typed_storage,
    untyped_storage,
)
from hvd_strategy.errors import HvdError
from hvd_strategy.session import Session

CHUNK_BYTES = 16 << 20
# Bounds the lists of a chunk of very many small tensors.
_MOST_PIECES = 4096
# Smaller arrays stay in the pickle.
_ARRAY_BYTES = 64 << 10

# What a receiver has to make for a payload: a storage on a device of this type, or plain bytes.
_BYTES = ""


def stream_object(
    session: Session, obj: Any, src: int = 0, device: torch.device | None = None
) -> Any:
    """Returns rank `src`'s object on every rank: there itself, on the others a copy. Collective.

    The others need the memory of the copy, what is neither tensor nor large array a second time
    while it is unpickled, and nothing else on the CPU. Tensors on another device go through one
    chunk of 16 MiB on both sides.

    Args:
        session: The ranks.
        obj: The object on rank `src`; ignored on the others.
        src: The rank whose object counts.
        device: Where the others put the tensors. By default on a device of the type that they are
            on at rank `src`, each rank on its current one.

    Raises:
        HvdError: On every rank, with the same text: the object cannot be pickled, or another rank
            cannot rebuild it, because it lacks a class, say. The session stays usable.
    """
    if session.size == 1:
        return obj
    outgoing, failure = None, None
    if session.rank == src:
        try:
            outgoing = _take_apart(obj)
        except Exception as error:  # whatever the objects' own code raises
            failure = error
    announced = None if outgoing is None else outgoing.announced
    announced, problem = session.broadcast_object((announced, text_of(failure)), src)
    if announced is None:
        raise HvdError(
            f"Rank {src} has an object that cannot be sent to the other ranks: {problem}"
        ) from failure
    failure, result = None, obj
    if outgoing is not None:
        _send(session, outgoing.memory, src)
    else:
        incoming = _Incoming(session, announced, src, device)
        try:
            result = _put_together(incoming)
        except Exception as error:  # as above
            failure = error
        incoming.drain()
    for rank, problem in enumerate(session.allgather_object(text_of(failure))):
        if problem is not None:
            raise HvdError(
                f"Rank {rank} cannot rebuild an object that rank {src} sent to it: {problem}"
            ) from failure
    return result


def text_of(error: BaseException | None) -> str | None:
    """Returns the name of an error's class and its message; None for none."""
    if error is None:
        return None
    return f"{type(error).__name__}: {error}".rstrip(": ")


# ---- the sender ----------------------------------------------------------------------------------


class _Outgoing:
    """What goes to the other ranks: payloads, each a piece of memory. The first is the pickle.

    Attributes:
        memory: one-dimensional tensors of uint8.
        kinds: for each payload, what the receivers have to make for it.
    """

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.kinds: list[str] = []
        self._numbers: dict[tuple[torch.device, int, int], int] = {}
        self.add(torch.empty(0, dtype=torch.uint8, device="cpu"), _BYTES)

    @property
    def announced(self) -> list[tuple[int, str]]:
        """Size in bytes and kind of each payload: all that a receiver has to know before."""
        sizes = [memory.numel() for memory in self.memory]
        return list(zip(sizes, self.kinds, strict=True))

    def add(self, memory: Tensor, kind: str) -> int:
        self.memory.append(memory)
        self.kinds.append(kind)
        return len(self.memory) - 1

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """The payload of a storage; 0 for an empty one, which never shares anything."""
        if storage.nbytes() == 0:
            return 0
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self._numbers:
            self._numbers[key] = self.add(_memory_of(storage), storage.device.type)
        return self._numbers[key]

    def keep_in_pickle(self, buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _ARRAY_BYTES or memory.readonly:
            return True
        self.add(torch.frombuffer(memory, dtype=torch.uint8), _BYTES)
        return False


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, outgoing: _Outgoing) -> None:
        super().__init__(stream, protocol=5, buffer_callback=outgoing.keep_in_pickle)
        self._outgoing = outgoing

    def persistent_id(self, obj: Any) -> tuple[int, str, torch.dtype] | None:
        if not torch.is_storage(obj):
            return None
        storage = untyped_storage(obj)
        # As torch.load does, which lets functions that rebuild tensors expect typed storages only.
        dtype = torch.uint8 if isinstance(obj, torch.UntypedStorage) else obj.dtype
        return self._outgoing.number_of(storage), storage.device.type, dtype


def _take_apart(obj: Any) -> _Outgoing:
    outgoing, stream = _Outgoing(), io.BytesIO()
    _Pickler(stream, outgoing).dump(obj)
    outgoing.memory[0] = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
    return outgoing


def _send(session: Session, payloads: Sequence[Tensor], src: int) -> None:
    for chunk in _chunks([memory.numel() for memory in payloads]):
        pieces = [payloads[number][start : start + length] for number, start, length in chunk]
        # Those on the CPU are themselves.
        _transfer(session, [piece.cpu() for piece in pieces], src)


# ---- the receivers -------------------------------------------------------------------------------


class _Incoming:
    """The payloads that come from rank `src`, received as they are asked for, in their order."""

    def __init__(
        self,
        session: Session,
        announced: Sequence[tuple[int, str]],
        src: int,
        device: torch.device | None,
    ) -> None:
        self._session = session
        self._src = src
        self._device = device
        self._sizes = [size for size, _ in announced]
        self._kinds = [kind for _, kind in announced]
        self._chunks = _chunks(self._sizes)
        self._chunk = next(self._chunks, None)
        self._owners: dict[int, Any] = {}
        self._memory: dict[int, Tensor] = {}
        self._complete = 0  # payloads received
        self._broken: BaseException | None = None

    def payload(self, number: int) -> Any:
        """A storage or a bytearray, with its content."""
        while self._complete <= number:
            self._receive_chunk()
        return self._owners[number]

    def arrays(self) -> Iterator[Any]:
        """The payloads that are no storages, after the pickle itself."""
        for number, kind in enumerate(self._kinds):
            if number > 0 and kind == _BYTES:
                yield self.payload(number)

    def storage(self, number: int, kind: str) -> torch.UntypedStorage:
        if number == 0:
            return self._new_storage(0, kind)
        storage: torch.UntypedStorage = self.payload(number)
        return storage

    def drain(self) -> None:
        """Takes the rest of the stream, which is there when the receiver could not use it.

        Raises:
            BaseException: what ended the stream, now or before.
        """
        if self._chunk is not None:
            self._owners.clear()
            self._memory.clear()
        while self._broken is None and self._chunk is not None:
            self._exchange(
                [
                    torch.empty(length, dtype=torch.uint8, device="cpu")
                    for _, _, length in self._chunk
                ]
            )
        if self._broken is not None:
            raise self._broken

    def _receive_chunk(self) -> None:
        assert self._chunk is not None
        targets = []
        for number, start, length in self._chunk:
            if number not in self._owners:
                self._prepare(number)
            targets.append(self._memory[number][start : start + length])
        staged = [
            target if _is_reachable(target) else torch.empty_like(target, device="cpu")
            for target in targets
        ]
        self._exchange(staged)
        for target, received in zip(targets, staged, strict=True):
            if target is not received:
                target.copy_(received)

    def _exchange(self, targets: list[Tensor]) -> None:
        assert self._chunk is not None
        try:
            _transfer(self._session, targets, self._src)
        except BaseException as error:
            self._broken = error
            raise
        number, start, length = self._chunk[-1]
        self._complete = number + (start + length == self._sizes[number])
        self._chunk = next(self._chunks, None)

    def _prepare(self, number: int) -> None:
        size, kind = self._sizes[number], self._kinds[number]
        if kind == _BYTES:
            owner: Any = bytearray(size)
            self._memory[number] = torch.frombuffer(owner, dtype=torch.uint8)
        else:
            owner = self._new_storage(size, kind)
            self._memory[number] = _memory_of(owner)
        self._owners[number] = owner

    def _new_storage(self, size: int, kind: str) -> torch.UntypedStorage:
        return torch.UntypedStorage(size, device=self._device or torch.device(kind))


class _Unpickler(pickle.Unpickler):
    def __init__(self, incoming: _Incoming) -> None:
        super().__init__(io.BytesIO(incoming.payload(0)), buffers=incoming.arrays())
        self._incoming = incoming

    def persistent_load(self, pid: tuple[int, str, torch.dtype]) -> Any:
        number, kind, dtype = pid
        return typed_storage(self._incoming.storage(number, kind), dtype)


def _put_together(incoming: _Incoming) -> Any:
    try:
        return _Unpickler(incoming).load()
    finally:
        forget_rebuilt_sparse_tensors()


# ---- both ----------------------------------------------------------------------------------------


def _chunks(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts payloads of these sizes, laid one after another, into chunks.

    A chunk is a list of pieces (number of the payload, start, length), together at most 16 MiB.
    """
    chunk: list[tuple[int, int, int]] = []
    room = CHUNK_BYTES
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            length = min(size - start, room)
            chunk.append((number, start, length))
            start += length
            room -= length
            if room == 0 or len(chunk) == _MOST_PIECES:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _transfer(session: Session, pieces: Sequence[Tensor], src: int) -> None:
    """Moves the sender's pieces into those of the others, which are as long. All on the CPU."""
    session.communicator.broadcast_many(
        [piece.data_ptr() for piece in pieces],
        [piece.numel() for piece in pieces],
        src,
        session.timeout.total_seconds(),
    )


def _is_reachable(memory: Tensor) -> bool:
    """Whether the engine can write there."""
    return memory.is_cpu


def _memory_of(storage: torch.UntypedStorage) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


__all__ = ["CHUNK_BYTES", "stream_object", "text_of"]
