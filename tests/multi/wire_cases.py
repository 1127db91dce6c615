"""What travels in 16 bits, by torch: the single-process reference of `wire_dtype`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def on_wire(gradient: Tensor, dtype: str | None) -> Tensor:
    """A rank's gradient as the others get it: rounded once.

    For fp16, values are brought into its range by a power of two. Which one does not matter for
    values that are not many orders of magnitude below the largest.
    """
    if dtype is None:
        return gradient
    scale = 1.0
    finite = gradient[gradient.isfinite()].abs()
    if dtype == "fp16" and finite.numel() and finite.max() > 0:
        scale = 2.0 ** (15 - math.frexp(finite.max().item())[1])
    return (gradient * scale).to(DTYPES[dtype]).to(gradient.dtype) / scale


def mean_by_wire(gradients: Sequence[Tensor], dtype: str | None) -> Tensor:
    """The mean over the ranks, added up in their order in the gradients' own type."""
    rounded = [on_wire(gradient, dtype) for gradient in gradients]
    return sum(rounded[1:], rounded[0]) * (1.0 / len(rounded))


def dtype_at(schedule: dict[int, str | None], step: int) -> str | None:
    begun = [of for of in schedule if of <= step]
    return schedule[max(begun)] if begun else None
