"""The entries of sitemaps and feeds, and their dates: pure, no I/O."""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from msgspec import Struct

from shoal.errors import UsageError

_DAY = re.compile(r"(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?")
_AGO = re.compile(r"(\d{1,6})\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_DATE = 64


class Moment(Struct, frozen=True, gc=False):
    """A date as sites write it. `shown` is ISO 8601 in UTC, as precise as the site's; `first` and `last` are
    the earliest and the latest second that it can mean."""

    shown: str
    first: float
    last: float


class Entry(Struct, frozen=True, gc=False):
    """A URL that a site lists. `url` is canonical, `source` is the file that lists it."""

    url: str
    source: str
    changed: Moment | None = None
    """When it last changed, or when it was published if the file says no more."""
    published: Moment | None = None
    images: tuple[str, ...] = ()

    @property
    def lastmod(self) -> str | None:
        return self.changed.shown if self.changed else None

    def document(self) -> dict[str, Any]:
        """Returns the entry as JSON: always `url`, `lastmod` and `source`, the rest if present."""
        shown: dict[str, Any] = {"url": self.url, "lastmod": self.lastmod, "source": self.source}
        if self.published:
            shown["published"] = self.published.shown
        if self.images:
            shown["images"] = list(self.images)
        return shown


class Child(Struct, frozen=True, gc=False):
    """Another file that an index names."""

    url: str
    changed: Moment | None = None


@lru_cache(maxsize=4096)
def moment(text: str) -> Moment | None:
    """Returns a date in one of the formats of sitemaps and feeds (W3C, ISO 8601, RFC 822); None if it is not
    one.

    A date without a time zone is in UTC.
    """
    wanted = text.strip()
    if not wanted or len(wanted) > _MAX_DATE:
        return None
    try:
        return _day(wanted) or _instant(wanted)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _day(text: str) -> Moment | None:
    parts = _DAY.fullmatch(text)
    if parts is None:
        return None
    year, month, day = (int(part) if part else 0 for part in parts.groups())
    begin = date(year, month or 1, day or 1)
    if day:
        end = begin + timedelta(days=1)
    else:
        end = date(year + (month in (0, 12)), month % 12 + 1 if month else 1, 1)
    return Moment(text, _midnight(begin), _midnight(end) - 1)


def _midnight(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _instant(text: str) -> Moment:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        when = parsedate_to_datetime(text)
    when = (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    shown = when.isoformat(timespec="seconds").replace("+00:00", "Z")
    return Moment(shown, when.timestamp(), when.timestamp())


def parse_since(text: str, now: float | None = None) -> float:
    """Returns the moment `7d`, `12h` or `2w` ago, or that of a date, in seconds since 1970. Days begin at
    midnight UTC. Raises UsageError."""
    ago = _AGO.fullmatch(text.strip().lower())
    if ago:
        return (time.time() if now is None else now) - int(ago[1]) * _SECONDS[ago[2]]
    when = moment(text)
    if when is None:
        raise UsageError(
            f"bad date {text!r}", hint="write a date like 2026-05-31, or an age like 12h, 7d or 2w"
        )
    return when.first
