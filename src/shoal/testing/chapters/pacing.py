"""Pacing and width: no host gets visits faster, or more of them at once, than its pace allows."""

from __future__ import annotations

from shoal.frontier.port import Backend
from shoal.model import Dead, Done, Failure, JobSpec, Lane, Lease, Pace, Release, Retry
from shoal.testing.chapters.chapter import (
    HOST,
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

LANE = "a.example"
FAILED = Failure("http_503", "busy")


async def lane_of(frontier: Backend, name: str = LANE) -> Lane:
    [lane] = await frontier.lanes(names=[name])
    return lane


async def burst(frontier: Backend) -> list[Lease]:
    """Claim everything that is claimable at this moment, in however many claims."""
    got: list[Lease] = []
    while leases := await claim(frontier, 100):
        got += leases
    return got


class Pacing(Chapter):
    async def test_the_gap_lies_between_two_visits(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=2.0, width=5))
        await add_all(frontier, requests(pages(3)))
        await claim_one(frontier)
        harness.advance(1.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)
        assert await claim(frontier, 100) == []

    async def test_the_gap_counts_from_claim_to_claim_whatever_the_verdict(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=4.0))
        await add_all(frontier, requests(pages(6)))
        for end in (Done, lambda x: Retry(x, 0.0, FAILED), lambda x: Dead(x, FAILED), Release):
            lease = await claim_one(frontier)
            await frontier.settle([end(lease)])
            harness.advance(3.75)
            assert await claim(frontier, 100) == []
            harness.advance(0.25)
        await claim_one(frontier)

    async def test_a_rest_earns_nothing_without_burst(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0, width=10))
        await add_all(frontier, requests(pages(10)))
        harness.advance(100.0)
        assert len(await burst(frontier)) == 1

    async def test_a_burst_comes_at_once_and_then_the_gap_holds(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0, width=20))
        await frontier.pace(LANE, Pace(burst=2))
        await add_all(frontier, requests(pages(20)))
        harness.advance(100.0)
        assert len(await burst(frontier)) == 3
        harness.advance(0.75)
        assert await burst(frontier) == []
        harness.advance(0.25)
        assert len(await burst(frontier)) == 1
        harness.advance(2.0)
        assert len(await burst(frontier)) == 2

    async def test_without_a_gap_one_claim_fills_the_width(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=4))
        await add_all(frontier, requests(pages(10)))
        leases = await claim(frontier, 100)
        assert len(leases) == 4
        assert await claim(frontier, 100) == []
        await frontier.settle([Done(lease) for lease in leases[:3]])
        assert len(await claim(frontier, 100)) == 3

    async def test_width_holds_although_the_gap_has_passed(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0, width=2))
        await add_all(frontier, requests(pages(5)))
        taken = []
        for _ in range(2):
            taken.append(await claim_one(frontier, lease_seconds=600.0))
            harness.advance(1.0)
        harness.advance(50.0)
        assert await claim(frontier, 100) == []
        await frontier.settle([Done(taken[0])])
        await claim_one(frontier)

    async def test_every_verdict_frees_the_slot(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(6)))
        for end in (Done, lambda x: Retry(x, 99.0, FAILED), lambda x: Dead(x, FAILED), Release):
            await frontier.settle([end(await claim_one(frontier))])
            assert (await lane_of(frontier)).busy == 0
        await claim_one(frontier, lease_seconds=5.0)
        harness.advance(5.0 + REAP)
        await claim_one(frontier)

    async def test_lanes_do_not_wait_for_one_another(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=5.0))
        for host in ("http://a.example", "http://b.example", "http://c.example"):
            await add_all(frontier, requests(pages(2, host=host)))
        assert {lease.lane for lease in await claim(frontier, 100)} == {
            "a.example",
            "b.example",
            "c.example",
        }

    async def test_two_handles_share_one_pace(self, frontier: Backend, harness: Harness) -> None:
        other = await harness.open()
        await frontier.open_job("job", JobSpec(gap=2.0, width=5))
        await add_all(frontier, requests(pages(5)))
        await claim_one(frontier)
        assert await claim(other, 100) == []
        harness.advance(2.0)
        await claim_one(other)
        assert await claim(frontier, 100) == []

    async def test_two_handles_share_one_width(self, frontier: Backend, harness: Harness) -> None:
        other = await harness.open()
        await frontier.open_job("job", JobSpec(gap=0.0, width=3))
        await add_all(frontier, requests(pages(5)))
        mine, theirs = await claim(frontier, 2), await claim(other, 100)
        assert (len(mine), len(theirs)) == (2, 1)
        await other.settle([Done(mine[0])])
        await claim_one(frontier)

    async def test_the_slower_of_two_jobs_decides(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("slow", JobSpec(gap=5.0, width=1))
        await frontier.open_job("fast", JobSpec(gap=0.0, width=10))
        await add_all(frontier, requests(pages(3), job="slow"))
        await add_all(frontier, requests(pages(3), job="fast"))
        await frontier.settle([Done(await claim_one(frontier))])
        harness.advance(4.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)

    async def test_the_slower_job_decides_whichever_came_first(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("slow", JobSpec(gap=5.0, width=1))
        await frontier.open_job("fast", JobSpec(gap=0.0, width=10))
        await add_all(frontier, requests(pages(3), job="fast"))
        await add_all(frontier, requests(pages(3), job="slow"))
        lease = await claim_one(frontier)
        await frontier.settle([Done(lease)])
        harness.advance(4.75)
        assert await claim(frontier, 100) == []

    async def test_an_idle_lane_takes_the_pace_of_the_next_job(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("slow", JobSpec(gap=5.0, width=1))
        await frontier.open_job("fast", JobSpec(gap=0.0, width=10))
        await add_all(frontier, requests(pages(1), job="slow"))
        await frontier.settle([Done(await claim_one(frontier))])
        harness.advance(5.0)
        await add_all(frontier, requests(pages(4), job="fast"))
        assert len(await claim(frontier, 100)) == 4

    async def test_a_lane_with_a_visit_in_flight_is_not_idle(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("slow", JobSpec(gap=5.0, width=1))
        await frontier.open_job("fast", JobSpec(gap=0.0, width=10))
        await add_all(frontier, requests(pages(1), job="slow"))
        await claim_one(frontier)
        await add_all(frontier, requests(pages(4), job="fast"))
        harness.advance(5.0)
        assert await claim(frontier, 100) == []

    async def test_a_pinned_pace_is_not_changed_by_jobs(self, frontier: Backend, harness: Harness) -> None:
        await frontier.pace(LANE, Pace(gap=3.0, width=2, pinned=True))
        await frontier.open_job("slow", JobSpec(gap=50.0, width=1))
        await frontier.open_job("fast", JobSpec(gap=0.0, width=10))
        await add_all(frontier, requests(pages(5), job="slow"))
        await add_all(frontier, requests(pages(5), job="fast"))
        assert len(await burst(frontier)) == 1
        harness.advance(3.0)
        assert len(await burst(frontier)) == 1
        harness.advance(3.0)
        assert await burst(frontier) == []
        lane = await lane_of(frontier)
        assert (lane.width, lane.busy, lane.pinned) == (2, 2, True)

    async def test_a_floor_lengthens_the_gap(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0, width=5))
        await frontier.pace(LANE, Pace(floor=6.0))
        await add_all(frontier, requests(pages(3)))
        await claim_one(frontier)
        harness.advance(5.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)

    async def test_a_floor_below_the_gap_changes_nothing(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=3.0, width=5))
        await frontier.pace(LANE, Pace(floor=1.0))
        await add_all(frontier, requests(pages(3)))
        await claim_one(frontier)
        harness.advance(2.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)

    async def test_only_a_pinned_pace_overrides_the_floor(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0, width=5))
        await frontier.pace(LANE, Pace(gap=2.0, width=5, pinned=True))
        await frontier.pace(LANE, Pace(floor=60.0))
        await add_all(frontier, requests(pages(3)))
        await claim_one(frontier)
        harness.advance(2.0)
        await claim_one(frontier)

    async def test_a_floor_holds_for_a_job_that_comes_later(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.pace(LANE, Pace(floor=6.0))
        await frontier.open_job("fast", JobSpec(gap=0.0, width=10))
        await add_all(frontier, requests(pages(3), job="fast"))
        assert len(await burst(frontier)) == 1
        harness.advance(5.75)
        assert await burst(frontier) == []

    async def test_a_blocked_lane_rests(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(3)))
        await frontier.pace(LANE, Pace(blocked=30.0))
        assert (await lane_of(frontier)).blocked_until == harness.now() + 30.0
        harness.advance(29.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)

    async def test_a_shorter_block_does_not_shorten_a_longer_one(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(3)))
        await frontier.pace(LANE, Pace(blocked=30.0))
        await frontier.pace(LANE, Pace(blocked=5.0))
        harness.advance(29.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)

    async def test_a_block_of_zero_unblocks(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(3)))
        await frontier.pace(LANE, Pace(blocked=30.0))
        assert await claim(frontier, 100) == []
        await frontier.pace(LANE, Pace(blocked=0.0))
        await claim_one(frontier)

    async def test_a_block_can_come_before_the_first_request(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.pace(LANE, Pace(blocked=30.0))
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(3)))
        assert await claim(frontier, 100) == []
        harness.advance(30.0)
        await claim_one(frontier)

    async def test_a_paused_lane_is_held_until_resumed(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0))
        await add_all(frontier, requests(pages(3)))
        await frontier.pace(LANE, Pace(paused=True))
        harness.advance(10_000.0)
        assert await claim(frontier, 100) == []
        await frontier.pace(LANE, Pace(paused=False))
        await claim_one(frontier)

    async def test_a_visit_in_flight_ends_normally_on_a_paused_lane(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0))
        await add_all(frontier, requests(pages(2)))
        lease = await claim_one(frontier)
        await frontier.pace(LANE, Pace(paused=True))
        assert (await frontier.settle([Done(lease)])).lost == []
        assert await claim(frontier, 100) == []

    async def test_a_wider_lane_takes_more_at_once(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await add_all(frontier, requests(pages(5)))
        await claim_one(frontier)
        await frontier.pace(LANE, Pace(width=3))
        assert urls(await claim(frontier, 100)) == [page(1), page(2)]

    async def test_a_narrower_lane_waits_until_enough_have_left(self, frontier: Backend) -> None:
        await frontier.open_job("job", JobSpec(gap=0.0, width=3))
        await add_all(frontier, requests(pages(6)))
        leases = await claim(frontier, 100)
        await frontier.pace(LANE, Pace(width=1))
        await frontier.settle([Done(lease) for lease in leases[:2]])
        assert await claim(frontier, 100) == []
        await frontier.settle([Done(leases[2])])
        await claim_one(frontier)

    async def test_a_new_gap_holds_from_the_next_visit_on(self, frontier: Backend, harness: Harness) -> None:
        await frontier.open_job("job", JobSpec(gap=1.0, width=5))
        await add_all(frontier, requests(pages(4)))
        await frontier.pace(LANE, Pace(gap=8.0))
        await claim_one(frontier)
        harness.advance(7.75)
        assert await claim(frontier, 100) == []
        harness.advance(0.25)
        await claim_one(frontier)

    async def test_none_leaves_a_value_as_it_is(self, frontier: Backend) -> None:
        await frontier.pace(LANE, Pace(gap=4.0, width=3, burst=2, pinned=True))
        await frontier.pace(LANE, Pace())
        lane = await lane_of(frontier)
        assert (lane.gap, lane.width, lane.burst, lane.pinned) == (4.0, 3, 2, True)

    async def test_the_pace_of_a_host_survives_an_idle_time(
        self, frontier: Backend, harness: Harness
    ) -> None:
        await frontier.open_job("job", JobSpec(gap=10.0))
        await add_all(frontier, requests(pages(1, host=HOST)))
        await frontier.settle([Done(await claim_one(frontier))])
        harness.advance(1.0)
        await add_all(frontier, requests(pages(1, start=1)))
        assert await claim(frontier, 100) == []
        harness.advance(9.0)
        await claim_one(frontier)
