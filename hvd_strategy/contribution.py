"""What this rank's gradients count in the reduction: their weight, and the scale of the loss.

The reduction is `sum over the ranks of pre * gradient / sum of the weights`, with factors made for
ranks whose loss has another scale (design: one weighted reduction). Weight, scale and whether the
scale is undone on the way are set before a backward, and are values, not code paths.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_strategy.grad_scaler import GradScaler

__all__ = ["Contribution", "require_items"]


def require_items(name: str, items: Any) -> None:
    """Raises ValueError unless `items` is a number of items: 0 or more, whole or not."""
    fits = isinstance(items, (int, float)) and not isinstance(items, bool)
    if not fits or not math.isfinite(items) or items < 0:
        raise ValueError(f"{name}={items!r} is not accepted: it takes a number of items.")


class Contribution:
    """Weight and scale of one reducer's gradients, on this rank.

    Args:
        by_items: The mean is over items (samples, tokens), of which each rank tells its number.

    Attributes:
        by_items: As given.
        items: Items behind the gradients of this rank that are not reduced yet.
        in_weighted_backward: The number of items of the running backward has been told.
        stays_local: With `by_items`: gradients are not to be reduced at the end of a backward.
        unscaled_early: The last reduction has undone the scale of the loss.
    """

    def __init__(self, by_items: bool) -> None:
        self.by_items = by_items
        self.items = 0.0
        self.in_weighted_backward = False
        self.stays_local = False
        self.unscaled_early = False
        self._unit = self._next_unit = 1.0
        self._scaler: Callable[[], GradScaler | None] = lambda: None
        self._scale = 0.0  # of the losses since the last reduction; 0: there was none
        self._weight: float | None = None
        self._factor: float | None = None
        self._write_notes: Callable[[], tuple[int, int]] | None = None
        self._told = (1.0, 0.0, False)  # what the core knows: factor, scale, whether to undo it

    def attach_scaler(self, scaler: GradScaler | None) -> None:
        """Has the reduction work together with a scaler, which is not kept alive."""
        self._scaler = (lambda: None) if scaler is None else weakref.ref(scaler)

    def set_scale(self, scale: float) -> None:
        """Tells by what the next loss is multiplied."""
        self._scale = scale

    def set_weight(self, weight: float | None, factor: float | None = None) -> None:
        """Sets the weight of this rank in the mean, until the next reduction; None for 1.

        Args:
            weight: What is added to the sum of the weights, by which all gradients are divided.
            factor: What this rank's gradients are multiplied by, where it is another number.
        """
        self._weight = weight
        self._factor = factor

    def attach_notes(self, write: Callable[[], tuple[int, int]] | None) -> None:
        """Has two numbers travel with each exchange, which `write` is asked for just before it."""
        self._write_notes = write

    def write_notes(self, core: Any) -> None:
        """Gives the core the notes that travel with the next exchange."""
        if self._write_notes is not None:
            core.set_notes(*self._write_notes())

    def add_items(self, items: float) -> float:
        """Counts items whose gradients are about to come.

        Returns:
            What the mean loss over them has to be multiplied by: their number in terms of a unit,
            by which the reduction multiplies again. The unit is a power of two near a rank's share
            of the last reduction. So gradients are about as large as without weights, and what
            fits 16 bits without, does with them; and it is the same on all ranks, whose losses
            collectives inside of backward (SyncBatchNorm's) bring together.

        Raises:
            ValueError: Not a number of items.
        """
        require_items("items", items)
        if not items:
            return 0.0
        if not self.items:
            self._unit = self._next_unit
        self.items += items
        return items / self._unit

    def expect_items(self, items: float) -> None:
        """Tells about how many items a rank will have in the next reduction; see `add_items`."""
        self._next_unit = math.ldexp(1.0, math.frexp(items)[1])

    def announce(self, core: Any, in_backward: bool) -> None:
        """Tells the core, before this rank's first gradient of a round, or at a gate."""
        if self.by_items:
            weight = self.items
            pre = self._unit if weight > 0 else 0.0
        else:
            weight = 1.0 if self._weight is None else self._weight
            pre = weight if self._factor is None else self._factor
        scaler = self._scaler()
        # Without a loss of its own a rank has no scale, but undoes the others' as they do.
        scale = self._scale or (1.0 if in_backward else 0.0)
        self._told = (pre, scale, scaler is not None and scaler.undoes_early())
        core.set_contribution(pre, weight, scale, self._told[2])

    def reduced(self, core: Any, ranks: int) -> float:
        """Takes up the outcome of a reduction.

        Returns:
            What this rank's gradient of a parameter that the core did not reduce has to be
            multiplied by before the plain mean over the ranks is taken.
        """
        pre, scale, undone = self._told
        self.unscaled_early = undone
        agreed: float = core.agreed_scale
        scaler = self._scaler()
        if core.scales_differ and scaler is not None:
            scaler.adopt_scale(agreed)
        total: float = core.total_weight
        if not total:
            return 0.0
        if self.by_items:
            self.expect_items(total / ranks)
        return pre * ranks / total * (1.0 if undone else agreed) / (scale or agreed)

    def clear(self) -> None:
        """Forgets what was told for this round."""
        self.items = 0.0
        self._weight = self._factor = None
        self._scale = 0.0
