"""SyncBatchNorm against torch's BatchNorm over the concatenated batch in one process."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvd_strategy import GradientReducer, MismatchError, StallError, SyncBatchNorm, open_session
from hvd_strategy.sync_batchnorm import revert_sync_batchnorm
from tests.multi.pool import Ranks
from tests.multi.reducer_cases import TINY, assert_equal, assert_ranks_agree
from tests.multi.trainer_cases import own_rank

CHANNELS = 3
STEPS = 3

# Trailing sizes -> the layer of torch.
LAYERS: dict[tuple[int, ...], type[Any]] = {
    (): nn.BatchNorm1d,
    (4,): nn.BatchNorm1d,
    (2, 3): nn.BatchNorm2d,
    (2, 1, 3): nn.BatchNorm3d,
}


def data(step: int, rank: int, count: int, tail: tuple[int, ...], **kind: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return 2 + 3 * torch.randn(count, CHANNELS, *tail, generator=generator, **kind)


def loss_of(output: Tensor, step: int, rank: int) -> Tensor:
    """One that weighs every element differently; 0 for an empty output."""
    generator = torch.Generator().manual_seed(77 * step + rank)
    weight = torch.randn(output.shape, generator=generator).to(output.dtype)
    return (output.tanh() * weight).sum() / 4


def steps(
    model: nn.Module,
    inputs: Callable[[int], list[Tensor]],
    first: int,
    size: int,
    before_backward: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Trains on the inputs of some ranks, from rank `first` on; `size` divides the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if [*model.parameters()] else None
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        parts = [part.requires_grad_() for part in inputs(step)]
        output = model(torch.cat(parts))
        loss = torch.stack(
            [
                loss_of(part, step, first + number)
                for number, part in enumerate(output.split([len(part) for part in parts]))
            ]
        ).sum()
        before_backward()
        model.zero_grad()
        (loss / size).backward()
        for number, part in enumerate(parts):
            # Of the sum over the ranks of their losses.
            assert part.grad is not None
            found[f"input gradient {step} {first + number}"] = part.grad * size
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[f"gradient {step} {name}"] = parameter.grad.clone()
        found[f"output {step} {first}"] = output.detach()
        if optimizer is not None:
            optimizer.step()
    found.update({name: value.clone() for name, value in model.state_dict().items()})
    return found


def compare(
    make: Callable[[], nn.Module],
    counts: list[int],
    tail: tuple[int, ...] = (),
    tolerance: float = 1e-6,
    **kind: Any,
) -> None:
    """This rank's training with synchronised layers against one process with all data."""
    session = open_session()
    rank, size = session.rank, session.size
    torch.manual_seed(0)
    model = SyncBatchNorm.convert_sync_batchnorm(make())
    reducer = GradientReducer(model.named_parameters(), session=session, bucket_cap_mb=TINY)
    ours = steps(
        model,
        lambda step: [data(step, rank, counts[rank], tail, **kind)],
        rank,
        1,
    )
    torch.manual_seed(0)
    expected = steps(
        make(),
        lambda step: [data(step, other, counts[other], tail, **kind) for other in range(size)],
        0,
        size,
    )
    reducer.close()
    for step in range(STEPS):
        output = expected.pop(f"output {step} 0").split(counts)[rank]
        torch.testing.assert_close(
            ours.pop(f"output {step} {rank}"), output, rtol=0, atol=tolerance
        )
        for other in range(size):
            gradient = expected.pop(f"input gradient {step} {other}")
            if other == rank:
                torch.testing.assert_close(
                    ours.pop(f"input gradient {step} {rank}"), gradient, rtol=0, atol=2 * tolerance
                )
    assert_equal(ours, expected, tolerance)
    assert_ranks_agree(session, ours)


def plain(tail: tuple[int, ...], arguments: dict[str, Any]) -> None:
    compare(lambda: LAYERS[tail](CHANNELS, **arguments), [4] * open_session().size, tail)


