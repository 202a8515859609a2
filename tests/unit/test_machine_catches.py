"""The test of the tests: frontiers with one deliberate bug each, and somebody must notice.

A suite that passes says nothing unless it also fails. Each broken frontier is a way in which
real queues have been broken.
"""

from __future__ import annotations

import asyncio
import unittest
from collections.abc import Awaitable, Callable, Collection, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings

from shoal.clock import Clock
from shoal.frontier.memory import MemoryFrontier, _Held
from shoal.frontier.port import Backend
from shoal.model import TRANSIT, Added, Claim, Done, Lease, Request, Settlement, Verdict
from shoal.testing.chapters.leases import Leases
from shoal.testing.chapters.pacing import Pacing
from shoal.testing.chapters.settling import Settling
from shoal.testing.chapters.transit import Transit
from shoal.testing.chapters.waking import Waking
from shoal.testing.harness import Harness, MemoryHarness
from shoal.testing.machine import machine_for


class Unfenced(MemoryFrontier):
    """A late worker may end the visit of the one that came after it."""

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        current = {
            (held.lease.request.job, held.lease.request.url): held.lease for held in self._leases.values()
        }
        return await super().settle([_with_lease(verdict, current) for verdict in verdicts])


class Impatient(MemoryFrontier):
    """Forgets after each claim that the lane was just visited."""

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        claim = await super().claim(limit, worker=worker, lease_seconds=lease_seconds, queues=queues, job=job)
        for handed in claim.leases:
            lane = self._lanes[handed.lane]
            lane.tat = 0
            self._reschedule(lane, self._now())
        return claim


class Sleepy(MemoryFrontier):
    """A lane that was full is not scheduled again when a slot becomes free."""

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        full = {lane for lane in self._lanes.values() if lane.busy >= lane.width}
        answer = await super().settle(verdicts)
        for lane in full:
            lane.at = None
        return answer

    async def check(self) -> list[str]:
        """Blind as well: the suite must see it from outside."""
        return []


class Drifting(MemoryFrontier):
    """Counts a skipped visit as one more than it was."""

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        answer = await super().settle(verdicts)
        for verdict in verdicts:
            if isinstance(verdict, Done) and verdict.lease not in answer.lost and verdict.skipped:
                self._jobs[verdict.lease.request.job].done += 1
        return answer

    async def check(self) -> list[str]:
        return []


class Forgetful(MemoryFrontier):
    """Does not look whether a found request is known: it is stored again."""

    def _add(self, requests: Sequence[Request], now: int) -> list[Added]:
        for request in requests:
            if request.url.endswith(("1", "2", "3")):
                self._seen.clear()
        return super()._add(requests, now)


class Crowded(MemoryFrontier):
    """Lets one more visitor in than the lane is wide."""

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        now = self._now()
        for lane in self._lanes.values():
            lane.width += 1
            self._reschedule(lane, now)
        claim = await super().claim(limit, worker=worker, lease_seconds=lease_seconds, queues=queues, job=job)
        for lane in self._lanes.values():
            lane.width -= 1
            self._reschedule(lane, now)
        return claim


class Grabbing(MemoryFrontier):
    """Lets a message that comes twice be taken by two."""

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        for each in leases:
            if each.token in self._leases:
                self._leases[each.token].worker = worker
        return await super().take(leases, worker=worker, lease_seconds=lease_seconds)


class Blaming(MemoryFrontier):
    """Counts a lost message as a crash of whoever sent it."""

    def _take_back(self, held: _Held, now: int, suspects: int) -> bool:
        held.worker = held.worker.removeprefix(TRANSIT)
        return super()._take_back(held, now, suspects)


def _with_lease(verdict: Verdict, current: dict[tuple[str, str], Lease]) -> Verdict:
    lease = verdict.lease
    other = current.get((lease.request.job, lease.request.url), lease)
    return type(verdict)(
        **{**{name: getattr(verdict, name) for name in verdict.__struct_fields__}, "lease": other}
    )


BROKEN: list[type[MemoryFrontier]] = [
    Unfenced,
    Impatient,
    Sleepy,
    Drifting,
    Forgetful,
    Crowded,
    Grabbing,
    Blaming,
]


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_machine_notices(broken: type[MemoryFrontier]) -> None:
    assert not lives_well(broken), f"the machine let {broken.__name__} pass: {broken.__doc__}"


@pytest.mark.slow
def test_the_machine_lets_a_sound_frontier_live() -> None:
    """Else the broken ones may have been caught for a bug that they did not bring."""
    assert lives_well(MemoryFrontier)


def lives_well(kind: type[MemoryFrontier]) -> bool:
    case = machine_for(lambda: MemoryHarness(lambda clock: make(kind, clock)))
    # The first failure is enough: shrinking it would only make this slow.
    quick = settings(
        max_examples=200,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    case.settings = quick  # type: ignore[attr-defined]
    result = unittest.TestResult()
    case("runTest").run(result)
    assert not result.errors or "AssertionError" in result.errors[0][1], result.errors[0][1]
    return result.wasSuccessful()


def make(kind: type[MemoryFrontier], clock: Clock) -> Backend:
    return kind(clock=clock)


Promise = Callable[[Backend, Harness], Awaitable[None]]


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (Unfenced, Leases().test_a_late_verdict_changes_nothing),
        (Impatient, Pacing().test_the_gap_lies_between_two_visits),
        (Crowded, lambda frontier, _: Pacing().test_without_a_gap_one_claim_fills_the_width(frontier)),
        (Sleepy, Waking().test_a_freed_slot_wakes_its_lane),
        (Drifting, lambda frontier, _: Settling().test_a_skipped_visit_is_done_and_counted_apart(frontier)),
        (Grabbing, lambda frontier, _: Transit().test_a_message_delivered_twice_is_taken_once(frontier)),
        (Blaming, Transit().test_a_lost_message_does_not_count_as_a_crash),
        (Forgetful, lambda frontier, _: Settling().test_found_requests_are_added_once(frontier)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_contract_notices(broken: type[MemoryFrontier], promise: Promise) -> None:
    harness = MemoryHarness(lambda clock: make(broken, clock))
    # An unpacked empty claim is a ValueError: also a way to say no.
    with pytest.raises((AssertionError, ValueError)):
        asyncio.run(keep(promise, harness))


async def keep(promise: Promise, harness: Harness) -> None:
    await promise(await harness.open(), harness)
