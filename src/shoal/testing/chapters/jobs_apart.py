"""Separate jobs: one job does not affect another, except by the pace of a shared host."""

from __future__ import annotations

from shoal.frontier.port import Backend
from shoal.model import Added, Counts, Dead, Done, Failure, JobSpec, JobState, Selection
from shoal.testing.chapters.chapter import Chapter, add_all, claim, claim_one, page, pages, requests, urls

FREE = JobSpec(gap=0.0, width=100)


class JobsApart(Chapter):
    async def test_the_same_url_in_two_jobs_is_two_requests(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, FREE)
            assert await frontier.add(requests(pages(1), job=name)) == [Added.NEW]
        claimed = await claim(frontier, 100)
        assert urls(claimed) == [page(0), page(0)]
        assert {lease.request.job for lease in claimed} == {"one", "two"}

    async def test_one_batch_may_hold_several_jobs_on_one_host(self, frontier: Backend) -> None:
        for name in ("one", "two", "three"):
            await frontier.open_job(name, FREE)
        # The host is new and no job has requests yet: its lines must not be taken for old ones and dropped.
        await add_all(
            frontier,
            [request for name in ("one", "two", "three") for request in requests(pages(2), job=name)],
        )
        assert len(await claim(frontier, 100)) == 6

    async def test_found_requests_of_several_jobs_share_a_new_host(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, FREE)
        await add_all(frontier, requests(pages(1), job="one"))
        far = pages(2, host="http://b.example")
        found = [*requests(far, job="two"), *requests(far, job="one")]
        await frontier.settle([Done(await claim_one(frontier), found=found)])
        assert len(await claim(frontier, 100)) == 4

    async def test_a_dedicated_job_can_be_claimed_alone(self, frontier: Backend) -> None:
        await frontier.open_job("mine", JobSpec(gap=0.0, width=100, dedicated=True))
        await frontier.open_job("other", FREE)
        for name in ("other", "mine"):
            await add_all(frontier, requests(pages(2), job=name))
        answer = await frontier.claim(100, worker="w", lease_seconds=60.0, job="mine")
        assert [lease.request.job for lease in answer.leases] == ["mine", "mine"]
        await frontier.settle([Done(lease) for lease in answer.leases])
        assert (await frontier.claim(100, worker="w", lease_seconds=60.0, job="mine")).drained

    async def test_found_requests_belong_to_the_job_they_name(self, frontier: Backend) -> None:
        await frontier.open_job("one", FREE)
        await frontier.open_job("two", FREE)
        await add_all(frontier, requests(pages(1), job="one"))
        await frontier.settle([Done(await claim_one(frontier), found=requests(pages(2), job="two"))])
        one, two = await frontier.job("one"), await frontier.job("two")
        assert (one.counts.added, one.state) == (1, JobState.DONE)
        assert (two.counts.added, two.state) == (2, JobState.RUNNING)

    async def test_counts_errors_and_items_are_separate(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, FREE)
            await add_all(frontier, requests(pages(1), job=name))
        for lease in await claim(frontier, 100):
            if lease.request.job == "one":
                await frontier.settle([Done(lease, items=[b"1"])])
            else:
                await frontier.settle([Dead(lease, Failure("http_404"))])
        one, two = await frontier.job("one"), await frontier.job("two")
        assert one.counts == Counts(added=1, done=1, items=1)
        assert two.counts == Counts(added=1, dead=1)
        assert (one.errors, two.errors) == ({}, {"http_404": 1})
        assert [item.body for item in await frontier.items("one")] == [b"1"]
        assert await frontier.items("two") == []
        assert await frontier.dead(Selection(job="one")) == []

    async def test_similar_names_are_different_jobs(self, frontier: Backend) -> None:
        for name in ("a", "A", "a ", "a%", "a_", "ä"):
            await frontier.open_job(name, FREE)
            await add_all(frontier, requests(pages(1), job=name))
            assert (await frontier.job(name)).counts.added == 1

    async def test_pausing_one_job_leaves_the_other(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, FREE)
            await add_all(frontier, requests(pages(3), job=name))
        await frontier.update_job("one", state=JobState.PAUSED)
        assert {lease.request.job for lease in await claim(frontier, 100)} == {"two"}

    async def test_cancelling_one_job_leaves_the_other(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, FREE)
            await add_all(frontier, requests(pages(3), job=name))
        await frontier.update_job("one", state=JobState.CANCELLED)
        assert (await frontier.job("two")).counts == Counts(added=3, waiting=3)
        assert {lease.request.job for lease in await claim(frontier, 100)} == {"two"}

    async def test_reviving_one_job_leaves_the_other(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, FREE)
            await add_all(frontier, requests(pages(1), job=name))
        await frontier.settle([Dead(lease, Failure("reset")) for lease in await claim(frontier, 100)])
        assert await frontier.revive(Selection(job="one")) == 1
        assert [letter.request.job for letter in await frontier.dead(Selection())] == ["two"]

    async def test_a_job_can_ask_for_another_pace(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=60.0, width=1))
        await add_all(frontier, requests(pages(4)))
        assert len(await claim(frontier, 10)) == 1
        await frontier.update_job("job", spec=JobSpec(gap=0.0, width=3))
        [lane] = await frontier.lanes()
        assert (lane.gap, lane.width) == (0.0, 3)

    async def test_a_new_pace_is_no_faster_than_that_of_another_job(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, JobSpec(gap=60.0, width=1))
            await add_all(frontier, requests(pages(2), job=name))
        await frontier.update_job("one", spec=JobSpec(gap=0.0, width=3))
        [lane] = await frontier.lanes()
        assert (lane.gap, lane.width) == (60.0, 1)
