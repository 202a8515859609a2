"""CSV: one row per item, one column per key, nested values as JSON text.

The header must stand first, but the keys are known only at the end. So the first batch fixes
the header, columns that appear later are appended on the right, and rows are as wide as what
was known when they were written. Only if columns were added, `finish` copies the file once
with the full header and the short rows filled up; otherwise it is a rename.
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
    """The columns so far, and from which byte of the part on the rows have how many of them."""

    columns: tuple[str, ...] = ()
    widths: tuple[tuple[int, int], ...] = ()


class Csv:
    """An exporter that writes RFC 4180 CSV in UTF-8.

    Spreadsheets run a cell that starts like a formula, and scraped text is not ours: such cells
    get a leading apostrophe unless they are plain numbers. `raw` leaves them as they are.
    """

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
        shape = self._widened(rows, at.bytes)
        lines = [[cell(row.get(name), raw=self._raw) for name in shape.columns] for row in rows]
        if not at.bytes:
            lines.insert(0, self._header(shape))
        self._file.append(csv_lines(lines), items[-1].seq, shape)
        self._shape = shape

    def finish(self) -> bool:
        return self._file.finish(rewrite=self._fill_up if len(self._shape.widths) > 1 else None)

    def close(self) -> None:
        self._file.close()

    def _widened(self, rows: list[dict[str, Raw]], offset: int) -> Shape:
        known = dict.fromkeys(self._shape.columns)
        for row in rows:
            known.update(dict.fromkeys(row))
        if len(known) == len(self._shape.columns):
            return self._shape
        return Shape(tuple(known), (*self._shape.widths, (offset, len(known))))

    def _header(self, shape: Shape) -> list[str]:
        return [cell(name, raw=self._raw) for name in shape.columns]

    def _fill_up(self, source: BinaryIO, target: BinaryIO) -> None:
        """Copy the part with the full header and every row as wide as it. One record in memory."""
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
    """An item by its keys, each value still as JSON. Raises ExportError."""
    try:
        return _decode(item.body) or {_LONE: Raw(b"null")}
    except msgspec.ValidationError:
        return {_LONE: Raw(item.body)}
    except msgspec.DecodeError as error:
        raise ExportError(
            f"item {item.seq} is not JSON: {error}", hint="export to .jsonl to see it as it is"
        ) from error


def cell(value: Raw | str | None, *, raw: bool = False) -> str:
    """A value (JSON, or plain text) as the text of its cell, see `Csv` about formulas."""
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
    # NUL goes first: readers stop at it or drop it, and then "\0=1" is a formula.
    text = text.replace("\0", "")
    if not text.startswith(_FORMULA) or _NUMBER.fullmatch(text):
        return text
    return f"'{text}"


def csv_lines(lines: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    # CR LF not only because the RFC says so: with a lone LF this writer leaves a lone CR unquoted.
    csv.writer(text, lineterminator="\r\n").writerows(lines)
    return text.getvalue().encode(errors="replace")


def _records(source: BinaryIO) -> Iterator[bytes]:
    """Whole records: a line break inside quotes does not end one. Not `csv.reader`, which has
    a process-wide limit on the length of a cell that page text exceeds."""
    held: list[bytes] = []
    quoted = False
    for line in source:
        held.append(line)
        # An odd number of quotes opens or closes a cell; a doubled one inside changes nothing.
        quoted ^= line.count(b'"') % 2 == 1
        if not quoted:
            yield b"".join(held)
            held.clear()
