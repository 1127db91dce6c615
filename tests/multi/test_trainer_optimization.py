"""Training through the Trainer computes what a single process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    own_rank,
    reference,
)


class AdamRegression(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [scheduler]


class SteepRegression(Regression):
    """Gradients large enough to be clipped."""

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        return 50 * super().rank_loss(inputs, targets, rank, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class WithUnused(Regression):
    """One layer that no rank uses, one that only rank 0 uses, one in every other batch only."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.never = nn.Linear(2, 2)
        self.on_rank_zero = nn.Linear(FEATURES, 1)
        self.sometimes = nn.Linear(FEATURES, 1)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        output = self.head(self.body(inputs))
        if rank == 0:
            output = output + self.on_rank_zero(inputs)
        if batch_idx % 2:
            output = output + self.sometimes(inputs)
        return nn.functional.mse_loss(output, targets)

    def configure_optimizers(self) -> Any:
        # Weight decay would show in parameters whose gradient is zero instead of None.
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Manual(Regression):
    """Two optimizers by hand; their gradients come from two backward passes."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        body, head = self.optimizers()
        loss = self.loss(batch, batch_idx)
        head.zero_grad()
        self.differentiate(loss)
        self.clip_gradients(head, 0.5, "norm")
        head.step()
        body.zero_grad()
        self.differentiate(self.loss(batch, batch_idx))
        body.step()

    def differentiate(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.body.parameters(), lr=0.1),
            torch.optim.Adam(self.head.parameters(), lr=0.01),
        )


class ManualPlainBackward(Manual):
    def differentiate(self, loss: Tensor) -> None:
        loss.backward()


class Toggled(Manual):
    """As adversarial training does it: the other optimizer's parameters frozen meanwhile."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.differentiate(self.loss(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class ManualAccumulation(Manual):
    """Two batches a step; the first one's gradients stay local."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            steps = batch_idx % 2 == 1
            with optimizer.toggle_model(sync_grad=steps):
                self.manual_backward(self.loss(batch, batch_idx) / 2)
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()


class LineSearch(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class Tied(Regression):
    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        return super().rank_loss(self.second(self.first(inputs)), targets, rank, batch_idx)


class Unfrozen(Regression):
    """The body is frozen at first, and joins in the second epoch."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.body.requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize("model", [Regression, AdamRegression])
def test_automatic_optimization(ranks: Ranks, model: type[Regression]) -> None:
    assert_as_single_process(ranks(fit, model), reference(model, ranks.size))


@pytest.mark.parametrize("model", [WithUnused, Tied, Unfrozen])
def test_models_that_need_no_flag(ranks: Ranks, model: type[Regression]) -> None:
    assert_as_single_process(ranks(fit, model), reference(model, ranks.size))


@pytest.mark.parametrize("model", [Manual, ManualPlainBackward, Toggled, ManualAccumulation])
def test_manual_optimization(ranks: Ranks, model: type[Regression]) -> None:
    assert_as_single_process(ranks(fit, model), reference(model, ranks.size))


def accumulate(**arguments: Any) -> Outcome:
    # 40 rows are 5 batches of 8: two windows of two, and a last one of one.
    return fit(Regression, 40, accumulate_grad_batches=2, **arguments)


def test_accumulation_with_a_short_last_window(ranks: Ranks) -> None:
    expected = reference(Regression, ranks.size, 40, accumulate_grad_batches=2)
    assert_as_single_process(ranks(accumulate), expected)


def clip(algorithm: str, value: float) -> Outcome:
    return fit(SteepRegression, gradient_clip_val=value, gradient_clip_algorithm=algorithm)


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 1.0), ("value", 0.2)])
def test_clipping(ranks: Ranks, algorithm: str, value: float) -> None:
    expected = reference(
        SteepRegression, ranks.size, gradient_clip_val=value, gradient_clip_algorithm=algorithm
    )
    assert_as_single_process(ranks(clip, algorithm, value), expected)
    unclipped = reference(SteepRegression, ranks.size)
    assert not torch.allclose(unclipped.state["head.weight"], expected.state["head.weight"])


def search() -> Outcome:
    return fit(LineSearch, max_epochs=1)


def test_line_search(ranks: Ranks) -> None:
    """The closure runs several times a step, and its value steers the optimizer."""
    results = ranks(search)
    assert_ranks_agree(results)
    expected = reference(LineSearch, ranks.size, max_epochs=1)
    # Quasi-Newton steps amplify the rounding of the gradients.
    for name, tensor in expected.state.items():
        torch.testing.assert_close(results[0].state[name], tensor, rtol=0, atol=1e-4)


class Frozen(Regression):
    """Nothing to train: a run that only collects statistics."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.requires_grad_(False)
        self.automatic_optimization = False
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen += len(batch[0])

    def configure_optimizers(self) -> None:
        return None


def test_nothing_to_train(ranks: Ranks) -> None:
    results = ranks(fit, Frozen)
    assert_ranks_agree(results)
    assert results[0].state["seen"] == 48


def first_parameters(replaced: bool) -> list[dict[str, Tensor]]:
    torch.manual_seed(own_rank())
    model = Regression()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if replaced:
        model.load_state_dict(
            {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
        )
    trainer = make_trainer(limit_train_batches=0)
    trainer.fit(model, loader(8))
    return [before, {name: tensor.clone() for name, tensor in model.state_dict().items()}]


@pytest.mark.parametrize("replaced", [False, True])
def test_training_starts_from_rank_zeros_weights(ranks: Ranks, replaced: bool) -> None:
    results = ranks(first_parameters, replaced)
    own, _ = results[0]
    assert not torch.equal(own["head.weight"], results[1][0]["head.weight"])
    for _, started in results:
        for name, tensor in own.items():
            assert torch.equal(tensor, started[name])
