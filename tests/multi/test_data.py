"""`hvd_strategy.data.shard`: every element once, whoever reads, and in whatever process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hvd_strategy import open_session
from hvd_strategy.data import Shard, shard
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import own_rank


class Numbers(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.count))


def count_to_eleven() -> Iterator[int]:
    yield from range(11)


def read(
    how: str, workers: int, start: str | None, drop_last: bool, epochs: int = 2
) -> list[list[int]]:
    """What this rank reads in each epoch."""
    if how == "session":
        open_session()
    source: Any = {"session": Numbers(11), "function": count_to_eleven, "list": list(range(11))}[
        how
    ]
    data = shard(source, drop_last=drop_last)
    assert isinstance(data, IterableDataset)
    loader = DataLoader(
        data,
        batch_size=2,
        num_workers=workers,
        multiprocessing_context=start,
        timeout=60 * (workers > 0),
    )
    return [sorted(int(number) for batch in loader for number in batch) for _ in range(epochs)]


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("workers", "start"), [(0, None), (1, "fork"), (3, "fork")])
def test_every_element_is_read_once(
    ranks: Ranks, workers: int, start: str | None, drop_last: bool
) -> None:
    results = ranks(read, "session", workers, start, drop_last)
    for epoch in range(2):
        shares = [result[epoch] for result in results]
        together = sorted(number for share in shares for number in share)
        assert len(set(together)) == len(together)
        for rank, share in enumerate(shares):
            assert all(number % ranks.size == rank for number in share)
        if drop_last:
            assert len({len(share) for share in shares}) == 1
            assert len(together) == 11 // ranks.size * ranks.size
        else:
            assert together == list(range(11))


@pytest.mark.parametrize("how", ["function", "list"])
def test_other_sources(ranks: Ranks, how: str) -> None:
    first, second = ranks(read, how, 0, None, False)
    assert first == [[0, 2, 4, 6, 8, 10]] * 2
    assert second == [[1, 3, 5, 7, 9]] * 2


def read_in_spawned_workers() -> list[list[int]]:
    """Workers that know nothing of the session but what is sent to them."""
    session = open_session()
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept["LOCAL_WORLD_SIZE"] = os.environ.pop("LOCAL_WORLD_SIZE")
    try:
        assert session.rank == int(kept["RANK"])
        return read("session", 1, "spawn", False, epochs=1)
    finally:
        os.environ.update(kept)


def test_spawned_workers_know_their_rank(ranks: Ranks) -> None:
    (first,), (second,) = ranks(read_in_spawned_workers, timeout=110)
    assert first == [0, 2, 4, 6, 8, 10]
    assert second == [1, 3, 5, 7, 9]


def lengths() -> list[Any]:
    open_session()
    with pytest.raises(TypeError):
        len(shard(count_to_eleven))
    data = shard(Numbers(3))
    data.set_epoch(2)
    again = pickle.loads(pickle.dumps(data))
    assert isinstance(again, Shard)
    return [
        len(shard(list(range(11)))),
        len(shard(list(range(11)), drop_last=True)),
        list(again),
    ]


def test_length_epoch_and_pickling(ranks: Ranks) -> None:
    assert ranks(lengths) == [[6, 5, [200, 202]], [5, 5, [201]]]


def test_a_world_of_one_reads_everything() -> None:
    assert own_rank() == 0
    assert list(shard(count_to_eleven)) == list(range(11))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (count_to_eleven(), r"source=generator is not accepted: it can be read only once"),
        (TensorDataset(torch.zeros(2)), r"source=TensorDataset is not accepted: .* sampler"),
        (7, r"source=int is not accepted"),
    ],
)
def test_what_cannot_be_split(source: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        shard(source)
    with pytest.raises(TypeError, match="drop_last=1 is not accepted"):
        shard([], drop_last=1)  # type: ignore[arg-type]
