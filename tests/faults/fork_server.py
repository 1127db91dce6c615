"""Rank processes within milliseconds: forked from a process that has imported everything.

    with ForkServer() as server, server.start_function(train, ranks=3) as processes:
        ...

Importing torch and Lightning takes seconds per process. Here one process does it, opens no session,
starts no thread, and forks itself for each rank that is asked for. A rank has its own session of
processes, streams and environment, and ends as any Python program does: an exception that leaves
its function leaves the interpreter.

The server dies with the process that started it, and the ranks with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from tests.faults.processes import (
    ROOT,
    Process,
    RankProcesses,
    call,
    clean_environment,
    payload_of,
    start_process,
    start_ranks,
)

_LARGEST_MESSAGE = 1 << 17
_START_SECONDS = 120


class ForkedProcess:
    """A rank that the server has forked; as `subprocess.Popen`, as far as it is needed here."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        # The server may have reaped it a moment ago; its number is not given away that fast.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self, returncode: int) -> None:
        """Called once, when the server has reaped the process."""
        self.returncode = returncode
        self._ended.set()


class ForkServer:
    """A process that forks ranks; see the module's text."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._processes: dict[int, ForkedProcess] = {}
        self._ended_early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._answers: list[int] = []
        self._answered = threading.Condition()
        with theirs:
            self._server: Process = start_process(
                [sys.executable, "-m", "tests.faults.fork_server", str(theirs.fileno())],
                clean_environment(),
                [theirs.fileno()],
                os.fspath(ROOT),
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._next_answer()  # it has imported everything

    def start_function(
        self,
        function: Callable[..., object],
        *args: object,
        ranks: int = 2,
        env: Mapping[str, str | None] | None = None,
        agent_store: bool = True,
    ) -> RankProcesses:
        """Starts `function(*args)` on every rank; see `processes.start_function`."""
        command = [payload_of(function, *args)]
        return start_ranks([command] * ranks, env=env, agent_store=agent_store, start=self._start)

    def close(self) -> None:
        """Ends the server, and with it every rank that still runs."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._server.wait(30)
        self._reader.join(30)
        self._socket.close()
        for pipe in (self._server.stdout, self._server.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], cwd: str
    ) -> Process:
        assert not pass_fds
        readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
        try:
            request = pickle.dumps((command[0], dict(env), cwd))
            socket.send_fds(self._socket, [request], writers)
        finally:
            for fd in writers:
                os.close(fd)
        pid = self._next_answer()
        process = ForkedProcess(pid, *(os.fdopen(fd, "rb", buffering=0) for fd in readers))
        with self._lock:
            self._processes[pid] = process
            if pid in self._ended_early:
                process.end(self._ended_early.pop(pid))
        return process

    def _next_answer(self) -> int:
        with self._answered:
            if not self._answered.wait_for(lambda: self._answers, _START_SECONDS):
                raise AssertionError("the fork server does not answer")
            answer = self._answers.pop(0)
        if answer < 0:
            assert self._server.stderr is not None
            raise AssertionError(f"the fork server ended: {self._server.stderr.read().decode()}")
        return answer

    def _read(self) -> None:
        while True:
            data = self._socket.recv(_LARGEST_MESSAGE)
            kind, pid, returncode = pickle.loads(data) if data else ("started", -1, None)
            if kind == "ended":
                with self._lock:
                    process = self._processes.pop(pid, None)
                    if process is None:
                        self._ended_early[pid] = returncode
                    else:
                        process.end(returncode)
                continue
            with self._answered:
                self._answers.append(pid)
                self._answered.notify_all()
            if not data:
                return


# ---- the server ----------------------------------------------------------------------------------


def _import_everything() -> None:
    import lightning.pytorch
    import torch.distributed
    import torch.utils.data

    import hvd_strategy.lightning
    import tests.faults.soak_job
    from hvd_strategy import GradientReducer

    assert lightning.pytorch.Trainer  # not only on paper: some packages import when asked
    assert torch.utils.data.DataLoader
    assert hvd_strategy.lightning.HvdStrategy
    assert GradientReducer
    assert tests.faults.soak_job.run
    # The ranks end faster when their collector leaves alone what all of them share.
    gc.collect()
    gc.freeze()
    # A thread would not exist in the ranks, and might hold a lock for ever there.
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, threads


def _serve(control: socket.socket) -> Callable[[], None]:
    """Forks ranks until the other side is gone; returns in the ranks only, with what they run."""
    running: dict[int, int] = {}  # pid by pidfd
    control.send(pickle.dumps(("started", 0, None)))
    while True:
        ready, _, _ = select.select([control, *running], [], [])
        for pidfd in ready:
            if pidfd is control:
                continue
            pid = running.pop(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(BrokenPipeError):
                code = os.waitstatus_to_exitcode(status)
                control.send(pickle.dumps(("ended", pid, code)))
        if control not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(control, _LARGEST_MESSAGE, 2)
        if not request:
            raise SystemExit
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for fd in running:
                os.close(fd)
            control.close()
            return _rank(parent, request, fds)
        for fd in fds:
            os.close(fd)
        running[os.pidfd_open(pid)] = pid
        control.send(pickle.dumps(("started", pid, None)))


def _rank(parent: int, request: bytes, fds: list[int]) -> Callable[[], None]:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    for target, fd in zip((1, 2), fds, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    payload, env, cwd = pickle.loads(request)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    return lambda: call(payload)


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.enable()
    _import_everything()
    job: Any = _serve(control)
    job()


if __name__ == "__main__":
    _main()
