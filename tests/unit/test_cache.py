"""The page cache: bounded, honest about age, and never a reason to fail."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import apsw
import pytest

from shoal.errors import FetchError
from shoal.fetch.cache import Cached, CachingFetcher, DiskCache, MemoryCache, PageCache, cache_key
from shoal.fetch.port import Ask, Limits
from shoal.model import Response

URL = "https://a.example/page"


def page(body: bytes = b"body", stored_at: float = 0.0) -> Cached:
    return Cached(URL, (("etag", '"1"'),), body, stored_at)


@pytest.fixture(params=["memory", "disk"])
async def cache(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PageCache]:
    made: PageCache = MemoryCache() if request.param == "memory" else DiskCache(tmp_path / "cache.db")
    yield made
    await made.close()


async def test_put_and_get(cache: PageCache) -> None:
    assert await cache.get(b"k") is None
    await cache.put(b"k", page())
    assert await cache.get(b"k") == page()
    await cache.put(b"k", page(b"newer", 5.0))
    assert await cache.get(b"k") == page(b"newer", 5.0)


async def test_memory_forgets_the_least_recently_used() -> None:
    one = page(b"x" * 1000)
    cache = MemoryCache(limit=one.size * 3)
    for key in (b"1", b"2", b"3"):
        await cache.put(key, one)
    await cache.get(b"1")
    await cache.put(b"4", one)
    assert await cache.get(b"2") is None
    assert await cache.get(b"1") is not None
    assert cache.size == one.size * 3
    await cache.put(b"big", page(b"x" * 10000))
    assert await cache.get(b"big") is None


async def test_disk_stays_within_its_bound(tmp_path: Path) -> None:
    limit = 1024 * 1024
    cache = DiskCache(tmp_path / "cache.db", limit=limit)
    for n in range(300):
        await cache.put(f"{n}".encode(), page(bytes(10_000), float(n)))
    assert await cache.get(b"299") is not None
    assert await cache.get(b"0") is None
    await cache.put(b"huge", page(bytes(limit)))
    assert await cache.get(b"huge") is None
    await cache.close()
    with apsw.Connection(str(tmp_path / "cache.db")) as file:
        kept: int = file.execute("SELECT sum(size) FROM page").get
        used: int = file.execute("SELECT bytes FROM total").get
    file.close()
    assert kept == used <= limit
    assert (tmp_path / "cache.db").stat().st_size < limit * 2


async def test_disk_survives_a_new_process_and_a_damaged_file(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "cache.db"
    cache = DiskCache(place)
    await cache.put(b"k", page())
    await cache.close()
    again = DiskCache(place)
    assert await again.get(b"k") == page()
    await again.close()
    place.write_bytes(b"this is not a database at all" * 100)
    damaged = DiskCache(place)
    assert await damaged.get(b"k") is None
    await damaged.put(b"k", page())
    assert await damaged.get(b"k") == page()
    await damaged.close()


async def test_disk_that_cannot_be_opened_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "cache.db")
    await cache.put(b"k", page())
    assert await cache.get(b"k") is None
    await cache.close()


def _write(place: str, first: int) -> None:
    cache = DiskCache(place)
    for n in range(first, first + 50):
        cache._put(f"{n}".encode(), page(f"{n}".encode(), float(n)))
    cache._close()


async def test_disk_is_shared_by_processes(tmp_path: Path) -> None:
    place = str(tmp_path / "cache.db")
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write, args=(place, n * 50)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    cache = DiskCache(place)
    for n in range(150):
        found = await cache.get(f"{n}".encode())
        assert found is not None
        assert found.body == f"{n}".encode()
    await cache.close()


class Site:
    """A fetcher with one page that can change, and that counts."""

    def __init__(self, *headers: tuple[str, str], status: int = 200) -> None:
        self.headers = headers
        self.status = status
        self.body = b"first"
        self.asked: list[Ask] = []
        self.closed = False

    async def fetch(self, ask: Ask) -> Response:
        self.asked.append(ask)
        given = dict(ask.headers)
        own = dict(self.headers)
        matches = own.get("etag") is not None and given.get("If-None-Match") == own.get("etag")
        since = own.get("last-modified")
        if matches or (since is not None and given.get("If-Modified-Since") == since):
            return Response(ask.url, 304, (*self.headers, ("x-fresh", "yes")), b"", 0.1)
        return Response(ask.url, self.status, self.headers, self.body, 0.1, address="192.0.2.1")

    async def close(self) -> None:
        self.closed = True


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


Make = Callable[[Site], CachingFetcher]


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make(cache: PageCache, time: Time) -> Make:
    return lambda site: CachingFetcher(site, cache, 60.0, now=time)


async def test_fresh_pages_need_no_network(make: Make, time: Time) -> None:
    site = Site(("content-type", "text/html"))
    fetcher = make(site)
    first = await fetcher.fetch(Ask(URL))
    time.now += 59
    second = await fetcher.fetch(Ask(URL))
    assert not first.cached
    assert second.cached
    assert (second.body, second.headers, second.address) == (first.body, first.headers, first.address)
    assert len(site.asked) == 1
    time.now += 2
    assert not (await fetcher.fetch(Ask(URL))).cached
    assert len(site.asked) == 2


@pytest.mark.parametrize("header", [("etag", '"v1"'), ("last-modified", "Sun, 15 Nov 2026 10:00:00 GMT")])
async def test_stale_pages_are_asked_about(make: Make, time: Time, header: tuple[str, str]) -> None:
    site = Site(header)
    fetcher = make(site)
    await fetcher.fetch(Ask(URL))
    time.now += 100
    again = await fetcher.fetch(Ask(URL))
    assert again.cached
    assert (again.status, again.body) == (200, b"first")
    assert again.header("x-fresh") == "yes"
    time.now += 50  # the answer made it fresh again
    await fetcher.fetch(Ask(URL))
    assert len(site.asked) == 2


async def test_a_changed_page_replaces_the_old_one(make: Make, time: Time) -> None:
    site = Site(("etag", '"v1"'))
    fetcher = make(site)
    await fetcher.fetch(Ask(URL))
    site.headers, site.body = (("etag", '"v2"'),), b"second"
    time.now += 100
    changed = await fetcher.fetch(Ask(URL))
    assert not changed.cached
    assert changed.body == b"second"
    assert (await fetcher.fetch(Ask(URL))).body == b"second"


async def test_no_store_is_respected(make: Make) -> None:
    site = Site(("cache-control", "private, No-Store"))
    fetcher = make(site)
    for _ in range(2):
        assert not (await fetcher.fetch(Ask(URL))).cached
    assert len(site.asked) == 2


async def test_no_cache_asks_each_time(make: Make) -> None:
    site = Site(("cache-control", "no-cache"), ("etag", '"v1"'))
    fetcher = make(site)
    await fetcher.fetch(Ask(URL))
    again = await fetcher.fetch(Ask(URL))
    assert again.cached
    assert dict(site.asked[1].headers) == {"If-None-Match": '"v1"'}


@pytest.mark.parametrize("status", [204, 301, 404, 500])
async def test_only_pages_are_kept(make: Make, status: int) -> None:
    site = Site(status=status)
    fetcher = make(site)
    for _ in range(2):
        await fetcher.fetch(Ask(URL))
    assert len(site.asked) == 2


@pytest.mark.parametrize(
    "ask",
    [
        Ask(URL, method="POST", body=b"x"),
        Ask(URL, method="HEAD"),
        Ask(URL, headers=(("Range", "bytes=0-1"),)),
        Ask(URL, headers=(("if-none-match", '"x"'),)),
    ],
)
async def test_other_requests_pass_by(make: Make, ask: Ask) -> None:
    site = Site()
    fetcher = make(site)
    await fetcher.fetch(Ask(URL))
    for _ in range(2):
        assert not (await fetcher.fetch(ask)).cached
    assert site.asked[1:] == [ask, ask]


async def test_a_page_over_the_limit_is_not_served(make: Make) -> None:
    site = Site()
    fetcher = make(site)
    await fetcher.fetch(Ask(URL))
    await fetcher.fetch(Ask(URL, limits=Limits(body=3)))
    assert len(site.asked) == 2


async def test_errors_pass_through(make: Make) -> None:
    class Broken(Site):
        async def fetch(self, ask: Ask) -> Response:
            raise FetchError("reset")

    with pytest.raises(FetchError):
        await make(Broken()).fetch(Ask(URL))


async def test_close_closes_both(make: Make) -> None:
    site = Site()
    await make(site).close()
    assert site.closed


def test_the_key_tells_apart_what_answers_differently() -> None:
    plain = cache_key(Ask(URL))
    secret = cache_key(Ask(URL, headers=(("Authorization", "a"),)))
    others = [
        secret,
        cache_key(Ask(URL + "?")),
        cache_key(Ask(URL, allow_private=True)),
        cache_key(Ask(URL, headers=(("Authorization", "b"),))),
    ]
    assert len({plain, *others}) == 5
    assert cache_key(Ask(URL, headers=(("A", "1"), ("B", "2")))) == cache_key(
        Ask(URL, headers=(("b", "2"), ("a", "1")))
    )
    assert cache_key(Ask(URL, limits=Limits(total=1))) == plain
