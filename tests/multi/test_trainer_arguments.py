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
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

import hvd_strategy
from hvd_strategy import HvdError
from hvd_strategy.lightning import HvdStrategy, strategy_class
from hvd_strategy.lightning.class_tree import class_tree
from hvd_strategy.lightning.pytorch_lightning import HvdStrategy as OtherHvdStrategy

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
        ({"start_method": "interactive"}, r"start_method='interactive' .* \"popen\", \"fork\""),
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
