"""What travels with the request of a file, and what comes back: pure, no I/O."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

How = Literal["rules", "given", "robots", "index", "guess", "home", "page"]
"""How we came to a file: it is robots.txt itself, somebody gave it, robots.txt names it, an index does, we
only suppose it, it is the site's own page, or that page names it."""


class Errand(Struct, frozen=True, omit_defaults=True):
    """What is wanted of a file. Travels as the data of its request."""

    how: How
    depth: int = 0
    named: bool = False
    """By robots.txt, or by an index that is: it may be anywhere."""
    since: float | None = None
    """Leave out what changed before, and what has no date unless `undated`."""
    undated: bool = False
    images: bool = False
    home: str = ""
    """Where the site's own page is, if that is not where it was looked for."""

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def errand_of(data: dict[str, Any] | None) -> Errand:
    return msgspec.convert(data or {"how": "given"}, Errand)


class Report(Struct, frozen=True, omit_defaults=True):
    """How the reading of one file went: the last item of its visit."""

    file: str
    """The URL as it was named, before any redirect."""
    place: str = ""
    """Where it was found in the end."""
    errand: Errand = Errand("given")
    kind: str = ""
    told: int = 0
    """URLs (of an index: files) in it."""
    size: int = 0
    """Decoded bytes."""
    trouble: str = ""
    unchanged: int = 0
    """Files that, as this index says, have not changed since `since`."""
    left: dict[str, int] = {}
    """URLs left out, by reason."""
    feeds: tuple[str, ...] = ()
    """Those that a page declares."""

    @property
    def useful(self) -> bool:
        return self.kind in ("sitemap", "index", "feed", "list")
