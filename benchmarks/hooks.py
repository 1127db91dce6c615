"""What gradient hooks cost for each parameter: DDP and ours, in a world of one.

    python -m benchmarks.hooks [--quick] [--json]

Three copies of a model of 200 parameters of 16 values run their backward in turn, in one process:
plain, under DDP (a Gloo group of one rank), and with `GradientReducer(force=True)`, which takes the
full path although there is nobody to reduce with. The cost is how much longer a backward takes
than the plain one, for each parameter. With so little data it is bookkeeping alone. `cpu` is the
same difference in CPU time of the thread that runs the backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import (
    Figure,
    Rank,
    Report,
    interleave,
    parse_arguments,
    run_ranks,
    show_seconds,
)

PARAMETERS = 200
VALUES = 16
ROUNDS = 400
QUICK_ROUNDS = 40

MOST_SECONDS = 2e-6
MOST_OF_DDP = 0.4


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Seconds and CPU seconds of a backward, by side, round by round."""
    import torch
    from torch import nn

    from hvd_strategy import GradientReducer, open_session

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.ParameterList(torch.ones(VALUES) for _ in range(PARAMETERS))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for factor in self.factors:
                value = value * factor
            return value.sum()

    rank.join()
    session = open_session()
    plain, wrapped, ours = Chain(), Chain(), Chain()
    reducer = GradientReducer(ours.named_parameters(), session=session, force=True)
    models = {"plain": plain, "ddp": nn.parallel.DistributedDataParallel(wrapped), "ours": ours}
    value = torch.ones(VALUES)

    def backward(model: nn.Module) -> tuple[float, float]:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(value)
        start, start_cpu = time.perf_counter(), time.thread_time()
        loss.backward()
        return time.perf_counter() - start, time.thread_time() - start_cpu

    sides = {name: _bind(backward, model) for name, model in models.items()}
    times = interleave(sides, settings["rounds"], warm_up=10)
    for parameter in ours.parameters():
        if parameter.grad is None or not bool((parameter.grad == 1).all()):
            raise AssertionError("the gradients of our side are wrong")
    reducer.close()
    session.close()
    return times


def _bind(function: Callable[[Any], Any], argument: object) -> Callable[[], Any]:
    return lambda: function(argument)


def main() -> None:
    """Runs the benchmark and prints it."""
    arguments = parse_arguments(__doc__.splitlines()[0])
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    report = Report("hooks", {"parameters": PARAMETERS, "values": VALUES, "rounds": rounds})
    (times,) = run_ranks(measure, 1, {"rounds": rounds})

    medians = {
        name: [statistics.median(values) for values in zip(*pairs, strict=True)]
        for name, pairs in times.items()
    }
    for name, (wall, cpu) in medians.items():
        row: dict[str, Any] = {"side": name, "backward": wall, "backward cpu": cpu}
        if name != "plain":
            row["per parameter"] = (wall - medians["plain"][0]) / PARAMETERS
            row["per parameter cpu"] = (cpu - medians["plain"][1]) / PARAMETERS
        report.rows.append(row)
    cost = {row["side"]: row.get("per parameter", 0.0) for row in report.rows}
    limit = MOST_SECONDS * 1e6
    report.figures = [
        Figure("ours per parameter", cost["ours"] * 1e6, limit, "us", True),
        Figure("ours / ddp per parameter", cost["ours"] / cost["ddp"], MOST_OF_DDP, "x", True),
    ]
    names = ("backward", "backward cpu", "per parameter", "per parameter cpu")
    report.print(
        as_json=arguments.json, columns={"side": str, **dict.fromkeys(names, show_seconds)}
    )


if __name__ == "__main__":
    main()
