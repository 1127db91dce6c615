"""Memory that training needs beyond its weights: a single process, DDP and ours.

    python -m benchmarks.memory [--quick] [--json]

Linear layers with 96 MiB of fp32 gradients, SGD. The growth is that of the proportional set size
(PSS, which counts a page shared by two processes half for each) from the moment the model exists
to the largest value seen in the training steps. Every measurement is made in fresh processes, the
sides in turn; of two ranks the larger counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Rank, Report, parse_arguments, run_ranks

LAYERS = 24
WIDTH = 1024  # 24 layers of 1024 x 1024 x 4 bytes: 96 MiB
BATCH = 16
STEPS = 6
REPETITIONS = 5
QUICK_REPETITIONS = 1

MOST_ABOVE_SINGLE = 24.0  # MiB

SIDES = {"single": 1, "ddp": 2, "ours": 2}  # ranks of each side


def measure(rank: Rank, settings: dict[str, Any]) -> float:
    """Growth of this process in MiB."""
    import torch
    from torch import nn

    # Loaded on all sides, so that the pages of modules are no difference.
    from hvd_strategy import GradientReducer, open_session

    side = settings["side"]
    torch.manual_seed(rank.index)
    layers: nn.Module = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)),
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    batch = torch.randn(BATCH, WIDTH)
    rank.barrier()
    before = most = _pss()

    model, finish = layers, []
    if side == "ddp":
        rank.join()
        model = nn.parallel.DistributedDataParallel(layers)
    elif side == "ours":
        rank.join()
        session = open_session()
        reducer = GradientReducer(layers.named_parameters(), optimizer, session=session)
        finish = [reducer.close, session.close]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        most = max(most, _pss())
        loss.backward()
        most = max(most, _pss())
        optimizer.step()
        most = max(most, _pss())
    # Both ranks are still there, sharing what they share, when the last value is read.
    rank.barrier()
    if rank.size > 1:
        gradients = [parameter.grad for parameter in layers.parameters()]
        rank.require_same(gradients, f"the gradients of {side}")
    for function in finish:
        function()
    return (most - before) / 1024


def _pss() -> int:
    """Proportional set size of this process in KiB."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/smaps_rollup has no line Pss")


def main() -> None:
    """Runs the benchmark and prints it."""
    arguments = parse_arguments(__doc__.splitlines()[0])
    repetitions = QUICK_REPETITIONS if arguments.quick else REPETITIONS
    gradients = LAYERS * WIDTH * WIDTH * 4 // 2**20
    report = Report("memory", {"gradients": f"{gradients} MiB", "repetitions": repetitions})
    growth: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repetitions):
        for side, ranks in SIDES.items():
            growth[side].append(max(run_ranks(measure, ranks, {"side": side})))

    medians = {side: statistics.median(values) for side, values in growth.items()}
    for side, value in medians.items():
        report.rows.append(
            {
                "side": side,
                "ranks": SIDES[side],
                "growth": value,
                "least": min(growth[side]),
                "most": max(growth[side]),
                "above single": value - medians["single"],
            }
        )
    above = medians["ours"] - medians["single"]
    report.figures = [Figure("ours above single", above, MOST_ABOVE_SINGLE, "MiB", True)]
    names = ("growth", "least", "most", "above single")
    columns: dict[str, Callable[[Any], str]] = {
        "side": str,
        "ranks": str,
        **dict.fromkeys(names, _show_mebibytes),
    }
    report.print(as_json=arguments.json, columns=columns)


def _show_mebibytes(value: float) -> str:
    return f"{value:.1f} MiB"


if __name__ == "__main__":
    main()
