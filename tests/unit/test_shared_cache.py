"""Pages shared through the frontier's notes: fresh by its clock, bounded, and nothing that is private."""

from __future__ import annotations

import random

import pytest

from shoal.errors import FrontierUnreachable
from shoal.fetch.cache import Cached, CachingFetcher, NotesCache
from shoal.fetch.port import Ask
from shoal.frontier.memory import MemoryFrontier
from shoal.model import Response
from shoal.testing.clock import FakeClock

URL = "https://a.example/page"


def page(body: bytes = b"body", stored_at: float = 0.0) -> Cached:
    return Cached(URL, (("etag", '"1"'),), body, stored_at)


class Site:
    """A fetcher with one page, and that counts."""

    def __init__(self, *headers: tuple[str, str]) -> None:
        self.headers = headers
        self.asked = 0

    async def fetch(self, ask: Ask) -> Response:
        self.asked += 1
        return Response(ask.url, 200, self.headers, b"page", 0.1)

    async def close(self) -> None:
        """Nothing is held."""


class Workers:
    """Two workers of two machines, whose clocks differ by an hour, on one frontier."""

    def __init__(self, site: Site, ttl: float = 60.0) -> None:
        self.clock = FakeClock()
        self.frontier = MemoryFrontier(clock=self.clock)
        self.one = self._worker(site, ttl, 0.0)
        self.other = self._worker(site, ttl, 3600.0)

    def _worker(self, site: Site, ttl: float, ahead: float) -> CachingFetcher:
        def now() -> float:
            return self.clock() + ahead

        return CachingFetcher(site, NotesCache(self.frontier.notes, ttl, now=now), ttl, now=now)


async def test_what_one_fetched_the_other_need_not() -> None:
    site = Site()
    workers = Workers(site)
    await workers.one.fetch(Ask(URL))
    workers.clock.advance(59)
    again = await workers.other.fetch(Ask(URL))
    assert (again.cached, again.body, site.asked) == (True, b"page", 1)


async def test_it_ends_by_the_frontiers_clock() -> None:
    site = Site()
    workers = Workers(site)
    await workers.one.fetch(Ask(URL))
    workers.clock.advance(61)
    assert not (await workers.other.fetch(Ask(URL))).cached
    assert site.asked == 2


async def test_another_ttl_has_other_notes() -> None:
    frontier = MemoryFrontier()
    await NotesCache(frontier.notes, 300.0).put(b"k", page())
    assert await NotesCache(frontier.notes, 60.0).get(b"k") is None
    assert await NotesCache(frontier.notes, 300.0).get(b"k") is not None


@pytest.mark.parametrize(
    ("ask", "headers"),
    [
        (Ask(URL, headers=(("Authorization", "Bearer x"),)), ()),
        (Ask(URL, headers=(("cookie", "a=b"),)), ()),
        (Ask(URL), (("set-cookie", "session=1"),)),
        (Ask(URL), (("cache-control", "max-age=9, private"),)),
        (Ask(URL), (("cache-control", "no-store"),)),
        (Ask(URL), (("vary", "*"),)),
        (Ask(URL, method="POST", body=b"x"), ()),
    ],
)
async def test_what_is_private_stays_at_home(ask: Ask, headers: tuple[tuple[str, str], ...]) -> None:
    site = Site(*headers)
    workers = Workers(site)
    await workers.one.fetch(ask)
    assert await workers.frontier.notes.scan(NotesCache.SHELF) == []
    assert not (await workers.other.fetch(ask)).cached
    assert site.asked == 2


async def test_a_frontier_of_our_own_may_keep_what_is_private() -> None:
    frontier = MemoryFrontier()
    secret = Cached(URL, (), b"secret", 0.0, private=True)
    await NotesCache(frontier.notes, 60.0).put(b"k", secret)
    assert await NotesCache(frontier.notes, 60.0).get(b"k") is None
    await NotesCache(frontier.notes, 60.0, private=True).put(b"k", secret)
    assert await NotesCache(frontier.notes, 60.0).get(b"k") is not None


async def test_large_pages_are_not_shared() -> None:
    frontier = MemoryFrontier()
    cache = NotesCache(frontier.notes, 60.0)
    noise = random.Random(1).randbytes(NotesCache.PAGE_LIMIT + 1)
    await cache.put(b"noise", page(noise))
    assert await cache.get(b"noise") is None
    words = b"word " * (NotesCache.PAGE_LIMIT // 2)  # large, but small when compressed
    await cache.put(b"words", page(words))
    found = await cache.get(b"words")
    assert found is not None
    assert found.body == words


async def test_one_worker_takes_only_so_much_room_at_a_time() -> None:
    clock = FakeClock()
    frontier = MemoryFrontier(clock=clock)
    cache = NotesCache(frontier.notes, 60.0, limit=50_000, now=clock)
    dice = random.Random(1)
    for n in range(20):
        await cache.put(f"{n}".encode(), page(dice.randbytes(10_000)))
    kept = [n for n in range(20) if await cache.get(f"{n}".encode()) is not None]
    assert kept == [0, 1, 2, 3]
    notes = await frontier.notes.scan(NotesCache.SHELF)
    assert sum(len(note.value) for note in notes) == cache.size <= 50_000
    clock.advance(60.0 + NotesCache.LINGER)
    await cache.put(b"later", page(dice.randbytes(10_000)))
    assert await cache.get(b"later") is not None


async def test_a_frontier_that_is_away_is_a_miss() -> None:
    class Away:
        async def get(self, shelf: str, name: str) -> bytes | None:
            raise FrontierUnreachable("away")

        async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None:
            raise FrontierUnreachable("away")

    cache = NotesCache(Away(), 60.0)
    await cache.put(b"k", page())
    assert await cache.get(b"k") is None


async def test_notes_of_another_version_are_a_miss() -> None:
    frontier = MemoryFrontier()
    cache = NotesCache(frontier.notes, 60.0)
    await cache.put(b"k", page())
    [note] = await frontier.notes.scan(NotesCache.SHELF)
    await frontier.notes.put(NotesCache.SHELF, note.name, b"nonsense", 60.0)
    assert await cache.get(b"k") is None
