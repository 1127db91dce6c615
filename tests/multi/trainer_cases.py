"""Models, data and runs that the tests of the Trainer's strategy share.

The reference is a Trainer without any strategy, in the test's own process, on the global batches.
Every model computes its loss from `rank_loss`; in the reference its loss is the mean over the ranks
of that, each on the rows that the rank would have had. So what differs between the two is what the
strategy does, and nothing else.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvd_strategy  # noqa: F401  registers the strategy

FEATURES = 6
BATCH = 4  # rows per rank


def own_rank() -> int:
    """Rank of this worker; 0 in the test's own process."""
    return int(os.environ.get("RANK", "0"))


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, FEATURES, generator=generator)
    noise = torch.randn(count, 1, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * noise)


class Regression(LightningModule):
    """Automatic optimization of a small net. Its weights differ from rank to rank at first."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__()
        self.ranks = ranks  # > 0 makes it the reference for that many ranks
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.body(inputs)), targets)

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        if not self.ranks:
            return self.rank_loss(inputs, targets, self.global_rank, batch_idx)
        shares = [
            self.rank_loss(inputs[rank :: self.ranks], targets[rank :: self.ranks], rank, batch_idx)
            for rank in range(self.ranks)
        ]
        return torch.stack(shares).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.body(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


@dataclass
class Outcome:
    """What is compared after a run."""

    state: dict[str, Tensor]
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    global_step: int = 0
    extra: Any = None


def make_trainer(strategy: Any = "hvd", **arguments: Any) -> Trainer:
    # Noise about small data and missing loggers.
    warnings.filterwarnings("ignore", module="lightning")
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, **{**defaults, **arguments})


def loader(count: int, batch: int = BATCH) -> DataLoader:
    return DataLoader(rows(count), batch)


def shuffled_loader(count: int, batch: int) -> DataLoader:
    """In the order that the sampler which Lightning injects gives all ranks together."""
    data = rows(count)
    return DataLoader(data, batch, sampler=DistributedSampler(data, num_replicas=1, rank=0))


def outcome(trainer: Trainer, model: LightningModule, extra: Any = None) -> Outcome:
    optimizer_state = {
        f"{number}.{index}.{key}": value.clone()
        for number, optimizer in enumerate(trainer.optimizers)
        for index, entries in optimizer.state_dict().get("state", {}).items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }
    return Outcome(
        state={name: tensor.clone() for name, tensor in model.state_dict().items()},
        optimizer_state=optimizer_state,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        global_step=trainer.global_step,
        extra=extra,
    )


def fit(model_class: type[Regression], count: int = 48, **arguments: Any) -> Outcome:
    """One fit on this rank, from weights of its own."""
    torch.manual_seed(own_rank())
    model = model_class()
    trainer = make_trainer(**arguments)
    trainer.fit(model, loader(count), loader(count))
    return outcome(trainer, model)


def reference(
    model_class: type[Regression], ranks: int, count: int = 48, **arguments: Any
) -> Outcome:
    """The same fit in one process, on the global batches, from rank 0's weights."""
    torch.manual_seed(0)
    model = model_class(ranks)
    trainer = make_trainer(strategy="auto", devices=1, **arguments)
    trainer.fit(model, shuffled_loader(count, BATCH * ranks), loader(count, BATCH * ranks))
    return outcome(trainer, model)


def assert_ranks_agree(outcomes: list[Outcome]) -> None:
    """Bit-equal parameters, buffers and optimizer state on all ranks."""
    for rank, other in enumerate(outcomes):
        for ours, theirs in (
            (outcomes[0].state, other.state),
            (outcomes[0].optimizer_state, other.optimizer_state),
        ):
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name]), f"{name} differs on rank {rank}"
        assert other.global_step == outcomes[0].global_step


def assert_as_single_process(outcomes: list[Outcome], expected: Outcome) -> None:
    """Equal on all ranks, and to what one process computed."""
    assert_ranks_agree(outcomes)
    first = outcomes[0]
    assert first.global_step == expected.global_step
    assert first.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(
            first.state[name],
            tensor,
            rtol=0,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert first.optimizer_state.keys() == expected.optimizer_state.keys()
    for name, tensor in expected.optimizer_state.items():
        torch.testing.assert_close(
            first.optimizer_state[name],
            tensor,
            rtol=0,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for name, value in expected.metrics.items():
        for result in outcomes:
            assert math.isclose(result.metrics[name], value, rel_tol=1e-5, abs_tol=1e-6), name


class Recorder(Callback):
    """Calls a function at chosen hooks and keeps what it returns, by the hook's name."""

    def __init__(self, look: Any, *hooks: str) -> None:
        self.seen: list[tuple[str, Any]] = []
        for hook in hooks:
            setattr(self, hook, self._hook(hook, look))

    def _hook(self, name: str, look: Any) -> Any:
        def hook(trainer: Trainer, module: LightningModule, *args: Any) -> None:
            self.seen.append((name, look(trainer, module)))

        return hook
