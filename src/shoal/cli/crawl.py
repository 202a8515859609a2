"""`shoal crawl` and `shoal scrape`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shoal.cli.common import (
    NOTHING,
    OK,
    SOME_DEAD,
    Signals,
    app_of,
    fail,
    logging_as,
    run,
    settle_in,
    working_session,
)
from shoal.cli.options import (
    AllowPrivate,
    Cache,
    Concurrency,
    Count,
    CrawlLogLevel,
    Depth,
    Dispatch,
    Exclude,
    Fields,
    Flag,
    Frontier,
    Header,
    Include,
    LogFormat,
    NoRobots,
    PerHost,
    Quiet,
    Rate,
    Retries,
    Scrapers,
    Timeout,
    UserAgent,
    Within,
    Workers,
    headers_of,
)
from shoal.cli.output import as_called, duration, emit, is_json, pass_on, say, show, talk
from shoal.errors import INTERRUPTED, DispatchError, ExportError, FetchError, ServerAway, UsageError
from shoal.model import Job, JobState
from shoal.printing import harmless, printable

if TYPE_CHECKING:
    from shoal.app import Run, Session, Summary
    from shoal.cli.progress import Progress
    from shoal.engine.supervisor import Supervisor
    from shoal.scrape.page import Page

ROOM = "free some space, or write to another place"


def crawl(
    *url: str,
    out: Annotated[str | None, Parameter(alias="-o")] = None,
    max_pages: Count = None,
    depth: Depth = None,
    scope: Within = None,
    include: Include = None,
    exclude: Exclude = None,
    rate: Rate = None,
    per_host: PerHost = None,
    concurrency: Concurrency = None,
    workers: Workers = None,
    fields: Fields = None,
    header: Header = None,
    cache: Cache = None,
    retries: Retries = None,
    timeout: Timeout = None,
    user_agent: UserAgent = None,
    resume: Flag = False,
    no_robots: NoRobots = None,
    allow_private: AllowPrivate = None,
    app: Annotated[Scrapers, Parameter(help="Your hooks: file.py or module:app.")] = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    json: Flag = False,
    log_level: CrawlLogLevel = None,
    log_format: LogFormat = None,
    quiet: Annotated[Quiet, Parameter(help="Print no progress and no summary.")] = False,
    demo: Flag = False,
) -> int:
    """Crawl from one or more URLs to the end.

    Items are stored in the frontier (`shoal results JOB` prints them). Without --out they are also
    written to stdout as JSON Lines, unless stdout is a terminal. Press Ctrl-C once to finish the pages
    that are being fetched and stop, twice to stop at once. --resume continues a crawl that was
    interrupted or crashed.

    Parameters
    ----------
    url
        The URLs to start from.
    out
        Write items to this file; its ending sets the format: .jsonl .json .csv .parquet .md/
    max_pages
        Maximum number of pages (default 10,000).
    workers
        Number of worker processes (default 1).
    resume
        Continue the last crawl of these URLs.
    json
        Print one JSON object on stdout at the end.
    demo
        Crawl the small demo site that comes with shoal, on loopback.
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
        "headers": headers_of(header),
        "cache": cache,
        "retries": retries,
        "timeout": timeout,
        "user_agent": user_agent,
        "no_robots": no_robots,
        "allow_private": allow_private,
        "app": app,
        "frontier": frontier,
        "dispatch": dispatch,
        "log_level": log_level,
        "log_format": log_format,
    }
    if not demo:
        return run(lambda: _crawl(url, settings, out=out, resume=resume, json=json, quiet=quiet))
    if url:
        raise UsageError("--demo has its own site", hint="leave out the URL, or --demo")
    from shoal.demo.books import DemoSite

    with DemoSite() as site:
        # Our own site needs no rate limit. The guard admits this private endpoint only.
        settings |= {"rate": rate or "none", "per_host": per_host or 8}
        settings |= {"allow_private": allow_private or (site.url.split("/")[2],)}
        return run(lambda: _crawl((site.url,), settings, out=out, resume=resume, json=json, quiet=quiet))


