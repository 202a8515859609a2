"""Schedules: they submit jobs when these are due, once, however many nodes run a scheduler.

The job of a firing is named after the schedule and the time, and opening it or adding its URLs a second
time changes nothing. So if a node dies half-way, the next one completes the firing. A lock lets one node
decide at a time, but it is not needed for correctness: without it, nothing would be lost or done twice.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from shoal import urls
from shoal.app.processes import holder_name, process_gone
from shoal.app.session import Session
from shoal.errors import FrontierError, NoSuchJob, NoSuchSchedule, ScheduleExists, ShoalError, UsageError
from shoal.frontier.notes import Lock
from shoal.model import JobState
from shoal.queues import check_queue
from shoal.schedule.book import MOST_URLS, Book, Overlap, Schedule, check_name, job_of
from shoal.schedule.timing import check_cron, parse_every, zone

LOOK = 5.0
"""Maximum seconds between two checks, and so until a change by another process takes effect."""
AGAIN = 1.0
"""Seconds until the next check when another node is firing, or the frontier is unreachable."""
LOCK = "schedules fire"
LOCK_SECONDS = 15.0
AT_ONCE = 100
"""Maximum number of firings between two checks of the clock."""

_replace = msgspec.structs.replace


class Timing(Struct, frozen=True):
    """When a schedule fires, as users write it. None leaves a value as it is."""

    cron: str | None = None
    every: str | None = None
    timezone: str | None = None
    overlap: Overlap | None = None
    catch_up: bool | None = None
    paused: bool | None = None

    def on(self, schedule: Schedule) -> Schedule:
        """Returns the schedule with this timing. Raises UsageError."""
        if self.cron and self.every:
            raise UsageError("cron and every exclude each other", hint="leave one of them out")
        changed: dict[str, Any] = {}
        if self.cron:
            changed |= {"cron": check_cron(self.cron), "every": 0}
        if self.every:
            changed |= {"every": parse_every(self.every), "cron": "", "timezone": "UTC"}
        for name in ("timezone", "overlap", "catch_up", "paused"):
            if (value := getattr(self, name)) is not None:
                changed[name] = value
        made = _replace(schedule, **changed)
        zone(made.timezone)
        if not made.cron and not made.every:
            raise UsageError(
                "a schedule needs a cron expression or an interval",
                hint='give --cron "0 6 * * *" or --every 6h',
            )
        if made.every and made.timezone != "UTC":
            raise UsageError(
                "an interval has no time zone", hint="leave out the time zone, or give a cron expression"
            )
        if made.catch_up and made.overlap == "skip":
            raise UsageError(
                "catch-up requires overlap allow",
                hint="with overlap skip, all but the first would be skipped while it runs",
            )
        return made


def new_schedule(session: Session, name: str, start: tuple[str, ...], scraper: str, **more: Any) -> Schedule:
    """Returns a schedule whose jobs follow the session's settings and the scraper, without its timing.

    `more` are fields of the job's spec, and `queue`, `priority` and `ttl` if they were given. Raises
    UsageError.
    """
    said = {key: more[key] for key in ("queue", "priority", "ttl") if more.get(key) is not None}
    wishes = {key: value for key, value in more.items() if value is not None and key != "ttl"}
    if "queue" in said:
        check_queue(said["queue"])
    start = tuple(dict.fromkeys(urls.canonical(url) for url in start))
    if len(start) > MOST_URLS:
        raise UsageError(
            f"{len(start):,} URLs, but a schedule can have at most {MOST_URLS:,}",
            hint="start from a page that links to them",
        )
    named = session.scraper(scraper)
    own_start = not start
    if own_start:
        start = named.start if named is not None else ()
    if not start:
        raise UsageError("no URL to start from", hint="give at least one, or a scraper with start=")
    # Like a run: dedicated workers can work on it, and pages are limited only on request.
    usual = {"dedicated": False} if named is None else {"max_pages": None, "max_per_host": None}
    spec = session.spec(scraper, start, **(usual | wishes))
    if own_start:
        spec = _replace(spec, start=())
    return Schedule(check_name(name), spec, own_start=own_start, **said)


async def add_schedule(session: Session, schedule: Schedule, *, replace: bool = False) -> Schedule:
    """Stores a schedule and returns it; it first fires at the next time from now. With `replace`, it replaces
    an existing one and keeps its history. Raises ScheduleExists."""
    now = await session.frontier.notes.now()
    made = _replace(schedule, created_at=now).starting(now)

    def edit(old: Schedule | None) -> Schedule:
        if old is None:
            return made
        if not replace:
            raise ScheduleExists(made.name)
        history = ("created_at", "last_at", "last_job", "fired", "skipped")
        return _replace(made, **{name: getattr(old, name) for name in history})

    return _existing(await Book(session.frontier.notes).change(made.name, edit), made.name)


_WHEN = ("cron", "every", "timezone", "paused")


async def change_schedule(session: Session, name: str, timing: Timing) -> Schedule:
    """Changes when a schedule fires, and returns it. Raises NoSuchSchedule and UsageError."""
    now = await session.frontier.notes.now()

    def edit(old: Schedule | None) -> Schedule:
        old = _existing(old, name)
        new = timing.on(old)
        same = all(getattr(new, field) == getattr(old, field) for field in _WHEN)
        return new if same else new.starting(now)

    return _existing(await Book(session.frontier.notes).change(name, edit), name)


async def remove_schedule(session: Session, name: str) -> None:
    """Removes a schedule; its jobs are kept. Raises NoSuchSchedule."""

    def edit(old: Schedule | None) -> None:
        _existing(old, name)

    await Book(session.frontier.notes).change(name, edit)


async def run_schedule(session: Session, name: str, job: str = "") -> str:
    """Fires a schedule now, even if it is paused or its last job still runs. Returns the job's id."""
    schedule = await Book(session.frontier.notes).one(name)
    now = await session.frontier.notes.now()
    job = job or f"{job_of(name, now)}-{secrets.token_hex(2)}"
    await _submit(session, schedule, job)

    def edit(old: Schedule | None) -> Schedule | None:
        if old is None or old.last_job == job:
            return old
        return _replace(old, last_at=int(now), last_job=job, fired=old.fired + 1)

    await Book(session.frontier.notes).change(name, edit)
    return job


