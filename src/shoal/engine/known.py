"""Links that the frontier has already, so that they need not be sent again.

A page has about a hundred links and one or two are new. Exact on purpose: a filter that says "known" by
mistake would lose a URL. Bounded: there are two generations, and the older is forgotten when the younger is
full. Forgetting is harmless, because the frontier deduplicates all the same.
"""

from __future__ import annotations


class KnownLinks:
    """URLs of one job that the frontier has acknowledged."""

    __slots__ = ("_limit", "_old", "_young")

    def __init__(self, limit: int = 200_000) -> None:
        self._limit = limit // 2
        self._young: set[str] = set()
        self._old: set[str] = set()

    def unknown(self, urls: list[str]) -> list[str]:
        """Those of `urls` that the frontier may not know, in order."""
        young, old = self._young, self._old
        return [url for url in urls if url not in young and url not in old]

    def acknowledge(self, urls: list[str]) -> None:
        """The frontier has these now: it acknowledged the settle that carried them."""
        self._young.update(urls)
        if len(self._young) > self._limit:
            self._old, self._young = self._young, set()
