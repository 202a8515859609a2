"""Rates as people write them, Retry-After, back-off. Pure arithmetic."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime

from shoal.errors import UsageError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MIN_WAIT = 1.0
MAX_WAIT = 3600.0
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*/\s*(\d{1,6}(?:\.\d{1,6})?)?\s*([smhd])[a-z]*", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE]\+?\d{1,3})?")


def parse_rate(text: str) -> float:
    """Returns the seconds between two visits for `2/s`, `30/m`, `10/h`, `0.5/s`, `1/5s`; 0 for `none`.

    Raises UsageError.
    """
    wanted = text.strip()
    if wanted.lower() in ("none", "off", "unlimited"):
        return 0.0
    parts = _RATE.fullmatch(wanted)
    visits = float(parts[1]) if parts else 0.0
    seconds = float(parts[2] or 1) * UNITS[parts[3].lower()] if parts else 0.0
    if visits <= 0 or seconds <= 0:
        raise UsageError(f"bad rate {text!r}", hint="write it like 2/s, 30/m, 10/h, or none for no limit")
    return seconds / visits


def burst_of(text: str) -> int:
    """Returns how many visits of a rate may begin at once: N of `N/unit`, at least 1; 1 for `none`."""
    parts = _RATE.fullmatch(text.strip())
    return max(1, int(float(parts[1]))) if parts else 1


def format_rate(gap: float) -> str:
    """Returns the rate of a gap as `parse_rate` reads it, in the first unit that gives at least 1."""
    if gap <= 0:
        return "none"
    for unit, seconds in UNITS.items():
        if gap <= seconds:
            return f"{seconds / gap:.6g}/{unit}"
    return f"1/{gap:.10g}s"


def retry_after(value: str, now: float) -> float | None:
    """Returns the seconds that a Retry-After header asks for, between one second and one hour.

    None if the value makes no sense. `now` is the wall clock, for the form with a date. A date in the past
    counts as `0`.
    """
    text = value.strip()
    if not text or len(text) > 100:
        return None
    if _NUMBER.fullmatch(text):
        return min(max(float(text), MIN_WAIT), MAX_WAIT)
    try:
        when = parsedate_to_datetime(text)
        # "-0000" means UTC of unknown origin and comes back naive.
        at = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return min(max(at - now, MIN_WAIT), MAX_WAIT)


def backoff(attempt: int, base: float = 1.0, cap: float = 60.0, jitter: float = 1.0) -> float:
    """Returns the seconds to wait after the `attempt`-th failure (1 is the first), doubling up to `cap`.

    `jitter` is the caller's random number in 0…1. It moves the result between half of it and all of it, so
    that requests that failed together do not come back together.
    """
    full = min(cap, base * 2.0 ** min(max(attempt - 1, 0), 60))
    return full * (0.5 + 0.5 * min(max(jitter, 0.0), 1.0))
