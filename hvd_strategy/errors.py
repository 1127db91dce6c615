"""The exceptions of this package.

Every error that hvd_strategy raises on its own account derives from `HvdError`; the C++ core raises
these very classes. A message says what happened, on which rank, and what to do about it. Wrong
arguments are the exception: they are `ValueError` or `TypeError`, as everywhere in Python.

This module imports nothing, so that it can be imported where the core cannot.
"""


class HvdError(RuntimeError):
    """Base class: something went wrong in communication between ranks."""


class RankFailedError(HvdError):
    """Another rank died, or raised an exception, which its text quotes.

    The session cannot be used any more: close it, and open a new one with the ranks that are left.
    """


class MismatchError(HvdError):
    """Ranks ask for things that do not fit together.

    For example parameters of other names, shapes or dtypes, or collectives in another order.
    Raised on every rank, with what each side wanted. Ranks that wait for each other in different
    places, and would for ever, are such a mismatch too; that one ends the session.
    """


class DivergenceError(HvdError):
    """Parameters, buffers or optimizer state are no longer the same on all ranks."""


class StallError(HvdError):
    """One or more ranks did not take part within `stall_abort_seconds`.

    Or, after SIGTERM, within `abort_grace_seconds`. The text says what they did instead.
    """


class HvdTimeoutError(HvdError):
    """A collective, or the meeting of the ranks, did not end within its timeout."""


class CheckpointNotFoundError(HvdError, FileNotFoundError):
    """The file of a checkpoint is not there for rank 0, which reads it for all ranks.

    A `FileNotFoundError` as well, as on one process.
    """


__all__ = [
    "CheckpointNotFoundError",
    "DivergenceError",
    "HvdError",
    "HvdTimeoutError",
    "MismatchError",
    "RankFailedError",
    "StallError",
]
