"""The built-in scraper as the engine calls it, and any scraper with item hooks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from shoal.model import JobSpec
from shoal.scrape.apart import Reader
from shoal.scrape.hooks import Hooks
from shoal.scrape.page import Page
from shoal.scrape.router import Scrape, Scraped
from shoal.scrape.site import chosen, site_item

SITE = "site"
"""The name of the built-in scraper."""

_encode = msgspec.json.Encoder().encode


def site_scrape(spec: JobSpec, reader: Reader, worker: str = "") -> Scrape:
    """Returns the built-in scraper: one item per page, every link followed. `reader` reads heavy pages."""
    fields = chosen(spec.fields)
    timed = fields is None or "fetched_at" in fields
    signature = {"worker": worker} if spec.record_worker else {}

    async def scrape(page: Page) -> Scraped:
        fetched_at = now() if timed else ""
        if page.is_heavy:
            # In a process of its own, so that other visits continue.
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


def hooked_scrape(scrape: Scrape, hooks: Hooks, spec: JobSpec) -> Scrape:
    """Returns the scraper followed by the item hooks: the items that they leave are stored."""

    async def hooked(page: Page) -> Scraped:
        scraped = await scrape(page)
        items = await hooks.on_items(scraped.items, page)
        if spec.record_worker and scraped.items:
            # A batch finds the result of each URL, and its worker, by these fields.
            first = msgspec.json.decode(scraped.items[0])
            kept = {name: first[name] for name in ("url", "final_url", "worker") if name in first}
            items = [_encode(msgspec.json.decode(item) | kept) for item in items]
        return replace(scraped, items=items)

    return hooked
