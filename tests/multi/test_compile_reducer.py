"""torch.compile in loops of one's own: gradients, graphs, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import GradientReducer, HvdError, open_session
from tests.multi.compile_cases import (
    WAYS,
    Block,
    Stack,
    cache_folder,
    compiled,
    compiler_counts,
    prepare_compiler,
)
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    Branches,
    Side,
    State,
    Together,
    batch,
    check,
    error_with,
    square_error,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cache_folder(tmp_path_factory)


def mean_error(forward: Callable[[Tensor], Tensor], step: int, rank: int, rows: int) -> Tensor:
    inputs, targets = batch(step, rank, rows=rows)
    inputs.requires_grad_()  # which reentrant checkpoints need
    # Small, for gradients of a size at which 1e-6 is more than the last bit.
    return nn.functional.mse_loss(forward(inputs), targets) / 8


# ---- the same gradients as one process that compiles nothing ----


def train(
    side: Side,
    way: str,
    arguments: dict[str, Any],
    recompute: str = "",
    rows: tuple[int, ...] = (4, 4, 4),
    hooks_first: bool = True,
) -> State:
    model = Stack(recompute=recompute)
    named = dict(model.named_parameters())  # compiled blocks change the names, not these
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forward: Callable[..., Any] = model
    if hooks_first:
        side.reduce(model, optimizer)
    if isinstance(side, Together):
        forward = compiled(model, way, **arguments)
    if not hooks_first:
        side.reduce(model, optimizer)
    state: State = {}
    for step, count in enumerate(rows):
        optimizer.zero_grad()
        side.backward(lambda rank, s=step, n=count: mean_error(forward, s, rank, n))
        state |= {f"{step}.{name}": p.grad.detach().clone() for name, p in named.items()}
        optimizer.step()
    return state | {name: p.detach().clone() for name, p in named.items()}


def run_train(cache: str, *args: Any) -> None:
    prepare_compiler(cache)
    check(train, *args)


@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_gradients(ranks: Ranks, cache: str, way: str, hooks_first: bool) -> None:
    """Whether hooks or compiler came first."""
    ranks(run_train, cache, way, {"backend": "aot_eager"}, "", (4, 4, 4), hooks_first)


def test_gradients_of_three_ranks(ranks: Ranks, cache: str) -> None:
    ranks.run(3, run_train, cache, "whole", {"backend": "aot_eager"})


def test_inductor(ranks: Ranks, cache: str) -> None:
    """The real compiler; shapes that change, in one graph."""
    ranks(run_train, cache, "whole", {"dynamic": True}, "", (4, 6, 2), timeout=100)


def test_inductor_of_blocks(ranks: Ranks, cache: str) -> None:
    ranks(run_train, cache, "blocks", {}, timeout=100)


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_activation_checkpointing(ranks: Ranks, cache: str, recompute: str) -> None:
    ranks(run_train, cache, "whole", {"backend": "aot_eager"}, recompute)


@pytest.mark.parametrize("way", WAYS)
def test_changing_shapes(ranks: Ranks, cache: str, way: str) -> None:
    """By default the second shape makes the compiler see the first one as one of many."""
    ranks(run_train, cache, way, {"backend": "aot_eager"}, "", (4, 6, 2, 8))


def train_branches(side: Side) -> State:
    """Each rank compiles other code: a branch that only one uses, another unfrozen on the way."""
    model = Branches("on_one", "later")
    model.branches["later"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    forward: Any = (
        torch.compile(model, backend="aot_eager") if isinstance(side, Together) else model
    )

    def loss(rank: int, step: int, micro: int) -> Tensor:
        uses = ["later", "on_one"] if rank == 1 and micro == 1 else ["later"]
        return error_with(forward, uses, step, rank, micro) / 2

    for step in range(4):
        model.branches["later"].requires_grad_(step >= 2)
        optimizer.zero_grad()
        with side.no_sync():
            side.backward(lambda rank, s=step: loss(rank, s, 0))
        side.backward(lambda rank, s=step: loss(rank, s, 1))
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_train_branches(cache: str) -> None:
    prepare_compiler(cache)
    check(train_branches)


def test_other_graphs_on_other_ranks(ranks: Ranks, cache: str) -> None:
    ranks(run_train_branches, cache)


# ---- a whole step in what is compiled ----


def train_by_step(side: Side, optimizer_inside: bool) -> State:
    model = Stack(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.reduce(model, optimizer)

    def one_step(step: int) -> None:
        optimizer.zero_grad()
        side.backward(lambda rank: square_error(model, step, rank))
        if optimizer_inside:
            optimizer.step()

    run = torch.compile(one_step, backend="aot_eager") if isinstance(side, Together) else one_step
    for step in range(3):
        run(step)
        if not optimizer_inside:
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_train_by_step(cache: str, optimizer_inside: bool) -> None:
    prepare_compiler(cache)
    check(train_by_step, optimizer_inside)


@pytest.mark.parametrize("optimizer_inside", [False, True])
def test_a_compiled_step(ranks: Ranks, cache: str, optimizer_inside: bool) -> None:
    ranks(run_train_by_step, cache, optimizer_inside)


def train_with_traced_backward(side: Side) -> State:
    """The backward is part of the graph, so hooks do not run: the optimizer's step reduces."""
    model = Stack(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)

    def gradients(*batches: Tensor) -> None:
        losses = [
            nn.functional.mse_loss(model(batches[i]), batches[i + 1])
            for i in range(0, len(batches), 2)
        ]
        (sum(losses[1:], losses[0]) / len(losses)).backward()

    run = gradients
    if isinstance(side, Together):
        run = torch.compile(gradients, backend="aot_eager", fullgraph=True)
    for step in range(3):
        optimizer.zero_grad()
        own = [side.rank] if isinstance(side, Together) else side.ranks
        run(*[tensor for rank in own for tensor in batch(step, rank)])
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_train_with_traced_backward(cache: str) -> None:
    prepare_compiler(cache)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        check(train_with_traced_backward)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="this torch compiles no backward into the graph of the forward",
)
def test_a_backward_in_the_graph(ranks: Ranks, cache: str) -> None:
    ranks(run_train_with_traced_backward, cache)


