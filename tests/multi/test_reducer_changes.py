"""Parameters that become others while a GradientReducer lives: converted, replaced, added."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from hvd_strategy import (
    GradientReducer,
    MismatchError,
    RankFailedError,
    module_watch,
    open_session,
)
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    FEATURES,
    TINY,
    Branches,
    Side,
    State,
    Together,
    assert_ranks_agree,
    batch,
    check,
    error_with,
    gradients,
    parameters,
    small_net,
    square_error,
)


def error_in(dtype: torch.dtype, model: nn.Module, step: int, rank: int) -> Tensor:
    inputs, targets = batch(step, rank)
    return nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))


# ---- converted ----


def converted(side: Side, cap: float | None, cleared: bool) -> State:
    """float, double, float, bfloat16's range in float again; some parameters frozen meanwhile."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, bucket_cap_mb=cap)
    state: State = {}
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float64, torch.float32]
    for step, dtype in enumerate(dtypes):
        if cleared:
            optimizer.zero_grad()
        model.to(dtype)
        model[0].requires_grad_(step != 2)
        side.backward(lambda rank, s=step, d=dtype: error_in(d, model, s, rank))
        assert model[4].weight.grad.dtype is dtype
        state.update({f"{step}.{name}": grad for name, grad in gradients(model).items()})
        optimizer.step()
    return {**state, **parameters(model)}


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "kept"])
@pytest.mark.parametrize("cap", [TINY, None])
def test_model_converted_to_another_type(ranks: Ranks, cap: float | None, cleared: bool) -> None:
    ranks(check, converted, cap, cleared)


def one_layer(side: Side) -> State:
    """Only one layer becomes a double; it leaves a bucket that the others stay in."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer)

    def forward(inputs: Tensor) -> Tensor:
        hidden = model[1](model[0](inputs))
        hidden = model[2](hidden.to(model[2].weight.dtype)).float()
        return model[4](model[3](hidden))

    for step in range(6):
        if step == 2:
            model[2].double()
        if step == 4:
            model[2].bfloat16().double()
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(forward, s, rank))
        optimizer.step()
    if isinstance(side, Together):
        assert side.reducer is not None
        assert sorted(map(len, side.reducer.buckets())) == [2, 4]
    return {**parameters(model), **gradients(model)}


def test_one_layer_converted(ranks: Ranks) -> None:
    ranks(check, one_layer)


def other_memory_format(side: Side) -> State:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer)

    def loss(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(2, 3, 5, 5, generator=generator)).square().mean()

    for step in range(4):
        if step == 2:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: loss(s, rank))
        assert model[0].weight.grad.stride() == model[0].weight.stride()
        optimizer.step()
    return {**parameters(model), **gradients(model)}


def test_model_converted_to_channels_last(ranks: Ranks) -> None:
    ranks(check, other_memory_format)


def converted_on_one_rank(how: str) -> str:
    """An error on every rank, and the next step works."""
    session = open_session()
    torch.manual_seed(0)
    side = Together(session)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(64, 1))
    side.reduce(model)

    def loss(dtype: torch.dtype = torch.float32) -> Tensor:
        return model(torch.ones(1, 3, 5, 5, dtype=dtype)).square().mean()

    loss().backward()
    model.zero_grad()
    dtype = torch.float32
    if session.rank == 1:
        if how == "double":
            dtype = torch.float64
            model.double()
        else:
            model.to(memory_format=torch.channels_last)
    with pytest.raises(MismatchError) as caught:
        loss(dtype).backward()
    side.close()
    model.zero_grad()
    model.float().to(memory_format=torch.contiguous_format)
    check(converted, None, True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "here", "there"),
    [
        ("double", "float32", "float64"),
        ("channels last", "(12, 4, 2, 1)", "(12, 1, 6, 3)"),
    ],
)
def test_model_converted_on_one_rank(ranks: Ranks, how: str, here: str, there: str) -> None:
    for text in ranks(converted_on_one_rank, how):
        assert "'0." in text
        assert text.index("rank 0") < text.index("rank 1")
        assert here in text
        assert there in text


def converted_where_unused() -> str:
    """The rank that converted a branch does not use it: the others learn of it a step later."""
    session = open_session()
    torch.manual_seed(0)
    side = Together(session)
    model = Branches("other")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    error_with(model, ["other"], 0, session.rank).backward()
    optimizer.step()
    if session.rank == 1:
        model.branches["other"].double()

    def train() -> None:
        for step in range(1, 3):
            optimizer.zero_grad()
            use = ["other"] if session.rank == 0 else []
            error_with(model, use, step, session.rank).backward()
            optimizer.step()

    with pytest.raises(RankFailedError if session.rank == 0 else MismatchError) as caught:
        train()
    side.close()
    check(converted, None, True)
    return str(caught.value)


def test_branch_converted_on_a_rank_that_does_not_use_it(ranks: Ranks) -> None:
    for text in ranks(converted_where_unused):
        assert "'branches.other." in text
        assert "convert the model before the same step" in text


# ---- replaced ----


def loaded(side: Side, dtype: torch.dtype, told: bool) -> State:
    """`load_state_dict(assign=True)`, and an optimizer that the reducer knows or does not know.

    Where it does not, it was not told of the module either: `model.named_parameters()` tells it.
    """
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, module=model if told else None)
    used = torch.float32
    for step in range(6):
        if step in (2, 4):
            used = dtype if step == 2 else torch.float32
            state = {
                name: tensor.to(used, copy=True) + 0.1
                for name, tensor in model.state_dict().items()
            }
            model.load_state_dict(state, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            if told:
                side.adopt(optimizer)
        optimizer.zero_grad()
        side.backward(lambda rank, s=step, d=used: error_in(d, model, s, rank))
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_state_dict_assigned(ranks: Ranks, dtype: torch.dtype, told: bool) -> None:
    ranks(check, loaded, dtype, told)


def loaded_into_a_part(side: Side) -> State:
    """Tied weights are tied no more after they were loaded one by one."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, module=model)
    for step in range(5):
        if step == 2:
            for layer in (model[0], model[2]):
                layer.load_state_dict(
                    {name: tensor.clone() for name, tensor in layer.state_dict().items()},
                    assign=True,
                )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(lambda x: model(x).mean(1, True), s, rank))
        optimizer.step()
    assert not torch.equal(model[0].weight, model[2].weight)
    return {**parameters(model), **gradients(model)}


