"""Adding: each request is stored once, in one state, and none is lost."""

from __future__ import annotations

import pytest

from shoal.errors import NoSuchJob
from shoal.frontier.port import Backend
from shoal.model import Added, Done, JobSpec, JobState, Request
from shoal.testing.chapters.chapter import Chapter, add_all, claim, claim_one, page, pages, requests, urls
from shoal.testing.harness import Harness


class Adding(Chapter):
    async def test_a_request_for_an_unopened_job_is_an_error(self, frontier: Backend) -> None:
        with pytest.raises(NoSuchJob):
            await frontier.add(requests(pages(1), job="nobody"))

    async def test_a_batch_with_one_unopened_job_stores_nothing(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        with pytest.raises(NoSuchJob):
            await frontier.add([*requests(pages(1)), *requests(pages(1), job="nobody")])
        assert (await frontier.job("job")).counts.added == 0

    async def test_adding_nothing_is_harmless(self, frontier: Backend) -> None:
        assert await frontier.add([]) == []

    async def test_add_returns_one_result_per_request_in_order(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        first, second = requests(pages(2))
        assert await frontier.add([first, first, second]) == [Added.NEW, Added.KNOWN, Added.NEW]
        assert await frontier.add([second, first]) == [Added.KNOWN, Added.KNOWN]
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.known, counts.waiting) == (2, 3, 2)

    async def test_a_request_stays_known_after_its_visit(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier))])
        assert await frontier.add(requests(pages(1))) == [Added.KNOWN]

    async def test_a_leased_request_is_known(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, requests(pages(1)))
        await claim_one(frontier)
        assert await frontier.add(requests(pages(1))) == [Added.KNOWN]

    async def test_method_and_body_make_another_request(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        post = Request(url=page(0), job="job", method="POST", body=b"q=1")
        other = Request(url=page(0), job="job", method="POST", body=b"q=2")
        answers = await frontier.add([*requests(pages(1)), post, other, post])
        assert answers == [Added.NEW, Added.NEW, Added.NEW, Added.KNOWN]

    async def test_label_priority_and_queue_do_not(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, requests(pages(1)))
        again = Request(url=page(0), job="job", label="x", priority=9, queue="other")
        assert await frontier.add([again]) == [Added.KNOWN]

    async def test_a_request_comes_back_as_it_was_given(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        given = Request(
            url=page("späße?q=ü"),
            job="job",
            label="detail",
            queue="rag",
            priority=7,
            depth=3,
            method="POST",
            headers={"accept": "text/html"},
            body=b"\x00\xff",
            data={"n": 1, "deep": [None, "ü", {"x": 0.5}]},
            origin=page("from"),
            hops=2,
            trail="0123456789abcdef ",
            starts=(page("start"), "http://ü.example/"),
        )
        await add_all(frontier, [given])
        lease = await claim_one(frontier)
        assert lease.request == given
        assert lease.lane == "a.example"

    async def test_what_start_urls_redirected_to_comes_back_with_a_plain_request(
        self, frontier: Backend
    ) -> None:
        await frontier.open_job("job", JobSpec())
        given = Request(url=page(0), job="job", depth=1, starts=(page("start"),))
        await add_all(frontier, [given])
        assert (await claim_one(frontier)).request == given

    async def test_a_port_makes_another_lane(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, requests(["http://a.example/", "http://a.example:8080/"]))
        assert {lease.lane for lease in await claim(frontier, 10)} == {"a.example", "a.example:8080"}

    async def test_a_delayed_request_is_not_claimable_before_its_time(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, [Request(url=page(0), job="job", delay=10.0)])
        assert await claim(frontier) == []
        counts = (await frontier.job("job")).counts
        assert (counts.delayed, counts.waiting) == (1, 0)
        harness.advance(9.75)
        assert await claim(frontier) == []
        harness.advance(0.25)
        assert urls(await claim(frontier)) == [page(0)]
        counts = (await frontier.job("job")).counts
        assert (counts.delayed, counts.waiting, counts.leased) == (0, 0, 1)

    async def test_a_request_that_is_not_visited_in_time_expires(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        harness.advance(6.0)
        assert await claim(frontier) == []
        job = await frontier.job("job")
        assert (job.counts.expired, job.counts.live, job.state) == (1, 0, JobState.DONE)

    async def test_a_visit_that_began_in_time_stops_the_expiry(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        harness.advance(4.0)
        lease = await claim_one(frontier)
        harness.advance(10.0)
        assert await claim(frontier) == []
        assert (await frontier.settle([Done(lease)])).lost == []
        assert (await frontier.job("job")).counts.expired == 0

    async def test_a_delayed_request_can_expire_before_it_is_due(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, [Request(url=page(0), job="job", delay=10.0, ttl=5.0)])
        harness.advance(11.0)
        assert await claim(frontier) == []
        assert (await frontier.job("job")).counts.expired == 1

    async def test_one_expired_request_does_not_hide_the_next(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec())
        short = [Request(url=url, job="job", ttl=5.0) for url in pages(3)]
        await add_all(frontier, [*short, *requests(pages(1, start=3))])
        harness.advance(6.0)
        assert urls(await claim(frontier)) == [page(3)]
        assert (await frontier.job("job")).counts.expired == 3

    async def test_an_expired_request_is_known(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        harness.advance(6.0)
        await claim(frontier)
        assert await frontier.add(requests(pages(1))) == [Added.KNOWN]

    async def test_a_large_batch_is_one_call(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec())
        await add_all(frontier, requests(pages(5000)))
        assert (await frontier.job("job")).counts.waiting == 5000
