"""What loss scaling and clipping cost after backward: DDP with torch's scaler, and ours.

    python -m benchmarks.amp [--model 10M|100M] [--quick] [--json]

Two ranks, fp32 parameters, SGD, a scaled loss. `after backward` is the time from the end of
`loss.backward()` to the start of `optimizer.step()`: undoing the scale, looking for inf and nan,
clipping by norm; with a limit that every step exceeds, and with one that none does. DDP runs
`GradScaler.unscale_` and `clip_grad_norm_`; ours is `GradScaler(early=True)` and
`GradientReducer.clip_grad_norm_`. `memory` is how often all gradients were read or written in that
time, counted in a step of its own: by the arguments of torch's operations, and of our core's. torch
takes several passes inside of one operation on the CPU, which do not show: DDP's number is the
least that it can be. `passes` is the time in terms of one pass that reads and writes (`mul_`).
`step` is everything from `zero_grad` to `update`.
The last row is `check_consistency` of the parameters, in terms of reading them once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
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
ROUNDS = {"10M": 15, "100M": 5}
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
    for name, rounds in settings["rounds"].items():
        training = _Training(rank, session, LAYERS[name])
        results[name] = {}
        for label, limit in LIMITS.items():
            sides = {"ddp": partial(training.ddp, limit), "ours": partial(training.ours, limit)}
            results[name][label] = interleave(sides, rounds, warm_up=1, before=rank.barrier)
            results[name][label]["memory"] = {side: run(count=True) for side, run in sides.items()}
        results[name]["pass"] = _pass_over_gradients(training.model, rounds)
        training.optimizer.zero_grad()
        results[name]["consistency"] = _consistency(session, training.model, rounds, rank)
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

    def ddp(self, limit: float, count: bool = False) -> list[float] | float:
        import torch
        from torch import nn

        wrapped = nn.parallel.DistributedDataParallel(self.model)
        parameters = list(self.model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        return self._second_step(
            wrapped, scaler, lambda: nn.utils.clip_grad_norm_(parameters, limit), count
        )

    def ours(self, limit: float, count: bool = False) -> list[float] | float:
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
            self.model, scaler, lambda: reducer.clip_grad_norm_(self.optimizer, limit), count
        )
        reducer.close()
        return times

    def _second_step(
        self, model: Any, scaler: Any, clip: Callable[[], object], count: bool
    ) -> list[float] | float:
        """Seconds after backward, and of the whole step. In the first one buckets are formed.

        With `count` instead how often all gradients are read or written after backward.
        """
        times: list[float] = []
        size = sum(parameter.numel() for parameter in self.model.parameters())
        counted = 0.0
        for _ in range(2):
            self.rank.barrier()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            scaler.scale(model(self.batch).square().mean()).backward()
            after = time.perf_counter()
            with _Accesses() if count else nullcontext() as accesses:
                scaler.unscale_(self.optimizer)
                clip()
            if accesses is not None:
                counted = accesses.elements / size
            before_step = time.perf_counter()
            scaler.step(self.optimizer)
            scaler.update()
            times = [before_step - after, time.perf_counter() - start]
        return counted if count else times


class _Accesses:
    """Counts the elements that operations read and write."""

    def __init__(self) -> None:
        self.elements = 0

    def __enter__(self) -> _Accesses:
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode

        from hvd_strategy import gradient_passes

        counter = self

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(
                self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                schema = operation._schema.arguments
                for argument, value in zip(schema, args, strict=False):
                    tensors = value if isinstance(value, (list, tuple)) else [value]
                    written = argument.alias_info is not None and argument.alias_info.is_write
                    for tensor in tensors:
                        if isinstance(tensor, Tensor) and not operation.is_view:
                            counter.elements += tensor.numel() * (2 if written else 1)
                return operation(*args, **(kwargs or {}))

        def rescale(pieces: Any, factor: float) -> Any:
            self.elements += sum(count for _, count, _ in pieces) * (1 if factor == 1.0 else 2)
            return self._core.rescale(pieces, factor)

        self._core = gradient_passes._core
        self._passes: Any = gradient_passes
        self._passes._core = SimpleNamespace(rescale=rescale)
        self._mode = Operations()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._passes._core = self._core


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
    arguments = parse_arguments(__doc__.splitlines()[0], models=tuple(LAYERS))
    models = [arguments.model] if arguments.model else ["10M"] if arguments.quick else list(LAYERS)
    rounds = {name: QUICK_ROUNDS if arguments.quick else ROUNDS[name] for name in models}
    report = Report("amp", {"ranks": 2, "rounds": rounds})
    by_rank = run_ranks(measure, 2, {"rounds": rounds})
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
                        "memory": by_rank[0][name][label]["memory"][side],
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
            "memory": lambda value: f"{value:.2f}",
            "step": show_seconds,
        },
    )


if __name__ == "__main__":
    main()
