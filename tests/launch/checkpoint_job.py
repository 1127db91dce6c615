"""What test_checkpoint_launch.py starts: ranks that monitor different values, then load the best.

`checkpoint_job.py STRATEGY FOLDER`; the process that started the ranks prints the outcome.
"""

import json
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

strategy, folder = sys.argv[1:]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        # Rank 0's is at its best after the first epoch, those of the others after the last.
        epoch = float(self.current_epoch)
        self.log(
            "own", 3 * epoch if self.global_rank == 0 else -epoch, on_step=False, on_epoch=True
        )
        return (self.layer(batch[0]) ** 2).mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", (self.layer(batch[0]) ** 2).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    callback = ModelCheckpoint(folder, "{epoch}-{own}", monitor="own", save_top_k=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    data = DataLoader(TensorDataset(torch.arange(32.0).view(8, 4) / 32), 2)
    model = Model()
    trainer.fit(model, data)
    [tested] = trainer.test(model, data, ckpt_path="best", verbose=False, weights_only=False)
    if trainer.is_global_zero:
        best = torch.load(callback.best_model_path, weights_only=False)
        model.load_state_dict(best["state_dict"])
        expected = torch.stack([(model.layer(rows) ** 2).mean() for (rows,) in data]).mean()
        print(json.dumps([callback.best_model_path, tested["loss"], expected.item()]), flush=True)


if __name__ == "__main__":
    main()
