"""Feeds: RSS 2.0 and its elders, RSS 1.0 (RDF), Atom, JSON Feed."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from shoal.discover.entry import Entry, moment
from shoal.discover.sitemap import located
from shoal.discover.xml import Record
from shoal.errors import BadUrl

ROOTS = ("rss", "RDF", "feed")
MAX_JSON = 10 * 1024 * 1024
"""Characters of a JSON feed: it is read whole."""
_CHANGED = ("updated", "modified", "pubDate", "date", "published", "issued")
_PUBLISHED = ("published", "issued", "pubDate")


def of_record(record: Record, source: str) -> Entry | None:
    """What one item or entry says; None if it has no link. Raises BadUrl."""
    said = record.fields
    # Feeds that are served by others keep the true address apart; a guid is one unless it says no.
    link = said.get("origLink") or said.get("link") or _permanent(said.get("guid", ""))
    if not link:
        return None
    base = source
    if record.base:
        with contextlib.suppress(BadUrl):
            base = located(record.base, source)
    return _entry(link, base, source, said, _CHANGED, _PUBLISHED)


def of_json(text: str, source: str) -> tuple[list[Entry], int]:
    """The entries of a JSON feed, and how many had no usable URL. Raises ValueError if it is none."""
    try:
        feed = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    items = feed.get("items") if isinstance(feed, dict) else None
    if not isinstance(items, list):
        raise ValueError("it is JSON and no feed")  # noqa: TRY004 - a stranger's document, not a caller's type
    found: list[Entry] = []
    bad = 0
    for item in items:
        said = _texts(item)
        link = said.get("url") or said.get("external_url") or _permanent(said.get("id", ""))
        try:
            if not link:
                raise BadUrl("", "url_invalid", "it is empty")
            entry = _entry(
                link, source, source, said, ("date_modified", "date_published"), ("date_published",)
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
    said: dict[str, str],
    changed: tuple[str, ...],
    published: tuple[str, ...],
) -> Entry:
    last = next((when for name in changed if name in said and (when := moment(said[name]))), None)
    first = next((when for name in published if name in said and (when := moment(said[name]))), None)
    return Entry(located(link, base), source, last, first)
