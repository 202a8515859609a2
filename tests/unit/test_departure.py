"""When a visit may leave, for one that was held up on its way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import departure as module
from shoal.engine.departure import Departure
from shoal.errors import FrontierError

GAP = 0.2
LATE = 0.04
"""Up to this much after its turn a visit may leave."""


class Road:
    """Time that passes by hand, a frontier that takes its time, and what it was asked."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answer_takes = 0.0
        self.postponed_at: list[float] = []
        self.postponed_by = 0.0
        self.held = True
        self.broken = False

    def departure(self, *, gap: float = GAP, patient: bool = True, **more: Any) -> Departure:
        return Departure(
            self.now, gap=gap, patient=patient, holds=lambda: self.held, postpone=self.postpone, **more
        )

    async def postpone(self, gap: float) -> None:
        self.postponed_at.append(self.now)
        self.postponed_by = gap
        if self.broken:
            raise FrontierError("gone", hint="")
        self.now += self.answer_takes


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> Road:
    made = Road()

    async def sleep(seconds: float) -> None:
        made.now += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    return made


@pytest.mark.parametrize(("gap", "late"), [(GAP, LATE), (0.5, LATE), (2.0, 0.16)])
async def test_a_visit_may_be_a_little_late(road: Road, gap: float, late: float) -> None:
    departure = road.departure(gap=gap)
    assert await departure.wait_for_turn()
    assert road.now == 100.0, "it leaves at once"
    road.now += late - 0.001
    assert await departure.wait_for_turn()
    assert departure.may_send()
    await turn_of_the_loop()
    assert road.postponed_at == []
    departure = road.departure(gap=gap)
    road.now += late + 0.001
    assert await departure.wait_for_turn()
    assert len(road.postponed_at) == 1


async def test_a_late_one_postpones_the_next_turn_and_leaves(road: Road) -> None:
    departure = road.departure()
    road.now += 0.12
    assert await departure.wait_for_turn()
    assert road.postponed_at == [pytest.approx(100.12)]
    # Its turn counts from then: what was late is in time again.
    assert departure.may_connect()
    assert departure.may_send()
    assert len(road.postponed_at) == 1


async def test_one_that_is_too_late_is_handed_back(road: Road) -> None:
    departure = road.departure()
    road.now += 0.17
    assert not await departure.wait_for_turn()
    assert (road.postponed_at, departure.missed) == ([], True)


async def test_a_turn_that_was_postponed_too_late_was_not_postponed(road: Road) -> None:
    # The answer came at once, as answers go (a quarter of a gap), but after the next turn had begun: both
    # visits would leave within 50 ms. This is what a crowded storm looked like.
    departure = road.departure()
    road.now += 0.158
    road.answer_takes = 0.045
    assert not await departure.wait_for_turn()
    assert departure.missed


async def test_who_was_late_too_often_goes_all_the_same(road: Road) -> None:
    departure = road.departure(patient=False)
    road.now += 1.0
    road.answer_takes = 0.1
    assert await departure.wait_for_turn()
    # Whoever got the next turn meanwhile has left, and nobody got one since or will for a gap.
    assert road.postponed_at == [pytest.approx(101.0)]
    assert road.now == pytest.approx(101.1 + 2 * GAP)
    assert 101.0 + road.postponed_by >= road.now + GAP
    road.now += 1.0
    assert departure.may_connect()
    assert departure.may_send()
    assert not departure.missed


async def test_a_frontier_that_cannot_be_asked_ends_the_visit(road: Road) -> None:
    departure = road.departure()
    road.now += 0.1
    road.broken = True
    with pytest.raises(FrontierError):
        await departure.wait_for_turn()


async def test_held_up_between_the_look_and_the_connection(road: Road) -> None:
    departure = road.departure()
    assert await departure.wait_for_turn()
    road.now += 0.2
    assert not departure.may_connect()
    assert departure.missed


async def test_a_slow_connection_postpones_the_next_turn(road: Road) -> None:
    departure = road.departure()
    assert await departure.wait_for_turn()
    assert departure.may_connect()
    road.now += 0.1
    assert await asyncio.to_thread(departure.may_send)
    for _ in range(3):
        await turn_of_the_loop()
    assert road.postponed_at == [pytest.approx(100.1)]


async def turn_of_the_loop() -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(done.set_result, None)
    await done


