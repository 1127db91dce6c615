"""Attributes of single objects, replaced for the length of a run.

Lightning offers strategies no hook at some places where ranks have to meet, above all before the
callbacks look at the model. There, the method of this Trainer's own loop or connector is replaced,
on the instance, and given back at the end of the run. Classes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_NOTHING = object()


class Replacements:
    """What is replaced during one run."""

    def __init__(self) -> None:
        # With what the object itself had there before; methods are usually its class's.
        self._replaced: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Puts `value` in the place of an attribute of the owner or its class."""
        self._replaced.append((owner, name, vars(owner).get(name, _NOTHING)))
        vars(owner)[name] = value

    def around(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Has `replacement` called instead of a method; its first argument is the method."""
        original = getattr(owner, name)

        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self.put(owner, name, method)

    def before(self, owner: Any, name: str, *calls: Callable[[], Any]) -> None:
        """Has `calls` called before a method, in their order."""

        def replacement(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            for call in calls:
                call()
            return original(*args, **kwargs)

        self.around(owner, name, replacement)

    def detach(self) -> None:
        """Gives all objects their own attributes back. Idempotent."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            vars(owner).pop(name, None)
            if before is not _NOTHING:
                vars(owner)[name] = before


__all__ = ["Replacements"]
