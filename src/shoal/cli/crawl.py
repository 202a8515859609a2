"""`shoal crawl` and `shoal scrape`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shoal.cli.common import (
    NOTHING,
    OK,
    SOME_DEAD,
    Count,
    Dispatch,
    Flag,
    Frontier,
    Json,
    Many,
    Seconds,
    Signals,
    Switch,
    Visits,
    Workers,
    emit,
    printable,
    run,
    say,
    settle_in,
    talk,
    working_session,
)
from shoal.errors import INTERRUPTED, DispatchError, FetchError, ServerAway, UsageError
from shoal.model import Job, JobState, Scope

if TYPE_CHECKING:
    from shoal.app import Run, Session, Summary
    from shoal.cli.progress import Progress
    from shoal.engine.supervisor import Supervisor
    from shoal.events import Event
    from shoal.scrape.page import Page


def crawl(
    *url: str,
    out: Annotated[str | None, Parameter(alias="-o")] = None,
    max_pages: Count = None,
    depth: int | None = None,
    scope: Scope | None = None,
    include: Many = None,
    exclude: Many = None,
    rate: str | None = None,
    per_host: Count = None,
    concurrency: Visits = None,
    workers: Workers = None,
    fields: str | None = None,
    header: Many = None,
    cache: float | None = None,
    retries: Count = None,
    timeout: Seconds = None,
    user_agent: str | None = None,
    resume: Flag = False,
    no_robots: Switch = None,
    allow_private: Switch = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    json: Json = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative=())] = False,
    demo: Flag = False,
) -> int:
    """Crawl from these URLs to the end on the embedded frontier.

    Without --out, items go to stdout as JSON Lines when it is not a terminal; they stay in the
    frontier either way (`shoal results JOB`). Ctrl-C finishes what is under way, twice stops at
    once; --resume goes on in both cases, and after a crash.

    Parameters
    ----------
    url
        Where to start.
    out
        Write items here; the ending tells the format: .jsonl .json .csv .parquet .md/
    max_pages
        At most this many pages (10,000).
    depth
        At most this many links away from the start.
    scope
        page, prefix, host, domain or any.
    include
        Only URLs like this: `*/blog/*`, or `re:` and a regular expression.
    exclude
        No URLs like this.
    rate
        Visits to one host: 2/s, 30/m, none (1/s).
    per_host
        Visits to one host at a time (1).
    concurrency
        Visits of one worker at a time (16).
    workers
        Worker processes (1).
    fields
        Keep only these fields of an item: title,links
    header
        Send this to the start hosts: "Name: value".
    cache
        Seconds a response may be served again; more than 60 keeps it on disk, across crawls (60).
    retries
        Failed visits until a URL is dead (3).
    timeout
        Seconds one fetch may take (60).
    user_agent
        How we introduce ourselves.
    resume
        Go on with the last crawl of these URLs.
    no_robots
        Do not ask for robots.txt.
    allow_private
        Allow addresses that are not public.
    json
        End with one JSON object on stdout.
    quiet
        No progress, no summary.
    demo
        Crawl the small site that comes with shoal, on loopback.
    """
    settings: dict[str, Any] = {
        "max_pages": max_pages,
        "depth": depth,
        "scope": scope,
        "include": include,
        "exclude": exclude,
        "rate": rate,
        "per_host": per_host,
        "concurrency": concurrency,
        "workers": workers,
        "fields": fields,
        "headers": headers_of(header) if header else None,
        "cache": cache,
        "retries": retries,
        "timeout": timeout,
        "user_agent": user_agent,
        "no_robots": no_robots,
        "allow_private": allow_private,
        "frontier": frontier,
        "dispatch": dispatch,
    }
    if not demo:
        return run(lambda: _crawl(url, settings, out=out, resume=resume, json=json, quiet=quiet))
    if url:
        raise UsageError("--demo brings its own site", hint="leave the URL out, or --demo")
    from shoal.testing.demo import DemoSite

    with DemoSite() as site:
        # It is our own site: no need to be slow with it. The guard opens for this endpoint only.
        settings = settings | {"rate": rate or "none", "per_host": per_host or 8}
        allow = site.url.split("/")[2]
        return run(
            lambda: _crawl(
                (site.url,), settings, out=out, resume=resume, json=json, quiet=quiet, allow=(allow,)
            )
        )


async def _crawl(
    start: tuple[str, ...],
    given: dict[str, Any],
    *,
    out: str | None,
    resume: bool,
    json: bool,
    quiet: bool,
    allow: tuple[str, ...] = (),
) -> int:
    from shoal import urls
    from shoal.export.formats import exporter_for
    from shoal.settings import load

    settings = load(**given)
    if not start:
        raise UsageError("no URL to start from", hint="shoal crawl https://example.com")
    begin = tuple(urls.canonical(url) for url in start)
    if out:
        exporter_for(out, "")  # an ending nobody writes is told now, not after the crawl
    if (settings.workers > 1 or settings.dispatch) and settings.frontier.startswith("memory"):
        raise UsageError("worker processes cannot share memory:", hint="leave --frontier out")
    from shoal.app import broker_reached  # heavy: not before what can be refused without it

    async with working_session(settings, allow=allow, patient=False, quiet=quiet) as session:
        await broker_reached(session, say)
        job, resumed = await _job(session, begin, resume=resume)
        if resumed and job.state is JobState.DONE and not quiet:
            say(f"{job.id} is finished already; its items are in the frontier")
        await session.submit(job.id, begin)
        return await to_end(session, job.id, out=out, json=json, quiet=quiet, allow=allow)


async def to_end(
    session: Session,
    job: str,
    *,
    out: str | None,
    json: bool,
    quiet: bool,
    allow: tuple[str, ...] = (),
    is_run: bool = False,
) -> int:
    """Work on a job to its end, with progress, export and summary. Answers the exit code.

    What a run tells has its name as `run_id` too, as a distributed one does."""
    import msgspec

    from shoal.app import Run, summarise
    from shoal.cli.held import HeldBack
    from shoal.cli.progress import Progress

    settle_in()
    session.one_job = True
    progress = Progress(session.frontier, job, quiet=quiet)
    held = HeldBack(session.frontier, progress.say, job)

    def watch(event: Event) -> None:
        progress.watch(event)
        held.watch(event)

    run_ = Run(session, job, out=out, watch=watch)
    supervisor = _supervisor(session, job, progress, allow)
    to_stdout = not out and not json and not sys.stdout.isatty()
    # Until the last word is said: a second Ctrl-C may come when the first has just done its work.
    with Signals(partial(_stop, run_, supervisor, progress)):
        async with progress.shown(), held.told():
            try:
                work = run_.to_end(_supplied(session, job, supervisor, progress) if supervisor else None)
                summary = await _poured(session, run_, work, to_stdout=to_stdout)
            except (ServerAway, DispatchError):
                if json:  # who asked for it gets it: the job is there, and can be resumed
                    view = await session.frontier.job(job)
                    summary = summarise(view, run_.seconds, out, run_.before)
                    emit(({"run_id": job} if is_run else {}) | msgspec.to_builtins(summary))
                raise
        view = await session.frontier.job(job)
        if run_.stopped and view.state is not JobState.DONE:
            summary = summarise(view, summary.seconds, out, run_.before)
        if not quiet:
            kept = not session.settings.frontier.startswith("memory")
            _show(summary, view, interrupted=run_.stopped, kept=kept)
        if json:
            emit(({"run_id": job} if is_run else {}) | msgspec.to_builtins(summary))
        return _exit_code(view, interrupted=run_.stopped)


async def _job(session: Session, start: tuple[str, ...], *, resume: bool) -> tuple[Job, bool]:
    """The job to work on, and whether it is an earlier one."""
    from shoal.app import evict_dead_workers, resume_job, unfinished

    spec = session.spec("site", start)
    if not resume:
        return await session.open_job(spec), False
    earlier = await unfinished(session, spec)
    if earlier is None:
        say("nothing to resume for these URLs: starting anew")
        return await session.open_job(spec), False
    if earlier.state is JobState.PAUSED:
        await resume_job(session, earlier.id)
    await evict_dead_workers(session.frontier, earlier.id)
    # What was asked for now counts from now on: another rate, a higher page limit. The rest stays.
    spec = session.settings.respec(earlier.spec)
    return await session.frontier.respec_job(earlier.id, spec), True


def _supervisor(session: Session, job: str, progress: Progress, allow: tuple[str, ...]) -> Supervisor | None:
    """Who keeps the worker processes; None when the visits happen in this one."""
    workers, dispatch = session.settings.workers, session.settings.dispatch
    if workers == 1 and not dispatch:
        return None
    from shoal.app import process_died
    from shoal.engine.supervisor import Supervisor
    from shoal.registry import DEFAULT_FRONTIER

    command = [
        *(sys.executable, "-m", "shoal", "worker", "--job", job, "--drain", "--quiet"),
        *("--concurrency", str(session.settings.concurrency), "--lease", str(session.settings.lease)),
        *[word for endpoint in allow for word in ("--allow-endpoint", endpoint)],
    ]
    # By the environment: an address may hold a password, and everybody sees command lines.
    env = {"SHOAL_FRONTIER": session.settings.frontier or DEFAULT_FRONTIER}
    if dispatch:
        # The one pump of this crawl is here: workers only receive.
        command += ["--no-pump"]
        env["SHOAL_DISPATCH"] = dispatch
        env["SHOAL_DISPATCH_BATCH"] = str(session.settings.dispatch_batch)
        env["SHOAL_DISPATCH_PREFETCH"] = str(session.settings.prefetch)
    return Supervisor(
        command, workers, tell=progress.note, env=env, died=partial(process_died, session.frontier)
    )


async def _supplied(session: Session, job: str, supervisor: Supervisor, progress: Progress) -> None:
    """Worker processes, and what sends them their work if they do not claim it."""
    from shoal.app import pumped

    if not session.settings.dispatch:
        await supervisor.run()
        return
    async with pumped(session, watch=progress.watch, job=job):
        await supervisor.run()


async def _poured(
    session: Session, run_: Run, work: Coroutine[Any, Any, Summary], *, to_stdout: bool
) -> Summary:
    """Run, and pour items onto stdout beside it when that is where they go."""
    from shoal.app import items_as_they_come

    task = asyncio.create_task(work)
    try:
        if to_stdout:
            async for body in items_as_they_come(session, run_.job, run_.ended):
                sys.stdout.buffer.write(body + b"\n")
                sys.stdout.buffer.flush()  # whoever reads wants it now, not when a buffer is full
        return await task
    finally:
        if not task.done():  # the reader of our stdout went away
            task.cancel()  # which ends worker processes too
            await asyncio.gather(task, return_exceptions=True)


def _stop(run_: Run, supervisor: Supervisor | None, progress: Progress) -> None:
    if run_.ended.is_set():
        return
    again = run_.stopped
    run_.stop()
    if supervisor is not None:
        supervisor.stop()
    if again:
        progress.note("stopping at once: what is under way goes back in line")
        return
    visits = "workers finish their visits" if supervisor else f"{run_.running} visits are finishing"
    progress.note(f"stopping: {visits}; again to stop at once")


def _show(summary: Summary, job: Job, *, interrupted: bool, kept: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from shoal.cli.progress import duration, ended_by

    counts = job.counts
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))

    def row(name: str, value: str) -> None:
        rows.add_row(name, Text(printable(value)))  # as it is, never as markup

    row("job", job.id)
    row("status", "interrupted: --resume goes on" if interrupted and counts.live else summary.status)
    row("pages", f"{summary.pages:,} in {duration(summary.seconds)} ({summary.pages_per_second:,.1f}/s)")
    row("items", f"{counts.items:,}")
    if counts.skipped:
        row("skipped", f"{counts.skipped:,} (redirects, robots.txt, dropped)")
    if counts.retried:
        row("retried", f"{counts.retried:,}")
    if job.errors:
        row("errors", ", ".join(f"{name} {n:,}" for name, n in job.errors.items()))
    if summary.dead:
        row("dead", f"{summary.dead:,} (shoal dead list --job {job.id})")
    if counts.live:
        row("left", f"{counts.live:,}")
    for line in ended_by(job):
        row("ended by", line)
    if "egress_blocked" in job.errors:
        row("hint", "addresses that are not public need --allow-private")
    place = f"shoal results {job.id}"
    if not kept:
        place = "gone with the memory: frontier"
    if summary.out:
        place = summary.out if job.state is JobState.DONE else f"{summary.out.rstrip('/')}.part (so far)"
    row("results", place)
    talk().print(rows)


def _exit_code(job: Job, *, interrupted: bool) -> int:
    if interrupted and job.state is not JobState.DONE:
        return INTERRUPTED
    counts = job.counts
    if counts.done - counts.skipped == 0:
        return NOTHING
    return SOME_DEAD if counts.dead + counts.expired else OK


def headers_of(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise UsageError(f"bad header {line!r}", hint='write it like "Name: value"')
        found[name.strip()] = value.strip()
    return found


def scrape(
    url: str,
    *,
    format: Literal["markdown", "json", "html", "text", "links"] = "markdown",
    timeout: Seconds = None,
    user_agent: str | None = None,
    header: Many = None,
    no_robots: Switch = None,
    allow_private: Switch = None,
) -> int:
    """Fetch one page, following redirects, and print it.

    Parameters
    ----------
    url
        The page.
    format
        markdown (its main text), json (all fields), html, text or links.
    timeout
        Seconds the fetch may take (60).
    user_agent
        How we introduce ourselves.
    header
        Send this: "Name: value".
    no_robots
        Do not ask for robots.txt.
    allow_private
        Allow addresses that are not public.
    """
    settings: dict[str, Any] = {
        "timeout": timeout,
        "user_agent": user_agent,
        "headers": headers_of(header) if header else None,
        "no_robots": no_robots,
        "allow_private": allow_private,
        "frontier": "memory:",
    }
    return run(lambda: _scrape(url, settings, format))


async def _scrape(url: str, given: dict[str, Any], format: str) -> int:
    from datetime import UTC, datetime

    from shoal.app import Session
    from shoal.scrape.site import site_item
    from shoal.settings import load

    async with Session.opened(load(**given)) as session:
        try:
            page = await session.scrape(url)
        except FetchError as error:
            say(f"error: {url}: {error.error}: {error.message}")
            if error.hint:
                say(f" hint: {error.hint}")
            return NOTHING
        if format == "json":
            emit(site_item(page, None, page.links(), datetime.now(UTC).isoformat(timespec="seconds")))
        else:
            sys.stdout.write(_rendered(page, format).rstrip("\n") + "\n")
        if page.status >= 400:
            say(f"error: {page.url} answered {page.status}")
            return NOTHING
        return OK


def _rendered(page: Page, format: str) -> str:
    if format == "markdown":
        return page.markdown()
    if format == "html":
        return page.html
    return page.text() if format == "text" else "\n".join(page.links())
