"""The built-in scraper behind `shoal crawl`: one item for each page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from shoal.errors import UsageError
from shoal.scrape.page import Page

FIELDS = (
    "url",
    "final_url",
    "status",
    "title",
    "description",
    "language",
    "text",
    "links",
    "depth",
    "fetched_at",
    "content_hash",
    "seconds",
    "content_type",
)
MAX_TEXT = 2_000_000
"""Characters of text kept of one page. A log file served as text/plain must not fill the frontier."""
_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/javascript")


def chosen(fields: Iterable[str]) -> frozenset[str] | None:
    """The fields that were asked for, checked; None, which means all, if there are none.

    Raises UsageError that lists the valid names.
    """
    names = frozenset(name.strip() for name in fields if name.strip())
    if not names:
        return None
    unknown = sorted(names.difference(FIELDS))
    if unknown:
        raise UsageError(f"unknown field {', '.join(unknown)}", hint=f"the fields are {', '.join(FIELDS)}")
    return names


def site_item(
    page: Page, fields: frozenset[str] | None, links: Sequence[str] | None, fetched_at: str
) -> dict[str, Any]:
    """The item of a page: `url` and the chosen `fields` (see `chosen`); all of them if None.

    Only these are computed; `text` alone costs as much as everything else together.
    `links` are the page's links if the caller has them already. `fetched_at` is ISO 8601 in UTC.
    """
    request, response = page.request, page.response
    # The URL before any redirect, so that users find the URLs of their own list in the results.
    item: dict[str, Any] = {"url": request.origin or request.url}
    for field in FIELDS if fields is None else (name for name in FIELDS if name in fields):
        match field:
            case "final_url":
                item[field] = page.url
            case "status":
                item[field] = response.status
            case "title":
                item[field] = page.title
            case "description":
                item[field] = page.description
            case "language":
                item[field] = page.language
            case "text":
                item[field] = page_text(page)
            case "links":
                item[field] = page.links() if links is None else list(links)
            case "depth":
                item[field] = request.depth
            case "fetched_at":
                item[field] = fetched_at
            case "content_hash":
                item[field] = blake2b(response.body, digest_size=16).hexdigest()
            case "seconds":
                item[field] = round(response.seconds, 3)
            case "content_type":
                item[field] = page.content_type
    return item


def page_text(page: Page) -> str:
    """Markdown of an HTML page, other text as it is, "" for anything binary; at most MAX_TEXT."""
    if page.is_html:
        return page.markdown()[:MAX_TEXT]
    return page.html[:MAX_TEXT] if is_text(page) else ""


def is_text(page: Page) -> bool:
    """Whether the body is text, by its content type or, without one, by its first bytes."""
    kind = page.content_type
    if not kind:
        # Text never holds NUL, and every binary format has one early.
        return b"\0" not in page.body[:1024]
    return kind.startswith("text/") or kind in _TEXT_TYPES or kind.endswith(("+json", "+xml"))
