"""Sessions of several ranks: every collective against what torch computes in one process."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_strategy
from hvd_strategy.errors import HvdError, MismatchError, RankFailedError
from hvd_strategy.world import World
from tests.multi.pool import Ranks

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
SHAPES = ((), (0,), (1,), (3, 5), (2, 0, 4), (70_000,))


def _random(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype in INTEGERS:
        return torch.randint(0, 40, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        real = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(real).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _of_all(
    session: hvd_strategy.Session, shape: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    return [_random(shape, dtype, rank) for rank in range(session.size)]


def _equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _rounded_sum(tensors: list[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """In rank order in fp32 (fp64 for fp64), rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if dtype.is_complex:
        wide = dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    return (total * factor).to(dtype)


def sums() -> None:
    session = hvd_strategy.open_session()
    for shape in SHAPES:
        for dtype in (*FLOATS, *COMPLEX):
            parts = _of_all(session, shape, dtype)
            own = parts[session.rank].clone()
            assert session.allreduce(own) is own
            _equal(own, _rounded_sum(parts))
        for dtype in INTEGERS:
            parts = _of_all(session, shape, dtype)
            _equal(session.allreduce(parts[session.rank].clone()), sum(parts[1:], parts[0]))
        parts = _of_all(session, shape, torch.bool)
        expected = torch.stack(parts).any(0)
        _equal(session.allreduce(parts[session.rank].clone()), expected)


def means() -> None:
    session = hvd_strategy.open_session()
    for shape in SHAPES:
        for dtype in (*FLOATS, *COMPLEX):
            parts = _of_all(session, shape, dtype)
            own = session.allreduce(parts[session.rank].clone(), "mean")
            torch.testing.assert_close(own, _rounded_sum(parts, 1 / session.size))
            _equal(own, session.broadcast(own.clone(), 0))
        for dtype in (*INTEGERS, torch.bool):
            parts = _of_all(session, shape, dtype)
            own = parts[session.rank].clone()
            mean = session.allreduce(own, "mean")
            wide = torch.stack([part.to(torch.float64) for part in parts])
            _equal(mean, wide.mean(0).to(torch.float32))
            _equal(own, parts[session.rank])


def orders() -> None:
    session = hvd_strategy.open_session()
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        parts = _of_all(session, (3, 5), dtype)
        stacked = torch.stack(parts)
        for op, expected in (("min", stacked.amin(0)), ("max", stacked.amax(0))):
            _equal(session.allreduce(parts[session.rank].clone(), op), expected)


def strides() -> None:
    session = hvd_strategy.open_session()
    parts = _of_all(session, (2, 3, 4, 5), torch.float32)
    total = _rounded_sum(parts)
    own = parts[session.rank]
    own_strides = own.clone(memory_format=torch.channels_last)
    _equal(session.allreduce(own_strides), total)
    assert own_strides.is_contiguous(memory_format=torch.channels_last)
    _equal(session.allreduce(own.clone().transpose(0, 3)), total.transpose(0, 3))
    whole = torch.zeros(2, 3, 4, 10)
    every_second = whole[..., ::2]
    every_second.copy_(own)
    session.allreduce(every_second)
    _equal(whole[..., ::2], total)
    assert not whole[..., 1::2].any()
    session.broadcast(every_second, 1)
    value = torch.complex(own, own.flip(0))
    everywhere = [torch.complex(part, part.flip(0)).conj() for part in parts]
    _equal(session.allreduce(value.conj()).resolve_conj(), sum(everywhere[1:], everywhere[0]))
    imaginary = torch.complex(own, own.flip(0)).conj().imag
    assert imaginary.is_neg()
    session.allreduce(imaginary)
    _equal(imaginary.resolve_neg(), -_rounded_sum([part.flip(0) for part in parts]))


def autograd() -> None:
    session = hvd_strategy.open_session()
    parameter = torch.nn.Parameter(torch.full((3,), float(session.rank)))
    session.broadcast(parameter, 1)
    _equal(parameter.detach(), torch.ones(3))
    assert parameter.is_leaf
    squared = (parameter**2).sum()
    session.allreduce(parameter)
    with _refused(RuntimeError, "modified by an inplace operation"):
        squared.backward()
    with torch.inference_mode():
        _equal(session.allreduce(torch.ones(2)), torch.full((2,), float(session.size)))


