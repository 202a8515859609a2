"""Crawl a site and look at the items as they come in. No async needed.

python examples/crawl_site.py [URL]
"""

from __future__ import annotations

import sys
from typing import Any

import shoal
from shoal.demo.books import DemoSite


def show(url: str, **settings: Any) -> None:
    pages = 0
    for item in shoal.crawl(url, max_pages=50, fields="status,title", **settings):
        print(item["status"], item["url"], item["title"], sep="  ")
        pages += 1
    print(f"{pages} pages")


def main() -> None:
    if len(sys.argv) > 1:
        show(sys.argv[1])
        return
    with DemoSite() as demo:
        # It runs on this machine: a private address, and nobody to be polite to.
        show(demo.url, allow_private=True, rate="none", per_host=8)


if __name__ == "__main__":
    main()
