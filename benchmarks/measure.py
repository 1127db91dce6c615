"""What the benchmarks share: rank processes, interleaved repetitions, tables, figures.

A benchmark `benchmarks.<name>` compares sides (Gloo, DDP, ours) in one run: the repetitions of the
sides alternate in the same processes, so that whatever the machine does besides hits all of them,
and medians and ratios are printed. `run_ranks` starts the processes, `interleave` runs the sides,
`Report` prints. `python -m benchmarks.measure` is the entry point of a rank process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import mmap
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600.0  # seconds for the rank processes of one call of `run_ranks`


def parse_arguments(
    description: str, *, mpi: bool = False, models: Sequence[str] = ()
) -> argparse.Namespace:
    """The command line that all benchmarks have; with `--model` where there are several."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run at all?")
    if mpi:
        parser.add_argument("--no-mpi", action="store_true", help="leave MPICH out")
    if models:
        parser.add_argument("--model", choices=models, help="measure this one only")
    return parser.parse_args()


# ---- rank processes ------------------------------------------------------------------------------


def run_ranks(
    function: Callable[[Rank, dict[str, Any]], Any],
    size: int,
    settings: Mapping[str, Any],
    *,
    mpi: bool = False,
) -> list[Any]:
    """Runs `function(rank, settings)` in `size` fresh processes of one thread; results by rank.

    Settings and results travel as JSON. With `mpi` the processes are started by mpiexec.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # As under torchrun the store is the launcher's, on a port that the system chooses.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    # A launcher around the benchmark must not be taken for the one of its ranks.
    launchers = ("SLURM_", "PMI", "OMPI_", "MPI_", "TORCHELASTIC_", "RANK", "LOCAL_RANK")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(launchers)},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": f"benchmark-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as directory:
        request = {
            "module": _module_name(function),
            "function": function.__qualname__,
            "settings": dict(settings),
            "size": size,
        }
        Path(directory, "request.json").write_text(json.dumps(request))
        command = [sys.executable, "-m", "benchmarks.measure", directory]
        if mpi:
            commands = [[find_mpiexec() or "mpiexec", "-n", str(size), *command]]
            environments = [environment]
        else:
            commands = [command] * size
            environments = [
                {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)
            ]
        _run_to_end(commands, environments, Path(directory))
        return [
            json.loads(Path(directory, f"result.{rank}.json").read_text()) for rank in range(size)
        ]


def _module_name(function: Callable[..., Any]) -> str:
    """The name under which other processes can import a function's module."""
    # `python -m benchmarks.x` calls the module __main__, and keeps its name in the spec.
    spec = sys.modules[function.__module__].__spec__
    return function.__module__ if spec is None else spec.name


def find_mpiexec() -> str | None:
    """The mpiexec next to this interpreter or on the path, where mpi4py is installed as well."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.is_file() else shutil.which("mpiexec")


def _run_to_end(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], directory: Path
) -> None:
    outputs = [directory / f"output.{index}" for index in range(len(commands))]
    processes = []
    try:
        for command, environment, output in zip(commands, environments, outputs, strict=True):
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        deadline = time.monotonic() + TIMEOUT
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.returncode for process in processes):
                break
            time.sleep(0.05)
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            # mpiexec ends its ranks when it is asked to, and cannot when it is killed.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
    if any(statuses) or None in statuses:
        for output in outputs:
            print(output.read_text(errors="replace")[-8000:], file=sys.stderr)
        raise SystemExit(f"rank processes ended with {statuses} (None: killed)")


class Rank:
    """This process's place among the ranks of a benchmark, with torch.distributed on Gloo."""

    def __init__(self, size: int, directory: Path) -> None:
        # The launcher tells the rank by its own names where it is mpiexec.
        self.index = int(os.environ.get("RANK") or os.environ["PMI_RANK"])
        self.size = size
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(self.index)
        self._barrier = _SpinBarrier(directory / "barrier", self.index, size)

    def join(self) -> None:
        """Makes torch.distributed's default group."""
        from torch import distributed

        distributed.init_process_group("gloo")

    def require_same(self, tensors: Iterable[Tensor | None], what: str) -> None:
        """Raises unless tensors are bit-equal on all ranks: was the work that is timed done?"""
        from torch import distributed

        digest = hashlib.sha256()
        for tensor in tensors:
            if tensor is None:
                raise AssertionError(f"{what}: a tensor is missing")
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        digests = [""] * self.size
        distributed.all_gather_object(digests, digest.hexdigest())
        if len(set(digests)) != 1:
            raise AssertionError(f"{what} differ between the ranks")

    def barrier(self) -> None:
        """Waits for the other ranks; all leave within microseconds, with their cores awake."""
        self._barrier()


class _SpinBarrier:
    """A counter of each rank in a shared page. It needs no engine that is being measured."""

    _WORDS = 16  # 8-byte words from one counter to the next: no cache line is shared

    def __init__(self, path: Path, rank: int, size: int) -> None:
        length = size * self._WORDS * 8
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, length)
        self._words = memoryview(mmap.mmap(descriptor, length)).cast("q")
        os.close(descriptor)
        self._own = rank * self._WORDS
        self._others = [other * self._WORDS for other in range(size) if other != rank]
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        self._words[self._own] = self._count
        for other in self._others:
            while self._words[other] < self._count:
                os.sched_yield()


