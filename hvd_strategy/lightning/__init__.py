"""The Lightning Trainer's strategy.

`Trainer(strategy="hvd")` comes here by the names that `hvd_strategy` registers;
`Trainer(strategy=HvdStrategy(...))` takes the class from here. The class for the other package of
the same code, `pytorch_lightning`, is `hvd_strategy.lightning.pytorch_lightning.HvdStrategy`.

Nothing of Lightning is imported before one of the names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_strategy.lightning.monitor import Monitor as HvdMonitor
    from hvd_strategy.lightning.scheduled_precision import PrecisionSchedule as ScheduledPrecision
    from hvd_strategy.lightning.strategy import DataParallelStrategy
    from hvd_strategy.lightning.strategy import DataParallelStrategy as HvdStrategy

__all__ = ["HvdMonitor", "HvdStrategy", "ScheduledPrecision", "strategy_class"]

_LAUNCHERS = ("ScriptLauncher", "MultiProcessingLauncher", "NotebookLauncher")


def strategy_class(tree: str) -> type[DataParallelStrategy]:
    """Returns `HvdStrategy` for one of the two Lightning packages.

    Args:
        tree: "lightning.pytorch" or "pytorch_lightning", whichever the Trainer is from.

    Raises:
        ValueError: there is no such package.
        ImportError: it is not installed.
    """
    from hvd_strategy.lightning.build import build_strategy

    return build_strategy(tree)


def built_class(tree: str, name: str) -> Any:
    """Returns a class that is built once per package: where users and pickle find it by name.

    Raises:
        AttributeError: there is no such class.
    """
    if name == "HvdStrategy":
        return strategy_class(tree)
    if name == "HvdMonitor":
        from hvd_strategy.lightning.monitor import monitor_class

        return monitor_class(tree)
    if name == "ScheduledPrecision":
        from hvd_strategy.lightning.scheduled_precision import scheduled_precision_class

        return scheduled_precision_class(tree)
    if name == "SyncBatchNormPlugin":
        from hvd_strategy.lightning.layer_sync import plugin_class

        return plugin_class(tree)
    if name == "LauncherEnvironment":
        from hvd_strategy.lightning.environment import environment_class

        return environment_class(tree)
    if name in _LAUNCHERS:
        from hvd_strategy.lightning.launch import launcher_class

        return launcher_class(tree, name)
    if name == "AtomicCheckpointIO":
        from hvd_strategy.lightning.checkpoint import checkpoint_io_class

        return checkpoint_io_class(tree)
    raise AttributeError(f"module 'hvd_strategy.lightning' has no class {name!r}")


def __getattr__(name: str) -> Any:
    return built_class("lightning.pytorch", name)
