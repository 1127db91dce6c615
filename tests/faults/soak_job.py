"""What the ranks of `tests.faults.soak` run: two small trainings, with one fault on one rank.

The training calls `Faults.at` at places where the fault may be; on the victim, and at the right
step, that is where it happens. At places inside a wait (`Faults.inside`) the others come late, and
a thread of the victim sends the signal while its main thread waits for them.

Only things that a user's program could do happen here: signals, exits, exceptions.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_strategy import _core, open_session
from hvd_strategy.lightning import HvdStrategy
from tests.faults.ranks import Training

# By the program; each with the steps at which it comes by (0 where there is only one).
LOOP_PLACES: dict[str, tuple[int, ...]] = {
    "start": (0,),
    "handshake": (0,),
    "opened": (0,),
    "forward": (0, 1, 4, 7),
    "backward": (0, 1, 4, 7),
    "flush": (0, 1, 4, 7),
    "loading": (1, 4),
    "holding the GIL": (3,),
    "between": (0, 3, 6),
    "barrier": (2, 5),
    "torch.distributed": (2, 5),
    "checkpoint": (4,),
    "checked": (0,),
    "closing": (0,),
    "closed": (0,),
    "exit": (0,),
}
TRAINER_PLACES: dict[str, tuple[int, ...]] = {
    "start": (0,),
    "handshake": (0,),
    "setup": (0,),
    "forward": (0, 1, 5),
    "backward": (0, 1, 5),
    "flush": (0, 1, 5),
    "validation": (0, 1),
    "validation end": (0, 1),
    "checkpoint": (0, 1),
    "writing": (0, 1),
    "fit end": (0,),
    "closed": (0,),
    "exit": (0,),
}
# Where the ranks are not connected yet: a death is known to the others by its absence.
STARTING = ("start", "handshake")
# Where all that needs the other ranks is over.
ENDING = ("checked", "closing", "closed", "exit", "fit end")
STEPS = 8
WARNING = 0.4


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        program: "loop" or "trainer".
        action: "kill", "stop", "term", "_exit", "exit", "raise"; "none" in a run without a fault,
            and where the signal comes from outside at a time of its own.
        rank: The victim.
        place: One of the program's places.
        step: At which step.
        workers: Whether the victim has DataLoader workers, forked while the session is open.
    """

    program: str
    action: str = "none"
    rank: int = -1
    place: str = ""
    step: int = 0
    workers: bool = False


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


