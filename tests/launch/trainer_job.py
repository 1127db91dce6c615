"""What test_trainer_launch.py starts: a script with a Trainer, as a user would write it.

It does not import hvd_strategy. Every rank prints a line of JSON at the end of fit.
"""

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
from importlib import import_module
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--tree", default="lightning.pytorch")
parser.add_argument("--strategy", default="hvd")
parser.add_argument("--devices", default="2")
parser.add_argument("--without-mpi4py", action="store_true")
parser.add_argument("--fail", type=int, help="rank that raises an exception")
parser.add_argument("--terminate", type=int, help="rank that gets SIGTERM")
parser.add_argument("--announce", type=int, help="rank that gets SIGUSR1, as before a job's end")
parser.add_argument("--directory")
args = parser.parse_args()

if args.without_mpi4py:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

pl: Any = import_module(args.tree)


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == args.fail:
            raise ArithmeticError("the fourth bearing is hot")
        if batch_idx == 2 and self.global_rank == args.terminate:
            os.kill(os.getpid(), signal.SIGTERM)
        if batch_idx == 2 and self.global_rank == args.announce and self.current_epoch == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return (self.layer(batch[0]) ** 2).mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.first_step = self.trainer.global_step

    def on_fit_end(self) -> None:
        report(self, self.trainer)


def report(model: Any, trainer: Any) -> None:
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    line = {
        "rank": trainer.global_rank,
        "size": trainer.world_size,
        "steps": trainer.global_step,
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "strategy": f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__qualname__}",
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "first_step": getattr(model, "first_step", None),
        "collector": gc.get_threshold(),
        "imported without collections": "hvd_strategy._rank_imports" in sys.modules,
    }
    say(json.dumps(line))


def say(text: str) -> None:
    # In one piece: the ranks share the pipe.
    os.write(1, f"{text}\n".encode())


def process_state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(signum) for signum in signal.valid_signals()],
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "torch threads": torch.get_num_threads(),
        "folder": os.getcwd(),
    }


def make_trainer() -> Any:
    return pl.Trainer(
        accelerator="cpu",
        devices=int(args.devices) if args.devices.isdigit() else args.devices,
        strategy=args.strategy,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=args.directory is not None,
        default_root_dir=args.directory,
    )


def main() -> None:
    model = Model()
    trainer = make_trainer()
    data = DataLoader(TensorDataset(torch.arange(96.0).view(24, 4) / 96), 2)
    before = process_state()
    trainer.fit(model, data)
    after = process_state()
    workers = args.strategy != "hvd"
    if not workers:
        # This process is a rank, in which data loaders take their seeds from torch.
        del before["torch"], after["torch"]
    assert after == before
    if workers:
        assert not multiprocessing.active_children()
        report(model, trainer)
    else:
        # The same ranks again, by the same Trainer and by another.
        another = make_trainer()
        for each in (trainer, another):
            each.test(model, data, verbose=False)
            assert dict(os.environ) == before["environment"]
        assert another.strategy.session is trainer.strategy.session
        say(f"tested on rank {another.global_rank}")


if __name__ == "__main__":
    main()
