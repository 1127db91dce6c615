"""Fresh rank processes, for tests that launch, crash, stop or starve them.

    with start_function(train, ranks=2) as processes:
        processes.wait_for("step 3", rank=1)
        killed = processes.kill(1)
        line = processes.wait_for("rank 1", rank=0, timeout=5)
        assert line.seconds - killed < 1
        assert processes.wait() == [1, -signal.SIGKILL]

Every line a process prints is kept with the time at which it arrived. Leaving the block ends what
still runs, by pid, and fails the test when processes that were supposed to be gone, or abstract
sockets of the engine, outlive the ranks. A rank also dies with the test run: the kernel kills it
when its parent ends (PR_SET_PDEATHSIG).

The ranks find the environment that torchrun makes; the store lives in this process, as it does in
torchrun's agent, so that it survives every rank.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

ROOT = Path(__file__).resolve().parents[2]

# Runs before the real program, in the same process: dies with the parent, and leaves no core file
# where a hung process is aborted for its stack. `exec` keeps both settings.
_STUB = """
import ctypes, os, resource, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    os._exit(1)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.execvp(sys.argv[2], sys.argv[2:])
"""

# Set for every process started here and inherited by all that it starts: how they are found again.
_MARK = "TEST_RANK_PROCESSES"

_LAUNCHER_PREFIXES = (
    "TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "HVD_", "HOROVOD_", "ROLE_",
    "GROUP_", "LOCAL_", "MASTER_",
)  # fmt: skip
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "NODE_RANK", "JSM_NAMESPACE_RANK")

_KILL_DEADLINE = 10.0
_LEFTOVER_DEADLINE = 3.0


@dataclass(frozen=True)
class Line:
    """One line that a rank printed; `seconds` is on the clock of `time.monotonic()`."""

    seconds: float
    rank: int
    stream: str
    text: str


class Process(Protocol):
    """What is used here of `subprocess.Popen`."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @property
    def returncode(self) -> Any: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def start_process(
    command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], cwd: str
) -> Process:
    """Starts a fresh process, in a session of its own, that dies with this one."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _STUB, str(os.getpid()), *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=tuple(pass_fds),
        cwd=cwd,
        start_new_session=True,
    )


@dataclass
class _Stream:
    rank: int
    name: str
    partial: bytearray = field(default_factory=bytearray)
    ended: bool = False


class RankProcesses:
    """Processes, one a rank, that were started together.

    Args:
        commands: the command line of each rank.
        environments: the whole environment of each rank.
        pass_fds: file descriptors that each rank inherits.
        keep: an object that must live as long as the ranks do (their store).
        start: what starts one process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        pass_fds: Sequence[Sequence[int]] | None = None,
        cwd: str | os.PathLike[str] = ROOT,
        keep: object = None,
        start: Callable[..., Process] = start_process,
    ) -> None:
        self.lines: list[Line] = []
        self.keep = keep
        self._mark = uuid.uuid4().hex
        self._sockets_before = set(abstract_sockets())
        self._changed = threading.Condition()
        self._streams: dict[int, _Stream] = {}
        self._stopped = False
        self.processes: list[Process] = []
        self.started = time.monotonic()
        for rank, command in enumerate(commands):
            process = start(
                command,
                {**environments[rank], _MARK: f"{os.environ.get(_MARK, '')}/{self._mark}"},
                pass_fds[rank] if pass_fds else (),
                os.fspath(cwd),
            )
            self.processes.append(process)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                self._streams[pipe.fileno()] = _Stream(rank, name)
        self._wake_reader, self._wake_writer = os.pipe()
        self._reader = threading.Thread(target=self._read_until_stopped, daemon=True)
        self._reader.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    @property
    def returncodes(self) -> list[int | None]:
        """Exit status by rank, negative for a signal; None while the rank runs."""
        return [process.poll() for process in self.processes]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> float:
        """Sends a signal to one rank; returns when, on the clock of `Line.seconds`."""
        sent = time.monotonic()
        self.processes[rank].send_signal(signum)
        return sent

    def output(self, rank: int | None = None, stream: str | None = None) -> str:
        """Everything printed so far (by one rank, on one stream)."""
        self.drain()
        return "".join(
            f"{line.text}\n"
            for line in list(self.lines)
            if rank in (None, line.rank) and stream in (None, line.stream)
        )

    def report(self, since: int = 0) -> str:
        """Exit status and output of every rank, for a failure message."""
        self.drain()
        parts = []
        for rank, process in enumerate(self.processes):
            status = process.poll()
            state = "running" if status is None else f"ended with {status}"
            parts.append(f"rank {rank} (pid {process.pid}, {state})")
            parts += [
                f"  {line.seconds - self.started:8.3f} {line.stream} | {line.text}"
                for line in self.lines[since:]
                if line.rank == rank
            ]
        return "\n".join(parts)

    def wait_for(self, text: str, rank: int | None = None, timeout: float = 60) -> Line:
        """The first line that contains `text`; an AssertionError when it does not come."""
        deadline = time.monotonic() + timeout
        seen = 0
        while True:
            ended = self._ended(rank)
            self.drain()
            with self._changed:
                for line in self.lines[seen:]:
                    if text in line.text and rank in (None, line.rank):
                        return line
                seen = len(self.lines)
            who = "no rank" if rank is None else f"rank {rank} never"
            if ended:
                raise AssertionError(f"{who} printed {text!r} before its end\n{self.report()}")
            if time.monotonic() >= deadline:
                raise AssertionError(f"{who} printed {text!r} in {timeout} s\n{self.report()}")
            with self._changed:
                self._changed.wait(min(0.05, max(0.0, deadline - time.monotonic())))

    def wait(self, timeout: float = 60) -> list[int]:
        """Exit status by rank, once all have ended.

        Ranks that are still there at the deadline are aborted, which makes them print the stack of
        all their threads, and AssertionError carries all output.
        """
        deadline = time.monotonic() + timeout
        hung = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(rank)
        if hung:
            self.abort(hung)
            raise AssertionError(f"ranks {hung} still ran after {timeout} s\n{self.report()}")
        self._settle()
        return [process.returncode for process in self.processes]

    def abort(self, ranks: Sequence[int], patience: float = 3.0) -> None:
        """Ends ranks so that they print the stack of all threads (faulthandler on SIGABRT)."""
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGABRT)
        deadline = time.monotonic() + patience
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[rank].wait(max(0.0, deadline - time.monotonic()))
            self.processes[rank].kill()
            self.processes[rank].wait(_KILL_DEADLINE)
        self._settle()

    def stop(self) -> None:
        """Kills what still runs, the ranks and all that they started; closes the pipes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(_KILL_DEADLINE)
        for pid in self.leftover_processes():
            self._kill_marked(pid)
        if not self._stopped:
            self._stopped = True
            os.write(self._wake_writer, b"x")
            self._reader.join(_KILL_DEADLINE)
            for process in self.processes:
                for pipe in (process.stdout, process.stderr):
                    assert pipe is not None
                    pipe.close()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        self.keep = None

    def leftover_processes(self) -> dict[int, str]:
        """Pid and command line of living processes that the ranks started, the ranks included."""
        found = {}
        sessions = set(self.pids)
        mark = self._mark.encode()
        for pid in _all_pids():
            # A process may end while it is looked at.
            with contextlib.suppress(OSError, ValueError):
                state, session = _state_and_session(pid)
                if state in "ZX":
                    continue
                if session in sessions or mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found[pid] = _command_line(pid)
        return found

    def leftover_sockets(self) -> dict[int, str]:
        """Inode and name of the engine's abstract sockets that appeared since the start.

        Sockets that are held by processes which have nothing to do with these ranks do not count.
        """
        new = {
            inode: name
            for inode, name in abstract_sockets().items()
            if inode not in self._sockets_before
        }
        if not new:
            return {}
        ours = self.leftover_processes()
        owners = _socket_owners(new)
        return {
            inode: name
            for inode, name in new.items()
            if not owners[inode] or owners[inode] & set(ours)
        }

    def assert_nothing_left(self, timeout: float = _LEFTOVER_DEADLINE) -> None:
        """Asserts that neither a process of the ranks nor a socket of the engine is left."""
        deadline = time.monotonic() + timeout
        while True:
            processes, sockets = self.leftover_processes(), self.leftover_sockets()
            if not processes and not sockets:
                return
            if time.monotonic() >= deadline:
                raise AssertionError(
                    f"left behind: processes {processes}, sockets {sockets}\n{self.report()}"
                )
            time.sleep(0.02)

    def drain(self) -> None:
        """Takes in what the ranks have written to their pipes up to now."""
        with self._changed:
            if self._stopped:
                return
            for fd, stream in self._streams.items():
                self._read(fd, stream)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # Where the test itself leaves ranks to be killed here, what they started may need time
            # to notice; only ranks that ended by themselves must have cleaned up.
            if exc_type is None and None not in self.returncodes:
                self.assert_nothing_left()
        finally:
            self.stop()

    def _ended(self, rank: int | None) -> bool:
        processes = self.processes if rank is None else [self.processes[rank]]
        return all(process.poll() is not None for process in processes)

    def _settle(self) -> None:
        """Waits a moment for the ends of the pipes of ranks that have ended."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            self.drain()
            if all(
                stream.ended or self.processes[stream.rank].poll() is None
                for stream in self._streams.values()
            ):
                return
            time.sleep(0.01)

    def _read_until_stopped(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            for fd in self._streams:
                selector.register(fd, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select()]
                with self._changed:
                    for fd in ready:
                        if fd != self._wake_reader and self._read(fd, self._streams[fd]):
                            selector.unregister(fd)
                    self._changed.notify_all()
                if self._wake_reader in ready:
                    return

    def _read(self, fd: int, stream: _Stream) -> bool:
        """Reads all there is; true at the end of the stream. The lock is held."""
        while not stream.ended:
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                break
            now = time.monotonic()
            stream.ended = not data
            stream.partial += data if data else b"\n" if stream.partial else b""
            *complete, rest = bytes(stream.partial).split(b"\n")
            stream.partial = bytearray(rest)
            for text in complete:
                decoded = text.decode(errors="replace")
                self.lines.append(Line(now, stream.rank, stream.name, decoded))
        return stream.ended

    def _kill_marked(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                # Looked at again now that the pid cannot be given to another process unnoticed.
                if pid in self.leftover_processes():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def start_function(
    function: Callable[..., object],
    *args: object,
    ranks: int = 2,
    env: Mapping[str, str | None] | None = None,
    agent_store: bool = True,
) -> RankProcesses:
    """Starts `function(*args)` in fresh processes, one a rank; it must be a module-level function.

    Args:
        env: changes to the environment of all ranks; None removes a variable.
        agent_store: as under torchrun, the store lives in the launcher. Otherwise rank 0 serves it.
    """
    command = [sys.executable, "-m", "tests.faults.processes", payload_of(function, *args)]
    return start_ranks([command] * ranks, env=env, agent_store=agent_store)


def start_script(
    *command: str | os.PathLike[str],
    ranks: int = 2,
    env: Mapping[str, str | None] | None = None,
    agent_store: bool = True,
) -> RankProcesses:
    """Starts `python command...` in fresh processes, one a rank."""
    line = [sys.executable, *(os.fspath(word) for word in command)]
    return start_ranks([line] * ranks, env=env, agent_store=agent_store)


def start_launcher(
    *command: str | os.PathLike[str], env: Mapping[str, str | None] | None = None
) -> RankProcesses:
    """Starts one process (mpirun, torchrun, plain python) in an environment that has no ranks."""
    return RankProcesses(
        [[os.fspath(word) for word in command]], [_changed(clean_environment(), env)]
    )


def start_ranks(
    commands: Sequence[Sequence[str]],
    *,
    env: Mapping[str, str | None] | None = None,
    agent_store: bool = True,
    pass_fds: Sequence[Sequence[int]] | None = None,
    start: Callable[..., Process] = start_process,
) -> RankProcesses:
    """Starts one command a rank, in the environment that torchrun makes for it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # With port 0 the system chooses, and the store is there before the ranks look for it. A store
    # on rank 0 has to bind a port that was only found to be free: tests of rank 0's death need it.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)
    port = store.port
    if not agent_store:
        del store
    environments = [
        _changed(_torchrun_environment(rank, len(commands), port, agent_store), env)
        for rank in range(len(commands))
    ]
    return RankProcesses(
        commands,
        environments,
        pass_fds=pass_fds,
        keep=store if agent_store else None,
        start=start,
    )


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher put there, for ranks of one thread."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def abstract_sockets(prefix: str = "hvd") -> dict[int, str]:
    """Inode and name of the abstract unix sockets whose name starts with `prefix`."""
    found = {}
    for row in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = row.split(None, 7)
        if len(fields) == 8 and fields[7].startswith(f"@{prefix}"):
            found[int(fields[6])] = fields[7][1:]
    return found


def _torchrun_environment(rank: int, size: int, port: int, agent_store: bool) -> dict[str, str]:
    world = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank,
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"tests-{os.getpid()}-{port}",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": agent_store,
    }  # fmt: skip
    return {**clean_environment(), **{name: str(value) for name, value in world.items()}}


def _changed(
    environment: dict[str, str], changes: Mapping[str, str | None] | None
) -> dict[str, str]:
    merged: dict[str, str | None] = {**environment, **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _state_and_session(pid: int) -> tuple[str, int]:
    # The command name in the second field may contain spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[3])


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _socket_owners(inodes: Mapping[int, str]) -> dict[int, set[int]]:
    owners: dict[int, set[int]] = {inode: set() for inode in inodes}
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inode = wanted.get(os.readlink(entry.path))
                    if inode is not None:
                        owners[inode].add(pid)
    return owners


def payload_of(function: Callable[..., object], *args: object) -> str:
    """A call of a module-level function, as text for `call`."""
    return base64.b64encode(
        pickle.dumps((function.__module__, function.__qualname__, args))
    ).decode()


def call(payload: str) -> None:
    """What a process of `start_function` runs."""
    import importlib

    module, name, args = pickle.loads(base64.b64decode(payload))
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    function(*args)


if __name__ == "__main__":
    call(sys.argv[1])
