"""The part of the strategy in which all ranks do something together: collectives, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from typing_extensions import override

from hvd_strategy._private_api import lightning_wrapping_checkpoint_io
from hvd_strategy.checkpoint import read_on_rank_zero, write_on_rank_zero
from hvd_strategy.errors import HvdError
from hvd_strategy.lightning import collectives
from hvd_strategy.lightning.checkpoint import checkpoint_io_class
from hvd_strategy.lightning.class_tree import ClassTree
from hvd_strategy.session import Session

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class CollectiveStrategy(_Base):
    """Lightning's collectives, and its saving and loading, over the ranks of a session."""

    _tree: ClassTree
    _session: Session | None = None
    # From an exception to the end of the run. What callbacks do meanwhile, such as saving a last
    # checkpoint, they do without the other ranks.
    _failed = False
    # The path of the last checkpoint of a plugin that may write it later, and why it could not.
    _written_late: Any = None
    _write_failure: BaseException | None = None

    # ---- collectives

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks; the mean of integers is a float.

        Args:
            tensor: the rank's value; anything else than a tensor is returned as it is.
            group: a group of torch.distributed; all ranks when not given.
            reduce_op: "mean" (or "avg"), "sum", "min", "max", "product", a member of
                `torch.distributed.ReduceOp`, or None for the sum.
        """
        if self._session is None or not isinstance(tensor, Tensor):
            return tensor
        if _is_part(group):
            if collectives.operation_name(reduce_op) in ("mean", "avg") and not (
                tensor.is_floating_point() or tensor.is_complex()
            ):
                tensor = tensor.to(torch.get_default_dtype())
            return super().reduce(tensor, group, reduce_op)
        return collectives.reduce(self._session, tensor, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, stacked along a new first dimension.

        Args:
            tensor: the same shape and dtype on every rank.
            group: a group of torch.distributed; all ranks when not given.
            sync_grads: whether gradients flow back to the ranks that gave the tensors.
        """
        if self._session is None:
            return tensor
        if _is_part(group):
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            return collectives.gather_with_gradients(self._session, tensor)
        return collectives.gather(self._session, tensor)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object that rank `src` has; it must pickle."""
        if self._session is None or self._failed:
            return obj
        return self._session.broadcast_object(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until all ranks are here."""
        if self._session is not None and not self._failed:
            self._session.barrier()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether the decision is true on all ranks, or on any."""
        if self._session is None or self._failed:
            return decision
        value = torch.tensor([int(decision)], dtype=torch.int32)
        return bool(self._session.allreduce(value, "min" if all else "max").item())

    # ---- checkpoints

    @property
    @override
    def checkpoint_io(self) -> Any:
        """What writes and reads checkpoints: the user's, or one that replaces files atomically."""
        ours = checkpoint_io_class(self._tree.name)
        if self._checkpoint_io is None:
            self._checkpoint_io = ours()
        elif isinstance(self._checkpoint_io, lightning_wrapping_checkpoint_io(self._tree.name)):
            self._checkpoint_io.checkpoint_io = ours()  # kept if it wraps none yet
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        self._checkpoint_io = plugin

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes the checkpoint on rank 0. Collective, as all of Lightning's callers expect.

        Raises:
            HvdError: rank 0 could not write; on every rank.
        """
        self._broadcast_buffers()
        self._is_in("the saving of a checkpoint")
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        if self._session is None or self._failed:
            write()
            return
        # Others may write later than they return, and fail then.
        if not isinstance(self.checkpoint_io, checkpoint_io_class(self._tree.name)):
            self._written_late = filepath
        self._write(filepath, write)
        self._is_in("what follows the saving of a checkpoint")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Returns the checkpoint, which rank 0 reads and the others need not have. Collective.

        Raises:
            HvdError: it cannot be read, or the ranks name different ones; on every rank.
        """
        options = {} if weights_only is None else {"weights_only": weights_only}
        read = partial(super().load_checkpoint, checkpoint_path, **options)
        if self._session is None:
            return read()
        return read_on_rank_zero(self._session, checkpoint_path, read)

    def _finish_saving(self) -> None:
        """Waits for what a plugin is still writing; an error of that is one on every rank."""
        path, self._written_late = self._written_late, None
        if path is not None and self._session is not None and not self._failed:
            self._write(path, self.checkpoint_io.teardown)

    def _write(self, path: Any, write: Callable[[], None]) -> None:
        assert self._session is not None
        try:
            write_on_rank_zero(self._session, path, write)
        except HvdError as error:
            self._write_failure = error.__cause__
            raise

    def _broadcast_buffers(self) -> None:
        """Makes the buffers of the model equal, where they may differ. Collective."""

    def _is_in(self, activity: str) -> None:
        """Lets the other ranks' stall reports say where this rank is."""
        if self._session is not None:
            self._session.set_activity(activity)


def _is_part(group: Any) -> bool:
    """Whether a group of torch.distributed is given that is not all ranks."""
    return group is not None and group is not dist.group.WORLD


__all__ = ["CollectiveStrategy"]
