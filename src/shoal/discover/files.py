"""One sitemap, feed or list: what it tells that is wanted, and which files it names.

`read` is what the built-in scraper `shoal:discover` does with a page. It is pure: the bytes, the errand that
came with the request and the job's scope decide alone, so every worker reads a file alike.

A file may speak for another host only if robots.txt names it, or an index that robots.txt names.
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
"""How deep index files may name index files. The protocol says 1."""
FILE_SECONDS = 60.0
"""For taking one file apart; a usual one of 50,000 URLs needs less than one."""


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
    """The report, the wanted entries and the files to read next. On a thread: it may take a second."""
    reader = Reader(place, max_bytes=max_bytes, max_urls=max_urls, images=errand.images)
    sieve = _Sieve(place, errand, scope)
    end = time.monotonic() + seconds
    for at in range(0, len(body), STEP):
        if time.monotonic() > end:
            sieve.take(reader.close())
            reader.trouble = f"it takes more than {seconds:g} s to read; the rest was left out"
            break
        sieve.take(reader.feed(body[at : at + STEP]))
    else:
        sieve.take(reader.close())
    sieve.left["bad"] += reader.bad
    report = Report(
        file or place,
        place,
        errand,
        reader.kind,
        reader.found,
        reader.size,
        reader.trouble,
        sieve.unchanged,
        {reason: number for reason, number in sieve.left.items() if number},
    )
    return report, sieve.entries, sieve.files


class _Sieve:
    def __init__(self, place: str, errand: Errand, scope: Scope) -> None:
        self._place = place
        self._errand = errand
        self._scope = scope
        self.entries: list[Entry] = []
        self.files: list[tuple[str, Errand]] = []
        self.left: Counter[str] = Counter()
        self.unchanged = 0

    def take(self, said: list[Entry | Child]) -> None:
        for one in said:
            if isinstance(one, Child):
                self._follow(one)
            elif reason := self._unwanted(one):
                self.left[reason] += 1
            else:
                self.entries.append(one)

    def _unwanted(self, entry: Entry) -> str:
        reason = self._too_old(entry.changed) or self._scope.refusal(entry.url, 0)
        if not reason and not self._scope.likes(entry.url):
            return "excluded"  # the site's own page is a start, which is no reason to list it
        return "" if reason == "trap" else reason  # a list has an end, and its site stands for it

    def _too_old(self, changed: Moment | None) -> str:
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
