"""shoal: a web scraper that starts with one command and grows to many machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.errors import Drop, Retry, ShoalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.app import Shoal
    from shoal.client import AsyncClient, Client
    from shoal.model import Request, Response
    from shoal.scrape.page import Page

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "Drop",
    "Page",
    "Request",
    "Response",
    "Retry",
    "Shoal",
    "ShoalError",
    "__version__",
    "crawl",
]

# What is heavy to import is imported when it is asked for: `shoal --help` stays instant.
_LAZY = {
    "AsyncClient": "shoal.client",
    "Client": "shoal.client",
    "Page": "shoal.scrape.page",
    "Request": "shoal.model",
    "Response": "shoal.model",
    "Shoal": "shoal.app",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def crawl(*start: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """Crawl and iterate over the items as they come in, without async.

    for item in shoal.crawl("https://example.com", max_pages=50):
        print(item["title"])
    """
    from shoal.app import Shoal

    return iter(Shoal().crawl(*start, **settings))
