"""Names of queues, and what a request must be before it may wait in one."""

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
    """Whether work may wait under this name. Raises UsageError."""
    if not queue or len(queue) > 64:
        raise UsageError(f"bad queue name {queue!r}", hint="use 1 to 64 characters")
    if queue in reserved:
        whose = "the broker" if queue in BROKER_QUEUES else "Celery tasks"
        raise UsageError(
            f"queue {queue!r} is for {whose} alone: no work may wait there",
            hint=f"give it another name; {DEFAULT_QUEUE} is the usual one",
        )


def validate(request: Request) -> None:
    """What the type system cannot: refuse it before it is stored."""
    if not 1 <= request.priority <= 9:
        raise UsageError(
            f"priority {request.priority} is not between 1 and 9", hint="5 is normal, 9 is urgent"
        )
    check_queue(request.queue, BROKER_QUEUES)
