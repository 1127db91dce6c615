"""Loss scaling, clipping and item-weighted means in the reduction, against torch in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import GradientReducer, GradScaler, HvdError, open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    TINY,
    Branches,
    Side,
    State,
    Together,
    batch,
    check,
    error_with,
    gradients,
    parameters,
    small_net,
    square_error,
)


def check_scaled(script: Callable[..., State], *args: Any) -> None:
    check(script, *args, tolerance=1e-5)


def scaler_of(side: Side, early: bool, **arguments: Any) -> Any:
    settings = {"init_scale": 2.0**10, "growth_interval": 2, **arguments}
    if side.reducer is None:
        return torch.amp.GradScaler("cpu", **settings)
    return GradScaler("cpu", reducer=side.reducer, early=early, **settings)


def with_scale(scaler: Any, state: State) -> State:
    saved = scaler.state_dict()
    return {
        **state,
        "scale": torch.tensor(saved["scale"]),
        "growth": torch.tensor(saved["_growth_tracker"]),
    }


def scaled_loop(side: Side, early: bool, norms: bool, clip: float | None, fused: bool) -> State:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    side.reduce(model, optimizer, gradient_norms=norms, bucket_cap_mb=TINY)
    scaler = scaler_of(side, early)
    seen = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)

        def loss_of(rank: int, step: int = step) -> Tensor:
            # One rank overflows, once in the middle.
            factor = math.inf if step == 4 and rank == 1 else 1.0
            return square_error(model, step, rank) * factor

        loss = side.loss(loss_of)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            seen.append(clip_norm(side, model, clip))
        scaler.step(optimizer)
        scaler.update()
    return with_scale(scaler, {**parameters(model), "norms": torch.tensor(seen)})


def clip_norm(side: Side, model: nn.Module, limit: float) -> float:
    if side.reducer is None:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
    else:
        norm = side.reducer.clip_grad_norm_(model.parameters(), limit)
    return norm if math.isfinite(norm) else -1.0


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("norms", "clip", "fused"),
    [(False, None, False), (True, 0.5, False), (True, 100.0, False), (True, None, True)],
)
def test_scaled_loop(
    ranks: Ranks, early: bool, norms: bool, clip: float | None, fused: bool
) -> None:
    ranks(check_scaled, scaled_loop, early, norms or early, clip, fused)


def test_scaled_loop_of_three_ranks(ranks: Ranks) -> None:
    ranks.run(3, check_scaled, scaled_loop, True, True, 0.5, False)


def accumulating(side: Side, early: bool, keep: bool) -> State:
    """Two micro-batches a step; `keep`: two synchronised backwards, gradients kept between."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, gradient_norms=True)
    scaler = scaler_of(side, early)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            loss = side.loss(lambda rank, s=step, m=micro: square_error(model, s, rank, m) / 2)
            if micro == 0 and not keep:
                with side.no_sync():
                    scaler.scale(loss).backward()
            else:
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return with_scale(scaler, parameters(model))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_accumulation(ranks: Ranks, early: bool, keep: bool) -> None:
    ranks(check_scaled, accumulating, early, keep)


def a_rank_without_graph(side: Side, early: bool) -> State:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, gradient_norms=True)
    scaler = scaler_of(side, early)
    for step in range(4):
        optimizer.zero_grad()

        def loss_of(rank: int, step: int = step) -> Tensor | None:
            return None if step in (1, 2) and rank == 0 else square_error(model, step, rank)

        loss = side.loss(loss_of)
        if loss is not None:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return with_scale(scaler, parameters(model))


@pytest.mark.parametrize("early", [False, True])
def test_a_rank_without_a_graph(ranks: Ranks, early: bool) -> None:
    ranks(check_scaled, a_rank_without_graph, early)


def two_optimizers(side: Side, early: bool) -> State:
    model = Branches("side")
    optimizers = [
        torch.optim.SGD(model.trunk.parameters(), lr=0.05),
        torch.optim.Adam(model.branches.parameters(), lr=0.01),
    ]
    side.reduce(model, *optimizers, gradient_norms=True)
    scaler = scaler_of(side, early)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()

        def loss_of(rank: int, step: int = step) -> Tensor:
            loss = error_with(model, ["side"], step, rank)
            # Overflows in one optimizer's gradients only.
            if step == 2 and rank == 1:
                loss = loss + 1e38 * 1e3 * model.branches["side"].bias.sum()
            return loss

        loss = side.loss(loss_of)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return with_scale(scaler, parameters(model))


@pytest.mark.parametrize("early", [False, True])
def test_two_optimizers(ranks: Ranks, early: bool) -> None:
    ranks(check_scaled, two_optimizers, early)


