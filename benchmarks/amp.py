"""What loss scaling and clipping cost after backward: DDP with torch's scaler, and ours.

    python -m benchmarks.amp [--quick] [--json]

Two ranks, fp32 parameters, SGD, a scaled loss. `after backward` is the time from the end of
`loss.backward()` to the start of `optimizer.step()`: undoing the scale, looking for inf and nan,
clipping by norm; with a limit that every step exceeds, and with one that none does. DDP runs
`GradScaler.unscale_` and `clip_grad_norm_`; ours is `GradScaler(early=True)` and
`GradientReducer.clip_grad_norm_`. `passes` is that time in terms of one pass over the gradients
that reads and writes them (`mul_`). `step` is everything from `zero_grad` to `update`.
The last row is `check_consistency` of the parameters, in terms of reading them once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.measure import (
    Figure,
    Rank,
    Report,
    interleave,
    parse_arguments,
    run_ranks,
    show_seconds,
    slowest,
)

WIDTH = 1000
LAYERS = {"10M": 10, "100M": 100}  # of a million parameters each
ROUNDS = 15
QUICK_ROUNDS = 2
LIMITS = {"clips": 1e-9, "clips never": 1e9}

MOST_OF_DDP = {"clips": 0.45, "clips never": 0.1}
MOST_OF_READ = 1.5


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, Any]:
    """By model: seconds after backward and of the step by limit and side, of a pass, of a check."""
    from hvd_strategy import open_session

    rank.join()
    session = open_session()
    results = {}
    for name in settings["models"]:
        training = _Training(rank, session, LAYERS[name])
        results[name] = {
            label: interleave(
                {"ddp": partial(training.ddp, limit), "ours": partial(training.ours, limit)},
                settings["rounds"],
                warm_up=1,
                before=rank.barrier,
            )
            for label, limit in LIMITS.items()
        }
        results[name]["pass"] = _pass_over_gradients(training.model, settings["rounds"])
        training.optimizer.zero_grad()
        results[name]["consistency"] = _consistency(
            session, training.model, settings["rounds"], rank
        )
    session.close()
    return results


class _Training:
    """One model for both sides: two with their gradients would not fit small machines."""

    def __init__(self, rank: Rank, session: Any, layers: int) -> None:
        import torch
        from torch import nn

        self.rank = rank
        self.session = session
        torch.manual_seed(rank.index)
        self.batch = torch.randn(1, WIDTH)
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)

    def ddp(self, limit: float) -> list[float]:
        import torch
        from torch import nn

        wrapped = nn.parallel.DistributedDataParallel(self.model)
        parameters = list(self.model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        return self._second_step(
            wrapped, scaler, lambda: nn.utils.clip_grad_norm_(parameters, limit)
        )

    def ours(self, limit: float) -> list[float]:
        from hvd_strategy import GradientReducer, GradScaler

        reducer = GradientReducer(
            self.model.named_parameters(),
            self.optimizer,
            session=self.session,
            gradient_norms=True,
            broadcast_parameters=False,
        )
        scaler = GradScaler("cpu", reducer=reducer, early=True)
        times = self._second_step(
            self.model, scaler, lambda: reducer.clip_grad_norm_(self.optimizer, limit)
        )
        reducer.close()
        return times

    def _second_step(self, model: Any, scaler: Any, clip: Callable[[], object]) -> list[float]:
        """Seconds after backward, and of the whole step. In the first one buckets are formed."""
        times = []
        for _ in range(2):
            self.rank.barrier()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            scaler.scale(model(self.batch).square().mean()).backward()
            after = time.perf_counter()
            scaler.unscale_(self.optimizer)
            clip()
            before_step = time.perf_counter()
            scaler.step(self.optimizer)
            scaler.update()
            times = [before_step - after, time.perf_counter() - start]
        return times


def _pass_over_gradients(model: Any, rounds: int) -> float:
    """Seconds to read and write all gradients."""

    def one() -> float:
        start = time.perf_counter()
        for parameter in model.parameters():
            parameter.grad.mul_(0.999)
        return time.perf_counter() - start

    return statistics.median(interleave({"pass": one}, rounds)["pass"])


def _consistency(session: Any, model: Any, rounds: int, rank: Rank) -> dict[str, list[float]]:
    import torch

    from hvd_strategy import check_consistency, named_state

    tensors = named_state(model)
    words = [parameter.detach().view(torch.int64) for parameter in model.parameters()]

    def read() -> float:
        start = time.perf_counter()
        for piece in words:
            piece.sum()
        return time.perf_counter() - start

    def check() -> float:
        start = time.perf_counter()
        check_consistency(session, tensors)
        return time.perf_counter() - start

    return interleave({"read": read, "check": check}, rounds, before=rank.barrier)


def main() -> None:
    """Runs the benchmark and prints it."""
    arguments = parse_arguments(__doc__.splitlines()[0])
    models = ["10M"] if arguments.quick else list(LAYERS)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    report = Report("amp", {"ranks": 2, "rounds": rounds})
    by_rank = run_ranks(measure, 2, {"models": models, "rounds": rounds})
    for name in models:
        one_pass = statistics.median(result[name]["pass"] for result in by_rank)
        for label in LIMITS:
            medians: dict[str, list[float]] = {}
            for side in ("ddp", "ours"):
                medians[side] = [
                    slowest(
                        [[times[i] for times in result[name][label][side]] for result in by_rank]
                    )
                    for i in range(2)
                ]
                report.rows.append(
                    {
                        "case": f"{name} {label}",
                        "side": side,
                        "after backward": medians[side][0],
                        "passes": medians[side][0] / one_pass,
                        "step": medians[side][1],
                    }
                )
            after = medians["ours"][0] / medians["ddp"][0]
            whole = medians["ours"][1] / medians["ddp"][1]
            report.figures += [
                Figure(f"{name} {label}: after backward", after, MOST_OF_DDP[label], "x", True),
                Figure(f"{name} {label}: whole step", whole, 1.0, "x", True),
            ]
        read, check = (
            slowest([result[name]["consistency"][side] for result in by_rank])
            for side in ("read", "check")
        )
        report.rows.append({"case": f"{name} read once", "side": "torch", "after backward": read})
        report.rows.append({"case": f"{name} consistency", "side": "ours", "after backward": check})
        report.figures.append(
            Figure(f"{name} consistency check / read", check / read, MOST_OF_READ, "x", True)
        )
    report.print(
        as_json=arguments.json,
        columns={
            "case": str,
            "side": str,
            "after backward": show_seconds,
            "passes": lambda value: f"{value:.2f}",
            "step": show_seconds,
        },
    )


if __name__ == "__main__":
    main()