@pytest.mark.parametrize("tail", LAYERS)
def test_every_shape(ranks: Ranks, tail: tuple[int, ...]) -> None:
    ranks(plain, tail, {})


@pytest.mark.parametrize(
    "arguments",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.1},
        {"bias": False},
    ],
    ids=str,
)
def test_every_argument(ranks: Ranks, arguments: dict[str, Any]) -> None:
    ranks(plain, (2, 3), arguments)


def uneven(counts: list[int], tail: tuple[int, ...]) -> None:
    compare(lambda: LAYERS[tail](CHANNELS), counts, tail)


@pytest.mark.parametrize(
    "counts", [[5, 2], [1, 6], [1, 1], [0, 4], [4, 0], [3, 1, 5], [0, 3, 2], [2, 0, 0]], ids=str
)
def test_uneven_and_empty_batches(ranks: Ranks, counts: list[int]) -> None:
    for tail in ((), (2, 3)):
        ranks.run(len(counts), uneven, counts, tail)


class Twice(nn.Module):
    """Layers on branches, one of them used twice, one module under two names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS))
        self.second = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS))
        self.again = self.second[1]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind == "plain":
            left, right = self.first(inputs), self.second(inputs)
        else:
            reentrant = self.kind == "reentrant"
            left = checkpoint(self.first, inputs, use_reentrant=reentrant)
            right = checkpoint(self.second, inputs, use_reentrant=reentrant)
        return self.again(left * right.sigmoid()) + self.first(right)


def twice(kind: str) -> None:
    compare(lambda: Twice(kind), [3, 5], tolerance=3e-6)
    compare(lambda: Twice(kind).double(), [3, 5], tolerance=1e-12, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["plain", "reentrant", "not reentrant"])
def test_used_twice_and_checkpointed(ranks: Ranks, kind: str) -> None:
    ranks(twice, kind)


class Detours(nn.Module):
    """Two branches; on odd ranks the graph around them has nodes that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.BatchNorm1d(CHANNELS).double()
        self.right = nn.BatchNorm1d(CHANNELS).double()

    def forward(self, inputs: Tensor) -> Tensor:
        left = self.left(self.detour(inputs, 3))
        right = self.right(self.detour(inputs, 1))
        return self.detour(left, 5) * right.sigmoid() + self.detour(right, 2) + left

    def detour(self, values: Tensor, length: int) -> Tensor:
        extra = values
        for _ in range(length if own_rank() % 2 else 0):
            extra = extra.tanh() + values
        return values + 0 * extra


def detours() -> None:
    compare(Detours, [3, 5, 4], tolerance=1e-12, dtype=torch.float64)


def test_graphs_that_differ_around_the_layers(ranks: Ranks) -> None:
    ranks.run(3, detours)


def deep_net() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Tanh()]
    return nn.Sequential(*layers).double()


def deep() -> None:
    # Buckets of one parameter: gradients are on their way while the layers exchange.
    compare(deep_net, [6, 3, 4], tolerance=1e-11, dtype=torch.float64)


def test_while_gradients_are_reduced(ranks: Ranks) -> None:
    ranks.run(3, deep)


def double_precision() -> None:
    compare(lambda: nn.BatchNorm2d(CHANNELS).double(), [2, 5], (2, 3), 1e-13, dtype=torch.float64)


def test_double_precision(ranks: Ranks) -> None:
    ranks(double_precision)


