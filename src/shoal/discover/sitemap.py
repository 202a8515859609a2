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
    """What one `<url>` or `<sitemap>` says; None if it names no URL. Raises BadUrl."""
    said = record.fields
    if "loc" not in said:
        return None
    if not _ABSOLUTE.match(said["loc"]):
        # As the protocol says. Counted from the file, any words would become a page of that name.
        raise BadUrl(said["loc"], "url_invalid", "a sitemap names full http:// and https:// URLs only")
    url = located(said["loc"], source)
    changed = moment(said["lastmod"]) if "lastmod" in said else None
    if record.name == "sitemap":
        return Child(url, changed)
    published = said.get("news/publication_date")
    when = moment(published) if published else None
    return Entry(url, source, changed or when, when, _images(record, source) if record.images else ())


def located(text: str, base: str) -> str:
    """The canonical form of a URL as people write it into such files. Raises BadUrl."""
    text = text.strip()
    return urls.canonical(text.replace(" ", "%20") if " " in text else text, base=base)


def _images(record: Record, source: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for text in record.images:
        try:
            found[located(text, source)] = None
        except BadUrl:
            continue
    return tuple(found)


class ListReader:
    """A text file with one URL a line. Anything else in it is no URL of ours."""

    def __init__(self) -> None:
        self._rest = ""
        self._skip = False
        """The line we are in is longer than any URL."""

    def feed(self, text: str, *, final: bool = False) -> list[str]:
        """The lines that begin like a URL, stripped."""
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