async def _crawl(
    start: tuple[str, ...],
    given: dict[str, Any],
    *,
    out: str | None,
    resume: bool,
    json: bool,
    quiet: bool,
) -> int:
    from shoal import urls
    from shoal.export.formats import exporter_for
    from shoal.registry import in_process
    from shoal.settings import load

    settings = logging_as("warning", load(**given), quiet=quiet)
    if not start:
        raise UsageError("no URL to start from", hint="shoal crawl https://example.com")
    begin = tuple(urls.canonical(url) for url in start)
    if out:
        exporter_for(out, "")  # an unknown file ending must fail now, not after the crawl
    if (settings.workers > 1 or settings.dispatch) and in_process(settings.frontier):
        raise UsageError("worker processes cannot share a memory: frontier", hint="leave out --frontier")
    from shoal.app import wait_for_broker  # slow to import: not before the checks above

    loaded = app_of(settings)
    async with working_session(settings, patient=False, quiet=quiet) as session:
        session.adopt(loaded)
        await wait_for_broker(session, say)
        job, resumed = await _job(session, begin, resume=resume)
        if resumed and job.state is JobState.DONE and not quiet:
            say(f"{job.id} is already finished; `shoal results {job.id}` prints its items")
        await session.submit(job.id, begin)
        return await to_end(session, job.id, out=out, json=json, quiet=quiet)


async def to_end(
    session: Session,
    job: str,
    *,
    out: str | None,
    json: bool,
    quiet: bool,
    is_run: bool = False,
) -> int:
    """Works on a job to its end, with progress, export and summary. Returns the exit code.

    With `is_run`, the JSON summary has the name as `run_id` too, as that of a distributed run has."""
    import msgspec

    from shoal.app import Run, summarise
    from shoal.cli.progress import Progress
    from shoal.registry import in_process

    settle_in()
    session.one_job = True
    progress = Progress(session.frontier, job, quiet=quiet)
    run_ = Run(session, job, out=out, watch=progress.watch)
    supervisor = _supervisor(session, job, progress)
    to_stdout = not out and not json and not sys.stdout.isatty()
    # Until everything is printed: a second Ctrl-C may come just after the first has stopped the workers.
    with Signals(partial(_stop, run_, supervisor, progress)):
        async with progress.shown():
            try:
                work = run_.to_end(_run_workers(session, job, supervisor, progress) if supervisor else None)
                summary = await _print_items(session, run_, work, to_stdout=to_stdout)
            except (ServerAway, DispatchError, ExportError) as error:
                view = await session.frontier.job(job)
                if isinstance(error, ExportError):
                    error.hint += "; " + _how_to_continue(view)
                if json:  # printed after an error too: the job exists and can be resumed
                    summary = summarise(view, run_.seconds, out, run_.before)
                    emit(({"run_id": job} if is_run else {}) | msgspec.to_builtins(summary))
                raise
        view = await session.frontier.job(job)
        if run_.stopped and view.state is not JobState.DONE:
            summary = summarise(view, summary.seconds, out, run_.before)
        if not quiet and not is_json():
            kept = not in_process(session.settings.frontier)
            _show(summary, view, interrupted=run_.stopped, kept=kept, spared=run_.spared, before=run_.before)
        elif run_.spared:
            say(f"{out} was not changed: {job} found no items")
        if json:
            emit(({"run_id": job} if is_run else {}) | msgspec.to_builtins(summary))
        if run_.nothing is not None:
            return fail(run_.nothing)
        if not quiet and view.state is JobState.DONE and not summary.pages:
            say(f"no page was stored: {view.counts.skipped:,} skipped")
        return _exit_code(view, interrupted=run_.stopped)


