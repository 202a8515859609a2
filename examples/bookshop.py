"""A scraper of your own: one function finds the books, another reads each of them.

python examples/bookshop.py [URL]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from shoal import Page, Request, Shoal
from shoal.demo.books import DemoSite

app = Shoal()


@app.scraper("bookshop", scope="host", rate="2/s")
async def bookshop(page: Page) -> AsyncIterator[Request]:
    """Start pages and catalogue pages: follow the books, and the way to more books."""
    for request in page.follow_all("ul.shelf a", label="book"):
        yield request
    for request in page.follow_all("a[href*='/catalogue/']"):
        yield request


@bookshop.handler("book")
async def book(page: Page) -> AsyncIterator[dict[str, str]]:
    yield {
        "title": page.text("article h1"),
        "author": page.text(".author"),
        "price": page.text("article .price"),
        "url": page.url,
    }


async def show(url: str, **settings: Any) -> None:
    crawl = app.crawl(url, scraper="bookshop", **settings)
    async for item in crawl:
        print(f"{item['price']:>8}  {item['title']}, by {item['author']}")
    assert crawl.summary is not None
    print(f"{crawl.summary.items} books on {crawl.summary.pages} pages, {crawl.summary.dead} dead links")


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(show(sys.argv[1]))
        return
    with DemoSite() as demo:
        asyncio.run(show(demo.url, allow_private=True, rate="none", per_host=8))


if __name__ == "__main__":
    main()
