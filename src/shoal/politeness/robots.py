"""robots.txt as RFC 9309 has it, parsed by protego.

| answer for /robots.txt        | means                                            | kept |
|-------------------------------|--------------------------------------------------|------|
| 2xx                           | its rules                                        | 24 h |
| 3xx without end, 4xx          | there are none: everything is allowed            | 24 h |
| 429, 5xx, no answer (0)       | nobody knows: nothing is allowed, ask again      | 5 min|
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import msgspec
from protego import Protego

from shoal import urls
from shoal.errors import BadUrl

AGENT = "shoal"
"""The product token by which sites address us."""
MAX_BYTES = 500 * 1024
"""What RFC 9309 asks a crawler to read at least; the rest is cut at a line end."""
MAX_CRAWL_DELAY = 30.0
SLOW_BYTES = 32 * 1024
"""Above this, parse on a thread: 500 KiB of rules took protego a second."""
KNOWN_SECONDS = 24 * 3600.0
UNKNOWN_SECONDS = 300.0
UNANSWERED_SECONDS = 10.0
"""Nobody answered at all: the host may be back in a moment, and a page would not have come either. One
attempt counts for all its URLs that come up in that time."""
_DELAY_LINE = re.compile(r"^\s*(?:crawl-delay|request-rate)\s*:", re.IGNORECASE | re.MULTILINE)


class Robots:
    """What one origin allows. Immutable; `parse` makes it."""

    __slots__ = ("_delays", "_lines", "_rules", "_text", "status")

    def __init__(self, status: int, text: str, rules: Any) -> None:
        self.status = status
        self._text = text
        self._rules = rules
        self._lines: list[tuple[str, str]] | None = None
        self._delays: dict[str, float | None] = {}

    @classmethod
    def parse(cls, text: bytes, status: int) -> Robots:
        """From an answer's body and status (0: no answer). Never raises, whatever the bytes.

        Blocks for as long as `slow` says it may: call it through `asyncio.to_thread` then.
        """
        if not 200 <= status < 300:
            return cls(status, "", None)
        shown = _decoded(text)
        return cls(status, shown, Protego.parse(shown))

    @classmethod
    def unanswered(cls, error: str, message: str) -> Robots:
        """There was no answer because of a failure of the connection."""
        return cls(0, f"{error} {message}", None)

    @property
    def failure(self) -> tuple[str, str] | None:
        """Class and message of the failure that was in the way of any answer."""
        if self.status or not self._text:
            return None
        error, _, message = self._text.partition(" ")
        return error, message

    @staticmethod
    def slow(text: bytes) -> bool:
        """Whether parsing this belongs on a thread."""
        return len(text) > SLOW_BYTES

    @property
    def large(self) -> bool:
        """Whether even asking belongs on a thread: 20,000 wildcard rules take 0.1 s for one URL."""
        return len(self._text) > SLOW_BYTES

    @property
    def reachable(self) -> bool:
        """False: nobody knows the rules, so nothing may be fetched until they are asked for again."""
        return self.status != 429 and 200 <= self.status < 500

    @property
    def ttl(self) -> float:
        """Seconds for which this counts."""
        if self.reachable:
            return KNOWN_SECONDS
        return UNANSWERED_SECONDS if self.failure else UNKNOWN_SECONDS

    def allowed(self, url: str, agent: str = AGENT) -> bool:
        if not self.reachable:
            return False
        return self._rules is None or bool(self._rules.can_fetch(url, agent))

    def crawl_delay(self, agent: str = AGENT) -> float | None:
        """Seconds between visits that the site asks for (Crawl-delay, else Request-rate), at most 30."""
        if agent not in self._delays:  # asked before every visit
            self._delays[agent] = self._crawl_delay(agent)
        return self._delays[agent]

    def _crawl_delay(self, agent: str) -> float | None:
        if self._rules is None or not _DELAY_LINE.search(self._text):
            return None
        delay = self._rules.crawl_delay(agent)
        if delay is None:
            rate = self._rules.request_rate(agent)
            delay = rate.seconds / rate.requests if rate else None
        return min(delay, MAX_CRAWL_DELAY) if delay else None

    def sitemaps(self) -> list[str]:
        """Canonical URLs of the sitemaps it names, each once; what is no URL is left out."""
        found: dict[str, None] = {}
        for url in self._rules.sitemaps if self._rules is not None else ():
            try:
                found[urls.canonical(url)] = None
            except BadUrl:
                continue
        return list(found)

    def rule(self, url: str, agent: str = AGENT) -> str:
        """One line for people: what decides about `url`."""
        if not self.reachable:
            what = f"answered {self.status}" if self.status else "did not answer"
            if self.failure:
                what += f" ({self.failure[0]})"
            again = f"{self.ttl / 60:.0f} min" if self.ttl >= 60 else f"{self.ttl:.0f} s"
            return f"disallowed: robots.txt {what}; asked again in at most {again}"
        if self._rules is None:
            return f"allowed: there is no robots.txt (status {self.status})"
        verdict = "allowed" if self.allowed(url, agent) else "disallowed"
        path = url[len(urls.origin_of(url)) :] or "/"
        group, lines = self._group(agent)
        fitting = [line for line in lines if _fits(line[1], path)]
        wanted = "allow" if verdict == "allowed" else "disallow"
        # The longest pattern wins; of two as long, the one that allows.
        best = max(fitting, key=lambda line: (len(line[1]), line[0] == "allow"), default=None)
        if best is None or best[0] != wanted:
            return f"{verdict}: no rule of robots.txt matches" if best is None else f"{verdict} by robots.txt"
        return f"{verdict} by `{best[0].capitalize()}: {best[1]}` for user agent {group}"

    def dump(self) -> bytes:
        """For other workers; `load` reads it."""
        return msgspec.msgpack.encode((self.status, self._text))

    @classmethod
    def load(cls, data: bytes) -> Robots:
        """Raises ValueError about bytes that `dump` did not write. As slow as `parse`."""
        status, text = msgspec.msgpack.decode(data, type=tuple[int, str])
        return cls(status, text, Protego.parse(text) if 200 <= status < 300 else None)

    def _group(self, agent: str) -> tuple[str, list[tuple[str, str]]]:
        """The user agent of the group that counts for us, and its (field, pattern) lines."""
        groups: dict[str, list[tuple[str, str]]] = {}
        current: list[str] = []
        naming = False
        for line in self._text.splitlines():
            field, colon, value = line.partition("#")[0].partition(":")
            field, value = field.strip().lower(), value.strip()
            if not colon:
                continue
            if field == "user-agent":
                current = [*current, value.lower()] if naming else [value.lower()]
                naming = True
                groups.setdefault(value.lower(), [])
                continue
            naming = False
            if field in ("allow", "disallow") and value:
                for name in current:
                    groups[name].append((field, value))
        ours = max(
            (name for name in groups if name and name != "*" and agent.lower().startswith(name)),
            key=len,
            default="*",
        )
        return ours, groups.get(ours, [])


def _decoded(text: bytes) -> str:
    if len(text) > MAX_BYTES:
        text = text[:MAX_BYTES]
        # Half a rule is another rule: `Disallow: /` instead of `Disallow: /private`.
        text = text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return text.decode("utf-16", "replace")
    return text.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")


def _fits(rule: str, path: str) -> bool:
    """Whether a rule's pattern matches from the start of the path. Linear in the path."""
    anchored = rule.endswith("$")
    parts = rule.removesuffix("$").split("*")
    if anchored and len(parts) == 1:
        return path == parts[0]
    if not path.startswith(parts[0]):
        return False
    at = len(parts[0])
    for part in parts[1:]:
        at = path.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return not anchored or path.endswith(parts[-1])
