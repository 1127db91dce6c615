"""In which precision a GradientReducer sends gradients and adds them up, and from which step on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_strategy.arguments import require
from hvd_strategy.errors import MismatchError
from hvd_strategy.gate import Gate
from hvd_strategy.wire_schedule import WireSchedule

if TYPE_CHECKING:
    from hvd_strategy.session import Session


class ReductionPrecision:
    """The precision of one reducer.

    The reductions of a step have the dtype that the schedule gives for the number of optimizer
    steps before it, which is the same on all ranks; so all of them change in the same reduction.

    Args:
        wire_dtype: Text of `schedule_text`.
        sum_dtype: "none", "fp32" or "fp64".
        gate: Counts the optimizer steps.
        exact: Names of the parameters whose gradients always travel as they are.
    """

    def __init__(self, wire_dtype: str, sum_dtype: str, gate: Gate, exact: Sequence[str]) -> None:
        self._schedule = WireSchedule(wire_dtype)
        self._sum_dtype = sum_dtype
        self._gate = gate
        self._exact = frozenset(exact)
        self._backwards = 0
        self._steps_before = 0
        self._told: Callable[[], int] | None = None

    @property
    def sum_in_f64(self) -> bool:
        """Whether everything is added up in fp64."""
        return self._sum_dtype == "fp64"

    def is_exact(self, name: str, is_complex: bool) -> bool:
        """Whether a parameter's gradient is never rounded, where others are."""
        return self._schedule.rounds and (is_complex or name in self._exact)

    def check_agreement(self, session: Session) -> None:
        """Compares the arguments over all ranks. Collective.

        Raises:
            MismatchError: On every rank; names two ranks and what they were given.
        """
        own = {
            "wire_dtype": self._schedule.text,
            "sum_dtype": self._sum_dtype,
            "full_precision": sorted(self._exact),
        }
        records = session.communicator.exchange(pickle.dumps(own))
        everybody: list[dict[str, Any]] = [pickle.loads(record) for record in records]
        for rank, other in enumerate(everybody):
            for name, value in everybody[0].items():
                if other[name] != value:
                    raise MismatchError(
                        f"Rank {session.rank}: {name} is {value!r} on rank 0, but {other[name]!r} "
                        f"on rank {rank}. Give all ranks the same."
                    )

    def announce(self, core: Any) -> None:
        """Tells the core, before the first gradient of a round."""
        if self._schedule.rounds:
            core.set_wire(self._schedule.at(self._steps()))

    def count_backward(self) -> None:
        """Counts a reduced backward."""
        self._backwards += 1

    def set_step(self, step: int | Callable[[], int]) -> None:
        """See GradientReducer."""
        if callable(step):
            self._told = step
            return
        fits = isinstance(step, int) and not isinstance(step, bool) and step >= 0
        require(fits, "step", step, "a number of steps, or a function that tells it")
        self._told = None
        self._steps_before = step - self._own_steps()

    def _own_steps(self) -> int:
        return self._gate.steps if self._gate.optimizers else self._backwards

    def _steps(self) -> int:
        return self._steps_before + self._own_steps() if self._told is None else self._told()


class SteppedPrecision:
    """The part of GradientReducer that is told where in the training it is."""

    _precision: ReductionPrecision

    def set_step(self, step: int | Callable[[], int]) -> None:
        """Tells how many optimizer steps the training has made, for schedules of `wire_dtype`.

        Without it the reducer counts from 0: the steps of its optimizers, each of which counts,
        or the reduced backwards where it has none. Call it on all ranks after loading a checkpoint,
        between two steps; from there on the reducer counts again.

        Args:
            step: The number, or a function that tells it at each reduction.

        Raises:
            TypeError: It is neither.
        """
        self._precision.set_step(step)


__all__ = ["ReductionPrecision", "SteppedPrecision"]
