"""Claiming order: which request is next, on a lane and between lanes."""

from __future__ import annotations

from collections import Counter

from shoal.frontier.port import Backend
from shoal.model import Dead, Done, Failure, JobSpec, Pace, Release, Request, Retry, Selection
from shoal.testing.chapters.chapter import REAP, Chapter, add_all, claim, page, pages, requests, serve, urls
from shoal.testing.harness import Harness

FAST = JobSpec(gap=0.0, width=10_000)
FAILED = Failure("http_500", "no luck")


class Order(Chapter):
    async def test_a_line_is_first_in_first_out(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(3)))
        await add_all(frontier, requests(pages(3, start=3)))
        assert [request.url for request in await serve(frontier, 6)] == pages(6)

    async def test_a_batch_claim_keeps_the_order(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(6)))
        assert urls(await claim(frontier, 6)) == pages(6)

    async def test_a_claim_gives_no_more_than_its_limit(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(5)))
        assert len(await claim(frontier, 3)) == 3
        assert len(await claim(frontier, 3)) == 2

    async def test_a_retried_request_goes_to_the_front(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(3)))
        [first] = await claim(frontier)
        await frontier.settle([Retry(first, 2.0, FAILED)])
        harness.advance(2.0)
        assert urls(await claim(frontier)) == [page(0)]

    async def test_a_released_request_goes_to_the_front(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(3)))
        [first] = await claim(frontier)
        await frontier.settle([Release(first)])
        assert urls(await claim(frontier)) == [page(0)]

    async def test_a_crashed_request_goes_to_the_front(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(3)))
        await claim(frontier, lease_seconds=5.0)
        harness.advance(5.0 + REAP)
        assert urls(await claim(frontier)) == [page(0)]

    async def test_a_revived_request_goes_to_the_front(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(3)))
        [first] = await claim(frontier)
        await frontier.settle([Dead(first, FAILED)])
        assert await frontier.revive(Selection(job="job")) == 1
        assert urls(await claim(frontier)) == [page(0)]

    async def test_a_large_job_does_not_starve_a_small_one(self, frontier: Backend) -> None:
        await frontier.open_job("large", FAST)
        await frontier.open_job("small", FAST)
        await add_all(frontier, requests(pages(2000), job="large"))
        await serve(frontier, 100)
        await add_all(frontier, requests(pages(10), job="small"))
        served = Counter(request.job for request in await serve(frontier, 24))
        assert served["small"] == 10

    async def test_fair_shares_hold_inside_one_batch_claim(self, frontier: Backend) -> None:
        await frontier.open_job("large", FAST)
        await frontier.open_job("small", FAST)
        await add_all(frontier, requests(pages(500), job="large"))
        await add_all(frontier, requests(pages(10), job="small"))
        served = Counter(lease.request.job for lease in await claim(frontier, 24))
        assert served["small"] == 10

    async def test_a_newcomer_has_no_credit_for_the_time_before_it_came(self, frontier: Backend) -> None:
        await frontier.open_job("old", FAST)
        await frontier.open_job("new", FAST)
        await add_all(frontier, requests(pages(1000), job="old"))
        await serve(frontier, 500, limit=50)
        await add_all(frontier, requests(pages(200), job="new"))
        served = Counter(request.job for request in await serve(frontier, 40))
        assert 16 <= served["old"] <= 24

    async def test_a_line_that_rested_has_no_credit_either(self, frontier: Backend) -> None:
        await frontier.open_job("busy", FAST)
        await frontier.open_job("rested", FAST)
        await add_all(frontier, requests(pages(1), job="rested"))
        await serve(frontier, 1)
        await add_all(frontier, requests(pages(1000), job="busy"))
        await serve(frontier, 500, limit=50)
        await add_all(frontier, requests(pages(200, start=1), job="rested"))
        served = Counter(request.job for request in await serve(frontier, 40))
        assert 16 <= served["busy"] <= 24

    async def test_each_priority_step_doubles_the_share(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(1000), priority=5))
        await add_all(frontier, requests(pages(1000, start=1000), priority=6))
        await add_all(frontier, requests(pages(1000, start=2000), priority=9))
        served = Counter(request.priority for request in await serve(frontier, 380, limit=20))
        # 1 : 2 : 16 of 19 shares.
        assert 16 <= served[5] <= 24
        assert 34 <= served[6] <= 46

    async def test_the_lowest_priority_is_still_served(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(2000), priority=9))
        await add_all(frontier, requests(pages(5, start=2000), priority=1))
        served = Counter(request.priority for request in await serve(frontier, 600, limit=50))
        # 1 : 256, so after at most 257 visits; more than a few would be no priority at all.
        assert 1 <= served[1] <= 4

    async def test_urgent_jobs_of_one_page_come_first(self, frontier: Backend) -> None:
        for priority in (1, 3, 5, 7, 9):
            await frontier.open_job(f"job {priority}", FAST)
            await add_all(frontier, requests(pages(1), job=f"job {priority}", priority=priority))
        assert [request.priority for request in await serve(frontier, 5)] == [9, 7, 5, 3, 1]

    async def test_an_urgent_job_overtakes_earlier_ones(self, frontier: Backend) -> None:
        for number in range(12):
            await frontier.open_job(f"low {number}", FAST)
            await add_all(frontier, requests(pages(2), job=f"low {number}", priority=2))
        await serve(frontier, 5)
        await frontier.open_job("urgent", FAST)
        await add_all(frontier, requests(pages(4), job="urgent", priority=9))
        assert [request.priority for request in await serve(frontier, 5)] == [9, 9, 9, 9, 2]

    async def test_ever_new_urgent_jobs_do_not_starve_an_old_one(self, frontier: Backend) -> None:
        await frontier.open_job("old", FAST)
        await add_all(frontier, requests(pages(100), job="old"))
        served: Counter[str] = Counter()
        for number in range(80):
            await frontier.open_job(f"new {number}", FAST)
            await add_all(frontier, requests(pages(1), job=f"new {number}", priority=9))
            served.update(request.job for request in await serve(frontier, 1))
        # One visit in 17 at first; each visit of the old job adds one more urgent job.
        assert 2 <= served["old"] <= 5

    async def test_ever_new_jobs_take_no_more_than_their_share(self, frontier: Backend) -> None:
        await frontier.open_job("old", FAST)
        await add_all(frontier, requests(pages(100), job="old"))
        served: Counter[str] = Counter()
        for number in range(40):
            await frontier.open_job(f"new {number}", FAST)
            await add_all(frontier, requests(pages(1), job=f"new {number}"))
            served.update(request.job for request in await serve(frontier, 2))
        assert 36 <= served["old"] <= 44

    async def test_lanes_are_served_in_the_order_they_became_ready(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FAST)
        hosts = ["http://c.example", "http://a.example", "http://b.example"]
        for host in hosts:
            await add_all(frontier, requests(pages(1, host=host)))
            harness.advance(1.0)
        assert urls(await claim(frontier, 3)) == [page(0, host=host) for host in hosts]

    async def test_a_busy_host_lets_waiting_hosts_go_first(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(5, host="http://a.example")))
        [lease] = await claim(frontier)
        await frontier.settle([Done(lease)])
        await add_all(frontier, requests(pages(1, host="http://b.example")))
        harness.advance(5.0)
        assert urls(await claim(frontier, 1)) == ["http://b.example/0"]

    async def test_a_priority_step_is_worth_ten_seconds_between_lanes(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(1, host="http://first.example")))
        harness.advance(9.0)
        await add_all(frontier, requests(pages(1, host="http://urgent.example"), priority=6))
        [lease] = await claim(frontier)
        assert lease.lane == "urgent.example"

    async def test_a_priority_step_is_worth_no_more_than_ten_seconds(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(1, host="http://first.example")))
        harness.advance(11.0)
        await add_all(frontier, requests(pages(1, host="http://urgent.example"), priority=6))
        [lease] = await claim(frontier)
        assert lease.lane == "first.example"

    async def test_a_worker_gets_only_the_queues_it_asked_for(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(2), queue="rag"))
        await add_all(frontier, requests(pages(2, start=2), queue="business"))
        assert await claim(frontier, 10, queues=["nothing"]) == []
        assert urls(await claim(frontier, 10, queues=["business"])) == pages(2, start=2)
        assert urls(await claim(frontier, 10)) == pages(2)

    async def test_a_claim_may_ask_for_several_queues(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        for number, queue in enumerate(["rag", "business", "scraping"]):
            await add_all(frontier, requests(pages(1, start=number), queue=queue))
        claimed = await claim(frontier, 10, queues=["rag", "scraping"])
        assert sorted(urls(claimed)) == [page(0), page(2)]

    async def test_a_lane_that_first_woke_for_one_queue_serves_another(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(1), queue="rag"))
        await add_all(frontier, requests(pages(1, start=1), queue="business"))
        assert urls(await claim(frontier, 10, queues=["business"])) == [page(1)]
        harness.advance(1.0)
        # Width 1: the slot must be free before the lane can serve the other queue.
        assert await claim(frontier, 10, queues=["rag"]) == []

    async def test_a_paused_lane_does_not_hold_up_the_others(self, frontier: Backend) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, requests(pages(3)))
        await add_all(frontier, requests(pages(1, host="http://b.example")))
        await frontier.pace("a.example", Pace(paused=True))
        assert urls(await claim(frontier, 10)) == ["http://b.example/0"]

    async def test_a_due_request_joins_its_own_line(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FAST)
        await add_all(frontier, [Request(url=page("late"), job="job", queue="rag", delay=1.0)])
        harness.advance(1.0)
        assert await claim(frontier, 10, queues=["scraping"]) == []
        assert urls(await claim(frontier, 10, queues=["rag"])) == [page("late")]
