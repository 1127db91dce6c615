"""GradientReducer and every dtype, shape and stride that a gradient may have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    TINY,
    Side,
    State,
    Together,
    bits,
    check,
    gradients,
    parameters,
    small_net,
    square_error,
)


def rounded_mean(dtype: torch.dtype, cap: float | None) -> None:
    session = open_session()
    side = Together(session)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if dtype.is_complex:
        wide = dtype
    try:
        shapes = [(33, 7), (), (0,), (1,), (1000,)]
        model = nn.ParameterList([torch.randn(shape, dtype=dtype) for shape in shapes])
        side.reduce(model, bucket_cap_mb=cap)
        for step in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(step)
            factors = [
                [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
                for _ in range(session.size)
            ]
            products = [
                (parameter * factor).sum()
                for parameter, factor in zip(model, factors[session.rank], strict=True)
            ]
            total = sum(products[1:], products[0])
            (total.real if dtype.is_complex else total).backward()
            for index, parameter in enumerate(model):
                of_all = [factors[rank][index].conj().to(wide) for rank in range(session.size)]
                mean = sum(of_all[1:], of_all[0]) / session.size
                assert parameter.grad is not None
                assert parameter.grad.dtype == dtype
                if wide == dtype:
                    torch.testing.assert_close(parameter.grad, mean, rtol=1e-6, atol=1e-6)
                else:
                    assert bits(parameter.grad) == bits(mean.to(dtype))
    finally:
        side.close()


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize("cap", [TINY, None])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_types_and_shapes(ranks: Ranks, dtype: torch.dtype, cap: float | None) -> None:
    ranks(rounded_mean, dtype, cap)


def mixed(side: Side, cap: float | None) -> State:
    """Several dtypes, and strides other than row-major, in one model."""
    model = nn.ParameterDict(
        {
            "image": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
            "turned": torch.randn(5, 3).t(),
            "wide": torch.randn(6, dtype=torch.float64),
            "narrow": torch.randn(6, dtype=torch.bfloat16),
            "complex": torch.randn(6, dtype=torch.complex64),
            "plain": torch.randn(6),
        }
    )
    # What is not needed for training may be there as well.
    model["count"] = nn.Parameter(torch.arange(3), requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.is_floating_point()], lr=0.1)
    side.reduce(model, optimizer, bucket_cap_mb=cap)

    def loss(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        image = torch.randn(2, 3, 4, 4, generator=generator)
        total = nn.functional.conv2d(image, model["image"]).square().mean()
        total = total + (model["turned"] @ torch.randn(5, 1, generator=generator)).square().mean()
        # Numbers that bf16 holds exactly, so that the order of rounding does not matter.
        total = total + (2.0 ** -(rank + 1)) * model["narrow"].sum()
        total = total + (model["complex"] * (rank + 1j)).sum().abs()
        total = total + (model["wide"] * model["plain"]).sum() * (rank + step)
        return total.float()

    strides = {name: parameter.stride() for name, parameter in model.items()}
    for step in range(4):
        optimizer.zero_grad()
        model["complex"].grad = None
        side.backward(lambda rank, step=step: loss(step, rank))
        for name, parameter in model.items():
            if parameter.grad is not None:
                assert parameter.grad.stride() == strides[name], name
                assert parameter.grad.dtype == parameter.dtype
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("cap", [TINY, None])
def test_mixed_types_and_strides(ranks: Ranks, cap: float | None) -> None:
    ranks(check, mixed, cap)


def conjugated(side: Side) -> State:
    """Ranks reach one gradient by ways that leave its conjugation to be done on one of them."""
    model = nn.ParameterList([torch.randn(6, dtype=torch.complex64)])
    side.reduce(model)
    for _ in range(2):
        model.zero_grad()
        side.backward(
            lambda rank: (model[0].conj() if rank else model[0]).mul(rank + 1 + 2j).sum().real
        )
    return gradients(model)


def test_lazily_conjugated_gradients(ranks: Ranks) -> None:
    ranks(check, conjugated)


def in_shared_memory(side: Side) -> State:
    """The parameters move to other memory between two steps."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    for step in range(4):
        if step == 2:
            model.share_memory()
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: square_error(model, step, rank))
        optimizer.step()
    return parameters(model)


def test_share_memory_afterwards(ranks: Ranks) -> None:
    ranks(check, in_shared_memory)
