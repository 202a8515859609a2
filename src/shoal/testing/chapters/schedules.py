"""Schedules: stored in the frontier, and fired once however many nodes check them."""

from __future__ import annotations

import asyncio

from shoal.app import Fired, Scheduler, Session, Timing, add_schedule, new_schedule, remove_schedule
from shoal.frontier.port import Backend
from shoal.schedule.book import Book, Schedule
from shoal.settings import load
from shoal.testing.chapters.chapter import Chapter, page
from shoal.testing.harness import Harness


def _session(frontier: Backend) -> Session:
    return Session(load(frontier="memory:", rate="none"), None, frontier)


async def an_hourly(frontier: Backend, name: str = "news") -> Schedule:
    session = _session(frontier)
    made = Timing(every="1h", overlap="allow").on(new_schedule(session, name, (page(0), page(1)), "site"))
    return await add_schedule(session, made)


class Schedules(Chapter):
    async def test_all_nodes_see_the_same_schedules(self, frontier: Backend, harness: Harness) -> None:
        other = await harness.open()
        made = await an_hourly(frontier)
        assert made.next_at == int(harness.now()) + 3600, "by the frontier's clock"
        assert await Book(other.notes).all() == {"news": made}
        await remove_schedule(_session(other), "news")
        assert await Book(frontier.notes).all() == {}

    async def test_no_concurrent_change_of_schedules_is_lost(
        self, frontier: Backend, harness: Harness
    ) -> None:
        handles = [frontier, await harness.open(), await harness.open()]
        await asyncio.gather(*(an_hourly(handles[n % 3], f"s{n}") for n in range(9)))
        assert list(await Book(frontier.notes).all()) == [f"s{n}" for n in range(9)]

    async def test_each_firing_is_one_job_however_many_nodes_check(
        self, frontier: Backend, harness: Harness
    ) -> None:
        handles = [frontier, await harness.open(), await harness.open()]
        firings: list[Fired] = []
        schedulers = [Scheduler(_session(each), tell=_fail, fired=firings.append) for each in handles]
        await an_hourly(frontier)
        for _ in range(3):
            harness.advance(3600)
            await asyncio.gather(*(each.look() for each in schedulers))
        jobs = await frontier.jobs()
        assert sorted(each.job for each in firings) == sorted(job.id for job in jobs)
        assert [job.counts.added for job in jobs] == [2] * 3
        assert [job.counts.known for job in jobs] == [0] * 3, "and was filled once"
        assert (await Book(frontier.notes).one("news")).fired == 3


def _fail(text: str) -> None:
    raise AssertionError(text)
