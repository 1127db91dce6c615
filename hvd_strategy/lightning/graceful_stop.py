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
"""

from __future__ import annotations

import logging
from typing import Any

from hvd_strategy._private_api import lightning_sigterm_flag, replace_lightning_sigterm
from hvd_strategy.session import Session

_log = logging.getLogger(__name__)


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
        session.core.begin_run()
        self._restore, self._looks_between = replace_lightning_sigterm(
            trainer, self._on_sigterm, self._between_batches
        )

    @property
    def agreed(self) -> bool:
        """Whether this rank has come to the point at which training ends on all ranks."""
        return self._agreed

    def detach(self) -> None:
        """Gives the Trainer its own functions back. Idempotent."""
        self._restore()

    def on_batch_start(self) -> None:
        """To be called at the start of every training batch, on all ranks."""
        if not self._looks_between:
            self.reach_point()

    def reach_point(self) -> bool:
        """Comes to the next point, on all ranks, and returns whether training ends here.

        Lightning's loops end after the running batch, or epoch, when they find the flag set here.
        """
        if not self._agreed:
            self._agreed = not self._session.core.pass_point()
            # Also when the answer is no: a rank that was signalled in a validation that has ended
            # since must not end by itself now.
            lightning_sigterm_flag(self._trainer).received_sigterm = self._agreed
        return self._agreed

    def _between_batches(self) -> None:
        self._session.set_activity("the loading of a batch")
        if self.reach_point():
            raise self._sigterm_exception

    def _on_sigterm(self, signum: int, _: Any) -> None:
        """Runs in the main thread, between any two instructions or inside a wait of the engine."""
        trainer = self._trainer
        _log.info("rank %d received SIGTERM", self._session.rank)
        if not self._signalled and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        self._signalled = True
        if not self._session.closed:
            self._session.core.request_stop()
        if trainer.evaluating or trainer.predicting or trainer.sanity_checking:
            lightning_sigterm_flag(trainer).received_sigterm = True


__all__ = ["GracefulStop"]
