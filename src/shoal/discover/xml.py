"""Untrusted XML as flat records, in constant memory.

A sitemap and a feed are the same thing: a list of elements with a few texts in each. So no tree is built
(50 MiB of `<a/>` would become a gigabyte); the parser calls `_Records`, which keeps the fields that are
needed.

No entities are resolved except the five of XML: every other `&` becomes text before the parser sees it. That
also repairs the most common mistake in sitemaps, `?a=1&b=2`. A file that declares entities is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lxml import etree
from msgspec import Struct

ITEMS = {
    "urlset": ("url", "sitemap"),
    "sitemapindex": ("url", "sitemap"),
    "rss": ("item",),
    "RDF": ("item",),
    "feed": ("entry",),
}
"""The root elements of known documents, and the names of their records."""
_FIELDS = frozenset(
    (
        *("loc", "lastmod", "news/publication_date", "image/loc"),
        *("link", "guid", "origLink"),
        *("pubDate", "date", "updated", "published", "modified", "issued"),
    )
)
_GROUPS = frozenset(("news", "image"))
_BASE = "{http://www.w3.org/XML/1998/namespace}base"
_MAX_TEXT = 16 * 1024
"""Maximum characters kept of a field: more than any URL that is accepted."""
_MAX_DEPTH = 256
_MAX_IMAGES = 1000
_NAMED = re.compile(r"&(?!#[0-9]{1,7};|#x[0-9A-Fa-f]{1,6};)(?:(amp|lt|gt|quot|apos);)?")
_NUMBERS = {None: "&#38;", "amp": "&#38;", "lt": "&#60;", "gt": "&#62;", "quot": "&#34;", "apos": "&#39;"}
_LITERAL = re.compile(r"<!\[CDATA\[|<!--")
_ENDS = {"<![CDATA[": "]]>", "<!--": "-->"}
_EDGE = 11
"""Characters at the end of a piece in which a reference or a delimiter may begin that ends in the next
one."""
_OPEN = re.compile(r"[&<\]-]")
_ENTITY = re.compile(r"<!--.*?(?:-->|\Z)|<!ENTITY|<[A-Za-z_]", re.DOTALL)


class Record(Struct):
    """One element of the list and its fields: the first of each name."""

    name: str
    fields: dict[str, str]
    base: str = ""
    """xml:base as written."""
    images: tuple[str, ...] = ()


class XmlReader:
    """Parses text into records. `root` is "" until it is known."""

    def __init__(self, *, images: bool = False) -> None:
        self._records = _Records(images=images)
        self._mender = _Mender()
        self._begun = False
        # `recover` continues after a mistake; libxml2's limits against huge documents stay on.
        self._parser = etree.XMLParser(
            target=self._records,
            recover=True,
            resolve_entities=False,
            no_network=True,
            load_dtd=False,
            huge_tree=False,
            encoding="utf-8",
        )
        self.trouble = ""

    @property
    def root(self) -> str:
        return self._records.root

    @property
    def stopped(self) -> bool:
        """Whether the rest would not be used: another kind of document, nested too deeply, entities."""
        return bool(self.trouble) or self._records.useless

    def feed(self, text: str, *, final: bool = False) -> list[Record]:
        """Returns the records that are complete. Raises nothing, whatever the text."""
        if self.stopped:
            return []
        text = self._mender.feed(text, final=final)
        if not self._begun:
            text = text.lstrip()  # a blank line before the declaration is an error, but common
            self._begun = bool(text)
        if not self._records.root and _declares_entities(text):
            self.trouble = "it declares entities, which is refused"
            return []
        try:
            if text:
                self._parser.feed(text.encode("utf-8", "replace"))
            if final and self._begun:
                self._parser.close()
        except etree.LxmlError as error:
            self.trouble = f"it is not XML: {_one_line(str(error))}"
        if self._records.depth > _MAX_DEPTH:
            self.trouble = f"it is nested more than {_MAX_DEPTH} levels deep"
        if final and not self.trouble:
            self.trouble = self._complaint()
        return self._records.take()

    def _complaint(self) -> str:
        if not self._begun:
            return "it is empty"
        # Only the first mistake is reported: the others are often its consequences.
        for error in self._parser.feed_error_log:
            return f"it is broken in line {error.line}: {_one_line(error.message or '')}"
        return ""


class _Records:
    """The target of the parser. Names are compared without their namespace: half of all sitemaps have a wrong
    one, or none."""

    def __init__(self, *, images: bool) -> None:
        self.root = ""
        self.depth = 0
        self.useless = False
        self._want_images = images
        self._names: tuple[str, ...] = ()
        self._done: list[Record] = []
        self._base = ""
        self._record: Record | None = None
        self._at = 0
        """The depth of the current record."""
        self._group = ""
        self._field = ""
        self._parts: list[str] = []
        self._size = 0
        self._images: list[str] = []

    def take(self) -> list[Record]:
        done, self._done = self._done, []
        return done

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.depth += 1
        if self.useless or self.depth > _MAX_DEPTH:
            return
        name = tag[tag.rfind("}") + 1 :]
        if self._record is None:
            self._outside(name, attributes)
            return
        below = self.depth - self._at
        if below == 1:
            self._group = name if name in _GROUPS else ""
            self._expect(name)
            if attributes and name in ("link", "guid"):
                self._take_link(name, attributes)
        elif below == 2 and self._group:
            self._expect(f"{self._group}/{name}")

    def data(self, text: str) -> None:
        if self._field and self._size <= _MAX_TEXT:
            self._parts.append(text)
            self._size += len(text)

    def end(self, _tag: str) -> None:
        self.depth -= 1
        if self._record is None:
            return
        if self._field:
            self._keep(self._record)
        if self.depth < self._at:
            self._record.images = tuple(self._images)
            self._done.append(self._record)
            self._record = None

    def close(self) -> None:
        return None

    def _outside(self, name: str, attributes: Mapping[str, str]) -> None:
        if not self.root:
            self.root = name
            self._names = ITEMS.get(name, ())
            self.useless = not self._names
            self._base = attributes.get(_BASE, "")
        elif name in self._names:
            self._record = Record(name, {}, attributes.get(_BASE, "") or self._base)
            self._at = self.depth
            self._images = []
            self._field = self._group = ""

    def _expect(self, field: str) -> None:
        """The text from here to the end of this element is `field`, which is kept if it is a known one."""
        self._field = field if field in _FIELDS else ""
        if self._parts:
            self._parts = []
        self._size = 0

    def _take_link(self, name: str, attributes: Mapping[str, str]) -> None:
        assert self._record is not None
        if name == "guid":
            if attributes.get("isPermaLink", "").strip().lower() == "false":
                self._field = ""  # an id that only looks like a URL
        elif "href" in attributes and attributes.get("rel", "alternate").strip() == "alternate":
            self._record.fields.setdefault("link", attributes["href"][: _MAX_TEXT + 1])

    def _keep(self, record: Record) -> None:
        field, self._field = self._field, ""
        text = "".join(self._parts).strip()
        if not text:
            return
        if field == "image/loc":
            if self._want_images and len(self._images) < _MAX_IMAGES:
                self._images.append(text)
        elif field == "link":
            record.fields["link"] = text  # RSS: the text is the link, an attribute is an extension
        else:
            record.fields.setdefault(field, text)


class _Mender:
    """Turns every `&` that does not begin a numeric reference into one. CDATA and comments are not changed.
    Numeric, because after a mistake libxml2 drops even `&amp;`: `?a=1&amp;b=2` would silently become another
    URL."""

    def __init__(self) -> None:
        self._held = ""
        self._until = ""
        """The end mark of the current literal part, if any."""

    def feed(self, text: str, *, final: bool) -> str:
        text = self._held + text
        self._held = ""
        if not final:
            edge = max(0, len(text) - _EDGE)
            open_at = _OPEN.search(text, edge)
            if open_at:
                text, self._held = text[: open_at.start()], text[open_at.start() :]
        if not self._until and "&" not in text and not _LITERAL.search(text):
            return text
        return "".join(self._mend(text))

    def _mend(self, text: str) -> list[str]:
        out: list[str] = []
        at = 0
        while at < len(text):
            if self._until:
                end = text.find(self._until, at)
                stop = len(text) if end < 0 else end + len(self._until)
                out.append(text[at:stop])
                if end >= 0:
                    self._until = ""
            else:
                literal = _LITERAL.search(text, at)
                stop = literal.end() if literal else len(text)
                out.append(_NAMED.sub(_by_number, text[at:stop]))
                if literal:
                    self._until = _ENDS[literal[0]]
            at = stop
        return out


def _by_number(found: re.Match[str]) -> str:
    return _NUMBERS[found[1]]


def _declares_entities(text: str) -> bool:
    for found in _ENTITY.finditer(text):
        if not found[0].startswith("<!--"):
            return found[0] == "<!ENTITY"
    return False


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
