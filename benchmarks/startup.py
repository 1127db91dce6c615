"""Time from the construction of the Trainer to the first batch: DDP and ours.

    python -m benchmarks.startup [--quick] [--json]

Every measurement is a fresh `Trainer(strategy=..., devices=2)` job that starts its second rank by
itself, as a script does that is run by hand; the sides take turns. Most of the time is the second
process importing torch and Lightning, on both sides. The clock starts when rank 0 has imported
everything, and stops when its first batch begins. `whole job` is the time of the process of rank 0
from its start to its end, imports and clean-up included.

Before anything is measured our package is compiled to bytecode, which pip does when it installs a
package: otherwise PYTHONDONTWRITEBYTECODE would have it compiled at every start.
"""

from __future__ import annotations

import argparse
import compileall
import ctypes
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.measure import ROOT, TIMEOUT, Figure, Report, parse_arguments, show_seconds

RANKS = 2
REPETITIONS = 7
QUICK_REPETITIONS = 1

MOST_OF_DDP = 1.0

SIDES = {"ddp": "ddp", "ours": "hvd"}  # what `Trainer(strategy=...)` is given

_MARK = "seconds to the first batch:"


def job(strategy: str) -> None:
    """What every rank of a measured job runs."""
    import warnings

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.layers(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class FirstBatch(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.is_global_zero:
                print(_MARK, time.perf_counter() - start)

    data = DataLoader(TensorDataset(torch.randn(64, 64)), 8)
    start = time.perf_counter()
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=1,
        callbacks=[FirstBatch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), data)
    if strategy == "ddp":
        # With threads of Gloo left the interpreter's end aborts the process now and then.
        torch.distributed.destroy_process_group()


def measure(strategy: str) -> tuple[float, float]:
    """Seconds to the first batch, and of the whole job."""
    launchers = ("SLURM_", "PMI", "OMPI_", "MPI_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "MASTER_")
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(launchers)
    }
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", "--job", strategy],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    whole = time.perf_counter() - start
    _await_orphans()
    for line in result.stdout.splitlines():
        if line.startswith(_MARK) and result.returncode == 0:
            return float(line.removeprefix(_MARK)), whole
    raise SystemExit(
        f"the job with strategy={strategy!r} ended with {result.returncode}:\n"
        f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    )


def _adopt_orphans() -> None:
    """Makes ranks ours whose parent, rank 0, has ended: nothing else counts their CPU time."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _await_orphans() -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            raise SystemExit("A rank did not end after rank 0.")
        if ended == 0:
            time.sleep(0.01)


def main() -> None:
    """Runs the benchmark and prints it."""
    if "--job" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--job", choices=list(SIDES.values()), required=True)
        job(parser.parse_args().job)
        return
    arguments = parse_arguments(__doc__.splitlines()[0])
    repetitions = QUICK_REPETITIONS if arguments.quick else REPETITIONS
    compileall.compile_dir(ROOT / "hvd_strategy", quiet=1)
    _adopt_orphans()
    report = Report("startup", {"ranks": RANKS, "repetitions": repetitions})
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(repetitions):
        for side, strategy in SIDES.items():
            times[side].append(measure(strategy))
    medians = {
        side: [statistics.median(values) for values in zip(*pairs, strict=True)]
        for side, pairs in times.items()
    }
    report.rows = [
        {"side": side, "first batch": first, "whole job": whole}
        for side, (first, whole) in medians.items()
    ]
    first, whole = (ours / ddp for ours, ddp in zip(medians["ours"], medians["ddp"], strict=True))
    report.figures = [
        Figure("ours / ddp, first batch", first, MOST_OF_DDP, "x", True),
        Figure("ours / ddp, whole job", whole, MOST_OF_DDP, "x", True),
    ]
    report.print(
        as_json=arguments.json,
        columns={"side": str, "first batch": show_seconds, "whole job": show_seconds},
    )


if __name__ == "__main__":
    main()