async def _job(session: Session, start: tuple[str, ...], *, resume: bool) -> tuple[Job, bool]:
    """Returns the job to work on, and whether it is an earlier one."""
    from shoal.app import evict_dead_workers, find_unfinished, resume_job

    spec = session.spec("site", start)
    if not resume:
        return await session.open_job(spec), False
    earlier = await find_unfinished(session, spec)
    if earlier is None:
        say("no earlier crawl of these URLs to resume: starting a new one")
        return await session.open_job(spec), False
    if earlier.state is JobState.PAUSED:
        await resume_job(session, earlier.id)
    await evict_dead_workers(session.frontier, earlier.id)
    # Settings given now replace earlier ones: another rate, a higher page limit. The rest stays.
    spec = session.settings.respec(earlier.spec)
    return await session.frontier.update_job(earlier.id, spec=spec), True


def _supervisor(session: Session, job: str, progress: Progress) -> Supervisor | None:
    """Returns the supervisor of worker processes; None if this process does the visits."""
    workers, dispatch = session.settings.workers, session.settings.dispatch
    if workers == 1 and not dispatch:
        return None
    from shoal.app import GIVE_UP_AFTER, process_died
    from shoal.engine.supervisor import Supervisor
    from shoal.registry import DEFAULT_FRONTIER

    command = [
        *(sys.executable, "-m", "shoal", "worker", "--job", job, "--drain", "--quiet"),
        *("--concurrency", str(session.settings.concurrency), "--lease", str(session.settings.lease)),
    ]
    # In the environment: an address may hold a password, and command lines are public.
    env = {"SHOAL_FRONTIER": session.settings.frontier or DEFAULT_FRONTIER}
    env |= session.settings.log_variables
    patience = session.settings.give_up_after
    env["SHOAL_GIVE_UP_AFTER"] = str(GIVE_UP_AFTER if patience is None else patience)
    if session.settings.app:
        env["SHOAL_APP"] = session.settings.app
    if session.settings.user_agent:
        env["SHOAL_USER_AGENT"] = session.settings.user_agent
    if dispatch:
        # This process runs the only pump of the crawl: workers only receive.
        command += ["--no-pump"]
        env["SHOAL_DISPATCH"] = dispatch
        env["SHOAL_DISPATCH_BATCH"] = str(session.settings.dispatch_batch)
        env["SHOAL_DISPATCH_PREFETCH"] = str(session.settings.prefetch)
    return Supervisor(
        command,
        workers,
        tell=progress.note,
        on_line=pass_on,
        env=env,
        on_death=partial(process_died, session.frontier),
    )


async def _run_workers(session: Session, job: str, supervisor: Supervisor, progress: Progress) -> None:
    """Runs worker processes, with a pump beside them if a broker delivers the URLs."""
    from shoal.app import running_pump

    if not session.settings.dispatch:
        await supervisor.run()
        return
    async with running_pump(session, job=job):
        await supervisor.run()


async def _print_items(
    session: Session, run_: Run, work: Coroutine[Any, Any, Summary], *, to_stdout: bool
) -> Summary:
    """Runs `work`, and with `to_stdout` prints the items as they come."""
    from shoal.app import items_as_they_come

    task = asyncio.create_task(work)
    try:
        if to_stdout:
            async for body in items_as_they_come(session, run_.job, run_.ended):
                await _print_item(run_, body)
        return await task
    finally:
        if not task.done():
            task.cancel()  # which ends worker processes too
            await asyncio.gather(task, return_exceptions=True)


async def _print_item(run_: Run, body: bytes) -> None:
    try:
        sys.stdout.buffer.write(body + b"\n")
        sys.stdout.buffer.flush()  # the reader wants it now, not when a buffer is full
    except OSError as error:
        await run_.pause()
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            say(_how_to_continue(await run_.session.frontier.job(run_.job)))
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes again at exit
        raise ExportError(f"cannot write to stdout: {error.strerror or error}", hint=ROOM) from error


