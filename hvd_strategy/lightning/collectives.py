"""Lightning's collectives on the engine: reductions by any name, and gathering with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hvd_strategy.errors import MismatchError
from hvd_strategy.session import Session

_ENGINE_OPERATIONS = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "max": "max",
}

# What the engine does not know: all values are gathered, and every rank computes the same.
_LOCAL_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.mul,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def operation_name(reduce_op: Any) -> str:
    """Returns the lower-case name of an operation given in any of the forms Lightning takes.

    Args:
        reduce_op: a name ("mean", "avg", "sum", "min", "max", "product", ...), a member of
            `torch.distributed.ReduceOp`, or None, which stands for the sum.

    Raises:
        ValueError: there is no such operation.
    """
    if reduce_op is None:
        return "sum"
    if isinstance(reduce_op, str):
        name = reduce_op.lower()
        if name in _ENGINE_OPERATIONS or name in _LOCAL_OPERATIONS:
            return name
    elif dist.is_available():
        for name in ("sum", "avg", "min", "max", "product", "band", "bor", "bxor"):
            if reduce_op == getattr(dist.ReduceOp, name.upper()):
                return name
    known = ", ".join(repr(name) for name in (*_ENGINE_OPERATIONS, *_LOCAL_OPERATIONS))
    raise ValueError(
        f"reduce_op={reduce_op!r} is not an operation; it can be {known}, a member of "
        "torch.distributed.ReduceOp, or None for the sum."
    )


def reduce(session: Session, tensor: Tensor, reduce_op: Any = "mean") -> Tensor:
    """Reduces `tensor` over all ranks. Collective.

    Floating-point tensors are changed in place and returned, as Lightning's own strategies do; the
    mean of integers is a new tensor of floats. The result keeps the graph of the rank's own value:
    its gradient is that of the rank's share of the mean, which the averaging of gradients turns
    into the gradient of the mean itself.

    Args:
        session: the ranks.
        tensor: the same shape and dtype on every rank.
        reduce_op: see `operation_name`.
    """
    name = operation_name(reduce_op)
    if name in _ENGINE_OPERATIONS:
        operation = _ENGINE_OPERATIONS[name]
        value = tensor.detach()
        result = session.allreduce(value, operation)
        return tensor if result is value else result
    combine = _LOCAL_OPERATIONS[name]
    parts = gather(session, tensor.detach()).unbind()
    result = parts[0].clone()
    for part in parts[1:]:
        result = combine(result, part)
    with torch.no_grad():
        tensor.copy_(result)
    return tensor


def gather(session: Session, tensor: Tensor) -> Tensor:
    """Returns the tensors of all ranks, stacked: shape `(session.size, *tensor.shape)`. Collective.

    Raises:
        MismatchError: on every rank, when the shapes differ.
    """
    parts = session.allgather(tensor.detach())
    shapes = [tuple(part.shape) for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise MismatchError(
            f"all_gather was called with tensors of different shapes, by rank: {shapes}. Pad them "
            "to one shape first, or gather them with `hvd_strategy.current_session().allgather`, "
            "which returns a list."
        )
    return torch.stack(parts)


def gather_with_gradients(session: Session, tensor: Tensor) -> Tensor:
    """Does the same, differentiably.

    Backward is collective as well: the gradient of a rank's tensor is the sum over the ranks of
    their gradients of it.
    """
    result: Tensor = _Gather.apply(tensor, session)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, session: Session) -> Tensor:
        ctx.session = session
        return gather(session, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A copy: the gradient may be shared with other branches of the graph.
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.session.allreduce(gradient, "sum")
        return gradient[ctx.session.rank], None


__all__ = ["gather", "gather_with_gradients", "operation_name", "reduce"]
