"""How much communication torch.compile leaves to overlap: whole model, blocks, not compiled.

    python -m benchmarks.compile [--quick] [--json]

Eight blocks of Linear(1024) and ReLU with SGD, on two ranks. `eager` compiles nothing, `whole` is
`torch.compile(model)`, `blocks` is `block.compile()` for every block; all three are reduced by
`GradientReducer` in a plain loop. `ddp` is `torch.compile(DistributedDataParallel(model))`, which
has torch split the graph where DDP's buckets end. `step` is the time of the slower rank.
`communication` is the time in a step during which a reduction was under way, `exposed` the time for
which the step waited at the end of backward, both on the rank that came last to it: on the other
they include the wait for that rank. `hidden` is the share of communication that is not exposed. The
table is in Markdown, for docs/compile.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.measure import (
    Figure,
    Rank,
    Report,
    interleave,
    parse_arguments,
    run_ranks,
    show_seconds,
    timed,
)

if TYPE_CHECKING:
    from hvd_strategy import GradientReducer

FULL = {"rounds": 30, "steps": 4}
QUICK = {"rounds": 3, "steps": 2}

Sample = tuple[float, float, float]  # seconds of a step: wall, communication, exposed


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, list[Sample]]:
    """Samples by side, round by round."""
    import torch
    from torch import nn

    from benchmarks.models import WORKS, loss_of, optimizer_of
    from hvd_strategy import GradientReducer, open_session

    rank.join()
    session = open_session()
    work = WORKS["wide"]
    batch = work.batch(rank.index)
    models = {name: work.build() for name in ("eager", "whole", "blocks", "ddp")}
    optimizers = {name: optimizer_of(model) for name, model in models.items()}
    reducers = {
        name: GradientReducer(models[name].named_parameters(), optimizers[name], session=session)
        for name in ("eager", "whole", "blocks")
    }
    forwards: dict[str, Callable[..., Any]] = {
        "eager": models["eager"],
        "whole": torch.compile(models["whole"]),
        "blocks": models["blocks"],
        "ddp": torch.compile(nn.parallel.DistributedDataParallel(models["ddp"])),
    }
    for block in models["blocks"].children():
        block.compile()

    def side(name: str) -> Callable[[], Sample]:
        def step() -> None:
            optimizers[name].zero_grad()
            loss_of(forwards[name](batch)).backward()
            optimizers[name].step()

        steps = timed(step, settings["steps"])

        def sample() -> Sample:
            before = _communication(reducers.get(name))
            wall = steps()
            after = _communication(reducers.get(name))
            busy, exposed = ((after[i] - before[i]) / settings["steps"] for i in (0, 1))
            return wall, busy, exposed

        return sample

    samples = interleave(
        {name: side(name) for name in models}, settings["rounds"], before=rank.barrier
    )
    for name, model in models.items():
        rank.require_same([parameter.grad for parameter in model.parameters()], name)
        for expected, found in zip(models["eager"].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-8)
    for reducer in reducers.values():
        reducer.close()
    session.close()
    return samples


def _communication(reducer: GradientReducer | None) -> tuple[float, float]:
    if reducer is None:
        return 0.0, 0.0
    counters = reducer.statistics()
    return counters["communication_seconds"], counters["exposed_seconds"]


def main() -> None:
    """Runs the benchmark and prints it."""
    arguments = parse_arguments(__doc__.splitlines()[0])
    settings = QUICK if arguments.quick else FULL
    report = Report("compile", {**settings, "ranks": 2, "threads": 1})
    results = run_ranks(measure, 2, settings)
    for name in results[0]:
        rounds = list(zip(*(result[name] for result in results), strict=True))
        row: dict[str, Any] = {
            "compiled": name,
            "step": statistics.median(max(wall for wall, _, _ in ranks) for ranks in rounds),
        }
        if name != "ddp":
            last = [min(ranks, key=lambda sample: sample[2]) for ranks in rounds]
            row["communication"] = statistics.median(busy for _, busy, _ in last)
            row["exposed"] = statistics.median(exposed for _, _, exposed in last)
            row["hidden"] = max(0.0, 1 - row["exposed"] / row["communication"])
        report.rows.append(row)
    step = {row["compiled"]: row["step"] for row in report.rows}
    report.figures = [
        Figure(f"{name} / compiled DDP, step", step[name] / step["ddp"], 1.0, "x", True)
        for name in ("whole", "blocks")
    ]
    columns: dict[str, Callable[[Any], str]] = {
        "compiled": str,
        "step": show_seconds,
        "communication": show_seconds,
        "exposed": show_seconds,
        "hidden": lambda share: f"{share:.0%}",
    }
    report.print(as_json=arguments.json, columns=columns, as_markdown=True)


if __name__ == "__main__":
    main()
