"""When a schedule fires: cron expressions and intervals. Pure arithmetic.

Moments are whole seconds since the epoch, so that a firing has a name. When clocks change, cron expressions
do what Debian's cron does: a firing in the hour that is left out follows right after it, and a firing in the
hour that is repeated happens once. Intervals count seconds and ignore clocks.
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
    """Returns the seconds of `90s`, `15m`, `6h`, `1d` or `2w`. Raises UsageError."""
    parts = _EVERY.fullmatch(text.strip())
    seconds = int(parts[1]) * _SECONDS[parts[2].lower()] if parts else 0
    if not 1 <= seconds <= LONGEST:
        raise UsageError(
            f"bad interval {text[:100]!r}", hint="write it like 15m, 6h or 1d; the longest is a year"
        )
    return seconds


def format_every(seconds: int) -> str:
    """Returns an interval as `parse_every` reads it, in the largest unit that divides it."""
    for unit in "wdhm":
        if seconds % _SECONDS[unit] == 0:
            return f"{seconds // _SECONDS[unit]}{unit}"
    return f"{seconds}s"


def check_cron(text: str) -> str:
    """Returns the expression with single spaces and with nicknames such as @daily written out. Raises
    UsageError, also if it never fires, such as on the 31st of February."""
    if len(text) > 200:
        raise UsageError("the cron expression is longer than 200 characters", hint=_CRON_HINT)
    expression = " ".join(_NICKNAMES.get(text.strip().lower(), text).split())
    if _after(expression, 0.0, UTC) is None:
        raise UsageError(f"the cron expression {expression!r} never fires", hint=_CRON_HINT)
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
            f"no time zone {name[:100]!r}",
            hint="use a name like Europe/Berlin, or UTC; is the package tzdata installed?",
        ) from None


def next_cron(expression: str, after: float, timezone: str) -> int | None:
    """Returns the first firing later than this moment; None if there is none in the next fifty years."""
    return _after(expression, after, zone(timezone))


def next_every(seconds: int, anchor: int, after: float) -> int:
    """Returns the first moment later than this one that is a whole number of intervals after the anchor."""
    if after < anchor:
        return anchor + seconds
    return anchor + (math.floor((after - anchor) / seconds) + 1) * seconds


def _after(expression: str, after: float, where: tzinfo) -> int | None:
    from cronsim import CronSim, CronSimError

    try:
        firings = CronSim(expression, datetime.fromtimestamp(math.floor(after), where))
    except (CronSimError, AssertionError) as error:
        # The library says "Bad minute"; for a step after a weekday of the month its message is empty.
        field = str(error).removeprefix("Bad ") or "day-of-week"
        why = "it has the wrong number of fields" if field.startswith("Wrong") else f"the {field} is wrong"
        raise UsageError(f"bad cron expression {expression[:100]!r}: {why}", hint=_CRON_HINT) from None
    # A repeated hour has the same wall time twice: in its second half the library returns its first.
    return next((int(found.timestamp()) for found in firings if found.timestamp() > after), None)
