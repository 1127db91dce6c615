"""Construction of HvdStrategy: what it accepts, refuses and promises."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import typing
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import hvd_strategy
from hvd_strategy import HvdError
from hvd_strategy.lightning import HvdStrategy, strategy_class
from hvd_strategy.lightning.class_tree import class_tree
from hvd_strategy.lightning.pytorch_lightning import HvdStrategy as OtherHvdStrategy
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    FEATURES,
    Regression,
    assert_ranks_agree,
    fit,
    loader,
    make_trainer,
)

TREES = ("lightning.pytorch", "pytorch_lightning")


@pytest.mark.parametrize("tree", TREES)
def test_one_class_per_package(tree: str) -> None:
    found = strategy_class(tree)
    assert found is strategy_class(tree)
    assert issubclass(found, class_tree(tree).pytorch_name("strategies", "DDPStrategy"))
    assert found is {TREES[0]: HvdStrategy, TREES[1]: OtherHvdStrategy}[tree]
    assert pickle.loads(pickle.dumps(found)) is found


def test_public_names() -> None:
    assert hvd_strategy.HvdStrategy is HvdStrategy
    assert HvdStrategy is not OtherHvdStrategy
    with pytest.raises(ValueError, match="tree='pl' is not a Lightning package; it can be"):
        strategy_class("pl")


@pytest.mark.parametrize("tree", TREES)
def test_construction_has_no_side_effect_and_pickles(tree: str) -> None:
    environment, group = dict(os.environ), torch.distributed.is_initialized()
    strategy = strategy_class(tree)(start_method="spawn", bucket_cap_mb=3, static_graph=True)
    assert dict(os.environ) == environment
    assert torch.distributed.is_initialized() == group
    assert hvd_strategy.current_session() is None
    for twin in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert type(twin) is type(strategy)
        assert twin._options == strategy._options


@pytest.mark.parametrize("tree", TREES)
def test_signature_can_be_read_by_a_command_line(tree: str) -> None:
    """As jsonargparse does: every argument named, typed, documented, and with a default."""
    found = strategy_class(tree)
    parameters = list(inspect.signature(found.__init__).parameters.values())[1:]
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    types = typing.get_type_hints(found.__init__)
    document = inspect.getdoc(found)
    assert document is not None
    for parameter in parameters:
        assert parameter.name in types
        assert parameter.default is not parameter.empty
        assert f"\n    {parameter.name}: " in document
    assert (
        types["accelerator"] == class_tree(tree).pytorch_name("accelerators", "Accelerator") | None
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_method": "thread"}, r"start_method='thread' .* \"popen\", \"fork\""),
        ({"bucket_cap_mb": 0}, r"bucket_cap_mb=0.0 is not accepted: it takes a number above 0"),
        ({"timeout": -30}, r"timeout=-30 is not accepted: it takes a datetime.timedelta"),
        ({"stall_abort_seconds": -1}, r"stall_abort_seconds=-1.0 is not accepted"),
        ({"process_group_backend": "tcp"}, r"process_group_backend='tcp' is not accepted"),
        ({"ddp_comm_hook": print}, r"ddp_comm_hook is not accepted: .* wire_dtype"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HvdStrategy(**arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wire_type'"):
        HvdStrategy(wire_type="fp16")  # type: ignore[call-arg]


def test_arguments_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_BUCKET_CAP_MB", "7")
    monkeypatch.setenv("HVD_TIMEOUT", "11")
    assert HvdStrategy()._options["bucket_cap_mb"] == 7
    assert HvdStrategy(bucket_cap_mb=5)._options["bucket_cap_mb"] == 5
    assert HvdStrategy()._options["timeout"] == timedelta(seconds=11)
    monkeypatch.setenv("HVD_START_METHOD", "spawn")
    assert HvdStrategy()._options["start_method"] == "spawn"
    assert HvdStrategy(start_method="fork")._options["start_method"] == "fork"


def test_other_devices_than_cpus_are_refused() -> None:
    strategy = HvdStrategy()
    with pytest.raises(HvdError, match=r"device cuda:0.*Use Trainer\(accelerator='cpu'\)"):
        strategy.parallel_devices = [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("interactive", "expected"), [(True, "NotebookLauncher"), (False, "ScriptLauncher")]
)
def test_start_method_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, interactive: bool, expected: str
) -> None:
    monkeypatch.setattr("lightning.fabric.utilities.imports._IS_INTERACTIVE", interactive)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="hvd", logger=False)
    launcher = trainer.strategy.launcher
    assert launcher is not None
    assert launcher.is_interactive_compatible == interactive
    assert type(launcher).__name__ == expected


def test_subclass_of_ddp() -> None:
    """Other code of Lightning tests for it: sampler injection, torch.compile."""
    trainer = Trainer(accelerator="cpu", devices=2, strategy="hvd", logger=False)
    assert isinstance(trainer.strategy, DDPStrategy)
    assert trainer._accelerator_connector.is_distributed
    assert trainer.strategy.is_distributed
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}


# ---- at the wrong time, or with the wrong module


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_a_second_trainer_with_the_same_strategy(accelerator: str) -> None:
    """Lightning refuses it, so no run can take the gradients of another one away."""
    strategy = HvdStrategy()
    make_trainer(strategy)
    with pytest.raises(MisconfigurationException, match="set through"):
        make_trainer(strategy, accelerator=accelerator)


class Lazy(Regression):
    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.head = torch.nn.LazyLinear(1)


class OnMeta(Regression):
    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.head = torch.nn.Linear(8, 1, device="meta")


def fit_module(module_class: type[LightningModule]) -> str:
    with pytest.raises(HvdError) as caught:
        make_trainer().fit(module_class(), loader(16))
    return str(caught.value)


@pytest.mark.parametrize(
    ("module_class", "what", "advice"),
    [
        (Lazy, "is not initialized on rank", "run a forward with a sample batch first"),
        (OnMeta, "is on the meta device on rank", "materialize the module first"),
    ],
)
def test_modules_without_content(
    ranks: Ranks, module_class: type[LightningModule], what: str, advice: str
) -> None:
    for rank, text in enumerate(ranks(fit_module, module_class, fresh=True)):
        assert text.startswith("'head.")
        assert f"{what} {rank}" in text
        assert advice in text
    assert_ranks_agree(ranks(fit, Regression, fresh=True))


def refused_then_right() -> None:
    """Each rank makes the same mistakes; then everything works, in the same session."""
    session = hvd_strategy.open_session()
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, expected in (
        ({"bucket_cap_mb": -1}, ValueError),
        ({"session": "mine"}, TypeError),
        ({"optimizer": "sgd"}, TypeError),
        ({"force": "yes"}, TypeError),
    ):
        arguments: Any = {"optimizer": optimizer, **wrong}
        with pytest.raises(expected):
            hvd_strategy.GradientReducer(model.named_parameters(), **arguments)
    with pytest.raises(ValueError, match="src=7 is not accepted"):
        session.broadcast(torch.ones(1), src=7)
    with pytest.raises(HvdError, match="timeout"):
        hvd_strategy.open_session(timeout=timedelta(seconds=3))
    assert hvd_strategy.open_session() is session
    reducer = hvd_strategy.GradientReducer(model.named_parameters(), optimizer)
    with pytest.raises(HvdError, match="belongs to another GradientReducer, which has others"):
        hvd_strategy.GradientReducer(list(model.named_parameters())[:1], optimizer)
    model(torch.full((1, FEATURES), float(session.rank))).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((1, FEATURES), 0.5))
    optimizer.step()
    reducer.close()


def test_nothing_is_lost_by_wrong_arguments(ranks: Ranks) -> None:
    ranks(refused_then_right)
