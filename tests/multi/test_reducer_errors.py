"""What GradientReducer refuses, on which ranks, and that training goes on afterwards."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import (
    GradientReducer,
    HvdError,
    MismatchError,
    RankFailedError,
    Session,
    open_session,
)
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    FEATURES,
    TINY,
    Side,
    State,
    Together,
    assert_ranks_agree,
    check,
    gradients,
    parameters,
    small_net,
    square_error,
)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def trains(session: Session) -> None:
    """The session is as good as new."""
    assert session.allreduce(torch.ones(3)).tolist() == [session.size] * 3
    check(some_steps)


def some_steps(side: Side) -> State:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(model, s, rank))
        optimizer.step()
    return parameters(model)


# ---- ranks that differ ----


def another_order(side: Side, cap: float | None) -> State:
    """Rank 1 registers its layers the other way round, under the same names."""
    layers = {name: nn.Linear(FEATURES, FEATURES) for name in "abc"}
    backwards = isinstance(side, Together) and side.rank == 1
    model = nn.ModuleDict({name: layers[name] for name in sorted(layers, reverse=backwards)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer, bucket_cap_mb=cap)

    def forward(inputs: Tensor) -> Tensor:
        for name in "abc":
            inputs = torch.tanh(layers[name](inputs))
        return inputs.mean(1, keepdim=True)

    for step in range(4):
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: square_error(forward, s, rank))
        optimizer.step()
    return dict(sorted(parameters(model).items()))


@pytest.mark.parametrize("cap", [TINY, None])
def test_matched_by_name(ranks: Ranks, cap: float | None) -> None:
    ranks(check, another_order, cap)


def other_model(kind: str, different: bool) -> nn.Module:
    if kind == "shape":
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5 if different else 2))
    if kind == "missing":
        return nn.Sequential(nn.Linear(4, 3), *([] if different else [nn.Linear(3, 2)]))
    if kind == "additional":
        return nn.Sequential(nn.Linear(4, 3), *([nn.Linear(3, 2)] if different else []))
    if kind == "dtype":
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(
            torch.float64 if different else torch.float32
        )
    model = nn.Sequential(nn.Conv2d(3, 2, 2))
    return model.to(memory_format=torch.channels_last) if different else model


TEXTS = {
    "shape": [r"'1\.bias'", r"\(2,\)", r"\(5,\)", "rank 0", "ank 2"],
    "missing": [r"'1\.bias'", "Rank 2 lacks", "rank 0"],
    "additional": [r"'1\.bias'", "Rank 0 lacks", "rank 2"],
    "dtype": [r"'0\.bias'", "float32", "float64", r"\(3,\)", "rank 0", "rank 2"],
    "strides": [r"'0\.weight'", r"\(12, 4, 2, 1\)", r"\(12, 1, 6, 3\)", "rank 0", "rank 2"],
}


def different(kind: str) -> str:
    session = open_session()
    model = other_model(kind, session.rank == 2)
    with within(5), pytest.raises(MismatchError) as caught:
        GradientReducer(model.named_parameters())
    trains(session)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("kind", TEXTS)
def test_different_parameters(ranks: Ranks, kind: str) -> None:
    for text in ranks(different, kind):
        for part in TEXTS[kind]:
            assert_contains(text, part)


def assert_contains(text: str, pattern: str) -> None:
    assert re.search(pattern, text), f"{pattern} is not in: {text}"


def added_on_one_rank() -> str:
    """A parameter group that only rank 1 has is found at the next backward of the others."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer)
    if session.rank == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    def train() -> None:
        for step in range(2):
            square_error(model, step, session.rank).backward()
            optimizer.step()

    with within(5), pytest.raises(MismatchError) as caught:
        train()
    reducer.close()
    trains(session)
    return str(caught.value)


def test_parameter_group_on_one_rank(ranks: Ranks) -> None:
    for text in ranks(added_on_one_rank):
        assert "rank 0" in text
        assert "rank 1" in text


def different_steps(how: str) -> str:
    """One rank is a step or a backward ahead: never a sum of two different steps."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer)

    def train() -> None:
        for step in range(3):
            for micro in range(2 if how == "backwards" and session.rank == 0 else 1):
                square_error(model, step, session.rank, micro).backward()
            if how == "backwards" or session.rank == 0 or step > 0:
                optimizer.step()

    with within(5), pytest.raises(MismatchError) as caught:
        train()
    reducer.close()
    trains(session)
    return str(caught.value)


@pytest.mark.parametrize("how", ["steps", "backwards"])
def test_ranks_in_different_steps(ranks: Ranks, how: str) -> None:
    for text in ranks(different_steps, how):
        assert_contains(text, "rank 0 (is )?in backward 1 after optimizer step [01]")
        assert_contains(text, "rank 1 (is )?in backward 1 after optimizer step [01]")


# ---- errors inside backward ----


class Fails(torch.autograd.Function):
    """Raises in backward, if told so."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, failing: bool) -> Tensor:
        ctx.failing = failing
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.failing:
            raise MemoryError("no memory on purpose")
        return grad.clone(), None


