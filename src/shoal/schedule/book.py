"""The schedules of a frontier: one note that holds them all, so that every node sees the same.

It is changed by `compare_and_set` only: whoever changes it at the same time as somebody else looks again. So
no change is lost, whoever stalls or dies when, and nobody waits for a lock.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import Struct

from shoal.errors import FrontierCorrupt, NoSuchSchedule, UsageError
from shoal.frontier.port import Notes
from shoal.model import FOREVER, JobSpec
from shoal.schedule.timing import next_cron, next_every

SHELF, KEY = "schedules", "all"
MOST = 1000
MOST_URLS = 1000
MOST_BYTES = 4 * 1024 * 1024
"""Of all schedules together, as they are kept. They are read every few seconds."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_NAME = re.compile(NAME[1:-1])

Overlap = Literal["skip", "allow"]


class Schedule(Struct, frozen=True, omit_defaults=True):
    """What is submitted, and when. `cron` or `every` is set, never both."""

    name: str
    spec: JobSpec
    """What its jobs are asked to do, as it was when the schedule was made."""
    own_start: bool = False
    """The scraper's own start counts, as it is when it fires."""
    cron: str = ""
    every: int = 0
    timezone: str = "UTC"
    overlap: Overlap = "skip"
    """`skip`: it does not fire while its last job runs or is paused."""
    catch_up: bool = False
    """Firings that nobody was there for come one by one; otherwise all of them are one."""
    paused: bool = False
    queue: str | None = None
    """As it was said; None leaves it to the routes and the job. So with the next two."""
    priority: int | None = None
    ttl: float | None = None
    created_at: float = 0.0
    anchor: int = 0
    """Intervals are counted from here."""
    next_at: int | None = None
    """None: it never comes, or the schedule is paused."""
    last_at: int | None = None
    last_job: str = ""
    fired: int = 0
    skipped: int = 0
    error: str = ""
    """Why it could not fire when it was due. It is tried again until it can."""

    def after(self, moment: float) -> int | None:
        """The first firing later than this."""
        if self.cron:
            return next_cron(self.cron, moment, self.timezone)
        return next_every(self.every, self.anchor, moment)

    def starting(self, now: float) -> Schedule:
        """With its next firing counted from now; nothing that was missed counts."""
        timed = msgspec.structs.replace(self, anchor=int(now))
        return msgspec.structs.replace(timed, next_at=None if self.paused else timed.after(now), error="")

    def same_as(self, other: Schedule) -> bool:
        """Whether it asks for the same, whatever became of it."""
        return all(getattr(self, name) == getattr(other, name) for name in _ASKED)


_ASKED = (
    *("name", "spec", "own_start", "cron", "every", "timezone", "overlap", "catch_up"),
    *("paused", "queue", "priority", "ttl"),
)


class _Page(Struct, frozen=True):
    schedules: list[Schedule]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Page).decode

Edit = Callable[[Schedule | None], Schedule | None]


class Book:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def all(self) -> dict[str, Schedule]:
        """By name, in the order of their names."""
        return _read(await self._notes.get(SHELF, KEY))

    async def one(self, name: str) -> Schedule:
        """Raises NoSuchSchedule."""
        try:
            return (await self.all())[name]
        except KeyError:
            raise NoSuchSchedule(name) from None

    async def change(self, name: str, edit: Edit) -> Schedule | None:
        """Replace a schedule by what `edit` makes of it; None is none. Answers what is there now. `edit`
        may be asked more than once, and may raise."""
        while True:
            known = await self._notes.get(SHELF, KEY)
            found = _read(known)
            old = found.get(name)
            new = edit(old)
            if new == old:
                return new
            if new is None:
                del found[name]
            else:
                found[name] = new
            written = _encode(_Page([found[each] for each in sorted(found)]))
            # What is there must be able to fire, however full it is.
            grown = new is not None and (old is None or old.spec != new.spec)
            if grown and (len(found) > MOST or len(written) > MOST_BYTES):
                raise UsageError(
                    f"a frontier holds {MOST:,} schedules, in {MOST_BYTES // 1024 // 1024} MiB in all",
                    hint="remove some, or name fewer URLs in each",
                )
            if await self._notes.compare_and_set(SHELF, KEY, known, written, FOREVER):
                return new
            await asyncio.sleep(random.random() * 0.02)


def check_name(name: str) -> str:
    """Raises UsageError. Names of jobs are made of it."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"bad name {name[:100]!r} for a schedule",
            hint="letters, digits, dots, dashes and underscores; 64 at most, a letter or digit first",
        )
    return name


def job_of(name: str, moment: float) -> str:
    """The job of a firing: whoever fires it, and however often, it is the same."""
    return f"{name}-{datetime.fromtimestamp(moment, UTC):%Y%m%d_%H%M%S}"


def _read(note: bytes | None) -> dict[str, Schedule]:
    if note is None:
        return {}
    try:
        return {schedule.name: schedule for schedule in _decode(note).schedules}
    except msgspec.MsgspecError:
        raise FrontierCorrupt(
            "the schedules of this frontier cannot be read", hint="is this release older than who wrote them?"
        ) from None
