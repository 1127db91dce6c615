"""After every test here, nothing of the engine is left on the machine.

Leaving a block of `start_function` looks for processes and sockets; this adds /dev/shm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.fork_server import ForkServer


@pytest.fixture(autouse=True)
def nothing_in_dev_shm() -> Iterator[None]:
    yield
    left = [name for name in os.listdir("/dev/shm") if "hvd" in name]
    assert not left


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts ranks within milliseconds, where a test does not need a fresh interpreter."""
    with ForkServer() as server:
        yield server
