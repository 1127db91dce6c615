"""Sparse gradients: the single process's mean, still sparse, coalesced and equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvd_strategy import GradientReducer, MismatchError, RankFailedError, open_session
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import (
    FEATURES,
    Side,
    State,
    Together,
    assert_equal,
    assert_ranks_agree,
    bits,
    check,
    parameters,
    small_net,
    square_error,
)

ROWS = 7  # of each table

Use = dict[str, list[int]]


class Tables(nn.Module):
    """Tables of embeddings, whose sum goes through a layer with dense gradients."""

    def __init__(self, *names: str, sparse: bool = True, **arguments: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(ROWS, FEATURES, sparse=sparse, **arguments) for name in names}
        )
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, use: Use) -> Tensor:
        total = torch.zeros(1, FEATURES)
        for name, rows in use.items():
            total = total + self.tables[name](torch.tensor(rows, dtype=torch.int64)).sum(0)
        return (self.head(torch.tanh(total)) - 1).square().mean()


def optimizers(model: Tables) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.05),
        torch.optim.AdamW(model.head.parameters(), lr=0.01),
    ]


def kept_gradients(side: Side, model: nn.Module) -> State:
    """The gradients as they are, those of tables checked for their form."""
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse and isinstance(side, Together):
            assert parameter.grad.is_coalesced()
            assert parameter.grad.shape == parameter.shape
        state["grad." + name] = parameter.grad.detach().to_dense()
        state["sparse." + name] = torch.tensor(parameter.grad.is_sparse)
    return state


def several_tables(side: Side, size: int) -> State:
    """Shared rows and others, repeated ones, none at all; a table that nobody or one rank uses."""
    model = Tables("shared", "own", "empty", "on_zero", "never")
    both = optimizers(model)
    side.reduce(model, *both)

    def use(step: int, rank: int) -> Use:
        rows: Use = {
            "shared": [0, 3, 3, step],
            "own": [(rank + step) % ROWS],
            "empty": [] if rank == 1 or step == 2 else [1, 5],
        }
        return {**rows, "on_zero": [2, 6]} if rank == 0 else rows

    state: State = {}
    for step in range(4):
        for optimizer in both:
            optimizer.zero_grad()
        side.backward(lambda rank, s=step: model(use(s, rank)))
        assert all(
            model.tables[name].weight.grad.is_sparse
            for name in ("shared", "own", "empty", "on_zero")
        )
        assert model.tables["never"].weight.grad is None
        state.update({f"{step}.{k}": v for k, v in kept_gradients(side, model).items()})
        for optimizer in both:
            optimizer.step()
    return {**state, **parameters(model)}


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_several_sparse_tables(ranks: Ranks) -> None:
    ranks(check, several_tables, ranks.size)


def one_memory(side: Side) -> State:
    """Two tables looked up by one tensor of indices, whose outputs have one gradient."""
    model = Tables("first", "second")
    side.reduce(model, *optimizers(model))
    for step in range(3):
        model.zero_grad()

        def loss(rank: int, step: int = step) -> Tensor:
            rows = torch.tensor([rank, step, 4])
            both = model.tables["first"](rows) + model.tables["second"](rows)
            return model.head(both).square().mean()

        side.backward(loss)
    return {**kept_gradients(side, model), **parameters(model)}


def test_tables_that_share_indices_and_values(ranks: Ranks) -> None:
    ranks(check, one_memory)


def bags(side: Side) -> State:
    """A table summed up in bags, with weights for each row."""
    model = nn.ModuleDict(
        {"bag": nn.EmbeddingBag(ROWS, FEATURES, mode="sum", sparse=True), "head": small_net()}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()

        def loss(rank: int, step: int = step) -> Tensor:
            rows = torch.tensor([[rank, 2, 2], [step, 5, rank + 1]])
            hidden = model["bag"](rows, per_sample_weights=torch.full((2, 3), 0.5 + rank))
            return model["head"](hidden).square().mean()

        side.backward(loss)
        optimizer.step()
    return {**kept_gradients(side, model), **parameters(model)}


def test_bags(ranks: Ranks) -> None:
    ranks(check, bags)


# ---- sparse here, dense there ----


def mixed_layouts(side: Side, where: str) -> State:
    """The gradient of the table is sparse on some ranks or in some steps only."""
    model = Tables("table")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    state: State = {}
    for step in range(6):

        def loss(rank: int, step: int = step) -> Tensor:
            rows = torch.tensor([rank, 3, step])
            if where == "rank":
                sparse = rank == step % 2
            elif where == "step":
                sparse = step % 2 == 0
            else:  # rank 0 does not use the table in every third step, others are as above
                if rank == 0 and step % 3 == 1:
                    return model.head(torch.ones(1, FEATURES)).square().mean()
                sparse = (rank + step) % 2 == 0
            hidden = nn.functional.embedding(rows, model.tables["table"].weight, sparse=sparse)
            return model.head(hidden).square().mean()

        optimizer.zero_grad()
        side.backward(loss)
        grads = kept_gradients(side, model)
        if where == "step":
            assert bool(grads["sparse.tables.table.weight"]) == (step % 2 == 0)
        grads.pop("sparse.tables.table.weight")
        state.update({f"{step}.{k}": v for k, v in grads.items()})
        optimizer.step()
    return {**state, **parameters(model)}


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize("where", ["rank", "step", "some of both"])
def test_sparse_on_some_ranks_or_in_some_steps(ranks: Ranks, where: str) -> None:
    ranks(check, mixed_layouts, where)


def kept_dense_on_one_rank() -> None:
    """One rank keeps a dense gradient of its own from before, another one brings a sparse one."""
    session = open_session()
    torch.manual_seed(0)
    model = Tables("table")
    weight = model.tables["table"].weight
    reducer = GradientReducer(model.named_parameters())
    with reducer.no_sync():
        if session.rank == 0:
            (weight * 2).sum().backward()
    model({"table": [1, 1]} if session.rank == 1 else {}).backward()
    torch.manual_seed(0)
    alone = Tables("table")
    (alone.tables["table"].weight * 2).sum().backward()
    alone({"table": [1, 1]}).backward()
    expected = alone.tables["table"].weight.grad / 2
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-6)
    assert_ranks_agree(session, {"grad": weight.grad})
    reducer.close()


def test_dense_gradient_kept_by_one_rank(ranks: Ranks) -> None:
    ranks(kept_dense_on_one_rank)


# ---- steps and windows ----


def accumulated(side: Side, around: str) -> State:
    model = Tables("table", "early")
    both = optimizers(model)
    side.reduce(model, *both)
    for step in range(3):
        for micro in range(3):

            def loss(rank: int, step: int = step, micro: int = micro) -> Tensor:
                use: Use = {"table": [rank, micro, step]}
                return model({**use, "early": [rank]} if micro == 0 else use)

            if micro == 2 or around == "nothing":
                side.backward(loss)
            else:
                with side.no_sync():
                    side.backward(loss)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


@pytest.mark.parametrize("around", ["both", "nothing"])
def test_accumulation_of_sparse_gradients(ranks: Ranks, around: str) -> None:
    ranks(check, accumulated, around)


def never_cleared(side: Side) -> State:
    model = Tables("table", "on_zero")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    side.reduce(model, optimizer)
    for step in range(4):

        def loss(rank: int, step: int = step) -> Tensor:
            use: Use = {"table": [step, rank]}
            return model({**use, "on_zero": [rank]} if rank == 0 and step % 2 else use)

        side.backward(loss)
        optimizer.step()
    return {**kept_gradients(side, model), **parameters(model)}


def test_sparse_gradients_kept_over_steps(ranks: Ranks) -> None:
    ranks(check, never_cleared)


def checkpointed(side: Side) -> State:
    """The table fires twice in one backward."""
    model = Tables("table")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)

    def loss(step: int, rank: int) -> Tensor:
        def block(inputs: Tensor, again: list[int]) -> Tensor:
            return inputs + model.tables["table"](torch.tensor(again)).sum(0)

        hidden = model.head.weight * 2
        for _ in range(2):
            hidden = checkpoint(block, hidden, [rank, step, step], use_reentrant=True)
        return torch.tanh(model.head(torch.tanh(hidden))).square().mean()

    for step in range(3):
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: loss(s, rank))
        optimizer.step()
    return {**kept_gradients(side, model), **parameters(model)}


def test_sparse_gradients_inside_reentrant_checkpoints(ranks: Ranks) -> None:
    ranks(check, checkpointed)


def without_graph(side: Side) -> State:
    """In step 1 rank 1 runs no backward: its optimizer's step joins."""
    model = Tables("table")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        side.backward(
            lambda rank, s=step: None if rank == 1 and s == 1 else model({"table": [rank, s]})
        )
        optimizer.step()
    return {**kept_gradients(side, model), **parameters(model)}


