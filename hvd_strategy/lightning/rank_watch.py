"""Watches the ranks that a notebook started: their output, their reports, and their end.

What rank 0 prints is shown as it is, so that a progress bar moves in the cell; what another rank
prints is shown line by line, with its rank. It is written through `sys.stdout` and `sys.stderr`,
which a notebook replaces to find the cell that it belongs to: a child that wrote to the inherited
descriptors would write to the kernel's log.

A rank reports on a pipe how its run ended. If one fails, the others hear of it through the engine;
they get a moment to end by themselves, and then are killed with all that they started.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvd_strategy.errors import RankFailedError

__all__ = ["RankReport", "RankWatch"]

_TICK_SECONDS = 0.05
# How long the other ranks may take to end after one has failed, and all ranks after an interrupt.
_PATIENCE_SECONDS = 3.0
_INTERRUPT_PATIENCE_SECONDS = 10.0
# A rank that ended may have left a child which prints on and on.
_DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class RankReport:
    """How a rank's run ended.

    Attributes:
        done: whether it came to its end.
        text: type and text of the exception otherwise.
        traceback: its traceback.
        consequence: whether it is only what another rank's failure led to.
        exception: the exception itself, pickled, or None where that is impossible.
    """

    done: bool
    text: str = ""
    traceback: str = ""
    consequence: bool = False
    exception: bytes | None = None


class _Stream:
    """One stream of one rank, on its way to the cell.

    Args:
        rank: the rank.
        name: "stdout" or "stderr".
        unfinished: streams of this process on which rank 0 has begun a line; shared by all ranks.
    """

    def __init__(self, rank: int, name: str, unfinished: set[str]) -> None:
        self._rank = rank
        self._name = name
        self._unfinished = unfinished
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""

    def feed(self, data: bytes) -> None:
        text = self._decoder.decode(data, final=not data)
        if self._rank > 0:
            *lines, self._line = (self._line + text).split("\n")
            if not data and self._line:
                lines.append(self._line)
            text = "".join(f"{self._with_rank(line)}\n" for line in lines)
            if text and self._name in self._unfinished:
                text = f"\n{text}"  # below rank 0's progress bar, not behind it
        if text:
            stream = getattr(sys, self._name)
            stream.write(text)
            stream.flush()
            if text.endswith("\n"):
                self._unfinished.discard(self._name)
            else:
                self._unfinished.add(self._name)

    def _with_rank(self, line: str) -> str:
        prefix = f"[rank {self._rank}]"
        return line if line.startswith(prefix) or not line.strip() else f"{prefix} {line}"


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    record: bytearray = field(default_factory=bytearray)
    report: RankReport | None = None
    ended: bool = False
    # When it was known to have failed, by its report or by its end.
    failed_at: float | None = None
    killed: bool = False  # by us

    @property
    def done(self) -> bool:
        return self.report is not None and self.report.done

    def take(self, data: bytes) -> None:
        """Takes a part of the report: its length in eight bytes, then the pickle."""
        self.record += data
        size = int.from_bytes(self.record[:8], "little") + 8
        if self.report is None and len(self.record) == size > 8:
            self.report = pickle.loads(self.record[8:])
            if not self.done:
                self.failed_at = time.monotonic()


class RankWatch:
    """The ranks of one run; `end` leaves nothing of them, whatever happened before."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._report_pipes: list[int] = []
        self._unfinished: set[str] = set()

    def add(self, number: int, process: subprocess.Popen[bytes], reports: int) -> None:
        """Watches a process that has just been started; closes `reports` in the end.

        Args:
            number: its rank.
            process: the leader of a process group, with pipes for stdout and stderr.
            reports: descriptor of the pipe on which it sends its `RankReport`.
        """
        rank = _Rank(number, process)
        self._ranks.append(rank)
        self._report_pipes.append(reports)
        self._register(reports, rank.take)
        for name in ("stdout", "stderr"):
            stream = _Stream(number, name, self._unfinished)
            self._register(getattr(process, name).fileno(), stream.feed)

    def wait(self) -> None:
        """Returns when all ranks have done their work and ended.

        Raises:
            RankFailedError: a rank failed; about the one that failed first.
        """
        while not self._all_ended():
            self._look()
            failures = [rank.failed_at for rank in self._ranks if rank.failed_at is not None]
            if failures and time.monotonic() > min(failures) + _PATIENCE_SECONDS:
                self._kill()
        self._drain()
        if not all(rank.done for rank in self._ranks):
            raise _error([rank for rank in self._ranks if not rank.done])

    def interrupt(self) -> None:
        """Passes Ctrl-C on, and waits for the ranks to end; not for ever."""
        self.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _INTERRUPT_PATIENCE_SECONDS
        with contextlib.suppress(KeyboardInterrupt):  # whoever repeats it does not want to wait
            while not self._all_ended() and time.monotonic() < deadline:
                self._look()
            self._drain()

    def send_signal(self, signum: signal.Signals) -> None:
        """Sends a signal to all ranks that run."""
        for rank in self._ranks:
            if not rank.ended:
                rank.process.send_signal(signum)

    def end(self) -> None:
        """Kills what still runs and closes the pipes."""
        self._kill()
        self._selector.close()
        for descriptor in self._report_pipes:
            os.close(descriptor)
        for rank in self._ranks:
            for pipe in (rank.process.stdout, rank.process.stderr):
                assert pipe is not None
                pipe.close()

    def _all_ended(self) -> bool:
        return all(rank.ended for rank in self._ranks)

    def _register(self, descriptor: int, feed: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, feed)

    def _look(self) -> None:
        """Takes what came within a moment, and notes who has ended."""
        if self._selector.get_map():
            self._read(_TICK_SECONDS)
        else:
            time.sleep(_TICK_SECONDS)
        for rank in self._ranks:
            # Not waited for yet, so that nobody else gets the number of its process group.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if not rank.ended and os.waitid(os.P_PID, rank.process.pid, flags) is not None:
                self._drain()
                self._bury(rank)

    def _read(self, seconds: float) -> bool:
        """Reads once what is there; returns whether that was anything."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fd)
            key.data(data)
        return bool(ready)

    def _drain(self) -> None:
        """Reads what the pipes hold. Their end may not come: a rank's children have them too."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and self._read(0) and time.monotonic() < deadline:
            pass

    def _kill(self) -> None:
        for rank in self._ranks:
            if not rank.ended:
                rank.killed = True
                self._bury(rank)

    def _bury(self, rank: _Rank) -> None:
        if not rank.done:
            # With its DataLoader workers, which have nobody to work for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()
        rank.ended = True
        if not rank.done and rank.failed_at is None:
            rank.failed_at = time.monotonic()


def _error(failed: list[_Rank]) -> RankFailedError:
    """The error about the rank whose failure led to that of the others."""

    def is_consequence(rank: _Rank) -> bool:
        return rank.killed or (rank.report is not None and rank.report.consequence)

    first = min(failed, key=lambda rank: (is_consequence(rank), rank.failed_at or 0.0))
    if first.report is None:
        return RankFailedError(f"rank {first.number} (pid {first.process.pid}) {_end_of(first)}")
    error = RankFailedError(
        f"rank {first.number} failed: {first.report.text}\n\n"
        f"Rank {first.number}'s traceback:\n{first.report.traceback}"
    )
    if first.report.exception is not None:
        with contextlib.suppress(Exception):  # of a class that only the rank can import, say
            error.__cause__ = pickle.loads(first.report.exception)
    return error


def _end_of(rank: _Rank) -> str:
    status = rank.process.returncode
    if status >= 0:
        return (
            f"ended with exit status {status} before its work was done. What it printed tells why."
        )
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ""
    if -status == signal.SIGKILL:
        hint = " The kernel kills processes in that way when memory runs out."
    return f"was killed by {name} before its work was done.{hint}"
