"""What the tests of torch.compile share: small networks, ways to compile them, and counters.

Inductor compiles C++ here, which takes seconds per graph, so the nets are tiny; "aot_eager" takes
everything but the last step of the same path, and serves where only breadth matters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.multi.reducer_cases import FEATURES

# How a user may compile a model; "blocks" replaces them, "in place" leaves them where they are.
WAYS = ("whole", "blocks", "in place")


class Block(nn.Module):
    """Two layers and a residual connection."""

    def __init__(self, width: int = FEATURES) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.second(torch.tanh(self.first(inputs)))


class Stack(nn.Module):
    """Blocks with a head; `recompute` has the blocks compute their activations twice."""

    def __init__(self, depth: int = 2, recompute: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(FEATURES, 1)
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute:
                reentrant = self.recompute == "reentrant"
                inputs = checkpoint(block, inputs, use_reentrant=reentrant)
            else:
                inputs = block(inputs)
        return self.head(inputs)


def cache_folder(factory: pytest.TempPathFactory) -> str:
    """The folder of this run in which compiled code is kept, the same for all tests."""
    return str(factory.getbasetemp() / "inductor")


def prepare_compiler(cache: str) -> None:
    """Has this worker compile from scratch, with one cache for the ranks of a test.

    Without processes of the compiler's own, which would outlive the test.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.vec_isa_ok = True  # what the processor has, the C++ compiler knows
    torch._dynamo.utils.counters.clear()


def compiled(model: nn.Module, way: str, **arguments: Any) -> Callable[..., Any]:
    """Compiles a `Stack`, or another module where `way` is "whole"; returns what to call."""
    if way == "whole":
        return torch.compile(model, **arguments)
    for number, block in enumerate(model.blocks):
        if way == "blocks":
            model.blocks[number] = torch.compile(block, **arguments)
        else:
            block.compile(**arguments)
    return model


def compiler_counts() -> dict[str, Any]:
    """What the compiler did since `prepare_compiler`: graphs, breaks by their reason, frames."""
    counters = torch._dynamo.utils.counters
    return {
        "graphs": dict(counters["stats"]),
        "breaks": {reason.split("\n")[0]: n for reason, n in counters["graph_break"].items()},
        "frames": dict(counters["frames"]),
    }
