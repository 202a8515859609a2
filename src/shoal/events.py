"""What the engine tells whoever watches: progress bars, logs, metrics.

A watcher is a plain callable and must not block: it runs on the worker's loop.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class Visited(Struct, frozen=True):
    """A visit ended and its verdict is on the way to the frontier."""

    job: str
    url: str
    lane: str
    outcome: str
    """done, skipped, retry, dead or release."""
    status: int
    error: str
    message: str
    seconds: float
    bytes: int
    items: int
    found: int
    attempt: int


class Settled(Struct, frozen=True):
    """A batch of verdicts is stored. `lost` of them came too late and changed nothing."""

    verdicts: int
    lost: int
    seconds: float


class Trouble(Struct, frozen=True):
    """Something that the worker survives but a person should know of."""

    what: str
    attempt: int = 0


Event = Visited | Settled | Trouble
Watcher = Callable[[Event], None]


def nobody(event: Event) -> None:
    """The watcher that does not look."""