def test_tied_weights_loaded_one_by_one(ranks: Ranks) -> None:
    ranks(check, loaded_into_a_part)


def normalize(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)


def orthogonal(layer: nn.Module) -> None:
    parametrizations.orthogonal(layer)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def doubled(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


def parametrized(side: Side, how: Callable[[nn.Module], None], known: bool) -> State:
    """A layer's weight becomes a function of other parameters, and back again."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, module=model)
    for step in range(6):
        if step in (2, 4):
            if step == 2:
                how(model[2])
            else:
                parametrize.remove_parametrizations(model[2], "weight")
            if known:
                optimizer.param_groups[0]["params"] = list(model.parameters())
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(model, s, rank))
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("known", [True, False], ids=["old optimizer", "new optimizer"])
@pytest.mark.parametrize("how", [normalize, orthogonal, doubled])
def test_parametrizations(ranks: Ranks, how: Callable[[nn.Module], None], known: bool) -> None:
    ranks(check, parametrized, how, known)


def other_layer(side: Side, names: str) -> State:
    """A layer is exchanged for another one, as for fine-tuning; of another size, too."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1), nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, module=model)
    for step in range(5):
        if step == 2:
            torch.manual_seed(7)
            model[2] = nn.Linear(8, 3)
            if names == "new":
                model[3] = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(lambda x: model(x).mean(1, True), s, rank))
        optimizer.step()
    return {**parameters(model), **gradients(model)}


@pytest.mark.parametrize("names", ["old", "new"])
def test_layer_exchanged(ranks: Ranks, names: str) -> None:
    ranks(check, other_layer, names)


def replaced_on_one_rank(side: Side) -> State:
    """The objects may differ between ranks, if names and forms do not."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side.reduce(model, optimizer, module=model)
    for step in range(4):
        if step == 2 and isinstance(side, Together) and side.rank == 1:
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            side.adopt(optimizer)
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(model, s, rank))
        for parameter in model.parameters():
            parameter.data -= 0.05 * parameter.grad
    return {**parameters(model), **gradients(model)}


def test_parameter_replaced_on_one_rank(ranks: Ranks) -> None:
    ranks(check, replaced_on_one_rank)


def exchanged_on_one_rank() -> str:
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    reducer = GradientReducer(model.named_parameters(), module=model)
    square_error(model, 0, session.rank).backward()
    if session.rank == 1:
        model[4] = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1))
    model.zero_grad()
    with pytest.raises(MismatchError) as caught:
        square_error(model, 1, session.rank).backward()
    reducer.close()
    check(other_layer, "old")
    return str(caught.value)


def test_layer_exchanged_on_one_rank(ranks: Ranks) -> None:
    for text in ranks(exchanged_on_one_rank):
        assert "Rank 0 lacks '4.0.bias', which rank 1 has" in text


# ---- added ----


def from_other_values(how: str) -> None:
    """What is added with other values on each rank starts from rank 0's."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    named = list(model.named_parameters()) if how == "optimizer" else model.named_parameters()
    module = model if how == "module" else None
    reducer = GradientReducer(named, optimizer, module=module)
    square_error(model, 0, session.rank).backward()
    optimizer.step()
    torch.manual_seed(session.rank)
    model[4] = nn.Linear(6, 1)
    kept = model[4].weight.detach().clone()
    if how == "optimizer":
        optimizer.add_param_group({"params": list(model[4].parameters())})
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, 4):
        optimizer.zero_grad()
        square_error(model, step, session.rank).backward()
        optimizer.step()
        assert_ranks_agree(session, parameters(model))
    assert not torch.equal(kept, model[4].weight)
    reducer.close()