def what_can_be_read(early: bool) -> list[float]:
    """What lies in p.grad before `unscale_`, in terms of the mean gradient."""
    session = open_session()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(
        model.named_parameters(), optimizer, session=session, gradient_norms=True
    )
    scaler = GradScaler("cpu", init_scale=8.0, reducer=reducer, early=early)
    scaler.scale(model(torch.full((1, 1), 1.0 + session.rank)).sum()).backward()
    assert model.weight.grad is not None
    before = model.weight.grad.item()
    norm_before = reducer.grad_norm(optimizer)
    scaler.unscale_(optimizer)
    after = model.weight.grad.item()
    norm_after = reducer.grad_norm(optimizer)
    # An edit counts, in place and by assignment.
    model.weight.grad.mul_(4)
    norm_edited = reducer.grad_norm(optimizer)
    model.weight.grad = torch.full((1, 1), 7.0)
    norm_replaced = reducer.grad_norm(optimizer)
    model.weight.grad.data = torch.full((1, 1), 5.0)
    values = [before, norm_before, after, norm_after, norm_edited, norm_replaced]
    values.append(reducer.grad_norm())
    reducer.close()
    return values


def test_scaled_mean_until_unscale_unless_early(ranks: Ranks) -> None:
    for found in ranks(what_can_be_read, False):
        assert found == [12.0, 12.0, 1.5, 1.5, 6.0, 7.0, 5.0]
    for found in ranks(what_can_be_read, True):
        assert found == [1.5, 1.5, 1.5, 1.5, 6.0, 7.0, 5.0]


