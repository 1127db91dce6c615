"""Passes over reduced gradients: undoing the loss scale, looking for inf and nan, norm, clipping.

Most are not needed: the reduction has checked and squared every value on its way, and what it found
holds as long as nobody has written to the gradient, which its version and address tell (but not
for edits through `.data` or numpy, which leave no trace). What is not known is computed, and what
has to be written is written, in one pass of the core for everything that is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_strategy import _core
from hvd_strategy.parameters import WIRE_NAMES

__all__ = ["Products", "clip_factor", "measure", "rescale", "total_norm"]

# Sum of squares, and whether all values are finite.
Products = tuple[float, bool]


def rescale(gradients: Sequence[Tensor], factor: float) -> list[Products]:
    """Multiplies gradients in place; returns what the results are like.

    With a factor of 1 they are only read.

    Args:
        gradients: Dense or sparse, on the CPU, of a floating or complex dtype.
        factor: The factor.
    """
    pieces, places, results = [], [], []
    kept: list[Tensor] = []
    for gradient in gradients:
        values = gradient.detach()
        results.append((0.0, True))
        memory = _memory_of(values)
        if memory is None:
            # Sparse, in pieces, or conjugated lazily: rare enough for torch's own operations.
            if factor != 1.0:
                gradient.mul_(factor)
            results[-1] = _products_of(values)
            continue
        kept.append(memory)
        name, parts = WIRE_NAMES[memory.dtype]
        places.append(len(results) - 1)
        pieces.append((memory.data_ptr(), memory.numel() * parts, name))
    for place, found in zip(places, _core.rescale(pieces, factor), strict=True):
        results[place] = found
    if factor != 1.0:
        for memory in kept:
            torch.autograd.graph.increment_version(memory)
    return results


def measure(
    core: Any,
    numbered: Sequence[tuple[int | None, Tensor]],
    remembered: Mapping[int, Products],
) -> tuple[list[Products], list[Tensor]]:
    """What the gradients of parameters are like, known or computed.

    Args:
        core: The core's reducer; None when it has reduced nothing.
        numbered: Pairs of the parameter's number there (None: it has none) and the parameter.
        remembered: What is known from elsewhere, by the id of the parameter.

    Returns:
        The products of those that have a gradient, and these gradients.
    """
    numbered = [(index, parameter) for index, parameter in numbered if parameter.grad is not None]
    known = [remembered.get(id(parameter)) for _, parameter in numbered]
    if core is not None:
        places = [
            place
            for place, (index, _) in enumerate(numbered)
            if index is not None and known[place] is None
        ]
        found = core.known_products([numbered[place] for place in places])
        for place, products in zip(places, found, strict=True):
            known[place] = products
    gradients: list[Tensor] = []
    for _, parameter in numbered:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
    unknown = [place for place, products in enumerate(known) if products is None]
    computed = rescale([gradients[place] for place in unknown], 1.0) if unknown else []
    for place, products in zip(unknown, computed, strict=True):
        known[place] = products
    return [products for products in known if products is not None], gradients


def total_norm(products: Iterable[Products]) -> float:
    """The 2-norm of all values together; inf or nan when one of them is not finite."""
    squares = 0.0
    finite = True
    for square, of_finite in products:
        squares += square
        finite = finite and of_finite
    # A sum of squares may overflow where no value does, and says nothing once a value is inf.
    return math.sqrt(squares) if finite or not math.isfinite(squares) else math.inf


def clip_factor(norm: float, max_norm: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients by."""
    # 1e-6 as there: a norm of 0 divides nothing by 0.
    factor = max_norm / (norm + 1e-6)
    return factor if math.isnan(factor) else min(1.0, factor)


def _products_of(values: Tensor) -> Products:
    if values.layout is not torch.strided:
        # What a sparse optimizer sees are sums over repeated indices.
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.double().square().sum().item(), bool(torch.isfinite(values).all())


def _memory_of(values: Tensor) -> Tensor | None:
    """The tensor, if its elements fill one piece of memory; in whatever order."""
    if values.layout is not torch.strided or values.dtype not in WIRE_NAMES:
        return None
    if values.is_conj() or values.is_neg():
        return None
    if values.is_contiguous():
        return values
    order = sorted(range(values.dim()), key=values.stride().__getitem__, reverse=True)
    values = values.permute(order)
    return values if values.is_contiguous() else None
