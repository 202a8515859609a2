"""Events that the engine reports to a watcher: a progress bar, a log, metrics.

A watcher is a plain callable and must not block: it runs on the worker's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

Part = Literal["worker", "frontier", "pump", "dispatch"]
"""The part that an event is about. Its logger is `shoal.PART`."""


class Begun(Struct, frozen=True):
    """A visit has begun. It may still wait for its host's turn."""

    job: str
    url: str
    lane: str
    attempt: int
    """The number of this attempt, from 1."""


class Visited(Struct, frozen=True):
    """A visit ended, and its verdict is on its way to the frontier."""

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
    """The number of this attempt, from 1."""
    attempts: int = 0
    """The number of all attempts; 0 if unknown."""
    wait: float = 0.0
    """Seconds until the next attempt, after `retry`."""
    reason: str = ""
    """Why it was skipped."""


class Settled(Struct, frozen=True):
    """A batch of verdicts was stored. `lost` of them came too late and changed nothing."""

    verdicts: int
    lost: int
    seconds: float


class Trouble(Struct, frozen=True):
    """Something that the worker survives but a person should know about."""

    what: str
    attempt: int = 0
    """How often in a row the reporting loop has failed; 0: it does not count."""
    server: str = ""
    """The address, without its password, of a server that does not respond. Each loop of a worker that
    notices reports it."""
    wait: float | None = None
    """Seconds until the next try, if that is known."""
    part: Part = "worker"


class Notice(Struct, frozen=True):
    """Good to know, and reported once. Nothing is wrong."""

    what: str
    part: Part = "worker"


class Reconnected(Struct, frozen=True):
    """A server that did not respond does so again."""

    server: str
    part: Part = "frontier"


Event = Begun | Visited | Settled | Trouble | Notice | Reconnected
Watcher = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A watcher that does nothing."""


def all_of(*watchers: Watcher | None) -> Watcher:
    """Returns a watcher that passes events to each of these; None is left out."""
    given = [watch for watch in watchers if watch is not None]
    if len(given) == 1:
        return given[0]

    def watch_all(event: Event) -> None:
        for watch in given:
            watch(event)

    return watch_all