class Faults:
    """Has the fault happen."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._is_victim = int(os.environ["RANK"]) == fault.rank

    def at(self, place: str, step: int = 0) -> None:
        """The victim comes by."""
        if self._is_victim and (place, step) == (self._fault.place, self._fault.step):
            self._act()

    def before(self, place: str, step: int = 0) -> None:
        """The fault will be `inside` this place: the others come late to it."""
        if not self._is_victim and (place, step) == (self._fault.place, self._fault.step):
            time.sleep(0.2)

    def inside(self, place: str, step: int = 0) -> None:
        """The main thread is about to wait for the others."""
        if self._is_victim and (place, step) == (self._fault.place, self._fault.step):
            threading.Timer(0.05, self._act).start()

    def holding_the_gil(self, step: int) -> None:
        """In C code that keeps the interpreter for itself; the signal comes from outside."""
        if self._is_victim and ("holding the GIL", step) == (self._fault.place, self._fault.step):
            say("signal me")
            ctypes.PyDLL(None).sleep(2)

    def _act(self) -> None:
        self._is_victim = False  # once: the program may come by again
        say(f"FAULT {time.monotonic()}")
        action = self._fault.action
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif action == "_exit":
            os._exit(0)
        elif action == "exit":
            sys.exit(0)
        elif action == "raise":
            raise ZeroDivisionError("the fault of this round")


def run(fault: Fault, folder: str, timeout: float, stall_abort: float) -> None:
    """What every rank runs."""
    faults = Faults(fault)
    # Called after the session's own, which was registered later.
    atexit.register(faults.at, "exit")
    faults.at("start")
    connect = _core.Session

    def connect_with_fault(*args: Any, **kwargs: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) > 1:
            faults.at("handshake")
        return connect(*args, **kwargs)

    _core.Session = connect_with_fault  # type: ignore[misc,assignment]
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout),
        "stall_warning_seconds": WARNING,
        "stall_abort_seconds": stall_abort,
        "abort_grace_seconds": 2.0,
    }
    program: Callable[..., None] = {"loop": _loop, "trainer": _trainer}[fault.program]
    program(fault, faults, Path(folder), options)


# ---- a plain loop --------------------------------------------------------------------------------


def _loop(fault: Fault, faults: Faults, folder: Path, options: dict[str, Any]) -> None:
    session = open_session(**options)
    faults.at("opened")
    training = Training(session)
    batches = None
    if fault.workers and session.rank == fault.rank:
        numbers: list[int] = list(range(1000))
        loader: DataLoader[int] = DataLoader(
            numbers,  # type: ignore[arg-type]
            num_workers=1,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
    for step in range(STEPS):
        session.set_activity(f"step {step}")
        faults.at("loading", step)
        if batches is not None:
            next(batches)
        faults.at("forward", step)
        faults.before("flush", step)

        def in_backward(step: int = step) -> None:
            faults.at("backward", step)
            faults.inside("flush", step)

        training.step(in_backward=in_backward)
        faults.at("between", step)
        faults.holding_the_gil(step)
        if step % 3 == 2:
            faults.before("barrier", step)
            faults.inside("barrier", step)
            session.barrier()
            faults.before("torch.distributed", step)
            faults.inside("torch.distributed", step)
            dist.all_reduce(torch.ones(1))
        if step == 4:
            faults.at("checkpoint", step)
            if session.rank == 0:
                torch.save(training.model.state_dict(), folder / "loop.ckpt")
            session.barrier()
    training.check()
    say("right")
    faults.at("checked")
    training.reducer.close()
    faults.at("closing")
    session.close()
    faults.at("closed")


# ---- a Trainer -----------------------------------------------------------------------------------


class _Model(LightningModule):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))  # rank 0's weights count
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 1)
        )
        self.faults = faults
        self.saved = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        step = self.global_step
        self.faults.at("forward", step)
        self.faults.before("flush", step)
        hidden = self.layers[:2](batch[0])

        def in_backward(_: Tensor) -> None:
            self.faults.at("backward", step)
            self.faults.inside("flush", step)

        hidden.register_hook(in_backward)
        return self.layers[2:](hidden).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.faults.at("validation", self.current_epoch)
        self.log("loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def on_validation_end(self) -> None:
        self.faults.at("validation end", self.current_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.faults.at("checkpoint", self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Writing(TorchCheckpointIO):
    """Rank 0 is about to write."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.saved = 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        number, self.saved = self.saved, self.saved + 1
        self.faults.at("writing", number)
        super().save_checkpoint(checkpoint, path, storage_options)


class _Places(Callback):
    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.faults.at("setup")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
        say(f"right {weights.double().sum().item().hex()}")
        self.faults.at("fit end")


def _trainer(fault: Fault, faults: Faults, folder: Path, options: dict[str, Any]) -> None:
    # Rank by rank another part of the data; the last batch of each epoch is short.
    data = TensorDataset(torch.linspace(-1, 1, 3 * 14 * 8).view(-1, 8).sin())
    workers = 1 if fault.workers else 0
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=HvdStrategy(**options),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[_Writing(faults)],
        callbacks=[_Places(faults), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )
    model = _Model(faults)
    try:
        trainer.fit(
            model,
            DataLoader(
                data, 4, num_workers=workers, multiprocessing_context="fork" if workers else None
            ),
            DataLoader(data, 8),
        )
    except SystemExit:
        say(f"ended by SIGTERM after {trainer.global_step}")
        raise
    faults.at("closed")
