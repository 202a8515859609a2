"""The data of a request for a sitemap or feed, and the report of reading it: pure, no I/O."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

How = Literal["rules", "given", "robots", "index", "guess", "home", "page"]
"""How a file was found: it is robots.txt itself (`rules`), the user gave it, robots.txt names it, an index
names it, it is a guess, it is the site's home page, or a page names it."""


class Errand(Struct, frozen=True, omit_defaults=True):
    """What to read from a file. Travels as the data of its request."""

    how: How
    depth: int = 0
    named: bool = False
    """Robots.txt names it, or an index that robots.txt names: it may be on any host."""
    since: float | None = None
    """Leave out entries that changed earlier, and those without a date unless `undated`."""
    undated: bool = False
    images: bool = False
    home: str = ""
    """The site's home page, if it redirected elsewhere."""

    def data(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


def errand_of(data: dict[str, Any] | None) -> Errand:
    return msgspec.convert(data or {"how": "given"}, Errand)


class Report(Struct, frozen=True, omit_defaults=True):
    """The result of reading one file: the last item of its visit."""

    file: str
    """Its URL before any redirect."""
    place: str = ""
    """Its URL after redirects."""
    errand: Errand = Errand("given")
    kind: str = ""
    told: int = 0
    """Number of URLs (in an index: of files) that it lists."""
    size: int = 0
    """Decoded bytes."""
    trouble: str = ""
    unchanged: int = 0
    """Number of files that have not changed since `since`, according to this index."""
    left: dict[str, int] = {}
    """Number of URLs left out, by reason."""
    feeds: tuple[str, ...] = ()
    """Feeds that a page declares."""

    @property
    def useful(self) -> bool:
        return self.kind in ("sitemap", "index", "feed", "list")
