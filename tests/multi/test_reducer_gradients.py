"""GradientReducer leaves the gradients of a single process, whatever a model does with parameters.

Each function below a heading is a script as `reducer_cases.check` runs it: once on every rank, once
as the reference.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvd_strategy import open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    FEATURES,
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

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


# ---- loops and optimizers ----


def ordinary_loop(side: Side, name: str, cap: float | None) -> State:
    model = small_net()
    optimizer = OPTIMIZERS[name](model.parameters())
    side.reduce(model, optimizer, bucket_cap_mb=cap)
    for step in range(5):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: square_error(model, step, rank))
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize("cap", [TINY, 3e-4, None])
def test_ordinary_loop(ranks: Ranks, cap: float | None) -> None:
    ranks(check, ordinary_loop, "sgd", cap)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizers(ranks: Ranks, name: str) -> None:
    # Rprop steps by the sign: it shows any difference in one.
    ranks(check, ordinary_loop, name, None)


def lbfgs(side: Side) -> State:
    model = small_net()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe"
    )
    side.reduce(model, optimizer)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            side.backward(lambda rank: square_error(model, step, rank))
            return side.mean(lambda rank: square_error(model, step, rank).detach())

        optimizer.step(closure)
    return parameters(model)


def test_lbfgs_with_a_closure(ranks: Ranks) -> None:
    ranks(check_loosely, lbfgs)


def check_loosely(script: Any) -> None:
    # A line search amplifies the last bits of the loss.
    check(script, tolerance=1e-4)


def adversaries(side: Side, reducers: int) -> State:
    generator, critic = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
    both = nn.ModuleList([generator, critic])
    first = torch.optim.Adam(generator.parameters(), lr=0.01)
    second = torch.optim.SGD(critic.parameters(), lr=0.05)
    if reducers == 1:
        side.reduce(both, first, second)
    else:
        side.reduce(generator, first)
        side.reduce(critic, second)
    for step in range(4):
        # The critic's backward does not touch the generator, the generator's one touches both.
        second.zero_grad()
        side.backward(
            lambda rank, step=step: square_error(
                lambda inputs: critic(generator(inputs).detach()), step, rank
            )
        )
        second.step()
        first.zero_grad()
        side.backward(lambda rank, step=step: critic(generator(batch(step, rank)[0])).mean())
        first.step()
    return parameters(both)


@pytest.mark.parametrize("reducers", [1, 2])
def test_two_networks_with_an_optimizer_each(ranks: Ranks, reducers: int) -> None:
    ranks(check, adversaries, reducers)


def shared_by_two_optimizers_in_one_backward(side: Side) -> State:
    model = small_net()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1)]
    optimizers.append(torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=0.01))
    side.reduce(model, *optimizers)
    for step in range(4):
        side.backward(lambda rank, step=step: square_error(model, step, rank))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def test_two_optimizers_and_one_backward(ranks: Ranks) -> None:
    ranks(check, shared_by_two_optimizers_in_one_backward)


# ---- who is used ----


def used_by(side: Side, cap: float | None) -> State:
    """One branch on rank 0 only, one on the last rank in odd steps, one never."""
    model = Branches("first", "last", "never")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    side.reduce(model, optimizer, bucket_cap_mb=cap)

    def use(step: int, rank: int) -> list[str]:
        first = ["first"] if rank == 0 else []
        return first + (["last"] if rank == side.size - 1 and step % 2 else [])

    for step in range(5):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: error_with(model, use(step, rank), step, rank))
        assert (model.branches["last"].weight.grad is not None) == bool(step % 2)
        assert model.branches["never"].weight.grad is None
        optimizer.step()
    assert model.branches["never"].weight not in optimizer.state
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize("cap", [TINY, None])
def test_parameters_that_some_or_all_ranks_do_not_use(ranks: Ranks, cap: float | None) -> None:
    ranks(check, used_by, cap)


def tied(side: Side, cap: float | None) -> State:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    model[2].weight = model[0].weight
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    side.reduce(model, optimizer, bucket_cap_mb=cap)
    for step in range(4):
        optimizer.zero_grad()
        # The whole of it is called several times, too.
        side.backward(
            lambda rank, step=step: square_error(
                lambda x: model(model(x)).mean(1, True), step, rank
            )
        )
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("cap", [TINY, None])
def test_tied_weights_and_a_module_called_twice(ranks: Ranks, cap: float | None) -> None:
    ranks(check, tied, cap)


def frozen_at_first(side: Side) -> State:
    model = small_net()
    model[0].requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    side.reduce(model, optimizer)
    assert not model[0].weight.requires_grad
    for step in range(6):
        model[0].requires_grad_(step >= 2)
        model[2].requires_grad_(step not in (3, 4))
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: square_error(model, step, rank))
        optimizer.step()
    return parameters(model)


def test_frozen_and_unfrozen(ranks: Ranks) -> None:
    ranks(check, frozen_at_first)


def nothing_to_train(side: Side) -> State:
    model = small_net().requires_grad_(False)
    side.reduce(model)
    for step in range(2):
        side.backward(lambda rank, step=step: square_error(model, step, rank))
    return parameters(model)


def test_everything_frozen(ranks: Ranks) -> None:
    ranks(check, nothing_to_train)


def sometimes_without_graph(side: Side, where: str) -> State:
    """In step 1 rank 1, in step 2 no rank has a graph; there they run no backward at all."""
    model = small_net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    side.reduce(model, optimizer)

    def loss(step: int, rank: int) -> Tensor | None:
        if step == 2 or (step == 1 and rank == 1):
            return None if where == "none" else torch.zeros(())
        return square_error(model, step, rank)

    for step in range(4):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: loss(step, rank))
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("where", ["none", "constant"])
def test_a_rank_whose_loss_has_no_graph(ranks: Ranks, where: str) -> None:
    ranks(check, sometimes_without_graph, where)


# ---- the ways of autograd ----


def gradient_penalty(side: Side) -> State:
    model = small_net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    side.reduce(model, optimizer, bucket_cap_mb=TINY)

    def loss(step: int, rank: int) -> Tensor:
        inputs = batch(step, rank)[0].requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return output.square().mean() + (slope.norm(dim=1) - 1).square().mean()

    for step in range(4):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: loss(step, rank))
        optimizer.step()
    return parameters(model)


def test_double_backward(ranks: Ranks) -> None:
    ranks(check, gradient_penalty)


def checkpointed(side: Side, reentrant: bool, cap: float | None, nested: bool) -> State:
    """A layer inside a checkpoint that is also used outside of it: with a reentrant one its
    parameters fire twice in one backward."""
    model = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(3)])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    side.reduce(model, optimizer, bucket_cap_mb=cap)

    def block(inputs: Tensor) -> Tensor:
        return model[1](torch.tanh(model[0](inputs)))

    def outer(inputs: Tensor) -> Tensor:
        again = checkpoint(block, torch.tanh(model[1](inputs)), use_reentrant=reentrant)
        return model[2](again)

    def forward(inputs: Tensor) -> Tensor:
        hidden = model[0](inputs)
        for _ in range(2):
            hidden = checkpoint(outer if nested else block, hidden, use_reentrant=reentrant)
        return model[2](model[1](hidden)).mean(1, keepdim=True)

    for step in range(4):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: square_error(forward, step, rank))
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("cap", [TINY, None])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpoints(ranks: Ranks, reentrant: bool, cap: float | None, nested: bool) -> None:
    ranks(check, checkpointed, reentrant, cap, nested)


def fires_twice_on_one_rank(side: Side) -> State:
    model = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    side.reduce(model, optimizer, bucket_cap_mb=TINY)

    def forward(rank: int, inputs: Tensor) -> Tensor:
        hidden = model[0](inputs)
        if rank == 1:
            hidden = checkpoint(model[1], hidden, use_reentrant=True)
        return model[1](hidden).mean(1, keepdim=True)

    for step in range(4):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: square_error(lambda x: forward(rank, x), step, rank))
        optimizer.step()
    return parameters(model)


def test_firing_twice_on_one_rank_only(ranks: Ranks) -> None:
    ranks(check, fires_twice_on_one_rank)


def compiled(side: Side) -> State:
    model = small_net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    side.reduce(model, optimizer)
    run = torch.compile(model, backend="eager")
    for step in range(3):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: square_error(run, step, rank))
        optimizer.step()
    return parameters(model)


def test_compiled_module(ranks: Ranks) -> None:
    ranks(check, compiled)


def user_hooks() -> None:
    """Hooks on parameters see this rank's gradient, and what they return is reduced."""
    seen: list[Tensor] = []

    def script(side: Side) -> State:
        model = small_net()
        side.reduce(model, bucket_cap_mb=TINY)
        handle = model[4].weight.register_hook(lambda grad: 2 * grad)
        if isinstance(side, Together):
            model[4].weight.register_hook(lambda grad: seen.append(grad.clone()))
        for step in range(3):
            model.zero_grad()
            side.backward(lambda rank, step=step: square_error(model, step, rank))
        handle.remove()
        side.backward(lambda rank: square_error(model, 9, rank))
        return gradients(model)

    check(script)
    torch.manual_seed(0)
    model = small_net()
    square_error(model, 2, open_session().rank).backward()
    torch.testing.assert_close(seen[2], 2 * model[4].weight.grad)


def test_user_hooks_see_local_gradients(ranks: Ranks) -> None:
    ranks(user_hooks)


class LateRead(torch.autograd.Function):
    """Passes its gradient on after a while, so that a reduction in between would be seen."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.05)
        return grad.clone()


def views_of_one_memory(side: Side, cap: float | None, alone: bool) -> State:
    """The gradient of `shift` is a view of memory that autograd goes on to read."""
    model = nn.ParameterDict(
        {"base": torch.randn(6, 4), "shift": torch.randn(24), "other": torch.randn(24)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer, bucket_cap_mb=cap)

    def loss(step: int, rank: int) -> Tensor:
        factor = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        base = model["base"] if alone else LateRead.apply(model["base"])
        other = 0 if alone else model["other"].view(6, 4)
        return ((base + model["shift"].view(6, 4) + other) * factor).sum()

    for step in range(5):
        optimizer.zero_grad()
        side.backward(lambda rank, step=step: loss(step, rank))
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("alone", [True, False], ids=["parameters", "intermediate"])
@pytest.mark.parametrize("cap", [TINY, None])
def test_gradients_that_share_memory(ranks: Ranks, cap: float | None, alone: bool) -> None:
    ranks(check, views_of_one_memory, cap, alone)
