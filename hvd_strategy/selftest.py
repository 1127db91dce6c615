"""`python -m hvd_strategy.selftest`: does the compiled core work on this machine?

Needs neither torch nor a second process: two ranks run as threads of this one, meet through their
sockets, and reduce, broadcast and gather through shared memory. Prints one line; the exit status
is not 0 when something is wrong.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

from hvd_strategy import _core

_RANKS = 2
_COUNT = 300_000  # floats: several chunks of the staging ring
_TIMEOUT = 30.0


def _rank(rank: int, listener: _core.Listener, names: list[str], token: bytes) -> None:
    session = _core.Session(
        rank,
        _RANKS,
        listener,
        names,
        token,
        connect_timeout=_TIMEOUT,
        stall_warning=0.0,
        first_stall_warning=0.0,
        stall_abort=_TIMEOUT,
        abort_grace=0.0,
    )
    group = session.communicator(list(range(_RANKS)))
    values = (ctypes.c_float * _COUNT)(*([rank + 1.0] * _COUNT))
    address = ctypes.addressof(values)
    group.allreduce(address, _COUNT, "float32", "sum", post=1.0 / _RANKS, timeout=_TIMEOUT)
    if set(values) != {1.5}:
        raise AssertionError(f"the mean of 1 and 2 came out as {sorted(set(values))[:3]}")
    values[-1] = 7.0 if rank == 1 else 0.0
    group.broadcast(address, 4 * _COUNT, root=1, timeout=_TIMEOUT)
    if values[_COUNT - 1] != 7.0:
        raise AssertionError(f"the broadcast of 7 came out as {values[_COUNT - 1]}")
    records = group.exchange(b"x" * (rank + 1), timeout=_TIMEOUT)
    if records != [b"x", b"xx"]:
        raise AssertionError(f"the exchange came out as {records}")
    session.close()


def main() -> int:
    """Runs the test; returns the exit status."""
    token = os.urandom(16)
    listeners = [_core.Listener() for _ in range(_RANKS)]
    names = [listener.name for listener in listeners]
    failures: list[str] = []

    def guarded(rank: int) -> None:
        try:
            _rank(rank, listeners[rank], names, token)
        except BaseException as error:
            failures.append(f"rank {rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    version = f"Python {platform.python_version()}, {_core.instruction_set()}"
    if failures:
        print(f"hvd-strategy core FAILED ({version}): " + "; ".join(failures))
        return 1
    print(f"hvd-strategy core works ({version})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
