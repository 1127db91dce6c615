"""The watch over the ranks of a notebook, with shell commands in the ranks' place."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_strategy.errors import RankFailedError
from hvd_strategy.lightning import rank_watch
from hvd_strategy.lightning.rank_watch import RankReport, RankWatch


def report_command(report: RankReport) -> str:
    data = pickle.dumps(report)
    octal = "".join(f"\\{byte:03o}" for byte in len(data).to_bytes(8, "little") + data)
    return f"printf '{octal}' > /proc/self/fd/$REPORT;"


DONE = report_command(RankReport(done=True))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankWatch]:
    monkeypatch.setattr(rank_watch, "_PATIENCE_SECONDS", 0.3)
    watch = RankWatch()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield watch
    watch.end()
    assert not any(rank.process.poll() is None for rank in watch._ranks)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1  # the selector's own


def start(watch: RankWatch, *commands: str) -> list[int]:
    for number, command in enumerate(commands):
        reports, report = os.pipe()
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**os.environ, "REPORT": str(report)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(report,),
            start_new_session=True,
        )
        os.close(report)
        watch.add(number, process, reports)
    return [rank.process.pid for rank in watch._ranks]


def test_output(watch: RankWatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = "printf 'one\\rtwo'; sleep 0.6; printf '\\rthree\\n\\303'; sleep 0.2; printf '\\251';"
    second = "sleep 0.3; echo four; echo '[rank 1] five' >&2; echo; printf six;"
    start(watch, first + DONE, second + DONE)
    watch.wait()
    shown = capsys.readouterr()
    assert shown.out.startswith("one\rtwo\n[rank 1] four\n\n")
    assert "\rthree\n" in shown.out
    assert shown.out.count("[rank 1] six\n") == 1
    assert shown.out.endswith("é")  # two bytes that came one after the other
    assert shown.err == "[rank 1] five\n"


def test_the_first_failure_is_told_and_the_others_are_ended(watch: RankWatch) -> None:
    consequence = report_command(
        RankReport(done=False, text="RankFailedError: rank 1", consequence=True)
    )
    cause = report_command(
        RankReport(
            done=False,
            text="KeyError: 'a'",
            traceback="in step",
            exception=pickle.dumps(KeyError("a")),
        )
    )
    pids = start(watch, f"{consequence} exit 1", f"sleep 0.2; {cause} exit 1", "sleep 60 & wait")
    with pytest.raises(
        RankFailedError, match=r"rank 1 failed: KeyError: 'a'[^$]*in step"
    ) as caught:
        watch.wait()
    assert isinstance(caught.value.__cause__, KeyError)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("kill -9 $$", "was killed by SIGKILL before.*memory"),
        ("kill -11 $$", "was killed by SIGSEGV before"),
        ("exit 3", "ended with exit status 3 before its work was done"),
        ("exit 0", "ended with exit status 0 before its work was done"),
    ],
)
def test_a_rank_that_ends_without_a_report(watch: RankWatch, end: str, told: str) -> None:
    start(watch, "sleep 60", f"sleep 60 & {end}")
    with pytest.raises(RankFailedError, match=rf"rank 1 \(pid \d+\) {told}"):
        watch.wait()


def test_a_child_that_keeps_the_pipes_is_not_waited_for(watch: RankWatch) -> None:
    started = time.monotonic()
    [pid] = start(watch, f"sleep 30 & {DONE} exit 0")
    watch.wait()
    assert time.monotonic() - started < 20
    os.killpg(pid, 9)  # what a rank that succeeded leaves on purpose is not touched


def test_end_kills_a_whole_rank(watch: RankWatch, tmp_path: Path) -> None:
    [pid] = start(watch, f"trap '' INT TERM; sleep 60 & echo $! > {tmp_path}/child; wait")
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    watch._kill()
    deadline = time.monotonic() + 10
    while any(_runs(process) for process in (pid, child)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
