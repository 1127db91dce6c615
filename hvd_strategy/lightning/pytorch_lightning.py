"""The strategy for Trainers of the package `pytorch_lightning`; see `hvd_strategy.lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_strategy.lightning import built_class

if TYPE_CHECKING:
    from hvd_strategy.lightning.monitor import Monitor as HvdMonitor
    from hvd_strategy.lightning.scheduled_precision import PrecisionSchedule as ScheduledPrecision
    from hvd_strategy.lightning.strategy import DataParallelStrategy as HvdStrategy

__all__ = ["HvdMonitor", "HvdStrategy", "ScheduledPrecision"]


def __getattr__(name: str) -> Any:
    return built_class("pytorch_lightning", name)
