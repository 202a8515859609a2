"""Objects in the place of addresses: they do the work, and belong to the user who made them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import Shoal
from shoal.demo.books import DemoSite, pages
from shoal.errors import FetchError, UsageError
from shoal.fetch.port import Ask
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.sqlite import SqliteFrontier
from shoal.model import Response
from shoal.registry import open_frontier
from tests.rig.local_dispatch import Exchange, LocalDispatch

FAST: dict[str, Any] = {"rate": "none", "allow_private": True}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with DemoSite() as site:
        yield site.url


class Shelf:
    """A fetcher with two pages and no network."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = False

    async def fetch(self, ask: Ask) -> Response:
        self.asked.append(ask.url)
        if ask.url.endswith("/robots.txt"):
            return Response(ask.url, 200, (), b"User-agent: *\nDisallow: /no", 0.0)
        if not ask.url.endswith((".example/", "/two", "/no")):
            raise FetchError("connect_refused", "no such page here")
        body = b"<title>Shelf</title><a href=/two>two</a> <a href=/no>no</a>"
        return Response(ask.url, 200, (("content-type", "text/html"),), body, 0.0)

    async def close(self) -> None:
        self.closed = True


async def test_a_frontier_serves_several_crawls_and_stays_open(site: str) -> None:
    frontier = await open_frontier("memory:")
    app = Shoal(frontier=frontier, **FAST)
    first = await app.crawl(site, max_pages=3)
    second = await app.crawl(site, max_pages=2)
    assert {job.id: job.counts.items for job in await frontier.jobs()} == {first.job: 3, second.job: 2}


async def test_a_file_is_still_open_after_a_crawl(site: str, tmp_path: Path) -> None:
    frontier = await SqliteFrontier.open(tmp_path / "mine.db")
    try:
        summary = await Shoal(**FAST).crawl(site, max_pages=3, frontier=frontier)
        assert len(await frontier.items(summary.job)) == 3
    finally:
        await frontier.close()


def test_a_memory_frontier_waits_on_any_loop() -> None:
    frontier = MemoryFrontier()
    for _ in range(2):
        asyncio.run(frontier.wait(0.001))  # an asyncio.Event stays with the loop that waited first


def test_one_frontier_serves_loops_one_after_another(site: str) -> None:
    """`shoal.crawl` has a loop of its own each time, on a thread."""
    frontier = MemoryFrontier()
    for _ in range(3):
        assert len(list(shoal.crawl(site, frontier=frontier, rate="50/s", allow_private=True))) == len(
            pages()
        )
    assert len(asyncio.run(frontier.jobs())) == 3


def test_a_file_serves_loops_one_after_another(site: str, tmp_path: Path) -> None:
    frontier = asyncio.run(SqliteFrontier.open(tmp_path / "mine.db"))
    for _ in range(2):
        assert len(list(shoal.crawl(site, frontier=frontier, max_pages=4, **FAST))) == 4
    assert len(asyncio.run(frontier.jobs())) == 2
    asyncio.run(frontier.close())


async def test_an_address_replaces_the_object_of_the_application(site: str) -> None:
    frontier = await open_frontier("memory:")
    await Shoal(frontier=frontier, **FAST).crawl(site, max_pages=1, frontier="memory:")
    assert await frontier.jobs() == []


async def test_a_fetcher_brings_the_pages_and_robots_still_counts() -> None:
    shelf = Shelf()
    app = Shoal(fetcher=shelf, frontier="memory:", rate="none")
    items = [item async for item in app.crawl("http://shelf.example/")]
    assert sorted(item["url"] for item in items) == ["http://shelf.example/", "http://shelf.example/two"]
    assert sorted(shelf.asked) == [
        "http://shelf.example/",
        "http://shelf.example/robots.txt",
        "http://shelf.example/two",
    ]
    assert not shelf.closed


async def test_leases_go_through_a_dispatch(site: str) -> None:
    exchange = Exchange()
    dispatch = LocalDispatch(exchange)
    app = Shoal(dispatch=dispatch, frontier="memory:", **FAST)
    for _ in range(2):
        summary = await app.crawl(site)
        assert summary.items == len(pages())
    assert exchange.queues.keys() >= {"url_queue_ttl"}, "nothing was sent"
    assert dispatch in exchange.handles
    await dispatch.depths(["still_open"])
    await dispatch.close()


@pytest.mark.parametrize("given", [{"frontier": object()}, {"fetcher": Shelf}, {"dispatch": 3}])
def test_what_is_no_part_is_refused(given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(UsageError, match=f"{name}=.* is no {name}"):
        Shoal(**given)


def test_fetchers_have_no_names() -> None:
    with pytest.raises(UsageError, match="no fetcher 'carrier-pigeon'"):
        Shoal(fetcher="carrier-pigeon")  # type: ignore[arg-type]
