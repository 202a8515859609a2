"""The schedules of a frontier: one note holds them all, so every node sees the same.

Changes go through `compare_and_set` only: of two concurrent changes, one reads the note again and repeats its
edit. So no change is lost, even if a process stalls or dies, and nothing waits for a lock.
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
"""Maximum size of the note. It is read every few seconds."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_NAME = re.compile(NAME[1:-1])

Overlap = Literal["skip", "allow"]


class Schedule(Struct, frozen=True, omit_defaults=True):
    """A job to submit, and when. Either `cron` or `every` is set."""

    name: str
    spec: JobSpec
    """The spec of its jobs, as it was when the schedule was added."""
    own_start: bool = False
    """Jobs start from the scraper's own start URLs, read at each firing."""
    cron: str = ""
    every: int = 0
    timezone: str = "UTC"
    overlap: Overlap = "skip"
    """`skip`: it does not fire while its last job is running or paused."""
    catch_up: bool = False
    """Firings missed while no service was running are made up for one by one; otherwise by a single one."""
    paused: bool = False
    queue: str | None = None
    """As given; None leaves it to the routing rules and the job. The same holds for the next two."""
    priority: int | None = None
    ttl: float | None = None
    created_at: float = 0.0
    anchor: int = 0
    """Intervals are counted from here."""
    next_at: int | None = None
    """None: the schedule is paused or will never fire again."""
    last_at: int | None = None
    last_job: str = ""
    fired: int = 0
    skipped: int = 0
    error: str = ""
    """Why the last firing failed. It is repeated until it succeeds."""

    def after(self, moment: float) -> int | None:
        """Returns the first firing later than this moment."""
        if self.cron:
            return next_cron(self.cron, moment, self.timezone)
        return next_every(self.every, self.anchor, moment)

    def starting(self, now: float) -> Schedule:
        """Returns the schedule with its next firing counted from now. Missed firings do not count."""
        timed = msgspec.structs.replace(self, anchor=int(now))
        return msgspec.structs.replace(timed, next_at=None if self.paused else timed.after(now), error="")

    def same_as(self, other: Schedule) -> bool:
        """Whether both were added with the same values, whatever their firings since."""
        return all(getattr(self, name) == getattr(other, name) for name in _GIVEN)


_GIVEN = (
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
        """Returns the schedules by name, ordered by name."""
        return _read(await self._notes.get(SHELF, KEY))

    async def one(self, name: str) -> Schedule:
        """Raises NoSuchSchedule."""
        try:
            return (await self.all())[name]
        except KeyError:
            raise NoSuchSchedule(name) from None

    async def change(self, name: str, edit: Edit) -> Schedule | None:
        """Replace a schedule by the result of `edit`; None stands for no schedule. Returns the result. `edit`
        may be called more than once, and may raise."""
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
            # Existing schedules must be able to fire, however full the note is.
            grown = new is not None and (old is None or old.spec != new.spec)
            if grown and (len(found) > MOST or len(written) > MOST_BYTES):
                raise UsageError(
                    f"a frontier holds at most {MOST:,} schedules, {MOST_BYTES // 1024 // 1024} MiB in all",
                    hint="remove some, or give each fewer URLs",
                )
            if await self._notes.compare_and_set(SHELF, KEY, known, written, FOREVER):
                return new
            await asyncio.sleep(random.random() * 0.02)


def check_name(name: str) -> str:
    """Returns the name. Raises UsageError if it is bad: names of jobs begin with it."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"bad name {name[:100]!r} for a schedule",
            hint="use at most 64 letters, digits, dots, dashes and underscores; begin with a letter or digit",
        )
    return name


def job_of(name: str, moment: float) -> str:
    """Returns the id of a firing's job: the same in every process and every attempt."""
    return f"{name}-{datetime.fromtimestamp(moment, UTC):%Y%m%d_%H%M%S}"


def _read(note: bytes | None) -> dict[str, Schedule]:
    if note is None:
        return {}
    try:
        return {schedule.name: schedule for schedule in _decode(note).schedules}
    except msgspec.MsgspecError:
        raise FrontierCorrupt(
            "the schedules of this frontier cannot be read",
            hint="did a newer release write them? use that release",
        ) from None
