"""In which type gradients travel between ranks: one for all steps, or a schedule of it by step.

A schedule can be written as a dictionary, `{0: None, 1000: "bf16"}`, and as text, for environment
variables: `"0:none,1000:bf16"`. Both say: full precision first, 16 bit from step 1000 on. Standard
library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

__all__ = ["WIRE_DTYPES", "WireSchedule", "schedule_text"]

# By their short names, those of torch and of the core; "" is none.
WIRE_DTYPES = {"none": "", "fp16": "float16", "bf16": "bfloat16"}


def schedule_text(value: Any) -> str:
    """Brings a dtype or a schedule into one form of text, the same for all that mean the same.

    Args:
        value: A name of `WIRE_DTYPES`; a mapping of steps to such names or None; or text like
            "0:none,1000:bf16". Before its first step a schedule is "none".

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(value, str):
        if value in WIRE_DTYPES:
            return value
        pairs = [_pair(entry) for entry in value.split(",")]
    elif isinstance(value, Mapping):
        pairs = [(_step(step), "none" if name is None else name) for step, name in value.items()]
    else:
        raise ValueError(f"{value!r} is no schedule")
    if not pairs or len({step for step, _ in pairs}) != len(pairs):
        raise ValueError("a schedule names each of its steps once")
    changes = [(0, "none")]
    for step, name in sorted(pairs, key=lambda pair: pair[0]):
        if not isinstance(name, str) or name not in WIRE_DTYPES:
            raise ValueError(f"{name!r} is no dtype")
        if step == changes[-1][0]:
            changes.pop()
        if not changes or name != changes[-1][1]:
            changes.append((step, name))
    if len(changes) == 1:
        return changes[0][1]
    return ",".join(f"{step}:{name}" for step, name in changes)


def _pair(entry: str) -> tuple[int, str]:
    step, colon, name = entry.partition(":")
    if not colon:
        raise ValueError(f"{entry!r} is no pair of step and dtype")
    return _step(step.strip()), name.strip()


def _step(step: Any) -> int:
    # Keys of JSON are text.
    if isinstance(step, str) and step.isascii() and step.isdigit():
        return int(step)
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"{step!r} is no step")
    return step


class WireSchedule:
    """What a text of `schedule_text` says.

    Args:
        text: The text.

    Attributes:
        text: As given.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        pairs = [(0, text)] if text in WIRE_DTYPES else [_pair(part) for part in text.split(",")]
        self._steps = [step for step, _ in pairs]
        self._dtypes = [WIRE_DTYPES[name] for _, name in pairs]

    @property
    def rounds(self) -> bool:
        """Whether there is a step from which on gradients travel in 16 bits."""
        return any(self._dtypes)

    def at(self, step: int) -> str:
        """The core's name of the dtype at a step; empty where gradients travel as they are."""
        return self._dtypes[bisect_right(self._steps, step) - 1]
