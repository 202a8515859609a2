"""When a turn began, and whether the frontier's clock was set forward: told from what claims took."""

from __future__ import annotations

import pytest

from shoal.engine.claim_clock import ClaimClock

FRONTIER = 1_700_000_000.0
"""The frontier's clock at our moment 0."""
GAP = 5.0


def claim(turns: ClaimClock, at: float, *, took: float = 0.002, ahead: float = 0.0) -> float:
    """A claim that was asked for at `at` and given half-way between question and answer."""
    return turns.turn_start(FRONTIER + at + took / 2 + ahead, at, at + took)


def test_what_an_answer_took_beyond_the_usual_is_delay() -> None:
    turns = ClaimClock()
    claim(turns, 10.0)
    assert claim(turns, 11.0, took=0.3) == pytest.approx(11.002, abs=1e-3)


def test_the_first_turn_may_have_begun_with_the_question() -> None:
    assert claim(ClaimClock(), 10.0, took=0.2) == 10.0


def test_a_long_way_to_the_frontier_is_no_delay() -> None:
    turns = ClaimClock()
    claim(turns, 10.0, took=0.2)
    assert claim(turns, 11.0, took=0.2) == pytest.approx(11.2)


def test_a_way_that_has_become_longer_is_learned() -> None:
    turns = ClaimClock()
    claim(turns, 10.0)
    late = [at + 0.2 - claim(turns, at, took=0.2) for at in map(float, range(11, 71))]
    assert late[0] > 0.19
    assert late[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("took", [0.001, 0.3])
def test_a_claim_that_takes_long_is_no_leap_of_the_clock(took: float) -> None:
    turns = ClaimClock()
    assert turns.seconds_early(10.0, GAP) == 0.0
    for number in range(10):
        claim(turns, 10.0 + number, took=took if number % 2 else 0.001)
        assert turns.seconds_early(10.0 + number, GAP) == 0.0


def test_after_a_clock_was_set_forward_turns_come_early_for_one_gap() -> None:
    turns = ClaimClock()
    claim(turns, 10.0)
    claim(turns, 11.0, ahead=3.0)
    assert turns.seconds_early(11.0, GAP) == pytest.approx(3.0, abs=0.01)
    claim(turns, 12.0, ahead=3.0)
    assert turns.seconds_early(12.0, GAP) == pytest.approx(3.0, abs=0.01)
    assert turns.seconds_early(16.1, GAP) == 0.0
    assert turns.seconds_early(12.0, 0.5) == 0.0


def test_nobody_waits_for_less_than_the_leap() -> None:
    turns = ClaimClock()
    claim(turns, 10.0, took=0.4)
    claim(turns, 11.0, took=0.4, ahead=3.0)
    assert 3.0 <= turns.seconds_early(11.0, GAP) <= 3.5


def test_a_clock_that_was_set_back_or_drifts_gives_no_turn_early() -> None:
    turns = ClaimClock()
    claim(turns, 10.0)
    claim(turns, 11.0, ahead=-3.0)
    assert turns.seconds_early(11.0, GAP) == 0.0
    claim(turns, 12.0, ahead=-3.0 + 0.005)
    assert turns.seconds_early(12.0, GAP) == 0.0
    claim(turns, 3612.0, ahead=-3.0 + 0.5)
    assert turns.seconds_early(3612.0, GAP) == 0.0
