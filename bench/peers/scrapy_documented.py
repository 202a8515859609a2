"""Scrapy as its documentation shows: a LinkExtractor in a spider, default settings, a JSON Lines feed.

Kinder than the defaults in one point: the log level is INFO, which the page on broad crawls advises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from meter import Meter, arguments
from scrapy import Request, Spider
from scrapy.crawler import CrawlerProcess
from scrapy.http import HtmlResponse, Response
from scrapy.linkextractors import LinkExtractor


class Site(Spider):
    """Every page of one host: its title and links, then its links followed."""

    name = "site"
    link_extractor = LinkExtractor()

    def __init__(self, url: str) -> None:
        super().__init__()
        self.start_urls = [url]
        self.allowed_domains = [urlsplit(url).hostname]

    def parse(self, response: Response, **_: Any) -> Iterator[dict[str, Any] | Request]:
        """One page."""
        if not isinstance(response, HtmlResponse):
            return
        links = self.link_extractor.extract_links(response)
        title = response.css("title::text").get()
        yield {"url": response.url, "title": title, "links": [link.url for link in links]}
        for link in links:
            yield Request(link.url, callback=self.parse)


if __name__ == "__main__":
    url, out = arguments()
    process = CrawlerProcess(
        {
            "ROBOTSTXT_OBEY": False,
            "DOWNLOAD_DELAY": 0,
            "AUTOTHROTTLE_ENABLED": False,
            "LOG_LEVEL": "INFO",
            "FEEDS": {out: {"format": "jsonlines", "overwrite": True}},
        }
    )
    meter = Meter("scrapy-documented")
    process.crawl(Site, url)
    process.start()
    meter.report(out)
