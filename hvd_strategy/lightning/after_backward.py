"""What a Trainer does with gradients between backward and step, with what the reduction knows.

torch's loss scaling takes a pass over the gradients to undo the scale and one to look for inf and
nan, norm clipping one to read and one to write. The reduction has had every value in hand: it can
undo the scale on its way, and knows inf, nan and norm afterwards. That is used where nobody can see
the difference, or have changed the gradients without a trace; otherwise one pass does what is
needed. The values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_strategy._private_api import scaler_is_ready_for, unscales_by_itself
from hvd_strategy.engine import GradientReducer
from hvd_strategy.grad_scaler import GradScaler
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.lightning.scheduled_precision import scheduled_precision_class

# Who overrides one of these may read gradients before they are unscaled, or write to them.
_LOOKS = ("on_after_backward", "on_before_optimizer_step")
_LOOKS_OF_MODULES = (*_LOOKS, "configure_gradient_clipping", "optimizer_step")


class AfterBackward:
    """The precision plugin's scaler and clipping, for one fit.

    Args:
        trainer: the Trainer, set up for the fit.
        plugin: its precision plugin. Of this one object, the scaler and the method that clips by
            norm are replaced; only where they are torch's and Lightning's own.
        tree: the Lightning package of the Trainer.
        logs_norm: whether the norm is logged at each step.
    """

    def __init__(self, trainer: Any, plugin: Any, tree: ClassTree, logs_norm: bool = False) -> None:
        self._logs_norm = logs_norm
        self._plugin = plugin
        self._wrapper = tree.pytorch_name("core.optimizer", "LightningOptimizer")
        self._replacements = Replacements()
        mixed = tree.pytorch_name("plugins.precision", "MixedPrecision")
        basic = tree.pytorch_name("plugins.precision", "Precision")
        self._scheduled = type(plugin) is scheduled_precision_class(tree.name)
        scaler: Any = getattr(plugin, "loss_scaler" if self._scheduled else "scaler", None)
        # Subclasses, of any of these, do as they like.
        known = self._scheduled or type(plugin) is mixed
        replaceable = known and type(scaler) is torch.amp.GradScaler
        self._scaler = scaler if replaceable and scaler.is_enabled() else None
        self._ours: _TrainersScaler | None = None
        self._clips = type(plugin).clip_grad_by_norm is basic.clip_grad_by_norm
        self._by_hand = not trainer.lightning_module.automatic_optimization
        self._unseen = not self._by_hand and not _is_looked_at(trainer, tree)

        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        self._clips_each_step = self._clips and by_norm and bool(trainer.gradient_clip_val)

    @property
    def wants_norms(self) -> bool:
        """Whether the reduction is to look for inf and nan, and to sum squares."""
        uses = self._clips_each_step or self._logs_norm or self._scaler is not None
        return self._unseen and uses

    def attach(self, reducer: GradientReducer) -> None:
        """Lets the plugin work with the reducer, until `detach`."""
        if not reducer.active:
            return
        if self._scheduled:
            self._plugin.check_agreement(reducer.session)
        if self._scaler is not None:
            self._ours = _like(self._scaler, self._plugin.device)
            # A schedule has phases without a scale.
            self._ours.attach(reducer, lambda: self._unseen and self._plugin.scaler is not None)
            if self._scheduled:
                self._plugin.loss_scaler = self._ours
            else:
                self._replacements.put(self._plugin, "scaler", self._ours)
        if self._by_hand:
            self._replacements.around(self._plugin, "clip_gradients", self._clip_by_hand(reducer))
        if self._clips:

            def clip(optimizer: Any, clip_val: float) -> None:
                reducer.clip_grad_norm_(self._unwrapped(optimizer), float(clip_val))

            self._replacements.put(self._plugin, "clip_grad_by_norm", clip)

    def _unwrapped(self, optimizer: Any) -> Any:
        # In manual optimization it comes in Lightning's wrapper.
        return optimizer.optimizer if isinstance(optimizer, self._wrapper) else optimizer

    def _clip_by_hand(self, reducer: GradientReducer) -> Callable[..., Any]:
        def clip(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            inner = self._unwrapped(optimizer)
            reducer.join(inner)  # this rank may have had no backward
            if (
                self._ours is not None
                and self._plugin.scaler is not None
                and not unscales_by_itself(inner)
            ):
                self._ours.unscale_ahead(inner)
            return original(optimizer, *args, **kwargs)

        return clip

    def detach(self) -> None:
        """Gives the plugin its own back, with the scale as it is now. Idempotent."""
        self._replacements.detach()
        if self._ours is not None and self._scaler is not None:
            self._scaler.load_state_dict(self._ours.state_dict())
            if self._scheduled:
                self._plugin.loss_scaler = self._scaler
            self._ours.attach(None)
            self._ours = None


class _TrainersScaler(GradScaler):
    """Lets gradients be unscaled before Lightning does it, which is in the optimizer's step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ahead: dict[int, int] = {}  # by the id of an optimizer: reductions at that time
        self._only_looks = False

    def unscale_ahead(self, optimizer: Optimizer) -> None:
        """Unscales, unless it is done already; Lightning's `unscale_` then finds it done.

        Raises:
            RuntimeError: torch's, where another backward has added scaled gradients since.
        """
        assert self._reducer is not None
        reductions = self._reducer.reductions
        by_us = self._ahead.get(id(optimizer))
        if by_us == reductions or (by_us is None and not scaler_is_ready_for(self, optimizer)):
            return
        super().unscale_(optimizer)
        self._ahead[id(optimizer)] = reductions

    def unscale_(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._ahead:
            super().unscale_(optimizer)
            return
        del self._ahead[id(optimizer)]
        if scaler_is_ready_for(self, optimizer):
            # The step of another optimizer has made torch forget what it found, not undone it.
            self._only_looks = True
            try:
                super().unscale_(optimizer)
            finally:
                self._only_looks = False

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if self._only_looks:
            inv_scale = torch.ones_like(inv_scale)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def _like(scaler: Any, device: str) -> _TrainersScaler:
    ours = _TrainersScaler(
        device,
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    ours.load_state_dict(scaler.state_dict())
    return ours


def _is_looked_at(trainer: Any, tree: ClassTree) -> bool:
    is_overridden = tree.pytorch_name("utilities.model_helpers", "is_overridden")
    module, of_modules = trainer.lightning_module, tree.pytorch_name("core", "LightningModule")
    # A callback of the other package may be among them, and counts as one that looks.
    of_callbacks = tree.pytorch_name("callbacks", "Callback")
    return any(is_overridden(name, module, of_modules) for name in _LOOKS_OF_MODULES) or any(
        is_overridden(name, callback, of_callbacks)
        for callback in trainer.callbacks
        for name in _LOOKS
    )


__all__ = ["AfterBackward"]
