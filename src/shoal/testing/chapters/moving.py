"""Moving: a job leaves one frontier and goes on in another as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from msgspec.structs import replace

from shoal.errors import UsageError
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.move import ROWS, Moved, movable, move, moving
from shoal.frontier.parcel import PARTS, Keys, Parcel, Part
from shoal.frontier.port import Backend
from shoal.model import (
    Added,
    Dead,
    Done,
    Failure,
    Job,
    JobSpec,
    JobState,
    Lease,
    Pace,
    Request,
    Retry,
    Selection,
)
from shoal.testing.chapters.chapter import REAP, Chapter, add_all, claim, claim_one, page, pages, requests
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
OTHER = "http://b.example"
FAILED = Failure("http_500", "no luck")

Pair = tuple[Backend, Backend]


class Moving(Chapter):
    """From the backend to the model and from the model to the backend, both ways through one fixture."""

    @pytest.fixture(params=["away", "here"])
    async def pair(
        self, frontier: Backend, harness: Harness, request: pytest.FixtureRequest
    ) -> AsyncIterator[Pair]:
        model = MemoryFrontier(clock=harness.now)
        # Nothing begins at zero where a job arrives: ids, lanes and lines of others are there.
        target = model if request.param == "away" else frontier
        await target.open_job("resident", FREE)
        await add_all(target, requests(pages(3, host="http://resident.example"), job="resident"))
        await target.pause("resident")
        yield (frontier, model) if request.param == "away" else (model, frontier)
        assert await model.check() == []

    async def test_a_job_arrives_with_everything_it_had(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await eventful(source, harness)
        before = await source.job("job")
        letters = await source.dead(Selection(job="job"))
        items = await source.items("job")
        moved = await moving_job(pair)
        after = await target.job("job")
        assert essence(after) == essence(before)
        assert before.started_at is not None and after.started_at is not None
        assert abs(after.started_at - before.started_at) < 0.01
        assert (moved.urls, moved.items) == (before.counts.live, before.counts.items)
        assert await target.items("job") == items
        assert await target.cursor("job", "sink") == 1
        there = await target.dead(Selection(job="job"))
        assert [told(letter) for letter in there] == [told(letter) for letter in letters]
        assert (await source.job("job")).state is JobState.CANCELLED
        note = await moving(source, "job")
        assert note is not None
        assert (note.to, note.complete) == ("there", True)

    async def test_claims_go_on_in_the_same_order(self, frontier: Backend, harness: Harness) -> None:
        """Twice the same history: one stays where it is, the other goes to the model and back."""
        model, stays = MemoryFrontier(clock=harness.now), MemoryFrontier(clock=harness.now)
        for place in (frontier, stays):
            await eventful(place, harness, advance=False)
        await stays.pause("job")
        await stays.resume("job")
        await moving_job((frontier, model))
        harness.advance(60.0)
        assert await served(model) == await served(stays)
        assert essence(await model.job("job")) == essence(await stays.job("job"))

    async def test_claims_go_on_in_the_same_order_in_the_backend(
        self, frontier: Backend, harness: Harness
    ) -> None:
        model, stays = MemoryFrontier(clock=harness.now), MemoryFrontier(clock=harness.now)
        for place in (model, stays):
            await eventful(place, harness, advance=False)
        await stays.pause("job")
        await stays.resume("job")
        await moving_job((model, frontier))
        harness.advance(60.0)
        assert await served(frontier) == await served(stays)
        assert essence(await frontier.job("job")) == essence(await stays.job("job"))

    async def test_what_is_known_stays_known(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await source.open_job("other", FREE)
        await add_all(source, requests(pages(9)))
        await add_all(source, requests(pages(2, start=20), job="other"))
        post = Request(page(1), "job", method="POST", body=b"x")
        await add_all(source, [post])
        await source.bury(Request("no url", "job"), "url_invalid", "no scheme")
        await source.settle([Done(lease) for lease in await claim(source, 3)])
        await moving_job(pair)
        assert await target.add([*requests(pages(9)), post]) == [Added.KNOWN] * 10
        assert await target.add(requests(pages(2, start=20))) == [Added.NEW] * 2
        dead = (await target.job("job")).counts.dead
        await target.bury(Request("no url", "job"), "url_invalid", "no scheme")
        assert (await target.job("job")).counts.dead == dead == 1

    async def test_known_keys_of_lanes_without_lines_come_too(self, pair: Pair) -> None:
        """A job that was over loses its lines to others; what it visited stays visited."""
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(2)))
        await source.settle([Done(lease) for lease in await claim(source, 9)])
        await source.open_job("other", FREE)
        await add_all(source, requests(pages(1), job="other"))
        await add_all(source, requests(pages(1, host=OTHER)))
        await moving_job(pair)
        assert await target.add(requests(pages(2))) == [Added.KNOWN] * 2

    async def test_a_piece_that_comes_again_changes_nothing(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await eventful(source, harness)
        await source.pause("job")
        rows = [await carry(pair, part, times=2, limit=2) for part in PARTS]
        assert rows[0] == 1
        view = await target.job("job")
        assert view.state is JobState.PAUSED
        assert await claim(target, 100, queues=["scraping", "other"]) == []
        assert await keys_of(target, limit=3) == await keys_of(source, limit=1000)
        assert len(await keys_of(source, limit=1)) == view.counts.added
        assert essence(await target.resume("job")) == essence(await source.resume("job"))

    async def test_a_copy_that_dies_anywhere_is_run_again(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await eventful(source, harness)
        before = await source.job("job")
        await source.save_cursor("job", "sink", 2)
        crumbling = Crumbling(target, random.Random(5))
        deaths = 0
        while True:
            try:
                await move(source, crumbling, "job", to="there", owner="me")  # type: ignore[arg-type]
                break
            except Fell:
                deaths += 1
                if (await source.job("job")).state is not JobState.CANCELLED:
                    assert (await source.job("job")).state is JobState.PAUSED
                    assert await claim(target, 9, queues=["scraping", "other"]) == []
        assert deaths > 5
        assert essence(await target.job("job")) == essence(before)
        assert await movable(source, target) == []

    async def test_leases_are_waited_for(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(3)))
        settled, lost = await claim(source, 2, lease=30.0)

        async def meanwhile() -> None:
            if not (await source.settle([Done(settled, items=[b"1"])])).lost:
                return
            harness.advance(30.0 + REAP)

        await move(Busy(source, meanwhile), target, "job", to="there", owner="me")  # type: ignore[arg-type]
        view = await target.job("job")
        assert (view.counts.done, view.counts.items, view.counts.waiting) == (1, 1, 2)
        assert (await source.settle([Done(lost, items=[b"late"])])).lost == [lost]
        assert await target.items("job") == await source.items("job")

    async def test_leases_are_taken_back_at_once_when_asked(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(4)))
        leases = await claim(source, 3)
        for _ in range(3):  # not a crash: never dead as `worker_crashed`
            assert await source.recall("job") == 3
            assert (await source.settle([Done(leases[0], items=[b"late"])])).lost == [leases[0]]
            leases = await claim(source, 3)
        assert await source.evict(["w"]) == 3  # the first crash, and not the fourth
        assert len(await claim(source, 3)) == 3
        await move(source, target, "job", to="there", owner="me", now=True)
        view = await target.job("job")
        assert (view.counts.waiting, view.counts.items, view.errors) == (4, 0, {})
        served = await claim(target, 100)
        assert [lease.request.url for lease in served if lease.request.job == "job"] == pages(4)

    async def test_crashes_are_counted_on(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(1)))
        for _ in range(2):
            await claim_one(source)
            await source.evict(["w"])
        await moving_job(pair)
        harness.advance(60.0)
        await claim_one(target)
        await target.evict(["w"])
        assert (await target.job("job")).errors == {"worker_crashed": 1}

    async def test_pace_travels(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await source.open_job("job", JobSpec(gap=2.0, width=2))
        for name in ("a", "b", "c", "d"):
            await add_all(source, requests(pages(3, host=f"http://{name}")))
        await source.pace("a", Pace(gap=7.0, width=3, burst=2, pinned=True))
        await source.pace("b", Pace(floor=5.0))
        await source.pace("c", Pace(blocked=90.0))
        await source.pace("d", Pace(paused=True))
        visit = next(lease for lease in await claim(source, 9) if lease.lane == "b")
        await source.settle([Done(visit)])
        await source.recall("job")
        names = ("a", "b", "c", "d")
        before = {lane.name: lane for lane in await source.lanes(names=names)}
        await moving_job(pair)
        after = {lane.name: lane for lane in await target.lanes(names=names)}
        for name in names:
            for field in ("gap", "width", "burst", "floor", "pinned", "paused", "waiting"):
                assert getattr(after[name], field) == getattr(before[name], field), (name, field)
        assert after["c"].blocked_until == pytest.approx(harness.now() + 90.0)
        assert after["b"].ready_at == pytest.approx(harness.now() + 5.0)

    async def test_where_others_work_the_slower_pace_holds(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", JobSpec(gap=1.0, width=4))
        await add_all(source, requests(pages(2)) + requests(pages(2, host=OTHER)))
        await target.open_job("slow", JobSpec(gap=9.0, width=2))
        await add_all(target, requests(pages(2, start=50), job="slow"))
        await target.pace("b.example", Pace(gap=0.5, width=7, pinned=True))
        await moving_job(pair)
        lanes = {lane.name: lane for lane in await target.lanes()}
        assert (lanes["a.example"].gap, lanes["a.example"].width) == (9.0, 2)
        assert (lanes["b.example"].gap, lanes["b.example"].width) == (0.5, 7)

    async def test_budgets_go_on_counting(self, pair: Pair) -> None:
        source, target = pair
        spec = JobSpec(gap=0.0, width=9, start=(page(0),), max_pages=6, max_per_host=2)
        await source.open_job("job", spec)
        await add_all(source, requests([page(0), page(0, host=OTHER), page(1, host=OTHER)]))
        await moving_job(pair)
        more = requests([page(2, host=OTHER), *pages(4, start=1)])
        assert await target.add(more) == [Added.REFUSED, *[Added.NEW] * 3, Added.REFUSED]

    async def test_delay_and_ttl_are_what_was_left(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(
            source,
            [
                Request(page("late"), "job", delay=20.0),
                Request(page("soon"), "job", ttl=20.0),
                Request(page("never"), "job", delay=30.0, ttl=20.0),
            ],
        )
        harness.advance(5.0)
        await moving_job(pair)
        counts = (await target.job("job")).counts
        assert (counts.waiting, counts.delayed) == (1, 2)
        harness.advance(14.75)
        await target.claim(0, worker="w", lease=1.0)
        counts = (await target.job("job")).counts
        assert (counts.waiting, counts.delayed, counts.expired) == (1, 2, 0)
        harness.advance(0.5)
        leases = await claim(target, 9)
        assert page("late") in [lease.request.url for lease in leases]
        assert (await target.job("job")).counts.expired == 2

    async def test_what_expires_while_it_is_moved_is_counted_once(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, [Request(url, "job", ttl=5.0) for url in pages(3)])
        await add_all(source, requests(pages(2, start=10)))
        await source.pause("job")
        await carry(pair, "head")
        harness.advance(6.0)
        await source.claim(0, worker="w", lease=1.0)  # somebody else works there: they end
        moved = await moving_job(pair)
        counts = (await target.job("job")).counts
        assert (counts.added, counts.expired, counts.waiting, moved.urls) == (5, 3, 2, 2)

    async def test_expiring_where_it_arrives_is_counted_once(self, pair: Pair, harness: Harness) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, [Request(url, "job", ttl=5.0) for url in pages(3)])
        await source.pause("job")
        for part in ("head", "lanes", "delayed", "waiting"):
            await carry(pair, part)
        harness.advance(6.0)
        await target.claim(0, worker="w", lease=1.0)
        assert (await target.job("job")).state is JobState.DONE
        await add_all(source, requests(pages(1, start=10)))
        await moving_job(pair)
        view = await target.job("job")
        assert (view.state, view.counts.added, view.counts.waiting) == (JobState.PAUSED, 4, 1)
        assert view.counts.expired == 3

    async def test_dead_letters_can_be_revived_there(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(4)))
        leases = await claim(source, 2)
        await source.settle([Dead(lease, FAILED) for lease in leases])
        await moving_job(pair)
        assert await target.revive(Selection(job="job")) == 2
        mine = [lease for lease in await claim(target, 100) if lease.request.job == "job"]
        assert [lease.request.url for lease in mine] == pages(4)
        assert [lease.request.attempt for lease in mine] == [1, 1, 0, 0]

    async def test_a_job_that_was_paused_stays_paused(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(2)))
        await source.pause("job")
        await moving_job(pair)
        assert (await target.job("job")).state is JobState.PAUSED
        await target.resume("job")
        assert len([x for x in await claim(target, 100) if x.request.job == "job"]) == 2

    async def test_a_finished_job_can_be_moved_when_asked_for(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(2)))
        first, second = await claim(source, 2)
        await source.settle([Done(first, items=[b"1"]), Dead(second, FAILED)])
        before = await source.job("job")
        assert await movable(source, target) == []
        assert await movable(source, target, finished=True) == ["job"]
        await moving_job(pair)
        assert essence(await target.job("job")) == essence(before)
        assert await movable(source, target, finished=True) == []

    async def test_a_job_of_the_same_name_is_never_touched(self, pair: Pair) -> None:
        source, target = pair
        for place in pair:
            await place.open_job("job", FREE)
            await add_all(place, requests(pages(1)))
        before = await target.job("job")
        with pytest.raises(UsageError, match="already"):
            await moving_job(pair)
        assert await target.job("job") == before
        with pytest.raises(UsageError, match="already"):
            await target.unpack("job", await source.pack("job", "keys"))

    async def test_a_source_that_went_on_is_noticed(self, pair: Pair) -> None:
        source, _ = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(3)))
        await source.pause("job")
        for part in PARTS[:5]:
            await carry(pair, part)
        await source.resume("job")
        await source.settle([Done(lease) for lease in await claim(source, 1)])
        with pytest.raises(UsageError, match="went on"):
            await moving_job(pair)

    async def test_urls_added_meanwhile_come_too(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        await add_all(source, requests(pages(3)))
        grown = Growing(source)
        await move(grown, target, "job", to="there", owner="me")  # type: ignore[arg-type]
        assert (await target.job("job")).counts.waiting == 4

    async def test_two_cannot_move_one_job(self, pair: Pair) -> None:
        source, _ = pair
        await source.open_job("job", FREE)
        assert await source.lock("move job", "other", 30.0) == "other"
        with pytest.raises(UsageError, match="other"):
            await moving_job(pair)
        await move(*pair, "job", to="there", owner="me", gone=lambda holder: holder == "other")

    async def test_a_large_line_arrives_in_order(self, pair: Pair) -> None:
        source, target = pair
        await source.open_job("job", FREE)
        wanted = pages(ROWS + 50)
        await add_all(source, requests(wanted))
        [first, *_] = await claim(source, 5)
        await source.settle([Retry(first, 0.0, FAILED)])
        await source.recall("job")
        await moving_job(pair)
        got: list[str] = []
        while leases := [x for x in await claim(target, 100) if x.request.job == "job"]:
            await target.settle([Done(lease) for lease in leases])
            got += [lease.request.url for lease in leases]
        assert got == wanted


async def moving_job(pair: Pair) -> Moved:
    return await move(*pair, "job", to="there", owner="me")


async def carry(pair: Pair, part: Part, *, times: int = 1, limit: int = 1000) -> int:
    """One part, each piece several times. Answers how many rows were new."""
    source, target = pair
    after: str | None = ""
    rows = 0
    while after is not None:
        parcel = await source.pack("job", part, after=after, limit=limit)
        rows += await target.unpack("job", parcel)
        for _ in range(times - 1):
            again = await target.unpack("job", parcel)
            assert part == "cursors" or part == "spread" or again == 0, part
        after = parcel.next
    return rows


async def keys_of(frontier: Backend, *, limit: int) -> list[bytes]:
    after: str | None = ""
    keys: list[bytes] = []
    while after is not None:
        parcel = await frontier.pack("job", "keys", after=after, limit=limit)
        assert isinstance(parcel, Keys)
        keys += parcel.keys
        after = parcel.next
    return sorted(set(keys))  # a piece may name one again


async def eventful(frontier: Backend, harness: Harness, *, advance: bool = True) -> None:
    """A job half done: every state, several lines on a lane, luggage, retries, crashes, items."""
    spec = JobSpec(gap=0.0, width=50, start=(page(0),), max_per_host=40, retries=5)
    await frontier.open_job("job", spec)
    await add_all(frontier, requests(pages(6)))
    await add_all(frontier, requests(pages(4, start=10), priority=8))
    await add_all(frontier, requests(pages(3, start=20), queue="other"))
    await add_all(frontier, requests(pages(3, host=OTHER)))
    rich = Request(
        *(page("rich"), "job", "label", "scraping", 5, 3),
        method="POST",
        headers={"x": "y"},
        body=b"\x00\xff",
        data={"a": [1, None]},
        origin=page("from"),
        hops=2,
    )
    await add_all(frontier, [rich, Request(page("expiring"), "job", ttl=900.0)])
    await add_all(frontier, [Request(page("later"), "job", delay=50.0, ttl=900.0)])
    await frontier.add(requests(pages(2)))
    leases = await claim(frontier, 6)
    assert len(leases) == 6
    found = requests([page("found", host=OTHER), page(1)])
    await frontier.settle([Done(leases[0], items=[b"1", b"2"], found=found), Dead(leases[1], FAILED)])
    await frontier.settle([Retry(leases[2], 40.0, FAILED), Done(leases[3], skipped="robots")])
    await frontier.settle([Done(leases[0])])
    await frontier.evict(["w"])  # two come back with a crash
    for nonsense in ("nonsense", "more of it", "and more"):
        await frontier.bury(Request(nonsense, "job"), "url_invalid", "no scheme")
    await frontier.save_cursor("job", "sink", 1)
    if advance:
        harness.advance(10.0)


async def served(frontier: Backend) -> list[tuple[str, int, int, str, str, object]]:
    """What is visited from here on, two at a time."""
    found: list[tuple[str, int, int, str, str, object]] = []
    while leases := await claim(frontier, 2, queues=["scraping", "other"]):
        found += [
            (x.request.url, x.request.attempt, x.request.depth, x.request.label, x.request.queue, luggage(x))
            for x in leases
        ]
        await frontier.settle([Done(lease) for lease in leases])
    return found


def luggage(lease: Lease) -> object:
    request = lease.request
    return request.method, request.headers, request.body, request.data, request.origin


def essence(job: Job) -> Job:
    """Without what two frontiers cannot agree on: their times, and who came too late there."""
    return replace(job, created_at=0.0, finished_at=None if job.finished_at is None else 0.0)


def told(letter: object) -> object:
    return replace(letter, id=0)  # type: ignore[type-var]


class Fell(Exception):
    pass


class _Around:
    """A frontier with something between."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class Crumbling(_Around):
    """Falls now and then, just before or just after it stored a piece."""

    def __init__(self, inner: Backend, dice: random.Random) -> None:
        super().__init__(inner)
        self._dice = dice

    async def unpack(self, job: str, parcel: Parcel) -> int:
        fresh = await self._perhaps(self._inner.unpack, job, parcel)
        assert isinstance(fresh, int)
        return fresh

    async def resume(self, job: str) -> object:
        return await self._perhaps(self._inner.resume, job)

    async def note(self, *values: object) -> object:
        return await self._perhaps(self._inner.note, *values)

    async def _perhaps(self, work: Callable[..., Awaitable[object]], *values: object) -> object:
        if self._dice.random() < 0.25:
            raise Fell
        answer = await work(*values)
        if self._dice.random() < 0.25:
            raise Fell
        return answer


class Growing(_Around):
    """Somebody adds a URL just after the requests were packed."""

    _grown = False

    async def pack(self, job: str, part: Part, *, after: str = "", limit: int = 1000) -> Parcel:
        if part == "letters" and not self._grown:
            self._grown = True
            await self._inner.add(requests([page("meanwhile")]))
        return await self._inner.pack(job, part, after=after, limit=limit)


class Busy(_Around):
    """Its workers go on while somebody looks."""

    def __init__(self, inner: Backend, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._meanwhile = meanwhile

    async def job(self, name: str) -> Job:
        view = await self._inner.job(name)
        if view.state is JobState.PAUSED and view.counts.leased:
            await self._meanwhile()
        return view