def half(dtype: torch.dtype, parameters: torch.dtype) -> None:
    """Against the same in fp32, from the same rounded input."""
    session = open_session()
    inputs = [data(0, rank, 16, (2, 3)).to(dtype) for rank in range(session.size)]
    mine = inputs[session.rank].clone().requires_grad_()
    layer = SyncBatchNorm(CHANNELS, dtype=parameters)
    output = layer(mine)
    assert output.dtype == dtype
    loss_of(output.float(), 0, session.rank).backward()
    assert mine.grad is not None
    assert mine.grad.dtype == dtype
    assert layer.weight.grad.dtype == parameters

    everything = torch.cat(inputs).float().requires_grad_()
    exact = nn.BatchNorm2d(CHANNELS)
    outputs = exact(everything).split(16)
    sum(loss_of(part.to(dtype).float(), 0, rank) for rank, part in enumerate(outputs)).backward()
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(output.float(), outputs[session.rank], rtol=step, atol=step)
    assert everything.grad is not None
    expected = everything.grad.split(16)[session.rank]
    torch.testing.assert_close(mine.grad.float(), expected, rtol=4 * step, atol=4 * step)
    # The statistics were never rounded to 16 bits where the buffers are not.
    atol = 1e-6 if parameters == torch.float32 else step * 4
    assert layer.running_mean is not None
    assert exact.running_mean is not None
    torch.testing.assert_close(layer.running_mean.float(), exact.running_mean, rtol=0, atol=atol)
    torch.testing.assert_close(layer.running_var.float(), exact.running_var, rtol=0, atol=4 * atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixed", [True, False])
def test_half_precision(ranks: Ranks, dtype: torch.dtype, mixed: bool) -> None:
    ranks(half, dtype, torch.float32 if mixed else dtype)


def far_from_zero() -> None:
    session = open_session()
    inputs = [1e4 + 100 * rank + torch.randn(64, 2) for rank in range(session.size)]
    inputs = [session.broadcast(values, rank) for rank, values in enumerate(inputs)]
    layer = SyncBatchNorm(2, momentum=1.0)
    layer(inputs[session.rank])
    exact = torch.cat(inputs).double()
    assert layer.running_mean is not None
    torch.testing.assert_close(layer.running_mean.double(), exact.mean(0), rtol=1e-7, atol=0)
    torch.testing.assert_close(layer.running_var.double(), exact.var(0), rtol=1e-5, atol=0)


def test_a_large_mean_costs_no_precision(ranks: Ranks) -> None:
    ranks.run(3, far_from_zero)


def memory_formats() -> None:
    session = open_session()
    for tail, form in (((4, 5), torch.channels_last), ((2, 4, 5), torch.channels_last_3d)):
        inputs = data(0, session.rank, 3, tail).to(memory_format=form).requires_grad_()
        layer = SyncBatchNorm(CHANNELS)
        output = layer(inputs)
        output.square().sum().backward()
        assert inputs.grad is not None
        assert output.is_contiguous(memory_format=form)
        assert inputs.grad.is_contiguous(memory_format=form)
        other = copy.deepcopy(layer)
        other.reset_running_stats()
        dense = inputs.detach().contiguous().requires_grad_()
        again = other(dense)
        again.square().sum().backward()
        torch.testing.assert_close(output, again, rtol=0, atol=1e-6)
        torch.testing.assert_close(inputs.grad, dense.grad, rtol=0, atol=1e-5)


def test_channels_last(ranks: Ranks) -> None:
    ranks(memory_formats)


def evaluation() -> None:
    session = open_session()
    layer = SyncBatchNorm(CHANNELS)
    layer(data(0, session.rank, 4, ()))
    exact = nn.BatchNorm1d(CHANNELS)
    exact.load_state_dict(layer.state_dict())
    for module in (layer, exact):
        module.eval()
    alone = SyncBatchNorm(CHANNELS, track_running_stats=False).eval()
    if session.rank == 0:  # nobody else has to take part
        inputs = data(1, 0, 4, ())
        assert torch.equal(layer(inputs), exact(inputs))
        own = nn.BatchNorm1d(CHANNELS, track_running_stats=False).eval()
        assert torch.equal(alone(inputs), own(inputs))
    session.barrier()


def test_evaluation_is_not_collective(ranks: Ranks) -> None:
    ranks(evaluation)


def nobody_has_data() -> None:
    session = open_session()
    layer = SyncBatchNorm(CHANNELS)
    inputs = torch.zeros(0, CHANNELS, 2, requires_grad=True)
    output = layer(inputs)
    assert output.shape == inputs.shape
    output.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.shape == inputs.shape
    assert torch.equal(layer.weight.grad, torch.zeros(CHANNELS))
    assert torch.equal(layer.bias.grad, torch.zeros(CHANNELS))
    assert layer.running_mean is not None
    assert torch.equal(layer.running_mean, torch.zeros(CHANNELS))
    assert torch.equal(layer.running_var, torch.ones(CHANNELS))
    session.barrier()


def test_nobody_has_data(ranks: Ranks) -> None:
    ranks(nobody_has_data)


def wrong_uses() -> None:
    session = open_session()
    rank = session.rank
    layer = SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="needs more than one value per channel"):
        layer(torch.zeros(1 if rank == 1 else 0, CHANNELS))
    text = rf"on rank {rank}: rank 0 needs the gradient of its input, but rank 1 records no graph"
    with torch.set_grad_enabled(rank == 0), pytest.raises(MismatchError, match=text):
        layer(data(0, rank, 4, ()).requires_grad_())
    wide = SyncBatchNorm(CHANNELS + rank)
    with pytest.raises(
        MismatchError,
        match=r"rank [01] with forward of SyncBatchNorm: allgather",
    ):
        wide(torch.zeros(4, CHANNELS + rank))
    with pytest.raises(ValueError, match=r"takes input of shape \(N, C, ...\), not \(4,"):
        layer(torch.zeros(4))
    with pytest.raises(ValueError, match=r"SyncBatchNorm\(3\) takes input with 3 channels"):
        layer(torch.zeros(4, CHANNELS + 1))
    inputs = data(1, rank, 4, ()).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    # All of that left the layer usable.
    compare(lambda: nn.BatchNorm1d(CHANNELS), [4, 4])


