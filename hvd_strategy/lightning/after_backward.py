"""What a Trainer does with gradients between backward and step, with what the reduction knows.

torch's loss scaling takes a pass over the gradients to undo the scale and one to look for inf and
nan, norm clipping one to read and one to write. The reduction has had every value in hand: it can
undo the scale on its way, and knows inf, nan and norm afterwards. That is used where nobody can see
the difference, or have changed the gradients without a trace; otherwise one pass does what is
needed. The values are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_strategy.engine import GradientReducer
from hvd_strategy.grad_scaler import GradScaler
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.replacements import Replacements

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
    """

    def __init__(self, trainer: Any, plugin: Any, tree: ClassTree) -> None:
        self._plugin = plugin
        self._wrapper = tree.pytorch_name("core.optimizer", "LightningOptimizer")
        self._replacements = Replacements()
        mixed = tree.pytorch_name("plugins.precision", "MixedPrecision")
        basic = tree.pytorch_name("plugins.precision", "Precision")
        scaler: Any = getattr(plugin, "scaler", None)
        # Subclasses, of either, do as they like.
        replaceable = type(plugin) is mixed and type(scaler) is torch.amp.GradScaler
        self._scaler = scaler if replaceable and scaler.is_enabled() else None
        self._ours: GradScaler | None = None
        self._clips = type(plugin).clip_grad_by_norm is basic.clip_grad_by_norm
        self._unseen = trainer.lightning_module.automatic_optimization and not _is_looked_at(
            trainer, tree
        )

        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        self._clips_each_step = self._clips and by_norm and bool(trainer.gradient_clip_val)

    @property
    def wants_norms(self) -> bool:
        """Whether the reduction is to look for inf and nan, and to sum squares."""
        return self._unseen and (self._clips_each_step or self._scaler is not None)

    def attach(self, reducer: GradientReducer) -> None:
        """Lets the plugin work with the reducer, until `detach`."""
        if not reducer.active:
            return
        if self._scaler is not None:
            self._ours = _like(self._scaler, self._plugin.device)
            self._ours.attach(reducer, lambda: self._unseen)
            self._replacements.put(self._plugin, "scaler", self._ours)
        if self._clips:

            def clip(optimizer: Any, clip_val: float) -> None:
                # In manual optimization it comes in Lightning's wrapper.
                inner = optimizer.optimizer if isinstance(optimizer, self._wrapper) else optimizer
                reducer.clip_grad_norm_(inner, float(clip_val))

            self._replacements.put(self._plugin, "clip_grad_by_norm", clip)

    def detach(self) -> None:
        """Gives the plugin its own back, with the scale as it is now. Idempotent."""
        self._replacements.detach()
        if self._ours is not None and self._scaler is not None:
            self._scaler.load_state_dict(self._ours.state_dict())
            self._ours.attach(None)
            self._ours = None


def _like(scaler: Any, device: str) -> GradScaler:
    ours = GradScaler(
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
