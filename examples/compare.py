"""Single process, `ddp` and `hvd` side by side: one script, one word changed.

    python examples/compare.py           # about two minutes on two cores
    python examples/compare.py --quick   # fewer steps, one death, and nothing that DDP hangs in

First the same training on the same batches: what the weights end with, how fast, how much memory.
Then four trainings that DDP gets wrong without a word, or never ends. Then `kill -9` of one rank.
The trainings themselves are in `examples/compare_training.py`.

Ends with status 0 only if `hvd` was right everywhere: equal to the single process, the same bits on
both ranks, and the killed rank named by the other one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SCRIPT = Path(__file__).with_name("compare_training.py")
RANKS = 2
MOST_OFF = 1e-6  # from the single process: sums in another order are rounded differently
# Seconds. Starting means importing torch and Lightning in two processes on a machine that may be
# busy. After that, a case takes a second or two; what is known to hang is not waited for as long.
START_DEADLINE = 120.0
CASE_DEADLINE = 60.0
HANG_DEADLINE = 20.0
KILL_DEADLINE = 40.0

TRAINING = "training"
TROUBLES = {
    "unfrozen": "a layer frozen at the start, trained later",
    "plain-backward": "loss.backward() in manual optimization",
    "unused-at-end": "a layer that the last step does not use",
    "unused-on-one-rank": "a layer that one rank does not use in one step",
}
HANGS_DDP = "unused-on-one-rank"  # comes last: nothing can be done in these processes afterwards
KILLS = {
    "endless": "no DataLoader workers",
    "endless-with-worker": "one DataLoader worker on each rank",
}
# Lines of a stack trace, as torch prefixes them.
_TRACE = re.compile(r"\[rank\d+\]: (Traceback|\s)|\s*$")


@dataclass
class Run:
    """What one strategy made of its cases."""

    weights: dict[str, list[np.ndarray]] = field(default_factory=dict)  # by case, then rank
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    trouble: str = ""  # why the cases without weights have none


@dataclass
class Death:
    """What happened after the kill."""

    pid: int = 0  # of the killed rank
    message: str = ""
    message_seconds: float = 0.0
    end_seconds: float | None = None  # None: still running at the deadline
    status: int | None = None
    named: bool = False


class Job:
    """The training script in a session of its own; its output, line by line, with the time."""

    def __init__(self, strategy: str, directory: Path, cases: list[str], epochs: int) -> None:
        command = [sys.executable, str(SCRIPT), "--strategy", strategy]
        command += ["--devices", str(1 if strategy == "auto" else RANKS)]
        command += ["--epochs", str(epochs), "--directory", str(directory), *cases]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of it can be ended, and nothing else
            text=True,
            errors="replace",
        )
        self.lines: list[tuple[float, str]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()

    def said(self, since: float = 0.0) -> list[tuple[float, str]]:
        """Lines since then that are no stack trace."""
        return [
            (when, text) for when, text in self.lines if when >= since and not _TRACE.match(text)
        ]


def train(strategy: str, cases: list[str], epochs: int) -> Run:
    """Runs the cases one after another and collects what each rank left behind."""
    ranks = range(1 if strategy == "auto" else RANKS)
    run = Run()
    with tempfile.TemporaryDirectory() as name, Job(strategy, Path(name), cases, epochs) as job:
        for number, case in enumerate(cases):
            seconds = CASE_DEADLINE if number else START_DEADLINE
            if (strategy, case) == ("ddp", HANGS_DDP):
                seconds = HANG_DEADLINE
            deadline = time.monotonic() + seconds
            files = [Path(name, f"{case}.{rank}.json") for rank in ranks]
            ended = False
            while not all(file.exists() for file in files):
                if ended:
                    said = [text for _, text in job.said()] or ["nothing"]
                    run.trouble = f"died: {said[-1]}"
                    return run
                if time.monotonic() > deadline:
                    run.trouble = f"hung: no end and no message within {seconds:.0f} s"
                    if strategy == "ddp":
                        run.trouble += " (its own timeout is 30 minutes)"
                    return run
                # Looked at before the files are looked for once more.
                ended = job.process.poll() is not None
                time.sleep(0.05)
            run.reports[case] = [json.loads(file.read_text()) for file in files]
            run.weights[case] = [np.load(file.with_suffix(".npy")) for file in files]
    return run


def kill_a_rank(strategy: str, case: str) -> Death:
    """Kills rank 1 in the middle of a training; what does rank 0 say, and when does it end?"""
    death = Death()
    with tempfile.TemporaryDirectory() as name, Job(strategy, Path(name), [case], 1) as job:
        files = [Path(name, f"{case}.{rank}.pid") for rank in range(RANKS)]
        deadline = time.monotonic() + START_DEADLINE
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline or job.process.poll() is not None:
                death.message = "the training did not get under way"
                return death
            time.sleep(0.02)
        time.sleep(0.5)
        death.pid = int(files[1].read_text())
        killed = time.monotonic()
        os.kill(death.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            death.status = job.process.wait(KILL_DEADLINE)
            death.end_seconds = time.monotonic() - killed
        time.sleep(0.2)  # the last lines are on their way
        said = job.said(since=killed)
        if said:
            death.message_seconds = said[0][0] - killed
            death.message = said[0][1]
        death.named = any(f"rank 1 (pid {death.pid})" in text for _, text in said)
    return death


# ---- the report ----------------------------------------------------------------------------------


def apart(weights: list[np.ndarray]) -> float:
    """Largest difference between two ranks."""
    return max(float(np.abs(weights[0] - other).max()) for other in weights)


def off(weights: list[np.ndarray], expected: np.ndarray) -> float:
    """Largest difference of any rank from the single process."""
    return max(float(np.abs(rank - expected).max()) for rank in weights)


def is_right(run: Run, single: Run, case: str) -> bool:
    if case not in run.weights or case not in single.weights:
        return False
    weights = run.weights[case]
    return apart(weights) == 0 and off(weights, single.weights[case][0]) <= MOST_OFF


def show_difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  " + "  ".join([row[0].ljust(widths[0]), *cells])


def training_report(runs: dict[str, Run]) -> Iterator[str]:
    steps = runs["auto"].reports[TRAINING][0]["steps"]
    yield f"1. The same training: {steps} steps of 64 images, two ranks with 32 each"
    yield ""
    rows = [["", "single", "ddp", "hvd"]]
    single = runs["auto"].weights[TRAINING][0]
    present = {name: run for name, run in runs.items() if TRAINING in run.weights}

    def row(title: str, show: Any) -> None:
        rows.append([title, *(show(name) if name in present else "-" for name in runs)])

    row(
        "weights off the single process by",
        lambda name: (
            "" if name == "auto" else show_difference(off(runs[name].weights[TRAINING], single))
        ),
    )
    row(
        "weights of the ranks apart by",
        lambda name: "" if name == "auto" else show_difference(apart(runs[name].weights[TRAINING])),
    )

    def reports(name: str, key: str) -> list[float]:
        return [report[key] for report in runs[name].reports[TRAINING]]

    row("samples/s", lambda name: f"{min(reports(name, 'samples_per_second')):.0f}")
    row("largest resident set of a rank", lambda name: f"{max(reports(name, 'peak_rss')):.0f} MiB")
    row("proportional set of a rank", lambda name: f"{max(reports(name, 'pss')):.0f} MiB")
    yield from table(rows)
    yield ""


def trouble_report(runs: dict[str, Run], troubles: dict[str, str]) -> Iterator[str]:
    yield "2. What DDP gets wrong without a word, or never ends"
    for case, title in troubles.items():
        yield ""
        yield f"  {title}"
        for name in ("ddp", "hvd"):
            run = runs[name]
            if case not in run.weights:
                yield f"    {name}  {run.trouble}"
                continue
            weights = run.weights[case]
            verdict = "right" if is_right(run, runs["auto"], case) else "WRONG, and says nothing"
            if case in runs["auto"].weights:
                distance = show_difference(off(weights, runs["auto"].weights[case][0]))
                verdict += f": {distance} off the single process"
            yield f"    {name}  {verdict}, ranks {show_difference(apart(weights))} apart"
    yield ""


def death_report(title: str, deaths: dict[str, Death]) -> Iterator[str]:
    yield f"  {title}"
    for name, death in deaths.items():
        if death.message:
            yield f"    {name}  after {death.message_seconds:.2f} s: {death.message}"
        else:
            yield f"    {name}  says nothing"
        if death.end_seconds is None:
            yield f"         still running after {KILL_DEADLINE:.0f} s"
        else:
            yield f"         ended after {death.end_seconds:.1f} s with status {death.status}"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without what takes long")
    args = parser.parse_args()
    names = ("torch", "lightning")
    print(f"Two processes of one thread each; {', '.join(f'{n} {version(n)}' for n in names)}")
    print("strategy= is the only word that changes: 'auto' with one device, 'ddp', 'hvd'\n")

    troubles = {case: TROUBLES[case] for case in TROUBLES if not (args.quick and case == HANGS_DDP)}
    epochs = 2 if args.quick else 10
    runs = {name: train(name, [TRAINING, *troubles], epochs) for name in ("auto", "ddp", "hvd")}
    if TRAINING not in runs["auto"].weights:
        raise SystemExit(f"The single process {runs['auto'].trouble}")
    print("\n".join(training_report(runs)))
    print("\n".join(trouble_report(runs, troubles)), flush=True)

    print("3. kill -9 of rank 1 in the middle of a training\n")
    right = all(is_right(runs["hvd"], runs["auto"], case) for case in (TRAINING, *troubles))
    for case in list(KILLS)[: 1 if args.quick else None]:
        victims = ("hvd",) if args.quick else ("ddp", "hvd")
        deaths = {name: kill_a_rank(name, case) for name in victims}
        print("\n".join(death_report(KILLS[case], deaths)), flush=True)
        ours = deaths["hvd"]
        right = right and ours.named and ours.status not in (None, 0)
    print("hvd was right everywhere" if right else "hvd was NOT right everywhere")
    sys.exit(not right)


if __name__ == "__main__":
    main()
