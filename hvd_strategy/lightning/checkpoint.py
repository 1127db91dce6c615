"""Checkpoints of the Trainer: how files are written, and what the ranks have to agree about.

Lightning lets every rank find and read the checkpoint, and decide for itself whether to save one.
`same_checkpoints` makes both rank 0's decision: other ranks may lack the file, see another folder,
or have computed another value of what `ModelCheckpoint` monitors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from hvd_strategy._private_api import (
    lightning_chosen_checkpoint,
    replace_lightning_checkpoint_choice,
    replace_lightning_monitor_candidates,
)
from hvd_strategy.checkpoint import is_local, write_atomically
from hvd_strategy.errors import HvdError, MismatchError
from hvd_strategy.lightning.class_tree import class_tree
from hvd_strategy.lightning.replacements import Replacements
from hvd_strategy.object_stream import text_of

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO as _Base
else:
    _Base = object


class AtomicCheckpointIO(_Base):
    """What writes and reads files where the user has given no CheckpointIO.

    Lightning's own builds the whole file in memory, writes it to the folder for temporary files and
    moves it, which is no single step between two file systems, and leaves it in the system's cache.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is None and is_local(path):
            write_atomically(checkpoint, path)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)


@cache
def checkpoint_io_class(tree_name: str) -> Any:
    """Returns `AtomicCheckpointIO` as a class of the tree; pickle finds it where it says."""
    tree = class_tree(tree_name)
    base = tree.fabric_name("plugins", "TorchCheckpointIO")
    attributes = {"__module__": tree.public_module}
    return type("AtomicCheckpointIO", (AtomicCheckpointIO, base), attributes)


@contextmanager
def same_checkpoints(trainer: Any) -> Iterator[None]:
    """Lets all ranks load the checkpoint that rank 0 chooses, and save when rank 0 does.

    Around one call of `fit`, `validate`, `test` or `predict`, in the process of a rank, before the
    path is looked for. Replaces functions on the instances, until the end.

    Args:
        trainer: The Trainer that is about to run.
    """
    choice = _Choice(trainer)
    replacements = Replacements()
    replace_lightning_checkpoint_choice(replacements, trainer, choice.select, choice.resume)
    try:
        yield
    finally:
        replacements.detach()
        choice.detach_callbacks()


class _Choice:
    """The checkpoint of one run."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._request: str | None = None
        self._failure: Exception | None = None
        self._callbacks = Replacements()

    def select(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of Lightning's search, which happens before there is a session.

        What goes wrong with it counts once the ranks can tell each other: `"hpc"`, for example, may
        stand for a file that only rank 0 sees.
        """
        request = lightning_chosen_checkpoint(self._trainer, *args, **kwargs)
        self._request = None if request is None else str(request)
        try:
            return original(*args, **kwargs)
        except Exception as error:
            # The best checkpoint, also the default of `test`, is known without looking for files.
            if self._trainer.world_size == 1 or self._request in (None, "best"):
                raise
            self._failure = error
            return None

    def resume(self, original: Callable[..., Any], path: Any = None, **kwargs: Any) -> None:
        """In place of the start of loading, which Lightning calls with or without a path."""
        request, failure = self._request, self._failure
        self._request = self._failure = None
        session = self._trainer.strategy.session
        if session is not None and session.size > 1:
            self._monitor_alike()
            own = None if path is None else str(path)
            told = session.allgather_object((request, own, text_of(failure)))
            asked = [request for request, _, _ in told]
            for rank, other in enumerate(asked):
                # None comes from a rank without the file that looked whether there is one.
                if other not in (asked[0], None):
                    raise MismatchError(
                        f"The ranks were given different checkpoints to load: ckpt_path is "
                        f"{asked[0]!r} on rank 0 and {other!r} on rank {rank}. Give all of them "
                        "the same; only rank 0 needs the file."
                    )
            _, first, problem = told[0]
            if problem is not None:
                raise failure or HvdError(
                    f"Rank 0, which reads for all ranks, found no checkpoint for "
                    f"ckpt_path={asked[0]!r}: {problem}"
                )
            if session.rank != 0:
                path = first
        original(path, **kwargs)

    def _monitor_alike(self) -> None:
        self.detach_callbacks()
        broadcast = self._trainer.strategy.broadcast
        for callback in self._trainer.checkpoint_callbacks:
            replace_lightning_monitor_candidates(self._callbacks, callback, broadcast)

    def detach_callbacks(self) -> None:
        """Lets the callbacks decide by themselves again."""
        self._callbacks.detach()


__all__ = ["AtomicCheckpointIO", "checkpoint_io_class", "same_checkpoints"]
