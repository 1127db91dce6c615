"""How arguments that are no options are checked; `options` does it for those that are.

The messages are of one form, which names the argument and says what it accepts. Standard library
only.
"""

from __future__ import annotations

from typing import Any

__all__ = ["require", "require_kind"]

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
