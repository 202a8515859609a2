"""Messages that no task can be made of: they are put aside, and the worker goes on.

Whoever can reach the broker can put anything into a queue. On Redis, what is no JSON, or JSON that is no
message, ends the whole worker. A message without the name or the id of a task, or with another body than
Celery's, makes the worker drop its connection and receive it again, over and over.

What cannot be read goes to `<queue>.bad` on the same broker, not too many of them, and one line of the
log names the class `bad_message`.
"""

from __future__ import annotations

from celery.utils.log import get_logger

logger = get_logger("shoal.celery")

BAD = "bad_message"
"""The class of failure in the log."""
KEPT = 1000
"""How many bad messages a queue keeps: the latest."""


def place_of(queue: str) -> str:
    """Where the bad messages of a queue are kept."""
    return f"{queue}.bad"


def tell(queue: str, why: str, *, kept: bool) -> None:
    # Not what is in it: that may be somebody's secret, or a megabyte.
    end = f"it is kept in {place_of(queue)}" if kept else "it could not be kept and is gone"
    logger.error("%s in %s: %s; %s", BAD, queue, why, end)


def brief(error: BaseException) -> str:
    """An error as a part of that line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
