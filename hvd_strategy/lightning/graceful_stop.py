"""Ends training on SIGTERM after the same batch on every rank.

Lightning lets rank 0 broadcast a flag through torch.distributed at every batch, which costs
milliseconds and does not see a signal that only another rank received. A mere flag in shared memory
would not do: two ranks look at different moments, so the one that sees it would stop a batch before
the one that looked just too early, and leave it waiting.

Here every rank counts the points that all ranks pass in the same order: before each batch, at the
start and the end of a validation, at the end of training. The session keeps the furthest point that
any rank has passed; SIGTERM freezes it. Ranks that are behind run up to there, nobody passes the
next one. That takes one look at a word of shared memory per batch, and nobody waits for anybody.

While evaluating, ranks may have different numbers of batches, so there a rank that receives SIGTERM
ends by itself, as with Lightning; the others are told through the error that it posts.

The signal by which SLURM announces the end of a job is agreed on in the same way: the checkpoint,
which all ranks have to save together, is saved at that point. Lightning would save it inside the
signal handler, where one rank may be in the middle of a collective that another never reaches.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_strategy._private_api import (
    lightning_sigterm_flag,
    replace_lightning_requeue,
    replace_lightning_sigterm,
)
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.log import get_logger
from hvd_strategy.session import Session

_log = get_logger(__name__)


class GracefulStop:
    """Watches SIGTERM during one run of a Trainer.

    Args:
        trainer: the Trainer whose loop and signal handler are replaced, on the instances, until
            `detach`.
        session: the ranks, more than one.
        sigterm_exception: what Lightning ends a run with.
    """

    def __init__(
        self, trainer: Any, session: Session, sigterm_exception: type[BaseException]
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._sigterm_exception = sigterm_exception
        self._signalled = False
        self._agreed = False
        self._requeue_signal: int | None = None
        session.core.begin_run()
        self._replacements = Replacements()
        self._looks_between = replace_lightning_sigterm(
            self._replacements, trainer, self._on_sigterm, self._between_batches
        )
        self._requeue = replace_lightning_requeue(
            self._replacements, trainer, self._on_requeue_signal
        )

    @property
    def agreed(self) -> bool:
        """Whether this rank has come to the point at which training ends on all ranks."""
        return self._agreed

    def detach(self) -> None:
        """Gives the Trainer its own functions back. Idempotent."""
        self._replacements.detach()

    def on_batch_start(self) -> None:
        """To be called at the start of every training batch, on all ranks."""
        if not self._looks_between:
            self.reach_point()

    def reach_point(self) -> bool:
        """Comes to the next point, on all ranks, and returns whether training ends here.

        Lightning's loops end after the running batch, or epoch, when they find the flag set here.
        """
        if not self._agreed and not self._session.core.pass_point():
            self._meet()
        # Also when the answer is no: a rank that was signalled in a validation that has ended since
        # must not end by itself now.
        lightning_sigterm_flag(self._trainer).received_sigterm = self._agreed
        return self._agreed

    def _meet(self) -> None:
        """Agrees on what was asked for. All ranks are at the same point, so they can wait."""
        asked = torch.tensor([float(self._signalled), float(self._requeue_signal or 0)])
        signalled, requeue = self._session.allreduce(asked, "max").tolist()
        if requeue:
            self._requeue_signal = None
            self._requeue(int(requeue), None)
        if signalled:
            self._agreed = True
            return
        # Nobody is left in the old run, so a new one can begin; a signal that came meanwhile asked
        # for the end of the old one.
        self._session.core.begin_run()
        if self._signalled or self._requeue_signal:
            self._session.core.request_stop()

    def _between_batches(self) -> None:
        self._session.set_activity("the loading of a batch")
        if self.reach_point():
            raise self._sigterm_exception

    def _on_requeue_signal(self, signum: int, _: Any) -> None:
        self._requeue_signal = int(signum)
        if not self._session.closed:
            self._session.core.request_stop()

    def _on_sigterm(self, signum: int, _: Any) -> None:
        """Runs in the main thread, between any two instructions or inside a wait of the engine."""
        trainer = self._trainer
        _log.warning("received SIGTERM: training ends after a batch that all ranks agree on")
        if not self._signalled and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        self._signalled = True
        if not self._session.closed:
            self._session.core.request_stop()
        if trainer.evaluating or trainer.predicting or trainer.sanity_checking:
            lightning_sigterm_flag(trainer).received_sigterm = True


__all__ = ["GracefulStop"]
