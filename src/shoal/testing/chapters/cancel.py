"""Cancel and pause: no further visit starts, and visits in flight end in order."""

from __future__ import annotations

import pytest

from shoal.errors import NoSuchJob
from shoal.frontier.port import Backend
from shoal.model import (
    Added,
    Dead,
    Done,
    Failure,
    JobSpec,
    JobState,
    Pace,
    Release,
    Request,
    Retry,
    Selection,
    Verdict,
)
from shoal.testing.chapters.chapter import REAP, Chapter, add_all, claim, claim_one, page, pages, requests
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
FAILED = Failure("http_500", "no luck")


class Cancel(Chapter):
    async def test_a_paused_job_starts_nothing_but_finishes_what_it_began(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(3)))
        [lease] = await claim(frontier, 1)
        assert (await frontier.update_job("job", state=JobState.PAUSED)).state is JobState.PAUSED
        assert await claim(frontier, 100) == []
        assert await frontier.extend([lease], 60.0) == []
        assert (
            await frontier.settle([Done(lease, items=[b"1"], found=requests(pages(1, start=5)))])
        ).lost == []
        counts = (await frontier.job("job")).counts
        assert (counts.done, counts.items, counts.waiting) == (1, 1, 3)
        assert await claim(frontier, 100) == []
        assert (await frontier.update_job("job", state=JobState.RUNNING)).state is JobState.RUNNING
        assert len(await claim(frontier, 100)) == 3

    async def test_a_paused_job_accepts_requests(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await frontier.update_job("job", state=JobState.PAUSED)
        await add_all(frontier, requests(pages(2)))
        assert await claim(frontier, 100) == []
        assert (await frontier.job("job")).counts.waiting == 2

    async def test_a_retry_of_a_paused_job_waits_for_the_resume(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        await frontier.update_job("job", state=JobState.PAUSED)
        await frontier.settle([Retry(lease, 1.0, FAILED)])
        harness.advance(5.0)
        assert await claim(frontier, 100) == []
        await frontier.update_job("job", state=JobState.RUNNING)
        await claim_one(frontier)

    async def test_pausing_twice_and_resuming_a_running_job_are_harmless(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        await frontier.update_job("job", state=JobState.PAUSED)
        await frontier.update_job("job", state=JobState.PAUSED)
        await frontier.update_job("job", state=JobState.RUNNING)
        await frontier.update_job("job", state=JobState.RUNNING)
        assert len(await claim(frontier, 100)) == 2

    async def test_steering_an_unknown_job_is_an_error(self, frontier: Backend) -> None:
        with pytest.raises(NoSuchJob):
            await frontier.job("nobody")
        for state in JobState:
            with pytest.raises(NoSuchJob):
                await frontier.update_job("nobody", state=state)

    async def test_a_cancel_ends_waiting_requests_at_once(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [*requests(pages(2)), Request(url=page("late"), job="job", delay=9.0)])
        job = await frontier.update_job("job", state=JobState.CANCELLED)
        assert job.state is JobState.CANCELLED
        assert (job.counts.cancelled, job.counts.live) == (3, 0)
        assert (job.counts.waiting, job.counts.delayed) == (0, 0)
        assert (await frontier.claim(100, worker="w", lease_seconds=60.0)).drained

    async def test_a_cancelled_delay_never_comes_due(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", delay=9.0, ttl=20.0)])
        await frontier.update_job("job", state=JobState.CANCELLED)
        harness.advance(30.0)
        assert (await frontier.claim(100, worker="w", lease_seconds=60.0)).drained
        counts = (await frontier.job("job")).counts
        assert (counts.cancelled, counts.expired, counts.live) == (1, 0, 0)

    async def test_a_cancelled_job_refuses_more(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await frontier.update_job("job", state=JobState.CANCELLED)
        assert await frontier.add(requests(pages(2))) == [Added.REFUSED] * 2
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.refused) == (0, 2)

    @pytest.mark.parametrize("kind", ["done", "retry", "dead", "release"])
    async def test_a_visit_that_ends_after_the_cancel_ends_cancelled(
        self, frontier: Backend, harness: Harness, kind: str
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        await frontier.update_job("job", state=JobState.CANCELLED)
        counts = (await frontier.job("job")).counts
        assert (counts.leased, counts.cancelled) == (1, 0)
        verdicts: dict[str, Verdict] = {
            "done": Done(lease, items=[b"1"], found=requests(pages(2, start=1))),
            "retry": Retry(lease, 0.0, FAILED),
            "dead": Dead(lease, FAILED),
            "release": Release(lease),
        }
        await frontier.settle([verdicts[kind]])
        job = await frontier.job("job")
        assert (job.state, job.counts.cancelled, job.counts.live) == (JobState.CANCELLED, 1, 0)
        assert (job.counts.added, job.counts.items, job.counts.done, job.counts.dead) == (1, 0, 0, 0)
        assert await frontier.items("job") == []
        harness.advance(1.0)
        assert (await frontier.claim(100, worker="w", lease_seconds=60.0)).drained

    async def test_extend_returns_the_lease_of_a_cancelled_job_as_lost(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        await frontier.update_job("job", state=JobState.CANCELLED)
        assert await frontier.extend([lease], 60.0) == [lease]
        await frontier.settle([Release(lease)])
        counts = (await frontier.job("job")).counts
        assert (counts.cancelled, counts.live, counts.leased) == (1, 0, 0)

    async def test_the_host_stays_busy_until_the_cancelled_visit_has_left(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await frontier.open_job("next", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        await add_all(frontier, requests(pages(1), job="next"))
        await frontier.update_job("job", state=JobState.CANCELLED)
        await frontier.extend([lease], 60.0)
        assert await claim(frontier, 100) == [], "the old visit is still on the host"
        await frontier.settle([Release(lease)])
        assert (await claim_one(frontier)).request.job == "next"

    async def test_an_abandoned_cancelled_visit_ends_and_frees_its_slot(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await frontier.open_job("next", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(1)))
        await claim_one(frontier, lease_seconds=10.0)
        await add_all(frontier, requests(pages(1), job="next"))
        await frontier.update_job("job", state=JobState.CANCELLED)
        harness.advance(10.0 + REAP)
        assert (await claim_one(frontier)).request.job == "next"
        counts = (await frontier.job("job")).counts
        assert (counts.cancelled, counts.live) == (1, 0)

    async def test_a_cancelled_visit_that_is_abandoned_after_its_extend_frees_its_slot(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await frontier.open_job("next", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier, lease_seconds=10.0)
        await add_all(frontier, requests(pages(1), job="next"))
        await frontier.update_job("job", state=JobState.CANCELLED)
        await frontier.extend([lease], 500.0)
        harness.advance(10.0 + REAP)
        assert (await claim_one(frontier)).request.job == "next"
        assert (await frontier.job("job")).counts.cancelled == 1

    async def test_cancelled_stays_cancelled(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        lease = (await claim(frontier, 1))[0]
        await frontier.settle([Dead(lease, FAILED)])
        await frontier.update_job("job", state=JobState.CANCELLED)
        assert await frontier.revive(Selection(job="job")) == 0
        for state in JobState:
            await frontier.update_job("job", state=state)
            assert (await frontier.job("job")).state is JobState.CANCELLED
        counts = (await frontier.job("job")).counts
        assert (counts.dead, counts.cancelled, counts.live) == (1, 1, 0)

    async def test_a_paused_job_can_be_cancelled(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        await frontier.update_job("job", state=JobState.PAUSED)
        assert (await frontier.update_job("job", state=JobState.CANCELLED)).counts.cancelled == 2
        assert (await frontier.claim(100, worker="w", lease_seconds=60.0)).drained

    async def test_a_cancel_forgets_no_pace(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        await frontier.pace("a.example", Pace(blocked=60.0))
        await frontier.update_job("job", state=JobState.CANCELLED)
        await frontier.open_job("next", FREE)
        await add_all(frontier, requests(pages(1), job="next"))
        assert await claim(frontier, 100) == []
