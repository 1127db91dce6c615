"""The collectives that Lightning and LightningModules call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from hvd_strategy import MismatchError, open_session
from hvd_strategy.lightning.collectives import operation_name
from tests.multi.pool import Ranks, RanksFailedError
from tests.multi.trainer_cases import Regression, loader, make_trainer, own_rank


class Calling(Regression):
    """Calls functions of the strategy from within a run, where it is set up."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def on_test_start(self) -> None:
        self.result = self.function(self.trainer.strategy)


def in_a_run(function: Any) -> Any:
    model = Calling(function)
    make_trainer().test(model, loader(8), verbose=False)
    return model.result


def values() -> Tensor:
    return torch.tensor([[1.0, -2.0], [3.0, 4.0]]) * (own_rank() + 1)


def reduced() -> dict[str, Tensor]:
    return in_a_run(_reduce_everything)


def _reduce_everything(strategy: Any) -> dict[str, Any]:
    operations = {
        "mean": "mean",
        "AVG": "mean",
        dist.ReduceOp.AVG: "mean",
        "sum": "sum",
        None: "sum",
        dist.ReduceOp.SUM: "sum",
        "min": "min",
        dist.ReduceOp.MIN: "min",
        "max": "max",
        dist.ReduceOp.MAX: "max",
        "product": "product",
        dist.ReduceOp.PRODUCT: "product",
    }
    results: dict[str, Any] = {
        f"{operation} {expected}": strategy.reduce(values(), reduce_op=operation)
        for operation, expected in operations.items()
    }
    results["group sum"] = strategy.reduce(values(), dist.new_group([0, 1]), "sum")
    in_place = values().t()
    assert strategy.reduce(in_place) is in_place
    results["transposed mean"] = in_place.t()
    results["integers"] = strategy.reduce(torch.tensor([own_rank(), 3]), reduce_op="mean")
    results["sum of integers"] = strategy.reduce(torch.tensor([2**40 + own_rank()]), None, "sum")
    results["bits"] = strategy.reduce(torch.tensor([1 << own_rank()]), None, dist.ReduceOp.BOR)
    results["no tensor"] = strategy.reduce(own_rank())
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(2, requires_grad=True)
        loss = strategy.reduce((weight * (own_rank() + 1)).sum())
        loss.backward()
    results["loss"] = loss.detach()
    results["gradient"] = weight.grad
    return results


def test_reduce(ranks: Ranks) -> None:
    first = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    expected = {
        "mean": 1.5 * first,
        "sum": 3 * first,
        "min": torch.minimum(first, 2 * first),
        "max": torch.maximum(first, 2 * first),
        "product": 2 * first * first,
    }
    results = ranks(reduced)
    for rank, result in enumerate(results):
        for name, tensor in result.items():
            operation = name.split()[-1]
            if operation in expected:
                assert torch.equal(tensor, expected[operation]), name
        assert torch.equal(result["integers"], torch.tensor([0.5, 3.0]))
        assert result["sum of integers"].tolist() == [2**41 + 1]
        assert result["bits"].tolist() == [3]
        assert result["no tensor"] == rank
        assert result["loss"] == 3
        assert result["gradient"].tolist() == [rank + 1] * 2


def test_operations_have_names() -> None:
    assert operation_name(None) == "sum"
    assert operation_name("Mean") == "mean"
    with pytest.raises(ValueError, match=r"reduce_op='median' is not an operation; it can be 'me"):
        operation_name("median")


def gathered() -> list[Tensor]:
    return in_a_run(_gather_everything)


def _gather_everything(strategy: Any) -> list[Tensor]:
    scalar = strategy.all_gather(torch.tensor(own_rank()))
    matrix = strategy.all_gather(values())
    with torch.enable_grad(), torch.inference_mode(False):
        tensor = values().requires_grad_()
        weights = torch.arange(1.0, 9.0).view(2, 2, 2) * (own_rank() + 1)
        together = strategy.all_gather(tensor, sync_grads=True)
        (together * weights).sum().backward()
        assert not strategy.all_gather(tensor).requires_grad
    assert tensor.grad is not None
    return [scalar, matrix, together.detach(), tensor.grad]


def test_all_gather(ranks: Ranks) -> None:
    both = torch.stack([torch.tensor([[1.0, -2.0], [3.0, 4.0]]) * scale for scale in (1, 2)])
    for rank, (scalar, matrix, together, gradient) in enumerate(ranks(gathered)):
        assert scalar.tolist() == [0, 1]
        assert torch.equal(matrix, both)
        assert torch.equal(together, both)
        # The sum over the ranks' losses: their weights add up to three times the first's.
        assert torch.equal(gradient, 3 * torch.arange(1.0, 9.0).view(2, 2, 2)[rank])


def gathered_shapes() -> None:
    in_a_run(lambda strategy: strategy.all_gather(torch.zeros(1 + own_rank())))


def test_all_gather_of_different_shapes(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError, match=r"different shapes, by rank: \[\(1,\), \(2,\)\]"):
        ranks(gathered_shapes)


def objects() -> list[Any]:
    return in_a_run(
        lambda strategy: [
            strategy.broadcast({"rank": own_rank()}),
            strategy.broadcast(torch.full((2,), own_rank()), src=1).tolist(),
            strategy.reduce_boolean_decision(own_rank() == 0, all=True),
            strategy.reduce_boolean_decision(own_rank() == 0, all=False),
            strategy.reduce_boolean_decision(True),
            strategy.barrier("here"),
        ]
    )


def test_objects_and_decisions(ranks: Ranks) -> None:
    assert ranks(objects) == [[{"rank": 0}, [1, 1], False, True, True, None]] * 2


def different_collectives() -> list[str]:
    session = open_session()
    texts = []
    for calls in (
        (session.broadcast_object, session.allgather_object),
        (session.allgather_object, lambda value: session.exchange("mine", [value])),
        (lambda value: session.broadcast(torch.ones(2)), session.broadcast_object),
    ):
        with pytest.raises(MismatchError) as caught:
            calls[session.rank]("value")
        texts.append(str(caught.value))
    texts.append(session.broadcast_object("still usable"))
    return texts


def test_different_collectives_are_an_error_on_every_rank(ranks: Ranks) -> None:
    for texts in ranks(different_collectives):
        for text, (first, second) in zip(
            texts,
            (
                ("broadcast_object", "allgather_object"),
                ("allgather_object", "mine"),
                ("broadcast", "broadcast_object"),
            ),
            strict=False,
        ):
            assert f"different purposes: rank 0 has {first}, rank 1 has {second}" in text
        assert texts[-1] == "still usable"


class Logging(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rank = self.global_rank
        for reduce in ("mean", "sum", "min", "max"):
            self.log(reduce, float(rank + 1), sync_dist=True, reduce_fx=reduce, on_epoch=True)
        self.log("count", rank, sync_dist=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def logged() -> dict[str, float]:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Logging(), loader(24))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_log(ranks: Ranks) -> None:
    first, second = ranks(logged)
    assert first == second
    assert first["mean"] == 1.5
    assert first["sum_step"] == 3
    assert first["sum_epoch"] == 9  # three batches on each rank
    assert (first["min"], first["max"]) == (1, 2)
    assert first["count"] == 0.5
