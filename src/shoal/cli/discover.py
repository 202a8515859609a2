"""`shoal discover`: the URLs in a site's sitemaps and feeds."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shoal.cli.common import NOTHING, OK, SOME_DEAD, open_session, run, settle_in
from shoal.cli.options import (
    AllowPrivate,
    Dispatch,
    Exclude,
    Flag,
    Frontier,
    Header,
    Include,
    Quiet,
    Rate,
    Switch,
    Timeout,
    UserAgent,
    headers_of,
)
from shoal.cli.output import emit, say, talk
from shoal.errors import NoSuchJob, UsageError
from shoal.printing import printable

if TYPE_CHECKING:
    from rich.status import Status

    from shoal.app import Session
    from shoal.app.discovery import Discovery, Found, Read


LEFT = {
    "scope": "on other hosts (--scope domain or any lists them)",
    "excluded": "excluded by --include or --exclude",
    "old": "older than --since",
    "undated": "without a date (--undated lists them)",
    "repeated": "listed more than once",
    "bad": "not valid URLs",
    "elsewhere": "files on other hosts that robots.txt does not name",
    "nested": "files nested too deep, or too many",
}
_ENQUEUE = 5_000


def discover(
    site: str,
    *,
    since: str | None = None,
    undated: Flag = False,
    include: Include = None,
    exclude: Exclude = None,
    scope: Literal["prefix", "host", "domain", "any"] | None = None,
    enqueue: str | None = None,
    limit: int | None = None,
    max_files: int | None = None,
    max_bytes: int | None = None,
    images: Flag = False,
    rate: Rate = None,
    header: Header = None,
    timeout: Timeout = None,
    user_agent: UserAgent = None,
    no_robots: Switch = None,
    allow_private: AllowPrivate = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    json: Flag = False,
    quiet: Quiet = False,
) -> int:
    """List the URLs in a site's sitemaps and feeds.

    Finds sitemaps and feeds through robots.txt, their usual addresses and the home page, and prints one URL
    per line. Files are fetched one after another, at the rate the site allows. Exits with 1 if a file that
    the site names could not be read, with 3 if no file could be read.

    Parameters
    ----------
    site
        A host such as example.com, or the URL of a sitemap, a feed, a list of URLs or a page.
    since
        List only URLs that changed since then: 2026-05-31, 12h, 7d, 2w.
    undated
        With --since, also list URLs that have no date.
    scope
        Which URLs to list (default host).
    enqueue
        Add the URLs to this job instead of printing them; the job is created if it does not exist.
    limit
        Maximum number of URLs (default 1,000,000).
    max_files
        Maximum number of sitemaps and feeds to read (default 1,000).
    max_bytes
        Maximum size of all files together, in bytes after decompression (default 2 GiB).
    images
        With --json, also print the images that sitemaps name.
    no_robots
        Fetch files even if robots.txt forbids them; the sitemaps that it names are still used.
    json
        Print one JSON object per line: url, lastmod, source. With --enqueue, one object in all.
    """
    from shoal.app.discovery import Bounds
    from shoal.discover.entry import parse_since

    given = {"urls": limit, "files": max_files, "total": max_bytes}
    for name, value in given.items():
        if value is not None and value < 1:
            flag = {"urls": "limit", "files": "max-files", "total": "max-bytes"}[name]
            raise UsageError(f"--{flag} {value} is not above 0", hint="leave it out for the default")
    bounds = Bounds(**{name: value for name, value in given.items() if value is not None})
    moment = parse_since(since) if since is not None else None
    settings: dict[str, Any] = {
        "include": include,
        "exclude": exclude,
        "scope": scope or "host",
        "rate": rate,
        "headers": headers_of(header),
        "timeout": timeout,
        "user_agent": user_agent,
        "no_robots": no_robots,
        "allow_private": allow_private,
        # Without --enqueue nothing is stored.
        "frontier": frontier if enqueue else "memory:",
        "dispatch": dispatch,
    }
    options = {"since": moment, "undated": undated, "images": images, "bounds": bounds}
    return run(lambda: _discover(site, settings, options, job=enqueue, json=json, quiet=quiet))


async def _discover(
    site: str, settings: dict[str, Any], options: dict[str, Any], *, job: str | None, json: bool, quiet: bool
) -> int:
    from shoal.app import discovery

    async with open_session(**settings) as session:
        settle_in()
        with Display(quiet=quiet) as display:
            found = discovery(session, site, tell=display, **options)
            if job is None:
                await _print(found, json=json)
                answers = None
            else:
                answers = await _enqueue(session, found, job)
        if answers is not None and json:
            emit({"job": job, **answers, "files": found.files, "failed": found.failed})
        if not quiet:
            _sum_up(found, job, answers, site)
        if not found.files:
            return NOTHING
        return SOME_DEAD if found.failed else OK


async def _print(found: Discovery, *, json: bool) -> None:
    encode = msgspec.json.Encoder().encode
    out = sys.stdout.buffer
    async for batch in found.batches():
        if json:
            lines = [encode(entry.document()) for entry in batch]
        else:
            lines = [entry.url.encode() for entry in batch]  # canonical: no control characters
        out.write(b"\n".join(lines) + b"\n")
        out.flush()  # the reader wants it now, not when a buffer is full


async def _enqueue(session: Session, found: Discovery, job: str) -> dict[str, int]:
    from shoal.app import enqueue_entries

    answers: Counter[str] = Counter(new=0, known=0, refused=0)
    waiting: list[Found] = []

    async def send() -> None:
        if waiting:
            await _open(session, job)
            answers.update(await enqueue_entries(session, job, waiting))
            waiting.clear()

    try:
        async for batch in found.batches():
            waiting += batch
            if len(waiting) >= _ENQUEUE:
                await send()
    finally:
        # When interrupted between two files, what was read is still added.
        await send()
    return dict(answers)


async def _open(session: Session, job: str) -> None:
    """Opens the job unless it exists; like that of `shoal enqueue`, it fetches these pages only."""
    try:
        await session.frontier.job(job)
    except NoSuchJob:
        spec = session.settings.spec(
            (), scope="page", include=(), exclude=(), max_pages=None, max_per_host=None
        )
        await session.open_job(spec, job)


class Display:
    """Prints a line for each file, and on a terminal a live status."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._status: Status | None = None
        self._files = 0

    def __enter__(self) -> Display:
        # URLs printed to the same terminal show the progress already.
        if not self._quiet and sys.stderr.isatty() and not sys.stdout.isatty():
            from rich.status import Status

            self._status = Status("reading robots.txt", console=talk())
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, read: Read) -> None:
        if read.trouble and not (read.minor and self._quiet):
            level = "warning" if read.useful or read.minor else "error"
            say(f"{level}: {read.file}: {read.trouble}")
        if read.useful and not self._quiet:
            what = "files" if read.kind == "index" else "URLs"
            say(f"{read.file}: {read.kind}, {read.told:,} {what}")
        self._files += read.useful
        if self._status is not None:
            self._status.update(f"{read.taken:,} URLs from {self._files:,} files")


