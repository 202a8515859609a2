"""`shoal run` and `shoal scrapers`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.common import OK, Frontier, Json, emit, run, say, table_console
from shoal.errors import UsageError


def run_scraper(
    name: str,
    *,
    app: str | None = None,
    urls_file: str | None = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    run_id: str = "",
    limit: int | None = None,
    out: Annotated[str | None, Parameter(alias="-o")] = None,
    concurrency: int | None = None,
    allow_private: Annotated[bool | None, Parameter(negative=())] = None,
    no_robots: Annotated[bool | None, Parameter(negative=())] = None,
    frontier: Frontier = None,
    json: Json = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative=())] = False,
) -> int:
    """Run a registered scraper, as its execution mode says.

    A single one is crawled here, to the end; a second run of it at the same time is refused.
    A distributed one is enqueued, and the answer on stdout tells how to start workers for it.

    Parameters
    ----------
    name
        The scraper's name.
    app
        Where it is registered: file.py or module:app.
    urls_file
        URLs instead of the scraper's own start: a file with one a line, or - for stdin.
    resume
        Go on with the last run that is not finished.
    run_id
        The run's name (the time, by default); one that exists gets more URLs.
    limit
        Take at most this many URLs.
    out
        For a single run: write items here, as `shoal crawl` does.
    concurrency
        For a single run: visits at a time (16).
    allow_private
        Allow addresses that are not public.
    no_robots
        Do not ask for robots.txt.
    json
        For a single run: end with one JSON object on stdout.
    quiet
        No progress, no summary.
    """
    settings: dict[str, Any] = {
        "app": app,
        "concurrency": concurrency,
        "allow_private": allow_private,
        "no_robots": no_robots,
        "frontier": frontier,
    }
    if limit is not None and limit < 1:
        raise UsageError(f"limit {limit} is not above 0", hint="leave it out for no limit")
    given = _urls(urls_file) if urls_file else None
    wishes: dict[str, Any] = {"run_id": run_id, "resume": resume, "limit": limit}
    return run(lambda: _run(name, given, settings, wishes, out=out, json=json, quiet=quiet))


def _urls(urls_file: str) -> Iterable[str]:
    import sys

    from shoal.discover.urlfile import read_urls

    return read_urls(sys.stdin.buffer if urls_file == "-" else Path(urls_file))


async def _run(
    name: str,
    given: Iterable[str] | None,
    settings: dict[str, Any],
    wishes: dict[str, Any],
    *,
    out: str | None,
    json: bool,
    quiet: bool,
) -> int:
    from shoal.app import Session
    from shoal.cli.crawl import to_end
    from shoal.cli.work import Bar
    from shoal.export.formats import exporter_for
    from shoal.settings import load

    if out:
        exporter_for(out, "")
    async with Session.opened(load(**settings)) as session:
        scraper = session.scraper(name)
        if scraper is not None and scraper.execution == "distributed":
            with Bar(0) as bar:
                started = await session.open_run(name, given, on_progress=bar, **wishes)
            emit(started.queued)
            if started.bad and not quiet:
                say(f"{started.bad:,} bad URLs are dead letters of run {started.run_id}")
            return OK
        async with session.only(name):
            started = await session.open_run(name, given, **wishes)
            return await to_end(session, started.run_id, out=out, json=json, quiet=quiet)


def scrapers(*, app: str | None = None, json: Json = False) -> int:
    """List the scrapers that an application registers.

    Parameters
    ----------
    app
        file.py or module:app.
    """
    from shoal.app import load_app
    from shoal.politeness.pacing import format_rate
    from shoal.settings import load

    where = load(app=app).app
    if not where:
        raise UsageError("no application to look into", hint="give --app FILE, or set SHOAL_APP")
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
                    "labels": [label for label in each.handlers if label],
                }
                for each in known
            ]
        )
        return OK
    from rich.table import Table

    table = Table("scraper", "execution", "scope", "rate", "start", box=None, padding=(0, 2, 0, 0))
    for each in known:
        first = each.start[0] if each.start else "-"
        more = f" and {len(each.start) - 1} more" if len(each.start) > 1 else ""
        table.add_row(each.name, each.execution, each.scope, format_rate(each.gap), first + more)
    table_console().print(table)
    return OK
