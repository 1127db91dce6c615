"""How arguments that are no options are checked; `options` does it for those that are.

The messages are of one form, which names the argument and says what it accepts. Standard library
only.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["require", "require_kind", "require_positive"]

_LONGEST = 200  # characters of a value that a message shows


def require(fits: bool, name: str, value: Any, accepts: str) -> None:
    """Raises unless the argument `name` fits.

    Raises:
        TypeError: It does not; says what it accepts.
    """
    if not fits:
        shown = repr(value)
        if len(shown) > _LONGEST:
            shown = f"{shown[:_LONGEST]}..."
        raise TypeError(f"{name}={shown} is not accepted: it takes {accepts}.")


def require_kind(kind: type | tuple[type, ...], name: str, value: Any, accepts: str) -> None:
    """Raises unless the argument `name` is an instance of a class; a bool is no int here.

    Raises:
        TypeError: It is not; says what it accepts.
    """
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    require(fits, name, value, accepts)


def require_positive(name: str, value: Any) -> None:
    """Raises unless the argument `name` is a finite number above 0.

    Raises:
        TypeError: It is not.
    """
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(fits and math.isfinite(value) and value > 0, name, value, "a number above 0")
