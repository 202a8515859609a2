"""The URLs that a site tells of itself, and how they get into a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from shoal import urls
from shoal.app.session import Session, limits_of
from shoal.errors import BadUrl
from shoal.fetch.port import Ask
from shoal.model import Request, Response
from shoal.scrape.links import canonical_href
from shoal.scrape.page import Page

if TYPE_CHECKING:
    # Imported when it is used: the XML parser behind it takes time that no other command has.
    from shoal.discover.entry import Entry
    from shoal.discover.site import Bounds, Discovery, Read

FEED_TYPES = ("application/rss+xml", "application/atom+xml", "application/rdf+xml", "application/feed+json")


def discovery(
    session: Session,
    site: str,
    *,
    since: float | None = None,
    undated: bool = False,
    images: bool = False,
    bounds: Bounds | None = None,
    tell: Callable[[Read], None] = lambda _read: None,
) -> Discovery:
    """The URLs that a site tells of itself, fetched at its pace. Raises BadUrl and UsageError."""
    from shoal.discover.calls import Calls
    from shoal.discover.site import Bounds, Discovery

    bounds = bounds or Bounds()
    start = urls.canonical(site if "://" in site else f"https://{site.strip()}")
    spec = session.settings.spec((start,))
    ask = Ask(
        start,
        headers=tuple((spec.headers or {}).items()),
        allow_private=spec.allow_private,
        limits=msgspec.structs.replace(limits_of(spec), body=bounds.file_bytes),
    )
    calls = Calls(
        session.http,
        session.permission,
        ask,
        gap=spec.gap,
        obey=spec.robots,
        retries=spec.retries,
        shared=None if session.settings.frontier.startswith("memory") else session.frontier,
    )
    return Discovery(
        start,
        calls,
        spec,
        feeds_of=feeds_of,
        bounds=bounds,
        since=since,
        undated=undated,
        images=images,
        tell=tell,
    )


async def enqueue_entries(session: Session, job: str, entries: Iterable[Entry]) -> dict[str, int]:
    """Add discovered URLs to a job; what was told of each is in its request's data.

    Answers how many were new, known and refused.
    """
    spec = (await session.frontier.job(job)).spec
    requests = [
        Request(
            entry.url,
            job,
            queue=spec.queue,
            priority=spec.priority,
            data={name: value for name, value in entry.document().items() if name != "url" and value},
        )
        for entry in entries
    ]
    if (routes := session.routes) is not None:
        requests = [routes.submitted(request, spec) for request in requests]
    answers = Counter(added.value for added in await session.frontier.add(requests))
    return {word: answers[word] for word in ("new", "known", "refused")}


def feeds_of(response: Response) -> list[str]:
    """The feeds that a page declares with `<link rel=alternate>`, canonical, each once."""
    page = Page(Request(response.url, "discover"), response)
    found: dict[str, None] = {}
    for link in page.css("link[rel~=alternate][href]") if page.is_html else ():
        if link.attr("type").partition(";")[0].strip().lower() in FEED_TYPES:
            with suppress(BadUrl):
                found[canonical_href(link.attr("href"), page.base)] = None
    return list(found)
