"""Every way of writing `wire_dtype` means one thing, and everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_strategy.options import OPTIONS, resolve
from hvd_strategy.wire_schedule import WIRE_DTYPES, WireSchedule, schedule_text

repeatable = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("none", "none"),
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ({0: "bf16"}, "bf16"),
        ({0: None}, "none"),
        ({7: None}, "none"),
        ({0: None, 1000: "bf16"}, "0:none,1000:bf16"),
        ({1000: "bf16"}, "0:none,1000:bf16"),
        ({1000: "bf16", 0: "none"}, "0:none,1000:bf16"),
        ({"0": None, "1000": "bf16"}, "0:none,1000:bf16"),
        ({0: "fp16", 5: "fp16", 9: None, 12: "bf16"}, "0:fp16,9:none,12:bf16"),
        ("0:none,1000:bf16", "0:none,1000:bf16"),
        (" 1000 : bf16 , 0 : none ", "0:none,1000:bf16"),
        ("1000:bf16", "0:none,1000:bf16"),
        ("0:bf16", "bf16"),
    ],
)
def test_ways_of_writing(value: Any, text: str) -> None:
    assert resolve("wire_dtype", value, environ={}) == text
    # What comes out can be given again, also through the environment.
    assert resolve("wire_dtype", text, environ={}) == text
    assert resolve("wire_dtype", environ={"HVD_WIRE_DTYPE": text}) == text


@pytest.mark.parametrize(
    "value",
    [
        "float16", "BF16", "int8", "0", "0:", ":bf16", "0:none,", "0:none,0:bf16", "0:none;1:bf16",
        "-1:bf16", "1.5:bf16", "x:bf16", "0:none 1000:bf16", "٣:bf16", {}, {0: "int8"}, {0: 16},
        {-1: "bf16"}, {True: "bf16"}, {1.5: "bf16"}, {"x": "bf16"}, {0: None, "0": "bf16"},
        {None: "bf16"}, ["bf16"], [(0, "bf16")], 16, True, 10**400, {0: ["bf16"]},
    ],
)  # fmt: skip
def test_what_is_refused(value: Any) -> None:
    accepts = OPTIONS["wire_dtype"].accepts
    with pytest.raises(ValueError, match="wire_dtype=") as caught:
        resolve("wire_dtype", value)
    assert str(caught.value) == f"wire_dtype={value!r} is not accepted: it takes {accepts}."
    if isinstance(value, str):
        with pytest.raises(ValueError, match="HVD_WIRE_DTYPE=") as caught:
            resolve("wire_dtype", environ={"HVD_WIRE_DTYPE": value})
        assert accepts in str(caught.value)


schedules = st.dictionaries(
    st.integers(0, 10**12), st.sampled_from([None, *WIRE_DTYPES]), min_size=1, max_size=6
)


@repeatable
@given(schedule=schedules, step=st.integers(0, 10**12), near=st.booleans())
def test_the_dtype_of_every_step(schedule: dict[int, Any], step: int, near: bool) -> None:
    if near:  # a step at which something changes
        step = max(0, sorted(schedule)[step % len(schedule)] - step % 2)
    begun = [of for of in schedule if of <= step]
    expected = (schedule[max(begun)] or "none") if begun else "none"
    text = schedule_text(schedule)
    assert WireSchedule(text).at(step) == WIRE_DTYPES[expected]
    assert WireSchedule(text).rounds == any(
        (name or "none") != "none" for name in schedule.values()
    )
    pairs = [f"{step}:{name or 'none'}" for step, name in schedule.items()]
    assert schedule_text(",".join(pairs)) == schedule_text(text) == text


@pytest.mark.parametrize("value", ["none", "fp32", "fp64"])
def test_sum_dtypes(value: str) -> None:
    assert resolve("sum_dtype", value) == value
    assert resolve("sum_dtype", environ={"HVD_SUM_DTYPE": value}) == value
    assert resolve("sum_dtype", environ={}) == "none"
