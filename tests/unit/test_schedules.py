"""Schedules on a clock that is moved by hand: what fires, what is skipped, what is repaired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from shoal.app import (
    Fired,
    Scheduler,
    Session,
    Shoal,
    Timing,
    add_schedule,
    change_schedule,
    new_schedule,
    remove_schedule,
    run_schedule,
)
from shoal.app import schedules as firing
from shoal.app.processes import process_name
from shoal.errors import FrontierCorrupt, FrontierUnreachable, NoSuchSchedule, ScheduleExists, UsageError
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.notes import Lock
from shoal.model import Done, JobState
from shoal.schedule import book
from shoal.schedule.book import Book, Schedule
from shoal.scrape.page import Page
from shoal.settings import load
from shoal.testing.clock import FakeClock

START = datetime(2026, 11, 16, 6, 0, tzinfo=UTC).timestamp()
URL = "http://example.com/"


class World:
    """A session on a frontier whose clock is ours, and what fired on it."""

    def __init__(self, session: Session, clock: FakeClock) -> None:
        self.session = session
        self.frontier = session.frontier
        self.clock = clock
        self.firings: list[Fired] = []
        self.told: list[str] = []
        self.scheduler = self.another()

    def another(self) -> Scheduler:
        return Scheduler(self.session, tell=self.told.append, fired=self.firings.append)

    async def add(
        self, name: str = "news", *, scraper: str = "site", url: str = URL, **when: Any
    ) -> Schedule:
        made = new_schedule(self.session, name, (url,) if url else (), scraper)
        return await add_schedule(self.session, Timing(**when).on(made))

    async def one(self, name: str = "news") -> Schedule:
        return await Book(self.frontier.notes).one(name)

    async def pass_(self, seconds: float) -> list[str]:
        """Time passes, somebody looks; the jobs that this brought."""
        self.clock.advance(seconds)
        before = len(self.firings)
        await self.scheduler.look()
        return [each.job for each in self.firings[before:]]

    async def finish(self) -> None:
        """Everything that waits is visited."""
        while leases := (await self.frontier.claim(100, worker="w", lease_seconds=60.0)).leases:
            await self.frontier.settle([Done(lease) for lease in leases])
            self.clock.advance(1.0)

    async def jobs(self) -> list[str]:
        return sorted(job.id for job in await self.frontier.jobs())


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock = FakeClock(START)
    settings = load(frontier="memory:", rate="none")
    yield World(Session(settings, None, MemoryFrontier(clock=clock)), clock)


async def test_a_job_is_named_after_the_schedule_and_the_moment(world: World) -> None:
    made = await world.add(cron="5 6 * * *")
    assert made.next_at == START + 300
    assert await world.pass_(299) == []
    assert await world.pass_(1) == ["news-20261116_060500"]
    job = await world.frontier.job("news-20261116_060500")
    assert (job.counts.added, job.spec.start, job.spec.dedicated) == (1, (URL,), False)
    one = await world.one()
    assert (one.last_job, one.last_at, one.fired) == (job.id, START + 300, 1)
    assert one.next_at == START + 300 + 86400
    assert await world.pass_(1) == []


async def test_waiting_is_bounded_and_ends_when_something_is_due(world: World) -> None:
    assert await world.scheduler.look() == firing.LOOK
    await world.add(every="3s")
    world.clock.advance(0.5)
    assert await world.scheduler.look() == pytest.approx(2.5)


async def test_missed_firings_are_one(world: World) -> None:
    await world.add(every="1h")
    assert await world.pass_(10 * 3600 + 60) == ["news-20261116_070000"], "named after the first of them"
    assert (await world.one()).next_at == START + 11 * 3600


async def test_missed_firings_come_one_by_one_if_somebody_wants_that(world: World) -> None:
    await world.add(every="1h", overlap="allow", catch_up=True)
    world.clock.advance(3 * 3600 + 60)
    while await world.scheduler.look() <= 0:
        pass
    assert await world.jobs() == ["news-20261116_070000", "news-20261116_080000", "news-20261116_090000"]
    assert (await world.one()).next_at == START + 4 * 3600


async def test_it_is_skipped_while_its_last_job_runs_or_is_paused(world: World) -> None:
    await world.add(every="1h")
    [job] = await world.pass_(3600)
    assert await world.pass_(3600) == [""]
    await world.frontier.update_job(job, state=JobState.PAUSED)
    assert await world.pass_(3600) == [""]
    one = await world.one()
    assert (one.fired, one.skipped, one.last_job) == (1, 2, job)
    await world.frontier.update_job(job, state=JobState.RUNNING)
    await world.finish()
    assert (await world.frontier.job(job)).state is JobState.DONE
    assert await world.pass_(3600) == ["news-20261116_100000"]


async def test_a_cancelled_job_holds_nothing_up(world: World) -> None:
    await world.add(every="1h")
    [job] = await world.pass_(3600)
    await world.frontier.update_job(job, state=JobState.CANCELLED)
    assert await world.pass_(3600) == ["news-20261116_080000"]


async def test_overlap_can_be_allowed(world: World) -> None:
    await world.add(every="1h", overlap="allow")
    assert await world.pass_(3600) + await world.pass_(3600) == [
        "news-20261116_070000",
        "news-20261116_080000",
    ]


async def test_two_who_look_at_once_fire_once(world: World) -> None:
    await world.add(every="1h", overlap="allow")
    others = [world.another() for _ in range(5)]
    for _ in range(3):
        world.clock.advance(3600)
        await asyncio.gather(*(each.look() for each in others))
        await world.finish()
    assert await world.jobs() == ["news-20261116_070000", "news-20261116_080000", "news-20261116_090000"]
    assert [each.job for each in world.firings] == await world.jobs()
    assert (await world.one()).fired == 3


async def test_a_firing_counts_although_the_schedule_is_changed_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.add(every="1h")
    submit = Session.submit

    async def paused_meanwhile(session: Session, *values: Any, **more: Any) -> dict[str, int]:
        await change_schedule(session, "news", Timing(paused=True))
        return await submit(session, *values, **more)

    monkeypatch.setattr(Session, "submit", paused_meanwhile)
    [job] = await world.pass_(3600)
    one = await world.one()
    assert (one.last_job, one.fired, one.paused, one.next_at) == (job, 1, True, None)


async def test_somebody_who_stalls_and_wakes_changes_nothing(world: World) -> None:
    """Its lock is long gone; the job that it opens and fills is there and done."""
    await world.add(every="1h")
    late = await world.one()
    await world.pass_(3600)
    await world.finish()
    await world.another()._fire(late, START + 3600)
    one, job = await world.one(), await world.frontier.job("news-20261116_070000")
    assert (one.fired, one.next_at) == (1, START + 2 * 3600)
    assert (job.state, job.counts.added, job.counts.done) == (JobState.DONE, 1, 1)


async def test_a_job_that_was_opened_and_not_filled_is_filled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.add(every="1h")
    with monkeypatch.context() as patch:

        async def dies(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(Session, "submit", dies)
        with pytest.raises(KeyboardInterrupt):
            await world.pass_(3600)
    job = await world.frontier.job("news-20261116_070000")
    assert (job.counts.added, (await world.one()).fired) == (0, 0)
    # Later than the next one would have been: it is still that job, and the empty one skips nothing.
    assert await world.pass_(2 * 3600) == [job.id]
    assert (await world.frontier.job(job.id)).counts.added == 1
    assert await world.jobs() == [job.id]


async def test_what_was_begun_is_completed_even_if_it_would_be_skipped_now(world: World) -> None:
    made = await world.add(every="1h")
    await world.frontier.open_job("news-20261116_070000", made.spec)  # whoever did so was killed
    running = await run_schedule(world.session, "news")
    assert await world.pass_(3600) == ["news-20261116_070000"]
    assert (await world.frontier.job(running)).state is JobState.RUNNING
    assert (await world.frontier.job("news-20261116_070000")).counts.added == 1


async def test_who_died_with_the_lock_holds_it_up_for_seconds(world: World) -> None:
    await world.add(every="1h")
    world.clock.advance(3600)
    notes = world.frontier.notes
    assert await Lock(notes, firing.LOCK, "elsewhere_1_1", firing.LOCK_SECONDS).take()
    assert await world.scheduler.look() == firing.AGAIN
    assert await world.pass_(firing.LOCK_SECONDS) == ["news-20261116_070000"]
    assert await Lock(notes, firing.LOCK, f"{process_name(2**22 + 1)}_1", firing.LOCK_SECONDS).take()
    await world.finish()
    assert await world.pass_(3600) == ["news-20261116_080000"], "of this machine: at once"


async def test_a_paused_one_rests_and_misses_nothing_afterwards(world: World) -> None:
    await world.add(every="1h")
    paused = await change_schedule(world.session, "news", Timing(paused=True))
    assert paused.next_at is None
    assert await world.pass_(10 * 3600) == []
    resumed = await change_schedule(world.session, "news", Timing(paused=False))
    assert resumed.next_at == START + 11 * 3600
    assert await world.pass_(3600) == ["news-20261116_170000"]


async def test_what_does_not_change_the_time_does_not_move_it(world: World) -> None:
    made = await world.add(every="1h")
    world.clock.advance(600)
    changed = await change_schedule(world.session, "news", Timing(overlap="allow"))
    assert (changed.overlap, changed.next_at) == ("allow", made.next_at)
    moved = await change_schedule(world.session, "news", Timing(cron="30 * * * *"))
    assert (moved.every, moved.next_at) == (0, START + 1800)


async def test_it_can_be_run_by_hand_at_any_time(world: World) -> None:
    await world.add(every="1h")
    await change_schedule(world.session, "news", Timing(paused=True))
    jobs = {await run_schedule(world.session, "news") for _ in range(3)}
    assert set(await world.jobs()) == jobs
    assert all(job.startswith("news-20261116_060000-") for job in jobs)
    one = await world.one()
    assert (one.fired, one.last_job in jobs, one.next_at) == (3, True, None)
    await change_schedule(world.session, "news", Timing(paused=False))
    assert await world.pass_(3600) == [""], "its job by hand still runs"
    with pytest.raises(NoSuchSchedule):
        await run_schedule(world.session, "other")


async def test_a_run_by_hand_while_it_is_due_does_not_hold_it_up(world: World) -> None:
    await world.add(every="1h", overlap="allow")
    world.clock.advance(3630)
    await run_schedule(world.session, "news")
    assert await world.pass_(0) == ["news-20261116_070000"]
    assert ((await world.one()).fired, (await world.one()).next_at) == (2, START + 7200)


async def test_a_name_is_taken_once_and_replaced_on_purpose(world: World) -> None:
    await world.add(every="1h")
    await world.pass_(3600)
    with pytest.raises(ScheduleExists):
        await world.add(every="2h")
    made = Timing(every="2h").on(new_schedule(world.session, "news", ("http://other.test/",), "site"))
    kept = await add_schedule(world.session, made, replace=True)
    assert (kept.every, kept.spec.start, kept.fired) == (7200, ("http://other.test/",), 1)
    assert kept.next_at == START + 3 * 3600
    await remove_schedule(world.session, "news")
    with pytest.raises(NoSuchSchedule):
        await remove_schedule(world.session, "news")
    assert await world.jobs() == ["news-20261116_070000"], "its jobs stay"


@pytest.mark.parametrize(
    ("when", "told"),
    [
        ({}, "needs a cron expression or an interval"),
        ({"cron": "0 6 * * *", "every": "1h"}, "exclude each other"),
        ({"every": "1h", "timezone": "Europe/Berlin"}, "an interval has no time zone"),
        ({"every": "1h", "catch_up": True}, "requires overlap allow"),
        ({"cron": "0 6 * * *", "timezone": "Mars"}, "no time zone"),
    ],
)
async def test_what_cannot_be_is_refused(world: World, when: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        await world.add(**when)
    assert await Book(world.frontier.notes).all() == {}


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "ü", "x" * 65, "a\n"])
async def test_a_name_must_make_the_name_of_a_job(world: World, name: str) -> None:
    with pytest.raises(UsageError, match="bad name"):
        await world.add(name, every="1h")


async def test_there_must_be_somewhere_to_start(world: World) -> None:
    with pytest.raises(UsageError, match="no URL"):
        await world.add(url="", every="1h")
    with pytest.raises(UsageError, match="bad URL"):
        await world.add(url="ftp://example.com/", every="1h")
    with pytest.raises(UsageError, match="a schedule can have at most 1,000"):
        new_schedule(world.session, "many", tuple(f"{URL}{n}" for n in range(1001)), "site")
    with pytest.raises(UsageError):
        new_schedule(world.session, "news", (URL,), "site", queue="failed_urls")


async def test_there_is_an_end_to_schedules_but_those_that_are_there_fire(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "MOST", 2)
    await world.add("a", every="1h")
    await world.add("b", every="1h")
    with pytest.raises(UsageError, match="a frontier holds at most 2 schedules"):
        await world.add("c", every="1h")
    monkeypatch.setattr(book, "MOST_BYTES", 10)
    assert await world.pass_(3600) == ["a-20261116_070000", "b-20261116_070000"]
    await remove_schedule(world.session, "a")


async def test_many_who_change_schedules_at_once_lose_none(world: World) -> None:
    await asyncio.gather(*(world.add(f"s{n:02}", every="1h") for n in range(20)))
    assert list(await Book(world.frontier.notes).all()) == [f"s{n:02}" for n in range(20)]


async def test_a_thousand_schedules_that_are_due_at_once(world: World) -> None:
    first = await world.add("s", every="1h")
    many = [msgspec.structs.replace(first, name=f"s{n:03}") for n in range(999)]
    await remove_schedule(world.session, "s")
    note = msgspec.json.encode({"schedules": many})
    await world.frontier.notes.put(book.SHELF, book.KEY, note, 1e6)
    world.clock.advance(3600)
    while await world.scheduler.look() <= 0:
        pass
    assert len(world.firings) == len({each.job for each in world.firings}) == 999


async def test_a_scraper_begins_where_it_says_when_it_fires() -> None:
    app = Shoal()

    @app.scraper("books", start=["http://books.test/1"], rate="none")
    async def books(page: Page) -> None: ...

    clock = FakeClock(START)
    frontier = MemoryFrontier(clock=clock)
    world = World(Session(load(frontier="memory:"), app, frontier), clock)
    made = await world.add("books", scraper="books", url="", every="1h")
    assert (made.own_start, made.spec.start, made.spec.max_pages) == (True, (), None)
    object.__setattr__(app.scrapers["books"], "start", ("http://books.test/2",))
    [job] = await world.pass_(3600)
    assert (await frontier.job(job)).spec.start == ("http://books.test/2",)
    await world.finish()

    stranger = World(Session(load(frontier="memory:"), None, frontier), clock)
    assert await stranger.pass_(3600) == [""]
    [failed] = stranger.firings
    assert "cannot load scraper 'books'" in failed.error
    assert "cannot load scraper 'books'" in (await world.one("books")).error
    assert await stranger.pass_(firing.LOOK) == [], "told once"
    assert await stranger.scheduler.look() > 0, "and not in a hurry"
    assert await world.pass_(0) == ["books-20261116_080000"]
    assert (await world.one("books")).error == "", "who can, does"


async def test_a_node_that_does_not_know_the_time_zone_leaves_it_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.add(cron="0 8 * * *", timezone="Europe/Berlin")
    with monkeypatch.context() as patch:

        def unknown(*_: object) -> int:
            raise UsageError("no time zone 'Europe/Berlin'")

        patch.setattr(book, "next_cron", unknown)
        assert await world.pass_(3600) == [""]
        assert "no time zone" in (await world.one()).error
        assert await world.scheduler.look() > 0
    assert await world.pass_(5) == ["news-20261116_070000"]
    one = await world.one()
    assert (one.fired, one.error, one.next_at) == (1, "", START + 3600 + 86400)
    assert (await world.frontier.job(one.last_job)).counts.added == 1


async def test_a_frontier_that_is_away_is_told_once_and_looked_at_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "AGAIN", 0.001)
    await world.add(every="1s")
    world.clock.advance(1)
    asked = 0
    get = world.frontier.notes.get

    async def away(shelf: str, name: str) -> bytes | None:
        nonlocal asked
        asked += 1
        if asked < 5:
            raise FrontierUnreachable("it is away")
        return await get(shelf, name)

    monkeypatch.setattr(world.frontier.notes, "get", away)
    running = asyncio.create_task(world.scheduler.run())
    async with asyncio.timeout(30):
        while not world.firings:
            await asyncio.sleep(0)
    running.cancel()
    assert world.told == ["schedules are waiting for the frontier: it is away"]


async def test_a_change_here_ends_the_wait(world: World) -> None:
    running = asyncio.create_task(world.scheduler.run())
    await asyncio.sleep(0)
    await world.add(every="1h")
    world.clock.advance(3600)
    async with asyncio.timeout(firing.LOOK / 2):
        while not world.firings:
            world.scheduler.wake()
            await asyncio.sleep(0)
    running.cancel()


async def test_what_cannot_be_read_is_an_error_of_the_frontier(world: World) -> None:
    await world.frontier.notes.put(book.SHELF, book.KEY, b"[]", 10.0)
    with pytest.raises(FrontierCorrupt):
        await Book(world.frontier.notes).all()