class InnerBackward(torch.autograd.Function):
    """Runs a whole backward inside its own, and then fails if told so."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layer: nn.Module, failing: bool) -> Tensor:
        ctx.layer, ctx.failing = layer, failing
        ctx.save_for_backward(tensor)
        return layer(tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            inner = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.layer(inner), grad)
        if ctx.failing:
            raise MemoryError("no memory on purpose")
        return inner.grad, None, None


def failing_backward(side: Side, failing: list[int], at: str, cap: float | None) -> State:
    """Step 2 fails on some ranks; everybody leaves it out."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    side.reduce(model, optimizer, bucket_cap_mb=cap)
    losses = []

    def loss(step: int, rank: int) -> Tensor:
        fails = step == 2 and rank in failing

        def forward(inputs: Tensor) -> Tensor:
            hidden = model[1](model[0](inputs))
            if at == "inside":
                hidden = InnerBackward.apply(hidden, model[2], fails)
            else:
                hidden = model[2](Fails.apply(hidden, fails))
            return model[4](model[3](hidden))

        return square_error(forward, step, rank)

    for step in range(5):
        optimizer.zero_grad()
        if step == 2 and not isinstance(side, Together):
            continue
        total = side.loss(lambda rank, s=step: loss(s, rank))
        if at == "outside":
            losses.append(total)  # the graph stays alive, as where somebody keeps losses
        if step == 2:
            own = side.rank in failing
            with within(5), pytest.raises(MemoryError if own else RankFailedError) as caught:
                total.backward()
            if not own:
                assert all(f"rank {rank}" in str(caught.value) for rank in failing)
            continue
        total.backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("cap", [TINY, None])
@pytest.mark.parametrize("at", ["outside", "inside"])
@pytest.mark.parametrize("failing", [[1], [0, 2], [0, 1, 2]], ids=str)
def test_exception_inside_backward(
    ranks: Ranks, failing: list[int], at: str, cap: float | None
) -> None:
    ranks(check, failing_backward, failing, at, cap)


def failing_with_a_graph_that_stays() -> None:
    """Nobody can tell the next backward from the failed one; but the next step can."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer, bucket_cap_mb=TINY)

    def forward(inputs: Tensor, fails: bool) -> Tensor:
        # The first gradient comes inside the inner backward, which ends well.
        hidden = InnerBackward.apply(model[1](model[0](inputs)), model[2], fails)
        return hidden.mean(1, keepdim=True)

    kept = []
    for step in range(2):
        kept.append(
            square_error(
                lambda x, s=step: forward(x, s == 1 and session.rank == 1), step, session.rank
            )
        )
        if step == 0:
            kept[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    if session.rank == 1:
        with pytest.raises(MemoryError):
            kept[1].backward()
        optimizer.zero_grad()
        square_error(lambda x: forward(x, False), 2, 1).backward()
        with within(5), pytest.raises(HvdError, match="ended in an exception"):
            optimizer.step()
        kept.clear()
    else:
        with within(5), pytest.raises(RankFailedError, match="rank 1"):
            kept[1].backward()
    optimizer.zero_grad()
    square_error(lambda x: forward(x, False), 3, session.rank).backward()
    optimizer.step()
    assert_ranks_agree(session, parameters(model))
    reducer.close()
    trains(session)


def test_failed_backward_whose_graph_stays(ranks: Ranks) -> None:
    ranks(failing_with_a_graph_that_stays)


def failing_forward(side: Side) -> State:
    """In step 2 rank 1 catches an error of its forward, and steps all the same: it adds nothing."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    side.reduce(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        side.backward(
            lambda rank, s=step: None if (s, rank) == (2, 1) else square_error(model, s, rank)
        )
        optimizer.step()
    return parameters(model)


def test_exception_in_forward_before_a_step(ranks: Ranks) -> None:
    ranks(check, failing_forward)


def one_batch_behind() -> str:
    """Rank 1 leaves out a batch and its step. Both still make the same steps, with a batch each;
    the rank that has a batch more is told that the other one is gone."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer)
    text = ""
    for number in range(4):
        if number == 1 and session.rank == 1:
            continue  # the exception in forward
        optimizer.zero_grad()
        if number == 3 and session.rank == 0:
            with within(10), pytest.raises(RankFailedError) as caught:
                square_error(model, number, 0).backward()
            text = str(caught.value)
            break
        square_error(model, number, session.rank).backward()
        assert_ranks_agree(session, gradients(model))
        optimizer.step()
        assert_ranks_agree(session, parameters(model))
    reducer.close()
    session.close()
    return text


def test_a_rank_with_a_batch_less(ranks: Ranks) -> None:
    text, _ = ranks.run(2, one_batch_behind, fresh=True)
    assert "rank 1" in text


def left_out(side: Side, error: Callable[..., Any], ranks: list[int]) -> State:
    """Some ranks run in step 1 a backward that is refused; the next step works."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        if step != 1:
            side.backward(lambda rank, s=step: square_error(model, s, rank))
            optimizer.step()
        elif isinstance(side, Together):
            refused = side.rank in ranks
            attempt = error if refused else plain
            with within(5), pytest.raises(HvdError) as caught:
                attempt(model)
            if refused:
                assert f"Rank {side.rank}" in str(caught.value)
                assert_contains(str(caught.value), PATTERNS[error.__name__])
            else:
                assert isinstance(caught.value, RankFailedError)
            model.zero_grad()
    return parameters(model)


