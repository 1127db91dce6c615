"""Loading and saving a checkpoint: peak memory and time, of ours and of what people do otherwise.

    python -m benchmarks.checkpoint [--quick] [--json]

A model of 64 MiB with its two moments of Adam, on two ranks. Loading: every rank reads the file;
rank 0 reads it and the whole object goes through `broadcast_object_list`; `checkpoint.load`.
Saving, on rank 0: the CheckpointIO of Lightning, and ours. The peak is the growth of the resident
set (VmHWM) over what the process had before; for loading that includes the checkpoint itself,
192 MiB, and "above" is what goes beyond it. Both engines have moved some data before, so that their
buffers are no part of it. Fresh processes for every measurement, the sides in turn; of two ranks
the larger value counts.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Rank, Report, parse_arguments, run_ranks, show_seconds

LAYERS = 16
WIDTH = 1024  # 16 layers of 1024 x 1024 x 4 bytes: 64 MiB
SIZE = 3 * LAYERS * WIDTH * WIDTH * 4 / 2**20  # MiB, with the moments
REPETITIONS = 5
QUICK_REPETITIONS = 1

CHUNK = 16.0  # MiB
# Beside the chunk there are the objects, and what the allocator rounds up.
MOST_ABOVE = CHUNK + 4.0

SIDES = {
    "load: every rank reads": 2,
    "load: broadcast_object_list": 2,
    "load: ours": 2,
    "save: Lightning's": 1,
    "save: ours": 1,
}


def make_checkpoint() -> dict[str, Any]:
    import torch
    from torch import nn

    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(layers.parameters())
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"state_dict": layers.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, float]:
    """Peak growth of this process in MiB, and seconds."""
    import torch

    # Loaded on all sides, so that the pages of modules are no difference.
    from lightning.fabric.plugins import TorchCheckpointIO
    from torch import distributed

    from hvd_strategy import checkpoint, open_session
    from hvd_strategy.object_stream import stream_object

    side, path = settings["side"], settings["path"]
    session = None
    if rank.size > 1:
        rank.join()
        session = open_session()
        # Both engines' buffers and threads come into being.
        stream_object(session, torch.zeros(32 << 18))
        distributed.broadcast_object_list([torch.zeros(1 << 18)])
    else:
        checkpoint.write_atomically({}, path)
        TorchCheckpointIO().save_checkpoint({}, path)
        saved = make_checkpoint()

    def load_by_broadcast() -> Any:
        objects = [torch.load(path) if rank.index == 0 else None]
        distributed.broadcast_object_list(objects)
        return objects[0]

    sides: dict[str, Callable[[], Any]] = {
        "load: every rank reads": lambda: torch.load(path),
        "load: broadcast_object_list": load_by_broadcast,
        "load: ours": lambda: checkpoint.load(path),
        "save: Lightning's": lambda: TorchCheckpointIO().save_checkpoint(saved, path),
        "save: ours": lambda: checkpoint.write_atomically(saved, path),
    }
    gc.collect()
    rank.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    start = time.perf_counter()
    result = sides[side]()
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    rank.barrier()
    if session is not None:
        rank.require_same(result["state_dict"].values(), f"the weights of {side}")
        moments = result["optimizer_states"][0]["state"].values()
        rank.require_same((entry["exp_avg"] for entry in moments), f"the moments of {side}")
        session.close()
    return {"peak": peak / 1024, "seconds": seconds}


def resident(name: str) -> int:
    """A figure about this process's memory in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no line {name}")


def main() -> None:
    """Runs the benchmark and prints it."""
    import torch

    arguments = parse_arguments(__doc__.splitlines()[0])
    repetitions = QUICK_REPETITIONS if arguments.quick else REPETITIONS
    report = Report("checkpoint", {"checkpoint": f"{SIZE:.0f} MiB", "repetitions": repetitions})
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save(make_checkpoint(), path)
        for _ in range(repetitions):
            for side, ranks in SIDES.items():
                target = path if side.startswith("load") else os.path.join(folder, "written.pt")
                results = run_ranks(measure, ranks, {"side": side, "path": target})
                peaks[side].append(max(result["peak"] for result in results))
                times[side].append(max(result["seconds"] for result in results))

    above = {}
    for side, values in peaks.items():
        peak = statistics.median(values)
        above[side] = peak - SIZE if side.startswith("load") else peak
        report.rows.append(
            {
                "side": side,
                "ranks": SIDES[side],
                "peak": peak,
                "above": above[side],
                "time": statistics.median(times[side]),
            }
        )
    report.figures = [
        Figure("load: ours above the checkpoint", above["load: ours"], MOST_ABOVE, "MiB", True),
        Figure("save: ours above the checkpoint", above["save: ours"], MOST_ABOVE, "MiB", True),
    ]
    columns: dict[str, Callable[[Any], str]] = {
        "side": str,
        "ranks": str,
        "peak": _show_mebibytes,
        "above": _show_mebibytes,
        "time": show_seconds,
    }
    report.print(as_json=arguments.json, columns=columns)


def _show_mebibytes(value: float) -> str:
    return f"{value:.1f} MiB"


if __name__ == "__main__":
    main()
