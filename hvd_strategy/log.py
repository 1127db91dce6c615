"""What this package says: one logger, "hvd_strategy", with a child for each module.

    from hvd_strategy.log import FOR_ALL_RANKS, get_logger
    _log = get_logger(__name__)
    _log.warning("the sampler was replaced", extra=FOR_ALL_RANKS)   # all ranks call it: said once
    _log.warning("this rank has no data")                           # "[rank 2] this rank has ..."

A job of many ranks says one thing once. A line without a prefix speaks for the whole job, one that
begins with "[rank k]" for that rank:

* what is said on all ranks alike (`FOR_ALL_RANKS`), and all information: rank 0 only;
* warnings: once per session, whoever comes first, in all ranks; those with other texts all appear;
* errors, and what is there for debugging: every rank, every time.

Ranks find out who was first to warn in a table of digests in the session's shared memory: one
atomic operation, no waiting, no exchange. Whatever keeps a rank from looking there (no session yet,
the table is full, a forked child) makes it speak: a text may come twice, but is never lost.

Being a library, we leave logging to the program. Nothing is configured but this one logger; its
handler writes to stderr as long as the program has given neither this logger nor the root one of
its own, and is silent otherwise. That is looked up at each message, because programs configure
logging when they like. The level is that of the environment variable HVD_LOG_LEVEL, which a
program's own `setLevel` beats.

Standard library only. The watch thread of the C++ core writes its lines in the same form, past
`logging`: it speaks when Python may be unable to.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Mapping

from hvd_strategy.errors import HvdError
from hvd_strategy.options import OPTIONS, resolve
from hvd_strategy.world import detect_world

__all__ = [
    "FOR_ALL_RANKS",
    "RankFilter",
    "capture_warnings",
    "get_logger",
    "set_level",
    "set_rank",
    "set_session",
]

# Argument `extra` of a message that every rank gives at the same place.
FOR_ALL_RANKS: Mapping[str, object] = {"for_all_ranks": True}

_NAME = "hvd_strategy"
_MOST_REMEMBERED = 10_000


class _Speaker:
    """Who this process is, as far as known, and what it has warned of already."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.size = 1
        self.first_to_say: Callable[[int], bool] | None = None
        self.warned: set[int] = set()
        self.level = logging.NOTSET  # that we gave the package's logger
        self.level_asked_for = False  # by HVD_LOG_LEVEL

    def place(self) -> tuple[int, int]:
        """Rank and size; before anybody has told them, what the launcher's environment says."""
        if self.rank is not None:
            return self.rank, self.size
        try:
            world = detect_world()
        except HvdError:
            return 0, 1  # whoever opens the session will get this error
        return world.rank, world.size

    def is_news(self, record: logging.LogRecord) -> bool:
        """Whether neither this rank nor another has given this warning in this session."""
        text = f"{record.name}\n{record.levelno}\n{record.getMessage()}"
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        if digest in self.warned:
            return False
        if not _shown(record):
            return True  # to nobody: then another rank, whose output is shown, has to say it
        if len(self.warned) < _MOST_REMEMBERED:
            self.warned.add(digest)
        return self.first_to_say is None or self.first_to_say(digest)


