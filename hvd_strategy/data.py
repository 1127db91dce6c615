"""Splits data that is read one element after another between the ranks.

Data with an index needs nothing of this: the Trainer injects samplers, and a plain loop uses
`torch.utils.data.DistributedSampler`. What can only be iterated is read by every rank, and by every
worker of its DataLoader, from the start to the end; `shard` leaves each of them its own elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hvd_strategy.session import current_session
from hvd_strategy.world import detect_world

__all__ = ["Shard", "shard"]


def shard(source: Iterable[Any] | Callable[[], Iterable[Any]], *, drop_last: bool = False) -> Shard:
    """Returns the elements of `source` that are this rank's, as an IterableDataset.

    Element number i belongs to rank `i % ranks`, and there to DataLoader worker
    `i // ranks % workers`: every element is read exactly once, whatever the number of workers, and
    ranks differ by one element at most. Who reads is found out when reading begins: the session of
    this process, in a worker that of the process which started it (by fork or spawn), else
    torch.distributed's default group, else the launcher's environment variables.

    The source has to give the same elements in the same order on every rank and in every worker: a
    shuffle needs a seed that all share, and a dataset that already splits itself between workers
    has to stop doing so.

        loader = DataLoader(shard(lines_of("corpus.txt")), batch_size=32, num_workers=2)

    Args:
        source: An IterableDataset, another iterable that can be read many times, or a function
            without arguments that returns an iterator (a generator function, say). With workers
            that are spawned it must pickle.
        drop_last: Leave out what is left over at the end, so that all ranks have equally many
            elements and batches.

    Raises:
        TypeError: `source` is a generator, which can be read only once, or data with an index.
    """
    return Shard(source, drop_last)


class Shard(IterableDataset[Any]):
    """What `shard` returns; can be iterated any number of times.

    Attributes:
        source: What is split.
        drop_last: Whether the rest is left out that does not go round all ranks.
    """

    def __init__(
        self, source: Iterable[Any] | Callable[[], Iterable[Any]], drop_last: bool
    ) -> None:
        if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            raise TypeError(
                f"source={type(source).__name__} is not accepted: data with an index is split by "
                "a sampler (the Trainer injects one; in a loop of your own use "
                "torch.utils.data.DistributedSampler)."
            )
        if isinstance(source, Iterator):
            raise TypeError(
                f"source={type(source).__name__} is not accepted: it can be read only once. Give "
                "the function that makes it, without calling it."
            )
        if not isinstance(source, Iterable) and not callable(source):
            raise TypeError(
                f"source={type(source).__name__} is not accepted: it takes an IterableDataset, "
                "another iterable, or a function that returns an iterator."
            )
        if not isinstance(drop_last, bool):
            raise TypeError(f"drop_last={drop_last!r} is not accepted: it takes True or False.")
        self.source = source
        self.drop_last = drop_last
        # Rank and size where this object was pickled; None in the process that made it.
        self._sent_from: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        rank, size = _rank_and_size(self._sent_from)
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = rank + size * number
        kept: list[Any] = []  # with drop_last, until all ranks have got one of this round
        elements = self.source if isinstance(self.source, Iterable) else self.source()
        for index, element in enumerate(elements):
            place = index % (size * workers)
            if place == own:
                kept.append(element)
            if kept and (not self.drop_last or place == size * (number + 1) - 1):
                yield kept.pop()

    def __len__(self) -> int:
        """Number of elements of this rank, all its workers together.

        Raises:
            TypeError: The source has no length.
        """
        rank, size = _rank_and_size(self._sent_from)
        length = len(self.source)  # type: ignore[arg-type]
        return length // size + (not self.drop_last and rank < length % size)

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the epoch on to the source, if that has such a method."""
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        session = current_session()
        known = self._sent_from if session is None else (session.rank, session.size)
        return {**self.__dict__, "_sent_from": known}


# Rank and size of the process from which this one was forked, at that moment.
_forked_from: tuple[int, int] | None = None


def _remember_before_fork() -> None:
    global _forked_from
    session = current_session()
    if session is not None:
        _forked_from = (session.rank, session.size)


def _rank_and_size(sent_from: tuple[int, int] | None) -> tuple[int, int]:
    session = current_session()
    if session is not None:
        return session.rank, session.size
    if sent_from is not None:
        return sent_from
    if _forked_from is not None and get_worker_info() is not None:
        return _forked_from
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    world = detect_world()
    return world.rank, world.size


os.register_at_fork(before=_remember_before_fork)