def plain(model: nn.Module) -> None:
    square_error(model, 0, 0).backward()


def higher_order(model: nn.Module) -> None:
    square_error(model, 0, 0).backward(create_graph=True)


def steps_in_a_hook(model: nn.Module) -> None:
    """An optimizer that the reducer does not know, stepped as soon as there is a gradient."""
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    handle = model[0].weight.register_post_accumulate_grad_hook(step)
    before = model[0].weight.detach().clone()
    try:
        square_error(model, 0, 0).backward()
    finally:
        handle.remove()
        model[0].weight.data.copy_(before)


PATTERNS = {
    "higher_order": r"create_graph=True.*torch\.autograd\.grad",
    "steps_in_a_hook": r"'0\.weight' changed while backward ran.*inside a hook",
}


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=str)
@pytest.mark.parametrize("error", [higher_order, steps_in_a_hook])
def test_refused_backwards(ranks: Ranks, error: Callable[..., Any], failing: list[int]) -> None:
    ranks(check, left_out, error, failing)


def step_inside_backward() -> None:
    """The optimizer steps in a hook, where the gradient is still this rank's own."""
    session = open_session()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[4].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    side = Together(session)
    side.reduce(model, optimizer)
    before = parameters(model)
    with within(5), pytest.raises(HvdError, match="inside backward"):
        square_error(model, 0, session.rank).backward()
    for name, tensor in parameters(model).items():
        assert torch.equal(tensor, before[name])
    side.close()
    trains(session)


def unknown_step_inside_backward(when: str) -> None:
    """An optimizer that nobody told the reducer of, in a hook from before or after it."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    of = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        of[parameter].step()
        of[parameter].zero_grad()

    side = Together(session)
    if when == "after":
        side.reduce(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    if when == "before":
        side.reduce(model)

    def train() -> None:
        for number in range(2):
            square_error(model, number, session.rank).backward()

    with within(5), pytest.raises(HvdError, match=r"changed while backward ran.*inside a hook"):
        train()
    side.close()
    trains(session)


@pytest.mark.parametrize("when", ["before", "after"])
def test_step_of_an_unknown_optimizer_inside_backward(ranks: Ranks, when: str) -> None:
    ranks(unknown_step_inside_backward, when)


def test_optimizer_step_inside_backward(ranks: Ranks) -> None:
    ranks(step_inside_backward)


# ---- arguments ----


def wrong_arguments() -> None:
    model = small_net()
    named = list(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    computed = model[0].weight * 2
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "named_parameters", (model.parameters(),), {}),
        (TypeError, "named_parameters", (model,), {}),
        (TypeError, "named_parameters", (5,), {}),
        (TypeError, "named_parameters", ([("a", 1)],), {}),
        (TypeError, "named_parameters", ([(1, model[0].weight)],), {}),
        (ValueError, "'w' is not a parameter", ([("w", computed)],), {}),
        (ValueError, "'w'", ([("w", model[0].weight), ("w", model[0].bias)],), {}),
        (TypeError, "optimizer", (named, 3), {}),
        (TypeError, "optimizer", (named, [optimizer, "adam"]), {}),
        (TypeError, "optimizer", (named, optimizer.param_groups), {}),
        (ValueError, "bucket_cap_mb", (named,), {"bucket_cap_mb": 0}),
        (ValueError, "bucket_cap_mb", (named,), {"bucket_cap_mb": -1.0}),
        (ValueError, "bucket_cap_mb", (named,), {"bucket_cap_mb": float("nan")}),
        (ValueError, "bucket_cap_mb", (named,), {"bucket_cap_mb": "25"}),
        (ValueError, "timeout", (named,), {"timeout": "5 s"}),
        (ValueError, "timeout", (named,), {"timeout": timedelta(0)}),
        (TypeError, "session", (named,), {"session": "hvd"}),
        (TypeError, "module", (named,), {"module": named}),
    ]
    for kind, pattern, args, kwargs in cases:
        with pytest.raises(kind, match=pattern):
            GradientReducer(*args, **kwargs)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    reducer = GradientReducer(named, optimizer)
    with pytest.raises(TypeError, match="optimizer"):
        reducer.add_optimizer(model)  # type: ignore[arg-type]
    if reducer.active:
        with pytest.raises(ValueError, match="optimizer"):
            reducer.join(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="capacity"):
        reducer.record_events(-1)
    reducer.close()
    closed = open_session()
    closed.close()
    with pytest.raises(HvdError, match="closed"):
        GradientReducer(named, session=closed)


@pytest.mark.parametrize("size", [1, 2])
def test_arguments(ranks: Ranks, size: int) -> None:
    ranks.run(size, wrong_arguments, fresh=True)
