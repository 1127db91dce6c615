"""tests/acceptance/run_lightning_tests.py, on a source tree of four tests that is made here."""

from __future__ import annotations

import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.acceptance.run_lightning_tests import (
    KNOWN_LOSSES,
    Result,
    SourcesError,
    compare,
    files_about_ddp,
    folder_of_tests,
    main,
    read_known_losses,
    read_results,
    report,
)

TESTS_ABOUT_DDP = """
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy


class Derived(DDPStrategy):
    pass


def test_same_class_everywhere():
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False)
    assert type(trainer.strategy) is DDPStrategy
    assert isinstance(Derived(), DDPStrategy)


@pytest.mark.parametrize("strategy", [DDPStrategy])
def test_lost(strategy):
    assert strategy.__module__ == "lightning.pytorch.strategies.ddp"


def test_broken():
    raise ArithmeticError("with any class")


@pytest.mark.skip(reason="needs more")
def test_skipped():
    pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "tests_pytorch" / "strategies"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "test_ddp.py").write_text(textwrap.dedent(TESTS_ABOUT_DDP))
    (folder / "test_other.py").write_text("def test_other(): assert False\n")
    (folder / "test_fsdp.py").write_text('NAME = "ddp"\n')
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "version.info").write_text(version("lightning") + "\n")
    return tmp_path


@pytest.mark.timeout(400)  # two runs of pytest, each with an import of Lightning
def test_what_is_lost_is_listed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 1
    printed = capsys.readouterr().out
    assert (
        "1 passed, 1 lost (1 of them unknown), 1 skipped by Lightning, 1 fail with DDP" in printed
    )
    assert "strategies/test_ddp.py::test_lost[DDPStrategy]\n      AssertionError: " in printed
    assert "strategies/test_ddp.py::test_broken\n      ArithmeticError: with any class" in printed


def test_only_the_installed_version(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder_of_tests(tree) == tree / "tests" / "tests_pytorch"
    (tree / "src" / "version.info").write_text("1.9.0")
    assert main([str(tree)]) == 2
    assert f"is Lightning 1.9.0, and {version('lightning')} is installed" in capsys.readouterr().err
    with pytest.raises(SourcesError, match=r"takes the root of a source tree"):
        folder_of_tests(tree / "src")


def test_files_are_those_about_ddp(tree: Path) -> None:
    assert files_about_ddp(folder_of_tests(tree)) == ["strategies/test_ddp.py"]


def test_known_losses() -> None:
    passed, failed, skipped = Result("passed"), Result("failed", "why"), Result("skipped")
    ddp = {"a": passed, "b[1]": passed, "c": passed, "d": failed, "e": skipped, "f": passed}
    ours = {"a": passed, "b[1]": failed, "c": skipped, "d": failed, "e": skipped}
    known = {"a": "not any more", "b": "no wrapper", "d": "fails", "elsewhere": "did not run"}
    found = compare(ddp, ours, known)
    assert found.passed == ["a"]
    assert found.skipped == ["e"]
    assert found.failed_with_ddp == {"d": "why"}
    assert found.known == {"b[1]": "no wrapper"}
    assert found.unknown == {"c": "", "f": "not run"}
    assert found.stale == ["a"]
    lines = list(report(found))
    assert lines[-1].startswith("1 passed, 3 lost (2 of them unknown), 1 skipped by Lightning")
    assert "      no wrapper" in lines[1]


def test_a_test_that_fails_in_any_phase_has_failed() -> None:
    phases = [("a", "passed"), ("a", "failed"), ("b", "failed"), ("b", "passed")]
    text = "".join(
        f'{{"test": "{test}", "outcome": "{outcome}", "message": ""}}\n' for test, outcome in phases
    )
    assert {test: result.outcome for test, result in read_results(text).items()} == {
        "a": "failed",
        "b": "failed",
    }


def test_every_known_loss_has_a_reason() -> None:
    assert len(read_known_losses(KNOWN_LOSSES.read_text())) >= 4
    with pytest.raises(ValueError, match="x::y has no reason"):
        read_known_losses("# comment\nx::y \n")
