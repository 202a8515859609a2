"""Decoding an untrusted file from bytes to text, piece by piece."""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator

STEP = 256 * 1024
"""Decoded bytes in one piece."""
_MAX_MEMBERS = 1024
"""Maximum number of concatenated gzip members: they are legal, but each costs a new decoder."""
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED = re.compile(rb"""\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z0-9_.-]{1,40})["']""")
_ENCODING = re.compile(
    r"iso-8859-(?:[2-9]|1[013-6])|(?:windows-|cp)125[0-8]|koi8-[ru]|shift_jis|euc-jp|iso-2022-jp|euc-kr"
    r"|gb2312|gbk|gb18030|big5"
)
"""Names that may be looked up in Python's codecs. Not any name: the registry also has zlib and rot13, and
remembers for ever every name that a server makes up."""
_LATIN = ("iso-8859-1", "iso8859-1", "latin1", "latin-1", "us-ascii", "ascii")
_ESCAPED = re.compile("[\udc80-\udcff]")
_AS_LATIN = {0xDC00 + byte: bytes([byte]).decode("cp1252", "replace") for byte in range(0x80, 0x100)}


class Damaged(Exception):
    """The rest of the file cannot be read. The part before it was."""


class Plain:
    """Decompresses a file if it is gzip, which is recognised by content, whatever its name and type say."""

    def __init__(self) -> None:
        self._start = b""
        self._zipped: bool | None = None
        self._decoder: zlib._Decompress | None = None
        self._members = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the pieces that `data` completes, of STEP bytes at most if it is gzip. Raises Damaged."""
        if self._zipped is None:
            self._start += data
            if len(self._start) < 2:
                return
            data, self._start = self._start, b""
            self._zipped = data.startswith(b"\x1f\x8b")
        if not self._zipped:
            yield data
            return
        try:
            yield from self._unzip(data)
        except zlib.error as error:
            raise Damaged(f"its gzip is damaged ({error})") from None

    def close(self) -> bytes:
        """Returns the rest that was held back. Raises Damaged if the file is truncated."""
        if self._decoder is not None:
            raise Damaged("its gzip is truncated")
        return self._start

    def _unzip(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._decoder is None:
                if self._members and not data.startswith(b"\x1f"):
                    return  # padding
                if self._members == _MAX_MEMBERS:
                    raise Damaged(f"its gzip has more than {_MAX_MEMBERS} parts")
                self._members += 1
                self._decoder = zlib.decompressobj(31)
            decoder = self._decoder
            piece = decoder.decompress(data, STEP)
            data = decoder.unconsumed_tail
            while piece:
                yield piece
                # Without input: the decoder may hold more output even after it has taken all input.
                piece = b"" if data or decoder.eof else decoder.decompress(b"", STEP)
            if decoder.eof:
                data, self._decoder = decoder.unused_data, None


class Decoder:
    """Decodes bytes to text. A byte-order mark takes precedence over the declaration; without both it is
    UTF-8, and a byte that is not valid UTF-8 is read as windows-1252. Never raises."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._utf8 = False

    def feed(self, data: bytes, final: bool = False) -> str:
        """Returns the text of `data`. The first call must have enough to see a declaration (1 KiB, or
        everything)."""
        if self._decoder is None:
            data = self._choose(data)
            assert self._decoder is not None
        try:
            text = self._decoder.decode(data, final)
        except UnicodeError:
            # Some multi-byte decoders raise in spite of "replace" if the data ends inside a character.
            self._decoder.reset()
            return "\ufffd"
        if self._utf8 and not text.isascii() and _ESCAPED.search(text):
            text = text.translate(_AS_LATIN)
        return text

    def _choose(self, data: bytes) -> bytes:
        for mark, name in _BOMS:
            if data.startswith(mark):
                self._use(name)
                return data[len(mark) :]
        if data.startswith(b"<\0"):
            self._use("utf-16-le")
        elif data.startswith(b"\0<"):
            self._use("utf-16-be")
        else:
            declared = _DECLARED.match(data, 0, 1024)
            self._use(declared[1].decode().lower() if declared else "utf-8")
        return data

    def _use(self, name: str) -> None:
        if name in _LATIN:
            name = "cp1252"  # as in browsers
        elif not _ENCODING.fullmatch(name) and not name.startswith("utf-16-"):
            name = "utf-8"
        self._utf8 = name == "utf-8"
        self._decoder = codecs.getincrementaldecoder(name)("surrogateescape" if self._utf8 else "replace")
