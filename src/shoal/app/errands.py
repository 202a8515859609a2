"""The built-in scraper `shoal:discover`: reads sitemaps, feeds and lists, and follows the files they name.

Its items are the entries of each file, then a report about the file.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from shoal.discover.errand import Errand, errand_of
from shoal.engine.context import JobContext
from shoal.errors import BadUrl, Drop, FetchError
from shoal.model import JobSpec, Request, Response
from shoal.politeness.permission import Permission
from shoal.politeness.robots import MAX_BYTES, Robots
from shoal.politeness.scope import Scope
from shoal.scrape.links import canonical_href
from shoal.scrape.page import Page
from shoal.scrape.router import Scrape, Scraped

DISCOVER = "shoal:discover"
"""The scraper's name. Users cannot register a name with a colon."""
FEED_TYPES = ("application/rss+xml", "application/atom+xml", "application/rdf+xml", "application/feed+json")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ErrandContext(JobContext):
    """The context of a job that reads such files."""

    async def permits(self, robots: Robots, request: Request) -> bool:
        """Permits files that robots.txt names. Any other file that it forbids fails; it is not skipped."""
        errand = errand_of(request.data)
        if errand.how == "rules":
            raise Drop("robots.txt has been read")  # nothing else was wanted
        if errand.how != "robots" and not await self.permission.allows(robots, request.url, self.agent):
            raise FetchError("robots", robots.rule(request.url, self.agent))
        return True

    def max_attempts(self, request: Request) -> int:
        """Guessed addresses, and robots.txt, which everything else waits for, are tried once."""
        return 1 if errand_of(request.data).how in ("guess", "rules") else self.spec.max_attempts


def errand_scope(spec: JobSpec) -> Scope:
    """Returns the scope of files: any host. `files.read` limits the URLs that they may list."""
    return Scope(msgspec.structs.replace(spec, scope="any", include=(), exclude=(), depth=None))


def errand_scrape(spec: JobSpec, permission: Permission) -> Scrape:
    # Imported late: its XML parser is slow to import, and no other job needs it.
    from shoal.discover.files import read

    @lru_cache(maxsize=8)
    def scope_of(home: str) -> Scope:
        scope = Scope(spec)
        if home:
            scope.admit_start(home)
        return scope

    def work(page: Page, errand: Errand) -> Scraped:
        request = page.request
        file = request.origin or request.url
        report, entries, named = read(page.body, page.url, errand, scope_of(errand.home), file=file)
        if page.is_html and not report.useful:
            report = msgspec.structs.replace(report, feeds=tuple(feeds_of(page)))
        items = [_encode(entry.document()) for entry in entries]
        found = [
            Request(
                url, request.job, "", request.queue, request.priority, request.depth + 1, data=next_one.data()
            )
            for url, next_one in named
        ]
        return Scraped([*items, _encode(report)], requests=found)

    async def scrape(page: Page) -> Scraped:
        errand = errand_of(page.request.data)
        if errand.how == "rules":
            # Fetched as a page, because the job ignores its rules. The sitemaps that it names still count.
            private = spec.allow_private
            await permission.learn(page.request.url, page.body[: MAX_BYTES + 1], allow_private=private)
            return Scraped([])
        return await asyncio.to_thread(work, page, errand)

    return scrape


def feeds_of(page: Page | Response) -> list[str]:
    """Returns the feeds that a page declares with `<link rel=alternate>`, canonical, each once."""
    if isinstance(page, Response):
        page = Page(Request(page.url, "discover"), page)
    found: dict[str, None] = {}
    for link in page.css("link[rel~=alternate][href]") if page.is_html else ():
        if link.attr("type").partition(";")[0].strip().lower() in FEED_TYPES:
            with suppress(BadUrl):
                found[canonical_href(link.attr("href"), page.base)] = None
    return list(found)
