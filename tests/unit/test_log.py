"""The package's logger: who says what, and that the program's own logging is left alone."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from hvd_strategy import log
from hvd_strategy.log import FOR_ALL_RANKS, RankFilter, get_logger

NAME = "hvd_strategy.said_in_tests"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither rank nor session known; loggers as in a program that configures nothing."""
    for variable in ("HVD_LOG_LEVEL", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(log, "_speaker", log._Speaker())
    loggers = [logging.getLogger(name) for name in ("hvd_strategy", NAME, "py.warnings")]
    before = [(logger.level, logger.handlers[:], logger.filters[:]) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
        logger.handlers.clear()
        logger.filters.clear()
    root = logging.getLogger()
    root_before = root.level, root.handlers[:]
    root.handlers.clear()
    root.setLevel(logging.WARNING)
    # pytest gives the root a handler between this and the test: here it finds a deaf ear.
    monkeypatch.setattr(root, "addHandler", lambda handler: None)
    yield
    logging.captureWarnings(False)
    root.level, root.handlers[:] = root_before
    for logger, (level, handlers, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.filters[:] = filters


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What has been written to stderr, by lines, since the last call."""
    return lambda: capsys.readouterr().err.splitlines()


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter, where nothing has touched logging or warnings."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )


def test_rank_zero_speaks_for_all(said: Callable[[], list[str]]) -> None:
    logger = get_logger(NAME)
    log.set_rank(0, 3)
    logger.info("reads %d files", 4)
    logger.warning("slow disk", extra=FOR_ALL_RANKS)
    assert said() == ["hvd_strategy: reads 4 files", "hvd_strategy: slow disk"]
    log.set_rank(1, 3)
    logger.info("reads %d files", 4)
    logger.warning("slow disk", extra=FOR_ALL_RANKS)
    assert said() == []


@pytest.mark.parametrize("rank", [0, 2])
def test_what_concerns_one_rank_carries_it(said: Callable[[], list[str]], rank: int) -> None:
    logger = get_logger(NAME)
    log.set_rank(rank, 3)
    logger.warning("has no data: %s", "100 %")
    logger.error("failed")
    assert said() == [
        f"hvd_strategy: [rank {rank}] has no data: 100 %",
        f"hvd_strategy: [rank {rank}] failed",
    ]


def test_a_world_of_one_needs_no_prefix(said: Callable[[], list[str]]) -> None:
    logger = get_logger(NAME)
    logger.warning("before anybody knows")
    log.set_rank(0, 1)
    logger.warning("afterwards")
    assert said() == ["hvd_strategy: before anybody knows", "hvd_strategy: afterwards"]


def test_before_the_session_the_launcher_tells_the_rank(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    logger = get_logger(NAME)
    logger.info("information")
    logger.warning("warning")
    monkeypatch.setenv("RANK", "4")  # contradicts itself; that is another one's error to raise
    logger.warning("other warning")
    assert said() == ["hvd_strategy: [rank 2] warning", "hvd_strategy: other warning"]


def test_a_warning_comes_once_and_an_error_always(said: Callable[[], list[str]]) -> None:
    logger = get_logger(NAME)
    log.set_rank(1, 2)
    for item in ("a", "a", "b"):
        logger.warning("cannot read %s", item)
        logger.error("lost %s", item)
    assert said() == [
        "hvd_strategy: [rank 1] cannot read a",
        "hvd_strategy: [rank 1] lost a",
        "hvd_strategy: [rank 1] lost a",
        "hvd_strategy: [rank 1] cannot read b",
        "hvd_strategy: [rank 1] lost b",
    ]


def test_what_another_rank_has_warned_of_is_not_repeated(said: Callable[[], list[str]]) -> None:
    logger = get_logger(NAME)
    table: set[int] = set()

    def first_to_say(digest: int) -> bool:
        return digest not in table and not table.add(digest)

    for rank in (1, 0, 2):
        log._speaker = log._Speaker()
        log.set_rank(rank, 3)
        log.set_session(first_to_say)
        logger.warning("on all")
        logger.warning("only on %d", rank)
    assert said() == [
        "hvd_strategy: [rank 1] on all",
        "hvd_strategy: [rank 1] only on 1",
        "hvd_strategy: [rank 0] only on 0",
        "hvd_strategy: [rank 2] only on 2",
    ]
    # What was said in one session may be news in the next.
    log.set_session(None)
    log.set_session(lambda digest: True)
    logger.warning("on all")
    logger.warning("on all")
    assert said() == ["hvd_strategy: [rank 2] on all"]


def test_a_rank_that_is_silenced_leaves_a_warning_to_the_others(
    said: Callable[[], list[str]],
) -> None:
    logger = get_logger(NAME)
    asked: list[int] = []
    log.set_rank(1, 2)
    log.set_session(lambda digest: not asked.append(digest))
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("hvd_strategy").addHandler(handler)
    for level, claims in ((logging.ERROR, 0), (logging.WARNING, 1)):
        handler.setLevel(level)
        logger.warning("on all")
        assert len(asked) == claims
        log._speaker.warned.clear()
    assert stream.getvalue() == "[rank 1] on all\n"
    logging.getLogger("hvd_strategy").removeHandler(handler)
    logger.warning("on all again")
    assert len(asked) == 2
    assert said() == ["hvd_strategy: [rank 1] on all again"]


def test_another_handler_silences_ours(said: Callable[[], list[str]]) -> None:
    logger = get_logger(NAME)
    log.set_rank(1, 2)
    for owner in (logging.getLogger(), logging.getLogger("hvd_strategy")):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(hvd_rank)d %(message)s"))
        owner.handlers.append(handler)
        logger.error("failed: %s", "x")
        owner.handlers.remove(handler)
        assert stream.getvalue() == f"ERROR {NAME} 1 [rank 1] failed: x\n"
    assert said() == []
    # A NullHandler shows nothing, so ours does.
    logging.getLogger().handlers.append(logging.NullHandler())
    logger.error("failed")
    assert said() == ["hvd_strategy: [rank 1] failed"]


def test_default_level_follows_a_configured_root(said: Callable[[], list[str]]) -> None:
    logger = get_logger(NAME)
    logger.debug("detail")
    logger.info("information")
    assert said() == ["hvd_strategy: information"]
    stream = io.StringIO()
    root = logging.getLogger()
    root.handlers.append(logging.StreamHandler(stream))
    for level in (logging.WARNING, logging.INFO):
        root.setLevel(level)
        logger.info("at %d", level)
    assert stream.getvalue() == f"at {logging.INFO}\n"
    assert said() == []


def test_level_of_the_environment(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = get_logger(NAME)
    monkeypatch.setenv("HVD_LOG_LEVEL", "Error")
    log.set_level()
    logger.warning("warning")
    monkeypatch.setenv("HVD_LOG_LEVEL", "debug")
    log.set_level()
    log.set_rank(1, 2)
    logger.debug("detail")  # of every rank
    assert said() == ["hvd_strategy: [rank 1] detail"]
    monkeypatch.setenv("HVD_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="HVD_LOG_LEVEL='loud' is not accepted: it takes \"debug"):
        log.set_level()


def test_a_level_set_by_the_program_beats_the_environment(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("hvd_strategy").setLevel(logging.ERROR)
    logger = get_logger(NAME)
    monkeypatch.setenv("HVD_LOG_LEVEL", "debug")
    log.set_level()
    logger.warning("warning")
    assert said() == []
    assert logging.getLogger("hvd_strategy").level == logging.ERROR


def test_loggers_are_made_once() -> None:
    assert get_logger(NAME) is get_logger(NAME)
    assert len(logging.getLogger(NAME).filters) == 2
    assert len(logging.getLogger("hvd_strategy").handlers) == 1


def test_a_message_passes_the_filter_once(said: Callable[[], list[str]]) -> None:
    logger = get_logger(NAME)
    log.set_rank(1, 2)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RankFilter())  # as a program may do with its own
    logging.getLogger("hvd_strategy").addHandler(handler)
    logger.warning("warning")
    assert stream.getvalue() == "[rank 1] warning\n"


def test_nothing_breaks_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    get_logger(NAME).error("to nobody")


def test_python_warnings_on_request() -> None:
    code = """
import warnings
from hvd_strategy import log
log.set_rank(1, 2)
warnings.simplefilter("always")
warnings.warn_explicit("as ever", UserWarning, "model.py", 7)
log.capture_warnings()
log.capture_warnings()
for text in ("one", "one", "two"):
    warnings.warn_explicit(text, UserWarning, "model.py", 7)
"""
    assert run(code).stderr.splitlines() == [
        "model.py:7: UserWarning: as ever",
        "[rank 1] model.py:7: UserWarning: one",
        "[rank 1] model.py:7: UserWarning: two",
    ]


def test_import_configures_nothing_else() -> None:
    code = """
import logging, sys
root = logging.getLogger()
before = dict(logging.root.manager.loggerDict)
import hvd_strategy.log, hvd_strategy.session
assert root.handlers == [] and root.level == logging.WARNING
ours = [n for n, l in logging.root.manager.loggerDict.items()
        if n not in before and isinstance(l, logging.Logger) and (l.handlers or l.filters)]
print(sorted(ours))
"""
    # Torch is imported first, for what it configures.
    done = run("import torch, torch.distributed" + code)
    assert done.stdout.strip() == "['hvd_strategy', 'hvd_strategy.roll_call']"
    assert done.stderr == ""


def test_the_module_needs_only_the_standard_library() -> None:
    code = """
import sys, hvd_strategy.log
print(*({"torch", "numpy", "lightning", "pytorch_lightning"} & set(sys.modules)))
"""
    assert run(code).stdout.split() == []
