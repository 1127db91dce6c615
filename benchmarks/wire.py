"""Time of reducing gradients that travel as they are, and in 16 bits.

    python -m benchmarks.wire [--quick] [--json]

Two ranks of one thread on this host, one GradientReducer per side, all of them in the same two
processes, in turn. What is timed is the reduction alone: gradients of 25 MB and of 64 MB lie there,
the optimizer's gate has all ranks reduce them. `ours` is without `wire_dtype`; `error` is the
largest difference from the mean of the exact values, relative to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.measure import (
    Rank,
    Report,
    interleave,
    parse_arguments,
    run_ranks,
    show_bytes,
    show_ratio,
    show_seconds,
    slowest,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_strategy import Session

SIZES = {25 * 2**20: 40, 64 * 2**20: 25}  # bytes: rounds
QUICK_ROUNDS = 4
PARAMETERS = 16
SIDES: dict[str, dict[str, str]] = {
    "ours": {},
    "bf16": {"wire_dtype": "bf16"},
    "fp16": {"wire_dtype": "fp16"},
    "sum fp64": {"sum_dtype": "fp64"},
    "bf16, sum fp64": {"wire_dtype": "bf16", "sum_dtype": "fp64"},
}
# What a rank's value may be off by, relative to it; without a wire the sum's own rounding.
BOUNDS = {"ours": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11, "sum fp64": 2.0**-23}


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures: seconds by size and side, round by round, and errors."""
    from hvd_strategy import open_session

    rank.join()
    session = open_session()
    result: dict[str, Any] = {}
    for size, rounds in settings["sizes"]:
        errors: dict[str, float] = {}
        sides = {
            name: _side(session, rank, size, name, arguments, errors)
            for name, arguments in SIDES.items()
        }
        times = interleave(sides, rounds)
        result[size] = {"times": times, "errors": errors}
    session.close()
    return result


def _side(
    session: Session,
    rank: Rank,
    size: int,
    name: str,
    arguments: dict[str, str],
    errors: dict[str, float],
) -> Callable[[], float]:
    """Reduces gradients of its own; checks every round what it left."""
    import torch

    from hvd_strategy import GradientReducer

    count = size // 4 // PARAMETERS
    parameters = [torch.nn.Parameter(torch.zeros(count)) for _ in range(PARAMETERS)]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    reducer = GradientReducer(
        [(f"p{index}", parameter) for index, parameter in enumerate(parameters)],
        optimizer,
        session=session,
        broadcast_parameters=False,
        **arguments,
    )
    generator = torch.Generator().manual_seed(5)
    # Of one sign, so that the error is relative to the mean.
    base = torch.rand(count, generator=generator) + 2.0**-6
    factors = [1.0 + 0.5 * index for index in range(rank.size)]
    expected = base.double() * (sum(factors) / rank.size)
    for parameter in parameters:
        parameter.grad = torch.empty(count)

    def fill(gradient: Tensor | None) -> None:
        assert gradient is not None
        gradient.copy_(base).mul_(factors[rank.index])

    def round_of_side() -> float:
        for parameter in parameters:
            fill(parameter.grad)
        rank.barrier()
        start = time.perf_counter()
        reducer.join(optimizer)
        seconds = time.perf_counter() - start
        reducer.step_is_over(optimizer)
        for parameter in (parameters[0], parameters[-1]):
            assert parameter.grad is not None
            error = ((parameter.grad.double() - expected).abs() / expected).max().item()
            errors[name] = max(error, errors.get(name, 0.0))
            if not error <= BOUNDS[name.partition(",")[0]]:
                raise AssertionError(f"{name} is off by {error} of the mean")
        return seconds

    return round_of_side


def main() -> None:
    """Runs the benchmark and prints it."""
    arguments = parse_arguments(__doc__.splitlines()[0])
    sizes = [(size, QUICK_ROUNDS if arguments.quick else SIZES[size]) for size in SIZES]
    report = Report("wire", {"ranks": 2, "threads": 1, "dtype": "float32"})
    results = run_ranks(measure, 2, {"sizes": sizes})
    for size in SIZES:
        by_rank = [result[str(size)] for result in results]
        row: dict[str, Any] = {"size": size}
        for name in SIDES:
            row[name] = slowest([of_rank["times"][name] for of_rank in by_rank])
        for name in ("bf16", "fp16", "sum fp64"):
            row[f"{name}/ours"] = row[name] / row["ours"]
        report.rows.append(row)
        for name in ("bf16", "fp16"):
            error = max(of_rank["errors"][name] for of_rank in by_rank)
            report.notes.append(
                f"largest error of {name} at {show_bytes(size)}: {error:.2e} of the mean, "
                f"bound {BOUNDS[name]:.2e}"
            )
    columns: dict[str, Callable[[Any], str]] = {"size": show_bytes}
    columns |= dict.fromkeys(SIDES, show_seconds)
    columns |= dict.fromkeys((f"{name}/ours" for name in ("bf16", "fp16", "sum fp64")), show_ratio)
    report.print(as_json=arguments.json, columns=columns)


if __name__ == "__main__":
    main()
