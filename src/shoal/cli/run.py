"""`shoal run` and `shoal scrapers`."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.common import OK, run, shared, working_session
from shoal.cli.options import (
    AllowPrivate,
    Count,
    CrawlLogLevel,
    Dispatch,
    Flag,
    Frontier,
    Json,
    LogFormat,
    NoRobots,
    Quiet,
    Scrapers,
    UrlsFile,
    Visits,
)
from shoal.cli.output import emit, print_table, say
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.app import Session, Started


def run_scraper(
    name: str,
    /,
    *url: str,
    app: Scrapers = None,
    urls_file: UrlsFile = None,
    resume: Flag = False,
    run_id: str = "",
    limit: Count = None,
    out: Annotated[str | None, Parameter(alias="-o")] = None,
    concurrency: Visits = None,
    allow_private: AllowPrivate = None,
    no_robots: NoRobots = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    json: Flag = False,
    log_level: CrawlLogLevel = None,
    log_format: LogFormat = None,
    quiet: Annotated[Quiet, Parameter(help="Print no progress and no summary.")] = False,
    demo: Flag = False,
) -> int:
    """Run one of your scrapers.

    A scraper with execution="single" runs in this process, to the end; only one run of it is allowed at a
    time. With execution="distributed", the URLs are only enqueued, and the command that starts workers for
    the run is printed to stdout.

    Parameters
    ----------
    name
        The scraper's name.
    url
        URLs to start from, instead of the scraper's own start=.
    urls_file
        Read URLs from this file, one per line, or from stdin (-), instead of the scraper's own start=.
    resume
        Continue the last unfinished run, or the one that --run-id names; only URLs given here are added.
    run_id
        The run's name (default: the current time). A run that exists gets the additional URLs.
    limit
        Take at most this many URLs.
    out
        Single runs only: write items to this file, as `shoal crawl` does.
    concurrency
        Single runs only: pages fetched at a time (default 16).
    json
        Single runs only: print one JSON object on stdout at the end.
    demo
        Single runs only: start from the small demo site that comes with shoal, on loopback.
    """
    settings: dict[str, Any] = {
        "app": app,
        "concurrency": concurrency,
        "allow_private": allow_private,
        "no_robots": no_robots,
        "frontier": frontier,
        "dispatch": dispatch,
        "log_level": log_level,
        "log_format": log_format,
    }
    if (urls_file is not None) + bool(url) + demo > 1:
        raise UsageError("more than one source of URLs", hint="give arguments, --urls-file or --demo")
    wishes: dict[str, Any] = {"start": url, "run_id": run_id, "resume": resume, "limit": limit}
    outcome: dict[str, Any] = {"out": out, "json": json, "quiet": quiet}
    if not demo:
        return run(lambda: _run(name, urls_file, settings, wishes, **outcome))
    from shoal.demo.books import DemoSite

    with DemoSite() as site:
        # Our own site needs no rate limit. The guard admits this private endpoint only.
        settings |= {"rate": "none", "per_host": 8}
        settings |= {"allow_private": allow_private or (site.url.split("/")[2],)}
        wishes |= {"start": (site.url,)}
        return run(lambda: _run(name, None, settings, wishes, demo=True, **outcome))


async def _run(
    name: str,
    urls_file: str | None,
    settings: dict[str, Any],
    wishes: dict[str, Any],
    *,
    out: str | None,
    json: bool,
    quiet: bool,
    demo: bool = False,
) -> int:
    from shoal import urls
    from shoal.cli.crawl import to_end
    from shoal.export.formats import exporter_for
    from shoal.registry import in_process

    if out:
        exporter_for(out, "")
    wishes |= {"start": tuple(urls.canonical(url) for url in wishes["start"])}
    from shoal.app import exclusive_run, wait_for_broker  # slow to import: not before the checks above

    async with working_session(shared(quiet=quiet, logs="warning", **settings), quiet=quiet) as session:
        scraper = session.scraper(name)
        if scraper is None or scraper.execution == "single":
            if session.settings.dispatch and in_process(session.settings.frontier):
                raise UsageError(
                    "worker processes cannot share a memory: frontier", hint="leave out --frontier"
                )
            await wait_for_broker(session, say)
            async with exclusive_run(session, name):
                started = await _opened(session, name, urls_file, wishes, quiet=quiet)
                return await to_end(session, started.run_id, out=out, json=json, quiet=quiet, is_run=True)
        if demo:
            raise UsageError(
                f"scraper {name!r} is distributed: its workers cannot reach the demo site",
                hint='use `shoal crawl --demo`, or a scraper with execution="single"',
            )
        started = await _opened(session, name, urls_file, wishes, quiet=quiet)
    emit(started.queued)
    if not quiet and out:
        # Not an error: a scraper can become distributed while the command stays the same.
        later = shlex.join(["shoal", "export", started.run_id, "--to", out])
        say(f"--out does not apply to a distributed run; when the run is done: {later}")
    if not quiet and started.known:
        say(f"{started.known:,} URLs were already in run {started.run_id}")
    if not quiet and started.bad:
        say(f"{started.bad:,} invalid URLs became dead letters of run {started.run_id}")
    return OK


async def _opened(
    session: Session, name: str, urls_file: str | None, wishes: dict[str, Any], *, quiet: bool
) -> Started:
    """Opens and fills the run, with a progress bar: a file may hold a million URLs."""
    from shoal.app import open_run
    from shoal.cli.enqueuing import Bar, Source

    source = Source(urls_file) if urls_file else None
    with Bar(source, limit=wishes["limit"], quiet=quiet) as bar, _resumable(wishes["run_id"]):
        return await open_run(session, name, source, on_progress=bar, **wishes)


@contextmanager
def _resumable(run_id: str) -> Iterator[None]:
    """Prints how to continue after a Ctrl-C while URLs are enqueued."""
    try:
        yield
    except asyncio.CancelledError:
        again = f"--run-id {shlex.quote(run_id)}" if run_id else "--resume"
        say(f"interrupted; the URLs enqueued so far are kept, and the same command with {again} continues")
        raise


def scrapers(*, app: Scrapers = None, json: Json = False) -> int:
    """List your scrapers."""
    from shoal.app import load_app
    from shoal.politeness.pacing import format_rate
    from shoal.settings import load

    where = load(app=app).app
    if not where:
        raise UsageError("no application given", hint="give --app FILE, or set SHOAL_APP")
    known = load_app(where).scrapers.values()
    if json:
        emit(
            [
                {
                    "name": each.name,
                    "execution": each.execution,
                    "scope": each.scope,
                    "rate": format_rate(each.gap),
                    "start": list(each.start),
                    "retries": each.retries,
                    "lease": each.lease,
                    "queue": each.queue,
                    "priority": each.priority,
                    "per_host": each.per_host,
                    "fetcher": each.fetcher,
                    "labels": [label for label in each.handlers if label],
                }
                for each in known
            ]
        )
        return OK
    rows: list[tuple[str, ...]] = []
    for each in known:
        first = each.start[0] if each.start else "-"
        more = f" and {len(each.start) - 1} more" if len(each.start) > 1 else ""
        rows.append((each.name, each.execution, each.scope, format_rate(each.gap), first + more))
    print_table(("scraper", "execution", "scope", "rate", "start"), rows)
    return OK
