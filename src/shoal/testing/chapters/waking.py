"""Waking and draining: an empty claim says when to come back, and never reports a false end."""

from __future__ import annotations

import asyncio
import math

from shoal.frontier.port import Backend
from shoal.model import Done, Failure, JobSpec, JobState, Pace, Release, Request, Retry, Selection
from shoal.testing.chapters.chapter import (
    REAP,
    Chapter,
    add_all,
    claim,
    claim_one,
    page,
    pages,
    requests,
    urls,
)
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
FAILED = Failure("http_500", "no luck")


async def waiting_time(frontier: Backend, queues: list[str] | None = None) -> float | None:
    """Make a claim that must be empty. Returns the seconds until the next one is worthwhile; None =
    drained."""
    answer = await frontier.claim(100, worker="w", lease_seconds=60.0, queues=queues)
    assert not answer.leases
    return None if answer.wake_at is None else answer.wake_at - answer.now


class Waking(Chapter):
    async def test_an_empty_frontier_is_drained(self, frontier: Backend) -> None:
        assert await waiting_time(frontier) is None
        await frontier.open_job("job", FREE)
        assert (await frontier.claim(5, worker="w", lease_seconds=60.0)).drained

    async def test_a_finished_frontier_is_drained(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier))])
        assert await waiting_time(frontier) is None

    async def test_an_empty_claim_waits_for_the_end_of_a_gap(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=7.0, width=3))
        await add_all(frontier, requests(pages(2)))
        await claim_one(frontier)
        harness.advance(2.0)
        assert await waiting_time(frontier) == 5.0
        harness.advance(5.0)
        await claim_one(frontier)

    async def test_an_empty_claim_waits_for_the_end_of_a_block(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(2)))
        await frontier.pace("a.example", Pace(blocked=90.0))
        assert await waiting_time(frontier) == 90.0

    async def test_the_earliest_lane_counts(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        for host, rest in (("a.example", 50.0), ("b.example", 20.0), ("c.example", 80.0)):
            await add_all(frontier, requests(pages(1, host=f"http://{host}")))
            await frontier.pace(host, Pace(blocked=rest))
        assert await waiting_time(frontier) == 20.0

    async def test_an_empty_claim_waits_for_the_end_of_a_delay(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", delay=12.0)])
        assert await waiting_time(frontier) == 12.0
        harness.advance(12.0)
        await claim_one(frontier)

    async def test_an_empty_claim_waits_for_a_retry(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Retry(await claim_one(frontier), 33.0, FAILED)])
        assert await waiting_time(frontier) == 33.0

    async def test_a_leased_request_is_not_drained(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier, lease_seconds=10.0)
        rest = await waiting_time(frontier)
        assert rest is not None
        assert 10.0 <= rest <= 10.0 + REAP
        await frontier.extend([lease], 40.0)
        rest = await waiting_time(frontier)
        assert rest is not None
        assert 10.0 <= rest <= 40.0 + REAP, "earlier is allowed, later would be a lost wake-up"

    async def test_a_full_lane_waits_for_its_leases_not_for_its_gap(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0, width=1))
        await add_all(frontier, requests(pages(2)))
        await claim_one(frontier, lease_seconds=30.0)
        rest = await waiting_time(frontier)
        assert rest is not None
        assert 30.0 <= rest <= 30.0 + REAP

    async def test_a_worker_that_comes_at_the_announced_time_gets_the_abandoned_request(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await claim_one(frontier, lease_seconds=10.0)
        # A worker that comes at the announced times gets it after a few claims: never stuck, never spinning.
        for turn in range(4):
            answer = await frontier.claim(1, worker="w", lease_seconds=60.0)
            if answer.leases:
                assert turn > 0
                return
            assert answer.wake_at is not None
            assert answer.retry_in > 0.0, "a claim that may come at once must not come in vain"
            harness.advance(answer.retry_in)
        raise AssertionError("the abandoned request never came back")

    async def test_a_paused_job_waits_for_ever_but_is_not_drained(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.update_job("job", state=JobState.PAUSED)
        assert await waiting_time(frontier) == math.inf
        await frontier.update_job("job", state=JobState.RUNNING)
        await claim_one(frontier)

    async def test_a_paused_lane_waits_for_ever_but_is_not_drained(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.pace("a.example", Pace(paused=True))
        assert await waiting_time(frontier) == math.inf

    async def test_a_paused_job_does_not_hide_the_others(self, frontier: Backend) -> None:
        await frontier.open_job("held", FREE)
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1), job="held"))
        await frontier.update_job("held", state=JobState.PAUSED)
        await add_all(frontier, [Request(url=page(0), job="job", delay=5.0)])
        assert await waiting_time(frontier) == 5.0

    async def test_an_expiry_ends_the_wait(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", ttl=8.0)])
        await frontier.pace("a.example", Pace(blocked=500.0))
        rest = await waiting_time(frontier)
        assert rest is not None
        assert rest <= 8.0 + REAP
        harness.advance(8.0 + REAP)
        assert await waiting_time(frontier) is None

    async def test_each_queue_is_drained_by_itself(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1), queue="rag"))
        assert await waiting_time(frontier, ["business"]) is None
        leases = await claim(frontier, 5, queues=["rag"])
        assert len(leases) == 1
        assert await waiting_time(frontier, ["rag"]) is not None
        assert await waiting_time(frontier, ["business"]) is None

    async def test_a_delay_in_another_queue_does_not_count(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", queue="rag", delay=9.0)])
        assert await waiting_time(frontier, ["business"]) is None
        assert await waiting_time(frontier, ["rag", "business"]) == 9.0

    async def test_a_freed_slot_wakes_its_lane(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=2.0, width=1))
        await add_all(frontier, requests(pages(2)))
        lease = await claim_one(frontier, lease_seconds=600.0)
        harness.advance(1.0)
        await frontier.settle([Done(lease)])
        assert await waiting_time(frontier) == 1.0
        harness.advance(1.0)
        await claim_one(frontier)

    async def test_an_added_request_wakes_a_lane_that_had_run_empty(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        for number in range(5):
            await add_all(frontier, requests([page(number)]))
            await frontier.settle([Done(await claim_one(frontier))])

    async def test_a_revived_request_wakes_its_lane(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await frontier.bury(Request(url=page(0), job="job"), "url_invalid", "bad")
        assert await waiting_time(frontier) is None
        await frontier.revive(Selection(job="job"))
        await claim_one(frontier)

    async def test_a_faster_pace_wakes_its_lane(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(2)))
        await claim_one(frontier, lease_seconds=500.0)
        await frontier.pace("a.example", Pace(width=2))
        await claim_one(frontier)

    async def test_resuming_a_job_wakes_its_lanes(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        for host in ("http://a.example", "http://b.example"):
            await add_all(frontier, requests(pages(1, host=host)))
        await frontier.update_job("job", state=JobState.PAUSED)
        harness.advance(100.0)
        assert await claim(frontier, 100) == []
        await frontier.update_job("job", state=JobState.RUNNING)
        assert len(await claim(frontier, 100)) == 2

    async def test_requests_that_came_due_while_paused_are_claimable_on_resume(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", delay=5.0)])
        await frontier.update_job("job", state=JobState.PAUSED)
        harness.advance(10.0)
        assert await claim(frontier, 100) == []
        await frontier.update_job("job", state=JobState.RUNNING)
        assert urls(await claim(frontier, 100)) == [page(0)]

    async def test_a_claim_of_another_queue_does_not_unschedule_a_lane(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1), queue="rag"))
        for _ in range(3):
            assert await claim(frontier, 100, queues=["business"]) == []
        assert urls(await claim(frontier, 100, queues=["rag"])) == [page(0)]

    async def test_a_released_request_wakes_its_lane(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Release(await claim_one(frontier))])
        await claim_one(frontier)

    async def test_waiting_ends_when_work_arrives(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        async with asyncio.timeout(5.0):
            waiter = asyncio.create_task(frontier.wait(3600.0))
            await asyncio.sleep(0)  # let it begin, or there is nothing to wake
            await add_all(frontier, requests(pages(1)))
            await waiter

    async def test_waiting_ends_when_a_slot_becomes_free(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(2)))
        lease = await claim_one(frontier)
        async with asyncio.timeout(5.0):
            waiter = asyncio.create_task(frontier.wait(3600.0))
            await asyncio.sleep(0)  # let it begin, or there is nothing to wake
            await frontier.settle([Done(lease)])
            await waiter

    async def test_waiting_ends_by_itself(self, frontier: Backend) -> None:
        async with asyncio.timeout(5.0):
            await frontier.wait(0.0)
            await frontier.wait(0.01)
