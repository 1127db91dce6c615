"""Batch normalization over the batches of all ranks, on the CPU and on any other device.

    model = SyncBatchNorm.convert_sync_batchnorm(model)      # Trainer(sync_batchnorm=True) does it

`torch.nn.SyncBatchNorm` needs a GPU. This layer computes its statistics where the input is, and
sends them, a few numbers per channel, through the session. What comes out is what one process
computes that has the batches of all ranks, uneven and empty ones included: the output, the running
statistics, the gradient of the input, and, once the ranks' gradients have been averaged, those of
weight and bias.

Training mode only is collective, once in forward and, where the input needs a gradient, once in
backward. In evaluation mode ranks compute by themselves, with the running statistics; without such
(`track_running_stats=False`) with those of their own batch, as torch's layer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from hvd_strategy import _core
from hvd_strategy._private_api import batch_normalization
from hvd_strategy.errors import MismatchError
from hvd_strategy.log import FOR_ALL_RANKS, get_logger
from hvd_strategy.session import Session, current_session, open_session

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as _Base
else:
    _Base = batch_normalization()

__all__ = ["SyncBatchNorm", "revert_sync_batchnorm"]

M = TypeVar("M", bound=nn.Module)

_log = get_logger(__name__)

# In stall reports and errors.
_FORWARD = "forward of SyncBatchNorm"
_BACKWARD = "backward of SyncBatchNorm"

# A rank's part in the gradients of one forward.
_NO_GRAPH, _PARAMETERS_ONLY, _INPUT_TOO = range(3)


class SyncBatchNorm(_Base):
    """BatchNorm of 1, 2 or 3 dimensions whose batch is that of all ranks.

    Parameters, buffers and their names are those of `torch.nn.BatchNorm1d` and its kin, and so are
    the arguments. In a world of one rank it computes exactly what they do.

    All ranks have to call the layer equally often, in the same order, and to run backward where one
    does, because statistics and their gradients are exchanged there; whoever stays away is named in
    the stall report. A rank without data takes part with an empty batch, shape (0, C, ...), and
    includes the output in its loss. A rank in evaluation mode does not exchange anything: either
    all ranks train or none.

    Args:
        num_features: Number C of channels.
        eps: Added to the variance, for numerical stability.
        momentum: Share of the new batch in the running statistics; None for their plain mean.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers. Statistics of fp16, bf16 and fp32 input are computed
            in fp32, those of fp64 input in fp64, and combined over the ranks in fp64.

    Shape:
        Input and output (N, C, ...); N may differ from rank to rank and be 0.

    Raises:
        ValueError: On every rank, when all of them together have a single value per channel.
        MismatchError: On every rank, when only some of them record a graph for the gradient of
            their input.
        HvdError: The session is at its end; see there.
    """

    _converted_from: type[nn.Module]  # class of a layer that `convert_sync_batchnorm` changed

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm takes input of shape (N, C, ...), not {tuple(input.shape)}."
            )
        if input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) takes input with {self.num_features} "
                f"channels, not {tuple(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Normalizes; collective in training mode.

        Args:
            input: This rank's batch, (N, C, ...).
        """
        session = None
        if self.training:
            session = current_session() or open_session()
        # A rank that has run out of batches computes nothing; the others do as if it was not there.
        alone = session is None or len(session.active_ranks or range(session.size)) == 1
        if session is None or alone:
            output: Tensor = super().forward(input)
        else:
            output = self._normalized(input, session)
        return output

    # Not for torch.compile: what is around it is compiled, the exchange is not.
    @torch.compiler.disable
    def _normalized(self, inputs: Tensor, session: Session) -> Tensor:
        self._check_input_dim(inputs)
        running_mean = running_var = None
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats:
            running_mean, running_var = self.running_mean, self.running_var
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    momentum = 1.0 / float(self.num_batches_tracked)
        channel = _channel(session)
        result: Tensor = _Normalize.apply(
            inputs, self.weight, self.bias, running_mean, running_var, momentum, self.eps,
            channel, _part_in_gradients(inputs, self.weight, self.bias),
        )  # fmt: skip
        return result

    @classmethod
    def convert_sync_batchnorm(cls, module: M) -> M:
        """Makes every BatchNorm layer in the module a SyncBatchNorm, and returns the module.

        The layers stay the same objects, with their parameters, buffers and hooks; whatever refers
        to them goes on doing so. `revert_sync_batchnorm` takes it back. A layer whose class has a
        forward of its own is left as it is, with a warning.

        Args:
            module: A module, which may itself be such a layer.

        Raises:
            ValueError: A lazy layer does not know its number of channels yet, or a
                `torch.nn.SyncBatchNorm` has a process group of its own.
        """
        for name, layer in module.named_modules():
            if not isinstance(layer, _Base) or isinstance(layer, SyncBatchNorm):
                continue
            original = type(layer)
            if original.forward not in (_Base.forward, nn.SyncBatchNorm.forward) or (
                parametrize.is_parametrized(layer)
            ):
                _log.warning(
                    "%s (%s) is not synchronised over the ranks: it does more than BatchNorm.",
                    name or "the module",
                    original.__name__,
                    extra=FOR_ALL_RANKS,
                )
                continue
            if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
                raise ValueError(
                    f"{name or original.__name__} is lazy and does not know its number of channels "
                    "yet: run a forward with a sample batch first, then convert."
                )
            if getattr(layer, "process_group", None) is not None:
                raise ValueError(
                    f"{name or original.__name__} has a process group of its own, which is not "
                    "supported: statistics are those of all ranks. Create it without one."
                )
            vars(layer)["_converted_from"] = original
            layer.__class__ = cls
        return module


