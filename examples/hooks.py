"""Three hooks: what a downloader middleware and an item pipeline do in Scrapy. See docs/guides/hooks.md.

python examples/hooks.py [URL]
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

from shoal import Drop, Page, Request, Retry, Shoal
from shoal.demo.books import DemoSite

app = Shoal()


@app.scraper("bookshop", rate="2/s")
def bookshop(page: Page) -> Iterator[Any]:
    yield page.follow_all("ul.shelf a", label="book")
    yield page.follow_all("a[href*='/catalogue/']")


@bookshop.handler("book")
def book(page: Page) -> dict[str, str]:
    return {"title": page.text("article h1"), "price": page.text("article .price")}


@app.on_request
def sign(request: Request) -> dict[str, str]:
    """Leave out pages of which the shop has many copies; sign all other requests."""
    if "sort=" in request.url:
        raise Drop("a sorted copy")
    return {"X-Shop-Key": os.environ.get("SHOP_KEY", "demo")}


@app.on_response
def is_busy(page: Page) -> None:
    """The shop sends its excuse with the status 200."""
    if page.title == "We are busy":
        raise Retry(after=30, reason="the shop is busy")


@app.on_item
def price(item: dict[str, Any], page: Page) -> None:
    """Make the price a number, and drop books that are not for sale."""
    amount = item["price"].removeprefix("€").strip()
    if not amount:
        raise Drop("no price")
    item["price"] = float(amount)


@app.on_item
def cheap(item: dict[str, Any], page: Page) -> dict[str, Any]:
    if item["price"] > 12:
        raise Drop("too expensive")
    return item | {"url": page.url}


async def show(url: str, **settings: Any) -> None:
    async for item in app.crawl(url, scraper="bookshop", **settings):
        print(f"{item['price']:6.2f}  {item['title']}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(show(sys.argv[1]))
    else:
        with DemoSite() as site:
            asyncio.run(show(site.url, rate="none", allow_private=True, frontier="memory:"))