@contextlib.contextmanager
def _refused(kind: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        absent = [word for word in words if word not in str(error)]
        if absent:
            raise AssertionError(f"{absent} not in {str(error)!r}") from error
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def refusals() -> None:
    session = hvd_strategy.open_session()
    with _refused(ValueError, "op='prod'", "mean"):
        session.allreduce(torch.ones(1), "prod")
    with _refused(TypeError, "min", "complex64"):
        session.allreduce(torch.ones(1, dtype=torch.complex64), "min")
    with _refused(TypeError, "float8_e4m3fn"):
        session.allreduce(torch.ones(1).to(torch.float8_e4m3fn))
    with _refused(TypeError, "sparse_coo"):
        session.allreduce(torch.eye(2).to_sparse())
    with _refused(TypeError, "tensor=[1.0]"):
        session.allreduce([1.0])  # type: ignore[arg-type]
    with _refused(HvdError, "meta", "not supported yet"):
        session.allreduce(torch.ones(1, device="meta"))
    with _refused(ValueError, f"src={session.size}"):
        session.broadcast(torch.ones(1), session.size)
    with _refused(HvdError, "open session as rank", "close"):
        hvd_strategy.open_session(World.single())
    with _refused(HvdError, "timeout", "close it first"):
        hvd_strategy.open_session(timeout=timedelta(seconds=7))


def gathers() -> None:
    session = hvd_strategy.open_session()
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.float8_e4m3fn):
        own = torch.arange(session.rank * 2).reshape(session.rank, 2).to(torch.float32).to(dtype)
        parts = session.allgather(own)
        for rank, part in enumerate(parts):
            assert part.dtype == dtype
            expected = torch.arange(rank * 2).reshape(rank, 2).to(torch.float32)
            _equal(part.view(torch.uint8), expected.to(dtype).view(torch.uint8))
    parts = session.allgather(torch.tensor(session.rank))
    assert [part.shape for part in parts] == [()] * session.size
    assert [part.item() for part in parts] == list(range(session.size))
    large = session.allgather(torch.full((3, 1_000_000), float(session.rank)).T)
    for rank, part in enumerate(large):
        _equal(part, torch.full((1_000_000, 3), float(rank)))


def broadcasts() -> None:
    session = hvd_strategy.open_session()
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.uint16, torch.float8_e5m2):
        # Any bytes are good enough where torch makes no random numbers.
        kind = torch.uint8 if dtype in (torch.uint16, torch.float8_e5m2) else dtype
        for shape in SHAPES:
            doubled = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
            parts = _of_all(session, doubled if dtype == torch.uint16 else shape, kind)
            for src in range(session.size):
                own, expected = (parts[rank].clone().view(dtype) for rank in (session.rank, src))
                assert session.broadcast(own, src) is own
                _equal(own.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise ArithmeticError("not for travelling")


def objects() -> None:
    session = hvd_strategy.open_session()
    own = {
        "rank": session.rank,
        "tensor": torch.full((session.rank + 1,), 7),
        "text": "x" * 100_000,
    }
    got = session.broadcast_object(own, 1)
    assert got["rank"] == 1
    assert len(got["text"]) == 100_000
    _equal(got["tensor"], torch.full((2,), 7))
    everybody = session.allgather_object(own)
    assert [one["rank"] for one in everybody] == list(range(session.size))
    assert [one["tensor"].numel() for one in everybody] == list(range(1, session.size + 1))
    assert session.allgather_object(None) == [None] * session.size
    src = 1
    kind: type[Exception] = ArithmeticError if session.rank == src else HvdError
    with _refused(kind, "not for travelling"):
        session.broadcast_object(_Unpicklable(), src)
    with _refused(kind, "not for travelling"):
        session.allgather_object(_Unpicklable() if session.rank == src else 1)


def mismatches() -> None:
    """An error on every rank, and the session works on."""
    session = hvd_strategy.open_session()
    first = session.rank == 0
    with _refused(MismatchError):
        session.allreduce(torch.ones(3 if first else 4))
    with _refused(MismatchError):
        session.allreduce(torch.ones(4, dtype=torch.float32 if first else torch.int32))
    with _refused(MismatchError):
        session.allreduce(torch.ones(4), "min" if first else "max")
    with _refused(MismatchError, "float32", "int32"):
        session.allgather(torch.ones(4, dtype=torch.float32 if first else torch.int32))
    with _refused(MismatchError, "[4]", "[2, 2]"):
        session.broadcast(torch.ones((4,) if first else (2, 2)))
    with _refused(MismatchError, "rank 0 has 0"):
        session.broadcast(torch.ones(4), 0 if first else 1)
    with _refused(MismatchError, "rank 0 has 0"):
        session.broadcast_object("text", 0 if first else 1)


@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        sums,
        means,
        orders,
        strides,
        autograd,
        refusals,
        gathers,
        broadcasts,
        objects,
        mismatches,
    ],
)
def test_collectives(ranks: Ranks, case: Callable[[], None]) -> None:
    ranks(case)


