"""Replicas that drift apart: found, named, repaired."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from hvd_strategy import DivergenceError, MismatchError, check_consistency, named_state
from hvd_strategy.lightning.replica_check import ReplicaCheck
from hvd_strategy.session import open_session
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    Outcome,
    Recorder,
    Regression,
    assert_ranks_agree,
    loader,
    make_trainer,
    outcome,
    own_rank,
)


def state(rank: int) -> dict[str, Any]:
    """Tensors of many kinds, equal on all ranks whatever the layout of their memory."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 3, 4, 5, generator=generator)
    return {
        "weight": torch.randn(7, 5, generator=generator),
        "half": torch.randn(33, generator=generator).half(),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(3),
        "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        "conjugate": torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "sliced": torch.randn(6, 6, generator=generator)[::2, 1:4],
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "sparse": torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse(),
        "number": 4,
    }


def compare_equal() -> list[Any]:
    session = open_session()
    tensors = list(state(session.rank).items())
    return check_consistency(session, tensors[:: 1 if session.rank else -1])


def test_equal_tensors_of_every_kind(ranks: Ranks) -> None:
    assert ranks(compare_equal) == [[], []]


def flip(tensor: Any) -> Any:
    """The same with one bit of its last element changed."""
    if not isinstance(tensor, torch.Tensor):
        return tensor + 1
    if tensor.layout is not torch.strided:
        return flip(tensor.to_dense()).to_sparse()
    changed = tensor.resolve_conj().clone()
    last = changed.reshape(-1)[-1:].clone()
    last.view(torch.uint8)[0] ^= 1
    changed[(-1,) * changed.dim()] = last[0]
    return changed


def find_each() -> list[str]:
    session = open_session()
    problems = []
    for name, value in state(session.rank).items():
        tensors = state(session.rank)
        if isinstance(value, torch.Tensor) and value.numel() == 0:
            continue
        if session.rank == 1:
            tensors[name] = flip(value)
        with pytest.raises(DivergenceError) as caught:
            check_consistency(session, tensors.items(), when="optimizer step 5")
        problems.append(str(caught.value))
        assert f"'{name}' (rank 0 and rank 1" in problems[-1]
        assert "optimizer step 5" in problems[-1]
    return problems


def test_one_flipped_bit_is_found_and_named(ranks: Ranks) -> None:
    first, second = ranks(find_each)
    assert len(first) == len(second) == len(state(0)) - 1


def repair_by_majority() -> list[Any]:
    session = open_session()
    tensors = {
        name: value
        for name, value in state(session.rank).items()
        if name not in ("sparse", "number")
    }
    expected = {name: value.clone() for name, value in tensors.items()}
    # The odd one out is another rank each time, rank 0 among them.
    for number, name in enumerate(("weight", "half", "transposed", "channels last", "flags")):
        if session.rank == number % 3:
            changed = flip(tensors[name])
            tensors[name].copy_(changed)
            assert not torch.equal(tensors[name], expected[name])
    found = check_consistency(session, tensors.items(), on_divergence="repair")
    for name, value in tensors.items():
        assert torch.equal(value, expected[name]), name
        assert value.stride() == expected[name].stride() or name in ("sliced", "conjugate")
    assert check_consistency(session, tensors.items()) == []
    return [(divergence.name, divergence.groups) for divergence in found]


def test_repair_from_the_majority(ranks: Ranks) -> None:
    results = ranks.run(3, repair_by_majority)
    assert results[0] == results[1] == results[2]
    assert results[0] == [
        ("channels last", ((1, 2), (0,))),
        ("flags", ((0, 2), (1,))),
        ("half", ((0, 2), (1,))),
        ("transposed", ((0, 1), (2,))),
        ("weight", ((1, 2), (0,))),
    ]


def repair_without_majority() -> list[float]:
    session = open_session()
    value = torch.full((2,), float(session.rank))
    check_consistency(session, [("value", value)], on_divergence="repair")
    with pytest.raises(DivergenceError, match="no tensor and cannot be repaired"):
        check_consistency(session, [("value", session.rank)], on_divergence="repair")
    return value.tolist()


def test_rank_zero_counts_where_there_is_no_majority(ranks: Ranks) -> None:
    assert ranks(repair_without_majority) == [[0.0, 0.0], [0.0, 0.0]]


def compare_other_names() -> str:
    session = open_session()
    name = "a" if session.rank == 0 else "b"
    with pytest.raises(MismatchError) as caught:
        check_consistency(session, [(name, torch.ones(2))])
    with pytest.raises(MismatchError, match=r"\(2,\) float32"):
        check_consistency(session, [("a", torch.ones(2 + session.rank))])
    return str(caught.value)


def test_other_tensors_on_another_rank(ranks: Ranks) -> None:
    for text in ranks(compare_other_names):
        assert "rank 0 has 'a', (2,) float32, rank 1 does not" in text