def revert_sync_batchnorm(module: M) -> M:
    """Gives the layers that `convert_sync_batchnorm` converted their own class back.

    Layers that were created as SyncBatchNorm stay so. Returns the module.
    """
    for layer in module.modules():
        original = vars(layer).pop("_converted_from", None)
        if original is not None:
            layer.__class__ = original
    return module


# ---- statistics and gradients --------------------------------------------------------------------


class _Statistics(NamedTuple):
    """Of the batches of all ranks: number of values per channel, mean, and sum of squares."""

    total: float
    mean: Tensor  # fp64, on the CPU
    squares: Tensor  # sum of squared distances from the mean; fp64, on the CPU


class _Normalize(torch.autograd.Function):
    """Normalizes a rank's batch by the statistics of all batches.

    Both directions are collective, on one communicator that nothing else uses, so their order has
    to be the same on all ranks. In forward it is the order of the calls. In backward autograd
    takes, of the nodes that are ready, the one created last. A node's gradient comes from nodes
    that were created after it, so when those are done the node itself is ready: the nodes of one
    thread run in the reverse order of their creation, all of them, whatever branches the graph has.
    That holds on each rank for these nodes, although the rest of the ranks' graphs may differ. A
    checkpoint that computes forward again does so at the turn of its own nodes, which is the same
    on all ranks too. The gradients that are reduced meanwhile have a communicator and a thread of
    their own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        channel: _Channel,
        part: int,
    ) -> Tensor:
        statistics, ctx.exchanges = _exchange_statistics(inputs, part, channel)
        count = max(statistics.total, 1.0)  # where nobody has data, all sums are zero
        if statistics.total == 1:
            raise ValueError(
                "SyncBatchNorm needs more than one value per channel when training, and all ranks "
                f"together have one (this rank's input has shape {tuple(inputs.shape)})."
            )
        variance = statistics.squares / count
        if running_mean is not None and running_var is not None and statistics.total > 0:
            unbiased = statistics.squares / (statistics.total - 1)
            for running, new in ((running_mean, statistics.mean), (running_var, unbiased)):
                old = running.to("cpu", torch.float64)
                running.copy_(old + momentum * (new - old))
        dtype = _statistics_dtype(inputs)
        mean = statistics.mean.to(inputs.device, dtype)
        inverse = (variance + eps).rsqrt().to(inputs.device, dtype)
        ctx.save_for_backward(inputs, weight, mean, inverse)
        ctx.count, ctx.channel = count, channel
        ctx.bias_dtype = None if bias is None else bias.dtype
        if inputs.numel() == 0:
            return torch.empty_like(inputs)
        return functional.batch_norm(
            inputs,
            mean,
            variance.to(inputs.device, dtype),
            None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype),
            eps=eps,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, inverse = ctx.saved_tensors
        channels = inputs.size(1)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = mean.dtype
        shape = (1, channels, *[1] * (inputs.dim() - 2))
        over = [0, *range(2, inputs.dim())]
        gradient = gradient.to(dtype)
        normalized = (inputs.to(dtype) - mean.view(shape)).mul_(inverse.view(shape))
        sum_of_gradient = gradient.sum(over)
        sum_with_input = (gradient * normalized).sum(over)
        # These stay the rank's own: they are averaged over the ranks like all gradients of
        # parameters. Below are sums over the ranks, because every rank's loss depends on this
        # rank's input through the statistics.
        grad_weight = sum_with_input.to(weight.dtype) if needs_weight else None
        grad_bias = sum_of_gradient.to(ctx.bias_dtype) if needs_bias else None
        grad_input = None
        if ctx.exchanges:
            own = torch.cat([sum_of_gradient, sum_with_input]).to("cpu", torch.float64)
            means = (ctx.channel.sum(own) / ctx.count).to(inputs.device, dtype)
            if needs_input:
                mean_of_gradient, mean_with_input = means.split(channels)
                scale = inverse if weight is None else inverse * weight.to(dtype)
                grad_input = gradient - mean_of_gradient.view(shape)
                grad_input.sub_(normalized.mul_(mean_with_input.view(shape)))
                grad_input = grad_input.mul_(scale.view(shape)).to(inputs.dtype)
        return (grad_input, grad_weight, grad_bias, *[None] * 6)


def _part_in_gradients(inputs: Tensor, *parameters: Tensor | None) -> int:
    if not torch.is_grad_enabled():
        return _NO_GRAPH
    if inputs.requires_grad:
        return _INPUT_TOO
    trained = any(tensor is not None and tensor.requires_grad for tensor in parameters)
    return _PARAMETERS_ONLY if trained else _NO_GRAPH


def _statistics_dtype(inputs: Tensor) -> torch.dtype:
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


def _exchange_statistics(inputs: Tensor, part: int, channel: _Channel) -> tuple[_Statistics, bool]:
    """Statistics of all batches, and whether backward has something to exchange. Collective."""
    channels = inputs.size(1)
    count = inputs.numel() // channels if channels else 0
    own = torch.zeros(2 + 2 * channels, dtype=torch.float64)
    own[0], own[1] = count, part
    if count:
        over = [0, *range(2, inputs.dim())]
        variance, mean = torch.var_mean(inputs.to(_statistics_dtype(inputs)), over, correction=0)
        own[2 : 2 + channels] = mean
        own[2 + channels :] = variance
        own[2 + channels :] *= count
    everybody = channel.gather(own)
    parts = [int(record[1]) for record in everybody]
    if _INPUT_TOO in parts and _NO_GRAPH in parts:
        needing, without = (channel.members[parts.index(part)] for part in (_INPUT_TOO, _NO_GRAPH))
        raise MismatchError(
            f"SyncBatchNorm on rank {channel.rank}: rank {needing} needs the gradient of its "
            f"input, but rank {without} records no graph (it is in torch.no_grad(), or nothing "
            "there requires a gradient), so it could not take part in backward. Do the same on all "
            "ranks, or call eval() where only one rank computes."
        )
    return _combined(everybody, channels), _INPUT_TOO in parts


def _combined(everybody: list[Tensor], channels: int) -> _Statistics:
    """Combines means and squares pairwise, in rank order, so that all ranks get the same bits.

    Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
    variances (1979). Unlike the difference of mean square and squared mean it loses nothing where
    the mean is large.
    """
    total = 0.0
    mean = torch.zeros(channels, dtype=torch.float64)
    squares = torch.zeros(channels, dtype=torch.float64)
    for record in everybody:
        count = float(record[0])
        if count == 0:
            continue
        distance = record[2 : 2 + channels] - mean
        both = total + count
        mean += distance * (count / both)
        squares += record[2 + channels :] + distance.square() * (total * count / both)
        total = both
    return _Statistics(total, mean, squares)


class _Channel:
    """The communicator of all synchronised layers of a session.

    Or of those of its ranks that have a batch, where some have run out of them.

    Their own, because collectives of one communicator have to come in the same order on all ranks:
    on devices whose backward runs on threads of its own they would mix with others of the session.
    """

    def __init__(self, session: Session, members: tuple[int, ...] | None) -> None:
        if members is None:
            # A rank that never comes here is then reported as in any other collective.
            session.barrier()
            members = tuple(range(session.size))
        self.rank = session.rank
        self.members = members
        self._seconds = session._seconds
        self._communicator: _core.Communicator = session.core.communicator(
            list(members), slot_bytes=64 << 10, slots=4, timeout=self._seconds
        )

    def gather(self, record: Tensor) -> list[Tensor]:
        """The records of all ranks; fp64, all of one length."""
        size = record.numel() * record.element_size()
        received = record.new_empty(len(self.members), record.numel())
        sizes = [size] * len(self.members)
        self._communicator.allgather(
            record.data_ptr(), size, received.data_ptr(), sizes, self._seconds, _FORWARD
        )
        return list(received)

    def sum(self, record: Tensor) -> Tensor:
        """The sum of the ranks' records, fp64, in place."""
        count = record.numel()
        self._communicator.allreduce(
            record.data_ptr(), count, "float64", "sum", 1.0, 1.0, self._seconds, _BACKWARD
        )
        return record


_channels: WeakKeyDictionary[Session, dict[tuple[int, ...] | None, _Channel]] = WeakKeyDictionary()


def _channel(session: Session) -> _Channel:
    channels = _channels.setdefault(session, {})
    members = session.active_ranks
    if members not in channels:
        channels[members] = _Channel(session, members)
    return channels[members]
