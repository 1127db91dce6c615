"""What holds for `detect_world` whatever the environment says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_strategy import HvdError, world
from hvd_strategy.world import World, detect_world

# The same examples in every run, and no example that is too slow for a busy machine.
repeatable = settings(max_examples=150, deadline=None, derandomize=True, database=None)

# Every variable that the module reads.
VARIABLES = sorted(
    set(re.findall(r'"([A-Z][A-Z0-9_]+)"', Path(world.__file__).read_text())) - {"HVD"}
)
LAUNCHERS = ("torchrun", "env", "horovod", "lightning", "openmpi", "mpich", "slurm", "pmix")

numbers = st.integers(0, 5).map(str)
texts = st.one_of(
    numbers,
    numbers,  # often, or hardly anything would fit together
    st.sampled_from(["", " ", " 1 ", "-1", "1.0", "0x1", "1_0", "²", "１", "٣", "9" * 30]),
    st.sampled_from(["2(x3)", "2(x2),1", "1(x999999)", "0", "(x2)", "2(x", ",", "4294967295"]),
    st.text(max_size=8).filter(lambda text: "\0" not in text),
)
environments = st.dictionaries(st.sampled_from(VARIABLES), texts, max_size=8)


def told(environ: dict[str, str]) -> World | str:
    """What comes out, or the text of the only exception that may."""
    try:
        return detect_world(environ)
    except HvdError as error:
        return str(error)


@repeatable
@given(environments)
@example({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "9" * 18})
def test_a_place_that_makes_sense_or_an_error(environ: dict[str, str]) -> None:
    before = dict(environ)
    found = told(environ)
    assert environ == before
    assert told(environ) == found
    if isinstance(found, str):
        named = [name for name in VARIABLES if name in found]
        assert named, f"names no variable: {found}"
        assert any(environ.get(name, "").strip() for name in named)
        return
    assert 0 <= found.rank < found.size
    assert 0 <= found.local_rank < found.local_size <= found.size
    assert found.node_rank >= 0
    assert found.launcher in (*LAUNCHERS, "single")
    if found.launcher == "single":
        assert found == World.single()


@repeatable
@given(environments, st.dictionaries(st.text(min_size=1, max_size=20), texts, max_size=4))
def test_other_variables_do_not_matter(environ: dict[str, str], others: dict[str, str]) -> None:
    others = {name: text for name, text in others.items() if name not in VARIABLES}
    assert told({**others, **environ}) == told(environ)


@repeatable
@given(environments, st.sets(st.sampled_from(VARIABLES)), st.sampled_from(["", " ", "\t\n"]))
def test_empty_counts_as_not_set(environ: dict[str, str], names: set[str], empty: str) -> None:
    without = {name: text for name, text in environ.items() if name not in names}
    assert told({**without, **dict.fromkeys(names, empty)}) == told(without)


# ---- places that launchers tell


def variables(launcher: str, rank: int, hosts: int, per_host: int) -> dict[str, str]:
    """What a launcher sets for a rank of a job with as many ranks on every host."""
    size, local, node = hosts * per_host, rank % per_host, rank // per_host
    return {
        name: str(value)
        for name, value in {
            "torchrun": {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": per_host,
                "GROUP_RANK": node,
                "TORCHELASTIC_RUN_ID": "none",
            },
            "env": {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": per_host,
            },
            "horovod": {
                "HOROVOD_RANK": rank,
                "HOROVOD_SIZE": size,
                "HOROVOD_LOCAL_RANK": local,
                "HOROVOD_LOCAL_SIZE": per_host,
                "HOROVOD_CROSS_RANK": node,
                "HOROVOD_CROSS_SIZE": hosts,
            },
            "lightning": {
                "LOCAL_RANK": rank,
                "NODE_RANK": 0,
                "WORLD_SIZE": size,
                "MASTER_PORT": 29500,
            },
            "openmpi": {
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_SIZE": size,
                "OMPI_COMM_WORLD_LOCAL_RANK": local,
                "OMPI_COMM_WORLD_LOCAL_SIZE": per_host,
                "OMPI_COMM_WORLD_NODE_RANK": local,
            },
            "mpich": {
                "PMI_RANK": rank,
                "PMI_SIZE": size,
                "MPI_LOCALRANKID": local,
                "MPI_LOCALNRANKS": per_host,
            },
            "slurm": {
                "SLURM_PROCID": rank,
                "SLURM_NTASKS": size,
                "SLURM_STEP_ID": 0,
                "SLURM_STEP_NUM_TASKS": size,
                "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x{hosts})",
                "SLURM_LOCALID": local,
                "SLURM_NODEID": node,
            },
            "pmix": {"PMIX_RANK": rank, "WORLD_SIZE": size},
        }[launcher].items()
    }


@st.composite
def places(draw: st.DrawFn, hosts: st.SearchStrategy[int]) -> tuple[int, int, int]:
    count, per_host = draw(hosts), draw(st.integers(1, 4))
    return draw(st.integers(0, count * per_host - 1)), count, per_host


OVER_SEVERAL_HOSTS = [name for name in LAUNCHERS if name not in ("lightning", "pmix")]


@repeatable
@given(st.sampled_from(OVER_SEVERAL_HOSTS), places(st.integers(1, 4)))
def test_places_are_read_as_they_are(launcher: str, place: tuple[int, int, int]) -> None:
    rank, hosts, per_host = place
    found = detect_world(variables(launcher, rank, hosts, per_host))
    assert found == World(rank, hosts * per_host, rank % per_host, per_host, rank // per_host)
    assert found.launcher == launcher


@repeatable
@given(st.sets(st.sampled_from(LAUNCHERS), min_size=1), places(st.just(1)))
def test_the_innermost_launcher_is_believed(
    launchers: set[str], place: tuple[int, int, int]
) -> None:
    """In the order of the module's description; here they all tell the same place."""
    environ: dict[str, str] = {}
    for launcher in launchers:
        environ |= variables(launcher, *place)
    expected = next(launcher for launcher in LAUNCHERS if launcher in launchers)
    found = detect_world(environ)
    assert found.launcher == expected
    assert (found.rank, found.size) == (place[0], place[2])


@repeatable
@given(
    st.sampled_from(["horovod", "openmpi", "mpich", "slurm"]),
    places(st.just(1)),
    places(st.just(1)),
)
def test_launchers_that_contradict_each_other(
    other: str, inner: tuple[int, int, int], outer: tuple[int, int, int]
) -> None:
    """torchrun was started inside of the other job; variables set by hand may be left over."""
    around = variables(other, *outer)
    found = detect_world({**around, **variables("torchrun", *inner)})
    assert (found.rank, found.size, found.launcher) == (inner[0], inner[2], "torchrun")

    contradict = inner != outer and outer[2] > 1 and other != "horovod"
    by_hand = told({**around, **variables("env", *inner)})
    if contradict:
        assert isinstance(by_hand, str)
        assert f"RANK={inner[0]} and WORLD_SIZE={inner[2]} contradict" in by_hand
    else:
        assert isinstance(by_hand, World)
        assert (by_hand.rank, by_hand.size) == (inner[0], inner[2])


@repeatable
@given(st.integers(-2, 5), st.integers(-2, 5), st.integers(-2, 5), st.integers(-2, 5))
def test_world_checks_itself(rank: int, size: int, local_rank: int, local_size: int) -> None:
    fits = 0 <= rank < size and 0 <= local_rank < local_size <= size
    if fits:
        assert World(rank, size, local_rank, local_size).size == size
    else:
        with pytest.raises(HvdError, match=r"it takes 0 <= rank < size"):
            World(rank, size, local_rank, local_size)
