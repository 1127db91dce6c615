"""ScheduledPrecision as an object: arguments, copies, command lines, both Lightning packages."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import hvd_strategy
from hvd_strategy import ScheduledPrecision
from hvd_strategy.lightning import built_class

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "limit_val_batches": 0,
}

SCHEDULE = {0: "64-true", 2: "32-true", 4: "16-mixed"}

AS_YAML = """
trainer:
  accelerator: cpu
  devices: 1
  strategy: {strategy}
  logger: false
  plugins:
    - class_path: {class_path}
      init_args:
        schedule: {schedule}
"""


def test_steps_and_names_as_the_trainer_has_them() -> None:
    plugin = ScheduledPrecision({1000: 16, 0: 64, 10: "32", 20: "bf16"})
    precisions = {step: plugin.precision_at(step) for step in (0, 9, 10, 19, 20, 999, 1000, 10**9)}
    assert list(precisions.values()) == [
        "64-true", "64-true", "32-true", "32-true", "bf16-mixed", "bf16-mixed", "16-mixed",
        "16-mixed",
    ]  # fmt: skip
    assert plugin.precision == "64-true"
    assert plugin.scaler is None


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_one_class_for_each_package(tree: str) -> None:
    found = built_class(tree, "ScheduledPrecision")
    precision = import_module(f"{tree}.plugins.precision")
    assert issubclass(found, precision.MixedPrecision)
    assert found.__name__ == found.__qualname__ == "ScheduledPrecision"
    assert import_module(found.__module__).ScheduledPrecision is found
    if tree == "lightning.pytorch":
        assert hvd_strategy.ScheduledPrecision is found


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("strategy", ["auto", "hvd"])
def test_copies_before_and_after_a_fit(tree: str, strategy: str) -> None:
    pl: Any = import_module(tree)
    boring = import_module(f"{tree}.demos.boring_classes").BoringModel
    plugin = built_class(tree, "ScheduledPrecision")(dict(SCHEDULE))

    def fitted(used: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = boring()
        trainer = pl.Trainer(strategy=strategy, plugins=[used], max_steps=6, **QUIET)
        assert trainer.precision == "64-true"
        trainer.fit(model)
        assert trainer.precision == "16-mixed"
        assert model.layer.weight.dtype is torch.float32
        return model.layer.weight.detach()

    def copies(obj: Any) -> list[Any]:
        return [copy.deepcopy(obj), pickle.loads(pickle.dumps(obj))]

    fresh = copies(plugin)
    weight = fitted(plugin)
    used = copies(plugin)
    for each in fresh:
        assert type(each) is type(plugin)
        assert torch.equal(fitted(each), weight)
    for each in [plugin, *used]:
        assert each.loss_scaler.state_dict() == plugin.loss_scaler.state_dict()
        assert each.state_dict() == {"schedule": SCHEDULE, "precision": "16-mixed"}
    if (session := hvd_strategy.current_session()) is not None:
        session.close()
        torch.distributed.destroy_process_group()


def command_line(*arguments: str) -> LightningCLI:
    return LightningCLI(
        BoringModel,
        run=False,
        args=list(arguments),
        seed_everything_default=False,
        save_config_callback=None,
    )


@pytest.mark.parametrize("strategy", ["auto", "hvd"])
@pytest.mark.parametrize(
    "class_path", ["hvd_strategy.ScheduledPrecision", "hvd_strategy.lightning.ScheduledPrecision"]
)
@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        ("{0: 32-true, 1000: bf16-mixed}", {0: "32-true", 1000: "bf16-mixed"}),
        ("{0: 64, 10: '16'}", {0: "64-true", 10: "16-mixed"}),
    ],
)
def test_configuration_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    class_path: str,
    written: str,
    schedule: dict[int, str],
) -> None:
    monkeypatch.setattr("sys.argv", ["program"])
    config = tmp_path / "config.yaml"
    config.write_text(AS_YAML.format(strategy=strategy, class_path=class_path, schedule=written))
    trainer = command_line("--config", str(config)).trainer
    plugin = trainer.precision_plugin
    assert type(plugin) is ScheduledPrecision
    assert plugin.state_dict()["schedule"] == schedule


def test_command_line_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["program"])
    with pytest.raises(SystemExit):
        command_line("--trainer.plugins.help", "hvd_strategy.ScheduledPrecision")
    shown = capsys.readouterr().out
    for name in ("schedule", "device", "scaler"):
        assert f"--trainer.plugins.{name}" in shown
    assert "precision by the optimizer step" in shown


def test_precision_argument_and_plugin_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="Choose one"):
        lightning.pytorch.Trainer(
            precision="16-mixed", plugins=[ScheduledPrecision({0: 32})], **QUIET
        )
