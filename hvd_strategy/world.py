"""Who this process is within its job: rank, size, and its place on the host.

`detect_world` reads what the launcher left in the environment. It is a pure function of a mapping:
it touches neither sockets nor `os.environ`, needs only the standard library, and never imports
mpi4py (an installed mpi4py without an MPI library is a common accident).

The innermost launcher wins, because it started this very process: torchrun inside `srun` gives
torchrun's ranks. In order:

    torchrun, or set by hand   RANK WORLD_SIZE (LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK)
    Horovod                    HOROVOD_RANK HOROVOD_SIZE (HOROVOD_LOCAL_RANK ..._LOCAL_SIZE ...)
    Lightning's own processes  LOCAL_RANK NODE_RANK WORLD_SIZE MASTER_PORT, without RANK
    Open MPI                   OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE (..._LOCAL_RANK ...)
    MPICH, Intel MPI, PALS     PMI_RANK PMI_SIZE (MPI_LOCALRANKID MPI_LOCALNRANKS, PMI_LOCAL_...)
    SLURM, under srun          SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NODEID SLURM_STEP_...
    any PMIx launcher          PMIX_RANK, with the size from WORLD_SIZE
    none of them               a world of one

Variables in parentheses may be missing; without them all ranks are taken to be on one host. What is
malformed or contradicts itself is an `HvdError` that names the variable and its value: a wrong
guess would train several models side by side without a word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvd_strategy.arguments import require, require_kind
from hvd_strategy.errors import HvdError

__all__ = ["World", "detect_world"]


@dataclass(frozen=True)
class World:
    """The place of one process in its job.

    Worlds are equal when the numbers are; which launcher told them does not matter.

    Attributes:
        rank: 0 <= rank < size.
        size: Number of processes of the job.
        local_rank: Rank among the processes of this host.
        local_size: Number of the job's processes on this host.
        node_rank: Number of this host among the job's hosts.
        launcher: Who said so: "torchrun", "env" (RANK and WORLD_SIZE set by hand), "horovod",
            "lightning", "openmpi", "mpich", "slurm", "pmix", "torch" (read from torch.distributed's
            default group), "single" (nobody did), "explicit" (made by the caller).

    Raises:
        HvdError: The numbers contradict each other.
        TypeError: They are no numbers.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int = 0
    launcher: str = field(default="explicit", compare=False)

    def __post_init__(self) -> None:
        for name in ("rank", "size", "local_rank", "local_size", "node_rank"):
            require_kind(int, name, getattr(self, name), "a whole number")
        require_kind(str, "launcher", self.launcher, "a name")
        fits = (
            0 <= self.rank < self.size
            and 0 <= self.local_rank < self.local_size <= self.size
            and self.node_rank >= 0
        )
        if not fits:
            raise HvdError(
                f"{self} contradicts itself: it takes 0 <= rank < size, "
                "0 <= local_rank < local_size <= size and node_rank >= 0."
            )

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host, as far as the launcher tells."""
        return self.local_size == self.size

    @classmethod
    def single(cls) -> World:
        """A world of one."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, launcher="single")


def detect_world(environ: Mapping[str, str] | None = None) -> World:
    """Reads the launcher's variables; see the module's description for which and in what order.

    Args:
        environ: The environment; `os.environ` when not given. Never changed.

    Returns:
        This process's place; a world of one where no launcher is recognised. Jobs over several
        hosts are described like any other: whoever cannot serve them says so.

    Raises:
        HvdError: A variable is malformed, or variables contradict each other.
        TypeError: `environ` is no mapping of text to text.
    """
    require(
        environ is None or isinstance(environ, Mapping),
        "environ",
        environ,
        "a mapping of names to text, as os.environ is",
    )
    variables = _Variables(os.environ if environ is None else environ)
    for source in _SOURCES:
        found = source(variables)
        if found is not None:
            return found
    _refuse_leftovers(variables)
    return World.single()


