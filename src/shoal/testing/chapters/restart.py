"""Restart: after closing and opening the storage, everything is there, pace and tokens included."""

from __future__ import annotations

import pytest

from shoal.frontier.notes import Cursor
from shoal.frontier.port import Backend
from shoal.model import Added, Dead, Done, Failure, JobSpec, JobState, Pace, Request, Retry, Selection
from shoal.schedule.book import Book
from shoal.testing.chapters.chapter import (
    REAP,
    Chapter,
    add_all,
    claim,
    claim_one,
    page,
    pages,
    requests,
    serve,
    urls,
)
from shoal.testing.chapters.schedules import an_hourly
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
FAILED = Failure("http_500", "no luck")


class Restart(Chapter):
    async def test_waiting_requests_wait_in_the_same_order(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(5)))
        frontier = await harness.reopen()
        assert await frontier.add(requests(pages(1))) == [Added.KNOWN]
        assert [request.url for request in await serve(frontier, 5)] == pages(5)

    async def test_a_request_that_was_put_in_front_stays_there(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(3)))
        [first] = await claim(frontier, 1)
        await frontier.settle([Retry(first, 0.0, FAILED)])
        frontier = await harness.reopen()
        await add_all(frontier, requests(pages(1, start=3)))
        assert [request.url for request in await serve(frontier, 4)] == pages(4)

    async def test_jobs_keep_spec_state_counts_and_errors(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=9, start=(page(0),), max_pages=20))
        await add_all(frontier, requests(pages(6)))
        await frontier.add(requests(pages(2)))
        leases = await claim(frontier, 4)
        found = requests(pages(2, start=6))
        await frontier.settle([Done(leases[0], items=[b"1"], found=found), Dead(leases[1], FAILED)])
        await frontier.settle([Retry(leases[2], 50.0, FAILED), Done(leases[0])])
        await frontier.update_job("job", state=JobState.PAUSED)
        before = await frontier.job("job")
        frontier = await harness.reopen()
        assert await frontier.job("job") == before
        assert before.state is JobState.PAUSED
        assert [item.body for item in await frontier.items("job")] == [b"1"]
        assert len(await frontier.dead(Selection(job="job"))) == 1

    async def test_a_lease_outlives_the_restart(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier, lease_seconds=30.0)
        frontier = await harness.reopen()
        assert await claim(frontier, 100) == []
        assert await frontier.extend([lease], 30.0) == []
        assert (await frontier.settle([Done(lease, items=[b"1"])])).lost == []
        assert (await frontier.job("job")).counts.done == 1

    async def test_a_lease_that_ends_meanwhile_is_taken_back(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        late = await claim_one(frontier, lease_seconds=30.0)
        frontier = await harness.reopen()
        harness.advance(30.0 + REAP)
        await claim_one(frontier)
        assert (await frontier.settle([Done(late)])).lost == [late]

    async def test_tokens_grow_across_restarts(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(20)))
        tokens = []
        for _ in range(4):
            leases = await claim(frontier, 3)
            tokens += [lease.token for lease in leases]
            # Tokens of settled leases must not be used again, although the highest row is gone.
            await frontier.settle([Done(lease) for lease in leases])
            frontier = await harness.reopen()
        assert tokens == sorted(set(tokens))

    async def test_the_gap_holds_across_the_restart(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=10.0, width=3))
        await add_all(frontier, requests(pages(3)))
        await claim_one(frontier)
        frontier = await harness.reopen()
        harness.advance(9.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)

    async def test_a_lane_that_ran_empty_keeps_its_gap(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=10.0))
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier))])
        frontier = await harness.reopen()
        await add_all(frontier, requests(pages(1, start=1)))
        assert await claim(frontier, 100) == []

    async def test_width_block_pause_pin_and_floor_hold(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=2))
        lanes = ("full", "blocked", "paused", "pinned")
        for name in lanes:
            await add_all(frontier, requests(pages(3, host=f"http://{name}")))
        await frontier.pace("blocked", Pace(blocked=60.0))
        await frontier.pace("paused", Pace(paused=True))
        await frontier.pace("pinned", Pace(gap=5.0, width=1, burst=1, floor=2.0, pinned=True))
        assert len(await claim(frontier, 100)) == 3
        before = sorted(await frontier.lanes(names=lanes), key=lambda lane: lane.name)
        frontier = await harness.reopen()
        assert sorted(await frontier.lanes(names=lanes), key=lambda lane: lane.name) == before
        assert await claim(frontier, 100) == []

    async def test_delays_and_expiries_hold(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        delayed = Request(url=page("late"), job="job", delay=20.0)
        expiring = Request(url=page("soon"), job="job", delay=15.0, ttl=10.0)
        await add_all(frontier, [delayed, expiring])
        frontier = await harness.reopen()
        harness.advance(19.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        assert urls(await claim(frontier, 100)) == [page("late")]
        assert (await frontier.job("job")).counts.expired == 1

    async def test_crashes_are_counted_across_restarts(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        for _ in range(3):
            await claim_one(frontier, lease_seconds=5.0)
            frontier = await harness.reopen()
            harness.advance(5.0 + REAP)
        assert await claim(frontier, 100) == []
        assert (await frontier.job("job")).errors == {"worker_crashed": 1}

    async def test_a_cancelled_job_stays_cancelled(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        [lease] = await claim(frontier, 1)
        await frontier.update_job("job", state=JobState.CANCELLED)
        frontier = await harness.reopen()
        assert await frontier.extend([lease], 60.0) == [lease]
        assert await frontier.add(requests(pages(1, start=5))) == [Added.REFUSED]
        await frontier.settle([Done(lease, items=[b"1"])])
        job = await frontier.job("job")
        assert (job.state, job.counts.cancelled, job.counts.items) == (JobState.CANCELLED, 2, 0)

    async def test_budgets_hold_across_the_restart(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job(
            "job", JobSpec(gap=0.0, width=9, start=(page(0),), max_pages=4, max_per_host=1)
        )
        await add_all(frontier, requests([page(0), page(0, host="http://b.example")]))
        frontier = await harness.reopen()
        answers = await frontier.add(requests([page(1, host="http://b.example"), *pages(3, start=1)]))
        assert answers == [Added.REFUSED, Added.NEW, Added.NEW, Added.REFUSED]

    async def test_item_positions_and_cursors_continue(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        first, second = await claim(frontier, 2)
        await frontier.settle([Done(first, items=[b"1"])])
        [item] = await frontier.items("job")
        await Cursor(frontier.notes, "job", "sink").save(item.seq)
        frontier = await harness.reopen()
        await frontier.settle([Done(second, items=[b"2"])])
        position = await Cursor(frontier.notes, "job", "sink").get()
        assert position == item.seq
        assert [item.body for item in await frontier.items("job", after=position)] == [b"2"]

    async def test_schedules_hold(self, frontier: Backend, harness: Harness) -> None:
        made = await an_hourly(frontier)
        frontier = await harness.reopen()
        assert await Book(frontier.notes).all() == {"news": made}

    async def test_notes_hold_with_their_end(self, frontier: Backend, harness: Harness) -> None:
        begun = harness.now()
        await frontier.notes.put("shelf", "key", b"value", 10.0)
        assert await frontier.notes.compare_and_set("shelf", "book", None, b"value", 10.0)
        frontier = await harness.reopen()
        harness.advance(5.0)
        assert await frontier.notes.get("shelf", "key") == b"value"
        assert [note.name for note in await frontier.notes.scan("shelf")] == ["book", "key"]
        assert [note.at for note in await frontier.notes.scan("shelf")] == pytest.approx(
            [begun] * 2, abs=0.001
        )
        harness.advance(5.5)
        assert await frontier.notes.get("shelf", "key") is None
