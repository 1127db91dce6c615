"""Trains a small language model on text of uneven length, with the mean over tokens.

    python examples/ragged_tokens.py                        # two CPU processes
    torchrun --nproc-per-node 2 examples/ragged_tokens.py

Each process takes as many paragraphs of Python's own documentation as the others, but they are of
different length. The mean of the processes' mean losses then weights a token of a short batch more
than one of a long batch; how much more depends on which process got which batch. With
`gradient_average="items"` every token counts the same, wherever it is, and whatever batch of an
accumulation window it is in: the training is that of one process which has all of them.

It trains three times from the same weights: in one process, with the mean over tokens, and with
the plain mean over processes. It fails unless the second equals the first and the third does not.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from hvd_strategy import HvdStrategy

PROCESSES = 2
PARAGRAPHS = 6  # per process and batch
BATCHES = 11  # per process; windows of two and a last one of one
WINDOW = 2
LONGEST = 120  # tokens of a paragraph
WORDS = 400  # in the vocabulary, besides "any other" and padding
PADDING = -100  # of targets: what cross_entropy ignores


def paragraphs() -> list[Tensor]:
    """Paragraphs of Python's documentation, as numbers of words."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    split = [re.findall(r"\w+|[^\w\s]", part)[:LONGEST] for part in text.split("\n\n")]
    split = [words for words in split if len(words) > 1]
    common = Counter(word for words in split for word in words).most_common(WORDS)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}
    return [torch.tensor([numbers.get(word, 0) for word in words]) for words in split]


def batches_of(rank: int, processes: int) -> list[list[Tensor]]:
    """The batches of one process: lists of paragraphs."""
    share = paragraphs()[rank::processes]
    return [share[i : i + PARAGRAPHS] for i in range(0, BATCHES * PARAGRAPHS, PARAGRAPHS)]


def inputs_and_targets(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Each word is to tell the next one. Both are (paragraphs, words)."""
    inputs = pad_sequence([words[:-1] for words in batch], batch_first=True)
    targets = pad_sequence([words[1:] for words in batch], batch_first=True, padding_value=PADDING)
    return inputs, targets


class LanguageModel(LightningModule):
    """One transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, 32)
        self.places = nn.Embedding(LONGEST, 32)
        self.layer = nn.TransformerEncoderLayer(
            32, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(32, WORDS + 1)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        seen = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.words(inputs) + self.places(torch.arange(length))
        return self.head(self.layer(hidden, src_mask=seen, is_causal=True))

    def loss(self, batch: list[Tensor]) -> tuple[Tensor, int]:
        """The mean over the tokens, and how many they are."""
        inputs, targets = inputs_and_targets(batch)
        loss = nn.functional.cross_entropy(
            self(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING
        )
        return loss, int((targets != PADDING).sum())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        loss, tokens = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        # With gradient_average="items" this key is all that it takes.
        return {"loss": loss, "num_items": tokens}

    def train_dataloader(self) -> Any:
        mine = batches_of(self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(mine, batch_size=None, collate_fn=list)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(average: str) -> tuple[LanguageModel, float]:
    """Trains on all processes; returns the model and the loss of the epoch."""
    torch.manual_seed(0)
    model = LanguageModel()
    trainer = Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=HvdStrategy(gradient_average=average),
        max_epochs=1,
        accumulate_grad_batches=WINDOW,
        use_distributed_sampler=False,  # the batches are split already
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return model, float(trainer.callback_metrics["loss"])


def train_alone(processes: int) -> tuple[LanguageModel, float]:
    """The same in one process: the mean over all tokens of all processes and of a window."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = model.configure_optimizers()
    of_ranks = [batches_of(rank, processes) for rank in range(processes)]
    total, tokens = 0.0, 0
    for start in range(0, BATCHES, WINDOW):
        window = [batch for batches in of_ranks for batch in batches[start : start + WINDOW]]
        loss, count = model.loss([words for batch in window for words in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * count
        tokens += count
    return model, total / tokens


def difference(model: LanguageModel, expected: LanguageModel) -> float:
    """The largest difference of a weight."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def main() -> int:
    """Trains three times and compares; returns the exit status."""
    warnings.filterwarnings("ignore", module="lightning")
    by_items, loss_of_items = train("items")
    by_ranks, loss_of_ranks = train("ranks")
    trainer = by_items.trainer
    if not trainer.is_global_zero:
        return 0
    processes = trainer.world_size
    alone, loss_alone = train_alone(processes)
    print("tokens by batch")
    for rank in range(processes):
        counts = [sum(len(words) - 1 for words in batch) for batch in batches_of(rank, processes)]
        print(f"    process {rank}: {counts}")
    off_items, off_ranks = difference(by_items, alone), difference(by_ranks, alone)
    print(f"one process:                   loss {loss_alone:.6f}")
    for name, loss, off in (
        ("items", loss_of_items, off_items),
        ("ranks", loss_of_ranks, off_ranks),
    ):
        average = f'gradient_average="{name}":'
        print(f"{average:30} loss {loss:.6f}, weights differ by up to {off:.1e}")
    right = off_items < 1e-6 and abs(loss_of_items - loss_alone) < 1e-5
    if right and off_ranks > 1e-3:
        print("The mean over items is the training of one process; the mean over ranks is another.")
        return 0
    print("This is not as expected.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
