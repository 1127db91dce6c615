"""The three models whose training steps `benchmarks.step` times, each with one fixed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEED = 1


@dataclass(frozen=True)
class Work:
    """A model and what it is trained on; `batch(rank)` differs between ranks."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]

    def build(self) -> nn.Module:
        """The model, with the same weights at every call."""
        torch.manual_seed(SEED)
        return self.model()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # So small a rate that no number of steps leads to numbers which take another time.
    return torch.optim.SGD(model.parameters(), lr=1e-5)


def _chain() -> nn.Module:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(320)]
    for layer in layers:
        # Keeps lengths through 320 layers: denormal numbers would be slow.
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def _wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)))


class _Transformer(nn.Module):
    WORDS = 1000

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.WORDS, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 768, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, self.WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return scores


def _normal(rows: int, width: int) -> Callable[[int], Tensor]:
    return lambda rank: torch.randn(rows, width, generator=_generator(rank))


def _tokens(rank: int) -> Tensor:
    return torch.randint(_Transformer.WORDS, (8, 16), generator=_generator(rank))


def _generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + rank)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


WORKS = {
    "chain": Work("320 tensors of 64x64", _chain, _normal(16, 64)),
    "wide": Work("8 x Linear(1024)", _wide, _normal(64, 1024)),
    "transformer": Work("transformer, 3M parameters", _Transformer, _tokens),
}
