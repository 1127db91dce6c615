"""What the launchers in test_launchers.py start: one rank of a job.

`job.py RESULTS TASK` runs the function TASK with an open session and writes what it returns, with
what the rank knows about itself, to RESULTS/<rank>.json.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.environ.pop("TEST_WITHOUT_MPI4PY", None):
    sys.modules["mpi4py"] = None  # type: ignore[assignment]

import torch
import torch.distributed as dist

import hvd_strategy
from hvd_strategy.errors import RankFailedError


def greet(session: hvd_strategy.Session) -> dict[str, Any]:
    """Who is here, and a sum that is right only if exactly these ranks took part."""
    values = torch.tensor([float(session.rank + 1), 10.0**session.rank])
    session.allreduce(values)
    return {
        "sum": values.tolist(),
        "marks": session.allgather_object(os.environ.get("TEST_MARK")),
        "group": [dist.get_rank(), dist.get_world_size()] if dist.is_initialized() else None,
        "mpi4py": "mpi4py" in sys.modules and sys.modules["mpi4py"] is not None,
    }


def greet_mpi4py(session: hvd_strategy.Session) -> dict[str, Any]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    total = world.allreduce(session.rank + 1)
    return {**greet(session), "mpi": [world.Get_rank(), world.Get_size(), total]}


def meet_in_users_group(session: hvd_strategy.Session) -> dict[str, Any]:
    """torch.distributed was initialised before by the user; see main()."""
    group = dist.group.WORLD
    session.close()
    session = hvd_strategy.open_session()
    assert dist.group.WORLD is group
    return greet(session)


def fail(session: hvd_strategy.Session) -> dict[str, Any]:
    """Rank 1 ends by an exception that nobody handles; the others hear its text."""
    if session.rank == 1:
        raise ArithmeticError("the fourth bearing is hot")
    started = time.monotonic()
    with contextlib.suppress(RankFailedError):
        session.barrier()
        raise AssertionError("the barrier was passed")
    failure = session.core.failure()
    return {"failure": failure, "seconds": time.monotonic() - started}


TASKS: dict[str, Callable[[hvd_strategy.Session], dict[str, Any]]] = {
    task.__name__: task for task in (greet, greet_mpi4py, meet_in_users_group, fail)
}


def main() -> None:
    results, task = Path(sys.argv[1]), sys.argv[2]
    if task == "meet_in_users_group":
        dist.init_process_group("gloo")
    before = dict(os.environ)
    session = hvd_strategy.open_session()
    world = session.world
    answer = TASKS[task](session)
    answer |= {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "launcher": world.launcher,
        "environment_unchanged": before == dict(os.environ),
    }
    (results / f"{world.rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
