"""Buckets are the same on all ranks, whatever each of them computes; random cases."""

from __future__ import annotations

import random

import torch
from torch import nn

from hvd_strategy import GradientReducer, open_session
from tests.multi.pool import Ranks

CASES = 40
DTYPES = (torch.float32, torch.float64, torch.float16)


def run_cases(cases: int) -> list[list[list[int]]]:
    """The buckets of each case; checks the gradients, which are 1 on every rank that has one."""
    session = open_session()
    found = []
    for case in range(cases):
        common = random.Random(case)  # the same on all ranks
        own = random.Random(1000 * (session.rank + 1) + case)
        parameters = [
            nn.Parameter(torch.ones(common.choice((0, 1, 7, 40, 300)), dtype=common.choice(DTYPES)))
            for _ in range(common.randint(1, 12))
        ]
        named = [(f"{index:02}", parameter) for index, parameter in enumerate(parameters)]
        own.shuffle(named)
        optimizers = [
            torch.optim.SGD(parameters[start::2], lr=0.1)
            for start in range(min(2, len(parameters)))
        ]
        cap = common.randint(1, 2000) / (1 << 20)
        reducer = GradientReducer(named, optimizers, bucket_cap_mb=cap)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = None
            used = own.sample(parameters, own.randint(1, len(parameters)))
            sum(parameter.double().sum() for parameter in used).backward()
            shares = session.allgather_object([any(p is q for q in used) for p in parameters])
            for index, parameter in enumerate(parameters):
                having = sum(share[index] for share in shares)
                if having:
                    expected = torch.full_like(parameter, having / session.size)
                    torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=0)
                else:
                    assert parameter.grad is None
        found.append(reducer.buckets())
        reducer.close()
    return found


def test_same_buckets_on_all_ranks(ranks: Ranks) -> None:
    first, *others = ranks.run(3, run_cases, CASES)
    assert len(first) == CASES
    for other in others:
        assert other == first
