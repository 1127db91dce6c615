"""Trainer(sync_batchnorm=True) against one process that normalizes over the global batch."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from torch import Tensor, nn

from hvd_strategy import SyncBatchNorm
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    FEATURES,
    Outcome,
    Recorder,
    Regression,
    assert_as_single_process,
    assert_ranks_agree,
    fit,
    loader,
    make_trainer,
    outcome,
    own_rank,
    reference,
)


class Normalized(Regression):
    """Its loss in the reference is that of the global batch at once: the mean over equal shares."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)
        )

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return self.rank_loss(inputs, targets, 0, batch_idx)


def layers(model: nn.Module) -> list[type[Any]]:
    return [type(model.body[1]), type(model.body[4])]


def fit_twice(**arguments: Any) -> tuple[Outcome, dict[str, Any]]:
    torch.manual_seed(own_rank())
    model = Normalized()
    recorder = Recorder(
        lambda _, module: layers(module),
        "on_train_start",
        "on_validation_epoch_end",
        "on_train_end",
        "on_test_epoch_end",
    )
    trainer = make_trainer(sync_batchnorm=True, callbacks=[recorder], **arguments)
    trainer.fit(model, loader(48), loader(48))
    seen = {"after fit": layers(model)}
    trainer.test(model, loader(48), verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader(48), loader(48))
    return outcome(trainer, model), {**dict(recorder.seen), **seen}


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_as_one_process_with_the_global_batch(ranks: Ranks) -> None:
    outcomes = ranks(fit, Normalized, 48)
    with pytest.raises(AssertionError):  # without the option the result is another one
        assert_as_single_process(outcomes, reference(Normalized, ranks.size))
    outcomes = ranks(fit_synchronised)
    assert_as_single_process(outcomes, reference(Normalized, ranks.size))


def fit_synchronised(**arguments: Any) -> Outcome:
    return fit(Normalized, sync_batchnorm=True, **arguments)


def test_layers_are_converted_for_the_fit_only(ranks: Ranks) -> None:
    results = ranks(fit_twice)
    assert_ranks_agree([result for result, _ in results])
    for _, seen in results:
        assert seen == {
            "on_train_start": [SyncBatchNorm] * 2,
            "on_validation_epoch_end": [SyncBatchNorm] * 2,
            "on_train_end": [SyncBatchNorm] * 2,
            "after fit": [nn.BatchNorm1d] * 2,
            "on_test_epoch_end": [nn.BatchNorm1d] * 2,
        }


class Own(LayerSync):
    applied = reverted = 0

    def apply(self, model: nn.Module) -> nn.Module:
        self.applied += 1
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.reverted += 1
        return model


def plugin_of_the_user() -> tuple[int, int, list[type[Any]]]:
    plugin = Own()
    model = Normalized()
    trainer = make_trainer(plugins=[plugin], max_epochs=1)
    trainer.fit(model, loader(8))
    return plugin.applied, plugin.reverted, layers(model)


def test_a_plugin_of_the_user_is_left_alone(ranks: Ranks) -> None:
    for applied, reverted, kinds in ranks(plugin_of_the_user):
        assert (applied, reverted) == (1, 1)
        assert kinds == [nn.BatchNorm1d] * 2


def layer_of_the_user() -> list[type[Any]]:
    model = Normalized()
    model.body[4] = SyncBatchNorm(8)
    trainer = make_trainer(max_epochs=1)  # works without the option, too
    trainer.fit(model, loader(8))
    return layers(model)


def test_layers_made_by_the_user(ranks: Ranks) -> None:
    assert ranks(layer_of_the_user) == [[nn.BatchNorm1d, SyncBatchNorm]] * 2


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_the_plugin_replaces_lightnings_own(tree: str) -> None:
    from hvd_strategy.lightning.class_tree import class_tree
    from hvd_strategy.lightning.layer_sync import synchronised_layers

    plugins = importlib.import_module(f"{tree}.plugins")
    ours = synchronised_layers(class_tree(tree), plugins.TorchSyncBatchNorm())
    assert isinstance(ours, plugins.LayerSync)
    assert type(pickle.loads(pickle.dumps(ours))) is type(ours)
    model = nn.Sequential(nn.BatchNorm1d(4))
    assert ours.apply(model) is model
    assert type(model[0]) is SyncBatchNorm
    assert ours.revert(model) is model
    assert type(model[0]) is nn.BatchNorm1d

    class Derived(TorchSyncBatchNorm):
        pass

    for other in (None, ours, Own(), Derived()):
        assert synchronised_layers(class_tree(tree), other) is other
