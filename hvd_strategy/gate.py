"""The optimizers of a GradientReducer: each step passes a gate, and is counted.

At the gate a rank joins whose loss had no graph, and gradients are found of parameters that nobody
announced. What was stepped, and in which order, travels with the next backward: ranks that do not
agree on it get an error instead of a sum of two different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from hvd_strategy.engine import GradientReducer

_DIGEST_BITS = 64


class Gate:
    """The optimizers, in the order in which they came.

    Args:
        handles: Filled with the handles of the hooks.

    Attributes:
        optimizers: The optimizers.
        steps: Steps so far.
        digest: Of the numbers of the optimizers that made them, in order.
        last: Number (from 1) of the optimizer that made the last one; 0 before the first.
    """

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles
        self.optimizers: list[Optimizer] = []
        self._flushes_seen: list[int] = []
        self.steps = 0
        self.digest = 0
        self.last = 0
        self._taken_away: dict[int, tuple[int, int]] = {}

    def add(
        self,
        optimizer: Optimizer,
        before_step: Callable[..., Any],
        reducer: GradientReducer,
        flushes: int,
    ) -> None:
        """Watches an optimizer's steps from now on."""
        self.optimizers.append(optimizer)
        self._flushes_seen.append(flushes)
        self._handles.append(optimizer.register_step_pre_hook(before_step))
        # Whoever keeps the optimizer keeps the reducer.
        self._handles.append(_KeptBy(optimizer, reducer))

    def number_of(self, optimizer: Optimizer) -> int:
        """Place of the optimizer among those that were added.

        Raises:
            ValueError: It was not.
        """
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return number
        raise ValueError(
            f"optimizer={type(optimizer).__name__} is not accepted: it takes one that the reducer "
            "was given, at its creation or by add_optimizer."
        )

    def group_of(self, parameter: Tensor) -> int:
        """Number (from 1) of the optimizer that steps the parameter, 0 when none does."""
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                if any(member is parameter for member in group["params"]):
                    return number + 1
        return 0

    def nothing_reduced_since(self, number: int, flushes: int) -> bool:
        """Whether no backward was reduced since the optimizer's last step."""
        return self._flushes_seen[number] == flushes

    def passed(self, number: int, flushes: int) -> None:
        """Counts a step."""
        self._flushes_seen[number] = flushes
        self.steps += 1
        self.last = number + 1
        self.digest = (self.digest * 1_000_003 + self.last) % (1 << _DIGEST_BITS)

    def over(self, number: int, flushes: int) -> None:
        """Says that an optimizer's step is over, made or not: what was reduced is used up."""
        self._flushes_seen[number] = flushes

    def stepped_unseen(self, index: int, version: int) -> bool:
        """Whether an optimizer that is none of these has stepped a parameter.

        To be asked whenever a hook of the user has taken the parameter's gradient away: what was
        written to it since the last time was written by that hook.

        Args:
            index: Number of the parameter.
            version: Grows whenever the parameter is written to.
        """
        before = self._taken_away.get(index, (version, self.steps))
        self._taken_away[index] = (version, self.steps)
        return before[0] != version and before[1] == self.steps

    def clear(self) -> None:
        """Forgets the optimizers."""
        self.optimizers.clear()
        self._flushes_seen.clear()


class _KeptBy:
    """Ties the reducer's life to the optimizer's, through a hook that does nothing."""

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer) -> None:
        def keep(*_: Any, _reducer: GradientReducer = reducer) -> None:
            return None

        self._handle = optimizer.register_step_post_hook(keep)

    def remove(self) -> None:
        self._handle.remove()


def behind_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], gate: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of a step with the gate behind its closure, where the gradients come into being.

    None when there is no closure.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def closure_and_gate() -> Any:
        loss = closure()
        gate()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_gate}
    return (args[0], closure_and_gate, *args[2:]), kwargs


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The argument `optimizer` as a list.

    Raises:
        TypeError: It is none, and not several.
    """
    if optimizer is None:
        return []
    listed = isinstance(optimizer, Iterable) and not isinstance(optimizer, (str, Optimizer))
    optimizers = list(optimizer) if listed else [optimizer]
    for candidate in optimizers:
        if not isinstance(candidate, Optimizer):
            raise TypeError(
                f"optimizer={candidate!r} is not accepted: it takes a torch.optim.Optimizer, or "
                "several of them."
            )
    return optimizers
