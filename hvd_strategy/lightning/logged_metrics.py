"""What `self.log` logs, brought together over the ranks.

Lightning reduces each value by itself, without its name, in the order in which a rank logged them,
and whenever somebody looks at it. So ranks that log other names get the mean of two different
things, a progress bar that looks on rank 0 alone changes the order, and a value of few samples
counts as much as one of many. Here values travel with their names, in one exchange for all of them,
at places that all ranks pass:

* values of a training step: after the optimizer's step, before the hooks at the batch's end;
* values of an epoch: at its end, before the callbacks' hooks;
* what is logged elsewhere: in the call of `self.log`.

The mean is that over the samples of all ranks. Ranks that log other names, or reduce them in
another way, get a `MismatchError` on every rank. A metric that a callback or a scheduler monitors
is brought together also without `sync_dist=True`: with a value of its own, each rank would keep
other checkpoints and another learning rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from hvd_strategy._private_api import (
    add_logged,
    fields_of_logged,
    lightning_result_collections,
    logged_epoch_value,
    logged_step_value,
    set_logged_epoch_value,
)
from hvd_strategy.errors import MismatchError
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.logged_items import weighed_by_items
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.session import Session

_NAMES_IN_AN_ERROR = 10


@dataclass
class _Logged:
    """One value to be brought together: `total / weight` is this rank's mean."""

    operation: str
    total: float
    weight: float
    by_items: bool = False  # the weight is the number of items that the step will have reported


