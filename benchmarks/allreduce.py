"""Time of one allreduce of ordinary fp32 tensors: Gloo, MPICH, ours, and a plain copy.

    python -m benchmarks.allreduce [--quick] [--json] [--no-mpi]

Two ranks of one thread on this host. All sides run in the same two processes, in turn; where
mpiexec and mpi4py are installed, mpiexec starts them. A time is that of the slower rank. `core` is
our engine below `Session.allreduce`, called with an address; `copy` is `a.copy_(b)` of the same
size on both ranks at once: what memory allows. The last lines show the CPU that idle ranks use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.measure import (
    Figure,
    Rank,
    Report,
    find_mpiexec,
    interleave,
    parse_arguments,
    run_ranks,
    show_bytes,
    show_ratio,
    show_seconds,
    slowest,
    timed,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_strategy import Session

# bytes: (rounds, runs in a round)
SIZES = {
    4: (40, 200),
    2**10: (40, 200),
    2**16: (40, 50),
    2**20: (40, 10),
    25 * 2**20: (40, 1),
    64 * 2**20: (30, 1),
}
QUICK = {size: (5, max(1, inner // 10)) for size, (_, inner) in SIZES.items()}

# bytes: least times of Gloo and of MPICH in terms of ours
RATIOS = {25 * 2**20: (5.0, 1.2), 64 * 2**20: (6.0, 2.5), 2**20: (None, 0.8)}
SMALLEST_SECONDS = 5e-6
IDLE_SECONDS = 2.0


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures: seconds by size and side, round by round."""
    from torch import distributed

    from hvd_strategy import open_session

    rank.join()
    idle_before = _idle_cpu(settings["idle_seconds"])
    session = open_session()
    distributed.barrier()
    idle_after = _idle_cpu(settings["idle_seconds"])
    mpi = _mpi() if settings["mpi"] else None

    times = {}
    for size, (rounds, inner) in settings["sizes"]:
        sides, buffers = _sides(session, mpi, size)
        checked = {
            name: _checked(name, rank, side, buffers[name], inner) for name, side in sides.items()
        }
        times[size] = interleave(checked, rounds)
    session.close()
    return {"times": times, "idle": [idle_before, idle_after]}


def _sides(
    session: Session, mpi: Any, size: int
) -> tuple[dict[str, Callable[[], object]], dict[str, Tensor]]:
    """What is timed for one size, and the memory it works on: every side has its own, touched."""
    import torch
    from torch import distributed

    names = ["gloo", *(["mpich"] if mpi else []), "ours", "core", "copy"]
    buffers = {name: torch.zeros(size // 4) for name in names}
    gloo, ours, core, copy = (buffers[name] for name in ("gloo", "ours", "core", "copy"))
    target = torch.zeros_like(copy)
    communicator, address, count = session.communicator, core.data_ptr(), size // 4
    sides: dict[str, Callable[[], object]] = {
        "gloo": lambda: distributed.all_reduce(gloo),
        "ours": lambda: session.allreduce(ours),
        "core": lambda: communicator.allreduce(address, count, "float32", "sum"),
        "copy": lambda: target.copy_(copy),
    }
    if mpi:
        array = buffers["mpich"].numpy()
        sides["mpich"] = lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)
    return sides, buffers


def _checked(
    name: str, rank: Rank, side: Callable[[], object], buffer: Tensor, inner: int
) -> Callable[[], float]:
    """A side that fills the buffer, runs `inner` times, and checks what it left: every round.

    Zeros, or a check of the first call only, would not tell a fast engine from an idle one.
    """
    import torch

    # Varied, small enough for `inner` sums of sums, and exact: powers of two times small integers.
    pattern = (torch.arange(buffer.numel()) % 251 + 1).to(torch.float32) * 2.0**-110
    ranks = rank.size * (rank.size + 1) // 2
    growth = 1.0 if name == "copy" else float(ranks) * float(rank.size) ** (inner - 1)
    start = pattern if name == "copy" else pattern * (rank.index + 1)
    expected = (pattern.double() * growth).float()  # the factor alone exceeds fp32
    run = timed(side, inner)

    def round_of_side() -> float:
        buffer.copy_(start)
        rank.barrier()
        seconds = run()
        if not torch.equal(buffer, expected):
            raise AssertionError(f"{name} gave a wrong sum of {buffer.numel() * 4} bytes")
        return seconds

    return round_of_side


def _mpi() -> Any:
    import mpi4py

    # One thread calls MPI: spares MPICH the locks that mpi4py asks for otherwise.
    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    return MPI


def _idle_cpu(seconds: float) -> float:
    """CPU that this process uses while it does nothing, in percent of a core."""
    time.sleep(0.2)  # let threads fall asleep
    start = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - start) / seconds * 100


def main() -> None:
    """Runs the benchmark and prints it."""
    arguments = parse_arguments(__doc__.splitlines()[0], mpi=True)
    mpi = find_mpiexec() is not None and not arguments.no_mpi
    settings = {
        "sizes": list((QUICK if arguments.quick else SIZES).items()),
        "mpi": mpi,
        "idle_seconds": 0.5 if arguments.quick else IDLE_SECONDS,
    }
    report = Report("allreduce", {"ranks": 2, "threads": 1, "dtype": "float32", "mpich": mpi})
    results = run_ranks(measure, 2, settings, mpi=mpi)

    for size in SIZES:
        by_side = [result["times"][str(size)] for result in results]
        row: dict[str, Any] = {"size": size}
        row |= {name: slowest([sides[name] for sides in by_side]) for name in by_side[0]}
        row |= {
            f"{name}/ours": row[name] / row["ours"] for name in ("gloo", "mpich") if name in row
        }
        row["ours/copy"] = row["ours"] / row["copy"]
        report.rows.append(row)
        for name, limit in zip(("gloo", "mpich"), RATIOS.get(size, ()), strict=False):
            if limit is not None and name in row:
                label = f"{name} / ours at {show_bytes(size)}"
                report.figures.append(Figure(label, row[f"{name}/ours"], limit))
        if size == 4:
            limit = SMALLEST_SECONDS * 1e6
            report.figures.append(Figure("ours at 4 B", row["ours"] * 1e6, limit, "us", True))
    before, after = (statistics.mean(result["idle"][i] for result in results) for i in (0, 1))
    added = max(0.0, after - before)
    report.figures.append(Figure("CPU that our idle engine adds", added, 0.1, "% of a core", True))
    report.notes.append(f"idle rank: {before:.3f} % of a core with Gloo, {after:.3f} % with ours")
    sides = ("gloo", "mpich", "ours", "core", "copy")
    columns: dict[str, Callable[[Any], str]] = {"size": show_bytes}
    columns |= dict.fromkeys(sides, show_seconds)
    columns |= dict.fromkeys(("gloo/ours", "mpich/ours", "ours/copy"), show_ratio)
    report.print(as_json=arguments.json, columns=columns)


if __name__ == "__main__":
    main()
