"""What another rank's exception inside backward was.

Such an exception is told to the other ranks the moment backward ends by it. At that moment its text
is not known to anybody: autograd drops the callback at the end of backward before the exception
appears in Python. So the others learn rank and place at once, and the text when the exception ends
that rank a moment later, as the failure of the job. Where it ends them as well, it is added here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hvd_strategy.errors import RankFailedError

if TYPE_CHECKING:
    from hvd_strategy.session import Session

__all__ = ["add_explanation"]

# How `engine` ends the text of a failure that it cannot explain.
_UNEXPLAINED = "an exception inside backward; see the output of that rank"
# From an exception to the end of the rank by it; a rank that survives it says nothing.
_PATIENCE_SECONDS = 2.0


def add_explanation(session: Session, error: BaseException | None) -> str | None:
    """Adds what the failed rank said to an error that tells of its backward.

    Waits up to two seconds for it. Does nothing for any other error.

    Returns:
        What was added.
    """
    if not isinstance(error, RankFailedError) or _UNEXPLAINED not in str(error) or session.closed:
        return None
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (said := session.core.failure()) is None:
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)
    if said in str(error) or _UNEXPLAINED in said:
        return None  # added before; or the failed rank goes on, and others that it ended spoke
    error.args = (f"{error} ({said})", *error.args[1:])
    return said
