"""The URLs in a site's sitemaps and feeds, and adding them to a job.

    SITE is a sitemap or a feed ──▶ that file
    robots.txt   Sitemap: lines ──▶ those files; without any: /sitemap.xml and similar, the first that exists
    the page     <link rel=alternate> ──▶ those feeds
    nothing yet  /feed and similar, the first that exists

Each step adds requests to a job of its own and works until none of them waits: files are pages, and the
frontier paces them. Their URLs arrive as the job's items, whichever worker has read them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shoal import urls
from shoal.app.errands import DISCOVER, feeds_of
from shoal.app.session import Session, new_job_id
from shoal.discover.errand import Errand, How, Report, errand_of
from shoal.errors import FrontierError, UsageError, class_of
from shoal.model import Added, DeadLetter, Failure, JobSpec, JobState, Request, Selection
from shoal.politeness.scope import Scope

__all__ = ["Bounds", "Discovery", "Found", "Read", "discovery", "enqueue_entries", "feeds_of"]

SITEMAPS = ("/sitemap.xml", "/sitemap_index.xml", "/sitemap-index.xml", "/sitemap.xml.gz", "/sitemap.txt")
FEEDS = ("/feed", "/rss.xml", "/atom.xml", "/feed.xml", "/index.xml", "/rss", "/feed.json")
MAX_FEEDS = 10
"""Feeds taken from one page."""
MAX_REST = 120.0
"""Seconds: a host that asks for a longer wait is not waited for."""
_REMEMBERED = 1_000_000
"""URLs remembered so that none is listed twice, at about 100 bytes each. Beyond that, a URL may be listed
again, which the frontier notices; no URL is lost."""
_ITEMS = 5_000
_POLL = 0.05
_URGENT = 9

Obstacle = Literal["", "unreachable", "unknown", "robots", "refused"]
"""Why a site could not be read: it does not respond; its name does not resolve; its robots.txt cannot be
read; its address is blocked."""


class Bounds(Struct, frozen=True):
    """The limits of one discovery."""

    urls: int = 1_000_000
    files: int = 1_000
    total: int = 2 * 1024**3
    """Bytes of all files together, after decompression."""


class Found(Struct, frozen=True, gc=False):
    """A URL that a site lists. `url` is canonical, `source` is the file that lists it."""

    url: str = ""
    lastmod: str | None = None
    """When it last changed, ISO 8601 in UTC; when it was published if only that is known."""
    source: str = ""
    published: str | None = None
    images: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Returns it as JSON: always `url`, `lastmod` and `source`; the rest if it has a value."""
        shown: dict[str, Any] = {"url": self.url, "lastmod": self.lastmod, "source": self.source}
        if self.published:
            shown["published"] = self.published
        if self.images:
            shown["images"] = list(self.images)
        return shown


_AS_ENTRY = msgspec.json.Decoder(Found)
_AS_REPORT = msgspec.json.Decoder(Report)


class Read(Struct, frozen=True):
    """How reading one file went, for a message."""

    file: str
    kind: str = ""
    told: int = 0
    """Number of URLs in it; in an index, of files."""
    trouble: str = ""
    useful: bool = False
    taken: int = 0
    """URLs from all files so far."""
    minor: bool = False
    """The trouble is a warning, not an error: no other file named this one."""


def discovery(
    session: Session,
    site: str,
    *,
    since: float | None = None,
    undated: bool = False,
    images: bool = False,
    bounds: Bounds | None = None,
    tell: Callable[[Read], None] = lambda _read: None,
) -> Discovery:
    """Returns the discovery of a site's URLs, at the site's own pace. Raises BadUrl and UsageError."""
    from shoal.discover.reader import MAX_BYTES  # its XML parser is slow to import

    bounds = bounds or Bounds()
    start = urls.canonical(site if "://" in site else f"https://{site.strip()}")
    spec = session.settings.spec(
        (start,),
        scraper=DISCOVER,
        dedicated=True,
        width=1,
        priority=_URGENT,
        # robots.txt and the home page are not counted as files.
        max_pages=bounds.files + 2,
        max_per_host=None,
        max_body=MAX_BYTES,
        kinds="any",
        cache=0.0,
        page_robots=False,
    )
    Scope(spec)  # a bad pattern must fail here, not in a worker
    errand = Errand("given", since=since, undated=undated, images=images)
    return Discovery(session, start, spec, errand, bounds, tell)


