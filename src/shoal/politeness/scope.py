"""Which URLs belong to a job: a pure yes or no.

| scope    | belongs                                                             |
|----------|---------------------------------------------------------------------|
| `page`   | the start URLs                                                      |
| `prefix` | same origin, below the directory of a start URL                     |
| `host`   | same host and port as a start URL; `www.` makes no difference       |
| `domain` | same registrable domain (`a.example.co.uk` and `example.co.uk`)     |
| `any`    | everything                                                          |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import ip_address

from publicsuffixlist import PublicSuffixList

from shoal import urls
from shoal.errors import UsageError
from shoal.model import JobSpec, Request
from shoal.politeness.traps import trap

FAR_DEPTH = 5
"""How deep a job goes by default once it may leave its hosts."""
MAX_CARRIED = 32
"""About 1 kB in each request of a job with so many start URLs that redirect to another host of their site."""

Match = Callable[[str], bool]


@lru_cache(maxsize=1)
def _suffixes() -> PublicSuffixList:
    # 40 ms of parsing that only `domain` and redirected start URLs need. The list is in the package.
    return PublicSuffixList()


@lru_cache(maxsize=4096)
def registrable(host: str) -> str:
    """Returns the registered domain of `host` (`example.co.uk`), or `host` itself for an address or
    `localhost`."""
    name = host.rstrip(".")
    try:
        ip_address(name)
    except ValueError:
        return _suffixes().privatesuffix(name) or name
    return name


def pattern(text: str) -> Match:
    """Returns a matcher of whole URLs: `*` matches anything, `re:` begins a regular expression.

    A pattern that begins with `/` is matched from the path on. `?` matches only itself, because it is common
    in URLs. Raises UsageError.
    """
    if text.startswith("re:"):
        try:
            search = re.compile(text[3:]).search
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(
                f"bad pattern {text!r}: {error}", hint="after re: comes a Python regular expression"
            ) from None
        return lambda url: search(url) is not None
    if not text.strip():
        raise UsageError("an empty pattern", hint="for example */blog/* or re:/\\d{4}/")
    parts = text.split("*")
    if text.startswith("/"):
        return lambda url: _glob(parts, url[len(urls.origin_of(url)) :])
    return lambda url: _glob(parts, url)


def _glob(parts: list[str], url: str) -> bool:
    """Linear, however many stars there are. The same pattern as a regular expression can take minutes."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return url == first
    if not url.startswith(first) or not url.endswith(last) or len(url) < len(first) + len(last):
        return False
    at, end = len(first), len(url) - len(last)
    for part in parts[1:-1]:
        at = url.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


class Scope:
    """The scope of one job: its spec, and where start URLs turned out to redirect.

    Only one worker sees a redirect. So each request carries the targets of redirected start URLs that its
    finder knew of (`Request.starts`), and the worker that visits it admits them first. Workers that start
    later, or that did not see the redirect, then decide like the one that did.
    """

    __slots__ = (
        "_domains",
        "_exclude",
        "_hosts",
        "_include",
        "_kind",
        "_prefixes",
        "_starts",
        "admitted",
        "depth",
    )

    def __init__(self, spec: JobSpec) -> None:
        """Raises UsageError about a bad pattern and BadUrl about a bad start URL."""
        self._kind = spec.scope
        self._include = [pattern(text) for text in spec.include]
        self._exclude = [pattern(text) for text in spec.exclude]
        self.depth = spec.depth
        if spec.depth is None and spec.scope in ("domain", "any"):
            self.depth = FAR_DEPTH
        self._starts: set[str] = set()
        self._hosts: set[str] = set()
        self._domains: set[str] = set()
        self._prefixes: tuple[str, ...] = ()
        self.admitted: tuple[str, ...] = ()
        """Targets of redirected start URLs that the spec alone would not let in."""
        for url in spec.start:
            self._widen(urls.canonical(url))
        if spec.scope == "domain":
            self._know_domains()

    def refusal(self, url: str, depth: int) -> str:
        """Returns why the canonical `url` may not be fetched at this depth: `depth`, `scope`,
        `excluded` or `trap`; "" if it may. Start URLs always may."""
        if url in self._starts:
            return ""
        if self.depth is not None and depth > self.depth:
            return "depth"
        if not self._is_within(url):
            return "scope"
        if not self.likes(url):
            return "excluded"
        return "trap" if trap(url) else ""

    def likes(self, url: str) -> bool:
        """Whether the patterns let the canonical `url` in. Start URLs are fetched even if they do not."""
        if self._include and not _matches_any(self._include, url):
            return False
        return not (self._exclude and _matches_any(self._exclude, url))

    def admit_start(self, url: str) -> bool:
        """Make a start URL of `url`, to which a start URL redirected, if it is on the same site.

        The same site means the same registrable domain (`http` to `https`, `example.com` to
        `shop.example.com`). Returns whether it is.
        """
        if url in self._starts or self._is_within(url):
            return True
        if not self._domains:
            self._know_domains()
        if registrable(urls.host_of(url)) not in self._domains:
            return False
        self._widen(url)
        self.admitted = (*self.admitted, url)
        return True

    def carried(self, request: Request, target: str = "") -> tuple[str, ...]:
        """Returns the `starts` of requests that are found by visiting `request`, or of its redirect to
        `target`.

        They are all that this worker knows, so that links between the sites of several start URLs are judged
        alike too. In a job with more than MAX_CARRIED of them, a request carries those of its own path.
        """
        if len(self.admitted) <= MAX_CARRIED:
            return self.admitted
        return (*request.starts, target) if target else request.starts

    def _is_within(self, url: str) -> bool:
        match self._kind:
            case "host":
                lane = urls.lane_of(url)
                return lane in self._hosts or lane.removeprefix("www.") in self._hosts
            case "prefix":
                return url.startswith(self._prefixes)
            case "domain":
                return registrable(urls.host_of(url)) in self._domains
            case "any":
                return True
            case "page":
                return False  # start URLs were let in before this check

    def _widen(self, url: str) -> None:
        self._starts.add(url)
        path = url.partition("?")[0]
        self._prefixes = (*self._prefixes, path[: path.rindex("/") + 1])
        self._hosts.add(urls.lane_of(url).removeprefix("www."))

    def _know_domains(self) -> None:
        self._domains = {registrable(urls.host_of(start)) for start in self._starts}


def _matches_any(matches: Iterable[Match], url: str) -> bool:
    return any(match(url) for match in matches)
