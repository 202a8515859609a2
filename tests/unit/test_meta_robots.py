"""What pages say to robots."""

from __future__ import annotations

import pytest

from shoal.model import Request, Response
from shoal.scrape.meta_robots import robots_directives
from shoal.scrape.page import Page

URL = "http://h.test/"


def page(body: str = "", *tags: str, kind: str = "text/html") -> Page:
    headers = (("content-type", kind), *(("x-robots-tag", tag) for tag in tags))
    return Page(Request(URL, "job"), Response(URL, 200, headers, body.encode(), 0.0))


@pytest.mark.parametrize(
    ("tags", "index", "follow"),
    [
        ((), True, True),
        (("noindex",), False, True),
        (("NOINDEX , NoFollow",), False, False),
        (("noindex", "nofollow"), False, False),
        (("none",), False, False),
        (("all",), True, True),
        (("shoal: noindex",), False, True),
        (("Shoal:noindex, nofollow",), False, False),
        (("robots: nofollow",), True, False),
        (("*: nofollow",), True, False),
        (("otherbot: noindex, nofollow",), True, True),
        (("otherbot: noindex, shoal: nofollow",), True, False),
        (("nofollow, otherbot: noindex",), True, False),
        (("unavailable_after: Fri, 25 Jun 2010 15:00:00 PST, noindex",), False, True),
        (("max-snippet: 20, max-image-preview:large, nofollow",), True, False),
        (("noindexes",), True, True),
        ((":", ",,", "shoal:"), True, True),
    ],
)
def test_headers(tags: tuple[str, ...], index: bool, follow: bool) -> None:
    said = robots_directives(page("", *tags), "shoal")
    assert ("noindex" not in said, "nofollow" not in said) == (index, follow)


@pytest.mark.parametrize(
    ("body", "index", "follow"),
    [
        ("<meta name=robots content=noindex>", False, True),
        ("<META CONTENT=' NoFollow,noindex ' NAME=' Robots '>", False, False),
        ("<meta name=robots content=noindex><meta name=robots content=nofollow>", False, False),
        ("<meta name=robots content=none>", False, False),
        ("<meta name=shoal content=nofollow>", True, False),
        ("<meta name=otherbot content=noindex>", True, True),
        ("<!-- <meta name=robots content=noindex> --><p>x", True, True),
        ("<body><p>x<meta name=robots content=noindex>", False, True),
        ("<meta name=robots><meta content=noindex><meta property=robots content=noindex>", True, True),
    ],
)
def test_pages(body: str, index: bool, follow: bool) -> None:
    said = robots_directives(page(body), "shoal")
    assert ("noindex" not in said, "nofollow" not in said) == (index, follow)


def test_only_the_header_speaks_for_what_is_no_page() -> None:
    text = "<meta name=robots content=nofollow>"
    assert robots_directives(page(text, "noindex", kind="text/plain"), "shoal") == {"noindex"}
