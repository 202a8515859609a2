"""Two caches of pages, and the fetcher that looks there first.

How long a page is fresh is the caller's decision (`ttl`), not the server's: a crawl that runs twice within a
minute must not fetch twice. A server can still send `no-store` (never kept) and `no-cache` (kept, but
revalidated each time).

A job uses one of the two caches. `MemoryCache` is for a minute or less, on a frontier that only this machine
uses: a page of 40 KB costs it 3 µs. As a note in SQLite the page would cost a millisecond of CPU, which would
slow down every crawl for pages that are hardly ever fetched again. `NotesCache` keeps pages with the
frontier, where workers on other machines and later crawls find them.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal import clock
from shoal.clock import Clock
from shoal.errors import FrontierError
from shoal.fetch.port import Ask, Fetcher
from shoal.model import Response

S = TypeVar("S")
T = TypeVar("T")

_ENTRY_OVERHEAD = 512
"""Bytes that an entry costs beside its body and headers, so that empty pages are not free."""
_CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization"})
_FRAMING = frozenset({"content-length", "content-encoding", "transfer-encoding", "content-range"})
_BYPASS = frozenset(
    {"if-none-match", "if-modified-since", "if-match", "if-unmodified-since", "if-range", "range"}
)


class Cached(Struct, frozen=True):
    """One page as it was received."""

    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    stored_at: float
    address: str = ""
    http: str = "1.1"
    no_cache: bool = False
    """The server wants the page revalidated before each use."""
    private: bool = False
    """For one reader only: requested with credentials, sent with a cookie, or marked so by the server."""

    @property
    def size(self) -> int:
        fields = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.body) + fields + len(self.url) + _ENTRY_OVERHEAD

    def header(self, name: str) -> str:
        for key, value in self.headers:
            if key == name:
                return value
        return ""


class PageCache(Protocol):
    """Keeps pages, up to a number of bytes. If a cache cannot serve, it has no pages; it never fails."""

    async def get(self, key: bytes) -> Cached | None: ...

    async def put(self, key: bytes, page: Cached) -> None: ...


class MemoryCache:
    """Drops the least recently used pages first. Belongs to one event loop."""

    def __init__(self, limit: int = 64 * 1024 * 1024) -> None:
        self._limit = limit
        self._pages: OrderedDict[bytes, Cached] = OrderedDict()
        self.size = 0

    async def get(self, key: bytes) -> Cached | None:
        page = self._pages.get(key)
        if page is not None:
            self._pages.move_to_end(key)
        return page

    async def put(self, key: bytes, page: Cached) -> None:
        old = self._pages.pop(key, None)
        if old is not None:
            self.size -= old.size
        if page.size > self._limit:
            return
        self._pages[key] = page
        self.size += page.size
        while self.size > self._limit:
            _, gone = self._pages.popitem(last=False)
            self.size -= gone.size


class PageNotes(Protocol):
    """The part of a frontier's `Notes` that a cache needs."""

    async def get(self, shelf: str, name: str) -> bytes | None: ...

    async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None: ...


class NotesCache:
    """Keeps pages in the frontier's notes: every worker on the same frontier finds them, on any machine and
    in later crawls.

    A note ends by the frontier's clock after `ttl` seconds, so a page that is found is fresh, whatever the
    workers' clocks are. Jobs with another `ttl` have other notes. The frontier is for data that must not be
    lost, so a cache may take only a little of its room: at most `PAGE_LIMIT` compressed bytes for a page, and
    at most `limit` bytes at a time for each worker. Private pages are kept only if `private` says that the
    frontier is as private as they are.
    """

    SHELF = "pages"
    PAGE_LIMIT = 256 * 1024
    LINGER = 60.0
    """For how many seconds a frontier may keep a note after its end."""

    def __init__(
        self,
        notes: PageNotes,
        ttl: float,
        limit: int = 16 * 1024 * 1024,
        *,
        private: bool = False,
        now: Clock = clock.system,
    ) -> None:
        self._notes = notes
        self._ttl = ttl
        self._limit = limit
        self._private = private
        self._now = now
        self._written: deque[tuple[float, int]] = deque()
        """For each note that was written: when it will be gone, and its size."""
        self.size = 0

    async def get(self, key: bytes) -> Cached | None:
        try:
            content = await self._notes.get(self.SHELF, self._name(key))
        except FrontierError:
            return None  # a visit does not fail because of a cache
        if not content:
            return None
        try:
            page = await _off_loop(len(content), _unfold, content)
        except (zlib.error, msgspec.MsgspecError):
            return None  # written by another version
        return replace(page, stored_at=self._now())

    async def put(self, key: bytes, page: Cached) -> None:
        if page.private and not self._private:
            return
        if page.size > 16 * self.PAGE_LIMIT:
            return  # certainly too large, even compressed
        now = self._now()
        while self._written and self._written[0][0] <= now:
            self.size -= self._written.popleft()[1]
        content = await _off_loop(page.size, _fold, page)
        if len(content) > self.PAGE_LIMIT or self.size + len(content) > self._limit:
            return
        self._written.append((now + self._ttl + self.LINGER, len(content)))
        self.size += len(content)
        with suppress(FrontierError):
            await self._notes.put(self.SHELF, self._name(key), content, self._ttl)

    def _name(self, key: bytes) -> str:
        return f"{self._ttl:g} {key.hex()}"


