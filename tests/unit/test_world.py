import itertools
import os

import pytest

from hvd_strategy.errors import HvdError
from hvd_strategy.world import World, detect_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "somewhere",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",  # no number of a host
    "PMIX_RANK": "3",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
LIGHTNING = {
    "LOCAL_RANK": "1",
    "NODE_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "41000",
}
# What the batch script of `sbatch --ntasks=7` sees.
SLURM_BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "7",
    "SLURM_NPROCS": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
SLURM = {
    **SLURM_BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
}


@pytest.mark.parametrize(
    ("environ", "expected", "launcher"),
    [
        pytest.param(TORCHRUN, World(5, 8, 1, 4, 1), "torchrun", id="torchrun"),
        pytest.param(MPICH, World(2, 3, 2, 3), "mpich", id="mpich"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2"}, World(1, 2, 1, 2), "mpich", id="pmi"),
        pytest.param(
            {"PMI_RANK": "5", "PMI_SIZE": "6", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
            World(5, 6, 1, 2, 2),
            "mpich",
            id="pals",
        ),
        pytest.param(OPEN_MPI, World(3, 4, 1, 2, 1), "openmpi", id="openmpi"),
        pytest.param(HOROVOD, World(3, 4, 1, 2, 1), "horovod", id="horovod"),
        pytest.param(LIGHTNING, World(1, 2, 1, 2), "lightning", id="lightning"),
        pytest.param(SLURM, World(6, 7, 0, 1, 3), "slurm", id="slurm"),
        pytest.param({"PMIX_RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 1, 2), "pmix", id="pmix"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 1, 2), "env", id="by hand"),
        pytest.param(
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1"},
            World(5, 8, 1, 4, 1),
            "env",
            id="by hand, two hosts",
        ),
        pytest.param({}, World(0, 1, 0, 1), "single", id="none"),
    ],
)
def test_reads_every_launcher(environ: dict[str, str], expected: World, launcher: str) -> None:
    before = dict(environ)
    world = detect_world(environ)
    assert world == expected
    assert world.launcher == launcher
    assert environ == before


def test_takes_the_process_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {
        *TORCHRUN,
        *MPICH,
        *OPEN_MPI,
        *HOROVOD,
        *LIGHTNING,
        *SLURM,
        "SLURM_STEP_NUM_TASKS",
    }:
        monkeypatch.delenv(name, raising=False)
    assert detect_world() == World.single()
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    before = dict(os.environ)
    assert detect_world() == World(1, 2, 1, 2)
    assert dict(os.environ) == before


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_of_one_host(size: int) -> None:
    launchers = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "openmpi": (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        "horovod": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    }
    extra = {"slurm": {"SLURM_STEP_ID": "0"}, "torchrun": {"TORCHELASTIC_RUN_ID": "x"}}
    for (launcher, names), rank, with_local in itertools.product(
        launchers.items(), range(size), (True, False)
    ):
        values = (rank, size, rank, size) if with_local else (rank, size)
        environ = {name: str(value) for name, value in zip(names, values, strict=False)}
        world = detect_world({**environ, **extra.get(launcher, {})})
        assert world == World(rank, size, rank, size)
        assert world.launcher == launcher
        assert world.one_host


@pytest.mark.parametrize("counts", [[1, 1], [2, 2, 2, 1], [1, 3], [4], [2, 1, 1, 5]])
def test_slurm_places_every_task(counts: list[int]) -> None:
    grouped = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    short = ",".join(f"{c}(x{n})" if n > 1 else str(c) for c, n in grouped)
    rank = 0
    for node, count in enumerate(counts):
        for local in range(count):
            environ = {
                "SLURM_STEP_ID": "3",
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(sum(counts)),
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
                "SLURM_STEP_TASKS_PER_NODE": short,
            }
            assert detect_world(environ) == World(rank, sum(counts), local, count, node)
            rank += 1


def test_slurm_step_smaller_than_its_job() -> None:
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    world = detect_world({**step, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert world == World(1, 2, 1, 2)


def test_slurm_tasks_per_node_as_asked_for() -> None:
    environ = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    environ |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS_PER_NODE": "2"}
    assert detect_world(environ) == World(3, 4, 1, 2, 1)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="sbatch"),
        pytest.param({"SLURM_STEP_ID": "4294967291"}, id="batch step"),
        pytest.param({"SLURM_STEP_ID": "4294967290", "PMIX_RANK": "0"}, id="shell from salloc"),
        pytest.param({"SLURM_STEP_ID": "4294967290", "PMI_RANK": "0", "PMI_SIZE": "1"}, id="pmi2"),
    ],
)
def test_slurm_outside_srun_is_one_process(extra: dict[str, str]) -> None:
    assert detect_world({**SLURM_BATCH, **extra}) == World.single()


@pytest.mark.parametrize(
    ("outer", "inner", "launcher"),
    [
        (SLURM, TORCHRUN, "torchrun"),
        (MPICH, TORCHRUN, "torchrun"),
        (SLURM, MPICH, "mpich"),
        (SLURM, OPEN_MPI, "openmpi"),
        (SLURM, HOROVOD, "horovod"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, LIGHTNING, "lightning"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, OPEN_MPI, "openmpi"),
    ],
)
def test_the_innermost_launcher_wins(
    outer: dict[str, str], inner: dict[str, str], launcher: str
) -> None:
    world = detect_world({**outer, **inner})
    assert world == detect_world(inner)
    assert world.launcher == launcher


def test_variables_set_by_hand_under_a_launcher_that_agrees() -> None:
    environ = {**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4"}
    assert detect_world(environ) == World(3, 4, 1, 2, 1)
    # What Lightning leaves in its main process after a fit.
    left = {"LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert detect_world(left) == World.single()
    assert detect_world({**MPICH, **left, "LOCAL_RANK": "2"}) == World(2, 3, 2, 3)


def test_empty_variables_count_as_not_set() -> None:
    assert detect_world(dict.fromkeys([*TORCHRUN, *MPICH, *OPEN_MPI, *SLURM], "")) == World.single()


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
        ({**TORCHRUN, "RANK": "one"}, ["RANK='one'"]),
        ({**TORCHRUN, "RANK": "1.0"}, ["RANK='1.0'"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE='0'"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]),
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK"]),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ["WORLD_SIZE=2", "RANK"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "WORLD_SIZE"]),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "RANK=5"]),
        ({**MPICH, "PMI_RANK": "x"}, ["PMI_RANK='x'"]),
        ({**MPICH, "PMI_RANK": "3"}, ["PMI_RANK=3", "PMI_SIZE=3"]),
        ({**MPICH, "MPI_LOCALRANKID": "7"}, ["MPI_LOCALRANKID=7", "MPI_LOCALNRANKS=3"]),
        ({**MPICH, "MPI_LOCALNRANKS": "4"}, ["MPI_LOCALNRANKS=4", "PMI_SIZE=3"]),
        ({"PMI_RANK": "0"}, ["PMI_RANK=0", "PMI_SIZE"]),
        ({"PMIX_RANK": "0"}, ["PMIX_RANK=0", "WORLD_SIZE"]),
        ({"HOROVOD_RANK": "0"}, ["HOROVOD_RANK=0", "HOROVOD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ["SLURM_PROCID=0", "SLURM_NTASKS"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, ["SLURM_STEP_TASKS_PER_NODE='2x3'"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ["SLURM_STEP_TASKS_PER_NODE", "7"]),
        ({**SLURM, "SLURM_LOCALID": "1"}, ["SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE=1"]),
        ({**LIGHTNING, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "WORLD_SIZE=2"]),
        ({**LIGHTNING, "NODE_RANK": "1"}, ["NODE_RANK=1", "RANK"]),
        ({**MPICH, "RANK": "0", "WORLD_SIZE": "1"}, ["RANK=0", "WORLD_SIZE=1", "mpich"]),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "7"}, ["RANK=0", "slurm", "6 of 7"]),
        ({**OPEN_MPI, **MPICH}, ["OMPI_COMM_WORLD_RANK=3", "PMI_RANK=2"]),
    ],
)
def test_contradictions_name_the_variables(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(HvdError) as caught:
        detect_world(environ)
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "numbers",
    [(1, 1, 0, 1), (-1, 1, 0, 1), (0, 0, 0, 1), (0, 2, 1, 1), (0, 2, 0, 3), (0, 2, 0, 1, -1)],
)
def test_a_world_cannot_contradict_itself(numbers: tuple[int, ...]) -> None:
    with pytest.raises(HvdError, match="contradicts itself"):
        World(*numbers)


def test_worlds_are_equal_whoever_told_them() -> None:
    assert World(0, 1, 0, 1, launcher="mpich") == World.single()
    assert not World(0, 4, 0, 2).one_host
