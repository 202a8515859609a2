"""`shoal schedule`: jobs that are submitted by cron or interval."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from shoal.cli.common import OK, USAGE, Signals, app_of, open_session, run, shared, working_session
from shoal.cli.options import (
    AllowPrivate,
    Cache,
    Count,
    Depth,
    Exclude,
    Fields,
    Flag,
    Frontier,
    Header,
    Include,
    Json,
    LogFormat,
    LogLevel,
    NoRobots,
    PerHost,
    Quiet,
    Rate,
    Retries,
    Scrapers,
    Seconds,
    Timeout,
    Within,
    headers_of,
)
from shoal.cli.output import emit, from_now, print_table, say
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.app import Fired
    from shoal.schedule.book import Schedule

app = App(
    name="schedule",
    help="Submit jobs on a schedule, by cron or interval.",
    help_format="plaintext",
)

Name = Annotated[str, Parameter(help="The schedule's name.")]
LATE = 60.0
FIRES = "schedules fire only while `shoal serve`, `shoal up` or `shoal schedule run` runs on this frontier"


@app.command
def add(
    name: str,
    /,
    *url: str,
    cron: str | None = None,
    every: str | None = None,
    timezone: str | None = None,
    overlap: Literal["skip", "allow"] = "skip",
    catch_up: Flag = False,
    paused: Flag = False,
    replace: Flag = False,
    scraper: str | None = None,
    app: Scrapers = None,
    max_pages: Count = None,
    depth: Depth = None,
    scope: Within = None,
    include: Include = None,
    exclude: Exclude = None,
    rate: Rate = None,
    per_host: PerHost = None,
    fields: Fields = None,
    header: Header = None,
    cache: Cache = None,
    retries: Retries = None,
    timeout: Timeout = None,
    queue: str | None = None,
    priority: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=9))] = None,
    ttl: Seconds = None,
    output_format: Literal["json", "jsonl", "csv", "parquet", "markdown"] | None = None,
    no_robots: NoRobots = None,
    allow_private: AllowPrivate = None,
    json: Json = False,
    frontier: Frontier = None,
) -> int:
    """Add a schedule: a job that is submitted by cron or interval.

    The flags and settings of this command are stored with the schedule. Only the start= of a scraper is
    looked up each time. A schedule fires while `shoal serve`, `shoal up` or `shoal schedule run` is running.

    Parameters
    ----------
    name
        The schedule's name; its jobs are named after it: news-20261116_060000.
    url
        The URLs to start from.
    cron
        When to submit the job: "0 6 * * MON-FRI", @daily and so on. With six fields, the first is seconds.
    every
        Interval, instead of --cron: 15m, 6h, 1d. The first job is submitted one interval from now.
    timezone
        Time zone of --cron, such as Europe/Berlin (default UTC).
    overlap
        When the last job still runs: skip this one, or allow both to run.
    catch_up
        Submit every job that was missed, one by one, instead of only one. Needs --overlap allow.
    paused
        Add the schedule paused; start it with `shoal schedule resume`.
    replace
        Replace an existing schedule of this name.
    scraper
        Run this scraper; without URLs it starts from its own start=.
    max_pages
        Maximum number of pages (default 10,000; no limit with --scraper).
    queue
        The queue to put the URLs in.
    priority
        1 to 9; 5 is normal, 9 is most urgent.
    ttl
        Seconds after which a start URL that was not fetched expires.
    output_format
        Format in which the API returns the results.
    """

    settings: dict[str, Any] = {
        "app": app,
        "max_pages": max_pages,
        "depth": depth,
        "scope": scope,
        "include": include,
        "exclude": exclude,
        "rate": rate,
        "per_host": per_host,
        "fields": fields,
        "headers": headers_of(header),
        "cache": cache,
        "retries": retries,
        "timeout": timeout,
        "no_robots": no_robots,
        "allow_private": allow_private,
        "frontier": frontier,
    }
    when: dict[str, Any] = {
        "cron": cron,
        "every": every,
        "timezone": timezone,
        "overlap": overlap,
        "catch_up": catch_up,
        "paused": paused,
    }
    job: dict[str, Any] = {
        "max_pages": max_pages,
        "queue": queue,
        "priority": priority,
        "ttl": ttl,
        "output": output_format,
    }
    return run(lambda: _add(name, url, scraper, settings, when, job, replace=replace, json=json))


async def _add(
    name: str,
    url: tuple[str, ...],
    scraper: str | None,
    settings: dict[str, Any],
    when: dict[str, Any],
    job: dict[str, Any],
    *,
    replace: bool,
    json: bool,
) -> int:
    from shoal.app import SITE, Timing, add_schedule, new_schedule
    from shoal.registry import in_process
    from shoal.settings import load

    given = load(**settings)
    app = app_of(given)
    if in_process(given.frontier):
        raise UsageError(
            "a memory: frontier ends with this command, and its schedules with it",
            hint="leave out --frontier, or POST /schedules to a running `shoal serve`",
        )
    async with open_session(**settings) as session:
        session.adopt(app)
        made = Timing(**when).on(new_schedule(session, name, url, scraper or SITE, **job))
        kept = await add_schedule(session, made, replace=replace)
        now = await session.frontier.notes.now()
    _print(kept, now, json=json)
    if not json:
        say(FIRES)
    return OK


@app.default
@app.command(name="list")
def list_(*, json: Json = False, frontier: Frontier = None) -> int:
    """List schedules, with the next and the last job of each."""
    return run(lambda: _list(frontier, json=json))


async def _list(frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import schedule_view
    from shoal.schedule.book import Book

    async with open_session(create=False, frontier=frontier) as session:
        found = await Book(session.frontier.notes).all()
        now = await session.frontier.notes.now()
    if json:
        emit([schedule_view(each) for each in found.values()])
        return OK
    if not found:
        say('no schedules yet; add one with `shoal schedule add NAME --cron "0 6 * * *" URL`')
        return OK
    print_table(
        ("schedule", "when", "next", "last", "last job", "fired", "skipped", "what"),
        [
            (
                *(each.name, _when(each), _next(each, now)),
                _clock(each, each.last_at) if each.last_at is not None else "-",
                *(each.last_job or "-", f"{each.fired:,}", f"{each.skipped:,}", _what(each)),
            )
            for each in found.values()
        ],
        right=(5, 6),
    )
    for each in found.values():
        if each.error:
            say(f"{each.name} cannot fire: {each.error}")
    if any(
        each.next_at is not None and each.next_at < now - LATE and not each.error for each in found.values()
    ):
        say(f"some are late: {FIRES}")
    return OK


@app.command
def remove(name: Name, /, *, json: Json = False, frontier: Frontier = None) -> int:
    """Remove a schedule. Its jobs are kept."""
    return run(lambda: _remove(name, frontier, json=json))


async def _remove(name: str, frontier: str | None, *, json: bool) -> int:
    from shoal.app import remove_schedule

    async with open_session(create=False, frontier=frontier) as session:
        await remove_schedule(session, name)
    if json:
        emit({"removed": name})
    else:
        say(f"{name} is removed; its jobs are kept")
    return OK


@app.command
def pause(name: Name, /, *, json: Json = False, frontier: Frontier = None) -> int:
    """Pause a schedule. A job that it has already submitted continues."""
    return run(lambda: _switch(name, frontier, paused=True, json=json))


@app.command
def resume(name: Name, /, *, json: Json = False, frontier: Frontier = None) -> int:
    """Resume a paused schedule. Jobs that it missed are not submitted."""
    return run(lambda: _switch(name, frontier, paused=False, json=json))


async def _switch(name: str, frontier: str | None, *, paused: bool, json: bool) -> int:
    from shoal.app import Timing, change_schedule

    async with open_session(create=False, frontier=frontier) as session:
        changed = await change_schedule(session, name, Timing(paused=paused))
        now = await session.frontier.notes.now()
    _print(changed, now, json=json)
    return OK


@app.command(name="run")
def run_(
    name: str | None = None,
    /,
    *,
    once: Flag = False,
    app: Scrapers = None,
    json: Json = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    quiet: Quiet = False,
    frontier: Frontier = None,
) -> int:
    """Submit jobs when they are due; with a name, submit that schedule's job now.

    For machines where neither `shoal serve` nor `shoal up` runs. It runs until it is stopped. Any number of
    these may run: each job is submitted once. Prints the job ids to stdout, one per line. Exits with 0
    after SIGTERM, with 130 after Ctrl-C, and with 2 if --once could not submit a job.

    Parameters
    ----------
    name
        Submit the job of this schedule now, even if it is paused or its last job still runs.
    once
        Submit the jobs that are due and exit; for a crontab or a timer.
    """
    if name is not None and once:
        raise UsageError(
            "--once does not go with a name", hint="leave out --once: a named schedule runs once anyway"
        )
    settings = {"app": app, "frontier": frontier, "log_level": log_level, "log_format": log_format}
    if name is not None:
        return run(lambda: _run_one(name, settings, json=json))
    return run(lambda: _run_all(settings, once=once, json=json, quiet=quiet))


async def _run_one(name: str, settings: dict[str, Any], *, json: bool) -> int:
    from shoal.app import run_schedule
    from shoal.settings import load

    app = app_of(load(**settings))
    async with open_session(create=False, **settings) as session:
        session.adopt(app)
        _print_job(name, await run_schedule(session, name), json=json)
    return OK


async def _run_all(settings: dict[str, Any], *, once: bool, json: bool, quiet: bool) -> int:
    import asyncio

    from shoal.app import Scheduler

    code = OK
    given = shared(quiet=quiet, logs="info", **settings)
    app = app_of(given)

    def fired(firing: Fired) -> None:
        nonlocal code
        if firing.job:
            _print_job(firing.schedule, firing.job, json=json)
        elif firing.error:
            say(f"error: schedule {firing.schedule} cannot fire: {firing.error}")
            code = USAGE if once else code
        elif not quiet:
            say(f"{firing.schedule} was skipped: its last job still runs")

    async with working_session(given, quiet=quiet) as session:
        session.adopt(app)
        scheduler = Scheduler(session, tell=say, fired=fired)
        if once:
            while await scheduler.look() <= 0:
                pass
            return code
        if not quiet:
            say("watching the schedules; Ctrl-C stops")
        looking = asyncio.create_task(scheduler.run())

        with Signals(looking.cancel) as signals:
            await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()
    return signals.code


# -- output -------------------------------------------------------------------------------


def _print(schedule: Schedule, now: float, *, json: bool) -> None:
    if json:
        from shoal.app.views import schedule_view

        emit(schedule_view(schedule))
        return
    upcoming = "paused" if schedule.paused else f"next {_next(schedule, now)}"
    say(f"{schedule.name}: {_when(schedule)}, {upcoming}")


def _print_job(name: str, job: str, *, json: bool) -> None:
    if json:
        emit({"schedule": name, "job": job})
        return
    sys.stdout.write(f"{job}\n")
    sys.stdout.flush()


def _when(schedule: Schedule) -> str:
    from shoal.schedule.timing import format_every

    if schedule.every:
        return f"every {format_every(schedule.every)}"
    return f"{schedule.cron} {schedule.timezone}"


def _next(schedule: Schedule, now: float) -> str:
    if schedule.paused:
        return "paused"
    if schedule.next_at is None:
        return "never"
    return f"{_clock(schedule, schedule.next_at)} ({from_now(schedule.next_at, now)})"


def _clock(schedule: Schedule, moment: float) -> str:
    """Returns a moment in the time zone of the cron line; for an interval, in local time. It has the UTC
    offset, because the zones may differ."""
    from shoal.schedule.timing import zone

    there = zone(schedule.timezone) if schedule.cron else None
    return datetime.fromtimestamp(moment, UTC).astimezone(there).isoformat(" ", "minutes")


def _what(schedule: Schedule) -> str:
    spec = schedule.spec
    scraper = "" if spec.scraper == "site" else f"scraper {spec.scraper}"
    first = spec.start[0] if spec.start else ""
    more = f" and {len(spec.start) - 1:,} more" if len(spec.start) > 1 else ""
    return " ".join(part for part in (scraper, first + more) if part)
