"""Who of the ranks that have said who they are has ended since.

Before the core's session stands nobody watches the ranks: one that dies between two meetings would
be waited for until the deadline, which may be half an hour. From the first meeting on each rank
knows the process of every other one, and looks at it while it waits.

Only ranks that can be seen count: those of this host and of this namespace of process ids.

The first to see it says in the job's store who has ended, and leaves. So whoever looks later blames
the same rank, and not one that has left for that reason.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from hvd_strategy.errors import RankFailedError

__all__ = ["Witness", "boot_id", "process_record"]


def process_record() -> dict[str, Any]:
    """This process as others can find it: `pid`, `started` (in clock ticks) and `pid_namespace`."""
    pid = os.getpid()
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = ""
    return {"pid": pid, "started": _started(pid), "pid_namespace": namespace}


class Witness:
    """Watches the processes of ranks, by their records.

    Args:
        rank: This process's rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own = process_record()
        self._boot = boot_id()
        self._known: dict[int, tuple[int, str]] = {}
        self._store: Store | None = None

    def meet_at(self, store: Store) -> None:
        """Takes the first store that it is given, which has to be the same on all ranks."""
        if self._store is None:
            self._store = store

    def learn(self, rank: int, record: dict[str, Any]) -> None:
        """Takes up the record of a rank: that of its host and of its process."""
        here = (
            record.get("pid_namespace") == self._own["pid_namespace"] != ""
            and record.get("boot") == self._boot
        )
        if here and rank != self._rank and record.get("started"):
            self._known[rank] = (record["pid"], record["started"])

    def dead(self) -> tuple[int, int] | None:
        """Rank and process id of a rank that has ended, if there is one."""
        for rank, (pid, started) in self._known.items():
            if _started(pid) != started:
                return rank, pid
        return None

    def failure(self, what: str) -> RankFailedError | None:
        """What to raise when a rank has ended during `what`."""
        found = self.dead()
        if found is None:
            return None
        rank, pid = found
        text = f"rank {rank} (pid {pid}) ended during {what}; look at what it printed last."
        try:
            if self._store is not None:
                text = self._store.compare_set("ended", "", text).decode()
        except DistError:
            pass  # the store has ended as well, with rank 0
        return RankFailedError(f"rank {self._rank} cannot go on: {text}")

    def blamed(self) -> str | None:
        """What the first rank that saw an end has said of it."""
        try:
            if self._store is not None and self._store.check(["ended"]):
                return self._store.get("ended").decode()
        except DistError:
            pass
        return None


def boot_id() -> str:
    """The same for all processes of a machine until it is started again; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When the process started; empty when it has ended, be it a zombie."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            # The name in brackets may itself contain brackets and blanks.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