def other_scales(early: bool) -> tuple[list[float], State]:
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reducer = GradientReducer(
        model.named_parameters(), optimizer, session=session, gradient_norms=True
    )
    scaler = GradScaler(
        "cpu", init_scale=2.0 ** (8 + 3 * session.rank), reducer=reducer, early=early
    )
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(square_error(model, step, session.rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    reducer.close()
    return scales, parameters(model)


def plain_steps(side: Side, steps: int) -> State:
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: square_error(model, step, rank))
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("early", [False, True])
def test_scales_that_differ_at_the_start(ranks: Ranks, early: bool) -> None:
    expected = plain_steps(Side(3), 3)
    for scales, found in ranks.run(3, other_scales, early):
        assert scales == [2.0**8] * 3
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


# ---- means over items


def counts(step: int, rank: int, micro: int) -> int:
    return [[1, 5], [4, 2], [3, 0], [0, 6]][(step + micro) % 4][rank % 2]


def by_items(side: Side, micros: int, scaled: bool) -> State:
    """Ragged micro-batches. The reference's loss is the sum over all items, over their number."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    side.reduce(model, optimizer, gradient_average="items")
    scaler = scaler_of(side, early=False) if scaled else None

    def summed(rank: int, step: int, micro: int) -> Tensor:
        inputs, targets = batch(step, rank, micro, rows=counts(step, rank, micro))
        return nn.functional.mse_loss(model(inputs), targets, reduction="sum")

    for step in range(5):
        optimizer.zero_grad()
        if side.reducer is None:
            number = sum(counts(step, r, m) for r in side.ranks for m in range(micros))
            losses = [summed(rank, step, m) for rank in side.ranks for m in range(micros)]
            loss = sum(losses[1:], losses[0]) / number
            (loss if scaler is None else scaler.scale(loss)).backward()
        else:
            assert isinstance(side, Together)
            for micro in range(micros):
                items = counts(step, side.rank, micro)
                loss = summed(side.rank, step, micro) / items if items else torch.zeros(())
                loss = loss if scaler is None else scaler.scale(loss)
                if micro + 1 < micros:
                    with side.no_sync():
                        side.reducer.backward(loss, items=items)
                else:
                    side.reducer.backward(loss, items=items)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("micros", [1, 2, 3])
def test_mean_over_items(ranks: Ranks, micros: int) -> None:
    ranks(check, by_items, micros, False)


def test_mean_over_items_with_a_scaler(ranks: Ranks) -> None:
    ranks(check_scaled, by_items, 2, True)


def test_mean_over_items_of_three_ranks(ranks: Ranks) -> None:
    ranks.run(3, check, by_items, 2, False)


def sparse_by_items(side: Side) -> State:
    model = nn.Embedding(7, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    side.reduce(model, optimizer, gradient_average="items")

    def summed(rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        indices = torch.randint(7, (counts(step, rank, 0),), generator=generator)
        return model(indices).square().sum()

    for step in range(4):
        optimizer.zero_grad()
        if side.reducer is None:
            number = sum(counts(step, rank, 0) for rank in side.ranks)
            losses = [summed(rank, step) for rank in side.ranks]
            (sum(losses[1:], losses[0]) / number).backward()
        else:
            assert isinstance(side, Together)
            items = counts(step, side.rank, 0)
            loss = summed(side.rank, step) / items if items else torch.zeros(())
            side.reducer.backward(loss, items=items)
        optimizer.step()
    return parameters(model)


def test_sparse_mean_over_items(ranks: Ranks) -> None:
    ranks(check, sparse_by_items)


def fails_once() -> Callable[[Tensor], None]:
    failed: list[bool] = []

    def hook(_: Tensor) -> None:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError

    return hook


def expect_errors() -> None:
    session = open_session()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer, gradient_average="items")
    with pytest.raises(HvdError, match=r"call reducer\.backward\(loss, items=n\)"):
        square_error(model, 0, session.rank).backward()
    optimizer.zero_grad()
    with pytest.raises(HvdError, match=r"strategy\.set_items\(n\), and then"), reducer.no_sync():
        square_error(model, 0, session.rank).backward()
    optimizer.zero_grad()
    # Gradients that the user has cleared do not count with the next, nor do their items.
    with reducer.no_sync():
        reducer.backward(square_error(model, 0, session.rank), items=30)
    optimizer.zero_grad()
    # Neither does what has no items, whatever its loss is.
    with reducer.no_sync():
        reducer.backward(square_error(model, 0, session.rank) * math.nan, items=0)
    reducer.backward(square_error(model, 0, session.rank), items=2)
    assert reducer.total_weight == 2 * session.size
    assert math.isfinite(reducer.grad_norm())
    optimizer.zero_grad()
    # Items of a backward that failed are not counted with the next one.
    model[0].weight.register_hook(fails_once())
    with pytest.raises((HvdError, ZeroDivisionError)):
        reducer.backward(square_error(model, 0, session.rank), items=40 + session.rank)
    optimizer.zero_grad()
    reducer.backward(square_error(model, 0, session.rank), items=2)
    assert reducer.total_weight == 2 * session.size
    optimizer.zero_grad()
    for items in (-1, math.nan, True, "3", None):
        with pytest.raises(ValueError, match="items="):
            reducer.backward(square_error(model, 0, session.rank), items=items)
    reducer.backward(square_error(model, 0, session.rank), items=2)
    optimizer.step()
    with pytest.raises(HvdError, match=r"Clear the gradients"):
        reducer.backward(square_error(model, 1, session.rank), items=2)
    optimizer.zero_grad(set_to_none=False)
    reducer.backward(square_error(model, 1, session.rank), items=2)
    reducer.close()
    other = GradientReducer(model.named_parameters(), optimizer)
    with pytest.raises(ValueError, match="create it with gradient_average='items'"):
        other.backward(square_error(model, 1, session.rank), items=2)
    with pytest.raises(ValueError, match="max_norm=-1 is not accepted"):
        other.clip_grad_norm_(optimizer, -1)
    other.close()


def test_wrong_use(ranks: Ranks) -> None:
    ranks(expect_errors)


def weighted() -> Callable[..., Any] | list[float]:
    """Weights of ranks: a rank with weight 0 takes part without a say."""
    session = open_session()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reducer = GradientReducer(model.named_parameters(), optimizer)
    means = []
    for weights in ((1, 1), (3, 1), (0, 1), (1, 0)):
        optimizer.zero_grad()
        reducer.set_weight(weights[session.rank])
        model(torch.full((1, 1), 1.0 + session.rank)).sum().backward()
        assert model.weight.grad is not None
        means.append(model.weight.grad.item())
        optimizer.step()
    reducer.close()
    return means


def test_weights_of_ranks(ranks: Ranks) -> None:
    assert ranks(weighted) == [[1.5, 1.25, 2.0, 1.0]] * 2


def sums_and_notes() -> list[Any]:
    """Gradients that are sums over what the weight counts; a rank without a backward; notes."""
    session = open_session()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reducer = GradientReducer(model.named_parameters(), optimizer)
    reducer.attach_notes(lambda: (session.rank, (1 << 64) - 1 - len(seen)))
    seen: list[Any] = []
    for sizes in ((3, 1), (0, 2), (1, 0)):
        optimizer.zero_grad()
        count = sizes[session.rank]
        reducer.set_weight(count, 1.0 if count else 0.0)
        reductions = reducer.reductions
        if count:
            model(torch.full((count, 1), 1.0 + session.rank)).sum().backward()
        else:
            reducer.join_backward()
        assert reducer.reductions == reductions + 1
        assert model.weight.grad is not None
        seen.append((model.weight.grad.item(), reducer.notes))
        optimizer.step()
    reducer.close()
    assert reducer.notes == []
    return seen


def test_sums_and_notes(ranks: Ranks) -> None:
    for seen in ranks(sums_and_notes):
        assert [mean for mean, _ in seen] == [1.25, 2.0, 1.0]
        assert [notes for _, notes in seen] == [
            [(0, (1 << 64) - 1 - step), (1, (1 << 64) - 1 - step)] for step in range(3)
        ]


def test_in_a_world_of_one() -> None:
    """Nothing to reduce, and the same numbers."""
    model, expected = small_net(), small_net()
    expected.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_session() as session:
        reducer = GradientReducer(model.named_parameters(), optimizer, session=session)
        scaler = GradScaler("cpu", init_scale=64.0, reducer=reducer, early=True)
        scaler.scale(square_error(model, 0, 0)).backward()
        scaler.unscale_(optimizer)
        square_error(expected, 0, 0).backward()
        norm = float(nn.utils.clip_grad_norm_(expected.parameters(), 0.1))
        assert reducer.grad_norm() == pytest.approx(norm)
        assert reducer.clip_grad_norm_(optimizer, 0.1) == pytest.approx(norm)
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        reducer.close()
