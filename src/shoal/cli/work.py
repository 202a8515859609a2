"""`shoal worker` and `shoal enqueue`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.common import OK, Signals, app_of, open_session, run, settle_in, shared, working_session
from shoal.cli.options import (
    Concurrency,
    Count,
    Dispatch,
    Flag,
    Frontier,
    Json,
    LogFormat,
    LogLevel,
    OnlyJob,
    Queues,
    Quiet,
    Scrapers,
    Seconds,
    Switch,
    UrlOrStdin,
    UrlsFile,
    Visits,
    listed,
)
from shoal.cli.output import emit, say
from shoal.errors import NoSuchJob, UsageError

if TYPE_CHECKING:
    from shoal.settings import Settings

DEFAULT_JOB = "default"


def worker(
    *,
    queues: Queues = None,
    scraper: str | None = None,
    run_id: str | None = None,
    job: OnlyJob = None,
    drain: Flag = False,
    concurrency: Concurrency = None,
    batch_size: Visits = None,
    lease: Seconds = None,
    app: Scrapers = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    no_pump: Flag = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    quiet: Quiet = False,
) -> int:
    """Run a worker that fetches waiting URLs.

    It runs until it is stopped. Any number of workers can share a frontier; together they never fetch a host
    faster than its rate allows. Ctrl-C or SIGTERM finishes the pages that are being fetched; a second one
    stops at once, and other workers fetch those pages. Exits with 0 after SIGTERM or when no work is left
    (--drain), with 130 after Ctrl-C.

    Parameters
    ----------
    scraper
        With --run-id: the scraper that the run belongs to.
    run_id
        Work on this run only, and exit when none of its URLs is waiting or being fetched.
    drain
        Exit when no URL is waiting or being fetched.
    batch_size
        Another name for --concurrency; with --run-id the default is 10.
    lease
        Seconds after which the URLs of a worker that crashed go to other workers (default 60; 300 for runs).
    no_pump
        With --dispatch, only receive URLs from the broker. Another worker or `shoal pump` must send them.
    """
    if no_pump and not _has_dispatch(dispatch):
        raise UsageError("--no-pump needs --dispatch", hint="name the broker, or leave out --no-pump")
    if scraper and not run_id:
        raise UsageError("--scraper needs --run-id", hint="`shoal run NAME` prints the id of a run")
    return run(
        lambda: _worker(
            queues=listed(queues),
            job=run_id or job,
            scraper=scraper,
            drain=drain or run_id is not None,
            pump=not no_pump,
            quiet=quiet,
            settings={
                "concurrency": batch_size or concurrency or (10 if run_id else None),
                "lease": lease,
                "app": app,
                "frontier": frontier,
                "dispatch": dispatch,
                "log_level": log_level,
                "log_format": log_format,
            },
        )
    )


def _has_dispatch(given: str | None) -> bool:
    from shoal.settings import load

    return bool(load(dispatch=given).dispatch)


async def _worker(
    *,
    queues: list[str] | None,
    job: str | None,
    scraper: str | None,
    drain: bool,
    pump: bool,
    quiet: bool,
    settings: dict[str, Any],
) -> int:
    from contextlib import AsyncExitStack

    from shoal.app import consumer_frontier, evict_dead_workers, running_pump
    from shoal.cli.progress import Doing
    from shoal.engine.supervisor import follow_parent

    follow_parent()
    made = shared(quiet=quiet, logs="info", **settings)
    app = app_of(made)
    async with working_session(made, quiet=quiet) as session:
        session.adopt(app)
        lease = None
        if job is not None:
            spec = (await session.frontier.job(job)).spec
            if scraper is not None and spec.scraper != scraper:
                raise UsageError(
                    f"run {job} belongs to scraper {spec.scraper!r}", hint=f"give --scraper {spec.scraper}"
                )
            # Before the first claim: a worker without the scraper must not hold its URLs.
            session.scraper_of(job, spec)
            if "lease" not in session.settings.model_fields_set:
                lease = spec.lease
            session.one_job = True
            await evict_dead_workers(session.frontier, job)
        doing = Doing()
        async with AsyncExitStack() as stack:
            where = await stack.enter_async_context(consumer_frontier(session, queues, tell=say))
            if session.settings.dispatch and pump:
                await stack.enter_async_context(running_pump(session, queues=queues))
            workman = session.worker(
                job=job, queues=queues, drain=drain, watch=doing.watch, lease=lease, frontier=where
            )
            if not quiet:
                say(f"worker {workman.name} on {_places(session.settings)}")

            def stop() -> None:
                workman.stop()
                if not quiet:
                    say(f"stopping: finishing {workman.running} pages; press Ctrl-C again to stop at once")

            settle_in()
            with Signals(stop) as signals:
                if not quiet:
                    await stack.enter_async_context(doing.shown(lambda: workman.running))
                await workman.run()
        if not quiet:
            done = ", ".join(f"{name} {n:,}" for name, n in sorted(doing.ended.items())) or "nothing to do"
            say(
                f"worker {workman.name}: {done}"
                + (f"; {workman.lost:,} came too late and were refused" if workman.lost else "")
            )
        return signals.code


def _places(settings: Settings) -> str:
    from shoal.registry import broker_place, place

    frontier = place(settings.frontier) or ".shoal/shoal.db"
    return f"{frontier} by {broker_place(settings.dispatch)}" if settings.dispatch else frontier


def enqueue(
    *url: UrlOrStdin,
    job: str | None = None,
    urls_file: UrlsFile = None,
    priority: Annotated[int | None, Parameter(help="1 to 9; 5 is normal, 9 is most urgent.")] = None,
    ttl: float | None = None,
    delay: float = 0.0,
    queue: str | None = None,
    rate: str | None = None,
    per_host: Count = None,
    scope: str | None = None,
    allow_private: Switch = None,
    no_robots: Switch = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    json: Json = False,
) -> int:
    """Add URLs to a job.

    The job is created if it does not exist. URLs come from the arguments, from --urls-file or from stdin; an
    empty file or empty stdin is not an error. A URL that the job already has is not added again, and invalid
    URLs become dead letters. A new job fetches only these pages; set --scope to follow links.

    Parameters
    ----------
    url
        The job's name, then the URLs to add, or - for stdin. With --job, URLs only.
    job
        The job's name (default: default).
    urls_file
        Read URLs from this file, one per line (.gz too), or from stdin (-).
    ttl
        Seconds after which a URL that was not fetched expires.
    delay
        Seconds to wait before the URLs are fetched.
    queue
        The queue to put the URLs in; workers subscribe to queues (default scraping).
    rate
        For a new job: maximum rate per host: 2/s, 30/m or none (default 1/s).
    per_host
        For a new job: pages fetched from one host at a time (default 1).
    scope
        For a new job: how far to follow links: page, prefix, host, domain or any (default page: not at all).
    allow_private
        For a new job: allow private and loopback addresses.
    no_robots
        For a new job: neither fetch nor obey robots.txt.
    """
    if job is None:
        # A job name is not a URL: `shoal enqueue news https://…`.
        named = bool(url) and "://" not in url[0]
        job, url = (url[0], url[1:]) if named else (DEFAULT_JOB, url)
    name = job
    if "-" in url:
        if urls_file:
            raise UsageError("more than one source of URLs", hint="give --urls-file, or - for stdin")
        urls_file, url = "-", tuple(each for each in url if each != "-")
    settings: dict[str, Any] = {
        "rate": rate,
        "per_host": per_host,
        "scope": scope or "page",
        "allow_private": allow_private,
        "no_robots": no_robots,
        "frontier": frontier,
        "dispatch": dispatch,
    }
    return run(
        lambda: _enqueue(
            name, url, settings, urls_file, priority=priority, ttl=ttl, delay=delay, queue=queue, json=json
        )
    )


async def _enqueue(
    job: str,
    given: tuple[str, ...],
    settings: dict[str, Any],
    urls_file: str | None,
    *,
    priority: int | None,
    ttl: float | None,
    delay: float,
    queue: str | None,
    json: bool,
) -> int:
    from itertools import chain

    from shoal.cli.enqueuing import Bar, Source
    from shoal.queues import check_queue

    if priority is not None and not 1 <= priority <= 9:
        raise UsageError(f"priority {priority} is not between 1 and 9", hint="5 is normal, 9 is urgent")
    if queue is not None:
        check_queue(queue)
    if ttl is not None and ttl <= 0:
        raise UsageError(f"ttl {ttl} is not above 0", hint="leave it out for no limit")
    if not urls_file and not given:
        if sys.stdin.isatty():
            raise UsageError("no URL given", hint="give URLs as arguments, with --urls-file, or on stdin")
        urls_file = "-"
    source = Source(urls_file) if urls_file else None
    sources = chain(given, source or ())
    async with open_session(**settings) as session:
        first = next(sources, None)
        answers = {"new": 0, "known": 0, "refused": 0, "bad": 0}
        # No URL is not an error: `shoal discover … | shoal enqueue JOB`. A job without URLs would never
        # end, so none is created.
        if first is not None:
            try:
                await session.frontier.job(job)
            except NoSuchJob:
                spec = session.settings.spec((), queue=queue or "scraping", max_pages=None, max_per_host=None)
                await session.open_job(spec, job)
            with Bar(source) as bar, _repeatable():
                answers = await session.submit(
                    job,
                    chain((first,), sources),
                    priority=priority,
                    ttl=ttl,
                    queue=queue,
                    delay=delay,
                    on_progress=bar,
                )
        if json:
            emit({"job": job, **answers})
        else:
            say(
                f"{job}: {answers['new']:,} added, {answers['known']:,} already known,"
                f" {answers['refused']:,} refused, {answers['bad']:,} invalid"
            )
        return OK


@contextmanager
def _repeatable() -> Iterator[None]:
    """Prints how to continue after a Ctrl-C while URLs are enqueued."""
    try:
        yield
    except asyncio.CancelledError:
        say("interrupted; the URLs enqueued so far are kept, and the same command continues")
        raise
