"""From a world to the core's session: the ranks meet at the store, then connect directly.

Each rank opens a listening socket and says its name in a roll call, rank 0 also the token that it
made for this session; the roll call shows whether all ranks can reach each other. With the names
the core connects every rank with every other: only who knows the token and runs as our user gets
in.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hvd_strategy import _core
from hvd_strategy.errors import HvdError, RankFailedError
from hvd_strategy.rendezvous import default_group_store
from hvd_strategy.roll_call import Record, host_record, roll_call
from hvd_strategy.witness import Witness
from hvd_strategy.world import World

__all__ = ["connect_ranks"]

# The ranks have all been seen a moment before they connect; only a rank that died since, or was
# stopped, can make this wait.
_CONNECT_SECONDS = 60.0
# The first step compiles, warms up and loads data: its wait may take this many times longer before
# it is called a stall.
_FIRST_STEP_FACTOR = 10


def connect_ranks(
    world: World, options: dict[str, Any], address: tuple[str, int] | None, number: int
) -> _core.Session:
    """Makes the core's session of all ranks. Collective.

    Args:
        world: Who this process is. A world of one needs nothing but itself.
        options: Values of the options that `open_session` takes.
        address: Host and port where the ranks meet, if the caller knows.
        number: How many sessions this process tried to open before; the same on all ranks. It keeps
            what earlier sessions left in the store apart from this one.

    Raises:
        HvdError: The ranks cannot meet, or are on several hosts.
        HvdTimeoutError: Ranks are missing at the deadline.
        RankFailedError: A rank ended after it had come.
    """
    settings = {
        "connect_timeout": min(_CONNECT_SECONDS, options["timeout"].total_seconds()),
        "stall_warning": options["stall_warning_seconds"],
        "first_stall_warning": options["stall_warning_seconds"] * _FIRST_STEP_FACTOR,
        "stall_abort": options["stall_abort_seconds"],
        "abort_grace": options["abort_grace_seconds"],
    }
    if world.size == 1:
        return _core.Session(0, 1, None, [], os.urandom(16), **settings)
    seconds = options["timeout"].total_seconds()
    witness = Witness(world.rank)
    base = default_group_store(
        world,
        backend=options["process_group_backend"],
        timeout=options["timeout"],
        warn_after=options["stall_warning_seconds"],
        address=address,
        witness=witness,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"hvd/session/{attempt}.{number}", base)
    with contextlib.ExitStack() as stack:
        listener, record = _listen(world)
        if listener is not None:
            stack.callback(listener.close)
        records = roll_call(
            store,
            world.rank,
            world.size,
            record,
            _out_of_reach,
            timeout=seconds,
            warn_after=options["stall_warning_seconds"],
            what="the opening of a session",
            witness=witness,
        )
        try:
            return _core.Session(
                world.rank,
                world.size,
                listener,
                [r["listener"] for r in records],
                bytes.fromhex(records[0]["token"]),
                **settings,
            )
        except HvdError as error:
            if len({r["host"] for r in records}) > 1:
                raise HvdError(f"{_several_hosts(records)} ({error})") from error
            blamed = witness.blamed() if isinstance(error, RankFailedError) else None
            if blamed is not None:
                # The rank that we miss has left because of that one.
                raise RankFailedError(
                    f"rank {world.rank} cannot join the others: {blamed}"
                ) from error
            raise


def _listen(world: World) -> tuple[_core.Listener | None, Record]:
    """The listener and what the others have to know; a failure here is to be known to all."""
    try:
        listener = _core.Listener()
    except HvdError as error:
        return None, {"error": str(error)}
    record = {**host_record(), "listener": listener.name, "one_host": world.one_host}
    if world.rank == 0:
        record["token"] = os.urandom(16).hex()
    return listener, record


def _out_of_reach(records: list[Record]) -> str | None:
    """Why the ranks cannot be one session, if so."""
    first = records[0]
    for other in records:
        # The boot id may be the same on machines that were started from one snapshot.
        named_apart = other["host"] != first["host"] and not other["one_host"]
        if other["boot"] != first["boot"] or named_apart:
            return _several_hosts(records)
    apart = [rank for rank, record in enumerate(records) if record["net"] != first["net"]]
    if apart:
        return (
            f"Rank {_numbers(apart)} and rank 0 are on one host, but in different network "
            "namespaces, so they cannot reach each other's sockets: start their containers with a "
            "common network."
        )
    return None


def _several_hosts(records: list[Record]) -> str:
    by_host: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        by_host.setdefault(record["host"], []).append(rank)
    where = "; ".join(f"rank {_numbers(ranks)} on {host}" for host, ranks in by_host.items())
    return (
        f"Jobs over several hosts are not supported yet: {where}. Start all ranks on one host, or "
        "use another strategy for this job."
    )


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
