"""Validation and test with ranks that have different numbers of batches, or of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
)

from hvd_strategy import HvdError
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    loader,
    make_trainer,
    own_rank,
    rows,
)
from tests.multi.uneven_cases import (
    ROWS,
    Evaluating,
    loader_of,
)


def evaluate(count: int, arguments: Any, own_sampler: str = "") -> Any:
    """Samples seen in validate, in test and in a fit; the metrics of the former two."""
    torch.manual_seed(0)
    model = Evaluating()
    data: Any = rows(count)
    if own_sampler == "distributed":
        data = DataLoader(data, 3, sampler=DistributedSampler(data, shuffle=False))
    elif own_sampler == "random":
        data = DataLoader(data, 3, sampler=SubsetRandomSampler(range(count)))
    elif own_sampler == "batches":
        data = DataLoader(data, batch_sampler=Pairs(count))
    else:
        data = DataLoader(data, 3)
    seen, metrics = [], {}
    trainer = make_trainer(**arguments())
    for function in (trainer.validate, trainer.test):
        model.evaluated = 0
        (values,) = function(model, data, verbose=False)
        seen.append(model.evaluated)
        metrics |= values
    model.evaluated = 0
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=-1, **arguments())
    trainer.fit(model, loader(24), data)
    seen.append(model.evaluated)
    return seen, metrics


class Pairs:
    """A batch sampler of another make."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return -(-self.count // 2)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.count, 2):
            yield list(range(start, min(start + 2, self.count)))


def evaluate_exactly(count: int, own_sampler: str) -> Any:
    from hvd_strategy.lightning import HvdStrategy

    return evaluate(count, lambda: {"strategy": HvdStrategy(exact_evaluation=True)}, own_sampler)


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("own_sampler", ["", "distributed", "random", "batches"])
def test_every_sample_is_evaluated_once(ranks: Ranks, own_sampler: str) -> None:
    results = ranks(evaluate_exactly, 17, own_sampler)
    seen, expected = evaluate(17, lambda: {"strategy": "auto", "devices": 1}, "")
    assert seen == [17, 17, 3 * 17]
    assert [sum(counts) for counts in zip(*(seen for seen, _ in results), strict=True)] == seen
    for _, metrics in results:
        assert metrics == pytest.approx(expected, rel=1e-5)


def evaluate_uneven(policy: str, counts: list[int]) -> Any:
    from hvd_strategy.lightning import HvdStrategy

    torch.manual_seed(0)
    model = Evaluating()
    strategy = HvdStrategy(uneven_inputs=policy)
    trainer = make_trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    train = loader_of("map", own_rank(), 2)
    try:
        trainer.fit(model, train, loader_of("map", own_rank(), counts[own_rank()]))
    except HvdError as error:
        return f"{type(error).__name__}: {error}"
    return model.evaluated // ROWS, float(trainer.callback_metrics["val_loss"])


def test_uneven_validation(ranks: Ranks) -> None:
    joined = ranks(evaluate_uneven, "join", [3, 1])
    assert [count for count, _ in joined] == [3, 1]
    assert joined[0][1] == joined[1][1]
    assert [count for count, _ in ranks(evaluate_uneven, "stop", [3, 1])] == [1, 1]
    for text in ranks(evaluate_uneven, "error", [3, 1]):
        assert text.startswith("MismatchError: The ranks have different numbers of batches to eval")
        assert "rank 0 has 3, rank 1 has 1" in text


class MeetsInValidation(Evaluating):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.all_gather(torch.ones(2))


def meet_in_validation() -> str:
    trainer = make_trainer(max_epochs=1, use_distributed_sampler=False)
    data = loader_of("map", own_rank(), 1 + 2 * own_rank())
    try:
        trainer.validate(MeetsInValidation(), data, verbose=False)
    except HvdError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_collectives_in_an_uneven_validation(ranks: Ranks) -> None:
    for text in ranks(meet_in_validation, fresh=True):
        assert "the ranks have different numbers of batches" in text
