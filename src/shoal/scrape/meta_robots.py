"""A page's directives for robots: `<meta name="robots">` and the header X-Robots-Tag.

Both may name a robot: `<meta name="shoal" content="nofollow">`, `X-Robots-Tag: shoal: noindex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.scrape.page import Page

_NAME = re.compile(r"\s*([A-Za-z_-]+|\*)\s*:")
_WITH_VALUE = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})
"""Directives that look like the name of a robot."""


def robots_directives(page: Page, agent: str) -> frozenset[str]:
    """Returns the directives for all robots and for `agent` (lower-case). `none` counts as `noindex` and
    `nofollow`."""
    found = {directive.strip().lower() for directive in _directives(page, ("robots", "*", agent))}
    return frozenset(found | {"noindex", "nofollow"} if "none" in found else found)


def _directives(page: Page, names: tuple[str, ...]) -> Iterator[str]:
    for name, value in page.response.headers:
        if name == "x-robots-tag":
            yield from _header_directives(value, names)
    for element in page.css("meta[name][content]"):
        if element.attr("name").strip().lower() in names:
            yield from element.attr("content").split(",")


def _header_directives(value: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yields the directives in one header for one of `names`. A name holds until the next one."""
    ours = True
    for part in value.split(","):
        named = _NAME.match(part)
        if named is None or named[1].lower() in _WITH_VALUE:
            directive = part
        else:
            ours = named[1].lower() in names
            directive = part[named.end() :]
        if ours:
            yield directive
