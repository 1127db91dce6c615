"""Ranks with different numbers of batches, against one process with the batches of all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)
from torchmetrics import MeanAbsoluteError

from hvd_strategy import HvdError, RankFailedError
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    FEATURES,
    Outcome,
    assert_as_single_process,
    assert_ranks_agree,
    loader,
    make_trainer,
    outcome,
    own_rank,
)
from tests.multi.uneven_cases import (
    ROWS,
    Evaluating,
    Momentum,
    Scheduled,
    Uneven,
    fit_uneven,
    loader_of,
    one_process,
    run,
)


@pytest.mark.parametrize(
    ("model", "kind", "counts", "arguments"),
    [
        (Uneven, "map", [3, 5], {}),
        (Uneven, "batches", [5, 2], {}),
        (Uneven, "foreign", [2, 4], {}),
        (Uneven, "stream", [5, 3], {}),
        (Uneven, "stream", [3, 5], {"accumulate_grad_batches": 3}),
        (Uneven, "sized stream", [2, 5], {}),
        (Uneven, "wrongly sized stream", [4, 2], {}),
        (Momentum, "map", [3, 6], {"accumulate_grad_batches": 4}),
        (Scheduled, "map", [3, 6], {"gradient_clip_val": 0.1}),
    ],
)
def test_join(
    ranks: Ranks,
    model: type[Uneven],
    kind: str,
    counts: list[int],
    arguments: dict[str, Any],
) -> None:
    results = ranks(fit_uneven, model, kind, counts, arguments)
    assert_as_single_process(results, one_process(model, counts, **arguments))
    for rank, result in enumerate(results):
        assert result.extra == list(range(counts[rank])) * 2
    short = counts.index(min(counts))
    told = f"rank {short} ran out of batches after {min(counts)} of {max(counts)}; the others went"
    assert sum(output.count(told) for output in ranks.output) == 2  # one line per epoch


# ---- the loop of a rank that has run out


class Watching(Callback):
    """What the hooks see, by batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.strategy.idle == (len(batch[0]) == 0)
        self.seen.append(("start", batch_idx, len(batch[0])))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert tuple(batch[0].shape[1:]) == (FEATURES,)
        self.seen.append(("end", batch_idx, len(outputs), trainer.is_last_batch))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(("validation", trainer.global_step))


class Logging(Uneven):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer.validating or len(batch[0])
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        value = float(10 * batch_idx + self.global_rank)
        self.log("value", value, sync_dist=True, on_step=True, on_epoch=True)
        return loss


def fit_logging(kind: str, counts: list[int], folder: str) -> Any:
    torch.manual_seed(own_rank())
    watching = Watching()
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[watching, checkpoint],
        logger=CSVLogger(folder, "", ""),
        log_every_n_steps=1,
        val_check_interval=0.5 if kind == "map" else 2,
    )
    count = counts[own_rank()]
    trainer.fit(Logging(), loader_of(kind, own_rank(), count), loader(8))
    return watching.seen, {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_loop_of_an_idle_rank(ranks: Ranks, kind: str, tmp_path: Any) -> None:
    counts = [2, 4]  # rank 0 writes, and is idle
    results = ranks(fit_logging, kind, counts, str(tmp_path))
    for rank, (seen, metrics) in enumerate(results):
        expected = []
        for epoch in range(2):
            for index in range(4):
                active = index < counts[rank]
                expected += [
                    ("start", index, ROWS if active else 0),
                    ("end", index, int(active), index == 3),
                ]
                if index % 2:
                    expected.append(("validation", 4 * epoch + index + 1))
        assert seen == expected
        # Of the active ranks; and of all samples of the epoch.
        assert metrics["value_step"] == 31.0
        assert metrics["value_epoch"] == pytest.approx((0 + 1 + 10 + 11 + 21 + 31) / 6)
    written = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert written == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    place = lines[0].split(",").index("value_step")
    values = [line.split(",")[place] for line in lines[1:]]
    assert [float(value) for value in values if value] == [0.5, 10.5, 21.0, 31.0] * 2
    told = "epoch 0: rank 0 ran out of batches after 2 of 4; the others went on without it"
    assert sum(output.count(told) for output in ranks.output) == 1


def fit_failing_hook() -> list[str]:
    class Failing(Uneven):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            outputs["loss"]

    try:
        run(Failing(), loader_of("map", own_rank(), 2 + own_rank()))
    except (KeyError, RankFailedError) as error:
        return [type(error).__name__, str(error)]
    return []


def test_a_hook_that_needs_a_batch_is_explained(ranks: Ranks) -> None:
    first, second = ranks(fit_failing_hook, fresh=True)
    assert first[0] == "KeyError"
    assert second[0] == "RankFailedError"
    assert "hooks get a batch without samples" in ranks.output[0]


# ---- "stop" and "error"


def fit_with(policy: str, kind: str, counts: list[int], model: type[Uneven] = Uneven) -> Any:
    from hvd_strategy.lightning import HvdStrategy

    torch.manual_seed(own_rank())
    data = loader_of(kind, own_rank(), counts[own_rank()])
    try:
        return run(model(), data, strategy=HvdStrategy(uneven_inputs=policy))
    except HvdError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["map", "stream", "wrongly sized stream"])
