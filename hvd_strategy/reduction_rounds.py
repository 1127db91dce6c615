"""The end of a backward: one round of the core, in which all ranks reduce what any of them has."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvd_strategy import _core
from hvd_strategy.contribution import Contribution
from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.gate import Gate
from hvd_strategy.module_watch import ModuleWatch
from hvd_strategy.parameter_table import ParameterTable, in_words
from hvd_strategy.parameters import gradient_strides, zeros
from hvd_strategy.reduction_precision import ReductionPrecision
from hvd_strategy.session import Session
from hvd_strategy.sparse import SparseGradients

# The end of a sentence that begins with what happened.
TWO_BACKWARDS = (
    "another thread ran a backward over the same parameters. A GradientReducer reduces one "
    "backward at a time: run them one after the other, or give each thread a model and a reducer "
    "of its own."
)


def stepped_inside(names: list[str]) -> str:
    """The message about parameters that a step inside of backward has changed."""
    return (
        f"{in_words(names)} changed while backward ran. An optimizer that steps inside a hook uses "
        "gradients that are not reduced yet, and ranks drift apart. Step it after backward() has "
        "returned."
    )


class ReductionRounds:
    """The part of GradientReducer that reduces: what fired, what came otherwise, what is left."""

    _core: Any
    _session: Session
    _table: ParameterTable
    _gate: Gate
    _sparse: SparseGradients
    _watch: ModuleWatch | None
    _contribution: Contribution
    _precision: ReductionPrecision
    _converted: set[int]  # parameters whose gradient came in another form than agreed
    _flushes: int

    if TYPE_CHECKING:

        def _fail(self, text: str) -> None:
            """See GradientReducer."""

        def _drop_deferred(self) -> None:
            """See GradientReducer."""

        def _settle_changes(self) -> None:
            """See GradientReducer."""

    def _flush(self, flags: int = 0) -> None:
        if self._core.must_recover:
            self._core.recover()
        if self._core.intruded:
            problem = f"gradients came from a second thread while {TWO_BACKWARDS}"
            self._fail(problem)
            raise HvdError(f"Rank {self._session.rank}: {problem}")
        if not self._core.begun:
            self._contribution.announce(self._core, in_backward=False)
            self._precision.announce(self._core)
        # Whoever is not in this rank's step takes part in the reduction nevertheless.
        session = self._session
        absent, session.absent = session.absent, None
        try:
            if self._reduce_round(flags):
                with self._ending_the_job():
                    self._settle_changes()
                if self._reduce_round(flags):
                    raise HvdError(
                        f"Rank {self._session.rank}: parameters change faster than the ranks can "
                        "agree on them; convert or replace them between two steps."
                    )
            self._precision.count_backward()
        except BaseException:
            self._drop_deferred()
            raise
        finally:
            self._contribution.clear()
            session.absent = absent

    def _reduce_round(self, flags: int) -> bool:
        """Reduces what there is. True when parameters have changed: the ranks have to agree first.

        Those are left out, with their gradients in place, and take part in the next round.
        """
        core = self._core
        self._flushes += 1
        with self._telling_the_others():
            self._take_fired()
            changed = self._watch is not None and self._watch.look(core.absent(), self._flushes)
            for index in self._unreduced():
                core.take(index, self._table.parameters[index])
            if self._sparse.pending:
                flags |= _core.FLUSH_SPARSE
            if changed or self._converted:
                flags |= _core.FLUSH_CHANGED
        lacking = self._exchange(flags)
        announced = core.announced
        with self._telling_the_others():
            outdated = self._provide(lacking)
        if core.complete():
            self._extra_round()
        factor = self._contribution.reduced(core, self._session.size)
        if announced & _core.FLUSH_SPARSE:
            with self._ending_the_job():
                for index in self._sparse.reduce(self._table.parameters, self._table.names, factor):
                    core.set_dirty(index, False)
        if outdated and not announced & _core.FLUSH_CHANGED:
            names = in_words(self._table.names[index] for index in outdated)
            problem = (
                f"{names} came with a gradient on other ranks, but has another shape, dtype or "
                "strides on this rank than when the ranks agreed on them. All ranks have to "
                "convert the model before the same step."
            )
            self._fail(problem)
            raise MismatchError(f"Rank {self._session.rank}: {problem}")
        return bool(announced & _core.FLUSH_CHANGED)

    def _exchange(self, flags: int) -> list[int]:
        gate = self._gate
        self._contribution.write_notes(self._core)
        lacking: list[int] = self._core.exchange(gate.steps, flags, gate.digest, gate.last)
        return lacking

    def _take_fired(self) -> None:
        """Takes the gradients of this backward that the hooks have left in place."""
        arrived, written = self._core.take_fired()
        if written:
            names = [self._table.names[index] for index in written]
            raise HvdError(f"Rank {self._session.rank}: {stepped_inside(names)}")
        if arrived:
            # From the next backward on, hooks take gradients early: after the user's hooks.
            self._table.keep_hooks_last()

    def _provide(self, lacking: list[int]) -> list[int]:
        """Gives memory for what other ranks have a gradient of, and this one has not.

        Returns those whose form is not the agreed one any more: what the others have is lost here.
        """
        outdated = []
        for index in lacking:
            if self._watch is not None:
                self._watch.follow(index)
            parameter = self._table.parameters[index]
            if self._table.is_changed(index):
                shape, dtype, strides = self._table.form_agreed(index)
                scratch = torch.empty_strided(shape, strides, dtype=dtype).zero_()
                self._core.provide(index, None, scratch)
                outdated.append(index)
                continue
            # A gradient kept from an earlier step counts; without one this rank adds nothing.
            gradient = zeros(parameter) if parameter.grad is None else parameter.grad
            self._core.provide(index, parameter, _dense(gradient))
            self._sparse.pending.discard(index)
        return outdated

    @contextmanager
    def _telling_the_others(self) -> Generator[None, None, None]:
        """An exception in the block ends the round on all ranks, which may wait for this one."""
        try:
            yield
        except BaseException as error:
            self._core.fail(f"{type(error).__name__}: {error}")
            self._core.begun = False
            raise

    @contextmanager
    def _ending_the_job(self) -> Generator[None, None, None]:
        """An exception of this rank alone in the block reaches the others, in their collectives."""
        try:
            yield
        except HvdError:
            raise  # all ranks have agreed on it, or know of it
        except BaseException as error:
            self._session.post_error(f"{type(error).__name__}: {error}")
            raise

    def _unreduced(self) -> list[int]:
        """Parameters with a gradient of this rank alone, whose hook did not fire since."""
        indices = []
        for index in self._core.dirty():
            if self._table.parameters[index].grad is None:
                self._core.set_dirty(index, False)  # the user cleared it
            else:
                indices.append(index)
        return indices

    def _extra_round(self) -> None:
        """Reduces what fired again after its bucket had left, and adds it to the gradients."""
        core, parameters = self._core, self._table.parameters
        deltas: dict[int, Tensor] = {}
        with self._telling_the_others():
            for index, _, delta in core.begin_extra_round():
                delta = _dense(delta)
                deltas[index] = deltas[index] + delta if index in deltas else delta
            for index, delta in deltas.items():
                core.take_delta(index, parameters[index], delta, False)
        lacking = self._exchange(_core.FLUSH_EXTRA)
        with self._telling_the_others():
            for index in lacking:
                core.take_delta(index, parameters[index], zeros(parameters[index]), True)
        core.complete_extra()

    def _accept_gradient(
        self, index: int, parameter: Tensor | None, gradient: Tensor
    ) -> Tensor | None:
        """Makes a gradient that the core can take of one that it cannot, or raises.

        None: it stays where it is, for the flush to see to.
        """
        if gradient.layout is not torch.strided:
            if not self._sparse.as_dense:
                self._sparse.pending.add(index)
                return None
            gradient = gradient.to_dense()
        if gradient.device.type != "cpu":
            raise HvdError(
                f"Rank {self._session.rank}: the gradient of '{self._table.names[index]}' is on "
                f"{gradient.device}; only CPU tensors are supported so far. Train with "
                "accelerator='cpu'."
            )
        if parameter is None:
            return gradient
        if self._table.is_changed(index):
            self._converted.add(index)
            return None
        gradient = gradient.resolve_conj().resolve_neg()
        strides = gradient_strides(parameter)
        if gradient.stride() == strides or gradient.numel() <= 1:
            return gradient
        return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype).copy_(gradient)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
