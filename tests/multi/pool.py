"""Worker processes that live as long as the test run and execute functions as ranks.

A test of two to four ranks then costs milliseconds instead of fresh imports of torch. There is one
group of workers per world size, started when a test first asks for it; each worker has the
environment that torchrun makes, one thread, and torch.distributed's default group on Gloo.

The workers' state is the tests' to share: the session that one test opened is still open in the
next, which is what makes tests fast. `fresh=True` closes it before and after a function. Seeds,
environment and signal handlers are put back after every function, and a group in which anything
went wrong is thrown away: the next test starts a new one.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.faults.processes import RankProcesses, start_ranks

TIMEOUT = 60.0  # seconds one function may take on all ranks
MAX_RANKS = 4
_START_TIMEOUT = 120.0
_STOP_TIMEOUT = 15.0
# Objects, beyond those of torch, that are looked through for garbage after each function.
_MOST_OBJECTS = 50_000

# Once a rank has failed, the others usually wait for it in a collective.
_GRACE_AFTER_FAILURE = 5.0


class RanksFailedError(AssertionError):
    """A function failed on some ranks; `failures` has the text of each of them by rank."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


class WorkerPool:
    """The groups of workers of one test run, by world size."""

    def __init__(self) -> None:
        self._groups: dict[int, _WorkerGroup] = {}
        self._ended: list[RankProcesses] = []

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = TIMEOUT,
        fresh: bool = False,
    ) -> list[Any]:
        """Runs `function(*args)` on ranks 0 to `ranks` - 1; returns their results, by rank.

        Args:
            ranks: the world size, 1 to 4.
            function: a module-level function, found by its name in the workers.
            args: arguments, the same on every rank; they and the results must pickle.
            timeout: seconds until a rank counts as hung.
            fresh: close the engine's session before and after the function.

        Raises:
            RanksFailedError: with the traceback of every rank that raised, the stacks of all
                threads of every rank that hung, and the output of a rank that died.
        """
        __tracebackhide__ = True
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} must be a module-level function")
        group = self.group(ranks)
        healthy = False
        try:
            results = group.call(function, args, timeout, fresh)
            healthy = group.usable
        finally:
            # Also where the test run itself was interrupted in the middle of a call.
            if not healthy:
                self._drop(ranks)
        return results

    def group(self, ranks: int) -> _WorkerGroup:
        """The running workers of one world size, started if need be."""
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"the pool has worlds of 1 to {MAX_RANKS} ranks, not {ranks}")
        if ranks not in self._groups:
            self._groups[ranks] = _WorkerGroup(ranks)
        return self._groups[ranks]

    def close(self) -> list[str]:
        """Ends all workers; returns what was wrong with their end, one text each."""
        problems = []
        for ranks in list(self._groups):
            problems += self._groups[ranks].close()
            self._drop(ranks)
        for processes in self._ended:
            if left := processes.leftover_processes() | processes.leftover_sockets():
                problems.append(f"left behind by workers: {left}")
        return problems

    def _drop(self, ranks: int) -> None:
        group = self._groups.pop(ranks)
        group.kill()
        self._ended.append(group.processes)


class Ranks:
    """What the fixture `ranks` gives a test: a world of `size` ranks to call functions in."""

    def __init__(self, pool: WorkerPool, size: int) -> None:
        self.pool = pool
        self.size = size

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = TIMEOUT,
        fresh: bool = False,
    ) -> list[Any]:
        """Runs `function(*args)` on every rank; see `WorkerPool.run`."""
        __tracebackhide__ = True
        return self.pool.run(self.size, function, *args, timeout=timeout, fresh=fresh)

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = TIMEOUT,
        fresh: bool = False,
    ) -> list[Any]:
        """The same with another number of ranks."""
        __tracebackhide__ = True
        return self.pool.run(ranks, function, *args, timeout=timeout, fresh=fresh)

    @property
    def output(self) -> list[str]:
        """What each rank printed (both streams) during the last call in the world of `size`."""
        return self.pool.group(self.size).output()


