"""Every option of this package: its name, environment variable, default, and what it accepts.

One table serves the session, the gradient reducer and the strategy: each takes the option as a
keyword argument whose default is None, and asks `resolve` for the value. An argument beats the
environment variable, which beats the default. The variable is always `HVD_` and the name in
capitals. Standard library only.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hvd_strategy.wire_schedule import schedule_text

__all__ = ["OPTIONS", "Option", "resolve"]


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: Name of the keyword argument.
        type: `bool`, `float`, `int`, `str` or `timedelta`; in the environment a timedelta is a
            number of seconds, a bool is 1, true, yes, on or 0, false, no, off.
        default: The value where neither argument nor environment gives one.
        check: Whether a value of the right type is acceptable.
        accepts: What is acceptable, in words, for error messages and the documentation.
        help: What the option does.
        read: For an option with several ways of writing a value: brings them into one of `type`;
            ValueError for what is no value.
    """

    name: str
    type: type
    default: Any
    check: Callable[[Any], bool]
    accepts: str
    help: str
    read: Callable[[Any], Any] | None = None

    @property
    def env(self) -> str:
        """The environment variable."""
        return f"HVD_{self.name.upper()}"

    def from_argument(self, value: Any) -> Any:
        """Checks a value given in Python and brings it into the option's type."""
        if self.read is not None:
            try:
                return self.read(value)
            except ValueError:
                fits = False
        elif self.type is float:
            # bool is an int to Python, but nobody means 1 second by True.
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = fits and abs(value) <= sys.float_info.max  # an int may be any size
            value = float(value) if fits else value
        elif self.type is timedelta and isinstance(value, (int, float)):
            # The other times are numbers of seconds; so is this one in the environment.
            fits = not isinstance(value, bool) and 0 < value < 1e10
            value = timedelta(seconds=value) if fits else value
        elif self.type is int:
            fits = isinstance(value, int) and not isinstance(value, bool)
        else:
            fits = isinstance(value, self.type)
        if not fits or not self.check(value):
            raise ValueError(f"{self.name}={value!r} is not accepted: it takes {self.accepts}.")
        return value

    def from_text(self, text: str) -> Any:
        """Reads and checks the value of the environment variable."""
        value: Any = text.strip()
        try:
            if self.read is not None:
                value = self.read(value)
            if self.type is bool:
                value = _TRUTH[value.lower()]
            elif self.type is int:
                value = int(value)
            elif self.type is not str:
                value = float(value)
            if self.type is timedelta:
                value = timedelta(seconds=value)
            fits = self.check(value)
        except (KeyError, ValueError, OverflowError):
            fits = False
        if not fits:
            raise ValueError(
                f"Environment variable {self.env}={text!r} is not accepted: it takes "
                f"{self.accepts}."
            )
        return value


