"""Ranks with different numbers of batches: `HvdStrategy(uneven_inputs="join"|"stop"|"error")`.

With "join" a rank that has run out goes on through the loop, so that global_step, checkpoints,
validation, schedulers, logging and callbacks go on as on the others. It gets a batch without
samples (the structure of its last one), which is not moved to the device; its `training_step` is
not called, nor anything of backward; it joins the reduction with weight 0. SyncBatchNorm works with
the ranks that have a batch. What the user's code asks of all ranks from inside a step, in which one
of them is not, is an error on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import distributed

from hvd_strategy._private_api import (
    lightning_evaluation_loops,
    lightning_reads_by_iterator,
    replace_lightning_batch_hook,
    replace_lightning_train_data,
    set_lightning_evaluation_limits,
    set_up_lightning_evaluation,
    stack_of_thread,
)
from hvd_strategy.engine import GradientReducer
from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.joined_loader import (
    EpochBatches,
    has_reliable_length,
    in_words,
    joined,
)
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.log import FOR_ALL_RANKS, get_logger
from hvd_strategy.session import Session

_log = get_logger(__name__)


class UnevenInputs:
    """Keeps the ranks together in one run of a Trainer.

    Args:
        trainer: the Trainer, before its data is set up.
        session: the ranks, more than one.
        tree: the Lightning package of the Trainer.
        policy: "join", "stop" or "error".
        exact_evaluation: whether ranks may have different numbers of batches to evaluate, whatever
            the policy.

    Attributes:
        idle: whether this rank has run out of batches in the running step.
        absent: the ranks that have, in that step.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        tree: ClassTree,
        policy: str,
        exact_evaluation: bool,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._policy = policy
        self._exact_evaluation = exact_evaluation
        self._joined_class = tree.pytorch_name("utilities.combined_loader", "CombinedLoader")
        self._epoch: EpochBatches | None = None
        self._everybody = tuple(range(session.size))
        self._active = self._everybody
        self.idle = False
        self.absent: tuple[int, ...] = ()
        # By evaluation loop: batches until the ranks' numbers differ.
        self._together: dict[int, int] = {}
        self._evaluating: Any = None  # the loop
        self._evaluated = 0  # batches, in this evaluation
        self._had_some = False
        self._reductions = 0
        self._watch = _GroupWatch(session)
        self._attached = True
        self._replacements = Replacements()
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        around = self._replacements.around
        replace_lightning_train_data(self._replacements, trainer, self._join)
        around(fit, "setup_data", self._set_up)
        around(epoch, "advance", self._advance)
        self._replacements.before(fit, "on_advance_end", self._end_epoch)
        for loop, _, _ in lightning_evaluation_loops(trainer):
            around(loop, "setup_data", partial(self._set_up_evaluation, loop))
            self._replacements.before(loop, "on_run_start", partial(self._begin_evaluation, loop))

    def detach(self) -> None:
        """Gives the Trainer its own functions back. Idempotent."""
        self._attached = False
        self._replacements.detach()
        self._watch.end()
        self._epoch = None
        self._session.active_ranks = None

    # ---- training

    @property
    def active(self) -> int:
        """Number of ranks that have a batch in the running step."""
        return len(self._active)

    @property
    def first_active(self) -> int:
        """The lowest of these ranks."""
        return self._active[0]

    def note(self) -> int:
        """What this rank tells the others with the reduction of gradients."""
        return 0 if self._epoch is None else self._epoch.note()

    def learn_from_reduction(self, reducer: GradientReducer) -> None:
        """Takes up what all ranks have told with a reduction, if there was one in this step."""
        epoch = self._epoch
        if epoch is not None and epoch.listens and reducer.reductions != self._reductions:
            self._reductions = reducer.reductions
            epoch.learn([note for note, _ in reducer.notes])

    @contextmanager
    def among_active(self) -> Generator[None, None, None]:
        """For the parts of a step in which the ranks without a batch are not."""
        with self._absent_are_missed(self.absent, "training_step"):
            self._session.active_ranks = self._active
            try:
                yield
            finally:
                self._session.active_ranks = None

    def _join(self, loader: Any, mode: str) -> Any:
        if not isinstance(loader, self._joined_class):
            loader = self._joined_class(loader, mode)
        return joined(loader, self._begin_epoch)

    def _begin_epoch(
        self, loader: Any, fetch: Callable[[], Any], length: int | None
    ) -> EpochBatches | None:
        if not self._attached:
            return None  # used after the run
        trainer = self._trainer
        if trainer.strategy.reducer is not None:
            # What was told until now was about the last epoch.
            self._reductions = trainer.strategy.reducer.reductions
        by_iterator = lightning_reads_by_iterator(trainer)
        reliable = all(has_reliable_length(part) for part in loader.flattened)
        if by_iterator and not reliable:
            return None  # training_step reads as it likes
        no_stand_in = None
        if by_iterator:
            no_stand_in = "training_step reads its batches from dataloader_iter"
        elif not trainer.lightning_module.automatic_optimization:
            no_stand_in = "With manual optimization it is training_step that steps the optimizers"
        loop = trainer.fit_loop.epoch_loop
        self._epoch = EpochBatches(
            self._session,
            self._policy,
            fetch,
            length,
            reliable,
            lambda: int(trainer.accumulate_grad_batches),
            no_stand_in,
            loop.batch_progress.current.ready if loop.restarting else 0,
        )
        return self._epoch

    def _set_up(self, original: Callable[[], None]) -> None:
        with self._allowing_no_batches():
            original()

    @contextmanager
    def _allowing_no_batches(self) -> Generator[None, None, None]:
        """Lightning refuses a loader that has batches on some ranks only, unless told so."""
        allowed = Replacements()
        if self._policy == "join" or self._exact_evaluation:
            allowed.put(
                self._trainer.lightning_module,
                "allow_zero_length_dataloader_with_multiple_devices",
                True,
            )
        try:
            yield
        finally:
            allowed.detach()

    def _advance(self, original: Callable[..., None], fetcher: Any) -> None:
        epoch = self._epoch
        if epoch is None:
            original(fetcher)
            return
        # Lightning's fetcher reads one ahead where it knows no length.
        index = epoch.index - len(getattr(fetcher, "batches", ()))
        if epoch.supplies.least > index:
            if self.absent:
                self._take_part(self._everybody)
            original(fetcher)
            return
        having = epoch.having(index)
        # Nobody: the epoch is over, as the loader will say.
        self._take_part(having or self._everybody)
        if not self.idle:
            original(fetcher)
            return
        stand_in = Replacements()
        replace_lightning_batch_hook(stand_in, self._trainer, lambda _, batch, **__: batch)
        try:
            original(fetcher)
        except (HvdError, StopIteration):
            raise
        except Exception:
            _log.error(
                "the exception that follows was raised in a step for which this rank had run out "
                "of batches: hooks get a batch without samples then, and no outputs. Have them "
                'look at `trainer.strategy.idle`, or use HvdStrategy(uneven_inputs="stop").'
            )
            raise
        finally:
            stand_in.detach()
            self.idle = False

    def _take_part(self, active: tuple[int, ...]) -> None:
        self._active = active
        self.absent = tuple(rank for rank in self._everybody if rank not in active)
        self.idle = self._session.rank in self.absent

    def _end_epoch(self) -> None:
        epoch = self._epoch
        if epoch is None or self._policy != "join":
            return
        counts = [min(count, epoch.index) for count in epoch.supplies.counts]
        most = max(counts)
        if min(counts) == most:
            return
        short = [
            f"rank {rank} ran out of batches after {count} of {most}"
            for rank, count in enumerate(counts)
            if count < most
        ]
        _log.info(
            "epoch %d: %s; the others went on without it",
            self._trainer.current_epoch,
            ", ".join(short),
            extra=FOR_ALL_RANKS,
        )

    # ---- evaluation

    def _set_up_evaluation(self, loop: Any, original: Callable[[], None]) -> None:
        with self._allowing_no_batches():
            lengths = set_up_lightning_evaluation(loop, original)
        if lengths is None:
            return
        told = self._session.exchange("batches of an evaluation", [lengths])
        everybody = [other for (other,) in told]
        if any(len(other) != len(lengths) for other in everybody):
            raise MismatchError(
                "The ranks have different numbers of data loaders to evaluate: "
                + ", ".join(f"rank {rank} has {len(o)}" for rank, o in enumerate(everybody))
            )
        self._together.pop(id(loop), None)
        limits = list(lengths)
        together, even = 0, True
        for place, counts in enumerate(zip(*everybody, strict=True)):
            if None in counts:
                even = False  # nobody knows before the end
                continue
            if len(set(counts)) > 1:
                self._refuse_in_evaluation(list(counts))
            if self._policy == "stop" and not self._exact_evaluation:
                limits[place] = min(counts)
            elif not lengths[place] and max(counts):
                limits[place] = 1  # so that the loop runs; the loader gives none
            if even:
                together += min(counts)
            even = even and len(set(counts)) == 1
        if limits != lengths:
            set_lightning_evaluation_limits(loop, limits)
        if not even and None not in [count for other in everybody for count in other]:
            self._together[id(loop)] = together

    def _refuse_in_evaluation(self, counts: list[int]) -> None:
        if self._policy == "error" and not self._exact_evaluation:
            raise MismatchError(
                f"The ranks have different numbers of batches to evaluate: {in_words(counts)}. "
                'HvdStrategy(uneven_inputs="error") does not go on with them: split the data '
                'evenly, or use "join" or "stop".'
            )

    def _begin_evaluation(self, loop: Any) -> None:
        self._evaluating = loop
        self._evaluated = 0
        self._had_some = False

    def had_batches_to_evaluate(self) -> bool:
        """Whether this rank has evaluated any batch since it was last asked."""
        had, self._had_some = self._had_some, False
        return had

    @contextmanager
    def evaluating(self) -> Generator[None, None, None]:
        """For one batch of an evaluation."""
        together = self._together.get(id(self._evaluating))
        self._evaluated += 1
        self._had_some = True
        if together is None or self._evaluated <= together:
            yield
            return
        with self._absent_are_missed(None, "the evaluation of a batch"):
            yield

    # ---- collectives in a step that not all ranks are in

    @contextmanager
    def _absent_are_missed(
        self, absent: tuple[int, ...] | None, where: str
    ) -> Generator[None, None, None]:
        session = self._session
        if absent is None:
            who = "the ranks have different numbers of batches, and some may have none left"
        else:
            ranks = ", ".join(map(str, absent))
            who = f"rank{'s' * (len(absent) > 1)} {ranks} had run out of batches"
        session.absent = (
            f"a collective operation was called in {where} on rank {session.rank} while {who}, so "
            "it would wait in vain. Leave it out of the step, or let all ranks end with the "
            'shortest: HvdStrategy(uneven_inputs="stop")'
        )
        self._watch.look_for(self._everybody if absent is None else absent)
        try:
            yield
        except RuntimeError as error:
            if self._watch.found is None or isinstance(error, HvdError):
                raise
            # That of torch.distributed, whose wait broke off when the other ranks ended.
            raise HvdError(f"Rank {session.rank}: {self._watch.found}.") from error
        finally:
            session.absent = None


