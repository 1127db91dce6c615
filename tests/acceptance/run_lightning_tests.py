"""Runs Lightning's own strategy tests with our class in DDP's place, and lists what is lost.

    python tests/acceptance/run_lightning_tests.py SOURCES              # what mentions DDP
    python tests/acceptance/run_lightning_tests.py SOURCES strategies/test_ddp.py ...

SOURCES is a source tree of Lightning, of the version that is installed: the one on PyPI has no
tests, so take the repository at the tag of that version. Every test runs twice: with DDP, and with
ours (`hvd_for_ddp.py`). What passes with DDP but not with ours is lost. The known losses stand,
with their reasons, in `lightning_losses.txt`; one that is not there makes this program fail.

Tests that need GPUs or other packages are skipped by Lightning itself, and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KNOWN_LOSSES = HERE / "lightning_losses.txt"

# Their tests are about other strategies, some of which use DDP's name in passing.
OTHER_STRATEGIES = ("fsdp", "deepspeed", "xla", "model_parallel", "single_device")
SECONDS_PER_TEST = 120
TIMEOUT = 3600


@dataclass(frozen=True)
class Result:
    """The outcome of one test, and the last line of what it said."""

    outcome: str  # "passed", "failed" or "skipped"
    message: str = ""


class SourcesError(Exception):
    """The source tree is not what is needed."""


def folder_of_tests(sources: Path) -> Path:
    """The folder of Lightning's tests for `lightning.pytorch`.

    Raises:
        SourcesError: The tree has no tests, or is of another version than the installed package.
    """
    folder = sources / "tests" / "tests_pytorch"
    stated = sources / "src" / "version.info"
    if not folder.is_dir() or not stated.is_file():
        raise SourcesError(
            f"{sources} has no tests/tests_pytorch or no src/version.info: it takes the root of a "
            "source tree of Lightning, as its repository has it."
        )
    theirs, installed = stated.read_text().strip(), version("lightning")
    if theirs != installed:
        raise SourcesError(
            f"{sources} is Lightning {theirs}, and {installed} is installed: take the tag "
            f"{installed}, or install lightning=={theirs}."
        )
    return folder


def files_about_ddp(folder: Path) -> list[str]:
    """Test files that mention DDP, relative to the folder."""
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        if any(other in path.name for other in OTHER_STRATEGIES):
            continue
        text = path.read_text()
        if "DDPStrategy" in text or '"ddp' in text:
            found.append(str(path.relative_to(folder)))
    return found


def run(folder: Path, files: list[str], *, replace_ddp: bool) -> dict[str, Result]:
    """Runs the tests in a process of their own; results by test."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results")
        results.touch()
        command = [sys.executable, "-m", "pytest", "-p", "hvd_for_ddp", "-p", "no:cacheprovider"]
        command += ["-q", "-o", "addopts=", "--continue-on-collection-errors"]
        command += [f"--timeout={SECONDS_PER_TEST}", *files]
        paths = [str(HERE), str(HERE / "children"), str(ROOT), str(folder.parent)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "ACCEPTANCE_RESULTS": str(results),
            "REPLACE_DDP": "1" if replace_ddp else "0",
        }
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        found = read_results(results.read_text())
    # 0 and 1: all tests ran. Otherwise the list is not complete, and must not look as if it were.
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return found


def read_results(text: str) -> dict[str, Result]:
    """Reads what the plugin wrote; a test that failed in any of its phases has failed."""
    found: dict[str, Result] = {}
    for line in text.splitlines():
        entry = json.loads(line)
        if entry["test"] not in found or entry["outcome"] == "failed":
            found[entry["test"]] = Result(entry["outcome"], entry["message"])
    return found


def read_known_losses(text: str) -> dict[str, str]:
    """Reason by test; lines are `test reason`, and `#` begins a comment."""
    known = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            test, _, reason = line.partition(" ")
            if not reason.strip():
                raise ValueError(f"{KNOWN_LOSSES.name}: {test} has no reason")
            known[test] = reason.strip()
    return known


@dataclass(frozen=True)
class Comparison:
    """What came of the tests; every test is in exactly one of the lists."""

    passed: list[str]
    skipped: list[str]
    failed_with_ddp: dict[str, str]  # message by test
    known: dict[str, str]  # reason by test
    unknown: dict[str, str]  # message by test
    stale: list[str]  # known losses that are none any more


def compare(
    ddp: Mapping[str, Result], ours: Mapping[str, Result], known: Mapping[str, str]
) -> Comparison:
    """Sorts the tests. A known loss may leave out a test's parameters, and stands for all then."""
    result = Comparison([], [], {}, {}, {}, [])
    needed, passed = set(), set()
    for test in sorted({*ddp, *ours}):
        before = ddp.get(test, Result("failed", "not run"))
        after = ours.get(test, Result("failed", "not run"))
        names = (test, test.partition("[")[0])
        if after.outcome == "passed":
            result.passed.append(test)
            passed.update(names)
        elif before.outcome == "failed":
            result.failed_with_ddp[test] = before.message
        elif after.outcome == "skipped" and before.outcome == "skipped":
            result.skipped.append(test)
        else:
            entry = next((name for name in names if name in known), None)
            if entry is None:
                result.unknown[test] = after.message
            else:
                needed.add(entry)
                result.known[test] = known[entry]
    result.stale.extend(sorted((passed & set(known)) - needed))
    return result


def report(comparison: Comparison) -> Iterator[str]:
    """The lines that are printed."""
    if comparison.known:
        yield "Lost, for known reasons:"
        for test, reason in comparison.known.items():
            yield f"  {test}\n      {reason}"
    if comparison.unknown:
        yield f"LOST, and not in {KNOWN_LOSSES.name}:"
        for test, message in comparison.unknown.items():
            yield f"  {test}\n      {message}"
    if comparison.failed_with_ddp:
        yield "Fail here with DDP too:"
        for test, message in comparison.failed_with_ddp.items():
            yield f"  {test}\n      {message}"
    if comparison.stale:
        yield f"Not lost any more, to be taken out of {KNOWN_LOSSES.name}:"
        yield from (f"  {test}" for test in comparison.stale)
    lost = len(comparison.known) + len(comparison.unknown)
    yield (
        f"{len(comparison.passed)} passed, {lost} lost ({len(comparison.unknown)} of them "
        f"unknown), {len(comparison.skipped)} skipped by Lightning, "
        f"{len(comparison.failed_with_ddp)} fail with DDP too"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the tests; the exit status is 0 when nothing unknown is lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, help="source tree of Lightning")
    parser.add_argument("tests", nargs="*", help="instead of all that mention DDP")
    args = parser.parse_args(arguments)
    try:
        folder = folder_of_tests(args.sources.resolve())
    except SourcesError as error:
        print(error, file=sys.stderr)
        return 2
    files = args.tests or files_about_ddp(folder)
    if not files:
        print(f"no test in {folder} mentions DDP", file=sys.stderr)
        return 2
    ddp = run(folder, files, replace_ddp=False)
    ours = run(folder, files, replace_ddp=True)
    comparison = compare(ddp, ours, read_known_losses(KNOWN_LOSSES.read_text()))
    print("\n".join(report(comparison)))
    return 1 if comparison.unknown or not comparison.passed else 0


if __name__ == "__main__":
    sys.exit(main())