def _rank_main(directory: Path) -> None:
    # PR_SET_PDEATHSIG: no rank outlives a benchmark that was killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    import torch

    torch.set_num_threads(1)
    request = json.loads((directory / "request.json").read_text())
    rank = Rank(request["size"], directory)
    function = getattr(importlib.import_module(request["module"]), request["function"])
    result = json.dumps(function(rank, request["settings"]))
    (directory / f"result.{rank.index}.json").write_text(result)
    # Only for tidiness: results of a rank whose peer is already gone count all the same.
    rank.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---- repetitions ---------------------------------------------------------------------------------


def interleave(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm_up: int = 2,
    before: Callable[[], None] | None = None,
) -> dict[str, list[T]]:
    """Runs the sides in turn (A B C A B C ...); returns what each returned, round by round.

    Args:
        rounds: how often each side is run, not counting `warm_up` rounds before.
        before: called before every side, a barrier of the ranks for example.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()
    for _ in range(warm_up + rounds):
        for name, side in sides.items():
            if before is not None:
                before()
            results[name].append(side())
    return {name: values[warm_up:] for name, values in results.items()}


def timed(function: Callable[[], object], inner: int = 1) -> Callable[[], float]:
    """A side that runs `function` `inner` times and returns seconds per run."""

    def side() -> float:
        start = time.perf_counter()
        for _ in range(inner):
            function()
        return (time.perf_counter() - start) / inner

    return side


def slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """Median over the rounds of the slowest rank's value in each round."""
    rounds: list[float] = [max(values) for values in zip(*by_rank, strict=True)]
    return statistics.median(rounds)


# ---- reports -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A measured value and the limit it is held against."""

    name: str
    value: float
    limit: float
    unit: str = "x"
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        relation = "<=" if self.at_most else ">="
        verdict = "reached" if self.reached else "NOT reached"
        digits = 3 if self.unit == "x" and abs(self.limit - 1) < 0.1 else 2
        value = f"{self.value:.{digits}f} {self.unit}"
        return f"{self.name}: {value} ({relation} {self.limit:g} {self.unit}: {verdict})"


def _cpu_times() -> tuple[float, float]:
    """CPU seconds so far: of the whole machine, and of this process and its ended children."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(ticks) for ticks in fields]
    idle = ticks[3] + ticks[4]  # idle, iowait; steal counts as busy: it is taken from us as well
    busy = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy, sum(usage.ru_utime + usage.ru_stime for usage in usages)


class _Disturbance:
    """How much of the machine others use from the construction on.

    Ratios of interleaved medians bear noise that hits all sides alike. A rank that has to share its
    core does not: engines that wait in different ways suffer differently.
    """

    TOLERABLE = 0.05

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._before = _cpu_times()

    def share(self) -> float:
        """CPU time that others used, in terms of all there was."""
        busy, own = (now - then for now, then in zip(_cpu_times(), self._before, strict=True))
        available = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        return max(0.0, busy - own) / available


@dataclass
class Report:
    """What one benchmark prints. Made by `main` before anything is measured."""

    benchmark: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _others: _Disturbance = field(default_factory=_Disturbance, repr=False)

    def print(
        self,
        *,
        as_json: bool,
        columns: Mapping[str, Callable[[Any], str]],
        as_markdown: bool = False,
    ) -> None:
        """Prints everything as JSON, or the rows as a table of `columns` (name -> format)."""
        others = self._others.share()
        if as_json:
            document = {
                "benchmark": self.benchmark,
                "machine": machine(),
                "cpu_used_by_others": others,
                "settings": self.settings,
                "rows": self.rows,
                "figures": [
                    {**asdict(figure), "reached": figure.reached} for figure in self.figures
                ],
                "notes": self.notes,
            }
            print(json.dumps(document, indent=2))
            return
        described = ", ".join(f"{name} {value}" for name, value in machine().items())
        print(f"benchmarks.{self.benchmark}: {described}")
        print(", ".join(f"{name} {value}" for name, value in self.settings.items()))
        table = [list(columns)]
        table += [
            [
                form(row[name]) if row.get(name) is not None else "-"
                for name, form in columns.items()
            ]
            for row in self.rows
        ]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(columns))]
        if as_markdown:
            table.insert(1, ["---"] * len(columns))
        for cells in table:
            first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            if as_markdown:
                print(f"| {' | '.join(cells)} |")
            else:
                print("  ".join([first.strip().ljust(widths[0]), *rest]))
        for line in [*self.figures, *self.notes]:
            print(line)
        print(f"others used {others:.0%} of the machine's CPU time during this run", end="")
        print(": too much, measure again" if others > _Disturbance.TOLERABLE else "")
        print()


def machine() -> dict[str, str]:
    """What the figures depend on; the load tells whether others were at work as well."""
    import torch

    model = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def show_seconds(value: float) -> str:
    """Seconds in the unit that suits them."""
    if value < 1e-3:
        return f"{value * 1e6:.2f} us"
    return f"{value * 1e3:.2f} ms"


def show_ratio(value: float) -> str:
    return f"{value:.2f}x"


def show_bytes(value: int) -> str:
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if value >= factor:
            return f"{value // factor} {unit}"
    return f"{value} B"


if __name__ == "__main__":
    # The module that the benchmarks import, so that there is one class `Rank`.
    importlib.import_module("benchmarks.measure")._rank_main(Path(sys.argv[1]))
