"""What a run leaves behind in a Trainer and its model, taken from rank 0 to the notebook.

After `fit` in ranks of their own, the notebook's objects are to look as if the run had been here:
weights, metrics, progress (so that a second `fit` goes on), callbacks and loggers with all that
they remember, optimizers (so that `trainer.save_checkpoint` writes a full checkpoint), and the
plain values that training left in the module's attributes, such as a list of losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvd_strategy._private_api import forget_lightning_resume
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.transfer import dump_bytes, load_bytes, module_objects

__all__ = ["RunOutcome", "known_objects", "without_optimizers"]

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def known_objects(trainer: Any) -> dict[str, object]:
    """The objects that Trainer and model consist of, by the same names in notebook and rank."""
    known: dict[str, object] = {
        f"trainer {name}": value
        for name, value in vars(trainer).items()
        if hasattr(value, "__dict__") and name != "state"  # that is sent, as it has become
    }
    known["trainer"] = trainer
    known["strategy"] = trainer.strategy
    known |= {f"callback {i}": callback for i, callback in enumerate(trainer.callbacks)}
    known |= {f"logger {i}": logger for i, logger in enumerate(trainer.loggers)}
    if trainer.datamodule is not None:
        known["datamodule"] = trainer.datamodule
    if trainer.lightning_module is not None:
        known |= module_objects(trainer.lightning_module)
    return known


class RunOutcome:
    """Taken by `take` on rank 0, pickled, and put into the notebook's objects by `restore`."""

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    @classmethod
    def take(
        cls,
        tree: ClassTree,
        trainer: Any,
        state_dict: Mapping[str, Tensor],
        known: Mapping[str, object],
        result: Any,
    ) -> RunOutcome:
        """Collects what a run left.

        Args:
            tree: the Lightning package that the Trainer is from.
            trainer: rank 0's Trainer.
            state_dict: of its module; made on all ranks, because metrics synchronise for it.
            known: `known_objects` from before the run.
            result: what the run returned.
        """
        pieces, failed = {}, {}
        progress_bar = tree.pytorch_name("callbacks", "ProgressBar")
        for key, obj in known.items():
            # A progress bar is about this process's output, and of no use elsewhere.
            if not key.startswith(("callback ", "logger ")) or isinstance(obj, progress_bar):
                continue
            try:
                pieces[key] = dump_bytes(_state_of(obj), known)
            except Exception as error:  # whatever the object's own code raises
                failed[f"{key} ({type(obj).__name__})"] = f"{type(error).__name__}: {error}"
        attributes = {}
        for key, obj in known.items():
            if isinstance(obj, nn.Module):
                attributes[key] = _plain_attributes(obj)
        loops = {name: getattr(trainer, name).state_dict() for name in _LOOPS}
        return cls(
            state_dict=dict(state_dict),
            result=result,
            pieces=pieces,
            failed=failed,
            attributes=attributes,
            loops=loops,
            metrics={name: dict(getattr(trainer, name)) for name in _METRICS},
            state=trainer.state,
            should_stop=trainer.should_stop,
            optimizers=list(trainer.strategy.optimizers),
            lr_schedulers=list(trainer.strategy.lr_scheduler_configs),
        )

    def without_optimizers(self, reason: Exception) -> RunOutcome:
        """The same for optimizers of a kind that cannot be sent."""
        failed = {"the optimizer": f"{type(reason).__name__}: {reason}", **self._parts["failed"]}
        return RunOutcome(
            **{**self._parts, "failed": failed, "optimizers": [], "lr_schedulers": []}
        )

    def restore(self, tree: ClassTree, trainer: Any, known: Mapping[str, object]) -> Any:
        """Puts everything into the notebook's objects; returns what the run returned."""
        parts = self._parts
        warn = tree.pytorch_name("utilities.rank_zero", "rank_zero_warn")
        trainer.state = parts["state"]
        trainer.should_stop = parts["should_stop"]
        fitting = trainer.state.fn == tree.pytorch_name("trainer.states", "TrainerFn").FITTING
        module = trainer.lightning_module
        if module is not None:
            lacking = _load_weights(module, parts["state_dict"])
            if lacking:
                warn(
                    f"Training made tensors that the notebook's {type(module).__name__} has no "
                    f"place for: {', '.join(lacking)}. Make the layers in __init__ or in "
                    "configure_model to have them back."
                )
            # So that trainer.model and trainer.save_checkpoint work, as after a run in here.
            trainer.strategy.connect(module)
        for key, attributes in parts["attributes"].items():
            vars(known[key]).update(attributes)
        for name, state in parts["loops"].items():
            loop = getattr(trainer, name)
            loop.load_state_dict(state)
            forget_lightning_resume(loop)
        for name, values in parts["metrics"].items():
            metrics = getattr(trainer, name)
            metrics.clear()
            metrics.update(values)
        for key, data in parts["pieces"].items():
            _set_state(known[key], load_bytes(data, known))
        for what, why in parts["failed"].items():
            warn(f"What {what} remembers of the run stays in rank 0: it cannot be sent ({why}).")
        if fitting:
            trainer.strategy.optimizers = parts["optimizers"]
            trainer.strategy.lr_scheduler_configs = parts["lr_schedulers"]
        return parts["result"]


@contextmanager
def without_optimizers(strategy: Any) -> Iterator[None]:
    """Ranks make new ones; an earlier run's need not be sent to them."""
    optimizers, schedulers = strategy.optimizers, strategy.lr_scheduler_configs
    strategy.optimizers, strategy.lr_scheduler_configs = [], []
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedulers


def _load_weights(module: nn.Module, state_dict: dict[str, Tensor]) -> list[str]:
    """Copies weights into the module's own tensors; returns the names that it does not have."""
    configure: Any = getattr(module, "configure_model", None)
    if configure is not None and set(state_dict) - set(module.state_dict()):
        configure()
    own = module.state_dict(keep_vars=True)
    for name, value in state_dict.items():
        tensor = own.get(name)
        if isinstance(value, Tensor) and isinstance(tensor, Tensor) and tensor.dtype != value.dtype:
            # Training in another precision leaves a module of that precision.
            tensor.data = tensor.data.to(value.dtype)
    lacking: list[str] = module.load_state_dict(state_dict, strict=False).unexpected_keys
    return lacking


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Public attributes that are plain values: no module, no data set, nothing with a life."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, dict)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return type(value).__module__ in ("builtins", "collections") and all(map(_is_plain, inner))
    return isinstance(value, (*_PLAIN, Tensor)) or type(value).__module__ == "numpy"


def _state_of(obj: Any) -> dict[str, Any]:
    # Not object's own __getstate__, which Python has from 3.11 on.
    own = getattr(type(obj), "__getstate__", None)
    if own is None or own is getattr(object, "__getstate__", None):
        return dict(vars(obj))
    state: dict[str, Any] = obj.__getstate__()
    return state


def _set_state(obj: Any, state: dict[str, Any]) -> None:
    if hasattr(obj, "__setstate__"):
        obj.__setstate__(state)
    else:
        vars(obj).update(state)
