"""What GradientReducer keeps from step to step.

Accumulation, gradients that users keep, parameters that come later or are replaced.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import GradientReducer, open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    TINY,
    Branches,
    Side,
    State,
    assert_ranks_agree,
    check,
    error_with,
    gradients,
    parameters,
    small_net,
    square_error,
)

# ---- accumulation ----


def accumulating(side: Side, around: str, cap: float | None, set_to_none: bool) -> State:
    """Windows of three micro-batches; the last window is short, one branch is used early only."""
    model = Branches("early", "on_zero")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    side.reduce(model, optimizer, bucket_cap_mb=cap)

    def loss(rank: int, step: int, micro: int) -> Tensor:
        use = ["early"] if micro == 0 else []
        use += ["on_zero"] if rank == 0 and micro == 1 else []
        return error_with(model, use, step, rank, micro)

    for step, count in enumerate((3, 3, 3, 2)):
        for micro in range(count):
            last = micro == count - 1
            if last or around == "nothing":
                side.backward(lambda rank, s=step, m=micro: loss(rank, s, m))
            elif around == "both":
                with side.no_sync():
                    side.backward(lambda rank, s=step, m=micro: loss(rank, s, m))
            else:
                total = side.loss(lambda rank, s=step, m=micro: loss(rank, s, m))
                assert total is not None
                with side.no_sync():
                    total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cap", [TINY, None])
@pytest.mark.parametrize("around", ["both", "backward", "nothing"])
def test_accumulation(ranks: Ranks, around: str, cap: float | None, set_to_none: bool) -> None:
    ranks(check, accumulating, around, cap, set_to_none)


def local_inside() -> None:
    """Inside no_sync gradients are this rank's own; blocks may be nested."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    square_error(model, 0, session.rank).backward()
    expected = gradients(model)
    model.zero_grad()
    reducer = GradientReducer(model.named_parameters())
    with reducer.no_sync():
        with reducer.no_sync():
            pass
        square_error(model, 0, session.rank).backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name])
    reducer.close()


def test_gradients_inside_no_sync_are_local(ranks: Ranks) -> None:
    ranks(local_inside)


def only_inside_no_sync(side: Side) -> State:
    """No backward of the window is synchronised: the optimizer's step is."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            with side.no_sync():
                side.backward(lambda rank, s=step, m=micro: square_error(model, s, rank, m))
        optimizer.step()
    return parameters(model)


def test_step_after_local_backwards_only(ranks: Ranks) -> None:
    ranks(check, only_inside_no_sync)


def forgotten_window(side: Side) -> State:
    """Local gradients that are cleared before anybody reduced them are nobody's."""
    model = Branches("once")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    side.reduce(model, optimizer)
    with side.no_sync():
        side.backward(lambda rank: error_with(model, [] if rank else ["once"], 9, rank))
    optimizer.zero_grad()
    for step in range(3):
        side.backward(lambda rank, s=step: error_with(model, [], s, rank))
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def test_local_gradients_cleared_before_they_were_reduced(ranks: Ranks) -> None:
    ranks(check, forgotten_window)


def kept_over_steps(side: Side, cap: float | None) -> State:
    """Nobody clears gradients: they add up, also those of a branch used now and then."""
    model = Branches("odd", "on_zero")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    side.reduce(model, optimizer, bucket_cap_mb=cap)
    for step in range(5):

        def loss(rank: int, step: int = step) -> Tensor:
            use = (["odd"] if step % 2 else []) + (["on_zero"] if rank == 0 and step > 1 else [])
            return error_with(model, use, step, rank)

        side.backward(loss)
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("cap", [TINY, None])
def test_gradients_kept_over_steps(ranks: Ranks, cap: float | None) -> None:
    ranks(check_sums, kept_over_steps, cap)


def check_sums(script: Any, *args: Any) -> None:
    # Gradients here reach 10: a few units of the last place.
    check(script, *args, tolerance=1e-5)


def there_before(side: Side) -> State:
    """Gradients from before the reducer count as this rank's."""
    model = small_net()
    side.backward(lambda rank: square_error(model, 0, rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    side.backward(lambda rank: square_error(model, 1, rank))
    optimizer.step()
    return parameters(model)


def test_gradients_from_before_the_reducer(ranks: Ranks) -> None:
    ranks(check, there_before)


# ---- gradients that the user holds ----


def stashed() -> None:
    """p.grad is the tensor that autograd made, and keeps its values once it has been replaced."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: made.append(p.grad))
    reducer = GradientReducer(model.named_parameters(), optimizer, bucket_cap_mb=TINY)
    kept, copies = [], []
    for step in range(4):
        optimizer.zero_grad()
        square_error(model, step, session.rank).backward()
        assert model[0].weight.grad is made[-1]
        kept.append([p.grad for p in model.parameters()])
        copies.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    for tensors, values in zip(kept, copies, strict=True):
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(tensor, value)
    assert_ranks_agree(session, {f"{i}": t for i, t in enumerate(kept[0])})
    # Without clearing, the same tensor goes on as in plain torch.
    before = [p.grad for p in model.parameters()]
    square_error(model, 9, session.rank).backward()
    assert all(p.grad is b for p, b in zip(model.parameters(), before, strict=True))
    reducer.close()


def test_stashed_gradients(ranks: Ranks) -> None:
    ranks(stashed)


def edited_gradients(side: Side) -> State:
    """What the user does to gradients between backward and step counts."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer, gradient_norms=True)
    for step in range(3):
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(model, s, rank))
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        model[0].weight.grad = model[0].weight.grad * 2
        model[2].weight.grad = None
        optimizer.step()
    return parameters(model)


def test_edited_gradients(ranks: Ranks) -> None:
    ranks(check, edited_gradients)


# ---- parameters that come later or are replaced ----


def added_later(side: Side) -> State:
    model = Branches("later", "last")
    for name in ("later", "last"):
        model.branches[name].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.trunk.parameters(), lr=0.01)
    side.reduce(model.trunk, optimizer)
    for step in range(6):
        if step == 2:
            model.branches["later"].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.branches["later"].parameters())})
        if step == 4:
            model.branches["last"].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.branches["last"].parameters())})
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: error_with(model, ["later", "last"], s, rank))
        optimizer.step()
    return parameters(model)


def test_add_param_group(ranks: Ranks) -> None:
    ranks(check, added_later)


def replaced(side: Side, how: str) -> State:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    side.reduce(model, optimizer, module=model)
    for step in range(5):
        if step == 2:
            state = {name: tensor.clone() + 0.1 for name, tensor in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            if how == "new optimizer":
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                side.adopt(optimizer)
            else:
                optimizer.state.clear()
                optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(model, s, rank))
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("how", ["new optimizer", "other parameters"])
def test_replaced_parameters(ranks: Ranks, how: str) -> None:
    ranks(check, replaced, how)


# ---- the start ----


def starts_from_other_weights() -> list[Tensor]:
    """Ranks that were seeded differently, as a script without a seed is, start from rank 0's."""
    session = open_session()
    torch.manual_seed(session.rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.register_buffer("table", torch.full((3,), session.rank))
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    reducer = GradientReducer(model.named_parameters(), module=model)
    after = [*model.parameters(), *model.buffers()]
    if session.rank == 0:
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    reducer.close()
    return [tensor.detach() for tensor in after]


def test_ranks_start_from_rank_zero(ranks: Ranks) -> None:
    first, second = ranks(starts_from_other_weights)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
