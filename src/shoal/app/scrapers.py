"""Scrapers as the engine calls them: the built-in one, and those of an application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from shoal.engine.context import Scraped
from shoal.model import JobSpec
from shoal.scrape.apart import Reader
from shoal.scrape.hooks import Hooks
from shoal.scrape.page import Page
from shoal.scrape.router import Scraper, collect
from shoal.scrape.site import chosen, site_item

SITE = "site"
"""The name of the built-in scraper."""

_encode = msgspec.json.Encoder().encode


def site_scrape(spec: JobSpec, reader: Reader, worker: str = "") -> Callable[[Page], Awaitable[Scraped]]:
    """The built-in scraper: one item a page, every link followed. `reader` is for heavy pages."""
    fields = chosen(spec.fields)
    timed = fields is None or "fetched_at" in fields
    signature = {"worker": worker} if spec.record_worker else {}

    async def scrape(page: Page) -> Scraped:
        fetched_at = now() if timed else ""
        if page.is_heavy:
            # In a process of its own: others go on meanwhile.
            body, links = await reader.site(page, fields, fetched_at)
            return Scraped([signed(body)], links)
        links = page.links()
        item = site_item(page, fields, links, fetched_at)
        item.update(signature)
        return Scraped([_encode(item)], links)

    def now() -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def signed(body: bytes) -> bytes:
        return _encode(msgspec.json.decode(body) | signature) if signature else body

    return scrape


def hooked_scrape(
    scrape: Callable[[Page], Awaitable[Scraped]], hooks: Hooks, spec: JobSpec
) -> Callable[[Page], Awaitable[Scraped]]:
    """The scraper with the item hooks behind it: what they leave is what is stored."""

    async def hooked(page: Page) -> Scraped:
        scraped = await scrape(page)
        items = await hooks.on_items(scraped.items, page)
        if spec.record_worker and scraped.items:
            # A batch finds the answer for each URL, and its worker, by these.
            first = msgspec.json.decode(scraped.items[0])
            kept = {name: first[name] for name in ("url", "final_url", "worker") if name in first}
            items = [_encode(msgspec.json.decode(item) | kept) for item in items]
        return replace(scraped, items=items)

    return hooked


def named_scrape(scraper: Scraper) -> Callable[[Page], Awaitable[Scraped]]:
    async def scrape(page: Page) -> Scraped:
        handler = scraper.handler_for(page.label)
        collected = await collect(handler, page, timeout=scraper.timeout)
        return Scraped(collected.items, requests=collected.found)

    return scrape
