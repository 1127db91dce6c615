"""Time of a training step: single process, DDP and ours; plain loop and Trainer; 1 and 2 ranks.

    python -m benchmarks.step [--quick] [--json]

Three models with SGD and one fixed batch a rank. With two ranks, `single` is the plain loop on both
at once, without any communication: what the two cores and their memory allow. `ours` is
`GradientReducer` in the plain loop and `strategy="hvd"` in the Trainer; `ddp` is
`DistributedDataParallel` and `strategy="ddp"`. With one rank ours is compared with the loop, and
with the Trainer, that know nothing of ranks. A time is that of the slower rank. All sides of a
model and a world run in the same processes, in turn.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
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
    slowest,
    timed,
)

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.models import Work
    from hvd_strategy import Session

FULL = {"rounds": 15, "rounds_alone": 60, "steps": 4, "fits": 6, "fits_alone": 10, "fit_steps": 40}
QUICK = {"rounds": 3, "rounds_alone": 5, "steps": 2, "fits": 2, "fits_alone": 2, "fit_steps": 12}
FIT_WARM_UP = 5  # steps of a fit that do not count

# Most time of a step in terms of DDP's, by model.
MOST_OF_DDP = {"chain": 0.75, "wide": 0.85, "transformer": 1.0}
MOST_ALONE = 1.01  # in terms of the plain loop, in a world of one

Times = dict[str, list[float]]


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, dict[str, Times]]:
    """Seconds of a step by model, loop (plain, trainer) and side, round by round."""
    from benchmarks.models import WORKS
    from hvd_strategy import open_session

    rank.join()
    results = {}
    for name in settings["models"]:
        session = open_session()
        plain = _plain_alone if rank.size == 1 else _plain_together
        results[name] = {"plain": plain(rank, WORKS[name], session, settings)}
        session.close()
        results[name]["trainer"] = _trainer(rank, WORKS[name], settings)
    return results


def _plain_together(rank: Rank, work: Work, session: Session, settings: dict[str, Any]) -> Times:
    import torch
    from torch import nn

    from benchmarks.models import optimizer_of
    from hvd_strategy import GradientReducer

    single, wrapped, ours = work.build(), work.build(), work.build()
    ddp = nn.parallel.DistributedDataParallel(wrapped)
    optimizer = optimizer_of(ours)
    reducer = GradientReducer(ours.named_parameters(), optimizer, session=session)
    steps = {
        "single": _step(work, single, optimizer_of(single), rank),
        "ddp": _step(work, ddp, optimizer_of(wrapped), rank),
        "ours": _step(work, ours, optimizer, rank),
    }
    sides = {name: timed(step, settings["steps"]) for name, step in steps.items()}
    times = interleave(sides, settings["rounds"], before=rank.barrier)
    for expected, actual in zip(wrapped.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-9)
    reducer.close()
    return times


def _plain_alone(rank: Rank, work: Work, session: Session, settings: dict[str, Any]) -> Times:
    from benchmarks.models import optimizer_of
    from hvd_strategy import GradientReducer

    # Both sides train the same model: where the memory of two copies happens to lie makes more of
    # a difference than what is looked for.
    model = work.build()
    optimizer = optimizer_of(model)
    steps = timed(_step(work, model, optimizer, rank), settings["steps"])

    def with_reducer() -> float:
        reducer = GradientReducer(model.named_parameters(), optimizer, session=session)
        seconds = steps()
        reducer.close()
        return seconds

    return interleave({"single": steps, "ours": with_reducer}, settings["rounds_alone"])


def _step(work: Work, model: nn.Module, optimizer: Any, rank: Rank) -> Callable[[], None]:
    from benchmarks.models import loss_of

    batch = work.batch(rank.index)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()

    return step


def _trainer(rank: Rank, work: Work, settings: dict[str, Any]) -> Times:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from benchmarks.models import loss_of, optimizer_of

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build()
            self.starts: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
            self.starts.append(time.perf_counter())
            return loss_of(self.model(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    def fit(strategy: str) -> float:
        """Median seconds from the start of one step to that of the next."""
        module = Module()
        # The sampler gives each rank its part of the list.
        batches: Any = [work.batch(rank.index)] * (settings["fit_steps"] * rank.size)
        trainer = Trainer(
            accelerator="cpu",
            devices=rank.size,
            strategy=strategy,
            max_epochs=1,
            barebones=True,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None))
        starts = module.starts
        if len(starts) != settings["fit_steps"]:
            raise AssertionError(f"{strategy} made {len(starts)} steps")
        if rank.size > 1:
            gradients = [parameter.grad for parameter in module.parameters()]
            rank.require_same(gradients, f"the gradients of {strategy}")
        pairs = zip(starts[FIT_WARM_UP:-1], starts[FIT_WARM_UP + 1 :], strict=True)
        return statistics.median(after - before for before, after in pairs)

    peer, strategy, fits = "ddp", "ddp", settings["fits"]
    if rank.size == 1:
        peer, strategy, fits = "single", "auto", settings["fits_alone"]
    sides = {peer: lambda: fit(strategy), "ours": lambda: fit("hvd")}
    return interleave(sides, fits, warm_up=1, before=rank.barrier)


def main() -> None:
    """Runs the benchmark and prints it."""
    from benchmarks.models import WORKS

    arguments = parse_arguments(__doc__.splitlines()[0])
    settings = QUICK if arguments.quick else FULL
    report = Report("step", {**settings, "threads": 1})
    for name, work in WORKS.items():
        for size in (2, 1):
            results = run_ranks(measure, size, {**settings, "models": [name]})
            for loop in ("plain", "trainer"):
                by_side = [result[name][loop] for result in results]
                row: dict[str, Any] = {"model": work.title, "ranks": size, "loop": loop}
                row |= {side: slowest([times[side] for times in by_side]) for side in by_side[0]}
                for peer in ("single", "ddp"):
                    if peer in row:
                        row[f"ours/{peer}"] = row["ours"] / row[peer]
                report.rows.append(row)
                if size == 1:
                    value, limit, peer = row["ours/single"], MOST_ALONE, "single"
                else:
                    value, limit, peer = row["ours/ddp"], MOST_OF_DDP[name], "ddp"
                world = "1 rank" if size == 1 else f"{size} ranks"
                label = f"{work.title}, {loop}, {world}: ours / {peer}"
                report.figures.append(Figure(label, value, limit, "x", True))
    columns: dict[str, Callable[[Any], str]] = dict.fromkeys(("model", "ranks", "loop"), str)
    columns |= dict.fromkeys(("single", "ddp", "ours"), show_seconds)
    columns |= dict.fromkeys(("ours/single", "ours/ddp"), _show_precise_ratio)
    report.print(as_json=arguments.json, columns=columns)


def _show_precise_ratio(value: float) -> str:
    return f"{value:.3f}x"


if __name__ == "__main__":
    main()
