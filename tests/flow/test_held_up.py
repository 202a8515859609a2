"""Visits that are held up after everything was looked at: the host's pace holds as the host sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.app import Session
from shoal.demo.site import Call, Hit, LoopbackSite, Reply
from shoal.fetch.driver import Driver
from shoal.fetch.guard import Resolver
from shoal.model import JobSpec, Request
from shoal.settings import load

GAP = 0.4
EARLY = 0.1
"""How much too early a visit may seem on a busy machine; who breaks the pace comes with no gap at all."""
PAGES = 6


def page(call: Call) -> Reply:
    return Reply(200, f"<title>{call.path}</title>".encode())


@pytest.fixture
def site() -> Iterator[LoopbackSite]:
    with LoopbackSite(page) as running:
        yield running


async def crawl(site: LoopbackSite, *paths: str, **spec: Any) -> list[Hit]:
    async with Session.opened(load(frontier="memory:")) as session:
        await session.frontier.open_job(
            "held", JobSpec(gap=GAP, width=4, robots=False, allow_private=True, retries=1, **spec)
        )
        await session.frontier.add([Request(site.url + path, "held") for path in paths])
        await session.worker().run()
        counts = (await session.frontier.job("held")).counts
        assert counts.live == 0
    return site.log()


def hold_up(monkeypatch: pytest.MonkeyPatch, which: int, seconds: float) -> None:
    take_in, calls = Driver._take_in, count(1)

    def held_up(self: Driver) -> None:
        if self._inbox and next(calls) == which:
            time.sleep(seconds)
        take_in(self)

    monkeypatch.setattr(Driver, "_take_in", held_up)


def assert_paced(hits: list[Hit]) -> None:
    between = [after.start - before.start for before, after in pairwise(hits)]
    assert min(between) >= GAP - EARLY, between


async def test_on_the_way_to_the_fetcher(site: LoopbackSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a stop of the whole process at that moment: the third waits until the fourth is due."""
    hold_up(monkeypatch, 3, GAP)
    hits = await crawl(site, *(f"page/{number}" for number in range(PAGES)))
    assert_paced(hits)
    assert len(hits) == PAGES


async def test_by_a_name_that_takes_long(site: LoopbackSite, monkeypatch: pytest.MonkeyPatch) -> None:
    known, calls = Resolver.known, count(1)

    def held_up(self: Resolver, *details: Any) -> tuple[str, ...] | None:
        if next(calls) == 3:
            time.sleep(GAP)
        return known(self, *details)

    monkeypatch.setattr(Resolver, "known", held_up)
    hits = await crawl(site, *(f"page/{number}" for number in range(PAGES)))
    assert_paced(hits)
    assert len(hits) == PAGES


async def test_a_lost_connection_does_not_send_it_twice_in_a_turn(site: LoopbackSite) -> None:
    """libcurl sends a request again if a connection that it had kept closes instead of an answer."""
    hits = await crawl(site, "page/1", "drop")
    assert_paced(hits)
    # Once on the kept connection, which is no attempt, and on a new one for each of two attempts.
    assert [hit.path for hit in hits].count("/drop") == 3


@pytest.mark.parametrize(("which", "gap", "robots"), [(1, GAP, ""), (3, 0.0, f"Crawl-delay: {GAP}")])
async def test_with_robots_txt(which: int, gap: float, robots: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held up itself, it is asked for again. What it wants counts also for visits that are held up."""
    hold_up(monkeypatch, which, GAP)
    with LoopbackSite(page, robots=f"User-agent: *\n{robots}\n") as site:
        async with Session.opened(load(frontier="memory:")) as session:
            await session.frontier.open_job("held", JobSpec(gap=gap, width=4, allow_private=True))
            await session.frontier.add([Request(f"{site.url}page/{number}", "held") for number in range(5)])
            await session.worker().run()
        hits = site.log()
    first, *others = hits
    assert first.path == "/robots.txt"
    assert sorted(hit.path for hit in others) == [f"/page/{number}" for number in range(5)]
    assert_paced(hits)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_clock_that_is_set_forward_cuts_no_gap_short(
    kind: str, site: LoopbackSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontier's clock, by an hour, between two visits. With a server the clock is its own, and what its
    workers do about it is the same."""
    address = "memory:" if kind == "memory" else str(tmp_path / "frontier.db")
    async with Session.opened(load(frontier=address)) as session:
        await session.frontier.open_job("held", JobSpec(gap=GAP, width=4, robots=False, allow_private=True))
        await session.frontier.add([Request(f"{site.url}page/{number}", "held") for number in range(PAGES)])

        def clock() -> float:
            return time.time() + (3600.0 if len(site.log()) >= 3 else 0.0)

        monkeypatch.setattr(getattr(session.frontier, "_store", session.frontier), "_clock", clock)
        await session.worker().run()
    hits = site.log()
    assert_paced(hits)
    assert len(hits) == PAGES
