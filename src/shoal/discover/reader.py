"""Reading one file: a sitemap, an index, a feed or a list, recognised by its content.

    reader = Reader(url)
    for piece in pieces:
        entries += reader.feed(piece)
    entries += reader.close()

Content types and file names are ignored: they are wrong too often. Nothing raises, whatever the bytes; what
could be read counts, and `trouble` says why there is no more. Memory does not grow with the file, except for
JSON, which has a limit of its own.
"""

from __future__ import annotations

import re
from typing import Literal

from shoal.discover import feed as feeds
from shoal.discover import sitemap as sitemaps
from shoal.discover.entry import Child, Entry
from shoal.discover.text import STEP, Damaged, Decoder, Plain
from shoal.discover.xml import XmlReader
from shoal.errors import BadUrl

Kind = Literal["", "sitemap", "index", "feed", "list", "page", "unknown"]

MAX_BYTES = 50 * 1024 * 1024
MAX_URLS = 50_000
"""The protocol's limits for one sitemap; the rest of a larger one is left out."""
_START = 1024
"""Bytes needed to recognise what a file is."""
_COMMENT = re.compile(r"<!--.*?-->|<\?.*?\?>", re.DOTALL)
_HTML = re.compile(r"\s*<(?:!doctype\s+html|html|head|body|script)\b", re.IGNORECASE)
_DECLARATION = re.compile(r"<\?xml\b[^>]{0,500}\?>")
_PROSE = 64 * 1024
"""A text without a URL in its first characters, this many, is not a list."""


class Reader:
    """Reads one file. Relative URLs are resolved against `url`, its address."""

    def __init__(
        self, url: str, *, max_bytes: int = MAX_BYTES, max_urls: int = MAX_URLS, images: bool = False
    ) -> None:
        self.url = url
        self.kind: Kind = ""
        self.trouble = ""
        self.found = 0
        self.bad = 0
        """Number of records without a usable URL."""
        self.size = 0
        """Decoded bytes so far."""
        self._max_bytes = max_bytes
        self._max_urls = max_urls
        self._images = images
        self._plain = Plain()
        self._decoder = Decoder()
        self._start = b""
        self._begun = False
        self._over = False
        self._xml: XmlReader | None = None
        self._list: sitemaps.ListReader | None = None
        self._json: list[str] | None = None
        self._length = 0

    @property
    def over(self) -> bool:
        """Whether more data would change nothing."""
        return self._over

    def feed(self, data: bytes) -> list[Entry | Child]:
        """Returns the entries and files that `data` completes."""
        out: list[Entry | Child] = []
        try:
            for piece in self._plain.feed(data) if not self.over else ():
                self._bytes(piece, out)
                if self.over:
                    break
        except Damaged as damage:
            self._end(out, str(damage))
        return out

    def close(self) -> list[Entry | Child]:
        """Returns the rest. From here on `kind` and `trouble` are final."""
        out: list[Entry | Child] = []
        if not self._over:
            try:
                self._bytes(self._plain.close(), out)
                self._end(out, "")
            except Damaged as damage:
                self._end(out, str(damage))
        if not self.kind or (self.kind == "list" and not self.found):
            self.kind = "unknown"
        return out

    def _bytes(self, piece: bytes, out: list[Entry | Child]) -> None:
        room = self._max_bytes - self.size
        cut = len(piece) > room
        self.size += min(len(piece), room)
        piece = piece[:room] if cut else piece
        if not self._begun:
            piece = self._start = self._start + piece
            if len(piece) >= _START:
                self._begin()
        if self._begun:
            for at in range(0, len(piece), STEP):
                self._text(self._decoder.feed(piece[at : at + STEP]), out)
        if cut and not self._over:
            self._end(out, f"it is larger than {self._max_bytes:,} bytes; the rest was left out")

    def _begin(self) -> None:
        self._begun = True
        self._start = b""

    def _end(self, out: list[Entry | Child], trouble: str) -> None:
        """No more bytes: parse the rest that was held back."""
        rest = b"" if self._begun else self._start
        self._begin()
        self._text(self._decoder.feed(rest, final=True), out, final=True)
        self.trouble = trouble or self.trouble
        self._over = True

    def _text(self, text: str, out: list[Entry | Child], *, final: bool = False) -> None:
        if self._over:
            return
        if not self.kind:
            text = self._sniff(text)
            if not self.kind:
                return
        if self._xml is not None:
            self._from_xml(self._xml, text, out, final=final)
        elif self._json is not None:
            self._from_json(self._json, text, out, final=final)
        elif self._list is not None:
            self._length += len(text)
            for line in self._list.feed(text, final=final):
                self._take_line(line, out)
            if not self.found and self._length > _PROSE:
                self._over = True

    def _sniff(self, text: str) -> str:
        """Set `kind` and choose the parser. Returns the text to continue with."""
        text = text.lstrip("\ufeff \t\r\n\f\0")
        if not text:
            return ""
        if text.startswith("<"):
            declaration = _DECLARATION.match(text)
            if declaration:
                text = text[declaration.end() :]  # the parser gets UTF-8, whatever the declaration says
            if _HTML.match(_COMMENT.sub("", text[: 4 * _START])):
                self.kind, self._over = "page", True
                return ""
            self.kind = "unknown"
            self._xml = XmlReader(images=self._images)
        elif text.startswith("{"):
            self.kind = "unknown"
            self._json = []
        else:
            self.kind = "list"
            self._list = sitemaps.ListReader()
        return text

    def _from_xml(self, xml: XmlReader, text: str, out: list[Entry | Child], *, final: bool) -> None:
        records = xml.feed(text, final=final)
        if self.kind == "unknown" and xml.root:
            self._set_kind(xml.root)
        of_record = sitemaps.of_record if xml.root in sitemaps.ROOTS else feeds.of_record
        for record in records:
            try:
                self._take(of_record(record, self.url), out)
            except BadUrl:
                self.bad += 1
        if xml.trouble:
            self.trouble = self.trouble or xml.trouble
        if xml.stopped:
            self._over = True

    def _set_kind(self, root: str) -> None:
        if root in sitemaps.ROOTS:
            self.kind = "index" if root == "sitemapindex" else "sitemap"
        elif root in feeds.ROOTS:
            self.kind = "feed"
        elif root.lower() == "html":
            self.kind = "page"

    def _from_json(self, parts: list[str], text: str, out: list[Entry | Child], *, final: bool) -> None:
        parts.append(text)
        self._length += len(text)
        if self._length > feeds.MAX_JSON:
            self.trouble = f"it is JSON of more than {feeds.MAX_JSON:,} characters"
            self._over = True
        if not final or self._over:
            return
        try:
            entries, bad = feeds.of_json("".join(parts), self.url)
        except ValueError as error:
            self.trouble = str(error)
            return
        self.kind = "feed"
        self.bad += bad
        for entry in entries:
            self._take(entry, out)

    def _take_line(self, line: str, out: list[Entry | Child]) -> None:
        try:
            self._take(Entry(sitemaps.resolve_url(line, self.url), self.url), out)
        except BadUrl:
            self.bad += 1

    def _take(self, listed: Entry | Child | None, out: list[Entry | Child]) -> None:
        if listed is None:
            self.bad += 1
        elif self.found < self._max_urls:
            self.found += 1
            out.append(listed)
        elif not self._over:
            self.trouble = f"it has more than {self._max_urls:,} URLs; the rest was left out"
            self._over = True
