"""Objects on their way to ranks and back, within one process that plays both."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hvd_strategy.lightning import transfer

NOTEBOOK = """
from dataclasses import dataclass

FACTOR = 2
calls = []

@dataclass
class Options:
    rate: float

class Data:
    def __init__(self, options):
        self.options = options
    def value(self):
        calls.append(1)
        return scaled(self.options.rate)

def scaled(rate):
    return rate * FACTOR

unused = object()
"""


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = transfer.memory_file("test")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(NOTEBOOK, vars(main))
    return main


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, notebook: Any) -> ModuleType:
    """To be entered by `sys.modules["__main__"] = rank`."""
    monkeypatch.setattr(transfer, "_received", set())
    return ModuleType("__main__")


def test_what_the_notebook_defines(
    monkeypatch: pytest.MonkeyPatch, notebook: Any, rank: ModuleType, file: int
) -> None:
    data = notebook.Data(notebook.Options(3.0))
    transfer.dump(data, file)
    monkeypatch.setitem(sys.modules, "__main__", rank)
    # cloudpickle would find the notebook's own classes, since this is one process.
    monkeypatch.setattr("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID", {})
    found = transfer.load(file)
    assert found.value() == 6.0
    assert type(found) is not notebook.Data
    there = vars(rank)
    assert {"Options", "Data", "scaled", "FACTOR", "calls"} <= set(there)
    assert "unused" not in there
    assert there["Data"] is type(found)
    assert there["calls"] == [1]  # one name space for all that was sent
    assert notebook.calls == []
    there["FACTOR"] = 5
    assert found.value() == 15.0
    # And back: the notebook's own class and function, in whose place the rank has a copy.
    data_back = transfer.dump_bytes([found, there["scaled"]], known={})
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    back, function = transfer.load_bytes(data_back, known={})
    assert type(back) is notebook.Data
    assert isinstance(back.options, notebook.Options)
    assert function is notebook.scaled
    assert notebook.FACTOR == 2


def test_tensors_are_sent_once_and_read_on_demand(file: int) -> None:
    base = torch.arange(1000.0)
    tied = nn.Parameter(base[:10])
    transfer.dump({"a": base, "b": base[5:], "p": tied, "q": tied}, file)
    assert os.fstat(file).st_size < 2 * base.nbytes
    found = transfer.load(file)
    assert torch.equal(found["a"], base)
    assert found["p"] is found["q"]
    found["a"][5] = -1
    assert found["b"][0] == -1
    again = transfer.load(file)  # another reader does not see that
    assert again["b"][0] == 5


def test_known_objects_come_back_as_themselves(file: int) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    module(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    known = transfer.module_objects(module)
    transfer.dump([optimizer, module[1], {"mean": module[1].running_mean}], file, known)
    back, norm, buffers = transfer.load(file, known)
    assert back is not optimizer
    assert back.param_groups[0]["params"][0] is module[0].weight
    assert torch.equal(
        back.state[module[0].weight]["momentum_buffer"],
        optimizer.state[module[0].weight]["momentum_buffer"],
    )
    assert norm is module[1]
    assert buffers["mean"] is module[1].running_mean


def test_what_cannot_be_sent_raises(file: int) -> None:
    with pytest.raises(TypeError, match="lock"):
        transfer.dump([threading.Lock()], file)
    with pytest.raises(EOFError):
        transfer.load(transfer_empty := transfer.memory_file("empty"))
    os.close(transfer_empty)