# ---- compiled autograd ----


def refuse_compiled_autograd(cache: str) -> str:
    prepare_compiler(cache)
    session = open_session()
    torch.manual_seed(0)
    model = Stack(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer)

    def step(inputs: Tensor) -> None:
        model(inputs).square().mean().backward()

    inputs, _ = batch(0, session.rank)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(HvdError) as caught,
    ):
        torch.compile(step, backend="aot_eager")(inputs)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)

    # The next right step works, on all ranks.
    torch._dynamo.reset()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    mean = session.allgather(model.head.weight.grad)
    assert torch.equal(mean[0], mean[1])
    alone = Stack(depth=1)
    alone.load_state_dict(model.state_dict())
    everything = torch.cat([batch(0, rank)[0] for rank in range(session.size)])
    alone(everything).square().mean().backward()
    torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad, rtol=0, atol=1e-6)
    reducer.close()
    return str(caught.value)


def test_compiled_autograd_is_refused(ranks: Ranks, cache: str) -> None:
    for rank, text in enumerate(ranks(refuse_compiled_autograd, cache)):
        assert text.startswith(f"Rank {rank}: a backward that compiled autograd runs")
        assert "Leave compiled autograd off" in text


# ---- nothing is compiled that would not be without hooks ----


def count(cache: str, way: str, hooked: bool) -> dict[str, Any]:
    """A model with a graph break of its own, so that there is something to count."""
    prepare_compiler(cache)
    torch.manual_seed(0)
    model = Stack()
    model.head = nn.Sequential(Breaking(), model.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer) if hooked else None
    explained = torch._dynamo.explain(model)(batch(0, 0)[0])
    prepare_compiler(cache)
    forward = compiled(model, way, backend="aot_eager")
    counts = []
    for step in range(4):
        optimizer.zero_grad()
        square_error(forward, step, 0).backward()
        optimizer.step()
        counts.append(compiler_counts())
    assert counts[0] == counts[3], "something was compiled again in a later step"
    if reducer is not None:
        assert reducer.statistics()["backwards"] == 4
        reducer.close()
    return {**counts[3], "graph_breaks": explained.graph_break_count}


