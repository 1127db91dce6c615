"""The fixture `ranks`, through which a test runs functions in several processes.

    def test_sum(ranks):                       # two ranks
        assert ranks(add_ranks, 1) == [3, 3]   # add_ranks: a function at module level

    @pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True)
    def test_sum_of_many(ranks): ...

See `tests/multi/pool.py` for what a function finds and what happens when it fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multi.pool import Ranks, WorkerPool

_pool = WorkerPool()


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    yield _pool
    problems = _pool.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, worker_pool: WorkerPool) -> Ranks:
    return Ranks(worker_pool, getattr(request, "param", 2))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The last look, after all fixtures: also when the run was interrupted."""
    if problems := _pool.close():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("\n".join(["worker pool:", *problems]), red=True)
