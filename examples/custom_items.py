"""Items with a type: a dataclass for one kind of page, a pydantic model for another, into one file.

    python examples/custom_items.py [URL]

Handlers here are plain functions: they run on threads and may block.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

from pydantic import BaseModel

from shoal import Drop, Page, Request, Shoal
from shoal.demo.books import DemoSite

OUT = "shop.jsonl"

app = Shoal()


@dataclass
class Book:
    title: str
    price: Decimal
    kind: str = "book"


class Story(BaseModel):
    """Checked: a page whose date does not parse ends dead as `handler_error`."""

    title: str
    day: date
    kind: str = "story"


@app.scraper("shop", rate="2/s")
def shop(page: Page) -> Iterator[Request]:
    yield from page.follow_all("a[href^='/books/']", label="book")
    yield from page.follow_all("a[href^='/news/']", label="story")


@shop.handler("book")
def book(page: Page) -> Book:
    return Book(page.text("article h1"), Decimal(page.text("article .price").removeprefix("€ ")))


@shop.handler("story")
def story(page: Page) -> Iterator[Story | Request]:
    if "/news/" not in page.url:
        raise Drop("not a story")
    yield from page.follow_all("main li a", label="story")
    if day := page.attr("article time", "datetime"):
        yield Story(title=page.text("article h1"), day=date.fromisoformat(day))


async def run(url: str, **settings: Any) -> None:
    summary = await app.crawl(url, scraper="shop", out=OUT, **settings)
    print(f"{summary.items} items in {OUT} ({summary.status}, {summary.pages_per_second}/s)")


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(run(sys.argv[1]))
        return
    with DemoSite() as demo:
        asyncio.run(run(demo.url, allow_private=True, rate="none", per_host=8))


if __name__ == "__main__":
    main()
