"""Each rank's share of the data, where Lightning's samplers do not give it.

Lightning injects a `DistributedSampler` for data with an index. With a sampler of the user's it
lets each rank draw by itself, so that the shares of a random sampler overlap and leave data out,
and it shuffles the order of a sampler that has one. A batch sampler of the user's it can fill with
a sampler only if that is made in a certain way, and forgets the sampler which is in there. Here
all ranks draw alike: the random numbers start from the seed and the epoch, as `DistributedSampler`
does it, and each rank takes its part. What they drew is compared once per epoch.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hvd_strategy._private_api import (
    drawn_by_wrapper,
    lightning_train_loaders,
    replace_lightning_loader_preparation,
    requires_distributed_sampler,
    wraps_a_sampler,
)
from hvd_strategy.errors import MismatchError
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.session import Session

_COMPARED_ELEMENTS = 1 << 14  # of each tensor in a batch


class DataShards:
    """The data of one rank during one run of a Trainer.

    Args:
        trainer: the Trainer, set up.
        session: the ranks, more than one.
        tree: the Lightning package of the Trainer.
        exact_evaluation: whether samples are not repeated where they do not go round, in validation
            and test.

    Attributes:
        seed: what samplers of all ranks start from.
    """

    def __init__(
        self, trainer: Any, session: Session, tree: ClassTree, exact_evaluation: bool
    ) -> None:
        self._trainer = trainer
        self._exact_evaluation = exact_evaluation
        self._session = session
        self._tree = tree
        # Rank 0's: ranks may have seeded themselves differently. As of Lightning's samplers.
        own_seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.seed = session.broadcast_object(own_seed)
        self._drawn: list[str] = []  # digests of what was drawn and not compared yet
        self._saw_a_batch = False
        self._replacements = Replacements()
        replace_lightning_loader_preparation(self._replacements, trainer, self._prepare)

    def detach(self) -> None:
        """Gives the Trainer its own functions back. Idempotent."""
        self._replacements.detach()

    def on_train_batch_start(self, batch: Any) -> None:
        """Compares the first batches of a fit, and what samplers drew. Collective."""
        if self._saw_a_batch:
            self.compare_draws()
            return
        self._saw_a_batch = True
        loaders = lightning_train_loaders(self._trainer)
        # Whatever is no DataLoader is not split by Lightning, either.
        iterable = any(
            not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
            for loader in loaders
        )
        digest = _digest_of_batch(batch) if iterable else None
        told = self._session.exchange("first batch", [digest, self._drawn])
        self._raise_unless_equal([drawn for _, drawn in told])
        seen = [other for other, _ in told]
        alike = max(
            ([rank for rank, other in enumerate(seen) if other and other == one] for one in seen),
            key=len,
        )
        if len(alike) > 1:
            ranks = ", ".join(map(str, alike))
            self._tree.pytorch_name("utilities.rank_zero", "rank_zero_warn")(
                f"The first training batch is the same on ranks {ranks}: each of them seems to "
                "read all of the data. Split an iterable dataset between the ranks, with "
                "hvd_strategy.data.shard(dataset) for instance."
            )

    def compare_draws(self) -> None:
        """Compares what samplers drew since the last time, if they did. Collective then."""
        if self._drawn:
            self._raise_unless_equal(self._session.exchange("draws of samplers", self._drawn))

    def _raise_unless_equal(self, drawn: list[list[str]]) -> None:
        self._drawn = []
        for rank, other in enumerate(drawn):
            if other != drawn[0]:
                raise MismatchError(
                    f"A sampler or batch sampler draws other samples on rank {rank} than on rank "
                    "0, so the ranks' shares of the data would overlap. Let it take its random "
                    "numbers from the global generators, which are seeded alike here, or from one "
                    "that has the same seed on all ranks. If it gives each rank its own share "
                    "already, use Trainer(use_distributed_sampler=False)."
                )

    # ---- what Lightning calls

    def _prepare(
        self, original: Callable[..., Any], loader: Any, shuffle: bool, mode: Any
    ) -> object:
        stages = self._tree.pytorch_name("trainer.states", "RunningStage")
        exact = self._exact_evaluation and mode in (
            stages.VALIDATING,
            stages.TESTING,
            stages.SANITY_CHECKING,
        )
        prepared = self._split(original, loader, shuffle, mode, exact)
        return _without_repetition(prepared, prepared is loader) if exact else prepared

    def _split(
        self, original: Callable[..., Any], loader: Any, shuffle: bool, mode: Any, exact: bool
    ) -> object:
        predicting = self._tree.pytorch_name("trainer.states", "RunningStage").PREDICTING
        given = _batch_sampler_given_to(loader)
        if (
            given is None
            or mode == predicting
            or not requires_distributed_sampler(self._trainer, loader)
        ):
            prepared = original(loader, shuffle=shuffle, mode=mode)
        elif isinstance(getattr(given, "sampler", None), DistributedSampler):
            return loader  # split by the user
        elif _is_lost_on_lightning(given):
            return self._split_batches(loader, exact)
        else:
            try:
                prepared = original(loader, shuffle=shuffle, mode=mode)
            except TypeError:
                # It cannot be made anew with another sampler.
                return self._split_batches(loader, exact)
        for owner in (getattr(prepared, "batch_sampler", None), prepared):
            sampler = getattr(owner, "sampler", None)
            if isinstance(sampler, DistributedSampler) and wraps_a_sampler(
                self._tree.fabric, sampler
            ):
                self._draw_alike(sampler)
                break
        return prepared

    def _draw_alike(self, wrapper: Any) -> None:
        wrapper.shuffle = False  # the order is the user's sampler's
        listed = wrapper.dataset

        def reset() -> None:
            with seeded(wrapper.seed + wrapper.epoch):
                type(listed).reset(listed)
            self._note(drawn_by_wrapper(listed))

        listed.reset = reset

    def _split_batches(self, loader: Any, exact: bool) -> Any:
        split = copy.copy(loader)
        share = (self._session.rank, self._session.size)
        batches = SplitBatches(loader.batch_sampler, *share, self.seed, self._note, not exact)
        # A DataLoader refuses that another one is set; this copy is not in use yet.
        vars(split)["batch_sampler"] = batches
        return split

    def _note(self, drawn: Any) -> None:
        self._drawn.append(hashlib.sha256(repr(drawn).encode()).hexdigest()[:16])


class SplitBatches:
    """The batches of a batch sampler that are one rank's: every `size`-th of all.

    With `repeats` all ranks get equally many: where they do not go round, the first ones are
    repeated, as `DistributedSampler` repeats samples.

    Args:
        batches: the user's batch sampler; it needs a length.
        rank: this rank.
        size: number of ranks.
        seed: what all random numbers start from, together with the epoch.
        note: is told what was drawn for all ranks.
        repeats: whether all ranks are to get equally many.
    """

    def __init__(
        self,
        batches: Any,
        rank: int,
        size: int,
        seed: int,
        note: Callable[[Any], None],
        repeats: bool = True,
    ) -> None:
        try:
            len(batches)
        except TypeError:
            raise TypeError(
                f"The batch sampler {type(batches).__name__} has no length, so its batches cannot "
                "be split between the ranks. Give it a __len__, or use "
                "Trainer(use_distributed_sampler=False) if it gives each rank its own share."
            ) from None
        self.batches = batches
        self._rank = rank
        self._size = size
        self._seed = seed
        self._epoch = 0
        self._note = note
        self._repeats = repeats

    @property
    def sampler(self) -> SplitBatches:
        """Itself: there Lightning looks for a `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Draws others than in the last epoch."""
        self._epoch = epoch
        for sampler in (self.batches, getattr(self.batches, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)

    def __len__(self) -> int:
        left_out = 0 if self._repeats else self._rank
        return math.ceil((len(self.batches) - left_out) / self._size)

    def __iter__(self) -> Iterator[Any]:
        with seeded(self._seed + self._epoch):
            drawn = [list(batch) for batch in self.batches]
        self._note(drawn)
        for place in range(self._rank, len(drawn) + self._rank, self._size):
            if place < len(drawn) or self._repeats:
                yield drawn[place % len(drawn)]


@contextmanager
def seeded(seed: int) -> Generator[None, None, None]:
    """Random numbers of Python, NumPy and torch start from `seed` in the block, and go on after."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = torch.get_rng_state()
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _without_repetition(loader: Any, is_the_users: bool) -> Any:
    """Has a DistributedSampler in the loader give each sample to one rank only.

    Args:
        loader: a loader of any kind.
        is_the_users: whether it has to be left as it is, and a copy to be changed.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler):
        return loader
    if is_the_users:
        loader, batches, sampler = copy.copy(loader), copy.copy(batches), copy.copy(sampler)
        # A DataLoader refuses that another one is set; this copy is not in use yet.
        vars(loader)["sampler"] = sampler
        if batches is not None:
            batches.sampler = sampler
            vars(loader)["batch_sampler"] = batches
    # It repeats, or leaves out, what is between the length and this number.
    sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
    return loader


def _batch_sampler_given_to(loader: Any) -> Any:
    """The batch sampler that a DataLoader was made with, None where it made its own or has none."""
    is_given = isinstance(loader, DataLoader) and loader.batch_size is None
    return loader.batch_sampler if is_given else None


def _is_lost_on_lightning(batches: Any) -> bool:
    """Whether Lightning would drop the batch sampler, or the sampler in it, without a word."""
    sampler = getattr(batches, "sampler", None)
    known = sampler is None or isinstance(sampler, (RandomSampler, SequentialSampler))
    return type(batches) is BatchSampler or not known


def _digest_of_batch(batch: Any) -> str | None:
    """Of what is in a batch; None where nothing can be compared."""
    digest = hashlib.sha256()
    if not _add(digest, batch):
        return None
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or not value.numel():
            return False
        data = value.detach().reshape(-1)[:_COMPARED_ELEMENTS].resolve_conj().resolve_neg()
        digest.update(data.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return True
    if isinstance(value, (str, bytes, int, float)):
        digest.update(repr(value).encode())
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(_add(digest, element) for element in value) > 0
    return False


__all__ = ["DataShards", "SplitBatches", "seeded"]