def _sum_up(found: Discovery, job: str | None, answers: dict[str, int] | None, site: str) -> None:
    say(f"{found.taken:,} URLs from {found.files:,} files" + _failures(found))
    if answers is not None:
        say(
            f"{job}: {answers['new']:,} added, {answers['known']:,} already known,"
            f" {answers['refused']:,} refused"
        )
    for reason, number in found.left.items():
        if number:
            say(f"left out: {number:,} {LEFT.get(reason, reason)}")
    if found.unchanged:
        say(f"not read: {found.unchanged:,} files that have not changed since --since")
    if found.ended_by:
        say(f"stopped at the limit of {found.ended_by}")
    if not found.files:
        say(f" hint: {_hint(found, site)}")


def _hint(found: Discovery, site: str) -> str:
    """Returns what to do when no file was found."""
    match found.obstacle:
        case "unreachable" if "://" not in site:
            plain = f"`shoal discover http://{printable(site)}`"
            return (
                f"tried https: use {plain} if the site has no TLS; or check the address, or try again later"
            )
        case "unreachable":
            return "the site cannot be reached: check the address, or try again later"
        case "robots":
            return "robots.txt could not be read: try again later, or ignore it with --no-robots"
        case "refused":
            return "private addresses need --allow-private"
        case "unknown":
            return "check the host name; a name of your own network needs --allow-private"
    return f"find pages by their links instead: `shoal crawl {printable(found.site)}`"


def _failures(found: Discovery) -> str:
    return f"; {found.failed:,} could not be read" if found.failed else ""
