"""What a GradientReducer lets others see of its work: counters, buckets, norms, events."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hvd_strategy.arguments import require_kind
from hvd_strategy.parameter_table import ParameterTable


class ObservedReducer:
    """The part of GradientReducer that looks and changes nothing."""

    _core: Any
    _table: ParameterTable
    _flushes: int

    def statistics(self) -> dict[str, float]:
        """Counters since the reducer was created.

        Returns:
            backwards: Reduced backwards.
            communication_seconds: Time during which a reduction was under way.
            exposed_seconds: Time the training thread waited for it at the end of backward.
            hidden_share: 1 - exposed / communication; 0 when there was none.
        """
        if self._core is None:
            return {
                "backwards": 0,
                "communication_seconds": 0.0,
                "exposed_seconds": 0.0,
                "hidden_share": 0.0,
            }
        counters: dict[str, float] = self._core.statistics()
        busy = counters["communication_seconds"]
        hidden = 1.0 - counters["exposed_seconds"] / busy if busy > 0 else 0.0
        return {**counters, "hidden_share": max(0.0, hidden)}

    @property
    def reductions(self) -> int:
        """How many times this rank has taken part in a reduction; grows with each."""
        return self._flushes

    def buckets(self) -> list[list[int]]:
        """Parameter numbers (in order of their names) of each bucket formed so far."""
        return [] if self._core is None else [bucket for bucket in self._core.buckets() if bucket]

    def by_products(self, parameter: Tensor) -> tuple[float, bool] | None:
        """Sum of squares and finite flag of the parameter's last reduced gradient.

        None when it was not reduced in the last backward, or without `gradient_norms=True`.
        """
        require_kind(Tensor, "parameter", parameter, "a parameter of the reducer")
        index = None if self._core is None else self._table.index_of(parameter)
        if index is None:
            return None
        found: tuple[float, bool] | None = self._core.by_products(index)
        return found

    def record_events(self, capacity: int = 100_000) -> None:
        """Keeps the last `capacity` events (fired, posted, started, done) for `events`."""
        require_kind(int, "capacity", capacity, "a number of events")
        if capacity < 0:
            raise ValueError(f"capacity={capacity} is not accepted: it takes a number of events.")
        if self._core is not None:
            self._core.record_events(capacity)

    def events(self) -> list[tuple[str, int, int, float]]:
        """Recorded events as (kind, parameter or bucket, backward, seconds), oldest first."""
        return [] if self._core is None else self._core.events()
