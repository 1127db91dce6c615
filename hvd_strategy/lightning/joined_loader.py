"""The training batches of all ranks in step: who has one, and when the epoch ends for all.

A loader of Lightning's that gives this rank's batches, and once they have run out a batch without
samples, until no rank has any more (`"join"`); or that ends with the first rank (`"stop"`). What
decides is what all ranks know of each other:

* Where the lengths of all loaders can be relied on, they are told once, as the epoch begins.
* Otherwise each rank reads ahead, and tells how far with every reduction of gradients. An
  accumulation window's worth of batches is far enough that all ranks know in time whether a batch
  is the last one. Where no reduction came in time (none in a step, an accumulation that grows), the
  ranks meet for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.session import Session

if TYPE_CHECKING:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader as _Base
else:
    _Base = object

_SAMPLERS_WITH_A_LENGTH = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Supplies:
    """How many batches each rank has in an epoch, as far as all ranks know.

    Args:
        size: number of ranks.

    Attributes:
        counts: batches that each rank is known to have, from the start of the epoch.
        least: the smallest of these numbers.
    """

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.least = 0
        self._ended = [False] * size

    def learn(self, notes: list[int]) -> None:
        """Takes up what the ranks have told, by rank; see `note_of`."""
        for rank, note in enumerate(notes):
            self.counts[rank] = note >> 1
            self._ended[rank] = bool(note & 1)
        self.least = min(self.counts)

    def having(self, index: int) -> tuple[int, ...] | None:
        """The ranks that have a batch of this number; None while that is not known."""
        ranks = []
        for rank, count in enumerate(self.counts):
            if count > index:
                ranks.append(rank)
            elif not self._ended[rank]:
                return None
        return tuple(ranks)


def note_of(count: int, ended: bool) -> int:
    """What a rank tells: it has read so many batches of the epoch, and there are no more."""
    return count << 1 | ended


class EpochBatches:
    """This rank's batches in one epoch, in step with the other ranks'. Creating it is collective.

    Args:
        session: the ranks.
        policy: "join", "stop" or "error".
        fetch: reads this rank's next batch.
        length: how many there are, as far as the loaders say; None if they do not.
        reliable: whether that is so.
        window: tells how many batches make an optimizer step.
        no_stand_in: why this run cannot go on without a batch on some rank; None if it can.
        done: number of batches of this epoch that were done before, in a run that is resumed.

    Attributes:
        length: number of batches until the epoch ends for all ranks, None if that is not known.
        supplies: who has how many.
        index: number of the batch that is given next.

    Raises:
        MismatchError: with "error", the ranks are known to have different numbers of batches; or
            their policies differ.
        HvdError: they are, and there is no way to go on.
    """

    def __init__(
        self,
        session: Session,
        policy: str,
        fetch: Callable[[], tuple[Any, int, int]],
        length: int | None,
        reliable: bool,
        window: Callable[[], int],
        no_stand_in: str | None,
        done: int = 0,
    ) -> None:
        self._session = session
        self._policy = policy
        self._fetch = fetch
        self._own_length = length
        self._window = window
        self._no_stand_in = no_stand_in
        self._buffer: deque[tuple[Any, int, int]] = deque()
        self._read = 0
        self._ended = False
        self._stand_in: Any = ()
        self.index = 0
        self.supplies = Supplies(session.size)
        reliable = reliable and length is not None
        everybody = session.exchange("batches of an epoch", [length, reliable, policy])
        policies = [other for _, _, other in everybody]
        if len(set(policies)) > 1:
            told = ", ".join(f"rank {rank} has {other!r}" for rank, other in enumerate(policies))
            raise MismatchError(f"uneven_inputs differs between the ranks: {told}.")
        self._reliable = all(other for _, other, _ in everybody)
        lengths = [other for other, _, _ in everybody]
        known = None not in lengths
        self.length: int | None = (min if policy == "stop" else max)(lengths) if known else None
        if self._reliable:
            self.supplies.learn([note_of(other, True) for other in lengths])
            # Otherwise the numbers are those of what is left.
            self.index = done % self.length if self.length else 0
            self._refuse_differences(max(lengths))
        else:
            self._meet()

    def note(self) -> int:
        """What this rank tells the others with a reduction."""
        if self._reliable:
            return note_of(self._own_length or 0, True)
        return note_of(self._read, self._ended)

    @property
    def listens(self) -> bool:
        """Whether there is anything to learn from the other ranks' notes."""
        return not self._reliable

    def learn(self, notes: list[int]) -> None:
        """Takes up the notes of all ranks."""
        self.supplies.learn(notes)

    def having(self, index: int) -> tuple[int, ...]:
        """The ranks with a batch of this number. Collective where that is not known yet."""
        while (ranks := self.supplies.having(index)) is None:
            self._meet()
        return ranks

    def __next__(self) -> tuple[Any, int, int]:
        index = self.index
        if self.length is not None and index >= self.length:
            raise StopIteration
        if self.supplies.least > index:
            item = self._own()
        else:
            having = self.having(index)
            if not having or (self._policy == "stop" and len(having) < self._session.size):
                raise StopIteration
            if len(having) < self._session.size:
                self._refuse_differences(index + 1)
            item = self._own() if self._session.rank in having else (self._stand_in, index, 0)
        self.index += 1
        if not self._reliable:
            self._read_ahead(self._window())
            if self._ended and not self._buffer and self._read == self.index:
                self._stand_in = emptied(item[0])
        elif self.index == self._own_length and self.index != self.length:
            self._stand_in = emptied(item[0])
        return item

    def _own(self) -> tuple[Any, int, int]:
        if self._buffer:
            return self._buffer.popleft()
        try:
            item = self._fetch()
        except StopIteration:
            raise HvdError(
                f"The data loader of rank {self._session.rank} has a length of {self._own_length} "
                f"batches, but ended after {self.index}. Correct its length."
            ) from None
        return item

    def _read_ahead(self, further: int) -> None:
        while not self._ended and self._read < self.index + further:
            if self._own_length is not None and self._read >= self._own_length:
                self._ended = True
                return
            try:
                self._buffer.append(self._fetch())
                self._read += 1
            except StopIteration:
                self._ended = True

    def _meet(self) -> None:
        self._read_ahead(self._window() + 1)
        notes = self._session.exchange("batches read ahead", [self.note()])
        self.supplies.learn([note for (note,) in notes])

    def _refuse_differences(self, index: int) -> None:
        """Raises where the ranks have different numbers, up to `index`, and cannot go on."""
        counts = [min(count, index) for count in self.supplies.counts]
        if len(set(counts)) == 1 or self._policy == "stop":
            return
        numbers = in_words(counts, "" if self._reliable else "at least ", max(counts))
        if self._policy == "error":
            raise MismatchError(
                f"The ranks have different numbers of training batches: {numbers}. "
                'HvdStrategy(uneven_inputs="error") does not train with them: split the data '
                'evenly, or use "join" or "stop".'
            )
        if self._no_stand_in is not None:
            raise HvdError(
                f"The ranks have different numbers of training batches: {numbers}. "
                f"{self._no_stand_in}, so the others cannot go on without a rank that has run out. "
                'Use HvdStrategy(uneven_inputs="stop"), which ends the epoch with the shortest, or '
                '"error".'
            )


