"""A pytest plugin: Lightning's tests get our strategy where they ask for DDP.

`run_lightning_tests.py` loads it (`-p hvd_for_ddp`) before any test module is imported. What
changes is what a test can ask for: modules of the tests that import `DDPStrategy` from
`lightning.pytorch.strategies` are given ours, and so is whoever asks the registry for "ddp",
"ddp_spawn" and so on. Lightning's own code keeps its class. Without `REPLACE_DDP=1` nothing
changes, and the plugin only writes down the results: to the file `ACCEPTANCE_RESULTS`, one JSON
object a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

TESTS = "tests_pytorch"  # the package of Lightning's tests


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("REPLACE_DDP") != "1":
        return
    # Before pytest's own finder, which rewrites the asserts of test modules.
    replace_in_tests()
    from lightning.pytorch import strategies

    from hvd_strategy.lightning import HvdStrategy

    registry: Any = strategies.StrategyRegistry
    for name in [name for name in registry if name.startswith("ddp")]:
        entry = registry[name]
        if entry["strategy"] is strategies.DDPStrategy:
            registry.register(
                name,
                HvdStrategy,
                description=entry["description"],
                override=True,
                **entry["init_params"],
            )


# ---- the class that tests import -----------------------------------------------------------------


def replace_in_tests() -> None:
    """Makes modules of the tests import our class, from now on and in this process."""
    if os.environ.get("REPLACE_DDP") == "1":
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Finder)]
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds a module of the tests as the other finders do, and has it executed by `_Loader`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != TESTS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        with _replaced():
            self._loader.exec_module(module)


@contextmanager
def _replaced() -> Iterator[None]:
    from lightning.pytorch import strategies

    from hvd_strategy.lightning import HvdStrategy

    theirs = strategies.DDPStrategy
    # Only while a test module runs its imports: our own class asks for theirs by this name.
    vars(strategies)["DDPStrategy"] = HvdStrategy
    try:
        yield
    finally:
        vars(strategies)["DDPStrategy"] = theirs


# ---- the results ---------------------------------------------------------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test has three reports; "passed" counts only for the test itself.
    if report.outcome != "passed" or report.when == "call":
        _write(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report)


def _write(report: pytest.TestReport | pytest.CollectReport) -> None:
    line = {
        # A class among the parameters of a test is a part of its name.
        "test": report.nodeid.replace("HvdStrategy", "DDPStrategy"),
        "outcome": report.outcome,
        "message": _message(report.longrepr),
    }
    with Path(os.environ["ACCEPTANCE_RESULTS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _message(longrepr: Any) -> str:
    """One line: of an exception the first, which names it; else the last."""
    crash = getattr(longrepr, "reprcrash", None)
    lines = str(longrepr or "" if crash is None else crash.message).strip().splitlines()
    # An exception from another process comes with its traceback.
    if crash is None or "ProcessRaisedException" in crash.message:
        return lines[-1] if lines else ""
    return lines[0] if lines else ""