_COMPRESS_HERE = 64 * 1024
"""This many bytes are compressed in less than a millisecond; more are compressed on a thread."""


async def _off_loop(size: int, work: Callable[[S], T], value: S) -> T:
    return work(value) if size <= _COMPRESS_HERE else await asyncio.to_thread(work, value)


def _fold(page: Cached) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(page), 1)


def _unfold(content: bytes) -> Cached:
    return msgspec.msgpack.decode(zlib.decompress(content), type=Cached)


def cache_key(ask: Ask) -> bytes:
    """Returns the key of the page for `ask`, made of its URL, its headers and `allow_private`.

    Without `allow_private`, a job that may not visit the intranet could read its pages from the cache.
    """
    digest = blake2b(digest_size=20)
    digest.update(ask.url.encode("utf-8", "surrogatepass"))
    digest.update(b"\0private" if ask.allow_private else b"\0public")
    for name, value in sorted((name.lower(), value) for name, value in ask.headers):
        digest.update(f"\0{name}\0{value}".encode("utf-8", "surrogatepass"))
    return digest.digest()


class CachingFetcher:
    """A Fetcher that serves a page again for `ttl` seconds. After that it revalidates the page, if the cache
    still has it."""

    def __init__(self, fetcher: Fetcher, cache: PageCache, ttl: float, *, now: Clock = clock.system) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._ttl = ttl
        self._now = now

    async def fetch(self, ask: Ask) -> Response:
        """Fetch like the fetcher inside. A response from the cache has `cached` set."""
        if ask.method != "GET" or ask.body is not None or self._ttl <= 0:
            return await self._fetcher.fetch(ask)
        if any(name.lower() in _BYPASS for name, _ in ask.headers):
            return await self._fetcher.fetch(ask)
        key = cache_key(ask)
        page = await self._cache.get(key)
        if page is not None and len(page.body) > ask.limits.body:
            page = None
        if page is None:
            return await self._fetch_new(key, ask)
        age = self._now() - page.stored_at
        if 0 <= age < self._ttl and not page.no_cache:
            return _response(ask, page, 0.0)
        return await self._revalidate(key, ask, page)

    async def close(self) -> None:
        await self._fetcher.close()

    async def _fetch_new(self, key: bytes, ask: Ask) -> Response:
        response = await self._fetcher.fetch(ask)
        await self._store(key, ask, response)
        return response

    async def _revalidate(self, key: bytes, ask: Ask, page: Cached) -> Response:
        conditions = []
        if etag := page.header("etag"):
            conditions.append(("If-None-Match", etag))
        if changed := page.header("last-modified"):
            conditions.append(("If-Modified-Since", changed))
        if not conditions:
            return await self._fetch_new(key, ask)
        response = await self._fetcher.fetch(replace(ask, headers=(*ask.headers, *conditions)))
        if response.status != 304:
            await self._store(key, ask, response)
            return response
        page = replace(page, headers=_refreshed(page.headers, response.headers), stored_at=self._now())
        await self._cache.put(key, page)
        return _response(ask, page, response.seconds)

    async def _store(self, key: bytes, ask: Ask, response: Response) -> None:
        if response.status != 200:
            return
        control = ",".join(value for name, value in response.headers if name == "cache-control").lower()
        directives = {directive.strip().partition("=")[0] for directive in control.split(",")}
        if "no-store" in directives or response.header("vary").strip() == "*":
            return
        page = Cached(
            url=response.url,
            headers=response.headers,
            body=response.body,
            stored_at=self._now(),
            address=response.address,
            http=response.http,
            no_cache="no-cache" in directives,
            private="private" in directives
            or bool(response.header("set-cookie"))
            or any(name.lower() in _CREDENTIALS for name, _ in ask.headers),
        )
        await self._cache.put(key, page)


def _response(ask: Ask, page: Cached, seconds: float) -> Response:
    return Response(
        url=ask.url,
        status=200,
        headers=page.headers,
        body=page.body,
        seconds=seconds,
        address=page.address,
        http=page.http,
        cached=True,
    )


def _refreshed(
    old: tuple[tuple[str, str], ...], new: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """Returns the stored headers, updated by those of a 304, except headers about the framing of its body."""
    fresh = tuple((name, value) for name, value in new if name not in _FRAMING)
    names = {name for name, _ in fresh}
    return tuple((name, value) for name, value in old if name not in names) + fresh
