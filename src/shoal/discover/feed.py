"""Feeds: RSS 2.0 and older, RSS 1.0 (RDF), Atom, JSON Feed."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from shoal.discover.entry import Entry, moment
from shoal.discover.sitemap import resolve_url
from shoal.discover.xml import Record
from shoal.errors import BadUrl

ROOTS = ("rss", "RDF", "feed")
MAX_JSON = 10 * 1024 * 1024
"""Maximum characters of a JSON feed, which is read whole."""
_CHANGED = ("updated", "modified", "pubDate", "date", "published", "issued")
_PUBLISHED = ("published", "issued", "pubDate")


def of_record(record: Record, source: str) -> Entry | None:
    """Returns the entry of one `<item>` or `<entry>`; None if it has no link. Raises BadUrl."""
    fields = record.fields
    # Feed services keep the original address in a field of its own; a guid is a link unless it says
    # otherwise.
    link = fields.get("origLink") or fields.get("link") or _permanent(fields.get("guid", ""))
    if not link:
        return None
    base = source
    if record.base:
        with contextlib.suppress(BadUrl):
            base = resolve_url(record.base, source)
    return _entry(link, base, source, fields, _CHANGED, _PUBLISHED)


def of_json(text: str, source: str) -> tuple[list[Entry], int]:
    """Returns the entries of a JSON feed, and the number of items without a usable URL. Raises ValueError if
    the text is not a feed."""
    try:
        feed = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    items = feed.get("items") if isinstance(feed, dict) else None
    if not isinstance(items, list):
        raise ValueError("it is JSON but not a feed")  # noqa: TRY004 - the document is wrong, not an argument
    found: list[Entry] = []
    bad = 0
    for item in items:
        fields = _texts(item)
        link = fields.get("url") or fields.get("external_url") or _permanent(fields.get("id", ""))
        try:
            if not link:
                raise BadUrl("", "url_invalid", "it is empty")
            entry = _entry(
                link, source, source, fields, ("date_modified", "date_published"), ("date_published",)
            )
            found.append(entry)
        except BadUrl:
            bad += 1
    return found, bad


def _texts(item: Any) -> dict[str, str]:
    if not isinstance(item, dict):
        return {}
    return {name: value for name, value in item.items() if isinstance(name, str) and isinstance(value, str)}


def _permanent(text: str) -> str:
    return text if text.lower().startswith(("http://", "https://")) else ""


def _entry(
    link: str,
    base: str,
    source: str,
    fields: dict[str, str],
    changed: tuple[str, ...],
    published: tuple[str, ...],
) -> Entry:
    last = next((when for name in changed if name in fields and (when := moment(fields[name]))), None)
    first = next((when for name in published if name in fields and (when := moment(fields[name]))), None)
    return Entry(resolve_url(link, base), source, last, first)
