"""Under the Trainer: a hook in which one rank does what all have to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.fork_server import ForkServer
from tests.faults.ranks import say


class RankConditional(LightningModule):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.what = what

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if batch_idx != 1 or int(os.environ["RANK"]) != 1:
            return
        if self.what == "barrier":
            self.trainer.strategy.barrier()
        else:
            self.trainer.strategy.reduce(torch.ones(1))  # what self.log(sync_dist=True) does

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: str, what: str) -> None:
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 96).view(24, 4)), 4)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="hvd",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(RankConditional(what), data)
    say("finished")


@pytest.mark.parametrize(
    ("what", "named"), [("barrier", "barrier"), ("reduce", "allreduce (sum) of 1 x float32")]
)
def test_what_one_rank_does_alone(
    server: ForkServer, tmp_path: Path, what: str, named: str
) -> None:
    with server.start_function(fit, str(tmp_path), what) as ranks:
        assert ranks.wait() == [1, 1], ranks.report()
        for rank in range(2):
            error = ranks.wait_for(f"MismatchError: rank {rank} cannot go on: the ranks wait", rank)
            assert "rank 0 waits for the end of backward 2 on rank 1 (last seen " in error.text
            assert "layer.bias, layer.weight" in error.text
            assert f"rank 1 waits for {named}, which has not been called by rank 0; " in error.text
        assert "finished" not in ranks.output()
