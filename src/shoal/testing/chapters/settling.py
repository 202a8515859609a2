"""Settling: items, found requests, the end of the lease and the counters happen together."""

from __future__ import annotations

from shoal.frontier.port import Backend
from shoal.model import Dead, Done, Failure, JobSpec, JobState, Request, Retry, Selection
from shoal.testing.chapters.chapter import Chapter, add_all, claim, claim_one, page, pages, requests, urls
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
FAILED = Failure("http_500", "no luck")


class Settling(Chapter):
    async def test_settling_nothing_is_harmless(self, frontier: Backend) -> None:
        assert (await frontier.settle([])).lost == []
        assert await frontier.extend([], 5.0) == []

    async def test_items_are_stored_in_order(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        first, second = await claim(frontier, 2)
        await frontier.settle([Done(first, items=[b"1", b"2"])])
        await frontier.settle([Done(second, items=[b"3", b"3"])])
        items = await frontier.items("job")
        assert [item.body for item in items] == [b"1", b"2", b"3", b"3"]
        assert [item.seq for item in items] == sorted({item.seq for item in items})
        assert (await frontier.job("job")).counts.items == 4

    async def test_found_requests_are_added_once(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        found = requests([page(0), page(1), page(2), page(1)])
        await frontier.settle([Done(lease, found=found)])
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.known, counts.waiting, counts.done) == (3, 2, 2, 1)
        assert urls(await claim(frontier, 100)) == [page(1), page(2)]

    async def test_two_verdicts_of_one_batch_find_the_same(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(2)))
        found = requests(pages(3, start=2))
        await frontier.settle([Done(lease, found=found) for lease in await claim(frontier, 2)])
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.known, counts.waiting) == (5, 3, 3)

    async def test_a_found_request_can_be_delayed_and_on_another_host(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        far = page(0, host="http://b.example")
        found = [Request(url=far, job="job", delay=3.0), Request(url=page(9), job="job", ttl=2.0)]
        await frontier.settle([Done(await claim_one(frontier), found=found)])
        counts = (await frontier.job("job")).counts
        assert (counts.delayed, counts.waiting) == (1, 1)
        harness.advance(3.0)
        assert urls(await claim(frontier, 100)) == [far]
        assert (await frontier.job("job")).counts.expired == 1

    async def test_a_job_is_not_done_while_its_last_page_still_finds_some(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier), found=requests(pages(1, start=1)))])
        assert (await frontier.job("job")).state is JobState.RUNNING
        await frontier.settle([Done(await claim_one(frontier))])
        job = await frontier.job("job")
        assert job.state is JobState.DONE
        assert job.finished_at is not None

    async def test_a_skipped_visit_is_done_and_counted_apart(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier), skipped="robots")])
        job = await frontier.job("job")
        assert (job.counts.done, job.counts.skipped, job.state) == (1, 1, JobState.DONE)

    async def test_a_retry_waits_as_long_as_it_says(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Retry(await claim_one(frontier), 30.0, FAILED)])
        job = await frontier.job("job")
        assert (job.counts.delayed, job.counts.retried, job.errors) == (1, 1, {"http_500": 1})
        harness.advance(29.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        assert (await claim_one(frontier)).request.attempt == 1

    async def test_a_retry_keeps_everything_else_of_the_request(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        given = Request(
            url=page(0), job="job", label="x", depth=2, priority=8, data={"n": 1}, delay=2.0, ttl=9.0
        )
        await add_all(frontier, [given])
        harness.advance(2.0)
        first = await claim_one(frontier)
        await frontier.settle([Retry(first, 30.0, FAILED)])
        harness.advance(30.0)
        again = (await claim_one(frontier)).request
        assert (again.label, again.depth, again.priority, again.data) == ("x", 2, 8, {"n": 1})

    async def test_a_retried_request_does_not_expire(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        await frontier.settle([Retry(await claim_one(frontier), 30.0, FAILED)])
        harness.advance(30.0)
        await claim_one(frontier)

    async def test_a_dead_request_becomes_a_letter(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Dead(await claim_one(frontier), Failure("http_404", "gone"))])
        job = await frontier.job("job")
        assert (job.counts.dead, job.state, job.errors) == (1, JobState.DONE, {"http_404": 1})
        [letter] = await frontier.dead(Selection(job="job"))
        assert letter.request.url == page(0)
        assert letter.failure == Failure("http_404", "gone", "w")
        assert (letter.lane, letter.state, letter.ended_at) == ("a.example", "dead", harness.now())

    async def test_errors_are_counted_by_class_over_all_visits(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        for error in ("reset", "http_500", "reset"):
            await frontier.settle([Retry(await claim_one(frontier), 1.0, Failure(error))])
            harness.advance(1.0)
        await frontier.settle([Dead(await claim_one(frontier), Failure("reset"))])
        job = await frontier.job("job")
        assert (job.errors, job.counts.retried) == ({"reset": 3, "http_500": 1}, 3)

    async def test_a_batch_may_hold_several_jobs_and_all_kinds(self, frontier: Backend) -> None:
        for name in ("one", "two"):
            await frontier.open_job(name, FREE)
            await add_all(frontier, requests(pages(2), job=name))
        leases = {(lease.request.job, lease.request.url): lease for lease in await claim(frontier, 100)}
        lost = (
            await frontier.settle(
                [
                    Done(leases["one", page(0)], items=[b"1"]),
                    Dead(leases["two", page(0)], FAILED),
                    Retry(leases["two", page(1)], 5.0, FAILED),
                    Done(leases["one", page(1)], items=[b"2"], found=requests(pages(1, start=5), job="one")),
                ]
            )
        ).lost
        assert lost == []
        one, two = (await frontier.job("one")).counts, (await frontier.job("two")).counts
        assert (one.done, one.items, one.waiting, one.dead) == (2, 2, 1, 0)
        assert (two.done, two.dead, two.delayed, two.items) == (0, 1, 1, 0)

    async def test_the_counters_add_up(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(10)))
        await add_all(frontier, [Request(url=page("ttl"), job="job", ttl=1.0, delay=5.0)])
        leases = await claim(frontier, 6)
        await frontier.settle([Done(leases[0]), Dead(leases[1], FAILED), Retry(leases[2], 9.0, FAILED)])
        harness.advance(6.0)
        await claim(frontier, 1)
        counts = (await frontier.job("job")).counts
        assert counts.added == 11
        assert counts.live == counts.waiting + counts.delayed + counts.leased == 8
        assert (counts.done, counts.dead, counts.expired) == (1, 1, 1)
