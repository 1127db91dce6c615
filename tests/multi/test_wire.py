"""GradientReducer with `wire_dtype` and `sum_dtype`, against torch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import GradientReducer, GradScaler, MismatchError, open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    TINY,
    Together,
    assert_equal,
    assert_ranks_agree,
    parameters,
    small_net,
    square_error,
)
from tests.multi.wire_cases import dtype_at, mean_by_wire

Schedule = dict[int, "str | None"]


def scaler_of(reducer: GradientReducer | None, early: bool = False) -> Any:
    # Scaled gradients are far beyond the range of fp16.
    settings = {"init_scale": 2.0**24, "growth_interval": 2}
    if reducer is None:
        return torch.amp.GradScaler("cpu", **settings)
    return GradScaler("cpu", reducer=reducer, early=early, **settings)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    loss = square_error(model, step, rank)
    return loss * float("inf") if (step, rank) == (3, 1) else loss


def reference_step(
    model: nn.Module, step: int, ranks: int, dtype: str | None, scale: float, infinite: bool
) -> None:
    by_rank = []
    for rank in range(ranks):
        loss = loss_of(model, step, rank) if infinite else square_error(model, step, rank)
        by_rank.append(torch.autograd.grad(loss * scale, list(model.parameters())))
    for parameter, gradients in zip(model.parameters(), zip(*by_rank, strict=True), strict=True):
        parameter.grad = mean_by_wire(gradients, dtype)


def training(schedule: Schedule | str, how: str, steps: int = 6) -> None:
    session = open_session()
    by_step = {0: schedule} if isinstance(schedule, str) else schedule
    results = []
    for together in (True, False):
        torch.manual_seed(0)
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        side = Together(session)
        if together:
            cap = TINY if how == "small" else None
            norms = how in ("early", "late")
            side.reduce(
                model, optimizer, wire_dtype=schedule, bucket_cap_mb=cap, gradient_norms=norms
            )
        scaled = how in ("early", "late")
        scaler = scaler_of(side.reducer, how == "early") if scaled else None
        made = 0
        for step in range(steps):
            optimizer.zero_grad()
            # A step that a scaler skips is none.
            dtype = dtype_at(by_step, made)
            if together:
                loss = loss_of if scaled else square_error
                loss = loss(model, step, session.rank)
                (loss if scaler is None else scaler.scale(loss)).backward()
            else:
                scale = 1.0 if scaler is None else scaler.get_scale()
                if scaler is not None:
                    scaler.scale(torch.zeros(()))
                reference_step(model, step, session.size, dtype, scale, scaled)
            if scaler is None:
                optimizer.step()
                made += 1
                continue
            scaler.unscale_(optimizer)
            if side.reducer is not None:
                side.reducer.clip_grad_norm_(optimizer, 0.3)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            made += scaler.get_scale() >= before
        results.append(parameters(model))
        side.close()
    assert_ranks_agree(session, results[0])
    assert_equal(*results)


@pytest.mark.parametrize("how", ["plain", "small"])
@pytest.mark.parametrize(
    "schedule", ["bf16", "fp16", {0: None, 2: "bf16", 4: "fp16"}, {0: "bf16", 3: None}], ids=str
)
def test_training(ranks: Ranks, schedule: Any, how: str) -> None:
    ranks(training, schedule, how)


@pytest.mark.parametrize("how", ["early", "late"])
@pytest.mark.parametrize("schedule", ["fp16", {0: None, 2: "bf16", 4: "fp16"}], ids=str)
def test_with_loss_scaling_and_clipping(ranks: Ranks, schedule: Any, how: str) -> None:
    ranks(training, schedule, how, 8)


def test_three_ranks(ranks: Ranks) -> None:
    ranks.run(3, training, {0: None, 1: "fp16", 3: "bf16"}, "plain")


def given_gradients(
    values: Callable[[int], list[Tensor]], **arguments: Any
) -> tuple[list[Tensor], list[Any]]:
    """Reduces gradients as given, by rank; returns them, and what the reduction knows of them."""
    session = open_session()
    own = values(session.rank)
    model = nn.ParameterList([torch.zeros_like(value) for value in own])
    exact = arguments.pop("exact", ())
    reducer = GradientReducer(
        model.named_parameters(), gradient_norms=True,
        full_precision=[model[index] for index in exact], **arguments,
    )  # fmt: skip
    for _ in range(2):  # in the first one buckets are formed
        model.zero_grad()
        products = [(p * value).sum() for p, value in zip(model, own, strict=True)]
        total = sum((part.real if part.is_complex() else part).double() for part in products)
        total.backward()  # type: ignore[union-attr]
    known = [reducer.by_products(parameter) for parameter in model]
    reducer.close()
    assert_ranks_agree(session, {str(i): p.grad for i, p in enumerate(model)})  # type: ignore
    return [p.grad for p in model], known  # type: ignore[misc]


FINE = 1 + 2.0**-15  # neither 16-bit type has it


def values_of_every_type(rank: int) -> list[Tensor]:
    del rank
    return [
        torch.full((700,), FINE),
        torch.full((700,), FINE, dtype=torch.complex64),
        torch.full((700,), 1 + 2.0**-10, dtype=torch.float16),
        torch.full((700,), 1 + 2.0**-7, dtype=torch.bfloat16),
        torch.full((3, 5), FINE),
        torch.full((700,), FINE, dtype=torch.float64),
        torch.full((), FINE),
        torch.zeros(0),
    ]


def every_type(dtype: str) -> None:
    given = values_of_every_type(0)
    found, _ = given_gradients(values_of_every_type, wire_dtype=dtype, exact=[4])
    for index, (gradient, value) in enumerate(zip(found, given, strict=True)):
        rounded = torch.ones_like(value) if index in (0, 5, 6) else value
        assert gradient.dtype is value.dtype
        assert torch.equal(gradient, rounded), index


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_only_fp32_and_fp64_are_rounded(ranks: Ranks, dtype: str) -> None:
    ranks(every_type, dtype)


def extremes(rank: int) -> list[Tensor]:
    rows = [(1e5, 0.0), (3e6, 1e6), (3.4e38, 0.0), (1e-30, 3e-30), (1e-41, 1e-41)]
    rows += [(float("inf"), 1.0), (float("nan"), 1.0)]
    spread = torch.logspace(-12, 4, 4000) * (rank + 1)
    double = torch.full((9000,), 1e200 if rank else 3e200, dtype=torch.float64)
    return [*(torch.full((5000,), row[rank]) for row in rows), spread, double]


def no_overflow(dtype: str) -> None:
    found, known = given_gradients(extremes, wire_dtype=dtype, bucket_cap_mb=TINY)
    means = [
        (first.double() + second.double()) / 2
        for first, second in zip(extremes(0), extremes(1), strict=True)
    ]
    largest = [
        torch.maximum(*pair).abs().max() for pair in zip(extremes(0), extremes(1), strict=True)
    ]
    unit = 2.0**-11 if dtype == "fp16" else 2.0**-8
    for gradient, mean, most, (squares, finite) in zip(found, means, largest, known, strict=True):
        assert finite == bool(mean.isfinite().all())
        assert gradient.isfinite().all() == finite
        if not finite:
            assert gradient.isnan().equal(mean.isnan())
            continue
        # As the documentation has it, for ranks that do not cancel each other.
        absolute = max(2.0**-39 * float(most), 2.0**-125) if dtype == "fp16" else 2.0**-134
        error = (gradient.double() - mean).abs()
        assert (error <= (unit + 2.0**-23) * mean.abs() + absolute).all()
        assert squares == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_no_overflow_that_the_mean_does_not_have(ranks: Ranks, dtype: str) -> None:
    ranks(no_overflow, dtype)


# ---- the sum


def cancelling(rank: int) -> list[Tensor]:
    value = [2.0**25, 3.0, -(2.0**25)][rank]
    halves = [2048.0, 3.0 * 2.0**-14, -2048.0][rank]
    return [
        torch.full((3000,), value),
        torch.full((2,), value, dtype=torch.complex64),
        torch.full((3000,), value, dtype=torch.float64),
        torch.full((3000,), halves, dtype=torch.float16),
    ]


def summed(sum_dtype: str | None, wire_dtype: str | None) -> list[float]:
    found, _ = given_gradients(cancelling, sum_dtype=sum_dtype, wire_dtype=wire_dtype)
    return [gradient[-1].real.item() for gradient in found]


def test_sums(ranks: Ranks) -> None:
    third = 2.0**-14
    for wire_dtype in (None, "bf16", "fp16"):
        for sum_dtype in (None, "fp32"):
            *_, halves = found = ranks.run(3, summed, sum_dtype, wire_dtype)[0]
            # 2**25 + 3 is no float.
            assert found[:3] == [pytest.approx(4 / 3), pytest.approx(4 / 3), 1.0]
            assert halves == pytest.approx(4 / 3 * third, rel=1e-2)
        assert ranks.run(3, summed, "fp64", wire_dtype)[0] == [1.0, 1.0, 1.0, third]


def sparse_sum(sum_dtype: str | None, wire_dtype: str | None) -> list[float]:
    session = open_session()
    table = nn.Embedding(6, 2, sparse=True)
    reducer = GradientReducer(table.named_parameters(), sum_dtype=sum_dtype, wire_dtype=wire_dtype)
    value = [2.0**25, 3.0 + 3 * 2.0**-15, -(2.0**25)][session.rank]
    (table(torch.tensor([1, 4])) * value).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    mean = table.weight.grad.to_dense()[4, 1].item()
    # Dense on one rank, sparse on the others: dense on all, and as any dense one on the wire.
    table.weight.grad = None
    loss = (table(torch.tensor([1, 4])) * value).sum()
    if session.rank == 0:
        loss = (table.weight[torch.tensor([1, 4])] * value).sum()
    loss.backward()
    dense = table.weight.grad
    assert dense is not None
    reducer.close()
    return [mean, dense.to_dense()[4, 1].item()]


def test_sums_of_sparse_gradients(ranks: Ranks) -> None:
    exact = 1.0 + 2.0**-15
    assert ranks.run(3, sparse_sum, "fp64", None) == [[exact, exact]] * 3
    assert ranks.run(3, sparse_sum, "fp64", "bf16") == [[exact, 1.0]] * 3
    assert ranks.run(3, sparse_sum, None, "bf16") == [[pytest.approx(4 / 3)] * 2] * 3


# ---- agreement


def disagree(arguments: list[dict[str, Any]]) -> str:
    session = open_session()
    model = small_net()
    chosen = dict(arguments[session.rank])
    if "exact" in chosen:
        chosen["full_precision"] = [model[chosen.pop("exact")].bias]
    with pytest.raises(MismatchError) as caught:
        GradientReducer(model.named_parameters(), **chosen)
    training("bf16", "plain")  # nothing is left behind
    return str(caught.value)


@pytest.mark.parametrize(
    ("here", "there", "named"),
    [
        ({"wire_dtype": "bf16"}, {}, ("wire_dtype", "'bf16' on rank 0", "'none' on rank 1")),
        (
            {"wire_dtype": {0: None, 5: "bf16"}},
            {"wire_dtype": {0: None, 6: "bf16"}},
            ("wire_dtype", "'0:none,5:bf16' on rank 0", "'0:none,6:bf16' on rank 1"),
        ),
        (
            {"sum_dtype": "fp32"},
            {"sum_dtype": "fp64"},
            ("sum_dtype", "'fp32' on rank 0", "'fp64' on rank 1"),
        ),
        (
            {"exact": 0, "wire_dtype": "bf16"},
            {"exact": 2, "wire_dtype": "bf16"},
            ("full_precision", "['0.bias'] on rank 0", "['2.bias'] on rank 1"),
        ),
    ],
)
def test_ranks_that_disagree(ranks: Ranks, here: Any, there: Any, named: tuple[str, ...]) -> None:
    for rank, text in enumerate(ranks(disagree, [here, there])):
        assert text.startswith(f"Rank {rank}: {named[0]} is ")
        for part in named[1:]:
            assert part in text


# ---- steps


def loop(model: nn.Module, optimizer: Any, first: int, last: int, rank: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        square_error(model, step, rank).backward()
        optimizer.step()


def resumed(by_function: bool) -> None:
    session = open_session()
    schedule = {0: "fp16", 2: None, 5: "bf16"}

    def start() -> tuple[nn.Module, Any, GradientReducer]:
        torch.manual_seed(0)
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        reducer = GradientReducer(model.named_parameters(), optimizer, wire_dtype=schedule)
        return model, optimizer, reducer

    model, optimizer, reducer = start()
    loop(model, optimizer, 0, 7, session.rank)
    reducer.close()
    whole = parameters(model)

    model, optimizer, reducer = start()
    loop(model, optimizer, 0, 3, session.rank)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    reducer.close()
    model, optimizer, reducer = start()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if by_function:
        steps = [3]
        optimizer.register_step_post_hook(lambda *_: steps.append(steps.pop() + 1))
        reducer.set_step(lambda: steps[0])
    else:
        reducer.set_step(3)
    loop(model, optimizer, 3, 7, session.rank)
    reducer.close()
    assert_equal(parameters(model), whole, 0)


@pytest.mark.parametrize("by_function", [False, True])
def test_resumed_run_equals_uninterrupted_run(ranks: Ranks, by_function: bool) -> None:
    ranks(resumed, by_function)


def counted(how: str) -> list[float]:
    """The gradients of seven backwards, the third step of which is the first in bf16."""
    weight = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    optimizers = [] if how == "without an optimizer" else [optimizer]
    reducer = GradientReducer([("w", weight)], optimizers, wire_dtype={0: None, 2: "bf16"})
    seen = []
    for step in range(7):
        optimizer.zero_grad()
        (weight * FINE).sum().backward()
        assert weight.grad is not None
        seen.append(weight.grad[-1].item())
        if how != "accumulation" or step % 2 == 1:
            optimizer.step()
        if how == "set back" and step == 4:
            reducer.set_step(0)
    reducer.close()
    return seen


def test_what_counts_as_a_step(ranks: Ranks) -> None:
    fine, rounded = [FINE], [1.0]
    assert ranks(counted, "without an optimizer") == [fine * 2 + rounded * 5] * 2
    assert ranks(counted, "with one") == [fine * 2 + rounded * 5] * 2
    assert ranks(counted, "accumulation") == [fine * 4 + rounded * 3] * 2
    assert ranks(counted, "set back") == [fine * 2 + rounded * 3 + fine * 2] * 2


def other_steps() -> str:
    session = open_session()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer, wire_dtype={0: None, 9: "bf16"})
    loop(model, optimizer, 0, 2, session.rank)
    reducer.set_step(9 if session.rank == 1 else 8)
    optimizer.zero_grad()
    with pytest.raises(MismatchError) as caught:
        square_error(model, 2, session.rank).backward()
    optimizer.zero_grad()
    reducer.set_step(9)
    loop(model, optimizer, 3, 5, session.rank)
    assert_ranks_agree(session, parameters(model))
    reducer.close()
    return str(caught.value)


def test_ranks_at_other_steps_of_the_schedule(ranks: Ranks) -> None:
    for text in ranks(other_steps):
        assert "(sent as bfloat16) gradient bucket 0" in text
        assert "came with gradient bucket 0" in text or "with gradient bucket 0" in text


def alone() -> float:
    weight = nn.Parameter(torch.zeros(100))
    reducer = GradientReducer([("w", weight)], wire_dtype="bf16", force=True)
    (weight * FINE).sum().backward()
    reducer.close()
    assert weight.grad is not None
    return weight.grad[-1].item()


def test_a_world_of_one_has_no_wire(ranks: Ranks) -> None:
    assert ranks.run(1, alone) == [FINE]