class LoggedMetrics:
    """Brings together what is logged during one run of a Trainer.

    Args:
        trainer: the Trainer, set up.
        session: the ranks, more than one.
        tree: the Lightning package of the Trainer.
        together: whether the ranks can still meet.
        items: the number of items that the running step has reported, where steps do.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        tree: ClassTree,
        together: Callable[[], bool],
        items: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._items = items
        self._session = session
        self._tree = tree
        self._together = together
        self._module = trainer.lightning_module
        self._some_absent = False  # in the last exchange
        self._monitored = _monitored_names(trainer)
        self._mentioned: set[str] = set()
        self._given_batch_size: int | None = None
        self._in_step = False
        # Values of the running training step, by their key; and whether to meet after each step.
        self._of_step: dict[str, tuple[Any, _Logged]] = {}
        self._meets_each_step: bool | None = None
        # Values of earlier batches of the accumulation window; and whether this rank skipped one.
        self._deferred: dict[str, tuple[Any, _Logged]] = {}
        self._skipped_meanwhile = False
        self._replacements = Replacements()
        for results in lightning_result_collections(trainer):
            # Lightning's own is hidden from torch.compile as well.
            log = torch.compiler.disable(partial(self._log_into(results), results.log))
            self._replacements.put(results, "log", log)
            self._replacements.around(results, "update_metrics", self._update_in(results))
            self._replacements.around(results, "metrics", self._read_of(results))

    def detach(self) -> None:
        """Gives the Trainer its own functions back. Idempotent."""
        self._replacements.detach()

    # ---- where ranks meet

    def begin_step(self) -> None:
        """What is logged from here to `end_step` is brought together there."""
        self._in_step = True
        self._of_step = {}

    @property
    def has_logged(self) -> bool:
        """Whether something was logged that will be brought together at an `end_step`."""
        return bool(self._of_step or self._deferred)

    def end_step(
        self,
        skipped: bool = False,
        any_logged: bool | None = None,
        results: Any = None,
        some_absent: bool = False,
        votes_follow: bool = False,
    ) -> None:
        """Brings together what the optimization of one training batch logged. Collective.

        Args:
            skipped: whether this rank took no part in the step; then it need not have logged what
                the others did.
            any_logged: whether any rank has logged something, as far as the ranks know it from each
                other. None where they know nothing: they meet after the first step, and once one
                has logged something, after all that follow.
            results: where ranks that were absent from the step find what they know of its values.
            some_absent: whether there are any, because they have run out of batches.
            votes_follow: whether `any_logged` will be known later, if it is not now. Then a rank
                that has logged does not assume that the others have: it waits until they know.
        """
        self._in_step = False
        logged, self._of_step = {**self._deferred, **self._of_step}, {}
        skipped = skipped or self._skipped_meanwhile
        known = any_logged is not None
        if not known and votes_follow and self._meets_each_step is False:
            self._deferred, self._skipped_meanwhile = self._weighed(logged), skipped
            return
        self._deferred, self._skipped_meanwhile = {}, False
        if any_logged:
            self._meets_each_step = True
        if logged or (any_logged if known else self._meets_each_step is not False):
            anything = self._exchange_step(logged, skipped, results if some_absent else None)
            if not known:
                self._meets_each_step = bool(self._meets_each_step) or anything

    def end_epoch(self, results: Any, took_part: bool = True) -> None:
        """Brings together the values of an epoch, before anybody looks at them. Collective.

        Args:
            results: where they are.
            took_part: whether this rank did in any batch of the epoch; else it need not have logged
                what the others did.
        """
        if not self._together():
            return
        when = "at the end of an epoch"
        if self._exchange_epoch(results, when, absent=not took_part):
            # Again, with entries of all ranks.
            self._give_entries(results, took_part)
            self._exchange_epoch(results, when)

    # ---- what Lightning calls

    def _log_into(self, results: Any) -> Callable[..., None]:
        def log(
            original: Callable[..., None], fx: str, name: str, value: Any, **options: Any
        ) -> None:
            part = options.get("sync_dist_group")
            if (
                isinstance(value, Tensor)
                and not options.get("rank_zero_only")
                and part in (None, distributed.group.WORLD)
            ):
                if not options.get("sync_dist") and self._is_monitored(results, name, options):
                    options["sync_dist"] = True
                    self._mention(name)
                if options.get("sync_dist"):
                    # One function for all, because Lightning compares it with an earlier call's.
                    options["sync_dist_fn"] = _left_to_us
            self._given_batch_size = options.get("batch_size")
            original(fx, name, value, **options)

        return log

    def _update_in(self, results: Any) -> Callable[..., None]:
        def update(original: Callable[..., None], key: str, value: Any, batch_size: int) -> None:
            original(key, value, batch_size)
            entry = results[key]
            if not self._together() or not _needs_ranks(entry):
                return
            if entry.is_tensor and entry.meta.on_step:
                logged = self._step_value(results, entry, batch_size)
                if self._in_step:
                    self._of_step[key] = (entry, logged)
                else:
                    self._exchange_step({key: (entry, logged)})
            if entry.meta.on_epoch and _once_per_epoch(entry.meta.fx):
                self._exchange_epoch(results, "by self.log", {key: entry})

        return update

    def _read_of(self, results: Any) -> Callable[..., Any]:
        def read(original: Callable[..., Any], on_step: bool) -> Any:
            # Nothing is left to do here, except where a value came about in some other way.
            if not on_step and self._together() and _not_computed(results):
                self._exchange_epoch(results, "when metrics were read")
            return original(on_step)

        return read

    # ---- exchanges

    def _step_value(self, results: Any, entry: Any, batch_size: int) -> _Logged:
        logged = logged_step_value(entry)
        assert logged is not None  # just now
        value, weight = logged.item(), 1.0
        if entry.meta.is_mean_reduction:
            weight = float(self._samples(results, batch_size))
        operation = entry.meta.sync.op
        total = value * weight if operation == "mean" else value
        by_items = operation == "mean" and weighed_by_items(entry, self._given_batch_size)
        return _Logged(operation, total, weight, by_items)

    def _samples(self, results: Any, batch_size: int) -> int:
        """Number of samples behind a value; Lightning looks for it only at the epoch's metrics."""
        if self._given_batch_size is None and results.batch_size is None:
            if results.batch is None:
                return batch_size
            count = self._tree.pytorch_name("utilities.data", "extract_batch_size")
            refused = self._tree.pytorch_name("utilities.exceptions", "MisconfigurationException")
            try:
                results.batch_size = count(results.batch)
            except (refused, RecursionError):
                results.batch_size = 1  # a batch of another kind, to be counted by the user
        given = self._given_batch_size
        found: int = results.batch_size if given is None else given
        return found

    def _exchange_step(
        self,
        logged: dict[str, tuple[Any, _Logged]],
        skipped: bool = False,
        of_absent: dict[str, Any] | None = None,
    ) -> bool:
        """Returns whether any rank logged anything.

        Args:
            logged: entries and values, by their key.
            skipped: whether this rank may have logged something else than the others.
            of_absent: entries that it has from earlier steps, where ranks are absent: all of them
                get the values, rank 0 as well, which writes them.
        """
        entries = {key: value for key, (_, value) in self._weighed(logged).items()}
        told, combined = self._exchange("in a batch", entries, skipped, of_absent is not None)
        for key, value in combined.items():
            entry = logged[key][0] if key in logged else (of_absent or {}).get(key)
            cached = None if entry is None else logged_step_value(entry)
            if cached is not None:
                # In place: where only the step counts, it is the same tensor as the entry's value.
                cached.detach().copy_(value)
        return told

    def _weighed(self, logged: dict[str, tuple[Any, _Logged]]) -> dict[str, tuple[Any, _Logged]]:
        """The values by the number of items that the step has reported, where they count so."""
        items = self._items()
        if items is None:
            return logged
        return {
            key: (entry, _of_items(entry, found.operation, items) if found.by_items else found)
            for key, (entry, found) in logged.items()
        }

    def _exchange_epoch(
        self,
        results: Any,
        when: str,
        entries: dict[str, Any] | None = None,
        absent: bool = False,
    ) -> bool:
        """Returns whether some ranks, but not all, were absent; then nothing has been computed."""
        if entries is None:
            entries = _not_computed(results)
        values = {key: _epoch_value(entry) for key, entry in entries.items()}
        _, combined = self._exchange(when, values, absent)
        if self._some_absent:
            return True
        # Sorted: each torchmetrics metric synchronises itself, and ranks may have another order.
        for key, entry in sorted(entries.items()):
            if not entry.is_tensor:
                entry.compute()
                continue
            value = combined[key].to(entry.value.device, entry.value.dtype)
            set_logged_epoch_value(entry, value)
        return False

    def _give_entries(self, results: Any, took_part: bool) -> None:
        """Lets a rank that took part in no batch know of what the others have logged."""
        own = {key: fields_of_logged(entry) for key, entry in _not_computed(results).items()}
        told = self._session.exchange("logged entries", [own if took_part else None])
        if not took_part:
            others = next(entries for (entries,) in told if entries is not None)
            for key, fields in others.items():
                if key not in own:
                    add_logged(results, self._module, key, fields, _left_to_us)

    def _exchange(
        self,
        when: str,
        logged: dict[str, _Logged],
        skipped: bool = False,
        for_all: bool = False,
    ) -> tuple[bool, dict[str, Tensor]]:
        """Returns whether any rank has values, and the values of all ranks together, by key.

        Args:
            when: where in the run this is.
            logged: this rank's values.
            skipped: whether they may be others than those of the other ranks.
            for_all: whether such a rank gets the values of the others; the same on all ranks.
        """
        keys = sorted(logged)
        names = [f"{key} ({logged[key].operation})" for key in keys]
        digest = hashlib.sha256("\n".join([when, *names]).encode()).hexdigest()[:16]
        values = [[logged[key].total, logged[key].weight] for key in keys]
        named = [[key, logged[key].operation] for key in keys] if for_all else []
        told = self._session.exchange("self.log", [digest, skipped, values, named])
        expected = {other for other, absent, _, _ in told if not absent} or {told[0][0]}
        if len(expected) > 1:
            everybody = self._session.allgather_object((when, names))
            raise MismatchError(_difference(everybody))
        self._some_absent = len({absent for _, absent, _, _ in told}) > 1
        anything = any(numbers for _, _, numbers, _ in told)
        operations = [(key, logged[key].operation) for key in keys]
        if digest not in expected:
            # This rank took no part: its values are its own, unless the others give it theirs.
            operations = next(names for other, _, _, names in told if other in expected)
        counted = [numbers for other, _, numbers, _ in told if other in expected]
        return anything, {
            key: _combine(operation, [numbers[place] for numbers in counted])
            for place, (key, operation) in enumerate(operations)
        }

    # ---- monitored metrics

    def _is_monitored(self, results: Any, name: str, options: dict[str, Any]) -> bool:
        if not self._monitored:
            return False
        suffix = ""
        if options.get("add_dataloader_idx", True) and results.dataloader_idx is not None:
            suffix = results.DATALOADER_SUFFIX.format(results.dataloader_idx)
        forms = (name, f"{name}_step", f"{name}_epoch")
        return any(f"{form}{suffix}" in self._monitored for form in forms)

    def _mention(self, name: str) -> None:
        if name in self._mentioned:
            return
        self._mentioned.add(name)
        self._tree.pytorch_name("utilities.rank_zero", "rank_zero_info")(
            f"{name!r} is monitored by a callback or a learning rate scheduler, so it is brought "
            "together over the ranks. Say so by self.log(..., sync_dist=True)."
        )


