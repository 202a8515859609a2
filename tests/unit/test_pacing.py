"""Rates, Retry-After, back-off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.politeness.pacing import backoff, burst_of, format_rate, parse_rate, retry_after

NOW = 1_800_000_000.0  # Fri, 15 Jan 2027 08:00:00 GMT


@pytest.mark.parametrize(
    ("text", "gap"),
    [("2/s", 0.5), ("30/m", 2.0), ("10/h", 360.0), ("0.5/s", 2.0), ("none", 0.0), (" 1 / sec ", 1.0),
     ("1/5s", 5.0), ("24/d", 3600.0), ("2/min", 30.0)],
)  # fmt: skip
def test_parse_rate(text: str, gap: float) -> None:
    assert parse_rate(text) == gap


@pytest.mark.parametrize(
    ("text", "burst"),
    [("5/m", 5), ("1000/s", 1000), ("0.5/s", 1), ("1/5s", 1), ("none", 1), (" 3 / hour", 3)],
)
def test_burst_of(text: str, burst: int) -> None:
    assert burst_of(text) == burst


@pytest.mark.parametrize(
    "text", ["", "2", "/s", "0/s", "-1/s", "fast", "2/y", "inf/s", "nan/s", "2/0s", "9" * 400 + "/s"]
)
def test_bad_rate(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rate(text)
    assert "30/m" in caught.value.hint


@pytest.mark.parametrize(
    ("gap", "text"),
    [(0, "none"), (0.5, "2/s"), (1, "1/s"), (2, "30/m"), (360, "10/h"), (7200, "12/d"), (1e6, "1/1000000s")],
)
def test_format_rate(gap: float, text: str) -> None:
    assert format_rate(gap) == text


@given(st.floats(0.001, 500_000))
def test_rates_round_trip(gap: float) -> None:
    assert parse_rate(format_rate(gap)) == pytest.approx(gap, rel=1e-4)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 5 ", 5.0),
        ("0", 1.0),
        ("-1", None),
        ("1e12", 3600.0),
        ("9" * 90, 3600.0),
        ("1.5", 1.5),
        ("nan", None),
        ("inf", None),
        ("", None),
        ("soon", None),
        ("x" * 5000, None),
        ("Fri, 15 Jan 2027 08:01:00 GMT", 60.0),
        ("Fri, 15 Jan 2027 08:01:00 -0000", 60.0),
        ("Fri, 15 Jan 2026 08:00:00 GMT", 1.0),
        ("Fri, 15 Jan 2099 08:00:00 GMT", 3600.0),
        ("Fri, 99 Jan 2099 08:00:00 GMT", None),
    ],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert retry_after(value, NOW) == seconds


@given(st.text(max_size=60))
def test_retry_after_never_raises(value: str) -> None:
    seconds = retry_after(value, NOW)
    assert seconds is None or 1 <= seconds <= 3600


def test_backoff() -> None:
    assert [backoff(n) for n in (0, 1, 2, 3, 7, 10_000)] == [1, 1, 2, 4, 60, 60]
    assert backoff(3, jitter=0) == 2
    assert backoff(3, jitter=0.5) == 3
    assert backoff(2, base=10, cap=15) == 15
