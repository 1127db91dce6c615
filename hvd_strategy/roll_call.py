"""Ranks wait for each other, say who they are, and agree to go on or to fail together.

`roll_call` is what the ranks of a job do with a store, before there is anything better: each says
who it is, rank 0 looks at the list, and everybody gets the list or the same error. `Patience` is
how anything here waits: with a deadline, a warning when it takes long, and open to Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from hvd_strategy.errors import HvdError, HvdTimeoutError, RankFailedError
from hvd_strategy.log import get_logger
from hvd_strategy.witness import Witness, boot_id, process_record

__all__ = ["Patience", "Record", "first_line", "host_record", "namespace", "roll_call"]

Record = dict[str, Any]

_ERRORS = {kind.__name__: kind for kind in (HvdError, HvdTimeoutError, RankFailedError)}
_log = get_logger(__name__)

# What `Patience.pause` sleeps: this share of the time waited so far, within bounds in seconds.
_NAP_SHARE = 0.002
_SHORTEST_NAP = 0.001
_LONGEST_NAP = 0.05


class Patience:
    """A wait for other ranks: its deadline, and the notice that it takes long.

    Args:
        seconds: The wait fails after this time.
        warn_after: A line is printed once after this time; 0 for never.
        what: Says what is waited for and whom; asked only when it is to be printed.
    """

    def __init__(self, seconds: float, warn_after: float, what: Callable[[], str]) -> None:
        self._seconds = seconds
        self._start = time.monotonic()
        self._warn_after = warn_after
        self._what = what

    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self._start + self._seconds - time.monotonic()

    def check(self) -> None:
        """Raises HvdTimeoutError once the deadline has passed; says when it takes long."""
        if self.remaining() <= 0:
            raise HvdTimeoutError(
                f"{self._what()} did not end within {self._seconds:g} s. Look at what the missing "
                "ranks printed: they failed, or were never started."
            )
        waited = time.monotonic() - self._start
        if 0 < self._warn_after <= waited:
            self._warn_after = 0
            _log.warning("%s takes %.0f s so far.", self._what(), waited)

    def pause(self) -> None:
        """Checks, then sleeps a moment: a few thousandths of the time waited so far."""
        self.check()
        # Ranks come seconds after each other, when they have imported what they need. So what is
        # waited for is seen at once in the measure of the wait, which still takes little CPU time.
        nap = (time.monotonic() - self._start) * _NAP_SHARE
        time.sleep(min(max(nap, _SHORTEST_NAP), _LONGEST_NAP, max(self.remaining(), 0)))


def host_record() -> Record:
    """Where this process runs; ranks with equal `boot` and `net` can reach each other directly."""
    name = socket.gethostname()
    boot = boot_id() or name
    return {"host": name, "boot": boot, "net": namespace("net"), **process_record()}


def roll_call(
    store: Store,
    rank: int,
    size: int,
    record: Record,
    check: Callable[[list[Record]], str | None],
    *,
    timeout: float,
    warn_after: float,
    what: str,
    witness: Witness | None = None,
) -> list[Record]:
    """Gives every rank the records of all ranks, or the same error. Collective.

    Args:
        store: Used for this roll call only: prefix it with something new each time.
        rank: This rank.
        size: Number of ranks.
        record: What this rank says; JSON. {"error": text} makes every rank fail with that text.
        check: Called on rank 0 with all records; what it returns is an error on every rank.
        timeout: Deadline in seconds.
        warn_after: Seconds after which it is printed whom rank 0 waits for; 0 for never.
        what: What the roll call is for, in messages.
        witness: Learns who the ranks are, and ends the wait when one that it knows has ended.

    Raises:
        HvdError: A rank said "error", the check failed, or two processes claim the same rank.
        HvdTimeoutError: Ranks are missing at the deadline; rank 0 names them, to all.
        RankFailedError: A rank has ended, or the store is gone.
    """
    witness = witness or Witness(rank)
    witness.meet_at(store)
    text = json.dumps({"pid": os.getpid(), **record})
    with _store_at_work(what):
        if store.compare_set(f"rank/{rank}", "", text) != text.encode():
            problem = (
                f"Two processes claim to be rank {rank} of {size}. Two jobs share one rendezvous "
                "address: give each its own MASTER_PORT, or unset it."
            )
            # Rank 0 must not go on with the other process as if it were ours.
            store.set("error", problem)
            raise HvdError(problem)
        if rank == 0:
            answer = _hear_all(store, size, check, timeout, warn_after, what, witness)
            store.set("list", json.dumps(answer))
            if "error" in answer:
                _let_others_hear(store, size)
    if rank != 0:
        # Rank 0 tells who is missing at its deadline, which may be a little after ours.
        patience = Patience(
            timeout + 5, warn_after, lambda: f"{what}: rank {rank}'s wait for rank 0"
        )
        with _store_at_work(what):
            # Store.get would wait by itself, but deaf to Ctrl-C.
            while not store.check(["list"]):
                if store.check(["rank/0"]):
                    witness.learn(0, json.loads(store.get("rank/0")))
                failure = witness.failure(what)
                # Whoever has heard of an error may have ended by it.
                if failure is not None and not store.check(["list"]):
                    raise failure
                patience.pause()
            answer = json.loads(store.get("list"))
            store.add("heard", 1)
    if "error" in answer:
        raise _ERRORS[answer.get("class", "HvdError")](answer["error"])
    records: list[Record] = answer["records"]
    for other, found in enumerate(records):
        witness.learn(other, found)
    return records


def _hear_all(
    store: Store,
    size: int,
    check: Callable[[list[Record]], str | None],
    timeout: float,
    warn_after: float,
    what: str,
    witness: Witness,
) -> Record:
    records: list[Record] = []

    def waiting_for() -> str:
        missing = [r for r in range(len(records), size) if not store.check([f"rank/{r}"])]
        return f"{what}: rank 0's wait for ranks {', '.join(map(str, missing))}"

    patience = Patience(timeout, warn_after, waiting_for)
    try:
        for rank in range(size):
            while not store.check([f"rank/{rank}"]):
                if store.check(["error"]):
                    return {"error": store.get("error").decode()}
                failure = witness.failure(what)
                if failure is not None:
                    raise failure
                patience.pause()
            records.append(json.loads(store.get(f"rank/{rank}")))
            witness.learn(rank, records[-1])
            if "error" in records[-1]:
                return {"error": f"{what} failed on rank {rank}: {records[-1]['error']}"}
    except (HvdTimeoutError, RankFailedError) as error:
        return {"error": str(error), "class": type(error).__name__}
    if store.check(["error"]):
        return {"error": store.get("error").decode()}
    problem = check(records)
    return {"error": problem} if problem else {"records": records}


def _let_others_hear(store: Store, size: int) -> None:
    # Rank 0 usually ends by the error, and the store, which may be in its process, with it.
    others = sum(store.check([f"rank/{rank}"]) for rank in range(1, size))
    deadline = time.monotonic() + 2
    while store.add("heard", 0) < others and time.monotonic() < deadline:
        time.sleep(0.01)


@contextlib.contextmanager
def _store_at_work(what: str) -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise RankFailedError(
            f"In {what} the store of the job was lost ({first_line(error)}). Usually rank 0 has "
            "failed: look at what it printed."
        ) from error


def namespace(kind: str) -> str:
    """Identity of this process's "net" or "pid" namespace; empty where it cannot be read."""
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return ""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text; torch appends stack traces to its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