def _left_to_us(value: Any, *_: Any, **__: Any) -> Any:
    """Stands where Lightning reduces a value over the ranks."""
    return value


def _needs_ranks(entry: Any) -> bool:
    """Whether other ranks have a say in what the entry's value is."""
    if entry.is_tensor:
        sync = entry.meta.sync
        return bool(sync.should and sync.fn is _left_to_us)
    # Its metric synchronises itself, each time it is computed.
    return bool(entry.value.sync_on_compute)


def _not_computed(results: Any) -> dict[str, Any]:
    return {
        key: entry
        for key, entry in results.items()
        if entry.meta.on_epoch
        and not entry.has_reset
        and logged_epoch_value(entry) is None
        and _needs_ranks(entry)
    }


def _epoch_value(entry: Any) -> _Logged:
    if not entry.is_tensor:
        return _Logged(type(entry.value).__name__, 0.0, 0.0)
    weight = float(entry.cumulated_batch_size) if entry.meta.is_mean_reduction else 1.0
    return _Logged(entry.meta.sync.op, entry.value.item(), weight)


def _of_items(entry: Any, operation: str, items: float) -> _Logged:
    logged = logged_step_value(entry)
    assert logged is not None
    # Not multiplied by 0: the mean of no items may be nan.
    return _Logged(operation, logged.item() * items if items else 0.0, items)


