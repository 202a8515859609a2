"""What a page wishes of robots: `<meta name="robots">` and the header X-Robots-Tag.

Both may name whom they mean: `<meta name="shoal" content="nofollow">`, `X-Robots-Tag: shoal: noindex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.scrape.page import Page

_NAME = re.compile(r"\s*([A-Za-z_-]+|\*)\s*:")
_WITH_VALUE = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})
"""Wishes that are written like a name."""


def robots_directives(page: Page, agent: str) -> frozenset[str]:
    """The wishes for everybody and for `agent` (lower-case) together; `none` is `noindex` and `nofollow`."""
    said = {wish.strip().lower() for wish in _said(page, ("robots", "*", agent))}
    return frozenset(said | {"noindex", "nofollow"} if "none" in said else said)


def _said(page: Page, names: tuple[str, ...]) -> Iterator[str]:
    for name, value in page.response.headers:
        if name == "x-robots-tag":
            yield from _tagged(value, names)
    for element in page.css("meta[name][content]"):
        if element.attr("name").strip().lower() in names:
            yield from element.attr("content").split(",")


def _tagged(value: str, names: tuple[str, ...]) -> Iterator[str]:
    """The wishes in one header that are meant for one of `names`: a name counts until the next."""
    ours = True
    for part in value.split(","):
        named = _NAME.match(part)
        if named is None or named[1].lower() in _WITH_VALUE:
            wish = part
        else:
            ours = named[1].lower() in names
            wish = part[named.end() :]
        if ours:
            yield wish
