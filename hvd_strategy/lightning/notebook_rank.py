"""What runs in a rank that `notebook.NotebookLauncher` has started.

The rank does what the notebook asked for as a rank of Lightning's own launcher would, reports how
that ended, and rank 0 sends back what is to be known in the notebook. Its exit status is 0 only if
all of it succeeded.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hvd_strategy._private_api import (
    lightning_run_handling_exceptions,
    run_exit_functions,
    set_lightning_launcher,
)
from hvd_strategy.errors import RankFailedError
from hvd_strategy.lightning import transfer
from hvd_strategy.lightning.class_tree import class_tree
from hvd_strategy.lightning.launch import launcher_class
from hvd_strategy.lightning.rank_watch import RankReport
from hvd_strategy.lightning.run_outcome import RunOutcome, known_objects

__all__ = ["Work", "main", "process_settings"]


@dataclass
class Work:
    """What the ranks are asked for.

    Attributes:
        tree: name of the Lightning package that the Trainer is from.
        trainer: the Trainer, or None where the function has none.
        function: what to run, with `args` and `kwargs`.
        settings: of `process_settings`.
    """

    tree: str
    trainer: Any
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: dict[str, Any]


def process_settings() -> dict[str, Any]:
    """State of the process that a run depends on, and that a fork would inherit."""
    settings = {
        "python_random": random.getstate(),
        "torch_random": torch.get_rng_state(),
        "default_dtype": torch.get_default_dtype(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    }
    if "numpy" in sys.modules:
        settings["numpy_random"] = sys.modules["numpy"].random.get_state()
    return settings


def _adopt(settings: dict[str, Any]) -> None:
    random.setstate(settings["python_random"])
    torch.set_rng_state(settings["torch_random"])
    torch.set_default_dtype(settings["default_dtype"])
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    enabled, warn_only = settings["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = settings["cudnn"]
    if "numpy_random" in settings:
        import numpy as np

        np.random.set_state(settings["numpy_random"])


def main(job: int, outcome: int, reports: int) -> None:
    """Runs the work and ends the process.

    Args:
        job: memory file that holds the `Work`.
        outcome: memory file for what comes back.
        reports: pipe for the `RankReport`.
    """
    for descriptor in (job, outcome, reports):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work = transfer.load(job)
        os.close(job)
        _run(work, outcome)
    except BaseException as error:
        _send(reports, _report_on(error))
        _leave(1)
    _send(reports, RankReport(done=True))
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Ends the process in order, but without taking every module of torch and Lightning apart.

    That costs a quarter of what importing them did, while the notebook waits.
    """
    try:
        run_exit_functions()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _run(work: Work, outcome: int) -> None:
    _adopt(work.settings)
    first = os.environ["LOCAL_RANK"] == "0"
    trainer = work.trainer
    if trainer is None:
        result = work.function(*work.args, **work.kwargs)
        if first:
            transfer.dump(result, outcome, known={})
        return
    tree = class_tree(work.tree)
    known = known_objects(trainer)
    strategy = trainer.strategy
    default = tree.fabric_name("plugins.environments", "LightningEnvironment")
    if type(strategy.cluster_environment) is default:
        # What came with the Trainer may remember a port of the notebook's process.
        strategy.cluster_environment = default()
    script = launcher_class(tree.name, "ScriptLauncher")
    # The ranks exist: it starts none, and tells the others of an exception.
    launcher = script(strategy.cluster_environment, strategy.num_processes, 1)
    set_lightning_launcher(strategy, launcher)
    run = lightning_run_handling_exceptions(tree.name)

    def send_back(result: Any) -> None:
        state_dict = trainer.lightning_module.state_dict()
        if first:
            taken = RunOutcome.take(tree, trainer, state_dict, known, result)
            try:
                transfer.dump(taken, outcome, known)
            except Exception as error:  # whatever the objects' own code raises
                transfer.dump(taken.without_optimizers(error), outcome, known)

    try:
        result = run(trainer, work.function, *work.args, **work.kwargs)
    except BaseException:
        # An error, an interrupt, or another rank's failure, which Lightning has dealt with. The
        # weights are those of the last whole step.
        with contextlib.suppress(Exception):
            send_back(None)
        raise
    send_back(result)


def _report_on(error: BaseException) -> RankReport:
    try:
        exception = pickle.dumps(error)
        pickle.loads(exception)  # many exceptions only seem to be picklable
    except Exception:
        exception = None
    return RankReport(
        done=False,
        text=f"{type(error).__name__}: {error}".rstrip(": "),
        traceback="".join(traceback.format_exception(error)),
        consequence=isinstance(error, RankFailedError),
        exception=exception,
    )


def _send(reports: int, report: RankReport) -> None:
    data = pickle.dumps(report)
    with open(reports, "wb") as pipe:
        pipe.write(len(data).to_bytes(8, "little") + data)
