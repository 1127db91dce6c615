"""Gradients through the Trainer, whatever a module does with its parameters.

Each class is a module whose training is compared with that of one process; `reducer_cases` and the
tests of GradientReducer look at the same situations in more detail.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hvd_strategy import HvdError, RankFailedError
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    FEATURES,
    Outcome,
    Regression,
    assert_as_single_process,
    assert_ranks_agree,
    fit,
    loader,
    make_trainer,
    outcome,
    own_rank,
    reference,
)

ROWS = 24  # three batches a rank and epoch


def compare(ranks: Ranks, model: type[Regression], **arguments: Any) -> list[Outcome]:
    results: list[Outcome] = ranks(fit, model, ROWS, **arguments)
    assert_as_single_process(results, reference(model, ranks.size, ROWS))
    return results


class Plain(Regression):
    """Without momentum, which would be of the old type or belong to the old parameter."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


# ---- the ways of autograd ----


class GradientPenalty(Regression):
    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        loss = super().rank_loss(inputs, targets, rank, batch_idx)
        if not torch.is_grad_enabled():
            return loss
        inputs = inputs.detach().requires_grad_()
        output = self.head(self.body(inputs)).sum()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        return loss + (slope.norm(dim=1) - 1).square().mean()


class Checkpointed(Regression):
    """A layer inside of checkpoints and outside of them."""

    reentrant = False

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.middle = nn.Linear(8, 8)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        hidden = self.middle(self.body(inputs))
        for _ in range(2):
            hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(self.head(torch.tanh(self.middle(hidden))), targets)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


class WithHooks(Regression):
    """Hooks of tensors and of parameters change the rank's own gradient."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.head.weight.register_hook(lambda gradient: 2 * gradient)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        hidden = self.body(inputs)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * (rank + 1))
        return nn.functional.mse_loss(self.head(hidden), targets)


class OfManyKinds(Plain):
    """Other dtypes, shapes and strides than usual in one module."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(2, FEATURES).t())
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        loss = super().rank_loss(inputs @ self.turned @ self.turned.T, targets, rank, batch_idx)
        image = self.conv(inputs.view(-1, 1, 2, 3)).square().mean()
        loss = loss + image + self.scale * (self.wide.float() * inputs[:, :3]).square().mean()
        return loss + (self.turn * inputs[0, :3]).abs().square().sum() + self.empty.sum()


@pytest.mark.parametrize(
    "model", [GradientPenalty, Checkpointed, CheckpointedReentrantly, WithHooks, OfManyKinds]
)
def test_ways_of_autograd(ranks: Ranks, model: type[Regression]) -> None:
    compare(ranks, model)


# ---- optimization by hand ----


class ByHand(Plain):
    """Manual optimization with one optimizer; `step` says what happens to a batch."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(self.optimizers(), batch, batch_idx)

    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        raise NotImplementedError


class Adversaries(ByHand):
    """A generator (the body) and a critic (the head), each with its own optimizer and loss."""

    toggles = False

    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        for number, turn in enumerate(optimizer):
            if self.toggles:
                self.toggle_optimizer(turn)
            turn.zero_grad()
            self.turn_number = number
            self.manual_backward(self.loss(batch, batch_idx))
            turn.step()
            if self.toggles:
                self.untoggle_optimizer(turn)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        hidden = self.body(inputs)
        if torch.is_grad_enabled() and self.turn_number == 1:
            return nn.functional.mse_loss(self.head(hidden.detach()), targets)
        return self.head(hidden).square().mean()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.body.parameters(), lr=0.01),
            torch.optim.SGD(self.head.parameters(), lr=0.05),
        )


class ToggledAdversaries(Adversaries):
    toggles = True


class KeptGradients(ByHand):
    """Nobody clears them."""

    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.005)


class SetToZero(ByHand):
    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()


class WithoutGraph(ByHand):
    """In the second batch rank 1 has nothing to differentiate, in the third nobody has."""

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        loss = super().rank_loss(inputs, targets, rank, batch_idx)
        return loss.detach() * 0 if batch_idx == 2 or (batch_idx == 1 and rank == 1) else loss

    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        optimizer.zero_grad()
        loss = self.loss(batch, batch_idx)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()


class BlockedBackward(ByHand):
    """Windows of three batches, synchronised around `backward` only."""

    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch, batch_idx) / 3
        last = batch_idx % 3 == 2
        blocked = getattr(self.trainer.strategy, "block_backward_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else blocked():
            self.manual_backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()


class Stashed(ByHand):
    """Gradients that the user keeps do not change when the next ones are reduced."""

    def on_train_start(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        self.kept += [(p.grad, p.grad.clone()) for p in self.parameters()]
        optimizer.step()

    def on_train_end(self) -> None:
        assert len(self.kept) == 24
        assert all(torch.equal(gradient, copy) for gradient, copy in self.kept)


class Fails(torch.autograd.Function):
    """Raises in backward, if told so."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, failing: bool) -> Tensor:
        ctx.failing = failing
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.failing:
            raise MemoryError("no memory on purpose")
        return gradient.clone(), None


class CaughtException(ByHand):
    """The second batch fails on rank 1, and is left out by everybody."""

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        hidden = Fails.apply(self.body(inputs), batch_idx == 1 and rank == 1)
        return nn.functional.mse_loss(self.head(hidden), targets)

    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        optimizer.zero_grad()
        if batch_idx == 1:
            own = self.ranks or self.global_rank == 1
            with pytest.raises(MemoryError if own else RankFailedError):
                self.manual_backward(self.loss(batch, batch_idx))
            return
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    "model",
    [
        Adversaries,
        ToggledAdversaries,
        KeptGradients,
        SetToZero,
        WithoutGraph,
        BlockedBackward,
        Stashed,
        CaughtException,
    ],
)
def test_by_hand(ranks: Ranks, model: type[Regression]) -> None:
    compare(ranks, model)


