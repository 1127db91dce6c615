"""How the ranks come into being: Lightning's launchers, with small additions.

All of them leave the process as it was: its environment, its handler for Ctrl-C, torch's number of
threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from hvd_strategy._private_api import lightning_launchers, lightning_tuner_exit
from hvd_strategy._register import STARTED_RANK
from hvd_strategy.errors import HvdError
from hvd_strategy.lightning.checkpoint import same_checkpoints
from hvd_strategy.lightning.class_tree import ClassTree, class_tree

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import (
        _MultiProcessingLauncher as _MultiProcessingBase,
    )
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _ScriptBase
else:
    _MultiProcessingBase = _ScriptBase = object

# What launchers and Lightning's environments set for the time of a run.
_RUN_VARIABLES = (
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "OMP_NUM_THREADS",
    "WORLD_SIZE",
)


class _ScriptJob:
    """The ranks that this process, as rank 0, has started by running its script again."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._pid = os.getpid()
        self._variables = {name: os.environ[name] for name in _RUN_VARIABLES if name in os.environ}

    def enter(self) -> None:
        """Puts into the environment who this process is, for one more run of the same ranks."""
        if os.getpid() != self._pid:
            return  # a fork of rank 0, which starts ranks of its own if it likes
        ended = [process.pid for process in self._processes if process.poll() is not None]
        if ended:
            raise HvdError(
                f"This script has started its other ranks already, and {len(ended)} of "
                f"{len(self._processes)} have ended (pid {', '.join(map(str, ended))}), so the "
                "Trainer cannot run again. Either all ranks run the whole script, or it starts "
                'ranks for each run: HvdStrategy(start_method="spawn") or "interactive".'
            )
        os.environ.update(self._variables)


_script_job: _ScriptJob | None = None


class ScriptLauncher(_ScriptBase):
    """Runs the script once per rank, where no launcher has started the ranks.

    Between runs the environment is what it was, so that whatever the script starts then is no rank
    by mistake; that the ranks exist is remembered here.

    An exception is told to the other ranks at once. Lightning would first call the callbacks, of
    which one that saves a checkpoint waits for ranks that never come.
    """

    _tree: ClassTree

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        with _process_kept():
            if _script_job is not None:
                _script_job.enter()
            try:
                with nullcontext() if trainer is None else same_checkpoints(trainer):
                    return super().launch(function, *args, trainer=trainer, **kwargs)
            except lightning_tuner_exit(self._tree.name):
                raise
            except BaseException as error:
                if trainer is not None:
                    trainer.strategy.on_exception(error)
                raise

    @override
    def _call_children_scripts(self) -> None:
        global _script_job
        with _marked_as_started():
            super()._call_children_scripts()
        _script_job = _ScriptJob(self.procs)


class InterruptHandlerKept:
    """For launchers whose process is no rank, and lives on after Ctrl-C.

    Lightning ignores Ctrl-C while it shuts down, and counts on the end of the process, or on what
    it has saved before training; which it only does in a rank.
    """

    _interrupt_handler: Any = None

    def keep_interrupt_handler(self) -> None:
        """To be called before a run."""
        if threading.current_thread() is threading.main_thread():
            self._interrupt_handler = signal.getsignal(signal.SIGINT)

    def restore_interrupt_handler(self) -> None:
        """To be called when a run has ended, whatever way."""
        if self._interrupt_handler is not None:
            signal.signal(signal.SIGINT, self._interrupt_handler)
            self._interrupt_handler = None


class MultiProcessingLauncher(InterruptHandlerKept, _MultiProcessingBase):
    """Starts the ranks by fork or spawn.

    The environment is left as it was, where Lightning's launcher leaves the port of the finished
    job, for the next job to find; and no rank is left when the run ends by an exception. An
    exception in a worker is told to the other ranks; Lightning handles exceptions in the parent
    only.
    """

    _tree: ClassTree
    _strategy: Any
    _start_method: Any

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.keep_interrupt_handler()
        spawned = self._start_method == "spawn"  # a fork imports nothing
        with _process_kept(), _marked_as_started() if spawned else nullcontext():
            try:
                result = super().launch(function, *args, trainer=trainer, **kwargs)
                self._strategy.forget_messages()
                return result
            finally:
                for process in self.procs:
                    if process.is_alive():
                        process.kill()
                    process.join()

    @override
    def _wrapping_function(self, process_idx: int, trainer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            with nullcontext() if trainer is None else same_checkpoints(trainer):
                super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)
            raise

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_interrupt_handler": None}


@contextmanager
def _marked_as_started() -> Iterator[None]:
    """Lets processes that are started in the block know that they are ranks."""
    os.environ[STARTED_RANK] = "1"
    try:
        yield
    finally:
        del os.environ[STARTED_RANK]


@contextmanager
def _process_kept() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _RUN_VARIABLES}
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@cache
def launcher_class(tree_name: str, name: str) -> type[Any]:
    """Returns a launcher as a class of the tree; pickle finds it where it says.

    Args:
        tree_name: the tree.
        name: "ScriptLauncher", "MultiProcessingLauncher" or "NotebookLauncher".
    """
    script, multiprocessing, base = lightning_launchers(tree_name)
    own: type[Any]
    if name == "ScriptLauncher":
        own, theirs = ScriptLauncher, script
    elif name == "MultiProcessingLauncher":
        own, theirs = MultiProcessingLauncher, multiprocessing
    else:
        from hvd_strategy.lightning.notebook import NotebookLauncher

        own, theirs = NotebookLauncher, base
    tree = class_tree(tree_name)
    return type(name, (own, theirs), {"__module__": tree.public_module, "_tree": tree})


__all__ = [
    "InterruptHandlerKept",
    "MultiProcessingLauncher",
    "ScriptLauncher",
    "launcher_class",
]