@pytest.mark.parametrize("how", ["module", "generator", "optimizer"])
def test_additions_start_from_rank_zeros_values(ranks: Ranks, how: str) -> None:
    ranks(from_other_values, how)


def grown(side: Side) -> State:
    """A branch is added, no other one falls silent, and only an unknown optimizer steps it."""
    module_watch._LOOK_EVERY = 3
    try:
        model = Branches("there")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        side.reduce(model, optimizer, module=model)
        use = ["there"]
        for step in range(8):
            if step == 2:  # found at the third backward
                torch.manual_seed(7)
                model.branches["grown"] = nn.Linear(FEATURES, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                use = ["there", "grown"]
            optimizer.zero_grad()
            side.backward(lambda rank, s=step, u=use: error_with(model, u, s, rank))
            optimizer.step()
        return {**parameters(model), **gradients(model)}
    finally:
        module_watch._LOOK_EVERY = 256


def test_branch_added_without_a_word(ranks: Ranks) -> None:
    ranks(check, grown)


def left_out(side: Side) -> State:
    """What was not given to the reducer stays out, although it belongs to the module."""
    model = Branches("given", "kept")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if isinstance(side, Together):
        side.reducers.append(
            GradientReducer(
                [(n, p) for n, p in model.named_parameters() if "kept" not in n], module=model
            )
        )
    for step in range(3):
        if step == 1:
            model.trunk.weight = nn.Parameter(model.trunk.weight.detach().clone())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        # All ranks give `kept` the same gradient of their own.
        side.backward(
            lambda rank, s=step: (
                error_with(model, ["given"], s, rank)
                + error_with(model, ["kept"], s, 0) * int(s == 2)
            )
        )
        if isinstance(side, Together) and step == 2:
            reducer = side.reducers[0]
            assert reducer.by_products(model.branches["kept"].weight) is None
            kept = model.branches["kept"].weight.grad.clone()
            model.branches["kept"].zero_grad()
            error_with(model, ["kept"], 2, 0).backward()
            torch.testing.assert_close(kept, model.branches["kept"].weight.grad)
            model.zero_grad()
    return parameters(model.trunk)


def test_parameters_left_out_on_purpose(ranks: Ranks) -> None:
    ranks(check, left_out)


# ---- what a module carries ----


def copies() -> None:
    """A copy of a watched module, loaded with assign=True, has nothing to do with the reducer."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    reducer = GradientReducer(model.named_parameters(), module=model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        other.load_state_dict(state, assign=True)
        (model[0].weight.sum() * 0).backward()
        square_error(other, 1, session.rank).backward()
        plain = small_net()
        plain.load_state_dict(state)
        square_error(plain, 1, session.rank).backward()
        assert torch.equal(plain[0].weight.grad, other[0].weight.grad)
    assert b"hvd_strategy" not in pickle.dumps(model[0])
    assert b"hvd_strategy" not in pickle.dumps(model)
    reducer.close()
    assert not any(module._load_state_dict_post_hooks for module in model.modules())
    model.load_state_dict(state, assign=True)
    session.barrier()


def test_copies_of_a_watched_module(ranks: Ranks) -> None:
    ranks(copies)


def other_optimizer_order() -> str:
    """Two networks in one reducer: the ranks step different ones."""
    session = open_session()
    torch.manual_seed(0)
    model = Branches("first", "second")
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.branches.values()]
    reducer = GradientReducer(model.named_parameters(), optimizers)

    def train() -> None:
        for step in range(3):
            # Rank 1 left out the first network's turn, say, because of an exception it caught.
            name = "second" if session.rank == 1 and step == 1 else "first"
            model.zero_grad()
            error_with(model, [name], step, session.rank).backward()
            optimizers[name == "second"].step()

    with pytest.raises(MismatchError) as caught:
        train()
    reducer.close()
    check(left_out)
    return str(caught.value)


def test_ranks_that_step_different_optimizers(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks(other_optimizer_order)):
        assert f"rank {rank} is in backward 2 after optimizer step 2" in text
        assert "(the last one of optimizer 1)" in text
        assert "(the last one of optimizer 2)" in text
        assert "same optimizers in the same order" in text


def unsupported() -> None:
    """A parameter that is itself sparse is refused before anything is shared."""
    table = torch.eye(3).to_sparse().requires_grad_()
    with pytest.raises(ValueError, match="'table' is itself sparse"):
        GradientReducer([("table", table)])


def test_sparse_parameters_are_refused(ranks: Ranks) -> None:
    ranks(unsupported)