def _shown(record: logging.LogRecord) -> bool:
    """Whether a handler will take the message; programs often silence the ranks other than 0."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    theirs = [handler for handler in found if not isinstance(handler, _SILENT)]
    return not theirs or any(handler.level <= record.levelno for handler in theirs)


_speaker = _Speaker()


class RankFilter(logging.Filter):
    """Decides whether this rank gives a message, and puts "[rank k]" before it if so.

    On our own loggers; may be added to any other logger or handler of the program.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to give the message; `record.hvd_rank` is the rank, for formatters."""
        if hasattr(record, "hvd_rank"):
            return True  # has been decided
        rank, size = _speaker.place()
        of_this_rank = not getattr(record, "for_all_ranks", False)
        if logging.DEBUG < record.levelno < logging.WARNING:
            of_this_rank = False
        if not of_this_rank and rank != 0:
            return False
        if (
            of_this_rank
            and logging.WARNING <= record.levelno < logging.ERROR
            and not _speaker.is_news(record)
        ):
            return False
        record.hvd_rank = rank
        if of_this_rank and size > 1:
            record.msg = f"[rank {rank}] {record.getMessage()}"
            record.args = None
        return True


class _OwnLevel(logging.Filter):
    """Where the level is only our default, the level that the program gave the root counts too."""

    def filter(self, record: logging.LogRecord) -> bool:
        root = logging.getLogger()
        chosen = _speaker.level_asked_for or logging.getLogger(_NAME).level != _speaker.level
        return chosen or not root.handlers or record.levelno >= root.level


class _LastResort(logging.Handler):
    """Writes to stderr what no handler of the program would show."""

    def __init__(self, of: logging.Logger, form: str) -> None:
        super().__init__()
        self._of = of
        self.setFormatter(logging.Formatter(form))

    def emit(self, record: logging.LogRecord) -> None:
        others = [*self._of.handlers, *(logging.getLogger().handlers if self._of.propagate else ())]
        if any(not isinstance(other, _SILENT) for other in others):
            return
        line = self.format(record).rstrip() + "\n"
        # Where stderr is closed there is nobody to tell, and no reason to end a training run.
        with contextlib.suppress(Exception):
            # Looked up each time: notebooks and test runners replace it. One write, so that lines
            # of several ranks, and progress bars, do not mix with parts of it.
            sys.stderr.write(line)
            sys.stderr.flush()


# Handlers that do not keep ours from speaking.
_SILENT = (_LastResort, logging.NullHandler)


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module of this package.

    Args:
        name: `__name__` of the module.
    """
    package = logging.getLogger(_NAME)
    if not any(isinstance(handler, _LastResort) for handler in package.handlers):
        package.addHandler(_LastResort(package, f"{_NAME}: %(message)s"))
        if package.level == logging.NOTSET:
            _give_level(package, OPTIONS["log_level"].default)
    logger = logging.getLogger(name)
    # On each logger: a logger's filters see only what is said to itself, not to its children.
    if not any(isinstance(known, RankFilter) for known in logger.filters):
        logger.addFilter(_OwnLevel())
        logger.addFilter(RankFilter())
    return logger


def set_level() -> None:
    """Gives the package's logger the level of HVD_LOG_LEVEL, unless the program gave it one.

    Raises:
        ValueError: The variable's value is not a level.
    """
    level = resolve("log_level")
    package = logging.getLogger(_NAME)
    if package.level in (logging.NOTSET, _speaker.level):
        _give_level(package, level)
        _speaker.level_asked_for = bool(os.environ.get(OPTIONS["log_level"].env, "").strip())


def _give_level(package: logging.Logger, level: str) -> None:
    package.setLevel(level.upper())
    _speaker.level = package.level


def set_rank(rank: int, size: int) -> None:
    """Tells who this process is."""
    _speaker.rank, _speaker.size = rank, size


def set_session(first_to_say: Callable[[int], bool] | None) -> None:
    """Tells that a session has begun, or None that it has ended.

    Args:
        first_to_say: Whether this rank is the first of all that comes with a digest.
    """
    _speaker.first_to_say = first_to_say
    if first_to_say is not None:
        _speaker.warned.clear()


def capture_warnings() -> None:
    """Has Python's warnings, those of the program's own code included, said as ours are.

    That is: with "[rank k]", and what all ranks warn of alike once instead of once per rank. Not
    done by itself, because it is the program's choice: it calls `logging.captureWarnings(True)`.
    From then on warnings go to the logger "py.warnings"; `warnings.filterwarnings` counts as ever.
    """
    logging.captureWarnings(True)
    logger = logging.getLogger("py.warnings")
    if not any(isinstance(known, RankFilter) for known in logger.filters):
        logger.addFilter(RankFilter())
        logger.addHandler(_LastResort(logger, "%(message)s"))
