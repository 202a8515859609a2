"""Reading one sitemap, feed or list: the entries that are wanted, and the files that it names.

The built-in scraper `shoal:discover` calls `read` for each page. It is pure: the result depends only on the
bytes, the errand that came with the request and the job's scope, so every worker reads a file alike.

A file may list URLs of another host only if robots.txt names it, or an index that robots.txt names.
"""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from shoal import urls
from shoal.discover.entry import Child, Entry, Moment
from shoal.discover.errand import Errand, Report
from shoal.discover.reader import MAX_BYTES, MAX_URLS, Reader
from shoal.discover.text import STEP
from shoal.politeness.scope import Scope

MAX_DEPTH = 3
"""Maximum nesting of index files. The protocol allows 1."""
FILE_SECONDS = 60.0
"""Time limit for parsing one file. A typical one of 50,000 URLs needs less than a second."""


def read(
    body: bytes,
    place: str,
    errand: Errand,
    scope: Scope,
    *,
    file: str = "",
    max_bytes: int = MAX_BYTES,
    max_urls: int = MAX_URLS,
    seconds: float = FILE_SECONDS,
) -> tuple[Report, list[Entry], list[tuple[str, Errand]]]:
    """Returns the report, the wanted entries and the files to read next. Call it in a thread: it may take a
    second."""
    reader = Reader(place, max_bytes=max_bytes, max_urls=max_urls, images=errand.images)
    filtered = _Filter(place, errand, scope)
    end = time.monotonic() + seconds
    for at in range(0, len(body), STEP):
        if time.monotonic() > end:
            filtered.take(reader.close())
            reader.trouble = f"reading it takes more than {seconds:g} s; the rest was left out"
            break
        filtered.take(reader.feed(body[at : at + STEP]))
    else:
        filtered.take(reader.close())
    filtered.left["bad"] += reader.bad
    report = Report(
        file or place,
        place,
        errand,
        reader.kind,
        reader.found,
        reader.size,
        reader.trouble,
        filtered.unchanged,
        {reason: number for reason, number in filtered.left.items() if number},
    )
    return report, filtered.entries, filtered.files


class _Filter:
    """Sorts what a file lists into wanted entries, files to read, and reasons why the rest was left out."""

    def __init__(self, place: str, errand: Errand, scope: Scope) -> None:
        self._place = place
        self._errand = errand
        self._scope = scope
        self.entries: list[Entry] = []
        self.files: list[tuple[str, Errand]] = []
        self.left: Counter[str] = Counter()
        self.unchanged = 0

    def take(self, listed: list[Entry | Child]) -> None:
        for one in listed:
            if isinstance(one, Child):
                self._follow(one)
            elif reason := self._refusal(one):
                self.left[reason] += 1
            else:
                self.entries.append(one)

    def _refusal(self, entry: Entry) -> str:
        """Returns why an entry is not wanted; "" if it is."""
        reason = self._date_refusal(entry.changed) or self._scope.refusal(entry.url, 0)
        if not reason and not self._scope.likes(entry.url):
            return "excluded"  # the site's home page is a start URL, but that is no reason to list it
        return "" if reason == "trap" else reason  # a list is finite, so its URLs are not a trap

    def _date_refusal(self, changed: Moment | None) -> str:
        errand = self._errand
        if errand.since is None:
            return ""
        if changed is None:
            return "" if errand.undated else "undated"
        return "old" if changed.last < errand.since else ""

    def _follow(self, child: Child) -> None:
        errand = self._errand
        if errand.since is not None and child.changed and child.changed.last < errand.since:
            self.unchanged += 1
        elif errand.depth >= MAX_DEPTH:
            self.left["nested"] += 1
        elif not errand.named and not _same_host(child.url, self._place):
            self.left["elsewhere"] += 1
        else:
            named = msgspec.structs.replace(errand, how="index", depth=errand.depth + 1)
            self.files.append((child.url, named))


def _same_host(one: str, other: str) -> bool:
    return urls.lane_of(one).removeprefix("www.") == urls.lane_of(other).removeprefix("www.")
