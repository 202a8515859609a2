"""Budgets: a job takes no more pages than allowed, and unused pages return to its budget."""

from __future__ import annotations

import pytest

from shoal.frontier.port import Backend
from shoal.model import Added, Dead, Done, Failure, JobSpec, Request, Retry, Selection
from shoal.testing.chapters.chapter import Chapter, add_all, claim, claim_one, page, pages, requests
from shoal.testing.harness import Harness

FAILED = Failure("http_404", "gone")
NEW, KNOWN, REFUSED = Added.NEW, Added.KNOWN, Added.REFUSED


def limited(count: int) -> JobSpec:
    return JobSpec(gap=0.0, width=100, max_pages=count)


class Budgets(Chapter):
    async def test_requests_over_the_budget_are_refused(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(3))
        assert await frontier.add(requests(pages(5))) == [NEW, NEW, NEW, REFUSED, REFUSED]
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.refused, counts.waiting) == (3, 2, 3)

    async def test_a_known_request_is_known_even_over_the_budget(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(2))
        assert await frontier.add(requests([page(0), page(0), page(1), page(2), page(1)])) == [
            NEW,
            KNOWN,
            NEW,
            REFUSED,
            KNOWN,
        ]

    async def test_found_requests_are_counted_too(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(3))
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier), found=requests(pages(6, start=1)))])
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.refused, counts.waiting) == (3, 4, 2)

    async def test_a_finished_visit_is_spent(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(1))
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Done(await claim_one(frontier))])
        assert await frontier.add(requests(pages(1, start=1))) == [REFUSED]

    @pytest.mark.parametrize("end", ["skipped", "dead", "expired"])
    async def test_a_visit_that_brought_nothing_is_refunded(
        self, frontier: Backend, harness: Harness, end: str
    ) -> None:
        await frontier.open_job("job", limited(1))
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        assert await frontier.add(requests(pages(1, start=1))) == [REFUSED]
        if end == "expired":
            harness.advance(6.0)
            assert await claim(frontier, 100) == []
        else:
            lease = await claim_one(frontier)
            await frontier.settle(
                [Done(lease, skipped="robots") if end == "skipped" else Dead(lease, FAILED)]
            )
        # A refused request does not become known: it is accepted now. But only one is.
        assert await frontier.add(requests(pages(2, start=1))) == [NEW, REFUSED]

    async def test_a_redirect_at_the_limit_is_followed(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(1))
        await add_all(frontier, requests(pages(1)))
        target = requests([page("target")])
        await frontier.settle([Done(await claim_one(frontier), found=target, skipped="redirect")])
        assert (await claim_one(frontier)).request.url == page("target")

    async def test_a_retry_costs_nothing(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", limited(2))
        await add_all(frontier, requests(pages(1)))
        for _ in range(3):
            await frontier.settle([Retry(await claim_one(frontier), 1.0, FAILED)])
            harness.advance(1.0)
        assert await frontier.add(requests(pages(2, start=1))) == [NEW, REFUSED]

    async def test_a_revived_request_takes_its_refund_back(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(1))
        await add_all(frontier, requests(pages(1)))
        await frontier.settle([Dead(await claim_one(frontier), FAILED)])
        await frontier.revive(Selection(job="job"))
        assert await frontier.add(requests(pages(1, start=1))) == [REFUSED]

    async def test_a_larger_budget_lets_more_in(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(1))
        assert await frontier.add(requests(pages(2))) == [NEW, REFUSED]
        await frontier.update_job("job", spec=limited(2))
        assert await frontier.add(requests(pages(3))) == [KNOWN, NEW, REFUSED]

    async def test_a_budget_of_nothing_accepts_nothing(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(0))
        assert await frontier.add(requests(pages(1))) == [REFUSED]

    async def test_foreign_hosts_have_a_budget_each(self, frontier: Backend) -> None:
        spec = JobSpec(gap=0.0, width=100, start=(page(0),), max_per_host=2)
        await frontier.open_job("job", spec)
        await add_all(frontier, requests(pages(5)))
        for host in ("http://b.example", "http://c.example"):
            assert await frontier.add(requests(pages(3, host=host))) == [NEW, NEW, REFUSED]
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.refused) == (9, 2)

    async def test_a_foreign_host_gets_its_refund(self, frontier: Backend) -> None:
        host = "http://b.example"
        await frontier.open_job("job", JobSpec(gap=0.0, width=100, start=(page(0),), max_per_host=1))
        assert await frontier.add(requests(pages(2, host=host))) == [NEW, REFUSED]
        await frontier.settle([Dead(await claim_one(frontier), FAILED)])
        assert await frontier.add(requests(pages(2, host=host, start=1))) == [NEW, REFUSED]

    async def test_both_budgets_hold(self, frontier: Backend) -> None:
        spec = JobSpec(gap=0.0, width=100, start=(page(0),), max_per_host=2, max_pages=3)
        await frontier.open_job("job", spec)
        wanted = [*pages(3, host="http://b.example"), *pages(3, host="http://c.example"), page(0)]
        assert await frontier.add(requests(wanted)) == [NEW, NEW, REFUSED, NEW, REFUSED, REFUSED, REFUSED]

    async def test_budgets_are_per_job(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(1))
        await frontier.open_job("free", JobSpec())
        assert await frontier.add(requests(pages(2))) == [NEW, REFUSED]
        await add_all(frontier, requests(pages(9), job="free"))

    async def test_settle_returns_the_refused_urls(self, frontier: Backend) -> None:
        await frontier.open_job("job", limited(3))
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        answer = await frontier.settle([Done(lease, found=requests(pages(5)))])
        assert (list(answer.lost), list(answer.refused)) == ([], [page(3), page(4)])

    async def test_a_verdict_makes_no_room_for_requests_found_by_earlier_verdicts(
        self, frontier: Backend
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=9, start=(page(0),), max_pages=2))
        await add_all(frontier, requests(pages(2)))
        first, second = await claim(frontier, 2)
        found = requests([page("early"), page("late")])
        full = await frontier.settle([Done(first, found=found[:1]), Done(second, skipped="redirect")])
        assert list(full.refused) == [page("early")]
        assert await frontier.add(found[1:]) == [NEW], "there is room for it now"
