"""CSV: one row per item, one column per key, nested values as JSON text.

The header must come first, but the keys are known only at the end. So the first batch fixes the header,
columns that appear later are appended on the right, and each row is as wide as the columns known when it was
written. Only if columns were added does `finish` copy the file once, with the full header and the short rows
filled up; otherwise it renames the file.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Raw, Struct

from shoal.errors import ExportError
from shoal.export.files import PartFile
from shoal.model import Item

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_LONE = "value"
"""The column of an item that is not an object, and of objects without any key."""


_decode = msgspec.json.Decoder(dict[str, Raw]).decode


class Shape(Struct, frozen=True):
    """The columns so far, and how wide rows are."""

    columns: tuple[str, ...] = ()
    widths: tuple[tuple[int, int], ...] = ()
    """From each of these byte offsets of the part on, rows have this number of columns."""


class Csv:
    """An exporter that writes RFC 4180 CSV in UTF-8.

    Spreadsheets execute cells that start like a formula, and scraped text is not to be trusted: such cells
    get a leading apostrophe unless they are plain numbers. With `raw` they do not."""

    def __init__(self, out: Path, job: str, *, raw: bool = False) -> None:
        self._file = PartFile(out, job)
        self._raw = raw
        self._shape = Shape()

    def open(self, seq: int) -> int:
        at = self._file.open()
        self._shape = msgspec.convert(at.state, Shape) if at.state is not None else Shape()
        return at.seq

    def write(self, items: Sequence[Item]) -> None:
        at = self._file.at
        rows = [row_of(item) for item in items if item.seq > at.seq]
        if not rows:
            return
        shape = self._shape_with(rows, at.bytes)
        lines = [[cell(row.get(name), raw=self._raw) for name in shape.columns] for row in rows]
        if not at.bytes:
            lines.insert(0, self._header(shape))
        self._file.append(csv_lines(lines), items[-1].seq, shape)
        self._shape = shape

    def finish(self) -> bool:
        return self._file.finish(rewrite=self._fill_up if len(self._shape.widths) > 1 else None)

    def close(self) -> None:
        self._file.close()

    def _shape_with(self, rows: list[dict[str, Raw]], offset: int) -> Shape:
        """Returns the shape that includes the columns of `rows`, which begin at `offset`."""
        known = dict.fromkeys(self._shape.columns)
        for row in rows:
            known.update(dict.fromkeys(row))
        if len(known) == len(self._shape.columns):
            return self._shape
        return Shape(tuple(known), (*self._shape.widths, (offset, len(known))))

    def _header(self, shape: Shape) -> list[str]:
        return [cell(name, raw=self._raw) for name in shape.columns]

    def _fill_up(self, source: BinaryIO, target: BinaryIO) -> None:
        """Copy the part with the full header and every row filled up to it, one record at a time."""
        target.write(csv_lines([self._header(self._shape)]))
        records = _records(source)
        offset = len(next(records))  # the old header
        total, widths = len(self._shape.columns), list(self._shape.widths)
        missing = 0
        for record in records:
            while widths and widths[0][0] <= offset:
                missing = total - widths.pop(0)[1]
            target.write(record[:-2] + b"," * missing + b"\r\n" if missing else record)
            offset += len(record)


def row_of(item: Item) -> dict[str, Raw]:
    """Returns the values of an item by key, still as JSON. Raises ExportError."""
    try:
        return _decode(item.body) or {_LONE: Raw(b"null")}
    except msgspec.ValidationError:
        return {_LONE: Raw(item.body)}
    except msgspec.DecodeError as error:
        raise ExportError(
            f"item {item.seq} is not JSON: {error}", hint="export to .jsonl to see it unchanged"
        ) from error


def cell(value: Raw | str | None, *, raw: bool = False) -> str:
    """Returns a value (JSON, or plain text) as the text of its cell. About formulas see `Csv`."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("\0", "") if raw else _guarded(value)
    text = bytes(value)
    if text == b"null":
        return ""
    if text.startswith(b'"'):
        return cell(msgspec.json.decode(text, type=str), raw=raw)
    # Numbers, true and false, lists and objects: their JSON text, digit for digit.
    return text.decode(errors="replace")


def _guarded(text: str) -> str:
    # NUL is removed first: readers stop at it or drop it, and then "\0=1" is a formula.
    text = text.replace("\0", "")
    if not text.startswith(_FORMULA) or _NUMBER.fullmatch(text):
        return text
    return f"'{text}"


def csv_lines(lines: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    # CR LF not only because the RFC requires it: with LF alone, this writer leaves a lone CR unquoted.
    csv.writer(text, lineterminator="\r\n").writerows(lines)
    return text.getvalue().encode(errors="replace")


def _records(source: BinaryIO) -> Iterator[bytes]:
    """Yields whole records: a line break inside quotes does not end one. Not `csv.reader`, which has a
    process-wide limit on the length of a cell that the text of pages exceeds."""
    lines: list[bytes] = []
    quoted = False
    for line in source:
        lines.append(line)
        # An odd number of quotes opens or closes a cell; a doubled one inside changes nothing.
        quoted ^= line.count(b'"') % 2 == 1
        if not quoted:
            yield b"".join(lines)
            lines.clear()