def _existing(schedule: Schedule | None, name: str) -> Schedule:
    if schedule is None:
        raise NoSuchSchedule(name)
    return schedule


# -- firing ----------------------------------------------------------------------------------


class Fired(Struct, frozen=True):
    """The result of one firing. Without a `job` it was skipped, or `error` has the reason."""

    schedule: str
    at: int
    job: str = ""
    error: str = ""
    webhook: bool = False
    """Whether the job has a webhook."""


class Scheduler:
    """Fires schedules that are due, until it is cancelled. Any number may run on one frontier."""

    def __init__(
        self, session: Session, *, tell: Callable[[str], None], fired: Callable[[Fired], None]
    ) -> None:
        """`tell` gets messages about trouble, `fired` each firing of this scheduler."""
        self._session = session
        self._book = Book(session.frontier.notes)
        self._lock = Lock(session.frontier.notes, LOCK, holder_name(), LOCK_SECONDS, is_dead=process_gone)
        self._tell = tell
        self._fired = fired
        self._woken = asyncio.Event()
        self._trouble = ""
        self._failing: dict[str, str] = {}
        """Schedules that could not fire, and why: reported once, not at each check."""

    def wake(self) -> None:
        """Checks now, because this process has changed a schedule."""
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            try:
                wait = await self.look()
                self._trouble = ""
            except FrontierError as error:
                wait = AGAIN
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    self._tell(f"schedules are waiting for the frontier: {error}")
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._woken.wait()

    async def look(self) -> float:
        """Fires schedules that are due. Returns the seconds until the next check."""
        notes = self._session.frontier.notes
        schedules, now = await self._book.all(), await notes.now()
        due = {schedule.name for schedule in _due(schedules, now)}
        self._failing = {name: why for name, why in self._failing.items() if name in due}
        if not due:
            return _wait(schedules, now)
        if not await self._lock.take():
            return AGAIN
        try:
            # Read under the lock: the previous holder has stored what it did.
            schedules, now = await self._book.all(), await notes.now()
            turns = sorted(_due(schedules, now), key=lambda each: each.name in self._failing)
            for schedule in turns[:AT_ONCE]:
                await self._lock.take()
                try:
                    await self._fire(schedule, now)
                except FrontierError:
                    raise
                except ShoalError as error:
                    # No scraper or no such time zone here: another node may have it.
                    await self._report_failure(schedule, str(error))
        finally:
            await self._lock.release()
        left = {name: each for name, each in (await self._book.all()).items() if name not in self._failing}
        return _wait(left, await notes.now())

    async def _fire(self, schedule: Schedule, now: float) -> None:
        at = schedule.next_at
        assert at is not None
        name, job = schedule.name, job_of(schedule.name, at)
        # If the job exists, another node started this firing and did not finish it.
        skips = schedule.overlap == "skip" and not await self._exists(job)
        skips = skips and await self._is_unfinished(schedule.last_job)
        if not skips:
            await _submit(self._session, schedule, job)

        def edit(old: Schedule | None) -> Schedule | None:
            if old is None:
                return None
            if old.next_at == at:
                old = _replace(old, next_at=old.after(at if old.catch_up else now), error="")
            elif skips or (old.last_at or 0) >= at:
                return old  # another node was faster
            # Otherwise the timing was changed meanwhile: that stands, and so does this firing.
            if skips:
                return _replace(old, skipped=old.skipped + 1)
            return _replace(old, last_at=at, last_job=job, fired=old.fired + 1)

        await self._book.change(name, edit)
        self._failing.pop(name, None)
        self._fired(Fired(name, at, "" if skips else job, webhook=schedule.spec.webhook is not None))

    async def _report_failure(self, schedule: Schedule, why: str) -> None:
        at = schedule.next_at
        if at is None or self._failing.get(schedule.name) == why:
            return
        self._failing[schedule.name] = why

        def edit(old: Schedule | None) -> Schedule | None:
            return old if old is None or old.next_at != at else _replace(old, error=why)

        await self._book.change(schedule.name, edit)
        self._fired(Fired(schedule.name, at, error=why))

    async def _exists(self, job: str) -> bool:
        with suppress(NoSuchJob):
            await self._session.frontier.job(job)
            return True
        return False

    async def _is_unfinished(self, job: str) -> bool:
        """Whether a job is running or paused."""
        if not job:
            return False
        with suppress(NoSuchJob):
            return (await self._session.frontier.job(job)).state in (JobState.RUNNING, JobState.PAUSED)
        return False


async def _submit(session: Session, schedule: Schedule, job: str) -> None:
    """Opens a job and adds its URLs. Doing it twice changes nothing."""
    spec = schedule.spec
    if schedule.own_start:
        scraper = session.scraper_of(job, spec)
        spec = _replace(spec, start=scraper.start if scraper is not None else ())
        if not spec.start:
            raise UsageError(
                f"scraper {spec.scraper!r} no longer has start=",
                hint="add the schedule with URLs, and --replace",
            )
    await session.open_job(spec, job)
    await session.submit(job, spec.start, queue=schedule.queue, priority=schedule.priority, ttl=schedule.ttl)


def _due(schedules: dict[str, Schedule], now: float) -> list[Schedule]:
    """Returns the schedules that are due, longest due first."""
    due = [each for each in schedules.values() if each.next_at is not None and each.next_at <= now]
    return sorted(due, key=lambda each: each.next_at or 0)


def _wait(schedules: dict[str, Schedule], now: float) -> float:
    """Returns the seconds until the next check; 0 if a schedule is due."""
    soonest = min((each.next_at for each in schedules.values() if each.next_at is not None), default=math.inf)
    return min(max(0.0, soonest - now), LOOK)