class _Joined(_Base):
    """The part of a CombinedLoader that keeps the ranks in step."""

    _begin_epoch: Callable[[_Joined, Callable[[], Any], int | None], EpochBatches] | None
    _epoch: EpochBatches | None

    def __iter__(self) -> Any:
        self._epoch = None
        super().__iter__()
        if self._begin_epoch is not None:
            try:
                length: int | None = super().__len__()
            except TypeError:
                length = None
            self._epoch = self._begin_epoch(
                self, super().__next__, None if length == float("inf") else length
            )
        return self

    def __next__(self) -> Any:
        return super().__next__() if self._epoch is None else next(self._epoch)

    def __len__(self) -> int:
        if self._epoch is None:
            return super().__len__()
        if self._epoch.length is None:
            raise TypeError("the number of batches is not known on all ranks")
        return self._epoch.length

    def reset(self) -> None:
        self._epoch = None
        super().reset()

    def __reduce__(self) -> Any:
        # Copies are for other runs, and as Lightning made them.
        state = {
            name: value
            for name, value in vars(self).items()
            if name not in ("_begin_epoch", "_epoch")
        }
        return _of_lightnings, (type(self).__mro__[2], state)


def _of_lightnings(loader_class: Any, state: dict[str, Any]) -> Any:
    loader = loader_class.__new__(loader_class)
    vars(loader).update(state)
    return loader


@cache
def _joined_class(loader_class: Any) -> type[Any]:
    return type(loader_class.__name__, (_Joined, loader_class), {"__module__": __name__})


def joined(
    loader: Any, begin_epoch: Callable[[Any, Callable[[], Any], int | None], EpochBatches | None]
) -> Any:
    """Returns a copy of a CombinedLoader that keeps in step with those of the other ranks.

    Args:
        loader: the loader.
        begin_epoch: called with the copy, the function that gives this rank's next batch, and its
            length, whenever an iteration begins; on all ranks.
    """
    loader_class: Any = type(loader)
    joined_class: Any = _joined_class(loader_class)
    copied = joined_class.__new__(joined_class)
    vars(copied).update(vars(loader))
    copied._begin_epoch = begin_epoch
    copied._epoch = None
    return copied


def has_reliable_length(loader: Any) -> bool:
    """Whether the loader will give exactly as many batches as its length says."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    return isinstance(sampler, _SAMPLERS_WITH_A_LENGTH) and (
        batches is None or type(batches) is BatchSampler
    )


def emptied(batch: Any) -> Any:
    """A batch of the same structure without samples; () where there is no telling."""
    result = _without_samples(batch)
    return () if result is None else result


def _without_samples(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return None
        return value.new_empty((0, *value.shape[1:])) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _without_samples(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(entry, (str, bytes, int, float)) for entry in value):
            return type(value)()  # a column of the batch
        entries = [_without_samples(entry) for entry in value]
        if type(value) in (list, tuple):
            return type(value)(entries)
        try:
            return type(value)(*entries)  # a named tuple
        except TypeError:
            return entries
    return value if isinstance(value, (str, bytes, int, float)) else None


def in_words(counts: list[int], at_least: str = "", most: int = -1) -> str:
    """How many batches each rank has; `at_least` is said where there are `most`."""
    return ", ".join(
        f"rank {rank} has {at_least if count == most else ''}{count}"
        for rank, count in enumerate(counts)
    )


__all__ = [
    "EpochBatches",
    "Supplies",
    "emptied",
    "has_reliable_length",
    "in_words",
    "joined",
    "note_of",
]