class Breaking(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = 2 * inputs
        torch._dynamo.graph_break()
        return outputs / 2


@pytest.mark.parametrize("way", WAYS)
def test_no_graph_breaks_of_ours(ranks: Ranks, cache: str, way: str) -> None:
    without = ranks(count, cache, way, False)
    assert without[0]["graph_breaks"] > 0
    assert without[0]["graphs"]["unique_graphs"] > 0
    assert ranks(count, cache, way, True) == without


def count_whole_step(cache: str, hooked: bool) -> dict[str, Any]:
    """Dynamo looks at everything that runs in a compiled step, hooks and gate included."""
    prepare_compiler(cache)
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.named_parameters(), optimizer) if hooked else None

    @torch.compile(backend="aot_eager")
    def step(inputs: Tensor) -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    graphs = []
    for number in range(4):
        step(batch(number, 0)[0])
        graphs.append(compiler_counts()["graphs"])
    if reducer is not None:
        reducer.close()
    assert graphs[1] == graphs[3], "something was compiled again in a later step"
    return graphs[3]


def test_no_graphs_of_ours_in_a_compiled_step(ranks: Ranks, cache: str) -> None:
    assert ranks(count_whole_step, cache, True) == ranks(count_whole_step, cache, False)


# ---- overlap: what docs/compile.md says ----


class Backwards:
    """When the backward of each compiled graph, an autograd node, began and ended."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []

    def watch(self, output: Tensor) -> Tensor:
        node = output.grad_fn
        assert node is not None
        assert node.name() == "CompiledFunctionBackward"
        node.register_prehook(lambda *_: self.begun.append(time.monotonic()))
        node.register_hook(lambda *_: self.ended.append(time.monotonic()))
        return output


def events_of_step(cache: str, way: str) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """What the reducer recorded in the second backward, and begin and end of compiled backwards."""
    prepare_compiler(cache)
    session = open_session()
    torch.manual_seed(0)
    blocks = [Block(), Block(), Block()]
    model = nn.Sequential(*blocks)
    # 60 floats a block: every block in a bucket of its own.
    reducer = GradientReducer(model.named_parameters(), bucket_cap_mb=0.0003)
    reducer.record_events()
    calls = [torch.compile(module, backend="aot_eager") for module in blocks]
    if way == "whole":
        calls = [torch.compile(model, backend="aot_eager")]
    for step in range(2):
        model.zero_grad()
        backwards = Backwards()
        output, _ = batch(step, session.rank)
        for call in calls:
            output = backwards.watch(call(output))
        output.square().mean().backward()
    assert len(reducer.buckets()) == 3
    events = [(kind, at) for kind, _, number, at in reducer.events() if number == 1]
    reducer.close()
    begun = [("begun", at) for at in backwards.begun]
    return events, begun + [("ended", at) for at in backwards.ended]


def times(events: list[tuple[str, float]], kind: str) -> list[float]:
    return sorted(at for found, at in events if found == kind)


def test_nothing_overlaps_inside_one_graph(ranks: Ranks, cache: str) -> None:
    for events, backwards in ranks(events_of_step, cache, "whole"):
        assert len(backwards) == 2
        assert len(times(events, "fired")) == 12
        # All gradients arrive when the compiled backward has ended, so communication begins then.
        assert times(backwards, "ended")[0] < times(events, "fired")[0]
        assert times(backwards, "ended")[0] < times(events, "posted")[0]


def test_blocks_overlap(ranks: Ranks, cache: str) -> None:
    for events, backwards in ranks(events_of_step, cache, "blocks"):
        assert len(backwards) == 6
        assert len(times(events, "fired")) == 12
        # A block's bucket is on its way before the backward of the block in front of it begins.
        begun, posted = times(backwards, "begun"), times(events, "posted")
        assert posted[0] < begun[1] < posted[1] < begun[2] < posted[2]
        assert posted[0] < times(events, "fired")[-1]
