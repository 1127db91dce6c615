"""Ends training on SIGTERM after the same batch on every rank.

Lightning lets rank 0 broadcast a flag through torch.distributed at every batch, which costs
milliseconds and does not see a signal that only another rank received. Here the ranks meet about
once a second, and never less often than every 16 batches: one small exchange, in which the flag of
any rank becomes that of all. It also carries how long a batch takes, from which all ranks compute
the number of batches until the next meeting; so they agree on that as well.

A look at a flag in shared memory would be cheaper still, but two ranks look at different moments:
the one that sees the flag would stop a batch before the one that looked just too early, and leave
it waiting.

The start and the end of a validation within a fit, and the end of training, are meetings too. While
evaluating, ranks may have different numbers of batches, so there a rank that receives SIGTERM ends
by itself, as with Lightning; the others are told through the error that it posts.

The signal by which SLURM announces the end of a job is agreed on in the same way: the checkpoint,
which all ranks have to save together, is saved at the next meeting. Lightning would save it inside
the signal handler, where one rank may be in the middle of a collective that another never reaches.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from hvd_strategy._private_api import (
    lightning_sigterm_flag,
    replace_lightning_requeue,
    replace_lightning_sigterm,
)
from hvd_strategy.session import Session

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_MEETINGS = 1.0
# Bounds what a sudden change from short to long batches can cost.
_MOST_BATCHES_BETWEEN_MEETINGS = 16


class GracefulStop:
    """Watches SIGTERM during one run of a Trainer.

    Args:
        trainer: the Trainer whose loop and signal handler are replaced, on the instances, until
            `detach`.
        session: the ranks, more than one.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer = trainer
        self._session = session
        self._signalled = False
        self._agreed = False
        self._batches = 0
        self._batches_between = 1
        self._met_at = time.monotonic()
        self._restore = replace_lightning_sigterm(trainer, self._on_sigterm)
        self._requeue_signal: int | None = None
        self._requeue, self._restore_requeue = replace_lightning_requeue(
            trainer, self._on_requeue_signal
        )

    @property
    def agreed(self) -> bool:
        """Whether all ranks know that training is to end."""
        return self._agreed

    def detach(self) -> None:
        """Gives the Trainer its own functions back. Idempotent."""
        self._restore()
        self._restore_requeue()

    def on_batch_start(self) -> None:
        """To be called at the start of every training batch, on all ranks."""
        self._batches += 1
        if self._batches >= self._batches_between:
            self.meet()

    def meet(self) -> bool:
        """Agrees on whether training is to end, and returns it. Collective.

        Lightning's loops end after the running batch, or epoch, when they find the flag set here.
        """
        seconds = (time.monotonic() - self._met_at) / max(1, self._batches)
        flags = [float(self._signalled), float(self._requeue_signal or 0)]
        told = torch.tensor([*flags, seconds], dtype=torch.float64)
        signalled, requeue, slowest = self._session.allreduce(told, "max").tolist()
        if requeue:
            self._requeue_signal = None
            self._requeue(int(requeue), None)
        if signalled:
            self._agreed = True
            lightning_sigterm_flag(self._trainer).received_sigterm = True
        most = min(2 * self._batches_between, _MOST_BATCHES_BETWEEN_MEETINGS)
        wanted = int(_SECONDS_BETWEEN_MEETINGS / max(slowest, 1e-6))
        self._batches_between = max(1, min(wanted, most))
        self._batches = 0
        self._met_at = time.monotonic()
        return self._agreed

    def _on_requeue_signal(self, signum: int, _: Any) -> None:
        self._requeue_signal = int(signum)

    def _on_sigterm(self, signum: int, _: Any) -> None:
        """Runs in the main thread, between any two instructions or inside a wait of the engine."""
        trainer = self._trainer
        _log.info("rank %d received SIGTERM", self._session.rank)
        if not self._signalled and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        self._signalled = True
        if trainer.evaluating or trainer.predicting or trainer.sanity_checking:
            lightning_sigterm_flag(trainer).received_sigterm = True


__all__ = ["GracefulStop"]
