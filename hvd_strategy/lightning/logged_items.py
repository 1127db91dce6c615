"""What a step logs, as means over items: Lightning weights it by the size of the batch.

Both the mean over an epoch's batches and the one over the ranks are meant. A step may tell its
number of items after it has logged, so the entry is corrected when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvd_strategy._private_api import lightning_result_collections
from hvd_strategy.lightning.replacements import Replacements

_STEPS = ("training_step", "validation_step", "test_step")


class LoggedItems:
    """Weights what steps log without a `batch_size` of the user's.

    Args:
        trainer: the Trainer, set up.
        items: returns the number of items of the running step; None while it is not known.
    """

    def __init__(self, trainer: Any, items: Callable[[], float | None]) -> None:
        self._items = items
        self._given_batch_size: Any = None
        # By the entry's id: the entry, its total and weight before the step, and the step's values.
        self._pending: dict[int, tuple[Any, Tensor, Tensor, list[Tensor]]] = {}
        self._replacements = Replacements()
        for results in lightning_result_collections(trainer):
            log = torch.compiler.disable(partial(self._log, results.log))
            self._replacements.put(results, "log", log)
            update = partial(self._update, results)
            self._replacements.around(results, "update_metrics", update)

    def detach(self) -> None:
        """Gives the results their own functions back. Idempotent."""
        self._replacements.detach()

    def begin(self) -> None:
        """To be called before a step."""
        self._pending.clear()

    def settle(self) -> None:
        """To be called after a step: what it logged gets the weight that it reported, if it did."""
        items = self._items()
        if items is not None:
            for entry, total, weight, values in self._pending.values():
                if items:
                    for value in values:
                        total, weight = total + value * items, weight + items
                # Without items nothing is added: the mean of none may well be nan.
                entry.value, entry.cumulated_batch_size = total, weight
        self._pending.clear()

    def _log(self, original: Callable[..., None], *args: Any, **options: Any) -> None:
        self._given_batch_size = options.get("batch_size")
        original(*args, **options)

    def _update(
        self, results: Any, original: Callable[..., None], key: str, value: Any, batch_size: int
    ) -> None:
        entry = results[key]
        if not (entry.meta.on_epoch and weighed_by_items(entry, self._given_batch_size)):
            original(key, value, batch_size)
            return
        total, weight = entry.value, entry.cumulated_batch_size
        original(key, value, batch_size)
        *_, values = self._pending.setdefault(id(entry), (entry, total, weight, []))
        values.append(value.detach().to(entry.value.dtype))


def weighed_by_items(entry: Any, given_batch_size: Any) -> bool:
    """Whether an entry of a result collection is a mean that a step logs, without a batch size."""
    return bool(
        given_batch_size is None
        and entry.is_tensor
        and entry.meta.is_mean_reduction
        and entry.meta.fx.partition(".")[0] in _STEPS
    )


__all__ = ["LoggedItems", "weighed_by_items"]
