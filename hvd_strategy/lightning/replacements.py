"""Attributes of single objects, replaced for the length of a run.

Lightning offers strategies no hook at some places where ranks have to meet, above all before the
callbacks look at the model. There, the method of this Trainer's own loop or connector is replaced,
on the instance, and given back at the end of the run. Classes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class Replacements:
    """What is replaced during one run; each attribute of an object that has none of its own yet."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Puts `value` in the place of an attribute of the owner's class."""
        if name in vars(owner):
            raise ValueError(f"{name!r} of this {type(owner).__name__} is replaced already.")
        vars(owner)[name] = value
        self._replaced.append((owner, name))

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
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()


__all__ = ["Replacements"]