_TRUTH = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _seconds_or_never(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _backend(value: str) -> bool:
    pair = r"[a-z][a-z0-9_]*:(gloo|nccl)"
    return re.fullmatch(rf"auto|gloo|nccl|{pair}(,{pair})*", value) is not None


_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_START_METHODS = ("auto", "popen", "fork", "spawn", "interactive")

_ALL = (
    Option(
        "start_method",
        str,
        "auto",
        lambda value: value in _START_METHODS,
        ", ".join(f'"{method}"' for method in _START_METHODS),
        "How ranks come into being that no launcher has started.",
    ),
    Option(
        "bucket_cap_mb",
        float,
        25.0,
        _positive,
        "a number above 0, in MiB",
        "Gradients are reduced in buckets of at most this size.",
    ),
    Option(
        "timeout",
        timedelta,
        timedelta(minutes=30),
        lambda value: value > timedelta(0),
        "a datetime.timedelta above 0, or a number of seconds",
        "Deadline of a collective, and of the meeting of the ranks.",
    ),
    Option(
        "stall_warning_seconds",
        float,
        60.0,
        _seconds_or_never,
        "a number of seconds, 0 for never",
        "After this time a wait prints which ranks are missing; the first step gets ten times it.",
    ),
    Option(
        "stall_abort_seconds",
        float,
        1800.0,
        _seconds_or_never,
        "a number of seconds, 0 for never",
        "After this time a wait for missing ranks becomes an error.",
    ),
    Option(
        "abort_grace_seconds",
        float,
        30.0,
        _seconds_or_never,
        "a number of seconds, 0 for never",
        "How long a process may go on after another rank failed before it is ended, and how long a "
        "wait may go on without progress after SIGTERM.",
    ),
    Option(
        "process_group_backend",
        str,
        "auto",
        _backend,
        '"auto", "gloo", "nccl", or pairs of device and backend such as "cpu:gloo,cuda:nccl"',
        "Backend of torch.distributed's default group, where it does not exist yet.",
    ),
    Option(
        "sparse_as_dense",
        bool,
        False,
        lambda value: True,
        "True or False",
        "Sparse gradients are turned into dense ones before they are reduced.",
    ),
    Option(
        "wire_dtype",
        str,
        "none",
        lambda value: True,
        'None, "none", "fp16", "bf16", or a schedule of these by optimizer step such as '
        '{0: None, 1000: "bf16"}, as text "0:none,1000:bf16"',
        "Gradients of fp32 and fp64 travel between ranks in 16 bits; results keep their type.",
        schedule_text,
    ),
    Option(
        "sum_dtype",
        str,
        "none",
        lambda value: value in ("none", "fp32", "fp64"),
        'None, "none", "fp32" or "fp64"',
        "Gradients are added up in at least this precision; none: fp32, and fp64 those of fp64.",
    ),
    Option(
        "gradient_average",
        str,
        "ranks",
        lambda value: value in ("ranks", "items"),
        '"ranks" or "items"',
        "What the mean is taken over: the ranks, or the items that each of them tells.",
    ),
    Option(
        "log_grad_norm",
        bool,
        False,
        lambda value: True,
        "True or False",
        "The norm of the gradients, before clipping, is logged at the steps that are logged.",
    ),
    Option(
        "consistency_check_every_n_steps",
        int,
        0,
        lambda value: value >= 0,
        "a whole number of optimizer steps, 0 for never",
        "Every so many optimizer steps the ranks compare parameters, buffers and optimizer state.",
    ),
    Option(
        "on_divergence",
        str,
        "error",
        lambda value: value in ("error", "repair"),
        '"error" or "repair"',
        "What happens when they differ: an error, or the majority's values for all.",
    ),
    Option(
        "rank_seeds",
        bool,
        False,
        lambda value: True,
        "True or False",
        "Each rank draws other random numbers, for dropout and augmentation.",
    ),
    Option(
        "uneven_inputs",
        str,
        "join",
        lambda value: value in ("join", "stop", "error"),
        '"join", "stop" or "error"',
        "What happens when ranks have different numbers of batches: those with data go on, all end "
        "with the shortest, or an error.",
    ),
    Option(
        "exact_evaluation",
        bool,
        False,
        lambda value: True,
        "True or False",
        "Every sample is validated and tested exactly once, with no repetition for even shares.",
    ),
    Option(
        "log_level",
        str,
        "info",
        lambda value: value.lower() in _LOG_LEVELS,
        ", ".join(f'"{level}"' for level in _LOG_LEVELS),
        "Level of the logger hvd_strategy; by the environment variable only.",
    ),
)

OPTIONS: Mapping[str, Option] = {option.name: option for option in _ALL}


def resolve(name: str, value: Any = None, environ: Mapping[str, str] | None = None) -> Any:
    """The value of an option: the argument, else the environment's, else the default.

    Args:
        name: An option of `OPTIONS`.
        value: The argument, None when the caller gave none.
        environ: The environment; `os.environ` when not given. An empty variable counts as not set.

    Raises:
        ValueError: The value is not acceptable; names the argument or variable and what it takes.
    """
    option = OPTIONS[name]
    if value is not None:
        return option.from_argument(value)
    text = (os.environ if environ is None else environ).get(option.env, "")
    return option.from_text(text) if text.strip() else option.default
