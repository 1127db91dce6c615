"""Loss scaling in the same pass as the reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_strategy._private_api import scaler_is_ready_for

if TYPE_CHECKING:
    from hvd_strategy.engine import GradientReducer

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, which works together with a GradientReducer.

        reducer = GradientReducer(model.named_parameters(), optimizer, gradient_norms=True)
        scaler = GradScaler("cpu", reducer=reducer)

    and then as ever: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`.

    The ranks have one scale and skip the same steps: they see the same gradients. Should their
    scales differ at first (a rank that has resumed from elsewhere), the gradients are still right,
    and all ranks have rank 0's scale after the first step. Undoing the scale, the search for inf
    and nan and the norm for clipping take one pass together; with `early=True` and a reducer with
    `gradient_norms=True` none, because the reduction does all of it.

    Checkpoints are interchangeable with torch's (`state_dict`).

    Args:
        device: Type of device, as for torch's.
        init_scale: see torch's.
        growth_factor: see torch's.
        backoff_factor: see torch's.
        growth_interval: see torch's.
        enabled: see torch's.
        reducer: What reduces the gradients. May come later, by `attach`.
        early: Undo the scale in the reduction. What can be read in `p.grad` between `backward` and
            `unscale_` is then the mean without the scale, where torch has the scaled one.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        reducer: GradientReducer | None = None,
        early: bool = False,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._reducer: GradientReducer | None = None
        self._early: Callable[[], bool] = lambda: False
        if reducer is not None:
            self.attach(reducer, lambda: early)

    def attach(
        self, reducer: GradientReducer | None, early: Callable[[], bool] = lambda: False
    ) -> None:
        """Works together with this reducer from now on; with None, without any.

        Args:
            reducer: The reducer.
            early: Asked at each `scale` whether the reduction is to undo it; has to say the same
                on all ranks.
        """
        if self._reducer is not None and self._reducer is not reducer:
            self._reducer.attach_scaler(None)
        self._reducer = reducer
        self._early = early
        if reducer is not None and self._enabled:
            reducer.attach_scaler(self)

    def undoes_early(self) -> bool:
        """Whether the reduction is to undo the scale."""
        return self._early()

    def adopt_scale(self, scale: float) -> None:
        """Takes the scale that the ranks have agreed on, where theirs were different."""
        self._have_scale()
        assert self._scale is not None
        assert self._growth_tracker is not None
        self._scale.fill_(scale)
        self._growth_tracker.fill_(0)

    def scale(self, outputs: Any) -> Any:
        """Multiplies the loss (or losses) by the scale; see torch's."""
        scaled = super().scale(outputs)
        if self._works_together():
            assert self._reducer is not None
            scale = self.get_scale()
            self._reducer.scale_kept(scale)
            self._reducer.set_scale(scale)
        return scaled

    def _have_scale(self) -> None:
        """Makes torch's state, which begins with the first loss: this rank may have had none."""
        if self._scale is None:
            super().scale(torch.zeros((), device=self._device))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Undoes the scale of the optimizer's gradients; see torch's."""
        if self._works_together():
            self._have_scale()
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer unless a gradient is inf or nan; see torch's."""
        if not self._works_together():
            return super().step(optimizer, *args, **kwargs)
        assert self._reducer is not None
        self._have_scale()
        self._reducer.join(optimizer)
        if self._reducer.unscaled_early and scaler_is_ready_for(self, optimizer):
            # An optimizer that would undo the scale itself finds it undone.
            self.unscale_(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        self._reducer.step_is_over(optimizer)
        return result

    def _works_together(self) -> bool:
        return self._enabled and self._reducer is not None and self._reducer.active

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not self._works_together():
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        assert self._reducer is not None
        if not allow_fp16 and any(
            parameter.grad is not None and parameter.grad.dtype is torch.float16
            for parameter in _parameters_of(optimizer)
        ):
            raise ValueError("Attempting to unscale FP16 gradients.")
        found = self._reducer.unscale_(optimizer, float(inv_scale))
        return {found_inf.device: torch.full_like(found_inf, float(found))}


def _parameters_of(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
