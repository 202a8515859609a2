"""Checks queue names, and requests before they are stored."""

from __future__ import annotations

from collections.abc import Collection

from shoal.errors import UsageError
from shoal.model import DEFAULT_QUEUE, Request

FAILED_QUEUE = "failed_urls"
"""In a broker: what ended dead, for people."""
RETURNED_QUEUE = "returned_urls"
"""In a broker: what nobody finished, for the pump."""
BROKER_QUEUES = frozenset((FAILED_QUEUE, RETURNED_QUEUE))
TASK_QUEUE = "celery_tasks"
"""The queue of requests that a Celery task visits itself. No pump looks there: if a task waited for
visits by other tasks, a few of them could fill all processes and wait for each other."""
RESERVED_QUEUES = BROKER_QUEUES | {TASK_QUEUE}
"""No names for queues of work: no pump claims from them, and no consumer receives."""


def check_queue(queue: str, reserved: Collection[str] = RESERVED_QUEUES) -> None:
    """Raises UsageError if no work may wait in a queue of this name."""
    if not queue or len(queue) > 64:
        raise UsageError(f"bad queue name {queue!r}", hint="use 1 to 64 characters")
    if queue in reserved:
        whose = "the broker" if queue in BROKER_QUEUES else "Celery tasks"
        raise UsageError(
            f"queue {queue!r} is reserved for {whose}",
            hint=f"choose another name; the default queue is {DEFAULT_QUEUE}",
        )


def validate(request: Request) -> None:
    """Raises UsageError about a request that the types allow but that may not be stored."""
    if not 1 <= request.priority <= 9:
        raise UsageError(
            f"priority {request.priority} is not between 1 and 9", hint="5 is normal, 9 is urgent"
        )
    check_queue(request.queue, BROKER_QUEUES)
