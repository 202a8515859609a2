"""The page cache: bounded, honest about age, and never a reason to fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.errors import FetchError
from shoal.fetch.cache import Cached, CachingFetcher, MemoryCache, PageCache, cache_key
from shoal.fetch.port import Ask, Limits
from shoal.model import Response

URL = "https://a.example/page"


def page(body: bytes = b"body", stored_at: float = 0.0) -> Cached:
    return Cached(URL, (("etag", '"1"'),), body, stored_at)


@pytest.fixture
def cache() -> PageCache:
    return MemoryCache()


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


async def test_close_closes_the_fetcher_inside(make: Make) -> None:
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