def test_wrong_uses_are_named_on_every_rank(ranks: Ranks) -> None:
    ranks(wrong_uses)


def skipping() -> None:
    session = open_session(stall_warning_seconds=0, stall_abort_seconds=1)
    layer = SyncBatchNorm(CHANNELS)
    layer(data(0, session.rank, 4, ()))
    if session.rank == 1:
        while session.core.failure() is None:
            time.sleep(0.01)
        return
    text = "rank 0 waited for forward of SyncBatchNorm: .* which has not been called by rank 1"
    with pytest.raises(StallError, match=text):
        layer(data(1, 0, 4, ()))


def test_a_rank_that_skips_the_layer_is_named(ranks: Ranks) -> None:
    ranks(skipping, fresh=True)


def without_gradients() -> None:
    session = open_session()
    layer = SyncBatchNorm(CHANNELS)
    exact = nn.BatchNorm1d(CHANNELS)
    everything = [data(0, rank, 4, ()) for rank in range(session.size)]
    with torch.no_grad():
        output = layer(everything[session.rank])
        expected = exact(torch.cat(everything)).split(4)[session.rank]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    assert_equal(layer.state_dict(), exact.state_dict())
    # Where no input needs a gradient, backward is not collective: one rank may do it alone.
    output = layer(everything[session.rank])
    if session.rank == 0:
        output.sum().backward()
    session.barrier()


def test_without_gradients(ranks: Ranks) -> None:
    ranks(without_gradients)


def sessions_one_after_the_other() -> None:
    for _ in range(2):
        session = open_session()
        uneven([4, 2], ())
        session.close()
        session.close()


def test_a_new_session(ranks: Ranks) -> None:
    ranks(sessions_one_after_the_other, fresh=True)


def world_of_one() -> None:
    assert open_session().size == 1
    layer = SyncBatchNorm(CHANNELS)
    exact = nn.BatchNorm2d(CHANNELS)
    inputs = data(0, 0, 4, (2, 3)).requires_grad_()
    output = layer(inputs)
    output.square().sum().backward()
    gradient, inputs.grad = inputs.grad, None
    expected = exact(inputs)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert gradient is not None
    assert inputs.grad is not None
    assert torch.equal(gradient, inputs.grad)
    for name, value in exact.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.zeros(1, CHANNELS))


