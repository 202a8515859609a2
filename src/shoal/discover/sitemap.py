"""Sitemaps (sitemaps.org, with the news and image extensions) and plain lists of URLs."""

from __future__ import annotations

import re

from shoal import urls
from shoal.discover.entry import Child, Entry, moment
from shoal.discover.xml import Record
from shoal.errors import BadUrl

_ABSOLUTE = re.compile(r"\s*https?://", re.IGNORECASE)
ROOTS = ("urlset", "sitemapindex")
_MAX_LINE = 16 * 1024


def of_record(record: Record, source: str) -> Entry | Child | None:
    """Returns the entry or file of one `<url>` or `<sitemap>`; None if it names no URL. Raises BadUrl."""
    fields = record.fields
    if "loc" not in fields:
        return None
    if not _ABSOLUTE.match(fields["loc"]):
        # As the protocol requires. Resolved against the file, any words would become a page of that name.
        raise BadUrl(fields["loc"], "url_invalid", "URLs in a sitemap must begin with http:// or https://")
    url = resolve_url(fields["loc"], source)
    changed = moment(fields["lastmod"]) if "lastmod" in fields else None
    if record.name == "sitemap":
        return Child(url, changed)
    published = fields.get("news/publication_date")
    when = moment(published) if published else None
    return Entry(url, source, changed or when, when, _images(record, source) if record.images else ())


def resolve_url(text: str, base: str) -> str:
    """Returns the canonical form of a URL as people write it into such files. Raises BadUrl."""
    text = text.strip()
    return urls.canonical(text.replace(" ", "%20") if " " in text else text, base=base)


def _images(record: Record, source: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for text in record.images:
        try:
            found[resolve_url(text, source)] = None
        except BadUrl:
            continue
    return tuple(found)


class ListReader:
    """A text file with one URL per line. Other lines are ignored."""

    def __init__(self) -> None:
        self._rest = ""
        self._skip = False
        """The current line is longer than any URL."""

    def feed(self, text: str, *, final: bool = False) -> list[str]:
        """Returns the lines that begin like a URL, stripped."""
        lines = (self._rest + text).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not final and not lines[-1].endswith("\n") else ""
        found: list[str] = []
        for line in lines:
            if not self._skip and line.lstrip()[:8].lower().startswith(("http://", "https://")):
                found.append(line.strip())
            if line.endswith("\n"):
                self._skip = False
        if len(self._rest) > _MAX_LINE:
            self._rest, self._skip = "", True
        return found
