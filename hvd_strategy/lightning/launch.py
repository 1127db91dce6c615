"""How the ranks come into being: Lightning's launchers, with small additions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from hvd_strategy._private_api import lightning_launchers, lightning_tuner_exit
from hvd_strategy.lightning.checkpoint import same_checkpoints
from hvd_strategy.lightning.class_tree import ClassTree, class_tree

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import (
        _MultiProcessingLauncher as _MultiProcessingBase,
    )
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _ScriptBase
else:
    _MultiProcessingBase = _ScriptBase = object


class ScriptLauncher(_ScriptBase):
    """Runs the script once per rank, where no launcher has started the ranks.

    An exception is told to the other ranks at once. Lightning would first call the callbacks, of
    which one that saves a checkpoint waits for ranks that never come.
    """

    _tree: ClassTree

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        try:
            with nullcontext() if trainer is None else same_checkpoints(trainer):
                return super().launch(function, *args, trainer=trainer, **kwargs)
        except lightning_tuner_exit(self._tree.name):
            raise
        except BaseException as error:
            if trainer is not None:
                trainer.strategy.on_exception(error)
            raise


class MultiProcessingLauncher(_MultiProcessingBase):
    """Starts the ranks by fork or spawn.

    The environment is left as it was, where Lightning's launcher leaves the port of the finished
    job, for the next job to find. An exception in a worker is told to the other ranks; Lightning
    handles exceptions in the parent only.
    """

    _tree: ClassTree

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        with _environment_kept():
            return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _wrapping_function(self, process_idx: int, trainer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            with nullcontext() if trainer is None else same_checkpoints(trainer):
                super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)
            raise


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@cache
def launcher_classes(
    tree_name: str,
) -> tuple[type[ScriptLauncher], type[MultiProcessingLauncher]]:
    """Returns the launchers as classes of the tree; pickle finds them where they say."""
    tree = class_tree(tree_name)
    built: list[Any] = []
    for ours, theirs in zip(
        (ScriptLauncher, MultiProcessingLauncher), lightning_launchers(tree_name), strict=True
    ):
        attributes = {"__module__": tree.public_module, "_tree": tree}
        built.append(type(ours.__name__, (ours, theirs), attributes))
    return built[0], built[1]


__all__ = [
    "MultiProcessingLauncher",
    "ScriptLauncher",
    "launcher_classes",
]