def test_sparse_gradients_and_a_rank_without_graph(ranks: Ranks) -> None:
    ranks(check, without_graph)


# ---- dtypes ----


def half_precision(dtype: torch.dtype) -> None:
    """Summed up in fp32 and rounded once, like dense gradients."""
    session = open_session()
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, 3, sparse=True, dtype=dtype)
    reducer = GradientReducer(table.named_parameters())
    factors = torch.randn(session.size, 4, 3).to(dtype)
    rows = [torch.tensor([0, 2, rank, 6]).unique() for rank in range(session.size)]
    own = rows[session.rank]
    (table(own) * factors[session.rank][: len(own)]).sum().backward()
    expected = torch.zeros(ROWS, 3)
    for rank in range(session.size):
        expected.index_add_(0, rows[rank], factors[rank][: len(rows[rank])].float())
    grad = table.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert bits(grad.to_dense()) == bits((expected / session.size).to(dtype))
    assert_ranks_agree(session, {"grad": grad.to_dense()})
    reducer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sparse_gradients_in_half_precision(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(half_precision, dtype)


def single_elements(side: Side, dtype: torch.dtype) -> State:
    """Sparse in both dimensions; in step 3 in one of them only on rank 1."""
    model = nn.ParameterDict({"table": torch.randn(4, 3, dtype=dtype), "bias": torch.randn(3)})
    side.reduce(model)
    state: State = {}
    for step in range(4):
        model.zero_grad()
        # Torch cannot add the two kinds of sparse gradients of step 3.
        sparse = step != 3 or isinstance(side, Together)

        def loss(rank: int, step: int = step, sparse: bool = sparse) -> Tensor:
            index = torch.tensor([[rank, step % 3, 2], [0, rank, 1]])
            rows = torch.tensor([step, rank])
            if step == 3 and rank == 1:
                picked = nn.functional.embedding(rows, model["table"], sparse=sparse)
            else:
                picked = torch.gather(model["table"], 1, index % 3, sparse_grad=sparse)
            return (picked * (rank + 1)).abs().square().sum() + model["bias"].sum()

        if not (dtype.is_complex and step == 3):
            side.backward(loss)
        state.update({f"{step}.{k}": v for k, v in kept_gradients(side, model).items()})
        state.pop(f"{step}.sparse.table", None)
    return state


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_gradients_that_are_sparse_in_all_dimensions(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(check_large, single_elements, dtype)


def check_large(script: Any, *args: Any) -> None:
    check(script, *args, tolerance=1e-5)


# ---- the option ----


def as_dense(side: Side, by: str) -> State:
    model = Tables("table", "never")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by == "all":
        side.reduce(model, optimizer, sparse_as_dense=True)
    else:  # on one rank only: the others' follow
        on = isinstance(side, Together) and side.rank == 1
        side.reduce(model, optimizer, sparse_as_dense=on)
    for step in range(4):
        optimizer.zero_grad()
        side.backward(lambda rank, s=step: model({"table": [rank, s, s]}))
        if isinstance(side, Together):
            assert side.reducer is not None
            assert not model.tables["table"].weight.grad.is_sparse
            assert len(side.reducer.buckets()) > 0
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("by", ["all", "one"])
def test_sparse_as_dense(ranks: Ranks, by: str) -> None:
    ranks(check, as_dense, by)


# ---- errors ----


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


def failing(side: Side) -> State:
    """Step 1 fails on rank 1, after its table has fired; nothing of it is left."""
    model = Tables("table", "below")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side.reduce(model, optimizer)

    def loss(step: int, rank: int) -> Tensor:
        below = model.tables["below"](torch.tensor([rank, step]))
        hidden = Fails.apply(below, step == 1 and rank == 1)
        return model.head(hidden + model.tables["table"](torch.tensor([step, 3]))).square().mean()

    for step in range(4):
        optimizer.zero_grad()
        if step == 1:
            if isinstance(side, Together):
                with pytest.raises(MemoryError if side.rank == 1 else RankFailedError):
                    loss(1, side.rank).backward()
                assert model.tables["table"].weight.grad is None
            continue
        side.backward(lambda rank, s=step: loss(s, rank))
        optimizer.step()
    return parameters(model)


def test_failed_backward_with_sparse_gradients(ranks: Ranks) -> None:
    ranks(check, failing)


def other_shape() -> str:
    session = open_session()
    torch.manual_seed(0)
    model = Tables("table")
    reducer = GradientReducer(model.named_parameters())
    if session.rank == 1:
        model.tables["table"].double()
    with pytest.raises(MismatchError) as caught:
        # Sparse on both, in two dtypes.
        model.tables["table"](torch.tensor([1, 2])).sum().backward()
    reducer.close()
    check(several_tables, session.size)
    return str(caught.value)


def test_sparse_gradients_of_two_types(ranks: Ranks) -> None:
    for text in ranks(other_shape):
        assert "'tables.table.weight'" in text
        assert "float32 on rank 0" in text
        assert "float64 on rank 1" in text


def result_of_ranks_in_order() -> State:
    """The sum is made in the order of the ranks: another order gives other bits."""
    session = open_session()
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, 512, sparse=True)
    reducer = GradientReducer(table.named_parameters())
    factors = torch.randn(session.size, 512) * torch.tensor([1e4, 1.0, 1e-4]).unsqueeze(1)
    (table(torch.tensor([5])) * factors[session.rank]).sum().backward()
    grad = table.weight.grad
    assert grad is not None
    expected = ((factors[0] + factors[1]) + factors[2]) * (1.0 / 3)
    assert torch.equal(grad.to_dense()[5], expected)
    assert_equal({"rows": grad.indices()}, {"rows": torch.tensor([[5]])})
    reducer.close()
    return {"grad": grad.to_dense()}


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_sums_in_the_order_of_the_ranks(ranks: Ranks) -> None:
    ranks(result_of_ranks_in_order)


def nothing_extra_in_dense_steps() -> list[int]:
    """A step without sparse gradients talks no more than before: one round per backward."""
    session = open_session()
    torch.manual_seed(0)
    model = small_net()
    reducer = GradientReducer(model.named_parameters())
    for step in range(3):
        square_error(model, step, session.rank).backward()
    backwards = int(reducer.statistics()["backwards"])
    reducer.close()
    return [backwards]


def test_dense_steps_cost_one_round(ranks: Ranks) -> None:
    assert ranks(nothing_extra_in_dense_steps) == [[3], [3]]
