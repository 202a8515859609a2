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
    """How often in a row whoever tells this has failed now; 0: it does not count."""
    server: str = ""
    """The address, as people may see it, of a server that does not answer. Several loops of a worker
    find that out, each for itself."""
    wait: float | None = None
    """Seconds after which it is tried again, where that is known."""


class Notice(Struct, frozen=True):
    """Good to know, and said once. Nothing is wrong."""

    what: str


class Reconnected(Struct, frozen=True):
    """A server that did not answer does so again."""

    server: str


Event = Visited | Settled | Trouble | Notice | Reconnected
Watcher = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The watcher that does not look."""
