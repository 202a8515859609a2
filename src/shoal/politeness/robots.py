"""robots.txt, by RFC 9309.

| response for /robots.txt      | means                                            | kept |
|-------------------------------|--------------------------------------------------|------|
| 2xx                           | its rules                                        | 24 h |
| endless 3xx, 4xx              | there are no rules: everything is allowed        | 24 h |
| 429, 5xx                      | not known: nothing is allowed, fetch it again    | 5 min|

If there is no response, nothing is known and nothing is kept.

Every check is linear in the rules and in the URL, whatever a site writes: a hostile file of a megabyte with
60,000 wildcards takes 0.3 s to parse and 0.1 s for each URL, both on a thread.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from urllib.parse import quote

import msgspec

from shoal import urls
from shoal.errors import BadUrl

AGENT = "shoal"
"""The product token by which sites address us, unless a user agent is set."""
MAX_BYTES = 1_024_000
"""Bytes that are read of one file, twice what RFC 9309 asks for. The rest is cut off, at the end of a
line."""
MAX_CRAWL_DELAY = 30.0
SLOW_BYTES = 32 * 1024
"""A larger file is parsed on a thread: the rules that fit into this many bytes take 5 ms."""
SLOW_WILDCARDS = 16 * 1024
"""With more characters than this in patterns with wildcards, URLs are checked on a thread: this many take 1
to 2 ms for each URL."""
KNOWN_SECONDS = 24 * 3600.0
UNKNOWN_SECONDS = 300.0

_TOKEN = re.compile(r"[A-Za-z_-]+")
_COMPATIBLE = re.compile(r"\bcompatible;\s*([A-Za-z_-]+)(?!\S*://)", re.IGNORECASE)
# As generous as search engines are: "User agent", no colon, the ways in which people misspell "disallow".
_LINE = re.compile(
    r"^[^\S\n]*+(user[- ]?agent|dis{1,2}all?ow|disallaw|diasllow|allow|site-?maps?|crawl[- ]delay"
    r"|request[- ]rate)(?=[\s:]|$)[^\S\n]*:?([^#\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_FIELDS = {
    "u": "user-agent",
    "a": "allow",
    "d": "disallow",
    "s": "sitemap",
    "c": "crawl-delay",
    "r": "request-rate",
}
_RATE = re.compile(r"(\d{1,9})/(\d{1,9})([smhd]?)", re.IGNORECASE)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SAME_QUOTED = re.compile(r"[A-Za-z0-9_.~/=-]*").fullmatch
_SAME_PATTERN = re.compile(r"[A-Za-z0-9_.~/=*-]*").fullmatch
_ESCAPED = re.compile("%(?!2f|25)[0-9a-f]{2}", re.IGNORECASE)
"""Escapes, except those of the slash and the percent sign, which mean something else unescaped."""
_STARS = re.compile(r"\*+")


def agent_of(user_agent: str) -> str:
    """Returns the product token of a User-Agent: its text before the first character that a token cannot
    have.

    `acmebot/1.0 (+https://…)` and `Mozilla/5.0 (compatible; acmebot/1.0; +https://…)` are both `acmebot`: a
    bot that looks like a browser gives its own name after "compatible". Lower-case; "" if there is none, and
    then only the rules for `*` apply.
    """
    found = _COMPATIBLE.search(user_agent) if user_agent.startswith("Mozilla/") else None
    return found[1].lower() if found else _token(user_agent)


class Robots:
    """The rules of one origin. Immutable; made by `parse`."""

    __slots__ = ("_groups", "_text", "status")

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self._text = text
        self._groups: dict[str, Group] = {}

    @classmethod
    def parse(cls, text: bytes, status: int) -> Robots:
        """Make the rules from a response's body and status. Never raises, whatever the bytes are.

        If `is_slow` says so it blocks for long: call it through `asyncio.to_thread` then.
        """
        return cls._of(status, _decoded(text)) if 200 <= status < 300 else cls(status, "")

    @classmethod
    def _of(cls, status: int, text: str) -> Robots:
        lines = (f"{_FIELDS[found[1][0].lower()]}:{found[2].strip()}" for found in _LINE.finditer(text))
        return cls(status, "\n".join(lines))

    @staticmethod
    def is_slow(text: bytes) -> bool:
        """Whether this file should be parsed on a thread."""
        return len(text) > SLOW_BYTES

    @property
    def size(self) -> int:
        """How many characters of the file are kept."""
        return len(self._text)

    def group(self, agent: str = AGENT) -> Group:
        """Returns the rules for an agent. Made on the first call, which is as slow as parsing."""
        if agent not in self._groups:
            self._groups[agent] = Group(agent, self._lines())
        return self._groups[agent]

    def is_group_slow(self, agent: str) -> bool:
        """Whether `group` should be called on a thread for this agent."""
        return agent not in self._groups and len(self._text) > SLOW_BYTES

    @property
    def reachable(self) -> bool:
        """Whether the server responded to the question. If not, nothing may be fetched until it does."""
        return self.status != 429 and 200 <= self.status < 500

    @property
    def ttl(self) -> float:
        """Seconds for which the rules are valid."""
        return KNOWN_SECONDS if self.reachable else UNKNOWN_SECONDS

    def allowed(self, url: str, agent: str = AGENT) -> bool:
        if not self.reachable:
            return False
        decided = self._decision(url, agent)
        return decided is None or decided[0]

    def crawl_delay(self, agent: str = AGENT) -> float | None:
        """Returns the seconds between visits that the site asks for (Crawl-delay, else Request-rate), at most
        30; None if it asks for none."""
        return self.group(agent).delay if self._text else None

    def sitemaps(self) -> list[str]:
        """Returns the canonical URLs of the sitemaps that the file names, each once. Bad URLs are left
        out."""
        found: dict[str, None] = {}
        for field, value in self._lines():
            if field == "sitemap":
                with suppress(BadUrl):
                    found[urls.canonical(value)] = None
        return list(found)

    def rule(self, url: str, agent: str = AGENT) -> str:
        """Returns one line for people: the rule that decides about `url`."""
        if not self.reachable:
            again = f"fetched again in at most {self.ttl / 60:.0f} min"
            return f"disallowed: robots.txt responded with status {self.status}; {again}"
        if not 200 <= self.status < 300:
            return f"allowed: there is no robots.txt (status {self.status})"
        decided = self._decision(url, agent)
        if decided is None:
            return "allowed: no rule of robots.txt matches"
        verdict, field = ("allowed", "Allow") if decided[0] else ("disallowed", "Disallow")
        return f"{verdict} by `{field}: {decided[1]}` for user agent {self.group(agent).name}"

    def dump(self) -> bytes:
        """Returns the rules as bytes, which `load` reads, to share them with other workers."""
        return msgspec.msgpack.encode((self.status, self._text))

    @classmethod
    def load(cls, data: bytes) -> Robots:
        """Make the rules from the bytes of `dump`. As slow as `parse`. Raises ValueError about other
        bytes."""
        return cls._of(*msgspec.msgpack.decode(data, type=tuple[int, str]))

    def _decision(self, url: str, agent: str) -> tuple[bool, str] | None:
        if not self._text:
            return None
        path = url[len(urls.origin_of(url)) :].partition("#")[0]
        if path.partition("?")[0] == "/robots.txt":
            return None
        return self.group(agent).decide(path if path.startswith("/") else f"/{path}")

    def _lines(self) -> Iterator[tuple[str, str]]:
        for line in self._text.split("\n"):
            field, _, value = line.partition(":")
            yield field, value


class Group:
    """The rules of a robots.txt for one agent: those of all groups that name it, else those of all groups for
    `*`."""

    __slots__ = ("_cost", "_lengths", "_plain", "_wild", "delay", "name")

    def __init__(self, agent: str, lines: Iterable[tuple[str, str]]) -> None:
        rules: dict[str, list[tuple[str, str]]] = {}
        named: set[str] = set()
        naming = False
        for field, value in lines:
            if field == "user-agent":
                named = named if naming else set()
                naming = True
                who = "*" if value == "*" or value.startswith(("* ", "*\t")) else _token(value)
                if who in ("*", agent) and who:
                    named.add(who)
                    rules.setdefault(who, [])
            elif field != "sitemap":
                naming = False
                for who in named:
                    rules[who].append((field, value))
        self.name = agent if agent in rules else "*"
        ours = rules.get(self.name, [])
        self.delay = _delay(ours)
        self._plain: dict[str, bool] = {}
        """By prefix, or by whole path if it ends with `$`: whether it is allowed."""
        wild: dict[str, bool] = {}
        for field, value in ours:
            if field in ("allow", "disallow"):
                for pattern in _patterns(value, allow=field == "allow"):
                    # Of two equal patterns, the one that allows wins.
                    place = wild if "*" in pattern else self._plain
                    place[pattern] = place.get(pattern, False) or field == "allow"
        self._lengths = sorted({len(pattern) for pattern in self._plain}, reverse=True)
        self._cost = sum(len(pattern) + 16 for pattern in wild)
        # Longest first; of two of one length, first the one that allows.
        self._wild = sorted(wild.items(), key=lambda rule: (len(rule[0]), rule[1]), reverse=True)

    @property
    def is_slow(self) -> bool:
        """Whether URLs should be checked on a thread."""
        return self._cost > SLOW_WILDCARDS

    def decide(self, path: str) -> tuple[bool, str] | None:
        """Returns whether a path with its query is allowed, and by which pattern; None if no pattern matches.

        The longest pattern wins; of two of one length, the one that allows.
        """
        path = _quoted(path)
        end = f"{path}$"
        best, allowed = "", True
        for length in self._lengths:
            if length <= len(end) and end[:length] in self._plain:
                best = end[:length]
                allowed = self._plain[best]
                break
        for pattern, allows in self._wild:
            if (len(pattern), allows) <= (len(best), allowed):
                break
            if _fits(pattern, path):
                return allows, pattern
        return (allowed, best) if best else None


def _token(text: str) -> str:
    found = _TOKEN.match(text.strip())
    return found[0].lower() if found else ""


def _delay(rules: list[tuple[str, str]]) -> float | None:
    """Returns the longest delay that the rules ask for. Values that are not numbers are ignored."""
    asked = rated = 0.0
    for field, value in rules:
        if field == "crawl-delay" and value[:1] in set("0123456789."):
            with suppress(ValueError):
                asked = max(asked, float(value[:32]))
        elif field == "request-rate" and (rate := _RATE.match(value)) and int(rate[1]):
            rated = max(rated, int(rate[2]) * _UNITS[rate[3].lower()] / int(rate[1]))
    return min(asked or rated, MAX_CRAWL_DELAY) or None


def _patterns(value: str, *, allow: bool) -> Iterator[str]:
    """Yields the patterns of a rule, in the one spelling in which they are compared. `*` stands only for
    anything, `$` only for the end. An empty rule has none."""
    pattern = value.removesuffix("$")
    if not _SAME_PATTERN(pattern):
        pattern = "*".join(map(_quoted, pattern.split("*")))
    if "**" in pattern:
        pattern = _STARS.sub("*", pattern)
    if value.endswith("$"):
        pattern += "$"
    if pattern:
        yield pattern
    if allow and pattern.endswith("/index.html"):
        yield pattern.removesuffix("index.html") + "$"  # if the index is allowed, so is its folder


def _quoted(text: str) -> str:
    """Returns one spelling for all paths that mean the same: `%7e` and `~`, `ä` and `%C3%A4`."""
    if _SAME_QUOTED(text):
        return text
    plain = _ESCAPED.sub(lambda found: chr(int(found[0][1:], 16)), text.encode().decode("latin-1"))
    return quote(plain, safe="/=%", encoding="latin-1").replace("%2f", "%2F")


def _decoded(text: bytes) -> str:
    if len(text) > MAX_BYTES:
        text = text[:MAX_BYTES]
        # Half a rule is another rule: `Disallow: /` instead of `Disallow: /private`.
        text = text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        shown = text.decode("utf-16", "replace")
    else:
        shown = text.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")
    # NUL comes from UTF-16 without a byte-order mark. No path contains it.
    return shown.replace("\0", "").replace("\r", "\n")


def _fits(pattern: str, path: str) -> bool:
    """Whether a pattern with stars matches from the start of the path."""
    anchored = pattern.endswith("$")
    first, *parts = pattern.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    at = len(first)
    for part in parts:
        at = path.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return not anchored or path.endswith(parts[-1])
