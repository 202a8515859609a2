"""A cache of pages, and the fetcher that asks it first.

The freshness of a page is our caller's decision (`ttl`), not the server's: a crawl that runs twice
within a minute must not fetch twice. A server can still say `no-store` (never kept) and `no-cache`
(kept, but asked about each time).
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

import apsw
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal import clock
from shoal.clock import Clock
from shoal.errors import FrontierError
from shoal.fetch.port import Ask, Fetcher
from shoal.model import Response

Note = Callable[[str, bytes, float], Awaitable[None]]
Noted = Callable[[str], Awaitable[bytes | None]]
S = TypeVar("S")
T = TypeVar("T")

_ENTRY_OVERHEAD = 512
"""Bytes that an entry costs beside its body and headers; keeps empty pages from being free."""
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
    always_ask: bool = False
    """The server wants to be asked before each use."""
    private: bool = False
    """Meant for who asked: with credentials, with a cookie, or the server says so. Not to be shared."""

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
    """Keeps pages within a bound of bytes. A cache that cannot serve forgets; it never fails."""

    async def get(self, key: bytes) -> Cached | None: ...

    async def put(self, key: bytes, page: Cached) -> None: ...

    async def close(self) -> None: ...


class MemoryCache:
    """Least recently used pages go first. Belongs to one event loop."""

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

    async def close(self) -> None:
        self._pages.clear()
        self.size = 0


_SCHEMA = """
CREATE TABLE IF NOT EXISTS page (
    id        INTEGER PRIMARY KEY,
    key       BLOB NOT NULL UNIQUE,
    stored_at REAL NOT NULL,
    size      INTEGER NOT NULL,
    content   BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS page_by_age ON page (stored_at, id, size);
CREATE TABLE IF NOT EXISTS total (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER NOT NULL);
INSERT OR IGNORE INTO total VALUES (1, 0);
-- The sum is kept by the file itself, so that it is right for any number of processes.
CREATE TRIGGER IF NOT EXISTS page_added AFTER INSERT ON page
    BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS page_removed AFTER DELETE ON page
    BEGIN UPDATE total SET bytes = bytes - old.size; END;
"""


class DiskCache:
    """Pages in one SQLite file, shared by any number of processes. The oldest go first.

    Calls block on the disk, so they run on threads. The file is only a cache: a damaged one is
    replaced, a full disk or a locked file means a miss.
    """

    def __init__(self, path: Path | str, limit: int = 1024 * 1024 * 1024) -> None:
        self._path = Path(path)
        self._limit = limit
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Cached)
        self._file: apsw.Connection | None = None
        self._broken = False

    async def get(self, key: bytes) -> Cached | None:
        return await asyncio.to_thread(self._get, key)

    async def put(self, key: bytes, page: Cached) -> None:
        if page.size <= self._limit // 4:  # one page must not push out everything else
            await asyncio.to_thread(self._put, key, page)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _get(self, key: bytes) -> Cached | None:
        with self._lock:
            try:
                file = self._open()
                if file is None:
                    return None
                content = file.execute("SELECT content FROM page WHERE key = ?", (key,)).get
            except apsw.Error:
                return None
        try:
            return self._decoder.decode(content) if content else None
        except msgspec.MsgspecError:
            return None  # written by another version

    def _put(self, key: bytes, page: Cached) -> None:
        content = self._encoder.encode(page)
        with self._lock:
            try:
                file = self._open()
                if file is None:
                    return
                with file:
                    # Deleted first and not replaced: REPLACE would not fire the trigger.
                    file.execute("DELETE FROM page WHERE key = ?", (key,))
                    file.execute(
                        "INSERT INTO page (key, stored_at, size, content) VALUES (?, ?, ?, ?)",
                        (key, page.stored_at, page.size, content),
                    )
                    self._shrink(file)
            except apsw.Error:
                return

    def _shrink(self, file: apsw.Connection) -> None:
        used = file.execute("SELECT bytes FROM total").get
        if used <= self._limit:
            return
        # A tenth more than needed, so that not each page pays for a deletion.
        excess = used - self._limit * 9 // 10
        file.execute(
            """
            DELETE FROM page WHERE id IN (
                SELECT id FROM (
                    SELECT id, sum(size) OVER (ORDER BY stored_at, id) - size AS before
                    FROM (SELECT id, stored_at, size FROM page ORDER BY stored_at, id LIMIT 10000)
                ) WHERE before < ?
            )
            """,
            (excess,),
        )

    def _open(self) -> apsw.Connection | None:
        if self._file is not None or self._broken:
            return self._file
        for attempt in (1, 2):
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._connect()
            except (apsw.NotADBError, apsw.CorruptError):
                if attempt == 1:
                    self._remove()
            except (apsw.Error, OSError):
                break
            else:
                return self._file
        # A crawl without a cache is slower, a crawl that stops for its cache is broken.
        self._broken = True
        return None

    def _connect(self) -> apsw.Connection:
        file = apsw.Connection(str(self._path))
        try:
            file.set_busy_timeout(5000)
            file.transaction_mode = "IMMEDIATE"
            file.execute("PRAGMA journal_mode = wal")
            file.execute("PRAGMA synchronous = normal")
            with file:
                file.execute(_SCHEMA)
        except apsw.Error:
            file.close()
            raise
        return file

    def _remove(self) -> None:
        for ending in ("", "-wal", "-shm"):
            Path(f"{self._path}{ending}").unlink(missing_ok=True)

    def _close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._broken = None, True


class NotesCache:
    """Pages in the frontier's notes: whoever works on the same frontier finds them, on any machine.

    A note ends by the frontier's clock after `ttl` seconds, so what is found is fresh; clocks of
    workers do not matter. Jobs with another `ttl` have other notes. The frontier keeps what must not
    be lost, so a cache may take only a little of its room: a page of at most `PAGE_LIMIT` bytes
    compressed, and of one worker at most `limit` bytes at a time.
    """

    PAGE_LIMIT = 256 * 1024
    LINGER = 60.0
    """Seconds that a frontier may keep a note after its end."""

    def __init__(
        self,
        note: Note,
        noted: Noted,
        ttl: float,
        limit: int = 16 * 1024 * 1024,
        *,
        now: Clock = clock.system,
    ) -> None:
        self._note = note
        self._noted = noted
        self._ttl = ttl
        self._limit = limit
        self._now = now
        self._told: deque[tuple[float, int]] = deque()
        """When each note will be gone, and its size."""
        self.size = 0

    async def get(self, key: bytes) -> Cached | None:
        try:
            content = await self._noted(self._name(key))
        except FrontierError:
            return None  # a visit does not fail for its cache
        if not content:
            return None
        try:
            page = await _off_loop(len(content), _unfold, content)
        except (zlib.error, msgspec.MsgspecError):
            return None  # written by another version
        return replace(page, stored_at=self._now())

    async def put(self, key: bytes, page: Cached) -> None:
        if page.size > 16 * self.PAGE_LIMIT:
            return  # not worth the compressing
        now = self._now()
        while self._told and self._told[0][0] <= now:
            self.size -= self._told.popleft()[1]
        content = await _off_loop(page.size, _fold, page)
        if len(content) > self.PAGE_LIMIT or self.size + len(content) > self._limit:
            return
        self._told.append((now + self._ttl + self.LINGER, len(content)))
        self.size += len(content)
        with suppress(FrontierError):
            await self._note(self._name(key), content, self._ttl)

    async def close(self) -> None:
        """The notes end by themselves."""

    def _name(self, key: bytes) -> str:
        return f"page {self._ttl:g} {key.hex()}"


class LayeredCache:
    """A cache of this machine before one that is shared. What is fresh here is not asked for there."""

    def __init__(self, near: PageCache, far: PageCache, ttl: float, *, now: Clock = clock.system) -> None:
        self._near = near
        self._far = far
        self._ttl = ttl
        self._now = now

    async def get(self, key: bytes) -> Cached | None:
        page = await self._near.get(key)
        if page is not None and 0 <= self._now() - page.stored_at < self._ttl:
            return page
        # Too old here is still good for asking whether it changed.
        return await self._far.get(key) or page

    async def put(self, key: bytes, page: Cached) -> None:
        await self._near.put(key, page)
        if not page.private:
            await self._far.put(key, page)

    async def close(self) -> None:
        await self._near.close()
        await self._far.close()


_COMPRESS_HERE = 64 * 1024
"""Bytes that are packed in less than a millisecond; more goes to a thread."""


async def _off_loop(size: int, work: Callable[[S], T], given: S) -> T:
    return work(given) if size <= _COMPRESS_HERE else await asyncio.to_thread(work, given)


def _fold(page: Cached) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(page), 1)


def _unfold(content: bytes) -> Cached:
    return msgspec.msgpack.decode(zlib.decompress(content), type=Cached)


def cache_key(ask: Ask) -> bytes:
    """Asks with the same key get the same page: URL, headers, and what the guard let through.

    `allow_private` belongs to it, or a job that may not see the intranet could read it from here.
    """
    digest = blake2b(digest_size=20)
    digest.update(ask.url.encode("utf-8", "surrogatepass"))
    digest.update(b"\0private" if ask.allow_private else b"\0public")
    for name, value in sorted((name.lower(), value) for name, value in ask.headers):
        digest.update(f"\0{name}\0{value}".encode("utf-8", "surrogatepass"))
    return digest.digest()


class CachingFetcher:
    """A Fetcher that serves a page again for `ttl` seconds, then asks whether it changed."""

    def __init__(self, fetcher: Fetcher, cache: PageCache, ttl: float, *, now: Clock = clock.system) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._ttl = ttl
        self._now = now

    async def fetch(self, ask: Ask) -> Response:
        """Like the fetcher inside; a response that came from the cache says so (`cached`)."""
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
        if 0 <= age < self._ttl and not page.always_ask:
            return _served(ask, page, 0.0)
        return await self._ask_again(key, ask, page)

    async def close(self) -> None:
        await self._fetcher.close()
        await self._cache.close()

    async def _fetch_new(self, key: bytes, ask: Ask) -> Response:
        response = await self._fetcher.fetch(ask)
        await self._store(key, ask, response)
        return response

    async def _ask_again(self, key: bytes, ask: Ask, page: Cached) -> Response:
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
        return _served(ask, page, response.seconds)

    async def _store(self, key: bytes, ask: Ask, response: Response) -> None:
        if response.status != 200:
            return
        wishes = ",".join(value for name, value in response.headers if name == "cache-control").lower()
        said = {wish.strip().partition("=")[0] for wish in wishes.split(",")}
        if "no-store" in said or response.header("vary").strip() == "*":
            return
        page = Cached(
            url=response.url,
            headers=response.headers,
            body=response.body,
            stored_at=self._now(),
            address=response.address,
            http=response.http,
            always_ask="no-cache" in said,
            private="private" in said
            or bool(response.header("set-cookie"))
            or any(name.lower() in _CREDENTIALS for name, _ in ask.headers),
        )
        await self._cache.put(key, page)


def _served(ask: Ask, page: Cached, seconds: float) -> Response:
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
    """The stored headers with those of a 304 instead, except what describes the body's framing."""
    fresh = tuple((name, value) for name, value in new if name not in _FRAMING)
    names = {name for name, _ in fresh}
    return tuple((name, value) for name, value in old if name not in names) + fresh
