"""The core with 64 real processes on one host: handshake, collectives, a clean end.

The processes load the core alone (no torch), so that they start quickly; this one plays the store.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RANKS = 64

PROGRAM = """
import ctypes, sys
from hvd_strategy import _core

rank, size = int(sys.argv[1]), int(sys.argv[2])
token = b"0123456789abcdef"
listener = _core.Listener()
print(listener.name, flush=True)
names = sys.stdin.readline().split()
session = _core.Session(
    rank, size, listener, names, token, connect_timeout=60.0, stall_warning=0.0,
    first_stall_warning=0.0, stall_abort=60.0, abort_grace=5.0,
)
group = session.communicator(list(range(size)))
for count in (1, 100_003):
    values = (ctypes.c_double * count)(*([float(rank)] * count))
    group.allreduce(ctypes.addressof(values), count, "float64", post=1.0 / size, timeout=60.0)
    assert values[0] == values[count - 1] == (size - 1) / 2, (values[0], values[count - 1])
    values[0] = float(rank)
    group.broadcast(ctypes.addressof(values), 8, root=size - 1, timeout=60.0)
    assert values[0] == size - 1
records = group.exchange(bytes([rank]) * rank, timeout=60.0)
assert records == [bytes([other]) * other for other in range(size)]
group.barrier(timeout=60.0)
session.close()
print("done", flush=True)
"""


def test_sixty_four_processes() -> None:
    root = Path(__file__).resolve().parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(RANKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        for rank in range(RANKS)
    ]
    try:
        names = []
        for process in processes:
            assert process.stdout is not None
            names.append(process.stdout.readline().strip())
        outputs = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(" ".join(names) + "\n")
            process.stdin.flush()
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=90)
            outputs.append((rank, process.returncode, output.strip(), errors))
        assert all(code == 0 and text == "done" for _, code, text, _ in outputs), [
            entry for entry in outputs if entry[1] != 0 or entry[2] != "done"
        ]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=10)
    left = [line for line in Path("/proc/net/unix").read_text().splitlines() if "@hvd-" in line]
    assert not any(name in line for line in left for name in names)
