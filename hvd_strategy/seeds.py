"""Random numbers that differ from rank to rank, and from run to run only when they should."""

from __future__ import annotations

import hashlib
import random
import sys

import torch

from hvd_strategy.session import Session

__all__ = ["rank_seed", "seed_by_rank"]


def rank_seed(base: int, rank: int, position: int = 0) -> int:
    """A seed of 63 bits for one rank, from one that all ranks share.

    Not `base + rank`: runs with neighbouring seeds would share most of their random numbers.

    Args:
        base: The seed of the run.
        rank: The rank.
        position: Where in the run: the number of optimizer steps so far, so that a resumed run does
            not draw what the first one has drawn already.
    """
    digest = hashlib.sha256(f"{base} {rank} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_by_rank(session: Session, position: int = 0) -> int:
    """Seeds torch, numpy (where it is loaded) and `random`, differently on each rank. Collective.

    The seed comes from rank 0's: what `seed_everything` or `torch.manual_seed` was given.

    Args:
        session: The ranks.
        position: see `rank_seed`.

    Returns:
        This rank's seed.
    """
    base = session.broadcast_object(torch.initial_seed())
    seed = rank_seed(base, session.rank, position)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    return seed
