"""What `uneven_inputs="join"` costs in a step in which all ranks have a batch.

    python -m benchmarks.join [--quick] [--json]

Two ranks, a Trainer and a small model, data with a length and without. The sides are a run with the
option and one of which everything is taken away that keeps the ranks' batches in step. A run's time
is that of its steps, from the end of one batch to the end of the next, which a quarter of them stay
below; the figure is the median over the rounds of the difference, of the rank with the larger one.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
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

STEPS = 200
ROUNDS = 24
QUICK_STEPS = 30
QUICK_ROUNDS = 2
WARM_UP = 20  # steps of a run that do not count

MOST_MICROSECONDS = 20.0


def measure(rank: Rank, settings: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by kind of data and side, run by run."""
    from hvd_strategy import open_session

    rank.join()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    results = {}
    for kind in ("length", "no length"):
        sides: dict[str, Callable[[], float]] = {
            name: partial(_run, kind, keeps_step, settings["steps"])
            for name, keeps_step in (("without", False), ("join", True))
        }
        results[kind] = interleave(sides, settings["rounds"], warm_up=1, before=rank.barrier)
    open_session().close()
    return results


def _run(kind: str, keeps_step: bool, steps: int) -> float:
    """Seconds of a step of one fit."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset

    from hvd_strategy.lightning import HvdStrategy

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.body(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Clock(Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    class Without(HvdStrategy):
        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            self.reducer.attach_notes(None)
            self._inputs.detach()
            self._inputs = None

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    batches = [torch.ones(4, 8)] * steps
    data: Any = batches if kind == "length" else Stream()
    clock = Clock()
    trainer = Trainer(
        strategy=(HvdStrategy if keeps_step else Without)(),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model(), DataLoader(data, None))
    times = clock.times[WARM_UP:]
    return statistics.quantiles((b - a for a, b in pairwise(times)), n=4)[0]


def main() -> None:
    """Runs the benchmark and prints it."""
    arguments = parse_arguments(__doc__.splitlines()[0])
    settings = {
        "steps": QUICK_STEPS if arguments.quick else STEPS,
        "rounds": QUICK_ROUNDS if arguments.quick else ROUNDS,
    }
    report = Report("join", {"ranks": 2, **settings})
    by_rank = run_ranks(measure, 2, settings)
    for kind in by_rank[0]:
        medians = {
            side: max(statistics.median(result[kind][side]) for result in by_rank)
            for side in ("without", "join")
        }
        report.rows += [
            {"data": kind, "side": side, "step": value} for side, value in medians.items()
        ]
        more = 1e6 * max(
            statistics.median(
                join - without
                for join, without in zip(result[kind]["join"], result[kind]["without"], strict=True)
            )
            for result in by_rank
        )
        report.figures.append(
            Figure(f"data with {kind}: join, per step", more, MOST_MICROSECONDS, "us", True)
        )
    report.print(as_json=arguments.json, columns={"data": str, "side": str, "step": show_seconds})


if __name__ == "__main__":
    main()
