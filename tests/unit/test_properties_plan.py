"""What holds for the buckets of a GradientReducer, whatever model, optimizers and size it is given.

The plan itself has its properties in `tests/cpp/properties_test.cpp`; here it is seen through the
reducer, over several backwards that use other parameters each time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hvd_strategy import GradientReducer, open_session

# The same examples in every run, and no example that is too slow for a busy machine.
repeatable = settings(max_examples=40, deadline=None, derandomize=True, database=None)

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def session() -> Iterator[None]:
    with open_session():
        yield


@st.composite
def models(draw: st.DrawFn) -> list[tuple[int, torch.dtype, int]]:
    """Parameters as (elements, dtype, number of the optimizer)."""
    return draw(
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, 20), st.integers(100, 300)),
                st.sampled_from(DTYPES),
                st.integers(0, 2),
            ),
            min_size=1,
            max_size=12,
        )
    )


def planned(
    arrivals: list[int], parameters: list[nn.Parameter], group: list[int], cap: int
) -> list[list[int]]:
    """The plan, written down as it is meant."""
    buckets: list[list[int]] = []
    last: dict[tuple[torch.dtype, int], list[int]] = {}
    for index in arrivals:
        kind = (parameters[index].dtype, group[index])
        bucket = last.get(kind)
        size = sum(parameters[i].nbytes for i in (*(bucket or ()), index))
        if bucket is None or size > cap:
            bucket = last[kind] = []
            buckets.append(bucket)
        bucket.append(index)
    return buckets


@repeatable
@given(
    model=models(),
    cap=st.integers(1, 3000),
    used=st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=1, max_size=4),
)
def test_buckets(model: list[tuple[int, torch.dtype, int]], cap: int, used: list[set[int]]) -> None:
    parameters = [nn.Parameter(torch.ones(count, dtype=dtype)) for count, dtype, _ in model]
    named = [(f"{index:02}", parameter) for index, parameter in enumerate(parameters)]
    members: dict[int, list[nn.Parameter]] = {}
    for parameter, (_, _, number) in zip(parameters, model, strict=True):
        members.setdefault(number, []).append(parameter)
    # Number 0 has none; the others are counted in the order in which they are given.
    numbers = [number for number in sorted(members) if number]
    optimizers = [torch.optim.SGD(members[number], lr=0.1) for number in numbers]
    group = [number for _, _, number in model]
    reducer = GradientReducer(named, optimizers, bucket_cap_mb=cap / MIB, force=True)
    reducer.record_events()
    try:
        expected: list[list[int]] = []
        known: set[int] = set()
        for backward, chosen in enumerate(used):
            indices = [index for index in sorted(chosen) if index < len(parameters)]
            if not indices:
                break
            sum(parameters[index].double().sum() for index in indices).backward()
            fired = [
                at
                for kind, at, number, _ in reducer.events()
                if (kind, number) == ("fired", backward)
            ]
            assert sorted(fired) == indices
            arrivals = [index for index in fired if index not in known]
            known.update(arrivals)
            expected += planned(arrivals, parameters, group, cap)
            # What was formed stays as it is; what is new comes behind it.
            assert reducer.buckets() == expected
        flat = [index for bucket in reducer.buckets() for index in bucket]
        assert sorted(flat) == sorted(known)
    finally:
        reducer.close()
