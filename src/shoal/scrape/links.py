"""Resolves the hrefs of a page to canonical URLs, on the hottest path of a crawl.

A page has about a hundred links, and nearly all of them were on the page before: navigation, footers, tables
of contents. The meaning of an href depends only on the directory of the page (or, for `/x` and `http://…`, on
its origin), so each is resolved once and then looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

import ada_url

from shoal import urls
from shoal.errors import BadUrl

MAX_LINKS = 5000
"""Links taken from one page. More than that is a trap or a sitemap in disguise."""
MAX_REMEMBERED = 50_000
"""How many resolved hrefs are kept before all are forgotten: about 12 MB at worst."""

_PLAIN = re.compile(r"(?!//)[A-Za-z0-9/._~%=&+,;!$'()*-][A-Za-z0-9/._~%?=&+,;@!$'()*-]*")
"""Hrefs that can have neither a scheme nor an authority. Of our policy, only the length remains to check."""
_SIMPLE = re.compile(r"((?:\.\./)*)([A-Za-z0-9_~-][A-Za-z0-9_~.-]*(?:/[A-Za-z0-9_~-][A-Za-z0-9_~.-]*)*/?)")
"""`../library/os.html`: nothing to escape and no `.` or `..` inside, so joining is concatenation."""
_ABSOLUTE = re.compile(r"/|https?://", re.IGNORECASE)
_PATH_BOUND = re.compile(r"(?:https?:)?(?:[?#]|$)", re.IGNORECASE)
"""`?page=2`, an empty href, `http:?x`: their meaning is different on every page."""
_ENDS = "".join(map(chr, range(0x21)))
_BREAKS = re.compile(r"[\t\r\n]")
_ODD = re.compile(r"[\x00-\x20\x7f]")
_NOT_FETCHED = ("javascript:", "mailto:", "data:", "tel:")


def canonical_href(href: str, base: str) -> str:
    """Returns the canonical URL of an href, read as browsers do.

    Line breaks and tabs are dropped everywhere, spaces and control characters at the ends. Inside, those are
    escaped (%20 and so on): refusing `my file.pdf`, as `urls.canonical` does, would lose real pages.
    Raises BadUrl and nothing else.
    """
    text = _cleaned(href)
    if not _is_clean(text):
        text = _ODD.sub(lambda odd: f"%{ord(odd[0]):02X}", text)
    return urls.canonical(text, base=base)


def _cleaned(href: str) -> str:
    text = href.partition("#")[0]
    return text if _is_clean(text) else _BREAKS.sub("", text.strip(_ENDS))


def _is_clean(text: str) -> bool:
    """Whether there is certainly nothing to clean: False for some clean texts too. Costs a tenth of the
    patterns."""
    return text.isprintable() and " " not in text


class Links:
    """Resolves hrefs and remembers the results. There is one for each worker.

    Handlers on threads may share it: a race costs a lookup or a wrong count, never a wrong URL. Forgetting
    costs only time, so there is no eviction to get wrong: when the memory is full, everything is forgotten.
    """

    __slots__ = ("_directories", "_origins", "_size")

    def __init__(self) -> None:
        self._directories: dict[str, _Directory] = {}
        self._origins: dict[str, _Origin] = {}
        self._size = 0

    def resolve(self, base: str, hrefs: Iterable[str]) -> list[str]:
        """Returns the canonical URLs of `hrefs` in order, each once, at most MAX_LINKS. Bad ones are left
        out.

        `base` must be canonical. The result is that of `canonical_href` for each href, only faster.
        """
        directory = self._directory(base)
        before = directory.size
        found: dict[str | None, None] = dict.fromkeys(map(directory.__getitem__, hrefs))
        self._size += directory.size - before
        found.pop("", None)
        if None in found:
            found = dict.fromkeys(
                answer if answer is not None else _or_empty(href, base)
                for href in hrefs
                for answer in (directory[href],)
            )
            found.pop("", None)
        return [url for url in islice(found, MAX_LINKS) if url]

    def _directory(self, base: str) -> _Directory:
        if self._size > MAX_REMEMBERED:
            self._directories.clear()
            self._origins.clear()
            self._size = 0
        path = base.partition("?")[0]
        name = path[: path.rindex("/") + 1]
        known = self._directories.get(name)
        if known is not None:
            return known
        # `base` is http or https, so the third slash ends the origin.
        root = name[: name.index("/", 8) + 1]
        origin = self._origins.get(root)
        if origin is None:
            origin = self._origins[root] = _Origin(root)
        known = self._directories[name] = _Directory(name, origin)
        self._size += 1
        return known


class _Origin(dict[str, str]):
    """The URLs of absolute hrefs on one origin. `""` means "not a link to follow"."""

    __slots__ = ("root",)

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, href: str) -> str:
        answer = self[href] = _resolve(href, self.root, _PLAIN.fullmatch(href) is not None)
        return answer


class _Directory(dict[str, str | None]):
    """The URLs of hrefs in one directory; "" as in `_Origin`. None means that it depends on the page: then it
    is resolved each time."""

    __slots__ = ("name", "origin", "size")

    def __init__(self, name: str, origin: _Origin) -> None:
        super().__init__()
        self.name = name
        self.origin = origin
        self.size = 0
        """Results kept here, and in the origin because of this directory, so that Links can keep count."""

    def __missing__(self, href: str) -> str | None:
        answer: str | None
        self.size += 1 + len(href) // 100
        if _ABSOLUTE.match(href):
            # Kept by the origin only: otherwise a blog with one directory per article would
            # repeat its whole navigation for each of them.
            return self.origin[href]
        if simple := _SIMPLE.fullmatch(href):
            answer = self[href] = self._join(*simple.groups())
            return answer
        plain = _PLAIN.fullmatch(href) is not None
        bound = not plain and _PATH_BOUND.match(_cleaned(href))
        answer = self[href] = None if bound else _resolve(href, self.name, plain)
        return answer

    def _join(self, ups: str, path: str) -> str:
        """Returns what the parser would, without calling it: in a third of the time."""
        folder = self.name
        for _ in range(len(ups) // 3):
            folder = folder[: folder.rindex("/", 0, -1) + 1]
            if len(folder) < len(self.origin.root):
                folder = self.origin.root  # there is nothing above
                break
        url = folder + path
        return url if len(url) <= urls.MAX_LENGTH else ""


def _resolve(href: str, base: str, plain: bool) -> str:
    if not plain:
        return "" if href.startswith(_NOT_FETCHED) else _or_empty(href, base)
    try:
        url: str = ada_url.join_url(base, href)
    except ValueError:
        return ""
    return url if len(url) <= urls.MAX_LENGTH else ""


def _or_empty(href: str, base: str) -> str:
    try:
        return canonical_href(href, base)
    except BadUrl:
        return ""