def test_world_of_one_is_plain_batchnorm(ranks: Ranks) -> None:
    ranks.run(1, world_of_one)


def compiled() -> None:
    session = open_session()
    model = SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(CHANNELS, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    )
    other = copy.deepcopy(model)
    for step in range(2):
        inputs = data(step, session.rank, 4, ())
        torch.compile(model, backend="aot_eager")(inputs).square().sum().backward()
        other(inputs).square().sum().backward()
    assert_equal(model.state_dict(), other.state_dict())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


def test_in_a_compiled_module(ranks: Ranks) -> None:
    ranks(compiled)


# ---- conversion: needs no ranks


class Activated(nn.BatchNorm1d):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


class Checked(nn.BatchNorm1d):
    def _check_input_dim(self, inputs: Tensor) -> None:
        return


def test_conversion_keeps_the_layers() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.BatchNorm3d(4)),
        nn.SyncBatchNorm(4),
        Checked(4),
        SyncBatchNorm(4),
        nn.InstanceNorm1d(4),
    )
    model[1].eval()
    called: list[nn.Module] = []
    model[1].register_forward_hook(lambda module, *_: called.append(module))
    before = dict(model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = list(model.state_dict())
    classes = [type(module) for module in model.modules()]

    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    converted = [name for name, module in model.named_modules() if type(module) is SyncBatchNorm]
    assert converted == ["1", "2.0", "2.1", "3", "4", "5"]
    assert dict(model.named_modules()) == before
    assert list(model.state_dict()) == state
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert tensor is tensors[name]
    assert not model[1].training
    model[1](torch.zeros(2, 4))
    assert called == [model[1]]
    again = pickle.loads(pickle.dumps(copy.deepcopy(model[2])))
    assert [type(module) for module in again] == [SyncBatchNorm, SyncBatchNorm]
    revert_sync_batchnorm(again)
    assert [type(module) for module in again] == [nn.BatchNorm2d, nn.BatchNorm3d]

    SyncBatchNorm.convert_sync_batchnorm(model)
    assert revert_sync_batchnorm(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert "_converted_from" not in vars(model[1])


def test_a_layer_itself_is_converted() -> None:
    layer = nn.BatchNorm1d(4)
    assert SyncBatchNorm.convert_sync_batchnorm(layer) is layer
    assert type(layer) is SyncBatchNorm


def test_what_does_more_than_batchnorm_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Activated(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    nn.utils.parametrizations.weight_norm(model[2], "weight", dim=0)
    kinds = [type(model[0]), type(model[2])]
    SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(model[0]), type(model[2])] == kinds
    assert type(model[1]) is SyncBatchNorm
    assert [record.getMessage() for record in caplog.records] == [
        "0 (Activated) is not synchronised over the ranks: it does more than BatchNorm.",
        "2 (ParametrizedBatchNorm1d) is not synchronised over the ranks: it does more than "
        "BatchNorm.",
    ]


def test_what_cannot_be_converted() -> None:
    with pytest.raises(ValueError, match="LazyBatchNorm1d is lazy and does not know its number"):
        SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())
    layer = nn.SyncBatchNorm(4, process_group=object())
    with pytest.raises(ValueError, match="1 has a process group of its own"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.ReLU(), layer))


def test_it_is_a_normal_layer() -> None:
    layer = SyncBatchNorm(4, eps=0.5, momentum=None, affine=False, dtype=torch.float64)
    assert repr(layer).startswith("SyncBatchNorm(4, eps=0.5, momentum=None, affine=False")
    assert layer.running_mean is not None
    assert layer.running_mean.dtype == torch.float64
    assert list(SyncBatchNorm(4).state_dict()) == list(nn.BatchNorm1d(4).state_dict())
