"""Synchronous data-parallel training for PyTorch and Lightning, over an engine of its own.

The names below are loaded when they are first used, so that `import hvd_strategy` costs nothing and
needs only the standard library: it happens at every `import torch`, through the entry point in
`pyproject.toml`, also in programs that never use this package. All it does is arrange that the
strategy names "hvd", "hvd_spawn", "hvd_fork", "hvd_notebook" and "horovod" are known to Lightning
once that is imported.
"""

from __future__ import annotations

from hvd_strategy import _register

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hvd_strategy import checkpoint
    from hvd_strategy.consistency import check_consistency, named_state
    from hvd_strategy.engine import GradientReducer
    from hvd_strategy.errors import (
        CheckpointNotFoundError,
        DivergenceError,
        HvdError,
        HvdTimeoutError,
        MismatchError,
        RankFailedError,
        StallError,
    )
    from hvd_strategy.grad_scaler import GradScaler
    from hvd_strategy.lightning import HvdMonitor, HvdStrategy, ScheduledPrecision
    from hvd_strategy.session import Session, current_session, open_session
    from hvd_strategy.sync_batchnorm import SyncBatchNorm

    __version__: str

__all__ = [
    "CheckpointNotFoundError",
    "DivergenceError",
    "GradScaler",
    "GradientReducer",
    "HvdError",
    "HvdMonitor",
    "HvdStrategy",
    "HvdTimeoutError",
    "MismatchError",
    "RankFailedError",
    "ScheduledPrecision",
    "Session",
    "StallError",
    "SyncBatchNorm",
    "__version__",
    "check_consistency",
    "checkpoint",
    "current_session",
    "named_state",
    "open_session",
]

_MODULE_OF = {
    "CheckpointNotFoundError": "errors",
    "DivergenceError": "errors",
    "GradScaler": "grad_scaler",
    "GradientReducer": "engine",
    "HvdError": "errors",
    "HvdMonitor": "lightning",
    "HvdStrategy": "lightning",
    "HvdTimeoutError": "errors",
    "MismatchError": "errors",
    "RankFailedError": "errors",
    "ScheduledPrecision": "lightning",
    "Session": "session",
    "StallError": "errors",
    "SyncBatchNorm": "sync_batchnorm",
    "check_consistency": "consistency",
    "current_session": "session",
    "named_state": "consistency",
    "open_session": "session",
}


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("hvd-strategy")
    elif name == "checkpoint":
        from importlib import import_module

        value = import_module("hvd_strategy.checkpoint")
    elif name in _MODULE_OF:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register.install()
