"""The periodic comparison of the replicas in a Trainer's run."""

from __future__ import annotations

from typing import Any

from torch import nn

from hvd_strategy._private_api import normalization_layers
from hvd_strategy.consistency import check_consistency, named_state
from hvd_strategy.log import FOR_ALL_RANKS, get_logger
from hvd_strategy.session import Session

_log = get_logger(__name__)


class ReplicaCheck:
    """Compares the replicas every so many optimizer steps, and once more at the end of training.

    Running statistics of normalization layers are not compared: between two validations each rank
    has those of its own data, and rank 0's count.

    Args:
        trainer: Its module and optimizers are compared.
        session: The ranks.
        every_n_steps: Optimizer steps between two comparisons.
        on_divergence: see `hvd_strategy.check_consistency`.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        every_n_steps: int,
        on_divergence: str,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._every_n_steps = every_n_steps
        self._on_divergence = on_divergence
        self._next: int | None = None

    def on_batch_start(self) -> None:
        """Compares when enough steps have been made since the last time."""
        step = self._trainer.global_step
        if self._next is None:
            self._next = step + self._every_n_steps
        if step >= self._next:
            self._check()

    def on_train_end(self) -> None:
        """Compares what has not been compared yet."""
        if self._next is not None and self._trainer.global_step > self._next - self._every_n_steps:
            self._check()

    def _check(self) -> None:
        step = self._trainer.global_step
        self._next = step + self._every_n_steps
        module = self._trainer.lightning_module
        statistics = _statistics_of(module)
        tensors = [
            (name, value)
            for name, value in named_state(module, self._trainer.optimizers)
            if name not in statistics
        ]
        repaired = check_consistency(
            self._session,
            tensors,
            on_divergence=self._on_divergence,
            when=f"optimizer step {step}",
        )
        for divergence in repaired:
            _log.warning(
                "after optimizer step %d %s: repaired with the value of rank %d",
                step,
                divergence,
                divergence.reference,
                extra=FOR_ALL_RANKS,
            )


def _statistics_of(module: nn.Module) -> set[str]:
    names: set[str] = set()
    for prefix, layer in module.named_modules():
        if isinstance(layer, normalization_layers()):
            names.update(
                f"{prefix}.{name}" if prefix else name
                for name, _ in layer.named_buffers(recurse=False)
            )
    return names


__all__ = ["ReplicaCheck"]