def _how_to_continue(job: Job) -> str:
    """Returns how to continue a job whose output failed."""
    if job.state is JobState.DONE:
        return f"{job.id} is done: `shoal export {job.id} --to FILE` writes its items"
    return f"{job.id} is {job.state.value}: the same command with --resume continues it"


def _stop(run_: Run, supervisor: Supervisor | None, progress: Progress) -> None:
    if run_.ended.is_set():
        return
    again = run_.stopped
    run_.stop()
    if supervisor is not None:
        supervisor.stop()
    if again:
        progress.note("stopping at once: unfinished pages go back in the queue")
        return
    visits = "workers finish their pages" if supervisor else f"finishing {run_.running} pages"
    progress.note(f"stopping: {visits}; press Ctrl-C again to stop at once")


def _show(summary: Summary, job: Job, *, interrupted: bool, kept: bool, spared: bool, before: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from shoal.cli.progress import ended_by

    counts = job.counts
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))

    def row(name: str, value: str) -> None:
        rows.add_row(name, Text(as_called(printable(value))))  # Text: a URL is not markup

    row("job", job.id)
    row("status", "interrupted; continue with --resume" if interrupted and counts.live else summary.status)
    speed = f"in {duration(summary.seconds)} ({summary.pages_per_second:,.1f}/s)"
    row(
        "pages",
        f"{summary.pages:,}, {summary.pages - before:,} of them now {speed}"
        if before
        else f"{summary.pages:,} {speed}",
    )
    row("items", f"{counts.items:,}")
    if counts.skipped:
        row("skipped", f"{counts.skipped:,} (redirects, robots.txt, file types, dropped)")
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
    if "egress_blocked" in job.errors and summary.pages:
        row("hint", "private addresses need --allow-private")
    place = f"shoal results {job.id}"
    if not kept:
        place = "not kept: the frontier was memory:"
    if summary.out and spared:
        place = f"none; {summary.out} was not changed"
    elif summary.out and job.state is JobState.DONE:
        place = summary.out
    elif summary.out and counts.items:
        place = f"{summary.out if summary.out.endswith('/') else summary.out + '.part'} (so far)"
    row("results", place)
    show(talk(), rows)


def _exit_code(job: Job, *, interrupted: bool) -> int:
    if interrupted and job.state is not JobState.DONE:
        return INTERRUPTED
    counts = job.counts
    if job.state is not JobState.DONE and counts.done == 0:
        return NOTHING
    return SOME_DEAD if counts.dead + counts.expired else OK


def scrape(
    url: str,
    *,
    format: Literal["markdown", "json", "html", "text", "links"] = "markdown",
    timeout: Timeout = None,
    user_agent: UserAgent = None,
    header: Header = None,
    no_robots: NoRobots = None,
    allow_private: AllowPrivate = None,
) -> int:
    """Fetch one page and print it.

    Redirects are followed. Exits with 3 if the page could not be fetched.

    Parameters
    ----------
    url
        The URL of the page.
    format
        Output: markdown (the main text), json (all fields), html, text or links.
    """
    settings: dict[str, Any] = {
        "timeout": timeout,
        "user_agent": user_agent,
        "headers": headers_of(header),
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
            if format == "json":
                at = datetime.now(UTC).isoformat(timespec="seconds")
                emit(site_item(page, None, page.links(), at))
            else:
                text = _rendered(page, format)
                shown = printable(text) if sys.stdout.isatty() else harmless(text)
                sys.stdout.write(shown.rstrip("\n") + "\n")
        except FetchError as error:
            say(f"error: {url}: {error.error}: {error.message}")
            if error.hint:
                say(f" hint: {error.hint}")
            return NOTHING
        if page.status >= 400:
            say(f"error: {page.url}: the server answered {page.status}")
            return NOTHING
        return OK


def _rendered(page: Page, format: str) -> str:
    if format == "markdown":
        return page.markdown()
    if format == "html":
        return page.html
    return page.text() if format == "text" else "\n".join(page.links())
