"""Strategies made by other code than the user's: command lines, configuration files, pickle.

All in this process; the world is one rank where something is trained.
"""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from hvd_strategy import HvdStrategy
from hvd_strategy.lightning import strategy_class
from hvd_strategy.options import OPTIONS
from hvd_strategy.session import current_session

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}

BY_CLASS_PATH = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: {class_path}
    init_args:
      start_method: spawn
      bucket_cap_mb: 7.5
      timeout: "0:05:30"
      stall_warning_seconds: 0
      find_unused_parameters: false
      broadcast_buffers: null
"""


@pytest.fixture(autouse=True)
def program_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program"])


@pytest.fixture(autouse=True)
def no_session_left() -> Iterator[None]:
    yield
    session = current_session()
    if session is not None:
        session.close()


def command_line(*arguments: str, run: bool = False) -> LightningCLI:
    return LightningCLI(
        BoringModel, run=run, args=list(arguments), seed_everything_default=False,
        save_config_callback=None,
    )  # fmt: skip


def test_command_line_by_name(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainer:\n  accelerator: cpu\n  devices: 2\n  strategy: hvd_spawn\n")
    strategy = command_line("--config", str(config)).trainer.strategy
    assert type(strategy) is HvdStrategy
    assert strategy._options["start_method"] == "spawn"
    overridden = command_line("--config", str(config), "--trainer.strategy", "hvd")
    assert type(overridden.trainer.strategy) is HvdStrategy


@pytest.mark.parametrize(
    "class_path", ["hvd_strategy.HvdStrategy", "hvd_strategy.lightning.HvdStrategy"]
)
def test_command_line_by_class_path(tmp_path: Path, class_path: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(BY_CLASS_PATH.format(class_path=class_path))
    strategy = command_line("--config", str(config)).trainer.strategy
    assert type(strategy) is HvdStrategy
    expected = {
        "start_method": "spawn",
        "bucket_cap_mb": 7.5,
        "timeout": timedelta(minutes=5, seconds=30),
        "stall_warning_seconds": 0.0,
        "stall_abort_seconds": 1800.0,
    }
    assert expected.items() <= strategy._options.items()
    assert strategy._ignored_arguments == ["find_unused_parameters"]


def test_what_the_command_line_prints_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(BY_CLASS_PATH.format(class_path="hvd_strategy.HvdStrategy"))
    with pytest.raises(SystemExit) as end:
        command_line("--config", str(config), "--print_config")
    assert end.value.code in (0, None)
    printed = capsys.readouterr().out
    options = yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]
    assert options["timeout"] == "0:05:30"
    assert options["find_unused_parameters"] is False
    assert options["broadcast_buffers"] is None
    config.write_text(printed)
    strategy = command_line("--config", str(config)).trainer.strategy
    assert strategy._options["timeout"] == timedelta(minutes=5, seconds=30)


@pytest.mark.parametrize(
    "written",
    ["{0: null, 1000: bf16}", "{1000: bf16}", '"0:none,1000:bf16"', '{"0": none, "1000": bf16}'],
)
def test_command_line_with_a_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    text = BY_CLASS_PATH.format(class_path="hvd_strategy.HvdStrategy")
    config = tmp_path / "config.yaml"
    config.write_text(f"{text}      wire_dtype: {written}\n      sum_dtype: fp64\n")
    arguments = ["--config", str(config)]
    strategy = command_line(*arguments).trainer.strategy
    assert strategy._options["wire_dtype"] == "0:none,1000:bf16"
    assert strategy._options["sum_dtype"] == "fp64"
    with pytest.raises(SystemExit):
        command_line(*arguments, "--print_config")
    config.write_text(capsys.readouterr().out)
    assert command_line(*arguments).trainer.strategy._options == strategy._options
    by_name = ["--trainer.strategy", "hvd_strategy.HvdStrategy", "--trainer.strategy.wire_dtype"]
    for value in ("bf16", "0:none,5:fp16", "{0: null, 5: fp16}"):
        options = command_line(*by_name, value, "--trainer.accelerator", "cpu").trainer.strategy
        expected = value if value == "bf16" else "0:none,5:fp16"
        assert options._options["wire_dtype"] == expected


def test_command_line_help_has_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line("--trainer.strategy.help", "hvd_strategy.HvdStrategy")
    shown = capsys.readouterr().out
    for name in OPTIONS.keys() - {"log_level"}:  # for the environment alone
        assert f"--trainer.strategy.{name}" in shown
    assert "how ranks come into being" in shown  # from the docstring


def test_command_line_refuses_a_bad_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(
            "--trainer.strategy", "hvd_strategy.HvdStrategy",
            "--trainer.strategy.start_method", "telepathy",
        )  # fmt: skip
    assert "telepathy" in capsys.readouterr().err


def test_construction_from_a_target_and_its_arguments() -> None:
    """As Hydra does, which this needs nothing of."""
    config = {"_target_": "hvd_strategy.HvdStrategy", "bucket_cap_mb": 3, "start_method": "popen"}
    module, _, name = str(config.pop("_target_")).rpartition(".")
    strategy = getattr(importlib.import_module(module), name)(**config)
    trainer = lightning.pytorch.Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET)
    assert trainer.strategy is strategy
    assert trainer.world_size == 2


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_copies_before_and_after_a_fit(tree: str) -> None:
    pl: Any = importlib.import_module(tree)
    boring = importlib.import_module(f"{tree}.demos.boring_classes").BoringModel
    strategy = strategy_class(tree)(bucket_cap_mb=3, timeout=timedelta(seconds=50))

    def fitted(used: Any) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(0)
        model = boring()
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=used, max_steps=2, limit_val_batches=1, **QUIET
        )
        trainer.fit(model)
        return trainer, model.layer.weight.detach()

    def copies(obj: Any) -> list[Any]:
        return [copy.deepcopy(obj), pickle.loads(pickle.dumps(obj))]

    fresh = copies(strategy)
    trainer, weight = fitted(strategy)
    used = copies(strategy)
    for each in [*fresh, *used]:
        assert type(each) is type(strategy)
        assert each._options == strategy._options
        assert each.session is None
        assert each.reducer is None
    for each in fresh:
        assert torch.equal(fitted(each)[1], weight)
    # Lightning gives a used strategy to no other Trainer; but its own may be copied with it.
    for each in copies(trainer):
        assert each.strategy is not strategy
        each.fit_loop.epoch_loop.max_steps = 4
        each.fit(boring())
        assert each.global_step == 4
        assert each.strategy.session is strategy.session


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_horovod_says_once_what_is_different(tree: str, caplog: pytest.LogCaptureFixture) -> None:
    pl: Any = importlib.import_module(tree)
    boring = importlib.import_module(f"{tree}.demos.boring_classes").BoringModel
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="horovod", max_steps=1, limit_val_batches=0, **QUIET
    )
    assert type(trainer.strategy) is strategy_class(tree)
    model = boring()
    with caplog.at_level("WARNING", logger="hvd_strategy"):
        trainer.fit(model)
        trainer.validate(model, verbose=False)
    said = [text for text in caplog.messages if "horovod" in text]
    assert len(said) == 1
    assert "HorovodStrategy multiplied it by the number of ranks" in said[0]