# ---- opening, closing, failing -------------------------------------------------------------------


def reopen() -> list[int]:
    """Open descriptors after 10 and after 100 sessions."""
    descriptors = []
    for turn in range(100):
        session = hvd_strategy.open_session()
        assert session is hvd_strategy.open_session() is hvd_strategy.current_session()
        value = torch.tensor([session.rank + turn])
        session.allreduce(value)
        assert value.item() == sum(range(session.size)) + turn * session.size
        descriptors.append(len(os.listdir("/proc/self/fd")))
        session.barrier()  # a rank that leaves early would fail the others
        session.close()
        session.close()
        assert session.closed
        assert hvd_strategy.current_session() is None
    with _refused(HvdError, "closed", "open_session"):
        session.barrier()
    session.post_error("nobody is there to hear it")
    return [descriptors[9], descriptors[-1]]


def test_a_session_can_be_opened_again_and_again(ranks: Ranks) -> None:
    for early, late in ranks(reopen, fresh=True):
        assert early == late


def group_stays() -> None:
    session = hvd_strategy.open_session()
    assert dist.group.WORLD is not None
    assert (dist.get_rank(), dist.get_world_size()) == (session.rank, session.size)
    group = dist.group.WORLD
    session.barrier()
    session.close()
    assert dist.group.WORLD is group


def test_the_default_group_outlives_the_session(ranks: Ranks) -> None:
    ranks(group_stays, fresh=True)


def fail_in_a_with_block() -> str:
    try:
        with hvd_strategy.open_session() as session:
            if session.rank == 1:
                raise ArithmeticError("the fourth bearing is hot")
            session.barrier()
    except RankFailedError as error:
        return str(error)
    except ArithmeticError:
        return "own"
    return "none"


def test_the_others_hear_of_an_exception(ranks: Ranks) -> None:
    told, own = ranks(fail_in_a_with_block, fresh=True)
    assert own == "own"
    assert "rank 1" in told
    assert "ArithmeticError: the fourth bearing is hot" in told


def other_world() -> None:
    size = hvd_strategy.open_session().size
    hvd_strategy.open_session().close()
    with _refused(HvdError, "torch.distributed says rank", f"of {size + 1}"):
        hvd_strategy.open_session(World(dist.get_rank(), size + 1, 0, 1))


def test_a_world_that_contradicts_the_default_group_is_refused(ranks: Ranks) -> None:
    ranks(other_world, fresh=True)


# ---- forks ---------------------------------------------------------------------------------------


def _in_fork(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child, or its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return answer


def forks() -> list[str]:
    session = hvd_strategy.open_session()

    def use_inherited() -> str:
        assert hvd_strategy.current_session() is None
        session.close()
        session.barrier()
        return "no error"

    def open_own() -> str:
        with hvd_strategy.open_session(World.single()) as own:
            return f"{own.allreduce(torch.ones(2)).tolist()}"

    def open_same() -> str:
        hvd_strategy.open_session(session.world)
        return "no error"

    answers = [_in_fork(use_inherited), _in_fork(open_own), _in_fork(open_same)]
    workers = multiprocessing.get_context("fork")
    queue = workers.SimpleQueue()
    worker = workers.Process(target=lambda: queue.put(str(hvd_strategy.current_session())))
    worker.start()
    answers.append(queue.get())
    worker.join()
    assert worker.exitcode == 0
    session.barrier()  # nothing that the children did or ended has hurt the session
    return answers


def test_a_forked_child_has_no_session_and_hurts_none(ranks: Ranks) -> None:
    for inherited, own, same, worker in ranks(forks):
        assert inherited.startswith("HvdError")
        assert "belongs to process" in inherited
        assert own == "[1.0, 1.0]"
        assert same.startswith("HvdError")
        assert "forked" in same
        assert worker == "None"
