"""Slots of a worker: who counts, who is set aside, who gets one back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from shoal.engine import slots as slots_
from shoal.engine.slots import ASIDE, Place, Slots
from shoal.model import LARGE


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list so that a test can move it."""
    moment = [1000.0]
    monkeypatch.setattr(slots_, "time", SimpleNamespace(monotonic=lambda: moment[0]))
    return moment


def at_once(what: Callable[[], None]) -> None:
    what()


def left(slots: Slots, *, aside: bool = False) -> Place:
    """A visit on its way."""
    place = slots.take(aside=aside)
    place.start_waiting()
    return place


async def test_a_visit_that_waits_for_long_gives_its_slot_away(now: list[float]) -> None:
    slots = Slots(2, at_once)
    stalled = [left(slots) for _ in range(2)]
    assert slots.free_up() == 0
    now[0] += slots_.FIRST
    assert slots.free_up() == 2
    assert all(place.aside for place in stalled)


async def test_nobody_is_set_aside_while_there_are_slots(now: list[float]) -> None:
    slots = Slots(2, at_once)
    stalled = left(slots)
    now[0] += 100
    assert slots.free_up() == 1
    assert not stalled.aside


async def test_a_page_that_is_worked_on_keeps_its_slot(now: list[float]) -> None:
    slots = Slots(1, at_once)
    place = left(slots)
    await place.wait_for_slot()
    now[0] += 100
    assert slots.free_up() == 0


async def test_those_aside_hold_what_they_may_and_no_more(now: list[float]) -> None:
    slots = Slots(1, at_once)
    held = 0
    while True:
        place = left(slots)
        assert place.has_room(10**7)
        now[0] += slots_.LONGEST
        if not slots.free_up():
            break
        held += 10**7
        assert place.has_room(10**7), "what it holds it keeps"
        now[0] += slots_.STEP
    assert slots_.HELD - 10**7 < held <= slots_.HELD


async def test_it_needs_a_slot_again_to_hold_a_page(now: list[float]) -> None:
    slots = Slots(1, at_once)
    stalled = left(slots)
    now[0] += slots_.FIRST
    assert slots.free_up() == 1
    other = left(slots)
    assert not stalled.has_room(10**6)
    back = asyncio.ensure_future(stalled.wait_for_slot())
    await asyncio.sleep(0)
    assert not back.done()
    slots.leave(other, answered=True)
    await back
    assert stalled.has_room(10**6)
    assert slots.free_up() == 0


async def test_who_wants_a_slot_back_comes_before_new_visits(now: list[float]) -> None:
    slots = Slots(1, at_once)
    stalled = left(slots)
    now[0] += slots_.FIRST
    assert slots.free_up() == 1
    other = left(slots)
    assert not stalled.has_room(10**6)
    now[0] += slots_.FIRST
    assert slots.free_up() == 0
    assert (stalled.aside, other.aside) == (False, True)


async def test_as_many_as_said_are_set_aside(now: list[float]) -> None:
    slots = Slots(1, at_once)
    for _ in range(ASIDE):
        left(slots)
        now[0] += slots_.LONGEST
        assert slots.free_up() == 1
    left(slots)
    now[0] += slots_.LONGEST
    assert slots.free_up() == 0


async def test_a_host_that_stalled_before_takes_no_slot(now: list[float]) -> None:
    slots = Slots(1, at_once)
    left(slots, aside=True)
    assert slots.free_up() == 1


async def test_one_that_ends_while_it_wants_a_slot_gets_none(now: list[float]) -> None:
    slots = Slots(1, at_once)
    stalled = left(slots, aside=True)
    other = left(slots)
    assert not stalled.has_room(10**6)
    slots.leave(stalled, answered=False)
    slots.leave(other, answered=True)
    assert slots.free_up() == 1


async def test_patience_is_a_few_times_what_is_usual(now: list[float]) -> None:
    slots = Slots(1, at_once)
    for _ in range(slots_.SAMPLE):
        place = left(slots)
        now[0] += 0.2
        slots.leave(place, answered=True)
    place = left(slots)
    now[0] += 0.55
    assert slots.free_up() == 0
    now[0] += 0.1
    assert slots.free_up() == 1
    assert place.aside


async def test_half_of_the_slots_holds_large_pages() -> None:
    slots = Slots(4, lambda call: call())
    first, second, third = (slots.take(aside=False) for _ in range(3))
    assert first.has_room(LARGE + 1)
    assert second.has_room(LARGE + 1)
    assert not third.has_room(LARGE + 1), "two of four are half"
    assert third.has_room(LARGE), "it is not large yet"
    assert first.has_room(2 * LARGE), "who has begun may go on"
    slots.leave(first, answered=True)
    assert third.has_room(LARGE + 1)
