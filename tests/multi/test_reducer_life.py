"""The life of GradientReducer and its hooks, what it leaves behind, and what it lets users see."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvd_strategy import GradientReducer, HvdError, open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    FEATURES,
    TINY,
    Branches,
    Together,
    assert_ranks_agree,
    error_with,
    gradients,
    parameters,
    small_net,
    square_error,
)

# ---- life ----


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def hooks_of(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def many_reducers() -> None:
    """A reducer per epoch: old ones are inert, and nothing grows."""
    session = open_session()
    torch.manual_seed(session.rank)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        session.broadcast(parameter.detach())
    counts = []
    for epoch in range(21):
        reducer = GradientReducer(model.named_parameters(), optimizer)
        for step in range(2):
            optimizer.zero_grad()
            square_error(model, step, session.rank).backward()
            optimizer.step()
        if epoch % 2:
            reducer.close()
            assert not reducer.active
            reducer.close()
        else:
            # Twice: the hooks of one that is gone must not mind the next one.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            del reducer
            gc.collect()
        counts.append((hooks_of(model), descriptors(), threading.active_count(), tasks()))
    assert counts[0] == counts[-1], counts
    assert counts[-1][0] == 0, "hooks are left"
    assert (
        len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 0
    )
    assert_ranks_agree(session, parameters(model))
    # No reducer any more: gradients are local.
    optimizer.zero_grad()
    square_error(model, 5, session.rank).backward()
    alone = small_net()
    alone.load_state_dict(model.state_dict())
    square_error(alone, 5, session.rank).backward()
    assert torch.equal(alone[0].weight.grad, model[0].weight.grad)


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_reducer_per_epoch(ranks: Ranks) -> None:
    ranks(many_reducers)


def kept_by_the_optimizer() -> None:
    """It is enough to keep the optimizer; with it goes all the rest, the model too."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reducer = weakref.ref(GradientReducer(model.named_parameters(), optimizer, module=model))
    gc.collect()
    assert reducer() is not None
    square_error(model, 0, session.rank).backward()
    optimizer.step()
    assert_ranks_agree(session, gradients(model))
    before = descriptors()
    gone = [reducer, weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert descriptors() <= before
    session.barrier()


def test_nothing_keeps_model_or_reducer(ranks: Ranks) -> None:
    ranks(kept_by_the_optimizer)


def model_without_its_reducer() -> None:
    """Hooks do not keep the model's reducer, and a model goes without the collector's help."""
    session = open_session()
    model = small_net()
    reducer = GradientReducer(model.named_parameters(), bucket_cap_mb=TINY)
    square_error(model, 0, session.rank).backward()
    reducer.close()
    gc.disable()
    try:
        gone = weakref.ref(model[0].weight)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_closed_reducer_holds_nothing(ranks: Ranks) -> None:
    ranks(model_without_its_reducer)


def copies() -> None:
    """Models are copied and saved while they have hooks; the copy is free of them."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reducer = GradientReducer(model.named_parameters(), optimizer)
    square_error(model, 0, session.rank).backward()
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        square_error(other, 1, session.rank).backward()
        plain = small_net()
        plain.load_state_dict(other.state_dict())
        square_error(plain, 1, session.rank).backward()
        assert torch.equal(plain[0].weight.grad, other[0].weight.grad)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.step()
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(reducer)
    # The original is not affected.
    optimizer.zero_grad()
    square_error(model, 2, session.rank).backward()
    assert_ranks_agree(session, gradients(model))
    reducer.close()


def test_copies_of_a_model_with_hooks(ranks: Ranks) -> None:
    ranks(copies)


def world_of_one() -> None:
    torch.manual_seed(0)
    models = [small_net() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    idle = GradientReducer(models[1].named_parameters(), optimizers[1])
    forced = GradientReducer(models[2].named_parameters(), optimizers[2], force=True)
    assert not idle.active
    assert forced.active
    assert hooks_of(models[1]) == 0
    assert len(optimizers[1]._optimizer_step_pre_hooks) == 0
    assert hooks_of(models[2]) == 6
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            square_error(model, step, 0).backward()
            optimizer.step()
    for other in models[1:]:
        for name, tensor in parameters(models[0]).items():
            assert torch.equal(other.state_dict()[name], tensor)
    with idle.no_sync(), forced.no_sync():
        pass
    assert idle.statistics()["backwards"] == 0
    assert forced.statistics()["backwards"] == 4
    assert idle.events() == idle.buckets() == []
    forced.close()
    idle.close()


def test_world_of_one(ranks: Ranks) -> None:
    ranks.run(1, world_of_one)


# ---- observation ----


class SlowBackward(torch.autograd.Function):
    """A layer whose backward takes as long as it takes for something else to happen."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, happened: Callable[[], bool]) -> Tensor:
        ctx.happened = happened
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        deadline = time.monotonic() + 20
        while not ctx.happened() and time.monotonic() < deadline:
            time.sleep(0.001)
        return grads[0].clone(), None


def overlap() -> dict[str, float]:
    """The first layer's gradient comes late; the others' are reduced by then."""
    session = open_session()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.Linear(256, 256), nn.Linear(256, 1))
    reducer = GradientReducer(model.named_parameters(), bucket_cap_mb=0.2)
    reducer.record_events()

    def forward(inputs: Tensor) -> Tensor:
        before = reducer.statistics()["communication_seconds"]

        def reduced() -> bool:
            # Without buckets, in the first backward, there is nothing to wait for.
            now = reducer.statistics()["communication_seconds"]
            return not reducer.buckets() or now > before

        return model[2](model[1](SlowBackward.apply(model[0](inputs), reduced)))

    for step in range(3):
        model.zero_grad()
        square_error(forward, step, session.rank).backward()
    events = reducer.events()
    statistics = reducer.statistics()
    buckets = reducer.buckets()
    assert sorted(index for bucket in buckets for index in bucket) == list(range(6))
    for backward in (1, 2):
        of: dict[str, list[float]] = {"fired": [], "posted": [], "started": [], "done": []}
        for kind, _, number, at in events:
            if number == backward and kind in of:
                of[kind].append(at)
        assert len(of["fired"]) == 6
        assert len(of["posted"]) == len(of["started"]) == len(of["done"]) == len(buckets)
        last_fired = max(of["fired"])
        first_done = min(of["done"])
        assert first_done < last_fired, "the first bucket was not reduced meanwhile"
    reducer.close()
    return statistics


