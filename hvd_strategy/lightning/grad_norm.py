"""The norm of the gradients with which an optimizer steps, for the user and the user's loggers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hvd_strategy._private_api import (
    lightning_log_step,
    replace_lightning_clipping,
    scaler_is_ready_for,
)
from hvd_strategy.engine import GradientReducer
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.replacements import Replacements

KEY = "hvd/grad_norm"


class GradNorm:
    """The norm of the unscaled mean gradients before clipping, of one fit.

    It is taken after the last hook that may change the gradients (`on_before_optimizer_step`), and
    in manual optimization before `clip_gradients`, where that is called. Where the reduction knows
    it, that costs no pass over the gradients.

    Args:
        trainer: the Trainer, set up for the fit.
        plugin: its precision plugin, which clips.
        reducer: what reduces the gradients.
        tree: the Lightning package of the Trainer.
    """

    def __init__(
        self, trainer: Any, plugin: Any, reducer: GradientReducer, tree: ClassTree
    ) -> None:
        self._wrapper = tree.pytorch_name("core.optimizer", "LightningOptimizer")
        self._trainer = trainer
        self._plugin = plugin
        self._reducer = reducer
        # By the id of an optimizer that has not stepped since: reductions at that time, the norm.
        self._measured: dict[int, tuple[int, float]] = {}
        self.value: float | None = None
        self._replacements = Replacements()
        replace_lightning_clipping(self._replacements, plugin, self._measure)

    def detach(self) -> None:
        """Gives the plugin its own functions back. Idempotent."""
        self._replacements.detach()

    def _measure(self, optimizer: Any) -> None:
        # In manual optimization it comes in Lightning's wrapper.
        inner = optimizer.optimizer if isinstance(optimizer, self._wrapper) else optimizer
        self._reducer.join(inner)
        reductions, norm = self._measured.get(id(inner), (None, None))
        if reductions == self._reducer.reductions:
            self.value = norm  # clipped since
            return
        norm = self._reducer.grad_norm(inner)
        scaler = getattr(self._plugin, "scaler", None)
        if (
            scaler is not None
            and scaler.is_enabled()
            and not self._reducer.unscaled_early
            and scaler_is_ready_for(scaler, inner)
        ):
            norm /= scaler.get_scale()  # by an optimizer that undoes the scale itself
        self.value = norm
        self._measured[id(inner)] = (self._reducer.reductions, norm)

    def step_is_over(self, optimizer: Optimizer) -> None:
        """To be called after each optimizer's step: logs, as often as the Trainer logs."""
        self._measured.pop(id(optimizer), None)
        trainer = self._trainer
        step = lightning_log_step(trainer)
        every = trainer.log_every_n_steps
        if not trainer.is_global_zero or not every or (step + 1) % every or self.value is None:
            return
        optimizers = trainer.strategy.optimizers
        key = KEY
        if len(optimizers) > 1:
            key += f"/{next(n for n, known in enumerate(optimizers) if known is optimizer)}"
        for logger in trainer.loggers:
            logger.log_metrics({key: self.value}, step=step)


__all__ = ["GradNorm"]