class _WorkerGroup:
    """The workers of one world: processes, and a connection to each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.usable = True
        self._first_line = 0
        ours, theirs = zip(*(socket.socketpair() for _ in range(size)), strict=True)
        try:
            self.processes = start_ranks(
                [[sys.executable, "-m", "tests.multi.pool", str(end.fileno())] for end in theirs],
                pass_fds=[[end.fileno()] for end in theirs],
            )
        finally:
            for end in theirs:
                end.close()
        self._connections = [Connection(end.detach()) for end in ours]
        try:
            self._collect(_START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, fresh: bool
    ) -> list[Any]:
        __tracebackhide__ = True
        self._first_line = len(self.processes.lines)
        # Plain pickle: torch teaches that of multiprocessing to send shared memory instead of data.
        request = pickle.dumps((function.__module__, function.__qualname__, args, fresh))
        for connection in self._connections:
            connection.send_bytes(request)
        return self._collect(timeout)

    def output(self) -> list[str]:
        self.processes.drain()
        lines = self.processes.lines[self._first_line :]
        return [
            "".join(f"{line.text}\n" for line in lines if line.rank == rank)
            for rank in range(self.size)
        ]

    def close(self) -> list[str]:
        """Asks the workers to end, and returns what kept them from it."""
        for connection in self._connections:
            try:
                connection.send_bytes(b"")
            except OSError:
                continue  # its exit status says why
        try:
            statuses = self.processes.wait(_STOP_TIMEOUT)
            self.processes.assert_nothing_left()
        except AssertionError as error:
            return [str(error)]
        if any(statuses):
            return [f"workers ended with {statuses}\n{self.processes.report(self._first_line)}"]
        return []

    def kill(self) -> None:
        for connection in self._connections:
            connection.close()
        self.processes.stop()

    def _collect(self, timeout: float) -> list[Any]:
        """One reply of every worker."""
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._connections))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            # A worker's children may hold its end of the connection open: its death is looked for
            # as well.
            wait(list(waiting.values()), min(left, 0.2))
            for rank, connection in list(waiting.items()):
                dead = self.processes.processes[rank].poll() is not None
                if not connection.poll() and not dead:
                    continue
                del waiting[rank]
                try:
                    if not connection.poll():
                        raise EOFError
                    succeeded, usable, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    failures[rank] = self._death(rank)
                    continue
                self.usable &= usable
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = f"raised\n{value}"
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE)
        if waiting:
            # The stacks are in the output below.
            self.processes.abort(list(waiting))
            text = f"gave no answer in {timeout} s"
            if failures:
                text = f"still waited {_GRACE_AFTER_FAILURE} s after another rank had failed"
            failures.update(dict.fromkeys(waiting, f"{text}; its threads are in its output\n"))
        if failures:
            raise RanksFailedError(self._message(failures), failures)
        return [results[rank] for rank in range(self.size)]

    def _death(self, rank: int) -> str:
        status = self.processes.processes[rank].wait(_STOP_TIMEOUT)
        name = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"died with {name}\n"

    def _message(self, failures: dict[int, str]) -> str:
        output = self.output()
        parts = []
        for rank in sorted(failures):
            parts.append(f"rank {rank} of {self.size} {failures[rank]}")
            failures[rank] += output[rank]
        for rank, text in enumerate(output):
            if text:
                parts.append(f"--- output of rank {rank}\n{text}")
        return "\n".join(parts)


def _serve(descriptor: int) -> None:
    """The life of a worker: replies to every request until an empty one, or the pool's end."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    group = distributed.group.WORLD
    # Collecting garbage after every function is cheap once torch itself is exempt.
    gc.collect()
    gc.freeze()
    connection.send_bytes(pickle.dumps((True, True, None)))
    while request := _receive(connection):
        reply = _execute(request)
        gc.collect()
        if len(gc.get_objects()) > _MOST_OBJECTS:
            gc.freeze()  # Lightning, the compiler or other large packages came in
        usable = distributed.is_initialized() and distributed.group.WORLD is group
        connection.send_bytes(pickle.dumps((reply[0], usable, reply[1])))
    _close_session()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _receive(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:
        return b""


def _execute(request: bytes) -> tuple[bool, Any]:
    """Runs one function; returns whether it succeeded, and its result or its traceback."""
    import torch

    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch.manual_seed(0)
    random.seed(0)
    try:
        module, name, args, fresh = pickle.loads(request)
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        if fresh:
            _close_session()
        try:
            result = function(*args)  # type: ignore[operator]
        finally:
            if fresh:
                _close_session()
        pickle.dumps(result)
    except BaseException as error:
        # Without the frame of this function.
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return False, "".join(traceback.format_exception(type(error), error, frames))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        sys.stdout.flush()
    return True, result


def _close_session() -> None:
    """Closes the engine's session, if a test has opened one."""
    module = sys.modules.get("hvd_strategy.session")
    if module is not None and (session := module.current_session()) is not None:
        session.close()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
