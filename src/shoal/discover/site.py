"""Which files of a site tell of its URLs, and what they tell.

    SITE is a sitemap or a feed ──▶ that one
    robots.txt   Sitemap: lines ──▶ those; without any: /sitemap.xml and its relatives, the first there is
    the page     <link rel=alternate> ──▶ those feeds
    nothing yet  /feed and its relatives, the first there is

Everything is bounded: files, their depth in index files, bytes, URLs. A file may speak for
another host only if robots.txt names it, or an index that robots.txt names.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from shoal import urls
from shoal.discover.calls import Calls
from shoal.discover.entry import Child, Entry, Moment
from shoal.discover.reader import MAX_BYTES, MAX_URLS, Kind, Reader
from shoal.discover.text import STEP
from shoal.errors import FetchError, class_of
from shoal.model import JobSpec, Response
from shoal.politeness.robots import Robots
from shoal.politeness.scope import Scope

SITEMAPS = ("/sitemap.xml", "/sitemap_index.xml", "/sitemap-index.xml", "/sitemap.xml.gz", "/sitemap.txt")
FEEDS = ("/feed", "/rss.xml", "/atom.xml", "/feed.xml", "/index.xml", "/rss", "/feed.json")
MAX_FEEDS = 10
"""Feeds taken from one page."""
_REMEMBERED = 1_000_000
"""URLs remembered so that none is told twice, at about 100 bytes. Forgetting costs repetitions, which
the frontier knows as such; it never costs a URL."""

How = Literal["given", "robots", "index", "guess", "page"]
Obstacle = Literal["", "unreachable", "robots", "refused"]
"""What stands between us and a site: nobody answers; its robots.txt answers with an error; we may not."""


class Bounds(Struct, frozen=True):
    """What one discovery may cost."""

    urls: int = 1_000_000
    files: int = 1_000
    total: int = 2 * 1024**3
    """Decoded bytes of all files together."""
    depth: int = 3
    """How deep index files may name index files. The protocol says 1."""
    file_bytes: int = MAX_BYTES
    file_urls: int = MAX_URLS
    file_seconds: float = 60.0
    """For taking one file apart; a usual one of 50,000 URLs needs less than one."""


class Source(Struct, frozen=True):
    """A file to read, and how we came to it."""

    url: str
    how: How
    depth: int = 0
    named: bool = False
    """By robots.txt, or by an index that is: it may be anywhere."""


class Read(Struct, frozen=True):
    """How the reading of one file went."""

    source: Source
    kind: Kind = ""
    told: int = 0
    """URLs (of an index: files) in it."""
    taken: int = 0
    trouble: str = ""
    minor: bool = False
    """The trouble is worth a word, and no error: nobody named this file."""

    @property
    def useful(self) -> bool:
        return self.kind in ("sitemap", "index", "feed", "list")


class Discovery:
    """The URLs that a site tells of. Iterate once, over `batches` or over entries; then the
    attributes say how it went."""

    def __init__(
        self,
        site: str,
        calls: Calls,
        spec: JobSpec,
        *,
        feeds_of: Callable[[Response], Iterable[str]],
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
        since: float | None = None,
        undated: bool = False,
        images: bool = False,
        tell: Callable[[Read], None] = lambda _read: None,
    ) -> None:
        """`spec` says the scope and the patterns. `since` leaves out what changed before, and
        what has no date unless `undated`. `tell` hears of each file that was read."""
        self.site = site
        self._calls = calls
        self._feeds_of = feeds_of
        self._bounds = bounds
        self._since = since
        self._undated = undated
        self._images = images
        self._tell = tell
        self._scope = Scope(spec)
        self._host = Scope(replace(spec, include=(), exclude=()))
        self._obey = spec.robots
        self._seen: set[bytes] = set()
        self._asked: set[str] = set()
        self._bytes = 0
        self._fetched = 0
        self._page: Response | None = None
        self._stuck = False
        """The host cannot be reached: guessing on is of no use."""
        self.taken = 0
        self.files = 0
        """Files that were read and are what we look for."""
        self.failed = 0
        """Files that somebody named and that could not be read."""
        self.unchanged = 0
        """Files that, as their index says, have not changed since `since`."""
        self.left: Counter[str] = Counter()
        """URLs left out, by reason: scope, excluded, old, undated, repeated, bad."""
        self.obstacle: Obstacle = ""
        """Why the site itself could not be asked."""
        self.ended_by = ""
        """The limit that ended it, in a few words."""

    async def __aiter__(self) -> AsyncIterator[Entry]:
        async for batch in self.batches():
            for entry in batch:
                yield entry

    async def batches(self) -> AsyncIterator[list[Entry]]:
        """Entries as they are read, some at a time. Raises FrontierError and UsageError, but no
        FetchError: what cannot be fetched is told."""
        if urls.origin_of(self.site) + "/" != self.site:
            async for batch in self._all([Source(self.site, "given")]):
                yield batch
            if self._page is None:
                return
        async for batch in self._sitemaps():
            yield batch
        async for batch in self._feeds():
            yield batch

    async def _sitemaps(self) -> AsyncIterator[list[Entry]]:
        robots = await self._calls.robots(self.site)
        if self._obey and not robots.reachable:
            where = f"{urls.origin_of(self.site)}/robots.txt"
            self._tell(Read(Source(where, "robots"), trouble=self._calls.excuse(where, robots)))
            self._stuck = True
            self.obstacle = _unanswered(robots)
            return
        named = [Source(url, "robots", named=True) for url in robots.sitemaps()]
        async for batch in self._all(named):
            yield batch
        if not named:
            async for batch in self._first(SITEMAPS):
                yield batch

    async def _feeds(self) -> AsyncIterator[list[Entry]]:
        if self.ended_by or self._stuck:
            return
        missing: Read | None = None
        try:
            response = self._page or await self._calls.get(self.site)
        except FetchError as error:
            # A site without a home page may still have told everything.
            missing = replace(_failed(Source(self.site, "given"), error), minor=_is_http(error))
        else:
            self._scope.admit_start(response.url)
            self._host.admit_start(response.url)
            feeds = await asyncio.to_thread(lambda: list(self._feeds_of(response)))
            near = [Source(url, "page") for url in feeds if not self._host.allows(url, 0)]
            async for batch in self._all(near[:MAX_FEEDS]):
                yield batch
        if not self.files:
            async for batch in self._first(FEEDS):
                yield batch
        if missing is not None and not (missing.minor and self.files):
            self._tell(missing)

    async def _first(self, paths: Iterable[str]) -> AsyncIterator[list[Entry]]:
        """Read the first of these that exists."""
        for path in paths:
            before = self.files
            async for batch in self._all([Source(urls.origin_of(self.site) + path, "guess")]):
                yield batch
            if self.files > before or self._stuck:
                return

    async def _all(self, sources: list[Source]) -> AsyncIterator[list[Entry]]:
        """Read these, and the files that they name."""
        waiting = deque(sources)
        while waiting and not self.ended_by:
            source = waiting.popleft()
            if source.url in self._asked:
                continue  # an index that names itself, or a file that two name
            if self._fetched >= self._bounds.files:
                self.ended_by = f"{self._bounds.files:,} files"
                return
            self._asked.add(source.url)
            self._fetched += 1
            try:
                response = await self._calls.get(
                    source.url, invited=source.how == "robots", persistent=source.how != "guess"
                )
            except FetchError as error:
                await self._missed(source, error)
                continue
            self._asked.add(response.url)
            async for batch in self._entries(source, response, waiting):
                yield batch

    async def _entries(
        self, source: Source, response: Response, waiting: deque[Source]
    ) -> AsyncIterator[list[Entry]]:
        """What one file tells. The files that it names go to `waiting`."""
        bounds = self._bounds
        reader = Reader(
            response.url,
            max_bytes=min(bounds.file_bytes, bounds.total - self._bytes),
            max_urls=bounds.file_urls,
            images=self._images,
        )
        before = self.taken
        body = response.body
        end = time.monotonic() + bounds.file_seconds
        for at in range(0, len(body) + STEP, STEP):
            # One step more than there are bytes: the last one closes.
            late = time.monotonic() > end
            piece = body[at : at + STEP] if at < len(body) and not late else None
            entries, named = await asyncio.to_thread(self._step, reader, piece)
            self._follow(source, named, waiting)
            if self.taken + len(entries) >= bounds.urls:
                entries = entries[: bounds.urls - self.taken]
                self.ended_by = f"{bounds.urls:,} URLs"
            self.taken += len(entries)
            if entries:
                yield entries
            if late and at < len(body):
                reader.trouble = (
                    f"it takes more than {bounds.file_seconds:g} s to read; the rest was left out"
                )
            if self.ended_by or piece is None:
                break
        self._bytes += reader.size
        if self._bytes >= bounds.total and not self.ended_by:
            self.ended_by = f"{bounds.total:,} bytes"
        self.left["bad"] += reader.bad
        self._judge(source, response, reader, self.taken - before)

    def _step(self, reader: Reader, piece: bytes | None) -> tuple[list[Entry], list[Child]]:
        """Parse and sift one piece; None is the end. On a thread: it takes milliseconds."""
        said = reader.close() if piece is None else reader.feed(piece)
        named = [one for one in said if isinstance(one, Child)]
        return [one for one in said if isinstance(one, Entry) and self._wanted(one)], named

    def _wanted(self, entry: Entry) -> bool:
        reason = self._too_old(entry.changed) or self._scope.allows(entry.url, 0)
        if reason == "trap":
            reason = ""  # a list has an end, and its site stands for it
        if not reason:
            key = urls.key("", entry.url)
            if key in self._seen:
                reason = "repeated"
            elif len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen.add(key)
        if reason:
            self.left[reason] += 1
        return not reason

    def _too_old(self, changed: Moment | None) -> str:
        if self._since is None:
            return ""
        if changed is None:
            return "" if self._undated else "undated"
        return "old" if changed.last < self._since else ""

    def _follow(self, source: Source, named: list[Child], waiting: deque[Source]) -> None:
        """Put the files that an index names in line."""
        for child in named:
            if self._since is not None and child.changed and child.changed.last < self._since:
                self.unchanged += 1
            elif source.depth >= self._bounds.depth:
                self.left["nested"] += 1
            elif not source.named and not _same_host(child.url, source.url):
                self.left["elsewhere"] += 1
            elif len(waiting) < self._bounds.files:
                waiting.append(Source(child.url, "index", source.depth + 1, source.named))
            else:
                self.left["nested"] += 1

    def _judge(self, source: Source, response: Response, reader: Reader, taken: int) -> None:
        read = Read(source, reader.kind, reader.found, taken, reader.trouble)
        if read.useful:
            self.files += 1
        elif source.how == "guess":
            return  # a page that says "not found" with status 200
        elif source.how == "given" and reader.kind == "page":
            self._page = response
            return
        else:
            self.failed += 1
            what = "a web page" if reader.kind == "page" else "neither sitemap, feed nor list"
            read = replace(read, trouble=read.trouble or f"it is {what}")
        self._tell(read)

    async def _missed(self, source: Source, error: FetchError) -> None:
        if source.how in ("given", "guess"):
            self.obstacle = await self._obstacle(source, error)
        if source.how != "guess":
            self.failed += 1
        elif error.error.startswith("http_5"):
            # There may be something; the next time it may be read.
            self._tell(replace(_failed(source, error), minor=True))
            return
        elif error.error == "robots" or _is_http(error):
            return  # there is nothing at a place where we only supposed something
        else:
            self._stuck = True
        self._tell(_failed(source, error))

    async def _obstacle(self, source: Source, error: FetchError) -> Obstacle:
        if error.error == "robots_unreachable":
            return _unanswered(await self._calls.robots(source.url))
        if error.error == "egress_blocked":
            return "refused"
        return "unreachable" if class_of(error.error).group in ("connection", "timeout") else ""


def _unanswered(robots: Robots) -> Obstacle:
    return "robots" if robots.status else "unreachable"


def _is_http(error: FetchError) -> bool:
    return class_of(error.error).group == "http"


def _failed(source: Source, error: FetchError) -> Read:
    return Read(source, trouble=f"{error.error}: {error.message}")


def _same_host(one: str, other: str) -> bool:
    return urls.lane_of(one).removeprefix("www.") == urls.lane_of(other).removeprefix("www.")