def test_overlap(ranks: Ranks) -> None:
    for statistics in ranks(overlap):
        assert statistics["backwards"] == 3
        assert 0 < statistics["communication_seconds"] < 3
        assert statistics["exposed_seconds"] >= 0
        assert 0 <= statistics["hidden_share"] <= 1


def norms() -> None:
    """By-products are those of the reduced gradient, or None where it is not known."""
    session = open_session()
    torch.manual_seed(0)
    model = Branches("on_zero", "never")
    reducer = GradientReducer(model.named_parameters(), gradient_norms=True)
    for step in range(3):
        model.zero_grad()
        use = ["on_zero"] if session.rank == 0 else []
        loss = error_with(model, use, step, session.rank)
        (loss * float("inf") if step == 2 and session.rank == 1 else loss).backward()
        for name, parameter in model.named_parameters():
            found = reducer.by_products(parameter)
            if "never" in name:
                assert found is None
                continue
            assert found is not None
            squares, finite = found
            assert finite == bool(parameter.grad.isfinite().all())
            if finite:
                expected = parameter.grad.double().norm().item() ** 2
                assert squares == pytest.approx(expected, rel=1e-6)
            assert len(set(session.allgather_object((squares if finite else 0, finite)))) == 1
    with reducer.no_sync():
        error_with(model, [], 3, session.rank).backward()
    reducer.close()


def test_by_products(ranks: Ranks) -> None:
    ranks(norms)


def norms_after_firing_twice() -> None:
    session = open_session()
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, FEATURES)
    reducer = GradientReducer(model.named_parameters(), gradient_norms=True, bucket_cap_mb=TINY)
    for step in range(3):
        model.zero_grad()
        square_error(
            lambda x: model(checkpoint(model, model(x), use_reentrant=True)).mean(1, True),
            step,
            session.rank,
        ).backward()
        for parameter in model.parameters():
            found = reducer.by_products(parameter)
            if found is not None:
                expected = parameter.grad.double().norm().item() ** 2
                assert found[0] == pytest.approx(expected, rel=1e-6)
    reducer.close()


def test_by_products_are_never_those_of_a_part(ranks: Ranks) -> None:
    ranks(norms_after_firing_twice)


def use_after_close() -> None:
    model = small_net()
    reducer = GradientReducer(model.named_parameters(), force=True)
    reducer.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for use in (reducer.add_optimizer, reducer.join):
        with pytest.raises(HvdError, match="has been closed, so gradients stay local"):
            use(optimizer)
    with reducer.no_sync():
        square_error(model, 0, 0).backward()
    assert reducer.by_products(model[0].weight) is None
    assert isinstance(reducer.statistics(), dict)
    model.zero_grad()
    side = Together(open_session())
    side.reduce(model)
    side.session.close()
    with pytest.raises(HvdError):
        square_error(model, 0, 0).backward()
    side.close()


def test_use_after_close(ranks: Ranks) -> None:
    ranks(use_after_close, fresh=True)


# ---- hooks of the user ----


def edits_after_ours() -> None:
    """A user's hook that was registered after ours edits the local gradient: the edit counts."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    reducer = GradientReducer(model.named_parameters(), bucket_cap_mb=TINY)

    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    for step in range(3):
        model.zero_grad()
        with reducer.no_sync():
            square_error(model, step, session.rank).backward()
        expected = []
        for parameter in model.parameters():
            assert parameter.grad is not None
            parts = session.allgather(parameter.grad)
            expected.append(torch.stack(parts).mean(0))
        model.zero_grad()
        square_error(model, step, session.rank).backward()
        for parameter, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, mean, rtol=0, atol=1e-7)
    assert len(reducer.buckets()) > 1
    reducer.close()


def test_edits_after_ours(ranks: Ranks) -> None:
    ranks(edits_after_ours)
