"""The item of the built-in scraper."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.model import Request, Response
from shoal.scrape.page import Page
from shoal.scrape.site import FIELDS, MAX_TEXT, chosen, site_item

AT = "2026-01-02T03:04:05Z"


def page_of(body: bytes, kind: str = "text/html") -> Page:
    request = Request(url="http://h.test/b", job="j", depth=2, origin="http://h.test/a")
    response = Response(
        url="http://h.test/b", status=200, headers=(("content-type", kind),), body=body, seconds=0.12345
    )
    return Page(request, response)


def test_everything() -> None:
    body = b"<html lang=en><title>T</title><meta name=description content=D><p>Hi <a href=x>x</a>"
    item = site_item(page_of(body), None, None, AT)
    assert tuple(item) == FIELDS
    assert item["url"] == "http://h.test/a"
    assert item["final_url"] == "http://h.test/b"
    assert item["text"].startswith("Hi")
    assert item["links"] == ["http://h.test/x"]
    assert len(item["content_hash"]) == 32
    assert (item["seconds"], item["depth"], item["fetched_at"]) == (0.123, 2, AT)
    assert (item["title"], item["description"], item["language"]) == ("T", "D", "en")
    assert (item["status"], item["content_type"]) == (200, "text/html")


def test_only_what_is_asked() -> None:
    item = site_item(page_of(b"<title>T"), chosen(["links", " title"]), ["given"], AT)
    assert item == {"url": "http://h.test/a", "title": "T", "links": ["given"]}


def test_unknown_field_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="unknown field nope") as caught:
        chosen(["title", "nope"])
    assert "content_hash" in caught.value.hint
    assert chosen([]) is None
    assert chosen(["", " "]) is None


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b"plain\ttext", "text/plain", "plain\ttext"),
        (b'{"a":1}', "application/problem+json", '{"a":1}'),
        (b"# md", "text/markdown", "# md"),
        (b"\x89PNG\0", "image/png", ""),
        (b"\x89PNG\0", "", ""),
        (b"words", "", "words"),
        (b"x" * (MAX_TEXT + 5), "text/plain", "x" * MAX_TEXT),
    ],
    ids=["plain", "json", "markdown", "png", "untyped binary", "untyped text", "huge"],
)
def test_text_of_other_types(body: bytes, kind: str, text: str) -> None:
    assert site_item(page_of(body, kind), frozenset(["text"]), [], AT)["text"] == text
