"""Ranks for a notebook: fresh interpreters that run what a cell asks for.

A notebook cannot be run once per rank, as a script can, and a fork of its kernel inherits whatever
the kernel has touched: threads, locks, a CUDA context. So `NotebookLauncher` starts new
interpreters, sends them the work (`transfer`), shows what they print in the cell, and takes what
the run left behind back into the notebook's objects (`run_outcome`). `notebook_rank` is the other
side. It works in scripts and shells just as well.

The launching process is no rank: it keeps the store where the ranks meet, so that there is no port
to guess, and watches them. Every rank leads a session of its own, away from the terminal's Ctrl-C,
and is killed by the kernel when the launching thread ends. Nothing but pipes and anonymous memory
connects them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from hvd_strategy._private_api import lightning_is_interactive
from hvd_strategy._register import STARTED_RANK
from hvd_strategy.errors import HvdError
from hvd_strategy.host_meeting import listen_on_loopback
from hvd_strategy.lightning import transfer
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.launch import InterruptHandlerKept
from hvd_strategy.lightning.notebook_rank import Work, process_settings
from hvd_strategy.lightning.rank_watch import RankWatch
from hvd_strategy.lightning.run_outcome import known_objects, without_optimizers

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers.launcher import _Launcher as _Base
else:
    _Base = object

__all__ = ["NotebookLauncher"]

# Before anything that takes time: die with the launching thread, also if that is dead already; and
# end without a traceback on Ctrl-C, until there is somebody to handle it.
_BOOTSTRAP = """\
import ctypes, json, os, signal, sys
parent, path, argv, descriptors = json.loads(sys.argv[1])
signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    os._exit(1)
sys.path[:], sys.argv[:] = path, argv
from hvd_strategy.lightning.notebook_rank import main
main(*descriptors)
"""

# Of another job, which this process may be part of.
_VARIABLES_OF_OTHERS = ("RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")


class NotebookLauncher(InterruptHandlerKept, _Base):
    """Starts fresh interpreters as ranks, from a notebook or from anywhere else.

    Args:
        strategy: the strategy whose ranks they are.
    """

    _tree: ClassTree

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._watch: RankWatch | None = None

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs `function(*args, **kwargs)` in all ranks; returns what it returned on rank 0.

        Args:
            function: what to run; with its arguments it is sent to the ranks by cloudpickle.
            *args: its arguments.
            trainer: the Trainer, which gets back what the run left behind.
            **kwargs: its keyword arguments.

        Raises:
            RankFailedError: a rank raised an exception, which is the cause and whose traceback is
                in the text, or ended before it was done.
            HvdError: something cannot be sent to the ranks.
            KeyboardInterrupt: this process was interrupted; no rank is left then.
        """
        self.keep_interrupt_handler()
        known = {} if trainer is None else known_objects(trainer)
        work = Work(
            tree=self._tree.name,
            trainer=trainer,
            function=function,
            args=args,
            kwargs=kwargs,
            settings=process_settings(),
        )
        with contextlib.ExitStack() as stack:
            job, outcome = (stack.enter_context(_memory_file(name)) for name in ("job", "outcome"))
            _send(work, job, self._strategy)
            watch = self._watch = RankWatch()
            stack.callback(self._forget_watch)
            stack.callback(watch.end)
            port = stack.enter_context(_meeting_place())
            for rank in range(self._strategy.num_processes):
                self._start(rank, port, job, outcome)
            try:
                watch.wait()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    watch.interrupt()
                # What was trained is not lost, as it is not when a run in this process fails. It
                # may be missing: rank 0 was killed, or is in no state to send it.
                with contextlib.suppress(Exception):
                    self._take_back(outcome, trainer, known)
                raise
            self._strategy.forget_messages()
            return self._take_back(outcome, trainer, known)

    def _take_back(self, outcome: int, trainer: Any, known: dict[str, object]) -> Any:
        result = transfer.load(outcome, known)
        return result if trainer is None else result.restore(self._tree, trainer, known)

    def _start(self, rank: int, port: int, job: int, outcome: int) -> None:
        assert self._watch is not None
        reports, report = os.pipe()
        try:
            path, arguments = map(str, sys.path), map(str, sys.argv)
            bootstrap = [os.getpid(), [*path], [*arguments], [job, outcome, report]]
            process = subprocess.Popen(
                [
                    *(sys.executable, "-u"),
                    *(f"-W{option}" for option in sys.warnoptions),
                    *("-c", _BOOTSTRAP, json.dumps(bootstrap)),
                ],
                env=self._environment(rank, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(job, outcome, report),
                start_new_session=True,
            )
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(report)
        self._watch.add(rank, process, reports)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What the rank is, in the variables that Lightning's own launcher uses."""
        environment = {
            name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_OTHERS
        }
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NODE_RANK": "0",
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._strategy.num_processes),
            # The store is served by this process; no rank is to serve another.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            STARTED_RANK: "1",
        }
        if sys.stdout.isatty() or lightning_is_interactive(self._tree.fabric):
            # The pipe leads to a screen: rich, which draws Lightning's progress bar where it is
            # installed, would take it for a file and draw nothing before the end.
            width = shutil.get_terminal_size((100, 24)).columns
            for name, value in (
                ("TTY_COMPATIBLE", "1"),
                ("TTY_INTERACTIVE", "1"),
                ("COLUMNS", str(width)),
            ):
                environment.setdefault(name, value)
        return environment

    def _forget_watch(self) -> None:
        self._watch = None

    @override
    def kill(self, signum: int) -> None:
        """Sends a signal to the ranks that run."""
        if self._watch is not None:
            self._watch.send_signal(signal.Signals(signum))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watch": None, "_interrupt_handler": None}


@contextlib.contextmanager
def _memory_file(name: str) -> Iterator[int]:
    descriptor = transfer.memory_file(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _send(work: Work, job: int, strategy: Any) -> None:
    try:
        with without_optimizers(strategy):
            transfer.dump(work, job)
    except Exception as error:  # whatever the objects' own code raises
        raise HvdError(
            "The Trainer, the model or the data cannot be sent to the ranks, which are processes "
            f"of their own ({type(error).__name__}: {error}). Open files, connections and the like "
            "where they are used, in setup() or in the data set's __getitem__, instead of keeping "
            "them in the object."
        ) from error


@contextlib.contextmanager
def _meeting_place() -> Iterator[int]:
    """A server where the ranks meet; yields its port, which the system has chosen."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = listen_on_loopback()
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        # Not to live on in a traceback, which notebooks keep.
        del store