# ---- sparse gradients ----


class SparseTables(Regression):
    """Two tables, one of them for some batches of some ranks only, and an optimizer for them."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False
        self.often = nn.Embedding(9, FEATURES, sparse=True)
        self.seldom = nn.Embedding(9, FEATURES, sparse=True)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        rows = (inputs[:, 0] * 3).long() % 9
        inputs = inputs + self.often(rows)
        if batch_idx == 1 and rank == 0:
            inputs = inputs + self.seldom(rows[:2]).sum(0)
        return super().rank_loss(inputs, targets, rank, batch_idx)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        both = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        assert self.often.weight.grad.is_sparse
        for optimizer in both:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        tables = [*self.often.parameters(), *self.seldom.parameters()]
        layers = [*self.body.parameters(), *self.head.parameters()]
        return torch.optim.SparseAdam(tables, lr=0.05), torch.optim.SGD(layers, lr=0.05)


class TablesMadeDense(Plain):
    """With automatic optimization, and the option that makes sparse gradients dense."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.table = nn.Embedding(9, FEATURES, sparse=True)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        rows = (inputs[:, 0] * 3).long() % 9
        return super().rank_loss(inputs + self.table(rows), targets, rank, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.table.weight.grad.is_sparse == bool(self.ranks)


def test_sparse_gradients(ranks: Ranks) -> None:
    compare(ranks, SparseTables)


def fit_made_dense(environment: bool) -> Outcome:

    from hvd_strategy.lightning import HvdStrategy

    with pytest.MonkeyPatch.context() as patch:
        if environment:
            patch.setenv("HVD_SPARSE_AS_DENSE", "true")
        strategy = HvdStrategy() if environment else HvdStrategy(sparse_as_dense=True)
        return fit(TablesMadeDense, ROWS, strategy=strategy)


@pytest.mark.parametrize("environment", [False, True])
def test_sparse_as_dense(ranks: Ranks, environment: bool) -> None:
    results = ranks(fit_made_dense, environment)
    assert_as_single_process(results, reference(TablesMadeDense, ranks.size, ROWS))


# ---- parameters that become others ----


class Changing(Plain):
    """What `change` does happens at the start of the second epoch, on a model in training."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change(self.trainer.optimizers[0])

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        raise NotImplementedError

    def step_all(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"] = list(self.parameters())


class Converted(Changing):
    def change(self, optimizer: torch.optim.Optimizer) -> None:
        self.body.double()

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        hidden = self.body(inputs.to(self.body[0].weight.dtype)).to(inputs.dtype)
        return nn.functional.mse_loss(self.head(hidden), targets)


class Assigned(Changing):
    def change(self, optimizer: torch.optim.Optimizer) -> None:
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.load_state_dict(state, assign=True)
        self.step_all(optimizer)


class Normalized(Changing):
    def change(self, optimizer: torch.optim.Optimizer) -> None:
        parametrizations.weight_norm(self.head)
        self.step_all(optimizer)


class Shared(Changing):
    def change(self, optimizer: torch.optim.Optimizer) -> None:
        self.share_memory()


class GroupAdded(Changing):
    """As `BackboneFinetuning` does: frozen and unknown to the optimizer, then neither."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05)

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        self.body.requires_grad_(True)
        optimizer.add_param_group({"params": list(self.body.parameters()), "lr": 0.02})


@pytest.mark.parametrize("model", [Converted, Assigned, Normalized, Shared, GroupAdded])
def test_parameters_that_change_in_training(ranks: Ranks, model: type[Changing]) -> None:
    compare(ranks, model)


# ---- who registers what ----


class OtherOrder(Plain):
    """Rank 1 registers its layers the other way round."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        if not ranks and own_rank() == 1:
            body, head = self.body, self.head
            del self.body, self.head
            self.head, self.body = head, body


def fit_in_other_order() -> Outcome:
    result = fit(OtherOrder, ROWS)
    result.state = dict(sorted(result.state.items()))
    result.optimizer_state = {}
    return result


def test_registered_in_another_order(ranks: Ranks) -> None:
    expected = reference(OtherOrder, ranks.size, ROWS)
    expected.state = dict(sorted(expected.state.items()))
    assert_as_single_process(ranks(fit_in_other_order), expected)


# ---- refused ----


class HigherOrder(ByHand):
    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx), create_graph=True)


class StepsInHook(ByHand):
    def step(self, optimizer: Any, batch: list[Tensor], batch_idx: int) -> None:
        handle = self.head.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        try:
            self.manual_backward(self.loss(batch, batch_idx))
        finally:
            handle.remove()


def refused(model_class: type[Regression]) -> str:
    torch.manual_seed(own_rank())
    with pytest.raises(HvdError) as caught:
        make_trainer().fit(model_class(), loader(8))
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "text"),
    [(HigherOrder, "create_graph=True"), (StepsInHook, "step() inside backward")],
)
def test_refused(ranks: Ranks, model: type[Regression], text: str) -> None:
    assert any(text in message for message in ranks(refused, model))
    # And the next run works.
    assert_ranks_agree(ranks(fit, Plain, 8))


def trained_once() -> Outcome:
    torch.manual_seed(own_rank())
    model = Plain()
    trainer = make_trainer()
    trainer.fit(model, loader(8))
    # Nothing of ours is left on the module.
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(m._load_state_dict_post_hooks for m in model.modules())
    return outcome(trainer, model)


def test_nothing_is_left_on_the_module(ranks: Ranks) -> None:
    assert_ranks_agree(ranks(trained_once))
