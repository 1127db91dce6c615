"""How ranks that one launcher started on this host find each other without an address.

Rank 0 opens a store on the loopback interface, on a port of the kernel's choice, and tells the port
through an abstract unix socket. The socket's name is made from the launcher: its process id
together with its start time belongs to one job only, so two jobs on one host never meet, and
nothing is left behind, however the job ends. Both ends make sure that the other runs as our user.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from hvd_strategy.errors import HvdError
from hvd_strategy.roll_call import Patience, namespace
from hvd_strategy.world import World

__all__ = ["LAUNCHERS", "launch_identity", "listen_on_loopback", "store_of_launcher"]

# Their processes have one parent per job and host, whose descendants know each other by it.
LAUNCHERS = ("openmpi", "mpich", "slurm", "pmix", "horovod")
# Names of launcher processes as the kernel keeps them (at most 15 characters).
_LAUNCHER_PROCESS = re.compile(
    r"hydra_.*|mpi(run|exec)(\..*)?|mpispawn|ort(erun|ed)|prt(erun|ed|e)|srun|slurmstepd.*"
    r"|horovodrun|hvdrun"
)
# What launchers say about the job; the same on all of its ranks wherever it is set.
_JOB_VARIABLES = (
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "PALS_APID",
    "FLUX_JOB_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def store_of_launcher(world: World, launcher: str, timeout: timedelta, warn_after: float) -> Store:
    """Opens the job's store. Collective over the ranks of the job, which are all on this host.

    Args:
        world: More than one rank.
        launcher: One of `LAUNCHERS`.
        timeout: Deadline of the meeting, and the timeout of the store.
        warn_after: Seconds after which it is printed who is missing; 0 for never.

    Raises:
        HvdError: The ranks are on several hosts, the launcher cannot be found, or another job is in
            the way.
        HvdTimeoutError: Ranks are missing at the deadline.
    """
    if not world.one_host:
        raise HvdError(
            f"Rank {world.rank} on host {socket.gethostname()} is one of {world.local_size} ranks "
            f"here, of {world.size} in all: jobs over several hosts are not supported yet."
        )
    identity = launch_identity(launcher)
    if not identity:
        raise HvdError(
            f"Rank {world.rank} of {world.size} finds no launcher among its parent processes, by "
            "which the ranks could meet: set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, "
            "the same for all ranks."
        )
    name = f"\0hvd-meet-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    if world.rank == 0:
        listener = listen_on_loopback()
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            world.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        _tell_port(name, port, world.size, timeout.total_seconds(), warn_after)
        return store
    port = _ask_port(name, world.rank, world.size, timeout.total_seconds(), warn_after)
    return TCPStore(
        "127.0.0.1", port, world.size, is_master=False, timeout=timeout, wait_for_workers=False
    )


def listen_on_loopback() -> socket.socket:
    """A socket for torch's store, on a port of the kernel's choice."""
    # Left to itself torch's server listens on every interface.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


# The greeting on the abstract socket: magic, rank, size. The answer: a port, or 0 for "not you".
_HELLO = struct.Struct("!8sii")
_ANSWER = struct.Struct("!8si")
_MAGIC = b"hvdmeet1"


def _tell_port(name: str, port: int, size: int, timeout: float, warn_after: float) -> None:
    missing = set(range(1, size))
    patience = Patience(
        timeout,
        warn_after,
        lambda: f"rank 0's wait for ranks {', '.join(map(str, sorted(missing)))} of {size}",
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise HvdError(
                f"Process {os.getpid()} is rank 0 of {size}, but another process of the same "
                "launcher claims to be rank 0 as well. Set MASTER_ADDR=127.0.0.1 and MASTER_PORT "
                "to a free port, another one for each job."
            ) from error
        listener.listen(1024)
        while missing:
            listener.settimeout(0.1)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                patience.pause()
                continue
            with connection:
                # A stranger who says nothing must not hold up the others for long.
                connection.settimeout(5)
                try:
                    hello = _receive(connection, _HELLO) if _same_user(connection) else None
                    fits = hello is not None and hello[0] == _MAGIC and hello[2] == size
                    rank = hello[1] if fits and hello is not None else -1
                    connection.sendall(_ANSWER.pack(_MAGIC, port if rank in missing else 0))
                    missing.discard(rank)
                except OSError:
                    continue


def _ask_port(name: str, rank: int, size: int, timeout: float, warn_after: float) -> int:
    patience = Patience(
        timeout,
        warn_after,
        lambda: (
            f"rank {rank}'s wait for rank 0 of {size} on this host (if the launcher starts ranks "
            "through wrappers of its own, set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port)"
        ),
    )
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(min(patience.remaining(), 30), 0.1))
            try:
                connection.connect(name)
                if not _same_user(connection):
                    raise HvdError(
                        f"Rank {rank} found a process of another user where rank 0 should listen. "
                        "All ranks must run as one user; if they do, set MASTER_ADDR=127.0.0.1 and "
                        "MASTER_PORT to a free port."
                    )
                connection.sendall(_HELLO.pack(_MAGIC, rank, size))
                answer = _receive(connection, _ANSWER)
            except OSError:
                answer = None  # rank 0 is not there yet, or has just gone
        if answer is not None and answer[0] == _MAGIC:
            if answer[1] > 0:
                return int(answer[1])
            raise HvdError(
                f"Rank 0 turned this process away, which claims to be rank {rank} of {size}: the "
                "rank is taken, or rank 0 knows of another number of ranks. Two jobs have the same "
                "launcher: set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, another one "
                "for each job."
            )
        patience.pause()


def _receive(connection: socket.socket, layout: struct.Struct) -> tuple[Any, ...] | None:
    data = b""
    while len(data) < layout.size:
        part = connection.recv(layout.size - len(data))
        if not part:
            return None
        data += part
    return layout.unpack(data)


def _same_user(connection: socket.socket) -> bool:
    # Abstract sockets have no permissions; the kernel tells who is at the other end.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("=iII", credentials)
    return bool(uid == os.geteuid())


def launch_identity(launcher: str) -> str:
    """What is the same for all ranks of a job on this host and different for every other job.

    Empty where nothing of the kind is known: the parent process is a shell or test runner, which
    may have started many jobs.
    """
    if launcher not in LAUNCHERS:
        return ""
    process = next((p for p in _ancestors() if _LAUNCHER_PROCESS.fullmatch(p[1])), None)
    if process is None:
        if launcher == "horovod":
            return ""
        # slurmstepd runs as root and may be hidden from us, but job and step identify the job. An
        # MPI launcher that we do not know by name is our parent.
        unknown = (0, "", "")
        process = unknown if launcher == "slurm" else next(_ancestors(), unknown)
    # Containers may share the network, and so the abstract sockets, but not the process ids.
    parts = [str(os.geteuid()), namespace("pid"), str(process[0]), process[2]]
    parts += [f"{name}={os.environ[name]}" for name in _JOB_VARIABLES if name in os.environ]
    return " ".join(parts)


def _ancestors() -> Iterator[tuple[int, str, str]]:
    """Parent, its parent and so on: process id, name, start time in clock ticks since boot."""
    pid = os.getppid()
    while pid > 0:
        try:
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                text = file.read()
        except OSError:
            return
        # The name stands in brackets and may itself contain brackets and blanks.
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        yield pid, head.partition("(")[2], fields[19]
        pid = int(fields[1])
