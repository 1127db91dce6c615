"""torch.compile under the Trainer: of the whole LightningModule, and of its blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor

from tests.multi.compile_cases import cache_folder, compiler_counts, prepare_compiler
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    Outcome,
    Regression,
    assert_as_single_process,
    assert_ranks_agree,
    loader,
    make_trainer,
    outcome,
    own_rank,
    reference,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cache_folder(tmp_path_factory)


class InPlace(Regression):
    """Compiles a block of its own; the reference compiles nothing."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        if not ranks:
            self.body.compile()


class Replaced(Regression):
    """Replaces a block by what torch.compile returns, which puts its name into the keys."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body = torch.compile(self.body, backend="eager" if ranks else "inductor")


class Manual(Regression):
    """Steps by itself, in a training_step that is compiled as a whole."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()


def fit_compiled(cache: str, model_class: type[Regression], count: int, arguments: Any) -> Outcome:
    """One fit of the compiled module; the parts that compile themselves are left to themselves."""
    prepare_compiler(cache)
    torch.manual_seed(own_rank())
    model = model_class()
    trainer = make_trainer(**arguments)
    trainer.fit(torch.compile(model, backend="aot_eager"), loader(count), loader(count))
    assert trainer.lightning_module is model
    assert model._compiler_ctx is not None
    assert to_uncompiled(model) is model
    return outcome(trainer, model)


def fit_with_inductor(
    cache: str, model_class: type[Regression], whole: bool, folder: str
) -> Outcome:
    """Two epochs with the real compiler; the second by another Trainer, from a checkpoint."""
    prepare_compiler(cache)
    torch.manual_seed(own_rank())
    model = model_class()
    compiled: Any = torch.compile(model) if whole else model
    trainer = make_trainer(max_epochs=1)
    trainer.fit(compiled, loader(32))
    path = os.path.join(folder, "last.ckpt")
    trainer.save_checkpoint(path)
    torch.manual_seed(10 + own_rank())
    model = model_class()
    compiled = torch.compile(model) if whole else model
    trainer = make_trainer(max_epochs=2)
    trainer.fit(compiled, loader(32), ckpt_path=path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    return outcome(trainer, model)


@pytest.mark.parametrize("model_class", [Regression, Manual])
def test_whole_module(ranks: Ranks, cache: str, model_class: type[Regression]) -> None:
    outcomes = ranks(fit_compiled, cache, model_class, 48, {})
    assert_as_single_process(outcomes, reference(model_class, 2))
    assert not any("_orig_mod" in name for name in outcomes[0].state)


def test_accumulation(ranks: Ranks, cache: str) -> None:
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    outcomes = ranks(fit_compiled, cache, Regression, 40, arguments)
    assert_as_single_process(outcomes, reference(Regression, 2, 40, **arguments))


@pytest.mark.parametrize(
    ("model_class", "whole"), [(Regression, True), (InPlace, False), (Replaced, False)]
)
def test_inductor(
    ranks: Ranks, cache: str, tmp_path: Path, model_class: type[Regression], whole: bool
) -> None:
    """Keys of checkpoints are those of a single process, where a block's name counts as well."""
    outcomes = ranks(fit_with_inductor, cache, model_class, whole, str(tmp_path), timeout=100)
    expected = reference(model_class, 2, 32)
    expected.metrics.clear()  # no validation there
    assert_as_single_process(outcomes, expected)
    prefixed = any("_orig_mod" in name for name in outcomes[0].state)
    assert prefixed == (model_class is Replaced)


def fit_and_count(cache: str, strategy: str) -> tuple[dict[str, Any], Outcome]:
    prepare_compiler(cache)
    torch.manual_seed(0)
    model = Regression()
    trainer = make_trainer(strategy, devices=1)
    trainer.fit(torch.compile(model, backend="aot_eager"), loader(16), loader(16))
    counts = compiler_counts()
    # Not which: `self.log` is hidden from the compiler by Lightning, and by us in other words.
    counts["breaks"] = sum(counts["breaks"].values())
    return counts, outcome(trainer, model)


def test_no_graph_breaks_of_ours(ranks: Ranks, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many graphs, breaks and frames as without any strategy."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)  # put back at the end of the test
    alone, _ = fit_and_count(cache, "auto")
    assert alone["graphs"]["unique_graphs"] > 0
    results = ranks(fit_and_count, cache, "hvd")
    assert_ranks_agree([result for _, result in results])
    assert [counts for counts, _ in results] == [alone, alone]
