"""When a turn began, told from how long answers took."""

from __future__ import annotations

import pytest

from shoal.engine.turn import Turns

FRONTIER = 1_700_000_000.0
"""The frontier's clock at our moment 0."""


def answered(turns: Turns, at: float, delay: float, *, ask: float = 0.002, jump: float = 0.0) -> float:
    """The earliest moment that fits; see `between`."""
    return between(turns, at, delay, ask=ask, jump=jump)[0]


def between(
    turns: Turns, at: float, delay: float, *, ask: float = 0.002, jump: float = 0.0
) -> tuple[float, float]:
    """A claim whose `now` is taken at `at` and whose answer comes `delay` later."""
    return turns.began(FRONTIER + at + jump, at - ask, at + delay)


def test_what_an_answer_took_beyond_the_quickest_is_delay() -> None:
    turns = Turns()
    answered(turns, 10.0, 0.002)
    # It came 300 ms late, and so did the question: its turn began when the quick one's would have.
    assert between(turns, 11.0, 0.301, ask=0.2) == pytest.approx((11.0, 11.0), abs=1e-6)


def test_the_first_turn_may_have_begun_at_any_moment_between() -> None:
    assert between(Turns(), 10.0, 0.2) == pytest.approx((10.0 - 0.002, 10.2), abs=1e-6)
    assert between(Turns(), 10.0, 0.001, ask=0.2) == pytest.approx((9.8, 10.001), abs=1e-6)


def test_a_long_way_to_the_frontier_is_no_delay() -> None:
    turns = Turns()
    answered(turns, 10.0, 0.2, ask=0.2)
    assert between(turns, 11.0, 0.2, ask=0.2) == pytest.approx((11.0, 11.0), abs=1e-6)


def test_never_before_the_question_nor_after_the_answer() -> None:
    turns = Turns()
    between(turns, 10.0, 0.3, ask=0.1)
    assert between(turns, 11.0, 0.0, ask=0.0) == pytest.approx((11.0, 11.0), abs=1e-6)
    assert between(turns, 12.0, 0.3, ask=0.3) == pytest.approx((12.0, 12.0), abs=1e-6)


@pytest.mark.parametrize("jump", [-3600.0, -0.3, 0.3, 3600.0])
def test_a_clock_that_is_set_does_no_harm(jump: float) -> None:
    turns = Turns()
    answered(turns, 10.0, 0.001)
    # What was learned is void: as for the first one.
    assert between(turns, 11.0, 0.05, jump=jump) == pytest.approx((11.0 - 0.002, 11.05), abs=1e-6)
    answered(turns, 12.0, 0.001, ask=0.001, jump=jump)
    assert between(turns, 13.0, 0.3, ask=0.2, jump=jump) == pytest.approx((13.0, 13.0), abs=1e-6)


def test_after_a_clock_was_set_forward_turns_come_early_for_one_gap() -> None:
    turns = Turns()
    answered(turns, 10.0, 0.001)
    assert turns.early(10.0, 5.0) == 0.0
    began = answered(turns, 11.0, 0.001, jump=3.0)
    assert turns.early(began, 5.0) == pytest.approx(3.0, abs=0.01)
    answered(turns, 12.0, 0.001, jump=3.0)
    assert turns.early(12.0, 5.0) == pytest.approx(3.0, abs=0.01)
    assert turns.early(16.1, 5.0) == 0.0
    assert turns.early(12.0, 0.5) == 0.0


def test_a_clock_that_was_set_back_or_drifts_gives_no_turn_early() -> None:
    turns = Turns()
    answered(turns, 10.0, 0.001)
    began = answered(turns, 11.0, 0.001, jump=-3.0)
    assert turns.early(began, 5.0) == 0.0
    began = answered(turns, 12.0, 0.001, jump=-3.0 + 0.005)
    assert turns.early(began, 5.0) == 0.0
