"""When a turn began, told from how long answers took."""

from __future__ import annotations

import pytest

from shoal.engine.turn import WINDOW, Turns

FRONTIER = 1_700_000_000.0
"""The frontier's clock at our moment 0."""


def answered(turns: Turns, at: float, delay: float, *, ask: float = 0.002, jump: float = 0.0) -> float:
    """A claim whose `now` is taken at `at` and whose answer comes `delay` later."""
    return turns.began(FRONTIER + at + jump, at - ask, at + delay)


def test_what_an_answer_took_beyond_the_quickest_is_delay() -> None:
    turns = Turns()
    assert answered(turns, 10.0, 0.001) == pytest.approx(10.001)
    # It came 300 ms late: its turn began when the quick one's would have.
    assert answered(turns, 11.0, 0.301) == pytest.approx(11.001, abs=1e-6)


def test_the_first_answer_counts_as_quick() -> None:
    assert answered(Turns(), 10.0, 0.2) == pytest.approx(10.2)


def test_a_quicker_one_teaches() -> None:
    turns = Turns()
    answered(turns, 10.0, 0.2)
    answered(turns, 11.0, 0.001)
    assert answered(turns, 12.0, 0.2) == pytest.approx(12.001, abs=1e-6)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_does_no_harm(jump: float) -> None:
    turns = Turns()
    answered(turns, 10.0, 0.001)
    began = answered(turns, 11.0, 0.05, jump=jump)
    # Never before it was asked, never after it was answered.
    assert 11.0 - 0.002 <= began <= 11.05
    # Once the old answers are forgotten, it is as exact as before.
    for at in (11.0 + WINDOW, 12.0 + 2 * WINDOW, 13.0 + 3 * WINDOW):
        answered(turns, at, 0.001, jump=jump)
    last = 14.0 + 3 * WINDOW
    assert answered(turns, last, 0.3, jump=jump) == pytest.approx(last + 0.001, abs=1e-6)
