"""Lets a rank import torch and Lightning without interruption by the garbage collector.

All ranks wait for the one that comes last, and what keeps a rank that a launcher of ours has
started is the import of torch and Lightning. A quarter of that time goes to Python's garbage
collector, which looks at all objects again and again while thousands of modules are created, and
finds nothing (measured: 2.5 s, and 1.9 s without it). So it has to wait until Lightning is there.
What is in memory then counts as old: the next collection of everything looks at it.

`_register` knows when that is. This module uses the standard library alone, and next to nothing of
it, as `_register` does.
"""

from __future__ import annotations

import gc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# The collector looks nevertheless when there are so many objects more: about three times as many as
# torch and Lightning make. So no script that does other things first runs out of memory.
_MANY_OBJECTS = 1_000_000


def put_off_collections() -> Callable[[], None]:
    """Lets the garbage collector wait; returns what ends that, which may be called again."""
    before = gc.get_threshold()
    if before[0] == 0:
        return lambda: None  # off already
    ours = (_MANY_OBJECTS, *before[1:])
    gc.set_threshold(*ours)

    def end() -> None:
        if gc.get_threshold() != ours:
            return  # somebody has decided otherwise
        if gc.get_freeze_count() == 0:
            # Moves all objects to the oldest generation without looking at them.
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)

    return end


__all__ = ["put_off_collections"]