async def test_a_request_leaves_once_in_a_turn(road: Road) -> None:
    departure = road.departure()
    assert await departure.wait_for_turn()
    assert departure.may_send()
    assert not departure.may_send()
    assert departure.missed


async def test_a_lease_that_is_over_lets_nothing_out(road: Road) -> None:
    for gap in (GAP, 0.0):
        departure = road.departure(gap=gap)
        road.held = True
        assert await departure.wait_for_turn()
        road.held = False
        assert not departure.may_connect()
        assert not departure.may_send()
        assert not departure.missed  # its URL was not late: it is somebody else's


async def test_without_a_gap_nothing_is_late(road: Road) -> None:
    departure = road.departure(gap=0.0)
    road.now += 5.0
    assert await departure.wait_for_turn()
    assert departure.may_connect()
    assert departure.may_send()
    assert departure.may_send()
    assert road.postponed_at == []


async def test_a_connection_that_took_a_whole_gap_is_not_used_at_once(road: Road) -> None:
    departure = road.departure()
    assert await departure.wait_for_turn()
    road.now += GAP
    assert not departure.may_send()
    assert (departure.missed, departure.slow) == (True, True)


async def test_where_connecting_always_takes_so_long_it_goes(road: Road) -> None:
    departure = road.departure(slow=True)
    assert await departure.wait_for_turn()
    road.now += GAP
    assert departure.may_send()
    assert departure.slow
    # As soon as it is quick, it is no slow host any more.
    departure = road.departure(slow=True)
    assert await departure.wait_for_turn()
    assert departure.may_send()
    assert not departure.slow


async def test_a_turn_that_came_too_early_is_waited_for(road: Road) -> None:
    departure = road.departure(seconds_early=lambda gap: 0.06)
    assert await departure.wait_for_turn()
    assert round(road.now - 100.0, 6) == 0.06
    # The next turn counts from this visit, not from the claim that came too early.
    assert len(road.postponed_at) == 1


async def test_a_turn_that_came_far_too_early_is_none(road: Road) -> None:
    departure = road.departure(seconds_early=lambda gap: 3600.0)
    assert not await departure.wait_for_turn()
    assert (road.now, departure.missed) == (100.0, True)


async def test_what_the_host_itself_wants_counts(road: Road) -> None:
    departure = road.departure(gap=0.0)
    departure.raise_gap(2.0)
    road.now += 1.0
    assert await departure.wait_for_turn()
    assert (len(road.postponed_at), road.postponed_by) == (1, 2.0)
    departure = road.departure(gap=GAP)
    departure.raise_gap(0.1)
    road.now += 0.1
    assert await departure.wait_for_turn()
    assert road.postponed_by == GAP


async def test_one_that_is_alone_on_its_host_goes_however_late_it_is(road: Road) -> None:
    departure = road.departure(alone=True)
    road.now += 30.0
    assert await departure.wait_for_turn()
    # Nobody was given a turn meanwhile, and the next one counts from now.
    assert (road.now, road.postponed_by) == (130.0, GAP)
    assert road.postponed_at == pytest.approx([130.0])
    assert departure.may_connect()
    assert departure.may_send()
    assert not departure.missed


async def test_one_that_is_alone_and_lost_its_lease_does_not_go(road: Road) -> None:
    departure = road.departure(alone=True)
    road.now += 30.0
    road.held = False
    assert not await departure.wait_for_turn()


async def test_who_may_stay_waits_for_the_next_turn(road: Road) -> None:
    departure = road.departure(alone=True, stay=5.0)
    assert await departure.wait_for_turn()
    assert departure.may_send()
    left = road.now
    road.now += 0.03
    assert await departure.wait_for_next_turn(2.0)
    assert await departure.wait_for_turn()
    assert round(road.now - left, 6) == 2.0
    assert departure.may_send(), "it is another turn"
    assert road.postponed_at == pytest.approx([left + 2.0])
    assert road.postponed_by == 2.0


@pytest.mark.parametrize(("alone", "stay"), [(True, 0.0), (True, 1.9), (False, 5.0)])
async def test_who_may_not_stay_is_handed_back(road: Road, alone: bool, stay: float) -> None:
    departure = road.departure(alone=alone, stay=stay)
    assert await departure.wait_for_turn()
    assert not await departure.wait_for_next_turn(2.0)
    assert (road.now, road.postponed_at) == (100.0, [])