class _Variables:
    """Typed access to the environment; an empty variable counts as not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def has(self, *names: str) -> bool:
        return all(self.text(name) for name in names)

    def text(self, name: str) -> str | None:
        value = self._environ.get(name)
        require(
            value is None or isinstance(value, str), f"environ[{name!r}]", value, "text, or nothing"
        )
        return (value or "").strip() or None

    def number(self, name: str, least: int = 0) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise HvdError(
                f"Environment variable {name}={text!r} must be a whole number of at least {least}. "
                "Correct it, or unset it if it is left over from another job."
            )
        return int(text)

    def first(self, *names: str, least: int = 0) -> tuple[str, int] | None:
        for name in names:
            value = self.number(name, least)
            if value is not None:
                return name, value
        return None

    def required(self, name: str, given: str, least: int = 0) -> tuple[str, int]:
        """The variable `name`, without which `given`, which is set, says too little."""
        value = self.number(name, least)
        if value is None:
            raise HvdError(
                f"Environment variable {given}={self.text(given)} is set, but {name} is not: set "
                f"{name} as well, or unset {given} if it is left over from another job."
            )
        return name, value

    def show(self, *names: str) -> str:
        return ", ".join(f"{name}={self.text(name) or 'not set'}" for name in names)


# (name of the variable, its value); None where the launcher does not tell.
_Told = tuple[str, int] | None


def _world(
    launcher: str,
    rank: tuple[str, int],
    size: tuple[str, int],
    local_rank: _Told,
    local_size: _Told,
    node_rank: _Told,
) -> World:
    """Fills in what the launcher does not tell and checks that the numbers fit together."""
    _check_below(rank, size)
    if local_size is None:
        local_size = _guess_local_size(rank, size, local_rank, node_rank)
    if local_rank is None:
        # Launchers place ranks in blocks unless told otherwise, and then they tell LOCAL_RANK.
        local_rank = (rank[0], rank[1] % local_size[1])
    _check_below(local_rank, local_size)
    if local_size[1] > size[1]:
        raise HvdError(
            f"{local_size[0]}={local_size[1]} is larger than {size[0]}={size[1]}: a host cannot "
            "have more ranks than the job. Unset whichever is left over from another job."
        )
    node = node_rank[1] if node_rank is not None else rank[1] // local_size[1]
    return World(rank[1], size[1], local_rank[1], local_size[1], node, launcher)


def _check_below(rank: tuple[str, int], size: tuple[str, int]) -> None:
    if rank[1] >= size[1]:
        raise HvdError(
            f"{rank[0]}={rank[1]} does not fit {size[0]}={size[1]}: it must be below it. "
            "Correct them, or unset whichever is left over from another job."
        )


def _guess_local_size(
    rank: tuple[str, int], size: tuple[str, int], local_rank: _Told, node_rank: _Told
) -> tuple[str, int]:
    if local_rank is None or local_rank[1] == rank[1]:
        return size
    before = rank[1] - local_rank[1]  # ranks on the hosts before this one
    if node_rank is not None and node_rank[1] > 0 and before > 0 and before % node_rank[1] == 0:
        return (node_rank[0], before // node_rank[1])
    raise HvdError(
        f"{local_rank[0]}={local_rank[1]} differs from {rank[0]}={rank[1]}, so this job is spread "
        "over several hosts, but nothing tells how many ranks this host has. Set LOCAL_WORLD_SIZE."
    )


def _from_torchrun(variables: _Variables) -> World | None:
    if not variables.has("RANK", "WORLD_SIZE"):
        return None
    rank = variables.required("RANK", "WORLD_SIZE")
    size = variables.required("WORLD_SIZE", "RANK", least=1)
    elastic = variables.has("TORCHELASTIC_RUN_ID")
    local_rank = variables.first("LOCAL_RANK")
    local_size = variables.first("LOCAL_WORLD_SIZE", least=1)
    node_rank = variables.first("GROUP_RANK", "NODE_RANK")
    if not elastic:
        # Variables set by hand, or exported in some shell long ago: an MPI or SLURM launcher that
        # says something else means that one of the two is not about this job.
        for source in (_from_open_mpi, _from_mpich, _from_slurm):
            other = source(variables)
            if other is None or other.size == 1:
                continue
            if (other.rank, other.size) != (rank[1], size[1]):
                raise HvdError(
                    f"RANK={rank[1]} and WORLD_SIZE={size[1]} contradict what {other.launcher} "
                    f"tells: rank {other.rank} of {other.size}. Unset RANK and WORLD_SIZE unless "
                    "they are meant for this job."
                )
            if local_rank is None and local_size is None:
                local_rank = (f"local rank of {other.launcher}", other.local_rank)
                local_size = (f"local size of {other.launcher}", other.local_size)
            break
    return _world("torchrun" if elastic else "env", rank, size, local_rank, local_size, node_rank)


def _from_horovod(variables: _Variables) -> World | None:
    if not variables.has("HOROVOD_RANK"):
        return None
    return _pair(
        variables,
        "horovod",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        variables.first("HOROVOD_LOCAL_RANK"),
        variables.first("HOROVOD_LOCAL_SIZE", least=1),
        variables.first("HOROVOD_CROSS_RANK"),
    )


def _from_lightning(variables: _Variables) -> World | None:
    if variables.has("RANK") or not variables.has(
        "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT"
    ):
        return None
    rank = variables.required("LOCAL_RANK", "WORLD_SIZE")
    size = variables.required("WORLD_SIZE", "LOCAL_RANK", least=1)
    if variables.number("NODE_RANK"):
        raise HvdError(
            f"NODE_RANK={variables.text('NODE_RANK')} is set without RANK: on another host than "
            "the first, the rank cannot be told from "
            f"{variables.show('LOCAL_RANK', 'WORLD_SIZE')}. Set RANK as well, or start the job "
            "with torchrun."
        )
    return _world("lightning", rank, size, rank, size, ("NODE_RANK", 0))


def _from_open_mpi(variables: _Variables) -> World | None:
    if not variables.has("OMPI_COMM_WORLD_RANK"):
        return None
    # OMPI_COMM_WORLD_NODE_RANK is no number of a host: it counts the processes of one.
    world = _pair(
        variables,
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        variables.first("OMPI_COMM_WORLD_LOCAL_RANK"),
        variables.first("OMPI_COMM_WORLD_LOCAL_SIZE", least=1),
        None,
    )
    other = _from_mpich(variables)
    if (
        other is not None
        and min(other.size, world.size) > 1
        and (other.rank, other.size) != (world.rank, world.size)
    ):
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE")
        raise HvdError(
            f"Two MPI launchers tell different ranks: {variables.show(*names)}. Start the job "
            "with one of them, or unset the variables of the other."
        )
    return world


def _from_mpich(variables: _Variables) -> World | None:
    if not variables.has("PMI_RANK"):
        return None
    return _pair(
        variables,
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        variables.first("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        variables.first("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", least=1),
        None,
    )


def _from_slurm(variables: _Variables) -> World | None:
    """Tasks of an `srun` step.

    The batch script itself, and a shell from `salloc`, carry SLURM_PROCID=0 and the SLURM_NTASKS
    that the job asked for as well, but are one process: there is no task 1 that would ever come.
    Only a step has a step id; SLURM gives its special steps ids from 0xfffffff0 up.
    """
    step = variables.first("SLURM_STEP_ID", "SLURM_STEPID")
    if not variables.has("SLURM_PROCID") or step is None:
        return None
    if step[1] >= 0xFFFFFFF0:
        return None
    rank = variables.required("SLURM_PROCID", "SLURM_STEP_ID")
    # The step may have fewer tasks than the job.
    size = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    if size is None:
        size = variables.required("SLURM_NTASKS", "SLURM_PROCID", least=1)
    node = variables.first("SLURM_NODEID")
    local_rank = variables.first("SLURM_LOCALID")
    return _world(
        "slurm", rank, size, local_rank, _slurm_local_size(variables, size[1], node), node
    )


def _slurm_local_size(variables: _Variables, size: int, node: _Told) -> _Told:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        text = variables.text(name)
        if text is None:
            continue
        counts = _task_counts(name, text)
        index = node[1] if node is not None else 0
        if name == "SLURM_NTASKS_PER_NODE" and len(counts) == 1:
            # What was asked for: an upper limit when the step is smaller than the job.
            if counts[0] <= size:
                return (name, counts[0])
        elif sum(counts) == size and index < len(counts):
            return (name, counts[index])
        elif name == "SLURM_STEP_TASKS_PER_NODE":
            raise HvdError(
                f"{name}={text!r} does not fit {size} tasks and SLURM_NODEID={index}. Unset "
                "whichever is left over from another job."
            )
    return None


def _task_counts(name: str, text: str) -> list[int]:
    """Expands SLURM's short form: "2(x3),1" is three hosts with two tasks and one with one."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,6})\))?\s*", part)
        if match is None or int(match[1]) == 0:
            raise HvdError(
                f'Environment variable {name}={text!r} must look like "2", "2(x3)" or "2(x3),1".'
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _from_pmix(variables: _Variables) -> World | None:
    # Under SLURM its own variables have decided already; a shell from salloc has PMIX_RANK too.
    if not variables.has("PMIX_RANK") or variables.has("SLURM_JOB_ID"):
        return None
    # PMIx hands the size out through its library only.
    return _pair(variables, "pmix", "PMIX_RANK", "WORLD_SIZE", None, None, None)


def _pair(
    variables: _Variables,
    launcher: str,
    rank_name: str,
    size_name: str,
    local_rank: _Told,
    local_size: _Told,
    node_rank: _Told,
) -> World:
    rank = variables.required(rank_name, size_name)
    size = variables.required(size_name, rank_name, least=1)
    return _world(launcher, rank, size, local_rank, local_size, node_rank)


def _refuse_leftovers(variables: _Variables) -> None:
    """A world of one must not be the answer to half a description of a larger one."""
    if variables.has("RANK"):
        variables.required("WORLD_SIZE", "RANK", least=1)
    size = variables.number("WORLD_SIZE", least=1)
    if size is not None and size > 1:
        raise HvdError(
            f"Environment variable WORLD_SIZE={size} is set, but RANK is not: set RANK to this "
            "process's number from 0 on, or unset WORLD_SIZE."
        )
    # LOCAL_RANK=0 alone is what Lightning leaves behind in its main process.
    if size is None and variables.number("LOCAL_RANK"):
        variables.required("WORLD_SIZE", "LOCAL_RANK", least=1)


_SOURCES: tuple[Callable[[_Variables], World | None], ...] = (
    _from_torchrun,
    _from_horovod,
    _from_lightning,
    _from_open_mpi,
    _from_mpich,
    _from_slurm,
    _from_pmix,
)
