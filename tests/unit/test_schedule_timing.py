"""When schedules fire: cron, intervals, and the two days a year on which clocks change."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from shoal.errors import UsageError
from shoal.schedule.timing import check_cron, format_every, next_cron, next_every, parse_every, zone

BERLIN = "Europe/Berlin"


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def firings(expression: str, after: str, count: int, timezone: str = "UTC") -> list[str]:
    """The next ones, in UTC."""
    found: list[str] = []
    moment: float | None = at(after)
    while len(found) < count:
        assert moment is not None
        moment = next_cron(check_cron(expression), moment, timezone)
        assert moment is not None
        found.append(datetime.fromtimestamp(moment, UTC).strftime("%m-%d %H:%M:%S"))
    return found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("90s", 90), ("15m", 900), ("6h", 21600), ("1d", 86400), (" 2 W ", 1209600)],
)
def test_intervals_are_written_like_this(text: str, seconds: int) -> None:
    assert parse_every(text) == seconds
    assert parse_every(format_every(seconds)) == seconds


def test_intervals_are_told_in_the_largest_unit() -> None:
    assert [format_every(seconds) for seconds in (1, 90, 900, 86400, 1209600)] == [
        "1s",
        "90s",
        "15m",
        "1d",
        "2w",
    ]


@pytest.mark.parametrize("text", ["", "0s", "1.5h", "-1m", "6", "6 hours", "367d", "999999999w", "m"])
def test_other_intervals_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="bad interval"):
        parse_every(text)


def test_an_interval_counts_from_its_anchor_however_late_it_is_looked_at() -> None:
    assert next_every(60, 1000, 1000) == 1060
    assert next_every(60, 1000, 1059.9) == 1060
    assert next_every(60, 1000, 1060) == 1120
    assert next_every(60, 1000, 1000 + 60 * 500 + 1) == 1000 + 60 * 501
    assert next_every(60, 1000, 5) == 1060, "the clock was set back"


def test_cron() -> None:
    assert firings("0 6 * * MON-FRI", "2026-11-13T05:59:59", 3) == [
        *("11-13 06:00:00", "11-16 06:00:00", "11-17 06:00:00")
    ]
    assert firings("@daily", "2026-11-16T00:00:00", 1) == ["11-17 00:00:00"]
    assert firings("*/20 * * * * *", "2026-11-16T00:00:00.5", 2) == ["11-16 00:00:20", "11-16 00:00:40"]


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("61 * * * *", "the minute is wrong"),
        ("* 24 * * *", "the hour is wrong"),
        ("* * 0 * *", "the day-of-month is wrong"),
        ("* * * 13 *", "the month is wrong"),
        ("* * * * FUN", "the day-of-week is wrong"),
        ("* * * * MON#1/2", "the day-of-week is wrong"),
        ("0 0 30 2 *", "the day-of-month is wrong"),
        ("* * * *", "the wrong number of fields"),
        ("@reboot", "the wrong number of fields"),
        ("* * */20 * 1L", "never fires"),
        ("1" * 10_000 + " * * * *", "200 characters"),
    ],
)
def test_a_bad_expression_is_told_with_its_field(expression: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_cron(expression)


@pytest.mark.parametrize("name", ["", "Mars/Base", "../../etc/passwd", "/etc/localtime", "Europe", "a\0b"])
def test_an_unknown_time_zone_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no time zone"):
        zone(name)


def test_a_time_zone_moves_with_the_seasons() -> None:
    assert firings("0 6 * * *", "2026-10-23T12:00:00", 3, BERLIN) == [
        *("10-24 04:00:00", "10-25 05:00:00", "10-26 05:00:00")
    ]


def test_what_falls_into_the_hour_that_is_left_out_comes_right_after_it() -> None:
    """On 29 March 2026 02:00 is 03:00 in Berlin, which is 01:00 UTC."""
    assert firings("30 2 * * *", "2026-03-28T00:00:00", 3, BERLIN) == [
        *("03-28 01:30:00", "03-29 01:00:00", "03-30 00:30:00")
    ]
    assert firings("*/30 * * * *", "2026-03-29T00:29:00", 3, BERLIN) == [
        *("03-29 00:30:00", "03-29 01:00:00", "03-29 01:30:00")
    ]


def test_what_names_an_hour_that_comes_twice_comes_once() -> None:
    """On 25 October 2026 03:00 is 02:00 in Berlin: 02:30 is at 00:30 and at 01:30 UTC."""
    assert firings("30 2 * * *", "2026-10-24T12:00:00", 2, BERLIN) == ["10-25 00:30:00", "10-26 01:30:00"]
    assert firings("30 2 * * *", "2026-10-25T01:10:00", 1, BERLIN) == ["10-26 01:30:00"], (
        "late, in the second hour"
    )
    assert firings("*/30 * * * *", "2026-10-25T00:01:00", 4, BERLIN) == [
        *("10-25 00:30:00", "10-25 01:00:00", "10-25 01:30:00", "10-25 02:00:00")
    ]