def test_stop(ranks: Ranks, kind: str) -> None:
    results = ranks(fit_with, "stop", kind, [5, 3])
    assert_as_single_process(results, one_process(Uneven, [3, 3]))
    for result in results:
        assert result.extra == [0, 1, 2] * 2


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_error(ranks: Ranks, kind: str) -> None:
    for text in ranks(fit_with, "error", kind, [5, 3]):
        assert text.startswith("MismatchError: The ranks have different numbers of training batch")
        at_least = "" if kind == "map" else "at least "
        assert f"rank 0 has {at_least}{5 if kind == 'map' else 4}, rank 1 has 3" in text


def fit_with_policies_of_their_own() -> Any:
    return fit_with("stop" if own_rank() else "join", "map", [3, 3])


def test_policies_that_differ(ranks: Ranks) -> None:
    for text in ranks(fit_with_policies_of_their_own):
        assert text.startswith("MismatchError: uneven_inputs differs between the ranks: rank 0 has")


def test_even_numbers_are_no_error(ranks: Ranks) -> None:
    for kind in ("map", "stream"):
        results = ranks(fit_with, "error", kind, [3, 3])
        assert_as_single_process(results, one_process(Uneven, [3, 3]))


class ByHand(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization(ranks: Ranks) -> None:
    for kind in ("map", "stream"):
        results = ranks(fit_with, "stop", kind, [5, 3], ByHand)
        assert_as_single_process(results, one_process(Uneven, [3, 3]))
        for text in ranks(fit_with, "join", kind, [5, 3], ByHand):
            assert text.startswith("HvdError: The ranks have different numbers of training batches")
            assert 'uneven_inputs="stop"' in text
        assert_ranks_agree(ranks(fit_with, "join", kind, [3, 3], ByHand))


# ---- layers and collectives that need all ranks


class Normalized(Uneven):
    """In the reference the loss is that of all batches at once, which are equally large."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if isinstance(batch[0], list):
            batch = [torch.cat(parts) for parts in zip(*batch, strict=True)]
        return super().training_step(batch, batch_idx)


def fit_normalized(counts: list[int]) -> Outcome:
    torch.manual_seed(own_rank())
    data = loader_of("map", own_rank(), counts[own_rank()])
    return run(Normalized(), data, sync_batchnorm=True)


@pytest.mark.parametrize(("ranks", "counts"), [(2, [1, 3]), (3, [2, 4, 3])], indirect=["ranks"])
def test_synchronised_layers(ranks: Ranks, counts: list[int]) -> None:
    results = ranks(fit_normalized, counts)
    assert_as_single_process(results, one_process(Normalized, counts))


class Meeting(Uneven):
    """Calls a collective in each step."""

    kind = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.kind == "barrier":
            self.trainer.strategy.barrier()
        elif self.kind == "all_gather":
            self.all_gather(torch.ones(2))
        elif self.kind == "torch":
            torch.distributed.all_reduce(torch.ones(2))
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.kind == "after backward":
            self.trainer.strategy.barrier()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kind == "batch end":
            self.trainer.strategy.barrier()


def fit_meeting(kind: str, counts: list[int]) -> str:
    torch.manual_seed(own_rank())
    model = Meeting()
    model.kind = kind
    try:
        run(model, loader_of("map", own_rank(), counts[own_rank()]))
    except (HvdError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{model.trained}"


@pytest.mark.parametrize("kind", ["barrier", "all_gather", "after backward"])
def test_collectives_without_the_idle_rank(ranks: Ranks, kind: str) -> None:
    active, idle = ranks(fit_meeting, kind, [4, 2], fresh=True)
    assert active.startswith("HvdError: Rank 0: a collective operation was called in training_step")
    for text in (active, idle):
        assert "rank 1 had run out of batches" in text
        assert 'HvdStrategy(uneven_inputs="stop")' in text
    assert idle.startswith("RankFailedError")


def test_collectives_where_all_ranks_are(ranks: Ranks) -> None:
    first, second = ranks(fit_meeting, "batch end", [4, 2])
    assert (first, second) == (str([0, 1, 2, 3] * 2), str([0, 1] * 2))


# ---- other weights in the same step


class SkipsToo(Uneven):
    """Rank 0 returns None for its second batch, all ranks do for the fourth."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 3:
            return None
        if isinstance(batch[0], list):
            return super().training_step(batch[1:] if batch_idx == 1 else batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 0:
            return None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


def fit_scaled(counts: list[int]) -> Outcome:
    torch.manual_seed(own_rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    model = Uneven()
    data = loader_of("map", own_rank(), counts[own_rank()])
    trainer = make_trainer(
        use_distributed_sampler=False, plugins=[precision], gradient_clip_val=0.1
    )
    trainer.fit(model, data)
    return outcome(trainer, model, extra=scaler.get_scale())


def test_steps_that_are_skipped_besides(ranks: Ranks) -> None:
    results = ranks(fit_uneven, SkipsToo, "map", [5, 6], {})
    expected = one_process(SkipsToo, [5, 6])
    for result in (*results, expected):
        result.extra = None
    assert_as_single_process(results, expected)


def test_loss_scaling(ranks: Ranks) -> None:
    results = ranks(fit_scaled, [2, 4])
    assert_ranks_agree(results)
    expected = one_process(Uneven, [2, 4], gradient_clip_val=0.1, precision="bf16-mixed")
    assert results[0].global_step == expected.global_step
    for name, value in expected.state.items():  # within what 16 bit leave
        torch.testing.assert_close(results[0].state[name], value, rtol=0, atol=5e-3)


# ---- ends of the range


class Growing(Uneven):
    """Accumulates more and more, so that what the ranks know of each other is not enough."""

    def configure_callbacks(self) -> Any:
        return [GradientAccumulationScheduler({0: 2, 1: 3})]


def test_growing_accumulation(ranks: Ranks) -> None:
    results = ranks(fit_uneven, Growing, "stream", [4, 7], {})
    assert_as_single_process(results, one_process(Growing, [4, 7]))


def fit_without_batches(kind: str, counts: list[int]) -> Any:
    torch.manual_seed(own_rank())
    model = LogsMeans()
    data = loader_of(kind, own_rank(), counts[own_rank()])
    result = run(model, data, data, max_epochs=1)
    return result, model.evaluated


class LogsMeans(Evaluating):
    """Logs in training as well, a mean and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.in_training = MeanAbsoluteError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_epoch=True, batch_size=ROWS)
        self.in_training(loss, torch.zeros(()))
        self.log("error", self.in_training, on_epoch=True)
        return loss


@pytest.mark.parametrize("kind", ["batches", "stream"])
def test_a_rank_without_any_batch(ranks: Ranks, kind: str) -> None:
    results = ranks(fit_without_batches, kind, [0, 3])
    outcomes = [result for result, _ in results]
    assert_ranks_agree(outcomes)
    assert [evaluated for _, evaluated in results] == [0, 3 * ROWS]
    assert outcomes[0].global_step == 3
    first, second = (result.metrics for result in outcomes)
    assert first.keys() >= {"loss_epoch", "error_epoch", "val_loss", "val_error"}
    assert first == pytest.approx({name: second[name] for name in first})


# ---- a run that is resumed in the middle of an epoch


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class StatefulLoader(DataLoader):
    """One that can start in the middle of an epoch."""

    given = skipped = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["given"] % len(self)

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped, self.given = self.skipped, 0, 0
        for batch in super().__iter__():
            self.given += 1
            if self.given > skipped:
                yield batch


def fit_and_resume(path: str, step: int, counts: list[int]) -> Any:
    outcomes = []
    for resume in (False, True):
        torch.manual_seed(own_rank() + 10 * resume)
        inputs = torch.arange(4.0 * counts[own_rank()] * FEATURES).view(-1, FEATURES) / 100
        data = StatefulLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)
        model = Uneven()
        callbacks = [] if resume else [SaveAt(step, f"{path}")]
        trainer = make_trainer(use_distributed_sampler=False, callbacks=callbacks)
        trainer.fit(model, data, ckpt_path=path if resume else None, weights_only=False)
        ours = trainer.fit_loop._combined_loader
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert type(copied) is CombinedLoader
        outcomes.append(outcome(trainer, model, extra=len(model.trained)))
    return outcomes


def test_resumed_in_the_middle_of_an_epoch(ranks: Ranks, tmp_path: Any) -> None:
    results = ranks(fit_and_resume, str(tmp_path / "part.ckpt"), 4, [6, 5])
    assert_ranks_agree([outcome for pair in results for outcome in pair])
    assert [[outcome.extra for outcome in pair] for pair in results] == [[12, 8], [10, 6]]
