"""How the ranks of one job find each other: torch.distributed's default group and its store.

There is one store per job, the one behind torch.distributed's default group. Where the group exists
already we use its store. Where it does not, we make it, because Lightning and others expect it:

* With MASTER_ADDR and MASTER_PORT (torchrun, Lightning, set by hand) the store is there: rank 0
  serves it, except under torchrun, whose agent does, so there is never a second server.
* Ranks that an MPI launcher or `srun` started on one host have no such address; `host_meeting`
  finds the others through the launcher's process.

Nothing here changes `os.environ`.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.util
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

from hvd_strategy import _private_api
from hvd_strategy.errors import HvdError
from hvd_strategy.host_meeting import LAUNCHERS, launch_identity, store_of_launcher
from hvd_strategy.roll_call import Patience, Record, first_line, host_record, roll_call
from hvd_strategy.witness import Witness
from hvd_strategy.world import World, detect_world

__all__ = ["default_group_store"]


class _Process:
    """What this process has opened so far; a forked child starts with nothing of it."""

    def __init__(self) -> None:
        self.store: tuple[object, Store] | None = None  # (where it is, the store)
        # The default group, if we made it. Weak: when a group lives on until the interpreter ends,
        # its threads abort the process now and then.
        self.group: Callable[[], object] = lambda: None
        self.groups_made = 0


_process = _Process()
# What the parent of a fork had: kept, because destroying it would wait for threads that are not
# here.
_inherited: list[_Process] = []
_inherited_group: Callable[[], object] = lambda: None  # noqa: E731


def _after_fork_in_child() -> None:
    global _process, _inherited_group
    _inherited.append(_process)
    _process = _Process()
    if dist.is_available() and dist.is_initialized():
        _inherited_group = weakref.ref(dist.group.WORLD)
        # One reference too many, for ever: the end of the interpreter would destroy the group, and
        # crash where it joins threads that stayed with the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


os.register_at_fork(after_in_child=_after_fork_in_child)


def default_group_store(
    world: World,
    *,
    backend: str,
    timeout: timedelta,
    warn_after: float,
    address: tuple[str, int] | None = None,
    witness: Witness | None = None,
) -> Store:
    """Makes sure that torch.distributed's default group exists, and returns its store. Collective.

    The group stays when a session ends; it is replaced only when we made it and the world changes.

    Args:
        world: More than one rank.
        backend: "auto", which is Gloo, or what the option `process_group_backend` accepts.
        timeout: Deadline of the meeting, and the timeout of the group.
        warn_after: Seconds after which it is printed who is missing; 0 for never.
        address: Host and port of the store, instead of MASTER_ADDR and MASTER_PORT.
        witness: Learns who the ranks are.

    Raises:
        HvdError: The group exists with other ranks, or there is no way to find the other ranks.
        HvdTimeoutError: Ranks are missing at the deadline.
        RankFailedError: A rank ended after it had come.
        ValueError: This torch or machine does not have the backend.
    """
    witness = witness or Witness(world.rank)
    _refuse_inherited_group()
    if dist.is_initialized():
        have = (dist.get_rank(), dist.get_world_size())
        if have == (world.rank, world.size):
            return _private_api.torch_default_store()
        if not _group_is_ours():
            raise HvdError(
                f"torch.distributed says rank {have[0]} of {have[1]}, but this process is to be "
                f"rank {world.rank} of {world.size}. Destroy that process group first "
                "(torch.distributed.destroy_process_group), or open the session with its ranks."
            )
        dist.destroy_process_group()
    backend = _available_backend(backend)
    base = _open_store(world, address, timeout, warn_after)
    # Keys of an earlier group, or of an attempt before torchrun restarted us, must not be read.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"hvd/group/{attempt}.{_process.groups_made}", base)
    _process.groups_made += 1
    roll_call(
        PrefixStore("members", store),
        world.rank,
        world.size,
        {**host_record(), "launch": launch_identity(_launcher_of(world))},
        _two_launches,
        timeout=timeout.total_seconds(),
        warn_after=warn_after,
        what="the start of torch.distributed",
        witness=witness,
    )
    _make_group(backend, PrefixStore("default_pg", store), world, timeout, witness)
    _process.group = weakref.ref(dist.group.WORLD)
    if _process.groups_made == 1:
        # Workers of multiprocessing leave without running atexit's functions, but run these. The
        # priority puts it after the end of the session.
        multiprocessing.util.Finalize(None, _destroy_our_group, exitpriority=50)
        atexit.register(_destroy_our_group)
    return _private_api.torch_default_store()


def _make_group(
    backend: str, store: Store, world: World, timeout: timedelta, witness: Witness
) -> None:
    made: list[BaseException | None] = []

    def make() -> None:
        try:
            dist.init_process_group(
                backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
            )
            made.append(None)
        except BaseException as error:
            made.append(error)

    # The ranks wait for each other in there, deaf to Ctrl-C and to the end of a rank.
    thread = threading.Thread(target=make, name="hvd-rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        failure = witness.failure("the start of torch.distributed") if thread.is_alive() else None
        if failure is not None:
            raise failure
    [error] = made
    if error is None:
        return
    # Gloo's own text says which key of the store, or which port, but not which rank.
    failure = witness.failure("the start of torch.distributed")
    if failure is not None:
        raise failure from error
    raise error


def _group_is_ours() -> bool:
    return dist.is_initialized() and _process.group() is dist.group.WORLD


def _destroy_our_group() -> None:
    if _group_is_ours():
        dist.destroy_process_group()


def _refuse_inherited_group() -> None:
    if dist.is_initialized() and _inherited_group() is dist.group.WORLD:
        raise HvdError(
            f"Process {os.getpid()} was forked from a process in which torch.distributed's default "
            "group existed; the group does not work here. Start this process by spawn, or fork "
            "before the group is made."
        )


def _available_backend(backend: str) -> str:
    backend = "gloo" if backend == "auto" else backend
    if "nccl" in backend and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ValueError(
            f'process_group_backend="{backend}" needs a CUDA device and a torch with NCCL, which '
            'this machine does not have: use "gloo".'
        )
    if "gloo" in backend and not dist.is_gloo_available():
        raise ValueError(
            f'process_group_backend="{backend}" needs Gloo, which this torch was built without.'
        )
    return backend


def _two_launches(records: list[Record]) -> str | None:
    """Whether the ranks of one host come from two launchers, that is, from two jobs."""
    first = records[0]
    for rank, other in enumerate(records):
        if other["boot"] != first["boot"] or not (first["launch"] and other["launch"]):
            continue
        if other["launch"] != first["launch"]:
            return (
                f"Rank 0 (pid {first['pid']}) and rank {rank} (pid {other['pid']}) on host "
                f"{first['host']} were started by different launchers: two jobs share one "
                "rendezvous address. Give each its own MASTER_PORT, or unset it."
            )
    return None


def _open_store(
    world: World, address: tuple[str, int] | None, timeout: timedelta, warn_after: float
) -> Store:
    """The store of this job, the same object for as long as its place does not change."""
    address = address or _address_from(os.environ, world)
    launcher = _launcher_of(world)
    if address is None and launcher not in LAUNCHERS:
        raise HvdError(
            f"Rank {world.rank} of {world.size} does not know where to meet the others: set "
            "MASTER_ADDR and MASTER_PORT to a host and a free port, the same for all ranks, or "
            "start the job with torchrun or mpirun."
        )
    place = (address or launch_identity(launcher), world.rank, world.size)
    if _process.store is not None and _process.store[0] == place:
        return _process.store[1]
    if address is not None:
        store = _store_at(address, world, timeout, warn_after)
    else:
        store = store_of_launcher(world, launcher, timeout, warn_after)
    _process.store = (place, store)
    return store


def _address_from(environ: Mapping[str, str], world: World) -> tuple[str, int] | None:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not port:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise HvdError(f"Environment variable MASTER_PORT={port!r} must be a port from 1 to 65535.")
    if not host:
        if not world.one_host:
            raise HvdError(
                f"Environment variable MASTER_PORT={port} is set, but MASTER_ADDR is not: set it "
                "to the host of rank 0."
            )
        host = "127.0.0.1"
    return host, int(port)


def _store_at(
    address: tuple[str, int], world: World, timeout: timedelta, warn_after: float
) -> Store:
    host, port = address
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    opened: list[Store | Exception] = []

    # As torch's own rendezvous does it: torchrun's agent serves the store for its workers, and the
    # users of one port in this process share one server. But rank 0 does not wait here until all
    # have come: the roll call that follows does, names who is missing, and sees them sooner.
    serves = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def open_store() -> None:
        try:
            store = TCPStore(
                host,
                port,
                world.size,
                is_master=serves,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
            opened.append(store)
        except Exception as error:
            opened.append(error)

    # Torch waits in there for rank 0, deaf to Ctrl-C: that is why another thread does it.
    patience = Patience(
        timeout.total_seconds() + 5,  # torch's own error says more
        warn_after,
        lambda: f"rank {world.rank}'s wait for rank 0 at {place} (MASTER_ADDR, MASTER_PORT)",
    )
    thread = threading.Thread(target=open_store, name="hvd-rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        patience.check()
        thread.join(0.05)
    [store] = opened
    if not isinstance(store, Exception):
        return store
    if not isinstance(store, DistError):
        raise store
    if "EADDRINUSE" in str(store):
        hint = "Another job uses this port: choose another MASTER_PORT"
    else:
        hint = "Check MASTER_ADDR and MASTER_PORT, and whether rank 0 is running"
    raise HvdError(
        f"Rank {world.rank} of {world.size} cannot open the store at {place} "
        f"({first_line(store)}). {hint}."
    ) from store


def _launcher_of(world: World) -> str:
    """Name of the launcher, also where a caller made the world by hand under one."""
    if world.launcher in ("explicit", "torch", "lightning"):
        try:
            found = detect_world()
        except HvdError:
            return world.launcher
        if (found.rank, found.size) == (world.rank, world.size):
            return found.launcher
    return world.launcher
