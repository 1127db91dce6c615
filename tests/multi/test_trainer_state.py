"""Parameters and buffers: rank 0's at the start, and equal whenever anybody can look."""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hvd_strategy import MismatchError, RankFailedError
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import (
    FEATURES,
    Regression,
    assert_as_single_process,
    fit,
    loader,
    make_trainer,
    own_rank,
    reference,
    rows,
)


def bits(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


class EveryKind(Regression):
    """State of every kind that a module can have; numbers whose bits `==` does not compare."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        rank = own_rank()
        self.sixteen = nn.Parameter(torch.randn(3).half())
        self.brain = nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.large = nn.Parameter(torch.randn(600, 500))
        self.large_transposed = nn.Parameter(torch.randn(700, 500).t())
        signed = torch.tensor([-0.0, float("nan"), float("inf")])
        buffers = {
            "bits": signed if rank == 0 else -signed,
            "flags": torch.rand(5) > 0.5,
            "numbers": torch.randint(-(2**62), 2**62, (2, 3)),
            "bytes": torch.randint(0, 255, (7,), dtype=torch.uint8),
            "small": torch.randint(-9, 9, (3,), dtype=torch.int16),
            "spectrum": torch.randn(3, dtype=torch.complex128),
            "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
            "empty": torch.empty(0),
            "expanded": torch.randn(1, 3).expand(4, 3),
            "every_other": torch.randn(8)[::2],
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "sparse": torch.randn(4, 4).relu().to_sparse(),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "every_other")

    def tensors(self) -> dict[str, Tensor]:
        return dict([*self.named_parameters(), *self.named_buffers()])


def start() -> list[dict[str, bytes]]:
    torch.manual_seed(own_rank())
    model = EveryKind()
    before = {name: bits(tensor) for name, tensor in model.tensors().items()}
    strides = {name: t.stride() for name, t in model.tensors().items() if name != "sparse"}
    identities = {name: id(tensor) for name, tensor in model.tensors().items()}
    make_trainer(limit_train_batches=0).fit(model, loader(8))
    assert {name: id(tensor) for name, tensor in model.tensors().items()} == identities
    for name, stride in strides.items():
        assert model.tensors()[name].stride() == stride, name
    return [before, {name: bits(tensor) for name, tensor in model.tensors().items()}]


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_training_starts_from_the_bits_of_rank_zero(ranks: Ranks) -> None:
    results = ranks(start)
    own = results[0][0]
    differed = [name for name, value in results[1][0].items() if value != own[name]]
    assert {"sixteen", "bits", "flags", "numbers", "phase", "spectrum", "sparse"} <= set(differed)
    for before, started in results:
        assert before.keys() == started.keys()
        for name, value in own.items():
            assert started[name] == value, name


class Normalized(Regression):
    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body.insert(1, nn.BatchNorm1d(8))
        self.register_buffer("copied", torch.zeros(8))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Copies, as modules do that merge or quantise their weights."""
        state = super().state_dict(*args, **kwargs)
        return {name: tensor.clone() for name, tensor in state.items()}


class Looks(Callback):
    """Keeps the running mean that is seen in every hook that ranks share outside of batches."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes]] = []

    def look(self, hook: str, module: LightningModule) -> None:
        assert isinstance(module, Normalized)
        self.seen.append((hook, bits(module.body[1].running_mean)))


def looking(name: str) -> Any:
    def hook(self: Looks, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.look(name, module)

    return hook


_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_save_checkpoint",
)
for _name in _HOOKS:
    setattr(Looks, _name, looking(_name))


def look(directory: str) -> list[tuple[str, bytes]]:
    torch.manual_seed(own_rank())
    looks = Looks()
    saving = ModelCheckpoint(
        directory, every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = make_trainer(
        callbacks=[looks, saving], enable_checkpointing=True, val_check_interval=2, max_epochs=2
    )
    trainer.fit(Normalized(), loader(48), loader(8))
    return looks.seen


def test_callbacks_see_equal_statistics_in_every_hook(ranks: Ranks, tmp_path: Any) -> None:
    first, second = ranks(look, str(tmp_path))
    hooks = [hook for hook, _ in first]
    assert hooks == [hook for hook, _ in second]
    assert set(hooks) == set(_HOOKS)
    for (hook, ours), (_, theirs) in zip(first, second, strict=True):
        assert ours == theirs, hook
    assert len({value for _, value in first}) > 4  # they do change
    # Also what a checkpoint holds is of one moment: the state_dict above copies.
    for path in tmp_path.iterdir():
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert bits(saved["body.1.running_mean"]) in {value for _, value in first}


class TwoForwards(Normalized):
    """The statistics change twice before the graph of both is differentiated."""

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        first = self.head(self.body(inputs))
        second = self.head(self.body(inputs + 1))
        return nn.functional.mse_loss(first, targets) + first.mean() * second.mean()


def without_statistics(outcome: Any) -> Any:
    for name in list(outcome.state):
        if "running" in name:
            del outcome.state[name]
    outcome.metrics = {}
    return outcome


def fit_two_forwards() -> Any:
    return fit(TwoForwards)


def test_two_forwards_before_one_backward(ranks: Ranks) -> None:
    results = ranks(fit_two_forwards)
    for name in ("body.1.running_mean", "body.1.running_var"):
        assert bits(results[0].state[name]) == bits(results[1].state[name])
    expected = reference(TwoForwards, ranks.size)
    # One process sees all batches in its statistics; these are no part of the gradients.
    expected.state["body.1.num_batches_tracked"] //= ranks.size
    assert_as_single_process(
        [without_statistics(result) for result in results], without_statistics(expected)
    )


class Growing(Regression):
    """A buffer that is replaced by one of another shape, and one that is dropped."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike
        self.register_buffer("queue", torch.zeros(1))
        self.register_buffer("temporary", torch.zeros(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        more = 1 if self.alike else 1 + self.global_rank
        self.queue = torch.cat([self.queue, torch.full((more,), float(self.global_rank + 1))])
        self.temporary = None
        return super().training_step(batch, batch_idx)


def grow(alike: bool) -> Any:
    model = Growing(alike)
    try:
        make_trainer(max_epochs=1).fit(model, loader(24))
    except (MismatchError, RankFailedError) as error:
        return str(error)
    return model.queue.tolist()


def test_buffers_that_grow(ranks: Ranks) -> None:
    assert ranks(grow, True) == [[0.0, 1.0, 1.0, 1.0]] * 2
    for text in ranks(grow, False):
        assert "rank 0 has 'queue': (2,) float32 where rank 1 has 'queue': (3,) float32" in text


def resources() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as pages:
        resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:" in line for line in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared": shared,
        "threads": len(os.listdir("/proc/self/task")),
        "resident": resident,
    }


class Heavy(Regression):
    """Half a megabyte of parameters, so that a leaked run shows."""

    def __init__(self, ranks: int = 0) -> None:
        super().__init__(ranks)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.BatchNorm1d(8))
        self.wide = nn.Linear(8, 16_000)

    def rank_loss(self, inputs: Tensor, targets: Tensor, rank: int, batch_idx: int) -> Tensor:
        return self.wide(self.body(inputs)).square().mean()


def replaced(trainer: Trainer) -> list[str]:
    """Functions that were put on objects of the Trainer, which have them from their class."""
    epoch = trainer.fit_loop.epoch_loop
    owners = (
        trainer.fit_loop,
        epoch,
        epoch.val_loop,
        epoch.automatic_optimization,
        epoch.manual_optimization,
        epoch._results,
        epoch.val_loop._results,
        trainer.validate_loop,
        trainer.validate_loop._results,
        trainer._checkpoint_connector,
        trainer._data_connector,
    )
    return [name for owner in owners for name in vars(owner) if hasattr(type(owner), name)]


def fit_again_and_again() -> tuple[dict[str, int], dict[str, int], int]:
    torch.manual_seed(own_rank())
    model = Heavy()
    trainer = make_trainer(max_epochs=0)
    before: dict[str, int] = {}
    for number in range(14):
        if number == 4:
            before = resources()
        trainer.fit_loop.max_epochs += 1
        trainer.fit(model, loader(16), loader(16))
        trainer.validate(model, loader(16), verbose=False)
        assert not replaced(trainer)
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return before, resources(), hooks


def test_repeated_fits_leave_nothing_behind(ranks: Ranks) -> None:
    for before, after, hooks in ranks(fit_again_and_again):
        assert hooks == 0
        for name in ("descriptors", "shared", "threads"):
            assert after[name] <= before[name], name
        # Ten runs with 0.5 MB of parameters and a ring of 1.5 MB each would show.
        assert after["resident"] - before["resident"] < 5 << 20


def separate_trainers() -> list[Any]:
    """A Trainer per epoch, as hand-written loops around it have."""
    torch.manual_seed(own_rank())
    model = Regression()
    for _ in range(3):
        make_trainer(max_epochs=1).fit(model, loader(16))
    # A plain step afterwards is this rank's alone.
    model.zero_grad()
    (model.head.weight.sum() * own_rank()).backward()
    return [{k: v.clone() for k, v in model.state_dict().items()}, model.head.weight.grad]


def test_old_hooks_are_inert(ranks: Ranks) -> None:
    (first, zero), (second, one) = ranks(separate_trainers)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert zero.eq(0).all()
    assert one.eq(1).all()


class Draws(Regression):
    """What is drawn in each process that a seeded run has."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.drawn.append(
            (random.random(), numpy.random.rand(), torch.rand(()).item(), batch[2].tolist())
        )
        return super().training_step(batch[:2], batch_idx)


class WithNoise(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return (*rows(16)[index], random.random() + numpy.random.rand() + torch.rand(()).item())


def seeded_run() -> list[Any]:
    seed_everything(11, workers=True, verbose=False)
    model = Draws()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, DataLoader(WithNoise(), 4, num_workers=1))
    return model.drawn


def test_seed_everything(ranks: Ranks) -> None:
    """All ranks draw alike in the main process, differently in workers, and the same each time."""
    first, again = ranks(seeded_run), ranks(seeded_run)
    assert first == again
    assert [step[:3] for step in first[0]] == [step[:3] for step in first[1]]
    noise = [value for rank in first for step in rank for value in step[3]]
    assert len(set(noise)) == len(noise)


def random_state() -> list[bool]:
    """A fit without anything random in it; what it leaves of the random state."""
    model = Regression()
    trainer = make_trainer(max_epochs=1)
    data = loader(16)
    random.seed(1)
    numpy.random.seed(1)
    before = (random.getstate(), numpy.random.get_state()[1].tolist())
    trainer.fit(model, data)
    return [random.getstate() == before[0], numpy.random.get_state()[1].tolist() == before[1]]


def test_random_state_stays(ranks: Ranks) -> None:
    assert ranks(random_state) == [[True, True]] * 2
