"""What holds for `resolve` whatever it is given."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_strategy.options import OPTIONS, resolve

# The same examples in every run, and no example that is too slow for a busy machine.
repeatable = settings(max_examples=80, deadline=None, derandomize=True, database=None)

texts = st.one_of(
    st.text(max_size=12),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(["auto", "gloo", "cpu:gloo", "cpu:gloo,cuda:nccl", "true", "0", "1", "fp16"]),
    st.sampled_from(["1e400", "-0", " 3 ", "1_000", "٣", "nan", "inf", "0x10", "\0"]),
)
values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.timedeltas(),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.sampled_from([10**400, -(10**400), 1j, object(), timedelta.max, timedelta.min, "auto"]),
)


def resolved(*args: Any, **kwargs: Any) -> tuple[Any, str | None]:
    """The value, or the text of the only exception that may come."""
    try:
        return resolve(*args, **kwargs), None
    except ValueError as error:
        return None, str(error)


def is_acceptable(name: str, value: Any) -> bool:
    option = OPTIONS[name]
    return value == option.default or (isinstance(value, option.type) and option.check(value))


@pytest.mark.parametrize("name", OPTIONS)
@repeatable
@given(text=texts)
def test_any_text(name: str, text: str) -> None:
    option = OPTIONS[name]
    found, refusal = resolved(name, environ={option.env: text})
    if refusal is not None:
        assert refusal == (
            f"Environment variable {option.env}={text!r} is not accepted: it takes "
            f"{option.accepts}."
        )
        return
    assert is_acceptable(name, found)
    if not text.strip():
        assert found == option.default
    # An argument of this value is accepted as well, and means the same.
    assert resolve(name, found, environ={}) == found


@pytest.mark.parametrize("name", OPTIONS)
@repeatable
@given(value=values)
@example(value=10**400)
@example(value=math.nan)
def test_any_argument(name: str, value: Any) -> None:
    option = OPTIONS[name]
    found, refusal = resolved(name, value, environ={option.env: "not looked at"})
    if refusal is not None:
        assert refusal.startswith(f"{name}=")
        assert refusal.endswith(f" is not accepted: it takes {option.accepts}.")
        return
    assert is_acceptable(name, found)
    assert resolve(name, found, environ={}) == found


@pytest.mark.parametrize(
    "name", [name for name, option in OPTIONS.items() if option.type in (float, timedelta)]
)
@repeatable
@given(seconds=st.floats(min_value=1e-3, max_value=1e9))
def test_numbers_mean_the_same_everywhere(name: str, seconds: float) -> None:
    by_argument = resolve(name, seconds, environ={})
    assert resolve(name, environ={OPTIONS[name].env: repr(seconds)}) == by_argument
    expected = timedelta(seconds=seconds) if OPTIONS[name].type is timedelta else seconds
    assert by_argument == expected
