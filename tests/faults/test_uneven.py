"""A rank that has run out of batches, which others wait for in torch.distributed."""

from __future__ import annotations

from typing import Any

from tests.faults.fork_server import ForkServer


def meet_in_gloo() -> None:
    import os

    from tests.multi.test_trainer_uneven import Meeting
    from tests.multi.uneven_cases import loader_of, run

    rank = int(os.environ["RANK"])
    model: Any = Meeting()
    model.kind = "torch"
    run(model, loader_of("map", rank, 4 - 2 * rank))


def test_waiting_in_torch_distributed_for_an_idle_rank(server: ForkServer) -> None:
    env = {"HVD_ABORT_GRACE_SECONDS": "3"}
    with server.start_function(meet_in_gloo, ranks=2, env=env) as ranks:
        said = "all_reduce: a collective operation was called in training_step on rank 0 while rank"
        told = f"{said} 1 had run out of batches"
        raised = ranks.wait_for(told, 1)
        assert 'uneven_inputs="stop"' in raised.text
        ranks.wait_for(f"HvdError: Rank 0: torch.distributed.distributed_c10d.{told}", 0)
        assert all(ranks.wait())
