"""Makes the strategy names of this package known to Lightning, without loading either.

`install()` runs when `hvd_strategy` is imported, and `import torch` imports that through the entry
point `autoload` (group "torch.backends"). It puts a finder on `sys.meta_path` that waits for the
modules holding Lightning's strategy registries; when one of them has been executed, the names are
entered with a factory that imports `hvd_strategy.lightning` only when a Trainer asks for it.

Because this code runs in every program that imports torch, it uses the standard library alone,
imports next to nothing of it (not even `typing`), and never raises: whatever goes wrong here must
not break an import of somebody who may not even use this package. `HVD_STRATEGY_AUTOREGISTER=0`
turns it off.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Module that holds a registry -> (name of the registry in it, root of its class tree).
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning.pytorch"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning"),
}

# Strategy name -> (start method, description as shown by Lightning).
_STRATEGIES = {
    "hvd": (None, "Data-parallel training with hvd-strategy; starts the other ranks by itself"),
    "hvd_spawn": ("spawn", "The same, ranks started by multiprocessing's spawn"),
    "hvd_fork": ("fork", "The same, ranks forked from this process"),
    "hvd_notebook": ("interactive", "The same, ranks in fresh interpreters, also from a notebook"),
}

# Lightning's own strategy of this name is gone since 2.0, and the package that continued it cannot
# be imported. Only entered where no other package has it.
_ALIAS = "horovod"
_ALIAS_DESCRIPTION = "The same as hvd; does not multiply the learning rate by the number of ranks"

# Our launchers set it for the ranks that they start. Gone once it has been read, so that processes
# which a rank starts do not take themselves for one.
STARTED_RANK = "HVD_STRATEGY_STARTED_RANK"
_end_of_imports: Callable[[], None] | None = None


def autoload() -> None:
    """Entry point of group "torch.backends", called at the end of `import torch`."""
    install()


def install() -> None:
    """Registers now where Lightning is already imported, and otherwise when it will be.

    May be called any number of times. Never raises.
    """
    try:
        started = os.environ.pop(STARTED_RANK, None) is not None
        if os.environ.get("HVD_STRATEGY_AUTOREGISTER", "1") == "0":
            return
        # Compared by name: a package that is imported anew brings a new class of the same name.
        finder_name = (_Finder.__module__, _Finder.__name__)
        known = [(type(finder).__module__, type(finder).__name__) for finder in sys.meta_path]
        if finder_name not in known:
            sys.meta_path.insert(0, _Finder())
        for module_name, (registry_name, _) in _REGISTRIES.items():
            module = sys.modules.get(module_name)
            if hasattr(module, registry_name):
                _register(module)
        if started and not any(name in sys.modules for name in _REGISTRIES):
            from hvd_strategy._rank_imports import put_off_collections

            global _end_of_imports
            _end_of_imports = put_off_collections()
    except Exception as error:
        _warn(error)


def _register(module: Any) -> None:
    """Enters the strategy names into the registry that the freshly imported `module` holds."""
    registry_name, tree = _REGISTRIES[module.__name__]
    registry = getattr(module, registry_name)
    for name, (start_method, description) in _STRATEGIES.items():
        registry.register(
            name,
            _Factory(tree),
            description=description,
            override=True,
            start_method=start_method,
        )
    other = registry[_ALIAS]["strategy"] if _ALIAS in registry else None
    # Compared by name: a package that is imported anew brings a new class of the same name.
    ours = (type(other).__module__, type(other).__name__) == (_Factory.__module__, "_Factory")
    if other is None or ours:
        registry.register(
            _ALIAS,
            _Factory(tree, replaces_horovod=True),
            description=_ALIAS_DESCRIPTION,
            override=True,
            start_method=None,
        )


class _Factory:
    """What a registry calls to make a strategy; stands for a class that is not loaded yet."""

    def __init__(self, tree: str, replaces_horovod: bool = False) -> None:
        self._tree = tree
        self._replaces_horovod = replaces_horovod

    def __call__(self, **init_params: Any) -> Any:
        from hvd_strategy.lightning import strategy_class

        strategy = strategy_class(self._tree)(**init_params)
        strategy.replaces_horovod = self._replaces_horovod
        return strategy


class _Finder:
    """Finds nothing by itself; has the registry modules registered with once they are executed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Returns what the other finders find for a registry module, and None for all others."""
        if fullname not in _REGISTRIES:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                _register_after_execution(spec.loader)
                return spec
        return None


def _register_after_execution(loader: Any) -> None:
    """Makes `loader.exec_module` register as its last act.

    The loader itself is kept, with one attribute more until it has run: the module's `__loader__`
    remains what tools that read sources or resources expect.
    """
    if not hasattr(loader, "exec_module"):
        return
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        if "exec_module" in vars(loader):
            del loader.exec_module
        try:
            original(module)
        finally:
            # Lightning imports its strategies last.
            if _end_of_imports is not None:
                _end_of_imports()
        try:
            _register(module)
        except Exception as error:
            _warn(error)

    try:
        loader.exec_module = exec_module
    except AttributeError as error:
        _warn(error)


def _warn(error: Exception) -> None:
    import warnings

    try:
        warnings.warn(
            "hvd-strategy could not register its names with Lightning "
            f"({type(error).__name__}: {error}). Pass strategy=hvd_strategy.HvdStrategy() to the "
            "Trainer instead of a name; HVD_STRATEGY_AUTOREGISTER=0 silences this warning.",
            RuntimeWarning,
            stacklevel=3,
        )
    except Exception:
        # Warnings turned into errors are no reason to break an import either.
        sys.stderr.write(f"hvd-strategy could not register its names with Lightning: {error}\n")


__all__ = ["autoload", "install"]
