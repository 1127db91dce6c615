"""The module behind `module.named_parameters()`, and everything else that has none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
from torch import nn

from hvd_strategy.module_watch import module_behind

MODEL = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


class Renaming(nn.Linear):
    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, object]]:
        for name, parameter in super().named_parameters():
            yield f"renamed.{name}", parameter


def test_of_named_parameters() -> None:
    assert module_behind(MODEL.named_parameters()) is MODEL
    assert module_behind(MODEL[0].named_parameters(remove_duplicate=False)) is MODEL[0]
    begun = MODEL.named_parameters()
    next(begun)
    assert module_behind(begun) is MODEL


def ended() -> Iterator[object]:
    generator = MODEL.named_parameters()
    list(generator)
    return generator


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(list(MODEL.named_parameters()), id="a list"),
        pytest.param(next(MODEL.named_parameters()), id="a pair"),
        pytest.param(MODEL.named_parameters("net"), id="other names"),
        pytest.param(MODEL.named_parameters(recurse=False), id="a part"),
        pytest.param(MODEL.named_buffers(), id="buffers"),
        pytest.param(MODEL.parameters(), id="no names"),
        pytest.param(((n, p) for n, p in MODEL.named_parameters()), id="a choice"),
        pytest.param(chain(MODEL.named_parameters()), id="several"),
        pytest.param(Renaming(2, 2).named_parameters(), id="a function of its own"),
        pytest.param(ended(), id="a generator that has ended"),
        pytest.param(None, id="nothing"),
    ],
)
def test_of_something_else(given: object) -> None:
    assert module_behind(given) is None