class _GroupWatch:
    """Looks, from a thread, whether this one waits in torch.distributed for a rank that is absent.

    Nothing of torch's can be asked; the stack of the thread shows it. Costs the steps nothing.

    Args:
        session: the ranks; its `absent` says whether there is anything to look for.

    Attributes:
        found: what the ranks have been told.
    """

    _SECONDS = 0.5  # between two looks
    _LOOKS = 4  # that have to find the thread at the same place

    def __init__(self, session: Session) -> None:
        self._session = session
        self.found: str | None = None
        self._watched = threading.get_ident()
        self._missed: tuple[int, ...] = ()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def look_for(self, missed: tuple[int, ...]) -> None:
        """Watches out for groups with one of these ranks, while the session tells of absence."""
        self._missed = missed
        if self._thread is None and distributed.is_available() and distributed.is_initialized():
            self._watched = threading.get_ident()
            self._thread = threading.Thread(
                target=self._look_again_and_again, name="hvd-uneven-inputs", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Ends the thread. Idempotent."""
        self._ended.set()

    def _look_again_and_again(self) -> None:
        last, looks = None, 0
        while not self._ended.wait(self._SECONDS):
            place = self._place()
            looks = looks + 1 if place is not None and place == last else 0
            last = place
            text = self._session.absent
            if last is not None and text is not None and looks + 1 >= self._LOOKS:
                self.found = f"{last[2]}: {text}"
                self._session.post_error(f"HvdError: {self.found}")
                return

    def _place(self) -> tuple[int, int, str] | None:
        """Where in torch.distributed the thread waits, if it does for one of the ranks."""
        if self._session.absent is None:
            return None
        frame = stack_of_thread(self._watched)
        module = "" if frame is None else frame.f_globals.get("__name__", "")
        if frame is None or not module.startswith("torch.distributed"):
            return None
        group = frame.f_locals.get("group")
        if group is not None and not self._is_missed_in(group):
            return None
        return id(frame), frame.f_lasti, f"{module}.{frame.f_code.co_name}"

    def _is_missed_in(self, group: Any) -> bool:
        try:
            members = distributed.get_process_group_ranks(group)
        except (RuntimeError, ValueError, KeyError, TypeError):
            return False
        return any(rank in members for rank in self._missed)


__all__ = ["UnevenInputs"]
