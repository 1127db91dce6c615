"""Runs on one Trainer: in any order, with the same model on all ranks whenever anybody can look."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from hvd_strategy import HvdError, MismatchError
from hvd_strategy.lightning import HvdStrategy
from tests.multi.pool import Ranks, RanksFailedError
from tests.multi.trainer_cases import (
    FEATURES,
    Recorder,
    Regression,
    loader,
    make_trainer,
    own_rank,
)


class WithStatistics(Regression):
    """Running statistics, and a buffer of its own that the next step reads."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body.insert(1, nn.BatchNorm1d(8))
        self.register_buffer("average", torch.zeros(FEATURES))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.averages_at_start: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.averages_at_start.append(self.average.clone())
        # Assigned, not written in place: the buffer is another tensor afterwards.
        self.average = 0.5 * self.average + batch[0].mean(0).detach()
        return super().training_step([batch[0] - 0.1 * self.average, batch[1]], batch_idx)


def buffers(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def look_at_buffers(directory: str) -> dict[str, Any]:
    torch.manual_seed(own_rank())
    model = WithStatistics()
    # Lightning's own hooks run before the strategy's; the first step of a validation is where
    # the user's code for a batch begins.
    recorder = Recorder(buffers, "on_validation_batch_start", "on_validation_end", "on_fit_end")
    trainer = make_trainer(callbacks=[recorder], limit_val_batches=1, val_check_interval=2)
    trainer.fit(model, loader(48), loader(8))
    trainer.save_checkpoint(f"{directory}/run.ckpt")
    return {
        "seen": [*recorder.seen, ("checkpoint", buffers(trainer, model))],
        "start": model.averages_at_start,
    }


def test_buffers_are_equal_whenever_anybody_looks(ranks: Ranks, tmp_path: Any) -> None:
    first, second = ranks(look_at_buffers, str(tmp_path))
    assert {hook for hook, _ in first["seen"]} == {
        "on_validation_batch_start",
        "on_validation_end",
        "on_fit_end",
        "checkpoint",
    }
    for (hook, ours), (_, theirs) in zip(first["seen"], second["seen"], strict=True):
        assert ours["body.1.num_batches_tracked"] > 0
        for name, buffer in ours.items():
            assert torch.equal(buffer, theirs[name]), (hook, name)
    assert any(average.any() for average in first["start"])
    for batch, (ours, theirs) in enumerate(zip(first["start"], second["start"], strict=True)):
        assert torch.equal(ours, theirs), batch
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["body.1.running_mean"], first["seen"][-1][1]["body.1.running_mean"])


class AllKindsOfState(Regression):
    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.sixteen_bits = nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.large = nn.Parameter(torch.randn(600, 500))
        for name, buffer in {
            "flags": torch.rand(5) > 0.5,
            "numbers": torch.randint(0, 100, (2, 3)),
            "complex": torch.randn(3, dtype=torch.complex64),
            "wide": torch.randn(2, dtype=torch.float64),
            "nothing": torch.empty(0),
            "expanded": torch.randn(1, 3).expand(4, 3),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "sparse": torch.randn(4, 4).relu().to_sparse(),
        }.items():
            self.register_buffer(name, buffer)


def state_after_start(run: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(own_rank())
    model = AllKindsOfState()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    trainer = make_trainer(limit_train_batches=0, limit_val_batches=0)
    getattr(trainer, run)(model, loader(8))
    return [before, {name: tensor.detach() for name, tensor in model.state_dict().items()}]


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_every_kind_of_state_starts_as_rank_zeros(ranks: Ranks, run: str) -> None:
    results = ranks(state_after_start, run)
    own = results[0][0]
    for _, started in results:
        for name, tensor in own.items():
            assert torch.equal(started[name].to_dense(), tensor.to_dense()), name
    assert not torch.equal(results[1][0]["numbers"], own["numbers"])


def one_trainer(order: list[str]) -> list[Any]:
    torch.manual_seed(own_rank())
    model = Regression()
    trainer = make_trainer(max_epochs=1)
    hooks: list[int] = []
    results: list[Any] = []
    for run in order:
        if run == "fit":
            trainer.fit_loop.max_epochs += 1
            trainer.fit(model, loader(16), loader(16))
        elif run == "predict":
            results.append(torch.cat(trainer.predict(model, loader(16))))
        else:
            results.append(getattr(trainer, run)(model, loader(16), verbose=False))
        assert trainer.model is model
        assert trainer.strategy.reducer is None
        hooks.append(sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()))
    assert hooks == [0] * len(order)
    results.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return results


