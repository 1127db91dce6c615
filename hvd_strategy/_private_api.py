"""Every private name of other packages that we touch, each with its reason and the versions tested.

Nothing else in this package may use a name with a leading underscore of torch, Lightning or
Accelerate: when a new release moves one, this file is where it breaks and where it is mended.
Imports happen inside the functions, so that importing this module imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def torch_default_store() -> Store:
    """The store behind torch.distributed's default group.

    There is no public way to it. The group is required to exist.

    torch.distributed.distributed_c10d._get_default_store; tested with torch 2.13.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Has `callback` called at the end of the running backward, on the thread that runs it.

    The callback is destroyed uncalled when the backward ends in an exception.

    torch.autograd.Variable._execution_engine; tested with torch 2.13.
    """
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def current_autograd_node() -> Any:
    """The node of the graph that is being executed, None outside of any.

    In a callback of `queue_end_of_backward` it is None only when no other backward surrounds the
    one that ended.

    torch._C._current_autograd_node; tested with torch 2.13.
    """
    import torch

    return torch._C._current_autograd_node()
