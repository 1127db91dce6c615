"""HvdMonitor: writes how training goes, and what communication costs, to the Trainer's loggers.

    Trainer(strategy="hvd", callbacks=[HvdMonitor()])

Every rank counts by itself; once per logging interval the ranks exchange a few numbers, in one
small collective. A step costs two looks at the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from hvd_strategy._private_api import lightning_log_step
from hvd_strategy.lightning.class_tree import ClassTree, class_tree
from hvd_strategy.lightning.strategy import DataParallelStrategy
from hvd_strategy.session import Session

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


@dataclass
class _Counters:
    """What a rank has counted since training started; times in seconds."""

    samples: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0  # in this engine, for other ranks
    communication: float = 0.0
    exposed: float = 0.0

    def since(self, earlier: _Counters) -> list[float]:
        return [
            self.samples - earlier.samples,
            self.seconds - earlier.seconds,
            self.waited - earlier.waited,
            self.communication - earlier.communication,
            self.exposed - earlier.exposed,
        ]


class Monitor(_Base):
    """Logs throughput, the cost of communication, and the rank that the others wait for.

    Every `log_every_n_steps` steps, to all loggers of the Trainer, over the steps since the last
    time and without the time of validation:

    * `hvd/samples_per_second`: samples of all ranks together;
    * `hvd/communication_ms`: time per step during which gradients were reduced, mean of the ranks;
    * `hvd/exposed_ms`: time per step that backward was held up by it, waiting for slower ranks
      included, mean of the ranks;
    * `hvd/slowest_rank`: the rank whose own work took longest, so that the others waited for it;
    * `hvd/wait_for_slowest_ms`: by how much longer than it the others waited in a step, on average.

    Waiting counts wherever it happens in this engine: at the end of backward, in `sync_dist`, in
    SyncBatchNorm. Waiting in collectives that the program calls in torch.distributed does not.

    Args:
        log_every_n_steps: steps between two entries, that is batches after which an optimizer
            stepped; the Trainer's `log_every_n_steps` by default.
        batch_size: samples of a rank's batch: a number, or a function of the batch. By default the
            first dimension of the first tensor in the batch, as for Lightning's own metrics.

    Raises:
        ValueError: An argument is not acceptable; at the start of `fit`, the Trainer has another
            strategy or no logger; in the first batch, its size cannot be told.
    """

    _tree: ClassTree

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        batch_size: int | Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__()
        if log_every_n_steps is not None and not _is_positive(log_every_n_steps):
            raise ValueError(
                f"log_every_n_steps={log_every_n_steps!r} is not accepted: it takes a number of "
                "steps from 1 on."
            )
        if batch_size is not None and not callable(batch_size) and not _is_positive(batch_size):
            raise ValueError(
                f"batch_size={batch_size!r} is not accepted: it takes a number of samples from 1 "
                "on, or a function of the batch that returns one."
            )
        self._every = log_every_n_steps
        self._batch_size = batch_size
        self._counters = _Counters()
        self._logged = _Counters()
        self._steps = 0  # since the last entry
        self._global_step = 0
        self._training = False
        self._started = self._waited_before = 0.0
        self._paused = self._paused_waited = 0.0

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Looks whether there is something to monitor, and somewhere to write it."""
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, DataParallelStrategy):
            raise ValueError(
                "HvdMonitor tells what HvdStrategy does, but this Trainer's strategy is "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy='hvd'), or leave "
                "HvdMonitor out."
            )
        if not trainer.loggers:
            raise ValueError(
                "HvdMonitor writes to the Trainer's loggers, but it has none. Use "
                "Trainer(logger=...), or leave HvdMonitor out."
            )

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to count."""
        self._training = True
        self._started = time.monotonic()
        self._waited_before = _session(trainer).core.waited_seconds
        self._counters = _Counters()
        self._logged = _Counters()
        self._steps = 0
        self._global_step = trainer.global_step

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends counting."""
        self._training = False

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends counting."""
        self._training = False

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stops the clock: validation is not training."""
        if self._training:
            self._paused = time.monotonic()
            self._paused_waited = _session(trainer).core.waited_seconds

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Lets the clock go on."""
        if self._training:
            self._started += time.monotonic() - self._paused
            self._waited_before += _session(trainer).core.waited_seconds - self._paused_waited

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch; every so many steps exchanges and logs the figures. Collective then."""
        self._counters.samples += 0 if trainer.strategy.idle else self._samples_in(batch)
        if trainer.global_step == self._global_step:
            return  # the step is still to come, after more batches
        self._global_step = trainer.global_step
        self._steps += 1
        every = trainer.log_every_n_steps if self._every is None else self._every
        # Counted as Lightning does, so that entries meet those of its own metrics.
        step = lightning_log_step(trainer)
        if every == 0 or (step + 1) % every:
            return
        figures = self._figures(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)

    def _samples_in(self, batch: Any) -> int:
        if self._batch_size is not None:
            return self._batch_size(batch) if callable(self._batch_size) else self._batch_size
        extract = self._tree.pytorch_name("utilities.data", "extract_batch_size")
        try:
            size: int = extract(batch)
        except Exception as error:  # Lightning's, or one of the batch's own code
            raise ValueError(
                f"HvdMonitor cannot tell how many samples a batch of type {type(batch).__name__} "
                "has. Say it: HvdMonitor(batch_size=...) takes a number or a function of the batch."
            ) from error
        return size

    def _figures(self, trainer: Any) -> dict[str, float]:
        """What is logged, the same on all ranks; ends the interval."""
        session = _session(trainer)
        statistics = trainer.strategy.reducer.statistics()
        counters = self._counters
        counters.seconds = time.monotonic() - self._started
        counters.waited = session.core.waited_seconds - self._waited_before
        counters.communication = statistics["communication_seconds"]
        counters.exposed = statistics["exposed_seconds"]
        own = torch.tensor(counters.since(self._logged), dtype=torch.float64)
        steps, self._steps = self._steps, 0
        self._logged = _Counters(**vars(counters))
        everybody = torch.stack(session.allgather(own))
        samples, seconds, waited, communication, exposed = everybody.unbind(1)
        slowest = int((seconds - waited).argmax())
        others = [rank for rank in range(session.size) if rank != slowest]
        longer = (waited[others] - waited[slowest]).clamp(min=0)
        milliseconds = 1000.0 / steps
        return {
            "hvd/samples_per_second": float(samples.sum() / seconds.max()),
            "hvd/communication_ms": float(communication.mean()) * milliseconds,
            "hvd/exposed_ms": float(exposed.mean()) * milliseconds,
            "hvd/slowest_rank": float(slowest),
            "hvd/wait_for_slowest_ms": float(longer.mean()) * milliseconds if others else 0.0,
        }


def _session(trainer: Any) -> Session:
    session: Session | None = trainer.strategy.session
    assert session is not None, "the strategy opens it before the first hook of a run"
    return session


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@cache
def monitor_class(tree_name: str) -> type[Monitor]:
    """Returns `HvdMonitor` as a callback of one of the two Lightning packages."""
    tree = class_tree(tree_name)
    attributes = {"__module__": tree.public_module, "__doc__": Monitor.__doc__, "_tree": tree}
    return type("HvdMonitor", (Monitor, tree.pytorch_name("callbacks", "Callback")), attributes)


__all__ = ["Monitor", "monitor_class"]
