"""Transit: leases that one worker claims and another takes, with a message in between."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.frontier.notes import lease_counts
from shoal.frontier.port import Backend
from shoal.model import (
    CRASH_LIMIT,
    EXPIRED,
    TRANSIT,
    Dead,
    Done,
    Failure,
    JobSpec,
    JobState,
    Lease,
    Release,
    Request,
    Selection,
)
from shoal.testing.chapters.chapter import REAP, Chapter, add_all, claim, page, pages, requests, urls
from shoal.testing.harness import Harness

FREE = JobSpec(gap=0.0, width=100)
PUMP = f"{TRANSIT}pump"


async def sent(frontier: Backend, count: int, *, lease_seconds: float = 3600.0) -> list[Lease]:
    """Let a pump claim `count` requests of a new job."""
    await frontier.open_job("job", FREE)
    await add_all(frontier, requests(pages(count)))
    return await claim(frontier, count, worker=PUMP, lease_seconds=lease_seconds)


class Transit(Chapter):
    async def test_leases_in_transit_can_be_taken(self, frontier: Backend, harness: Harness) -> None:
        leases = await sent(frontier, 3)
        harness.advance(30.0)
        taken = await frontier.take(leases[:2], worker="w", lease_seconds=10.0)
        assert urls(taken.leases) == urls(leases[:2])
        assert [lease.token for lease in taken.leases] == [lease.token for lease in leases[:2]]
        assert taken.now == pytest.approx(harness.now(), abs=0.001)
        assert [lease.expires_at for lease in taken.leases] == pytest.approx(
            [harness.now() + 10.0] * 2, abs=0.001
        )
        assert lease_counts(await frontier.leases()) == {PUMP: 1, "w": 2}
        visited = [row.url for row in await frontier.leases(job="job") if not row.in_transit]
        assert visited == urls(taken.leases)[::-1], "not those that are still in transit"
        assert (await frontier.settle([Done(lease) for lease in taken.leases])).lost == []

    async def test_a_lease_has_the_deadline_of_its_request(self, frontier: Backend) -> None:
        """Its message must not wait longer. A dead letter has no deadline: once revived, it may wait."""
        await frontier.open_job("job", FREE)
        plain, short = Request(page(0), "job"), Request(page(1), "job", ttl=7.5)
        rich = Request(page(2), "job", ttl=60.0, label="book", data={"n": 1})
        await add_all(frontier, [plain, short, rich])
        leases = {lease.request.url: lease for lease in await claim(frontier, 3, worker=PUMP)}
        assert [leases[page(n)].request.ttl for n in range(3)] == [None, 7.5, 60.0]
        assert leases[page(2)].request == rich
        await frontier.settle([Dead(lease, Failure("http_404")) for lease in leases.values()])
        letters = await frontier.dead(Selection())
        assert [letter.request.ttl for letter in letters] == [None] * 3

    async def test_a_message_delivered_twice_is_taken_once(self, frontier: Backend) -> None:
        leases = await sent(frontier, 2)
        assert len((await frontier.take(leases, worker="one", lease_seconds=10.0)).leases) == 2
        assert (await frontier.take(leases, worker="two", lease_seconds=10.0)).leases in ([], ())
        again = await frontier.take(leases, worker="one", lease_seconds=10.0)
        assert len(again.leases) == 2, "the holder may take again: the reply may have been lost"

    async def test_settled_and_unknown_leases_cannot_be_taken(self, frontier: Backend) -> None:
        first, second = await sent(frontier, 2)
        await frontier.settle([Done(first)])
        unknown = Lease(first.token + 10**6, second.request, second.lane, second.expires_at)
        assert (await frontier.take([first, unknown], worker="w", lease_seconds=10.0)).leases in ([], ())

    async def test_leases_of_a_host_show_their_queues(self, frontier: Backend) -> None:
        await frontier.open_job("job", FREE)
        await frontier.open_job("apart", JobSpec(gap=0.0, width=100, dedicated=True))
        for job in ("job", "apart"):
            await add_all(frontier, [Request(page(1), job, queue="slow"), Request(page(2), job)])
        await add_all(frontier, [Request(page(3), "job"), Request("http://b.example/", "job")])
        leases = await claim(frontier, 9, worker=PUMP)
        assert len(leases) == 6
        [third] = [lease for lease in leases if lease.request.url == page(3)]
        await frontier.take([third], worker="w", lease_seconds=10.0)

        async def travelling(lane: str) -> Counter[str]:
            return Counter(row.queue for row in await frontier.leases(lane=lane) if row.in_transit)

        assert await travelling("a.example") == {"slow": 2, "scraping": 2}
        assert await travelling("b.example") == {"scraping": 1}
        assert await frontier.leases(lane="never.example") == []

    async def test_leases_of_a_cancelled_job_cannot_be_taken(self, frontier: Backend) -> None:
        leases = await sent(frontier, 2)
        await frontier.update_job("job", state=JobState.CANCELLED)
        assert (await frontier.take(leases, worker="w", lease_seconds=10.0)).leases in ([], ())

    async def test_leases_in_transit_end_with_their_cancelled_job(self, frontier: Backend) -> None:
        """No worker will visit it, so it must not occupy its host until its lease ends."""
        await frontier.open_job("job", JobSpec(gap=0.0, width=3))
        await frontier.open_job("other", FREE)
        await add_all(frontier, requests(pages(3)))
        first, *travelling = await claim(frontier, 3, worker=PUMP, lease_seconds=3600.0)
        await add_all(frontier, [Request(page(9), "other")])
        [held] = (await frontier.take([first], worker="w", lease_seconds=3600.0)).leases
        assert await claim(frontier, 9) == [], "the host has no room left"
        await frontier.update_job("job", state=JobState.CANCELLED)
        assert lease_counts(await frontier.leases()) == {"w": 1}
        counts = (await frontier.job("job")).counts
        assert (counts.leased, counts.waiting, counts.cancelled) == (1, 0, 2)
        assert urls(await claim(frontier, 9)) == [page(9)]
        answer = await frontier.settle([Done(held), *map(Release, travelling)])
        assert [lease.token for lease in answer.lost] == [lease.token for lease in travelling]
        counts = (await frontier.job("job")).counts
        assert (counts.leased, counts.cancelled) == (0, 3)
        assert await frontier.check() == []

    async def test_leases_of_a_paused_job_cannot_be_taken_and_wait_again(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=2))
        await add_all(frontier, [Request(page(n), "job", ttl=50.0) for n in range(2)])
        leases = await claim(frontier, 2, worker=PUMP, lease_seconds=3600.0)
        for _ in range(CRASH_LIMIT):
            await frontier.update_job("job", state=JobState.PAUSED)
            assert (await frontier.take(leases * 2, worker="w", lease_seconds=10.0)).leases in ([], ())
            counts = (await frontier.job("job")).counts
            assert (counts.waiting, counts.leased, lease_counts(await frontier.leases())) == (2, 0, {})
            await frontier.update_job("job", state=JobState.RUNNING)
            leases = await claim(frontier, 9, worker=PUMP, lease_seconds=3600.0)
            assert sorted(urls(leases)) == pages(2), "all at once: none of them is a suspect"
        await frontier.open_job("other", FREE)
        await add_all(frontier, [Request(page(9), "other")])
        assert await claim(frontier, 9) == [], "the host has no room left"
        await frontier.update_job("job", state=JobState.PAUSED)
        await frontier.take(leases, worker="w", lease_seconds=10.0)
        assert urls(await claim(frontier, 9)) == [page(9)], "its host is free for others"
        harness.advance(50.0)
        assert await claim(frontier, 9) == []
        assert (await frontier.job("job")).counts.expired == 2, "its ttl continued"
        assert await frontier.check() == []

    async def test_a_lease_that_was_taken_before_the_pause_is_kept(self, frontier: Backend) -> None:
        leases = await sent(frontier, 2)
        await frontier.take(leases[:1], worker="w", lease_seconds=10.0)
        await frontier.update_job("job", state=JobState.PAUSED)
        assert len((await frontier.take(leases[:1], worker="w", lease_seconds=10.0)).leases) == 1
        ended = await frontier.take(leases[1:], worker=f"{PUMP}:expired", lease_seconds=10.0)
        assert len(ended.leases) == 1, "a taker in transit may end it"
        assert await frontier.check() == []

    async def test_a_lost_message_does_not_count_as_a_crash(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await sent(frontier, 3, lease_seconds=10.0)
        for _ in range(CRASH_LIMIT + 1):
            harness.advance(10.0 + REAP)
            again = await claim(frontier, 9, worker=PUMP, lease_seconds=10.0)
            assert sorted(urls(again)) == pages(3), "all at once: none of them is a suspect"
        assert (await frontier.job("job")).counts.dead == 0

    async def test_leases_of_a_lost_message_can_be_taken_back_early(self, frontier: Backend) -> None:
        leases = await sent(frontier, 2)
        assert await frontier.evict([PUMP]) == 2
        assert (await frontier.take(leases, worker="w", lease_seconds=10.0)).leases in ([], ())
        assert len(await claim(frontier, 9)) == 2

    async def test_a_taker_that_dies_counts_as_a_crash(self, frontier: Backend, harness: Harness) -> None:
        for _ in range(CRASH_LIMIT):
            leases = await claim(frontier, 9, worker=PUMP) or await sent(frontier, 1)
            await frontier.take(leases, worker="w", lease_seconds=5.0)
            harness.advance(5.0 + REAP)
        await claim(frontier, 9)
        assert [letter.failure.error for letter in await frontier.dead(Selection())] == ["worker_crashed"]

    async def test_a_request_that_is_lost_in_transit_expires_in_time(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", FREE)
        await add_all(frontier, [Request(page(n), "job", ttl=20.0) for n in range(2)])
        assert len(await claim(frontier, 9, worker=PUMP, lease_seconds=5.0)) == 2
        harness.advance(5.0 + REAP)
        assert len(await claim(frontier, 1, worker=PUMP)) == 1
        assert await frontier.evict([PUMP]) == 1
        assert (await frontier.job("job")).counts.waiting == 2
        harness.advance(20.0)
        assert await claim(frontier, 9) == []
        assert (await frontier.job("job")).counts.expired == 2

    async def test_take_sets_the_end_of_the_lease(self, frontier: Backend, harness: Harness) -> None:
        [lease] = await sent(frontier, 1, lease_seconds=5.0)
        [taken] = (await frontier.take([lease], worker="w", lease_seconds=60.0)).leases
        harness.advance(30.0)
        assert await claim(frontier, 9) == []
        assert await frontier.extend([taken], 60.0) == []
        harness.advance(50.0)
        assert await claim(frontier, 9) == []
        assert (await frontier.settle([Release(taken)])).lost == []
        assert urls(await claim(frontier, 9)) == [page(0)]

    async def test_a_request_that_expired_in_transit_ends_as_expired(self, frontier: Backend) -> None:
        [lease] = await sent(frontier, 1)
        await frontier.settle([Dead(lease, Failure(EXPIRED, "waited in url_queue_ttl for 3600 s"))])
        job = await frontier.job("job")
        assert (job.counts.expired, job.counts.dead, job.errors) == (1, 0, {EXPIRED: 1})
        [letter] = await frontier.dead(Selection(job="job"))
        assert (letter.state, letter.failure.error, letter.request.attempt) == ("expired", EXPIRED, 0)
        assert letter.failure.message == "waited in url_queue_ttl for 3600 s"
        assert await frontier.revive(Selection(job="job")) == 1
        assert len(await claim(frontier, 9)) == 1

    async def test_a_claim_with_limit_zero_says_when_to_come(
        self, frontier: Backend, harness: Harness
    ) -> None:
        empty = await frontier.claim(0, worker="w", lease_seconds=10.0)
        assert empty.drained
        [lease] = await sent(frontier, 1, lease_seconds=10.0)
        nothing = await frontier.claim(0, worker="w", lease_seconds=10.0)
        assert (list(nothing.leases), nothing.drained) == ([], False)
        await frontier.settle([Release(lease)])
        waiting = await frontier.claim(0, worker="w", lease_seconds=10.0)
        assert (list(waiting.leases), waiting.drained) == ([], False)
        [lease] = await claim(frontier, 1)
        await frontier.settle([Done(lease)])
        assert (await frontier.claim(0, worker="w", lease_seconds=10.0)).drained
