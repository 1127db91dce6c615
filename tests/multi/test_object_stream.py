"""Objects with tensors, sent from one rank to the others: what arrives is what was there."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_strategy import HvdError, Session, object_stream, open_session
from hvd_strategy.object_stream import stream_object
from tests.multi.pool import Ranks

# ---- things to send: all of them the same on every rank, for the same seed ----------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Node:
    value: Any
    others: list[Any] = field(default_factory=list)


class Tagged(Tensor):
    """A subclass with an attribute of its own."""


class Summed:
    """Looks at its tensor while it is unpickled, when the content must have arrived."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.total = float(tensor.sum())

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]
        self.total = float(self.tensor.sum())


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def filled(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bits, which are a value of any dtype but bool."""
    width = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=int))
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    bits = torch.randint(0, 256, (count * width,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def every_kind_of_tensor() -> dict[str, Any]:
    base = filled(torch.float32, 6, 8)
    dense = torch.randn(4, 4).relu()
    tagged = torch.randn(3).as_subclass(Tagged)
    tagged.tag = "kept"
    floats = torch.randn(6, 4)
    kinds: dict[str, Any] = {str(dtype): filled(dtype, 5, 3) for dtype in DTYPES}
    kinds |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "no rows": torch.empty(0, 7, dtype=torch.int16),
        "transposed": filled(torch.int32, 3, 5).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(4, 1).expand(4, 1000),
        "every other": filled(torch.int64, 20)[1::2],
        "base": base,
        "view": base[2:4, 1::3],
        "same memory, other dtype": base.view(torch.int32)[0],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": nn.Parameter(floats),
        "frozen": nn.Parameter(floats[1:], requires_grad=False),
        "buffer": nn.Buffer(torch.randn(3)),
        "with gradient": torch.randn(2, requires_grad=True),
        "subclass": tagged,
        "meta": torch.empty(2, 3, device="meta"),
        "coo": dense.to_sparse(),
        "coo, not coalesced": torch.sparse_coo_tensor(
            torch.tensor([[1, 1, 0]]), torch.randn(3), (4,)
        ),
        "csr": dense.to_sparse_csr(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        "quantized": torch.quantize_per_tensor(floats, 0.1, 3, torch.qint8),
        "quantized by channel": torch.quantize_per_channel(
            floats, torch.rand(4, dtype=torch.float64), torch.arange(4), 1, torch.quint8
        ),
    }
    return kinds


def every_kind_of_container() -> dict[str, Any]:
    shared = torch.randn(7)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.append(module[0])  # a layer twice
    state = module.state_dict()
    assert state._metadata
    round_trip: list[Any] = [shared]
    round_trip.append(round_trip)
    optimizer = torch.optim.Adam(module.parameters())
    module[1](module[0](torch.randn(5, 3))).sum().backward()
    optimizer.step()
    return {
        "module": module,
        "state": state,
        "optimizer": optimizer.state_dict(),
        "ordered": OrderedDict(b=shared, a=shared[2:]),
        "named": Pair(shared, {"x": (shared, None)}),
        "dataclass": Node(shared, [Node(torch.ones(2), [])]),
        "looks inside": Summed(torch.arange(100_000.0)),
        "round trip": round_trip,
        "arrays": [np.arange(5.0), np.arange(100_000), np.arange(90_000).reshape(300, 300).T],
        "plain": [1, 2.5, "text", b"bytes", True, None, {1, 2}, frozenset("ab"), range(3)],
        "of torch": [torch.Size([1, 2]), torch.device("cpu"), torch.bfloat16, torch.strided],
        "random state": torch.get_rng_state(),
    }


def random_nest(seed: int) -> Any:
    """Containers of views of few storages, of random sizes."""
    rng = random.Random(seed)
    pool = [filled(rng.choice(DTYPES), rng.randrange(1, 400)) for _ in range(3)]

    def tensor() -> Any:
        base = rng.choice(pool)
        start = rng.randrange(len(base))
        view = base[start : start + rng.randrange(40) : rng.randrange(1, 4)]
        return nn.Parameter(view, requires_grad=False) if rng.random() < 0.2 else view

    def nest(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([tensor, tensor, rng.random, lambda: "text", lambda: None])()
        parts = [nest(depth - 1) for _ in range(rng.randrange(4))]
        kinds: list[Callable[[], Any]] = [
            lambda: parts,
            lambda: tuple(parts),
            lambda: dict(enumerate(parts)),
            lambda: OrderedDict((str(number), part) for number, part in enumerate(parts)),
            lambda: Pair(parts, parts),
            lambda: Node(tensor(), parts),
        ]
        return rng.choice(kinds)()

    return nest(depth=4)


# ---- comparison ----------------------------------------------------------------------------------


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors inside, in a fixed order."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_of(entry, seen)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_of(entry, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value), seen)


def sharing(value: Any) -> list[tuple[int, int]]:
    """For every tensor with memory, the first one with the same memory, and the offset there."""
    first: dict[int, int] = {}
    found = []
    for number, tensor in enumerate(tensors_of(value)):
        if tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage.nbytes():
                owner = first.setdefault(storage.data_ptr(), number)
                found.append((owner, tensor.storage_offset()))
    return found


def assert_same(ours: Any, theirs: Any, where: str, seen: set[int]) -> None:
    assert type(ours) is type(theirs), where
    if id(ours) in seen:
        return
    seen.add(id(ours))
    if isinstance(ours, Tensor):
        assert_same_tensor(ours, theirs, where)
    elif isinstance(ours, np.ndarray):
        np.testing.assert_array_equal(ours, theirs, where)
        assert ours.strides == theirs.strides
        assert theirs.flags.writeable
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key, entry in ours.items():
            assert_same(entry, theirs[key], f"{where}.{key}", seen)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(our, their, f"{where}.{number}", seen)
    elif isinstance(ours, nn.Module | Node | Summed):
        assert_same(vars(ours), vars(theirs), where, seen)
    else:
        assert ours == theirs, where


def assert_same_tensor(ours: Tensor, theirs: Tensor, where: str) -> None:
    for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_quantized"):
        if not ours.is_nested or name != "shape":
            assert getattr(ours, name) == getattr(theirs, name), f"{where}: {name}"
    assert vars(ours) == vars(theirs), where
    if ours.is_nested:
        for our, their in zip(ours.unbind(), theirs.unbind(), strict=True):
            assert_same_tensor(our, their, where)
        return
    if ours.layout != torch.strided:
        assert ours.layout != torch.sparse_coo or ours.is_coalesced() == theirs.is_coalesced()
        assert torch.equal(ours.to_dense(), theirs.to_dense()), where
        return
    assert ours.stride() == theirs.stride(), where
    assert (ours.is_conj(), ours.is_neg()) == (theirs.is_conj(), theirs.is_neg()), where
    if ours.is_quantized:
        assert ours.qscheme() == theirs.qscheme(), where
        ours, theirs = ours.int_repr(), theirs.int_repr()
    if ours.device.type != "meta":
        assert bytes_of(ours) == bytes_of(theirs), f"{where} has other content"


def bytes_of(tensor: Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


def send_and_compare(session: Session, build: Callable[[], Any], src: int = 0) -> None:
    torch.manual_seed(3)
    expected = build()
    sent = expected if session.rank == src else None
    result = stream_object(session, sent, src)
    where = getattr(build, "__name__", str(build))
    assert_same(expected, result, where, set())
    assert sharing(result) == sharing(expected)
    if session.rank == src:
        assert result is sent


# ---- the tests -----------------------------------------------------------------------------------


def everything() -> None:
    session = open_session()
    for src in range(session.size):
        send_and_compare(session, every_kind_of_tensor, src)
        send_and_compare(session, every_kind_of_container, src)


def test_everything_arrives_as_it_was(ranks: Ranks) -> None:
    ranks(everything)


def random_nests(count: int) -> None:
    session = open_session()
    for seed in range(count):
        send_and_compare(session, partial(random_nest, seed))


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_nested_containers_of_views(ranks: Ranks) -> None:
    ranks(random_nests, 40)


def of_sizes(sizes: list[int]) -> list[Tensor]:
    return [filled(torch.uint8, size) for size in sizes]


def sizes_around(chunk: int, pieces: int) -> None:
    """All ways in which a few payloads can lie across the ends of small chunks."""
    session = open_session()
    object_stream.CHUNK_BYTES, before = chunk, object_stream.CHUNK_BYTES
    object_stream._MOST_PIECES, most = pieces, object_stream._MOST_PIECES
    try:
        for sizes in [
            [1], [chunk - 1], [chunk], [chunk + 1], [3 * chunk + 1], [1] * 40,
            [chunk - 2, 1, 3, chunk, 2 * chunk], [7, 5 * chunk, 1, chunk - 1, 0, 2],
        ]:  # fmt: skip
            send_and_compare(session, partial(of_sizes, sizes))
    finally:
        object_stream.CHUNK_BYTES, object_stream._MOST_PIECES = before, most


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize("pieces", [3, 1000])
def test_payloads_across_the_ends_of_chunks(ranks: Ranks, pieces: int) -> None:
    ranks(sizes_around, 100, pieces)


def through_a_chunk() -> None:
    """As where the tensors are on a device that the engine cannot write to."""
    object_stream._is_reachable, before = (lambda memory: False), object_stream._is_reachable
    try:
        everything()
    finally:
        object_stream._is_reachable = before


def test_memory_that_the_engine_cannot_reach(ranks: Ranks) -> None:
    ranks(through_a_chunk)


def test_chunks_cover_every_byte_once() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [rng.choice([0, 1, 50, rng.randrange(1, 1 << 26)]) for _ in range(20)]
        received = [0] * len(sizes)
        for chunk in object_stream._chunks(sizes):
            assert 0 < sum(length for _, _, length in chunk) <= object_stream.CHUNK_BYTES
            for number, start, length in chunk:
                assert start == received[number]
                received[number] += length
        assert received == sizes


class BreaksOnReceiver:
    """Cannot be unpickled on rank 1."""

    def __init__(self) -> None:
        self.state = "something"

    def __setstate__(self, state: Any) -> None:
        if open_session().rank == 1:
            raise KeyError("not on this rank")


def failures(size: int) -> list[str]:
    session = open_session()
    texts = []
    before, after = torch.ones(10), torch.arange(size)
    for obj in ([before, lambda: 0, after], [before, BreaksOnReceiver(), after]):
        try:
            stream_object(session, obj)
        except HvdError as error:
            texts.append(str(error))
        # What the failure left in the stream is gone.
        assert stream_object(session, [after] if session.rank == 0 else None)[0][-1] == size - 1
    return texts


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_failures_are_the_same_error_on_every_rank(ranks: Ranks) -> None:
    # More than a chunk comes after the object that fails.
    texts = ranks(failures, 5_000_000)
    assert all(text == texts[0] for text in texts)
    unpicklable, broken = texts[0]
    assert unpicklable.startswith("Rank 0 has an object that cannot be sent to the other ranks: ")
    assert "lambda" in unpicklable
    assert broken == (
        "Rank 1 cannot rebuild an object that rank 0 sent to it: KeyError: 'not on this rank'"
    )


def peak_growth(mebibytes: int) -> float:
    """How far this process's resident memory grows in between, in MiB."""
    session = open_session()
    count = 4
    sent = None
    if session.rank == 0:
        sent = [torch.full((mebibytes << 18,), 1.0 + n) for n in range(count)]
    stream_object(session, torch.ones(1000))
    session.barrier()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts from here
    before = resident("VmRSS")
    result = stream_object(session, sent)
    assert [float(tensor[-1]) for tensor in result] == [1.0, 2.0, 3.0, 4.0]
    return (resident("VmHWM") - before) / 1024


def resident(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


def test_memory_beside_the_object_is_bounded(ranks: Ranks) -> None:
    sender, receiver = ranks(peak_growth, 32)
    # Pages of the staging ring count for a process when it first touches them.
    assert sender < 32
    assert 120 < receiver < 128 + 32