@pytest.mark.parametrize(
    "order",
    [
        ["fit", "validate", "test", "predict", "fit", "test"],
        ["predict", "test", "fit", "fit", "validate"],
    ],
)
def test_runs_in_any_order(ranks: Ranks, order: list[str]) -> None:
    first, second = ranks(one_trainer, order)
    for name, tensor in first[-1].items():
        assert torch.equal(tensor, second[-1][name])
    for run, ours, theirs in zip([r for r in order if r != "fit"], first, second, strict=False):
        if run == "predict":
            assert ours.shape == theirs.shape == (8, 1)
        else:
            assert ours == theirs


def samplers() -> dict[str, Any]:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Regression(), loader(16), loader(16))
    found = {}
    for name, loaders in (
        ("train", trainer.train_dataloader),
        ("val", trainer.val_dataloaders),
    ):
        sampler = loaders.sampler
        assert isinstance(sampler, DistributedSampler)
        found[name] = (sampler.num_replicas, sampler.rank, list(sampler))
    return found


def test_samplers_are_injected(ranks: Ranks) -> None:
    results = ranks(samplers)
    for name in ("train", "val"):
        assert [result[name][:2] for result in results] == [(2, 0), (2, 1)]
        assert sorted(results[0][name][2] + results[1][name][2]) == list(range(16))
    assert results[0]["val"][2] == list(range(0, 16, 2))


def reset_optimizers() -> dict[str, Tensor]:
    """Optimizers made anew in the middle of a fit, as fine-tuning callbacks do."""

    def again(trainer: Trainer, module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.setup_optimizers(trainer)

    torch.manual_seed(own_rank())
    model = Regression()
    make_trainer(callbacks=[Recorder(again, "on_train_epoch_start")]).fit(model, loader(16))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_new_optimizers_during_a_fit(ranks: Ranks) -> None:
    first, second = ranks(reset_optimizers)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


class InAnotherOrder(Regression):
    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        for name in ("one", "two")[:: 1 - 2 * own_rank()]:
            self.register_module(name, nn.Linear(FEATURES, FEATURES))
            self.register_buffer(f"buffer_{name}", torch.rand(2))

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        return super().rank_loss(self.one(self.two(inputs)), targets, rank, batch_idx)


def registered_in_another_order() -> dict[str, Tensor]:
    torch.manual_seed(own_rank())
    model = InAnotherOrder()
    make_trainer().fit(model, loader(16))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_state_is_matched_by_name(ranks: Ranks) -> None:
    first, second = ranks(registered_in_another_order)
    assert list(first) != list(second)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def rank_dependent_module() -> None:
    model = Regression()
    model.register_buffer("extra", torch.zeros(2 + own_rank()))
    make_trainer().fit(model, loader(8))


def lazy_module() -> None:
    model = Regression()
    model.lazy = nn.LazyLinear(2)
    make_trainer().fit(model, loader(8))


def test_modules_that_differ_are_refused_on_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks(rank_dependent_module)
    for rank in range(2):
        assert MismatchError.__name__ in caught.value.failures[rank]
        assert "'extra': (2,) float32 where rank 1 has 'extra': (3,)" in caught.value.failures[rank]


def test_lazy_modules_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError, match=r"'lazy.bias' is not initialized on rank 0"):
        ranks(lazy_module)


def not_needed() -> list[str]:
    model = Regression()
    strategy = HvdStrategy(find_unused_parameters=True, broadcast_buffers=False)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(model, loader(8))
    trainer.validate(model, loader(8), verbose=False)
    return [type(trainer.strategy).__name__, str(trainer.world_size)]


def test_arguments_that_are_not_needed_are_mentioned_once(ranks: Ranks) -> None:
    assert ranks(not_needed)[1] == ["HvdStrategy", "2"]
    told = [output.count("HvdStrategy(find_unused_parameters=...)") for output in ranks.output]
    assert told == [1, 0]
    assert ranks.output[0].count("HvdStrategy(broadcast_buffers=...)") == 1


def devices(asked: Any) -> tuple[int, int]:
    trainer = make_trainer(devices=asked)
    return trainer.world_size, trainer.num_devices


@pytest.mark.parametrize("asked", ["auto", 1, 2, 3])
def test_the_launcher_decides_how_many_ranks_there_are(ranks: Ranks, asked: Any) -> None:
    assert ranks(devices, asked) == [(2, 2), (2, 2)]
    assert ("Trainer(devices=3) is ignored" in ranks.output[0]) == (asked == 3)


def several_hosts() -> str:
    with pytest.raises(HvdError) as caught:
        make_trainer(num_nodes=2)
    return str(caught.value)


def test_several_hosts_are_refused(ranks: Ranks) -> None:
    assert "num_nodes=2 is not supported" in ranks(several_hosts)[0]