def _once_per_epoch(fx: str) -> bool:
    """Whether the hook is called outside of batches (`on_validation_epoch_end`, say)."""
    words = fx.partition(".")[0].split("_")  # behind the dot is the number of the data loader
    return words[0] == "on" and words[-1] in ("start", "end") and "batch" not in words


def _combine(operation: str, numbers: list[list[float]]) -> Tensor:
    totals, weights = torch.tensor(numbers, dtype=torch.float64).unbind(1)
    if operation == "mean":
        # A rank without samples has no mean, whatever it logged.
        return totals[weights > 0].sum() / weights.sum()
    if operation == "min":
        return totals.min()
    if operation == "max":
        return totals.max()
    return totals.sum()


def _difference(everybody: list[tuple[str, list[str]]]) -> str:
    """In words, what some ranks logged and others did not."""
    if len({when for when, _ in everybody}) > 1:
        told = [f"rank {rank}: {when}" for rank, (when, _) in enumerate(everybody)]
        different = [f"they are at different places ({', '.join(told)})"]
    else:
        different = []
    for name in sorted({name for _, names in everybody for name in names}):
        having = [rank for rank, (_, names) in enumerate(everybody) if name in names]
        if len(having) < len(everybody):
            ranks = ", ".join(map(str, having))
            different.append(f"only rank{'s' * (len(having) > 1)} {ranks} logged {name}")
    if len(different) > _NAMES_IN_AN_ERROR:
        more = len(different) - _NAMES_IN_AN_ERROR
        different = [*different[:_NAMES_IN_AN_ERROR], f"and {more} more differences"]
    return (
        f"The ranks logged different metrics {everybody[0][0]}: {'; '.join(different)}. Each rank "
        "has to log the same names, with the same reduce_fx, whenever they are to be brought "
        "together (sync_dist=True, a torchmetrics metric, or one that is monitored)."
    )


def _monitored_names(trainer: Any) -> frozenset[str]:
    monitors = [getattr(callback, "monitor", None) for callback in trainer.callbacks]
    monitors += [config.monitor for config in trainer.lr_scheduler_configs]
    return frozenset(name for name in monitors if isinstance(name, str))


__all__ = ["LoggedMetrics"]
