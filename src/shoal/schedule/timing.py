"""When a schedule fires: cron expressions and intervals. Pure arithmetic.

Moments are whole seconds since the epoch, so that a firing has a name. Around a change of clocks cron does
what Debian's does: what would have come in the hour that is left out comes right after it, and what names
an hour that comes twice comes once. Intervals count seconds and know no clocks.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, tzinfo

from shoal.errors import UsageError

_EVERY = re.compile(r"(\d{1,9})\s*([smhdw])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LONGEST = 366 * 86400
_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_CRON_HINT = 'write minute, hour, day of month, month and weekday, like "0 6 * * MON-FRI"'


def parse_every(text: str) -> int:
    """Seconds of `90s`, `15m`, `6h`, `1d`, `2w`. Raises UsageError."""
    parts = _EVERY.fullmatch(text.strip())
    seconds = int(parts[1]) * _SECONDS[parts[2].lower()] if parts else 0
    if not 1 <= seconds <= LONGEST:
        raise UsageError(
            f"bad interval {text[:100]!r}", hint="write it like 15m, 6h or 1d; a year is the longest"
        )
    return seconds


def format_every(seconds: int) -> str:
    """An interval as `parse_every` reads it, in the largest unit that fits."""
    for unit in "wdhm":
        if seconds % _SECONDS[unit] == 0:
            return f"{seconds // _SECONDS[unit]}{unit}"
    return f"{seconds}s"


def check_cron(text: str) -> str:
    """The expression with single blanks, nicknames such as @daily written out. Raises UsageError, also
    for one that never comes, such as the 31st of February."""
    if len(text) > 200:
        raise UsageError("a cron expression has 200 characters at most", hint=_CRON_HINT)
    expression = " ".join(_NICKNAMES.get(text.strip().lower(), text).split())
    if _after(expression, 0.0, UTC) is None:
        raise UsageError(f"{expression!r} never comes", hint=_CRON_HINT)
    return expression


def zone(name: str) -> tzinfo:
    """Raises UsageError."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # A name like ../../etc/passwd is a ValueError, a folder such as Europe an OSError.
        raise UsageError(
            f"no time zone {name[:100]!r}", hint="name it like Europe/Berlin, or UTC; is tzdata installed?"
        ) from None


def next_cron(expression: str, after: float, timezone: str) -> int | None:
    """The first firing later than this moment. None if there is none in the next fifty years."""
    return _after(expression, after, zone(timezone))


def next_every(seconds: int, anchor: int, after: float) -> int:
    """The first moment later than this one that is a whole number of intervals after the anchor."""
    if after < anchor:
        return anchor + seconds
    return anchor + (math.floor((after - anchor) / seconds) + 1) * seconds


def _after(expression: str, after: float, where: tzinfo) -> int | None:
    from cronsim import CronSim, CronSimError

    try:
        firings = CronSim(expression, datetime.fromtimestamp(math.floor(after), where))
    except (CronSimError, AssertionError) as error:
        # The library says "Bad minute"; a step after a weekday of the month has no words of its own.
        why = str(error).removeprefix("Bad ") or "day-of-week"
        told = "it has the wrong number of fields" if why.startswith("Wrong") else f"the {why} is wrong"
        raise UsageError(f"bad cron expression {expression[:100]!r}: {told}", hint=_CRON_HINT) from None
    # An hour that comes twice is the same on the wall: in its second half the library names its first.
    return next((int(found.timestamp()) for found in firings if found.timestamp() > after), None)