class Discovery:
    """The URLs in a site's sitemaps and feeds. Iterate once, over `batches` or over single entries; the
    attributes then hold the counts."""

    def __init__(
        self,
        session: Session,
        site: str,
        spec: JobSpec,
        errand: Errand,
        bounds: Bounds,
        tell: Callable[[Read], None],
    ) -> None:
        self.site = site
        self.job = ""
        self._session = session
        self._frontier = session.frontier
        self._spec = spec
        self._errand = errand
        self._bounds = bounds
        self._tell = tell
        self._near = Scope(msgspec.structs.replace(spec, include=(), exclude=()))
        self._seen: set[bytes] = set()
        self._items = self._letters = 0
        self._bytes = 0
        self._home = ""
        self._feeds: dict[str, None] = {}
        """Feeds that pages of the site declare."""
        self._is_page = False
        self._stuck = False
        """The host cannot be reached: further guesses are useless."""
        self.taken = 0
        self.files = 0
        """Sitemaps, feeds and lists that were read."""
        self.failed = 0
        """Files that were named and could not be read."""
        self.unchanged = 0
        """Files that have not changed since `since`, according to their index."""
        self.left: Counter[str] = Counter()
        """URLs left out, by reason: scope, excluded, old, undated, repeated, bad."""
        self.obstacle: Obstacle = ""
        """Why the site could not be read."""
        self.ended_by = ""
        """The limit that stopped it, in a few words."""

    async def __aiter__(self) -> AsyncIterator[Found]:
        async for batch in self.batches():
            for entry in batch:
                yield entry

    async def batches(self) -> AsyncIterator[list[Found]]:
        """Yields entries as they are read, some at a time. Raises FrontierError and UsageError, but never
        FetchError: files that cannot be fetched are passed to `tell`."""
        self.job = (await self._session.open_job(self._spec, new_job_id(self._spec))).id
        try:
            if urls.origin_of(self.site) + "/" != self.site:
                async for batch in self._read_files("given", self.site):
                    yield batch
                if not self._is_page:
                    return
            async for batch in self._sitemaps():
                yield batch
            async for batch in self._from_page():
                yield batch
        finally:
            with suppress(FrontierError):
                if (await self._frontier.job(self.job)).state is JobState.RUNNING:
                    await self._frontier.update_job(self.job, state=JobState.CANCELLED)

    async def _sitemaps(self) -> AsyncIterator[list[Found]]:
        permission, private = self._session.permission, self._spec.allow_private
        agent = self._session.agent(self._spec)
        place = f"{urls.origin_of(self.site)}/robots.txt"
        robots = await permission.rules(self.site, allow_private=private, agent=agent)
        if robots is not None and self._spec.robots and not robots.reachable:
            self._stuck, self.obstacle = True, "robots"
            self._tell(Read(place, trouble=f"robots_unreachable: {robots.rule(place)}"))
        if robots is None:
            async for batch in self._read_files("rules", place):
                yield batch
            robots = await permission.rules(self.site, allow_private=private, agent=agent)
        if self._stuck:
            return
        named = robots.sitemaps() if robots is not None else []
        if named:
            async for batch in self._read_files("robots", *named):
                yield batch
            return
        async for batch in self._first(SITEMAPS):
            yield batch

    async def _from_page(self) -> AsyncIterator[list[Found]]:
        if self.ended_by or self._stuck:
            return
        if not self._is_page:
            async for batch in self._read_files("home", self.site):
                yield batch
        if self._home:
            self._near.admit_start(self._home)
        near = [url for url in self._feeds if not self._near.refusal(url, 0)]
        if near and not self._stuck:
            async for batch in self._read_files("page", *near[:MAX_FEEDS]):
                yield batch
        if not self.files:
            async for batch in self._first(FEEDS):
                yield batch

    async def _first(self, paths: Iterable[str]) -> AsyncIterator[list[Found]]:
        """Reads the first of these paths that exists."""
        for path in paths:
            before = self.files
            async for batch in self._read_files("guess", urls.origin_of(self.site) + path):
                yield batch
            if self.files > before or self._stuck or self.ended_by:
                return

    async def _read_files(self, how: How, *files: str) -> AsyncIterator[list[Found]]:
        """Reads these files, and the files that they name."""
        errand = msgspec.structs.replace(self._errand, how=how, named=how == "robots", home=self._home).data()
        spec = self._spec
        for lane in await self._frontier.lanes(names={urls.lane_of(url) for url in files}):
            if lane.paused:
                hint = f"resume it with `shoal lanes resume {lane.name}`"
                raise UsageError(f"{lane.name} is paused", hint=hint)
        requests = [
            Request(url, self.job, queue=spec.queue, priority=spec.priority, data=errand) for url in files
        ]
        answers = await self._frontier.add(requests)
        if Added.REFUSED in answers:
            self.ended_by = f"{self._bounds.files:,} files"
        while Added.NEW in answers and not self.ended_by:
            async for batch in self._work():
                yield batch
            if not (await self._frontier.job(self.job)).counts.leased:
                break
            await asyncio.sleep(_POLL)  # another worker is reading one of them
        await self._report_dead()
        await self._report_waiting()

    async def _work(self) -> AsyncIterator[list[Found]]:
        """Works on the job until none of its requests waits, and yields entries as files are read."""
        # Not logged: the discovery reports what it could not read, and most guessed files do not exist.
        worker = self._session.worker(job=self.job, batch=1, patience=MAX_REST, log=False)
        work = asyncio.create_task(worker.run())
        try:
            over = False
            while not over:
                over = work.done()
                async for batch in self._new_entries():
                    yield batch
                over = over or bool(self.ended_by)
                if not over:
                    await asyncio.wait({work}, timeout=_POLL)
        finally:
            worker.stop()
            worker.stop()
            await asyncio.gather(work, return_exceptions=True)
        work.result()

    async def _new_entries(self) -> AsyncIterator[list[Found]]:
        """Yields the entries of items that were stored since the last call."""
        while items := await self._frontier.items(self.job, after=self._items, limit=_ITEMS):
            self._items = items[-1].seq
            batch = await asyncio.to_thread(self._unseen, [item.body for item in items])
            if batch:
                yield batch
            if self.ended_by:
                return

    def _unseen(self, bodies: list[bytes]) -> list[Found]:
        """Returns entries that were not listed before. Runs on a thread: thousands take milliseconds."""
        as_entry, as_report = _AS_ENTRY.decode, _AS_REPORT.decode
        batch: list[Found] = []
        for body in bodies:
            entry = as_entry(body)
            if not entry.url:
                self._count(as_report(body))
                continue
            key = urls.key("", entry.url)
            if key in self._seen:
                self.left["repeated"] += 1
                continue
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen.add(key)
            batch.append(entry)
            self.taken += 1
            if self.taken >= self._bounds.urls:
                self.ended_by = f"{self._bounds.urls:,} URLs"
                break
        return batch

    def _count(self, report: Report) -> None:
        how = report.errand.how
        self._bytes += report.size
        self.unchanged += report.unchanged
        self.left.update(report.left)
        if self._bytes >= self._bounds.total:
            self.ended_by = f"{self._bounds.total:,} bytes"
        self._feeds.update(dict.fromkeys(report.feeds))
        if (how == "home" and not report.useful) or (how == "given" and report.kind == "page"):
            self._home = report.place
            self._is_page = True
            return
        trouble = report.trouble
        if report.useful:
            self.files += 1
        elif how == "guess":
            return  # a "not found" page with status 200
        else:
            self.failed += 1
            what = "a web page" if report.kind == "page" else "neither sitemap, feed nor list"
            trouble = trouble or f"it is {what}"
        self._tell(Read(report.file, report.kind, report.told, trouble, report.useful, self.taken))

    async def _report_dead(self) -> None:
        """Reports the files that could not be fetched."""
        which = Selection(job=self.job)
        while letters := await self._frontier.dead(which, after=self._letters, limit=1000):
            self._letters = letters[-1].id
            for letter in letters:
                self._report(letter)

    def _report(self, letter: DeadLetter) -> None:
        request, failure = letter.request, letter.failure
        how = errand_of(request.data).how
        read = Read(request.origin or request.url, trouble=f"{failure.error}: {failure.message}")
        status = class_of(failure.error).group == "http"
        if how in ("given", "guess", "rules"):
            self.obstacle = _obstacle(failure)
        if how == "rules":
            if not self._spec.robots:
                return
            self._stuck = True
            self.obstacle = self.obstacle or "unreachable"
        elif how == "home":
            # A site without a home page may still have listed everything.
            read = msgspec.structs.replace(read, minor=status)
            if read.minor and self.files:
                return
        elif how != "guess":
            self.failed += 1
        elif failure.error.startswith("http_5"):
            # The file may exist, and the next attempt may succeed.
            read = msgspec.structs.replace(read, minor=True)
        elif failure.error == "robots" or status:
            return  # a guessed file that does not exist
        else:
            self._stuck = True
        self._tell(read)

    async def _report_waiting(self) -> None:
        """Reports files that still wait after the work: their host asks for a long wait."""
        counts = (await self._frontier.job(self.job)).counts
        if counts.refused and not self.ended_by:
            self.ended_by = f"{self._bounds.files:,} files"
        left = counts.waiting + counts.delayed
        if not left or self.ended_by:
            return
        self._stuck = True
        self.failed += left
        rests = f"http_503: the host asks to wait for more than {MAX_REST:.0f} s; files left: {left:,}"
        self._tell(Read(self.site, trouble=rests))


async def enqueue_entries(session: Session, job: str, entries: Iterable[Found]) -> dict[str, int]:
    """Adds discovered URLs to a job, with the details of each in its request's data.

    Returns how many were new, known and refused.
    """
    spec = (await session.frontier.job(job)).spec
    requests = [
        Request(
            entry.url,
            job,
            queue=spec.queue,
            priority=spec.priority,
            data={name: value for name, value in entry.document().items() if name != "url" and value},
        )
        for entry in entries
    ]
    if (routes := session.routes) is not None:
        requests = [routes.submitted(request, spec) for request in requests]
    answers = Counter(added.value for added in await session.frontier.add(requests))
    return {word: answers[word] for word in ("new", "known", "refused")}


def _obstacle(failure: Failure) -> Obstacle:
    if failure.error == "robots_unreachable":
        return "robots"
    if failure.error == "egress_blocked":
        return "refused"
    if failure.error == "dns_not_found":
        return "unknown"
    return "unreachable" if class_of(failure.error).group in ("connection", "timeout") else ""