def test_named_state_of_module_and_optimizers() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    names = [name for name, _ in named_state(module, [optimizer])]
    assert "0.weight" in names
    assert "1.running_mean" in names
    assert "optimizer: exp_avg of 0.weight" in names
    assert "optimizer: step of 1.bias" in names
    assert len(names) == len(set(names)) == 4 + 3 + 3 * 4
    assert "1.running_mean" not in dict(named_state(module, buffers=False))


# ---- through the Trainer


class Drifting(Regression):
    """One rank's parameter or momentum changes behind everybody's back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.what = ""
        self.at = 3

    def rank_loss(self, inputs: Any, targets: Any, rank: int, batch_idx: int) -> Any:
        return super().rank_loss(self.norm(inputs), targets, rank, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank != 1 or self.trainer.global_step != self.at:
            return
        if self.what == "parameter":
            self.head.weight.data[0, 0] += 0.125
        elif self.what == "state":
            momentum = self.trainer.optimizers[0].state[self.head.weight]["momentum_buffer"]
            momentum[0, 0] += 0.125


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(what: str, policy: str) -> tuple[str, int, Outcome]:
    torch.manual_seed(own_rank())
    model = Drifting()
    model.what = what
    trainer = make_trainer(
        strategy=strategy(consistency_check_every_n_steps=2, on_divergence=policy), max_epochs=2
    )
    text = ""
    said = Kept()
    logger = logging.getLogger("hvd_strategy")
    logger.addHandler(said)
    try:
        trainer.fit(model, loader(48))
    except DivergenceError as error:
        text = str(error)
    finally:
        logger.removeHandler(said)
    text += " ".join(said.lines)
    return text, trainer.global_step, outcome(trainer, model)


def strategy(**options: Any) -> Any:
    from hvd_strategy import HvdStrategy

    return HvdStrategy(**options)


@pytest.mark.parametrize("what", ["parameter", "state"])
def test_trainer_finds_what_drifts_within_n_steps(ranks: Ranks, what: str) -> None:
    name = "head.weight" if what == "parameter" else "optimizer: momentum_buffer of head.weight"
    for text, step, _ in ranks(train, what, "error", fresh=True):
        assert f"'{name}'" in text
        assert "rank 0 and rank 1" in text
        assert "optimizer step 4" in text
        assert step == 4


def test_trainer_repairs(ranks: Ranks) -> None:
    results = ranks(train, "parameter", "repair")
    assert "after optimizer step 4 'head.weight'" in results[0][0]
    assert results[0][1] == 12
    assert_ranks_agree([result for _, _, result in results])


def test_trainer_without_drift(ranks: Ranks) -> None:
    # Batch normalization's statistics differ between the ranks meanwhile, which is no drift.
    for text, step, _ in ranks(train, "", "error"):
        assert "repaired" not in text
        assert step == 12


def count_checks() -> list[int]:
    steps: list[int] = []

    class Counting(ReplicaCheck):
        def _check(self) -> None:
            steps.append(self._trainer.global_step)
            super()._check()

    torch.manual_seed(0)
    model = Regression()
    trainer = make_trainer(strategy=strategy(), accumulate_grad_batches=2, max_epochs=3)
    check = Counting(trainer, open_session(), 2, "error")
    recorder = Recorder(lambda trainer, module: check.on_batch_start(), "on_train_batch_start")
    end = Recorder(lambda trainer, module: check.on_train_end(), "on_train_end")
    trainer.callbacks += [recorder, end]
    trainer.fit(model, loader(48))
    return steps


def test_checks_come_every_n_optimizer_steps_and_at_the_end(ranks: Ranks) -> None:
    # 6 batches an epoch, 3 steps; 9 steps in all.
    assert ranks(count_checks) == [[2, 4, 6, 8, 9]] * 2


# ---- random numbers


class Noisy(Regression):
    def on_train_start(self) -> None:
        import random

        import numpy

        self.drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def draw(seed: int, rank_seeds: bool) -> tuple[list[float], Outcome]:
    torch.manual_seed(seed)
    model = Noisy()
    torch.manual_seed(seed)
    trainer = make_trainer(strategy=strategy(rank_seeds=rank_seeds), max_epochs=1)
    trainer.fit(model, loader(16))
    return model.drawn, outcome(trainer, model)


def test_rank_seeds(ranks: Ranks) -> None:
    (first, one), (second, other) = ranks(draw, 5, True)
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert_ranks_agree([one, other])
    (again, _), (second_again, _) = ranks(draw, 5, True)
    assert (first, second) == (again, second_again)
    (otherwise, _), _ = ranks(draw, 6, True)
    assert otherwise[0] != first[0]


def test_without_rank_seeds_nothing_is_reseeded(ranks: Ranks) -> None:
    (first, _), (second, _) = ranks(draw, 5, False)
    assert first[0] == second[0]
