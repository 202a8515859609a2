"""Leases and fencing: workers that are slow, die, or come back too late."""

from __future__ import annotations

import pytest

from shoal.frontier.notes import lease_counts
from shoal.frontier.port import Backend
from shoal.model import (
    CRASH_LIMIT,
    TRANSIT,
    Dead,
    Done,
    Failure,
    JobSpec,
    JobState,
    Lease,
    LeaseRow,
    Release,
    Request,
    Retry,
    Selection,
    Verdict,
)
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


class Leases(Chapter):
    async def test_a_lease_has_its_end(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        answer = await frontier.claim(1, worker="w", lease_seconds=30.0)
        assert answer.now == harness.now()
        assert answer.leases[0].expires_at == answer.now + 30.0

    async def test_tokens_grow(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(5)))
        tokens = []
        for _ in range(4):
            leases = await claim(frontier, 2)
            tokens += [lease.token for lease in leases]
            await frontier.settle([Release(lease) for lease in leases])
            harness.advance(1.0)
        assert tokens == sorted(set(tokens))

    async def test_tokens_grow_across_handles(self, frontier: Backend, harness: Harness) -> None:
        other = await harness.open()
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(6)))
        tokens = []
        for handle in (frontier, other, frontier, other):
            tokens += [lease.token for lease in await claim(handle, 1)]
        assert tokens == sorted(set(tokens))

    async def test_a_leased_request_is_given_to_no_other_worker(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        await claim_one(frontier, lease_seconds=60.0)
        harness.advance(59.0)
        assert await claim(frontier, 100) == []

    async def test_an_abandoned_request_is_offered_again(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        first = await claim_one(frontier, lease_seconds=60.0)
        harness.advance(60.0 + REAP)
        second = await claim_one(frontier)
        assert second.request.url == first.request.url
        assert second.token > first.token
        assert second.request.attempt == 0, "a crash is not a failed visit"

    async def test_a_late_verdict_changes_nothing(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        late = await claim_one(frontier, lease_seconds=10.0)
        harness.advance(10.0 + REAP)
        current = await claim_one(frontier)
        found = requests(pages(1, start=7))
        verdicts: list[Verdict] = [
            Done(late, items=[b"1"], found=found),
            Retry(late, 0.0, FAILED),
            Dead(late, FAILED),
            Release(late),
        ]
        for number, verdict in enumerate(verdicts, 1):
            assert (await frontier.settle([verdict])).lost == [late]
            job = await frontier.job("job")
            assert job.counts.stale == number
            assert (job.counts.leased, job.counts.added, job.counts.items) == (1, 1, 0)
            assert job.errors == {}
        assert (await frontier.settle([Done(current, items=[b"2"])])).lost == []
        assert [item.body for item in await frontier.items("job")] == [b"2"]

    async def test_a_verdict_after_the_lease_was_taken_back_is_late_too(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        late = await claim_one(frontier, lease_seconds=10.0)
        await frontier.update_job("job", state=JobState.PAUSED)
        harness.advance(10.0 + REAP)
        assert await claim(frontier, 100) == []
        assert (await frontier.settle([Done(late, items=[b"1"])])).lost == [late]
        counts = (await frontier.job("job")).counts
        assert (counts.waiting, counts.items, counts.stale) == (1, 0, 1)

    async def test_a_late_verdict_does_not_free_another_workers_slot(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(2)))
        late = await claim_one(frontier, lease_seconds=10.0)
        harness.advance(10.0 + REAP)
        await claim_one(frontier)
        await frontier.settle([Done(late)])
        assert await claim(frontier, 100) == []

    async def test_a_made_up_token_is_stale(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        forged = Lease(lease.token + 1000, lease.request, lease.lane, lease.expires_at)
        assert (await frontier.settle([Done(forged)])).lost == [forged]
        assert await frontier.extend([forged], 5.0) == [forged]
        assert (await frontier.settle([Done(lease)])).lost == []

    async def test_settling_twice_counts_once(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        assert (await frontier.settle([Done(lease, items=[b"1"])])).lost == []
        assert (await frontier.settle([Done(lease, items=[b"1"])])).lost == [lease]
        counts = (await frontier.job("job")).counts
        assert (counts.done, counts.items, counts.stale) == (1, 1, 1)

    async def test_the_first_of_two_verdicts_in_one_batch_wins(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        lost = (await frontier.settle([Done(lease, items=[b"1"]), Dead(lease, FAILED)])).lost
        assert lost == [lease]
        job = await frontier.job("job")
        assert (job.counts.done, job.counts.dead, job.counts.stale) == (1, 0, 1)
        assert job.errors == {}

    async def test_a_stale_verdict_does_not_spoil_its_batch(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        late = await claim_one(frontier, lease_seconds=5.0)
        harness.advance(5.0 + REAP)
        await add_all(frontier, requests(pages(1, start=1)))
        good = await claim(frontier, 100)
        assert (await frontier.settle([Done(late), *(Done(lease) for lease in good)])).lost == [late]
        assert (await frontier.job("job")).counts.done == 2

    async def test_an_extended_lease_lives_longer(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier, lease_seconds=10.0)
        for _ in range(5):
            harness.advance(8.0)
            assert await frontier.extend([lease], 10.0) == []
            assert await claim(frontier, 100) == []
        assert (await frontier.settle([Done(lease)])).lost == []

    async def test_an_extension_counts_from_now(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier, lease_seconds=60.0)
        await frontier.extend([lease], 5.0)
        harness.advance(5.0 + REAP)
        assert urls(await claim(frontier, 100)) == [page(0)]

    async def test_a_late_extension_returns_the_lease_as_lost(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        late = await claim_one(frontier, lease_seconds=10.0)
        harness.advance(10.0 + REAP)
        current = await claim_one(frontier, lease_seconds=10.0)
        assert await frontier.extend([late, current], 500.0) == [late]
        harness.advance(100.0)
        assert await claim(frontier, 100) == []
        assert (await frontier.settle([Done(current)])).lost == []

    async def test_a_settled_lease_cannot_be_extended(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        lease = await claim_one(frontier)
        await frontier.settle([Done(lease)])
        assert await frontier.extend([lease], 60.0) == [lease]

    async def test_a_request_that_kills_workers_ends_dead(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        for _ in range(CRASH_LIMIT):
            await claim_one(frontier, lease_seconds=5.0)
            harness.advance(5.0 + REAP)
        assert await claim(frontier, 100) == []
        job = await frontier.job("job")
        assert (job.counts.dead, job.counts.live, job.counts.retried) == (1, 0, 0)
        assert job.errors == {"worker_crashed": 1}
        [letter] = await frontier.dead(Selection(job="job"))
        assert (letter.failure.error, letter.request.url) == ("worker_crashed", page(0))

    async def test_several_abandoned_leases_come_back_in_one_claim(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(20)))
        assert len(await claim(frontier, 20, lease_seconds=5.0)) == 20
        harness.advance(5.0 + REAP)
        assert sorted(urls(await claim(frontier, 20))) == sorted(pages(20))

    async def test_failed_visits_are_counted_in_the_request(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        for attempt in range(4):
            lease = await claim_one(frontier)
            assert lease.request.attempt == attempt
            await frontier.settle([Retry(lease, 0.0, FAILED)])
            harness.advance(0.25)

    async def test_a_release_is_not_a_failed_visit(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        for _ in range(CRASH_LIMIT + 2):
            lease = await claim_one(frontier)
            assert lease.request.attempt == 0
            await frontier.settle([Release(lease)])
        job = await frontier.job("job")
        assert (job.counts.waiting, job.counts.retried, job.errors) == (1, 0, {})

    async def test_an_abandoned_request_does_not_expire(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        await claim_one(frontier, lease_seconds=10.0)
        harness.advance(10.0 + REAP)
        await claim_one(frontier)

    async def test_a_released_request_expires_in_time(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        begin = harness.now()
        await add_all(frontier, [Request(url=page(n), job="job", ttl=5.0) for n in range(3)])
        harness.advance(2.0)
        for _ in range(2):
            leases = await claim(frontier, 9)
            assert [lease.request_expires_at for lease in leases] == [pytest.approx(begin + 5.0)] * 3
            await frontier.settle([Release(lease) for lease in leases])
        assert (await frontier.claim(0, worker="w", lease_seconds=1.0)).wake_at is not None
        harness.advance(2.75)
        [one] = await claim(frontier, 1)
        harness.advance(0.5)
        assert await claim(frontier, 9) == []
        assert (await frontier.job("job")).counts.expired == 2
        # Released too late, it ends with the next claim.
        await frontier.settle([Release(one)])
        assert await claim(frontier, 9) == []
        assert (await frontier.job("job")).counts.expired == 3
        assert await frontier.revive(Selection()) == 3
        await frontier.settle([Release(lease) for lease in await claim(frontier, 9)])
        assert len(await claim(frontier, 9)) == 3
        assert await frontier.check() == []

    async def test_a_ttl_ends_with_the_first_failed_visit(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        await frontier.settle([Retry(await claim_one(frontier), 0.0, FAILED)])
        harness.advance(0.25)
        again = await claim_one(frontier)
        assert again.request_expires_at is None
        await frontier.settle([Release(again)])
        harness.advance(6.0)
        await claim_one(frontier)

    async def test_a_request_that_comes_back_from_transit_expires_in_time(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(url=page(0), job="job", ttl=5.0)])
        assert len((await frontier.claim(1, worker=f"{TRANSIT}pump", lease_seconds=60.0)).leases) == 1
        assert await frontier.evict([f"{TRANSIT}pump"]) == 1
        harness.advance(6.0)
        assert await claim(frontier) == []
        assert (await frontier.job("job")).counts.expired == 1

    async def test_leases_are_listed_newest_first(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await frontier.open_job("other", FREE)
        await add_all(frontier, requests(pages(3)))
        assert await frontier.leases() == []
        first, second = await claim(frontier, 2)
        [third] = await claim(frontier, 1, worker="v")
        await add_all(frontier, [Request("http://b.example/", "other", queue="rag")])
        [fourth] = await claim(frontier, 1, worker="v")
        rows = [
            LeaseRow("v", "rag", fourth.request.url, "other", "b.example"),
            LeaseRow("v", "scraping", third.request.url, "job", "a.example"),
            LeaseRow("w", "scraping", second.request.url, "job", "a.example"),
            LeaseRow("w", "scraping", first.request.url, "job", "a.example"),
        ]
        assert await frontier.leases() == rows
        assert await frontier.leases(limit=2) == rows[:2]
        assert await frontier.leases(limit=9) == rows
        assert await frontier.leases(limit=0) == []
        assert await frontier.leases(job="job") == rows[1:]
        assert await frontier.leases(job="job", limit=1) == rows[1:2]
        assert await frontier.leases(lane="b.example") == rows[:1]
        assert await frontier.leases(job="job", lane="b.example") == []
        assert await frontier.leases(job="nobody") == []
        assert await frontier.leases(lane="never.example") == []
        assert lease_counts(await frontier.leases()) == {"w": 2, "v": 2}
        await frontier.settle([Done(first), Release(third)])
        assert await frontier.leases(job="job") == rows[2:3]

    async def test_the_newest_of_many_leases_are_listed(self, frontier: Backend) -> None:
        """With many leases, some frontiers read them in another way."""
        await frontier.open_job("many", JobSpec(gap=0.0, width=2000))
        await frontier.open_job("few", FREE)
        await add_all(frontier, [Request("http://b.example/", "few")])
        await claim(frontier, 1)
        await add_all(frontier, requests(pages(1100), job="many"))
        leases = await claim(frontier, 1100)
        newest = urls(leases)[::-1]
        assert [row.url for row in await frontier.leases(limit=3)] == newest[:3]
        await frontier.settle([Done(lease) for lease in leases[-20:]])
        assert [row.url for row in await frontier.leases(limit=3)] == newest[20:23]
        assert [row.job for row in await frontier.leases(job="few", limit=1)] == ["few"]
        assert len(await frontier.leases(job="many", limit=5000)) == 1080

    async def test_a_dead_worker_is_evicted_at_once(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(3)))
        lost = (await frontier.claim(2, worker="dead", lease_seconds=3600.0)).leases
        kept = (await frontier.claim(1, worker="alive", lease_seconds=3600.0)).leases
        assert lease_counts(await frontier.leases()) == {"dead": 2, "alive": 1}
        assert lease_counts(await frontier.leases(job="job")) == {"dead": 2, "alive": 1}
        assert await frontier.evict(["dead", "nobody"]) == 2
        assert lease_counts(await frontier.leases()) == {"alive": 1}
        answer = await frontier.settle([Done(lease) for lease in (*lost, *kept)])
        assert list(answer.lost) == list(lost)
        assert len(await claim(frontier, 10)) == 2

    async def test_a_request_that_is_evicted_again_and_again_ends_dead(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(1)))
        for _ in range(CRASH_LIMIT):
            assert len((await frontier.claim(1, worker="dead", lease_seconds=60.0)).leases) == 1
            assert await frontier.evict(["dead"]) == 1
        job = await frontier.job("job")
        assert (job.counts.dead, job.errors) == (1, {"worker_crashed": 1})

    async def test_requests_that_several_workers_died_over_come_back_one_by_one(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, requests(pages(3)))
        for _ in range(2):
            assert len(await claim(frontier, 10, lease_seconds=5.0)) == 3
            harness.advance(5.0 + REAP)
        # Two workers died over these three: they come back one at a time, to find out which one kills.
        together = []
        for _ in range(20):
            leases = await claim(frontier, 10)
            await frontier.settle([Done(lease) for lease in leases])
            together.append(len(leases))
            harness.advance(1.0)
        assert (sum(together), max(together)) == (3, 1)
