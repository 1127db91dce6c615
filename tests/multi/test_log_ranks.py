"""What the ranks of one job say together, and that Lightning's own output is left alone."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import pytest

from hvd_strategy import open_session
from hvd_strategy.log import FOR_ALL_RANKS, get_logger
from tests.multi.pool import Ranks
from tests.multi.trainer_cases import Regression, loader, make_trainer

NAME = "hvd_strategy.said_by_ranks"


def say(closed: bool) -> None:
    session = open_session()
    logger = get_logger(NAME)
    if closed:
        session.close()
        logger.warning("after the session")
        return
    session.barrier()
    for number in range(20):
        logger.warning("warning %d of all ranks", number)
    logger.warning("warning of rank %d alone", session.rank)
    logger.error("error of all ranks")
    logger.info("information of all ranks")
    logger.warning("warning of the job", extra=FOR_ALL_RANKS)
    if session.rank == 1:
        logger.warning("warning that only one rank has")
    child = os.fork()
    if child == 0:
        # The engine stayed with the parent: what a worker says is never lost.
        logger.warning("warning of a forked worker")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_identical_warnings_come_once_and_none_is_lost(ranks: Ranks) -> None:
    ranks(say, False, fresh=True)
    by_rank = [output.splitlines() for output in ranks.output]
    lines = [line for output in by_rank for line in output]
    for number in range(20):
        said = [line for line in lines if line.endswith(f" warning {number} of all ranks")]
        assert len(said) == 1
        rank = next(rank for rank, output in enumerate(by_rank) if said[0] in output)
        assert said[0] == f"hvd_strategy: [rank {rank}] warning {number} of all ranks"
    for rank, output in enumerate(by_rank):
        assert f"hvd_strategy: [rank {rank}] warning of rank {rank} alone" in output
        assert f"hvd_strategy: [rank {rank}] error of all ranks" in output
        assert f"hvd_strategy: [rank {rank}] warning of a forked worker" in output
    assert [line for line in lines if "information" in line or "of the job" in line] == [
        "hvd_strategy: information of all ranks",
        "hvd_strategy: warning of the job",
    ]
    assert "hvd_strategy: [rank 1] warning that only one rank has" in by_rank[1]


def test_without_a_session_every_rank_speaks(ranks: Ranks) -> None:
    ranks(say, True, fresh=True)
    assert ranks.output == [f"hvd_strategy: [rank {rank}] after the session\n" for rank in (0, 1)]


def logging_state() -> dict[str, Any]:
    """Level, handlers, filters and propagation of every logger that is not ours."""
    known = {**logging.root.manager.loggerDict, "root": logging.root}
    return {
        name: (logger.level, logger.handlers[:], logger.filters[:], logger.propagate)
        for name, logger in known.items()
        if isinstance(logger, logging.Logger) and not name.startswith("hvd_strategy")
    }


def fit_with_lightnings_loggers(tree: str) -> tuple[list[Any], int]:
    trainer_class = importlib.import_module(tree).Trainer
    before = logging_state()
    # The bar, and Lightning's information at the start and at the end.
    bar = importlib.import_module(f"{tree}.callbacks").TQDMProgressBar()
    arguments = {"enable_progress_bar": True, "max_epochs": 1, "callbacks": [bar]}
    if tree == "lightning.pytorch":
        trainer = make_trainer(**arguments)
        trainer.fit(Regression(), loader(8))
    else:
        trainer = trainer_class(
            strategy="hvd", accelerator="cpu", logger=False, enable_checkpointing=False, **arguments
        )
    after = logging_state()
    changed = [name for name in before if before[name] != after[name]]
    from lightning_utilities.core.rank_zero import rank_zero_only

    own = importlib.import_module(f"{tree}.utilities.rank_zero").rank_zero_only
    assert trainer.global_rank == own.rank == rank_zero_only.rank
    return changed, own.rank


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_loggers_and_bar_are_left_alone(ranks: Ranks, tree: str) -> None:
    assert ranks(fit_with_lightnings_loggers, tree) == [([], 0), ([], 1)]
    if tree == "lightning.pytorch":
        assert "Epoch 0: 100%" in ranks.output[0]
        assert "Epoch" not in ranks.output[1]
        # Lightning's own line, once, as it is with DDP.
        assert [output.count("`Trainer.fit` stopped") for output in ranks.output] == [1, 0]
        assert "hvd_strategy" not in "".join(ranks.output)


def bad_level() -> list[str]:
    os.environ["HVD_LOG_LEVEL"] = "chatty"
    errors = []
    for construct in (lambda: make_trainer("hvd"), open_session):
        with pytest.raises(ValueError, match="HVD_LOG_LEVEL") as caught:
            construct()
        errors.append(str(caught.value))
    return errors


def test_a_wrong_level_is_an_error_at_construction(ranks: Ranks) -> None:
    for error in ranks(bad_level)[0]:
        assert error == (
            "Environment variable HVD_LOG_LEVEL='chatty' is not accepted: it takes "
            '"debug", "info", "warning", "error", "critical".'
        )
