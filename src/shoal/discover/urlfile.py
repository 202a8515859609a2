"""URLs from a file or from standard input, however large: one line in memory at a time."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shoal.errors import UsageError
from shoal.urls import MAX_LENGTH

_LINE = MAX_LENGTH * 16 + 64
"""Maximum bytes kept of a line. Even with four-byte characters that is more than a URL may have, so
`urls.canonical` refuses a cut line as too long."""
_SAMPLE = 64 * 1024


def read_urls(source: Path | IO[bytes], opened: Callable[[IO[bytes]], None] | None = None) -> Iterator[str]:
    """Yields the lines of `source`, stripped, without blank ones and `#` comments.

    Gzip is recognised by content; of a file that ends in `.csv` or `.csv.gz` the first column is read.
    Nothing is validated: a line that is not a URL, is too long (it is cut) or is not UTF-8 (bad bytes are
    replaced) is passed on, so that the caller reports it as a bad URL. Raises UsageError, when iterated, for
    a file that cannot be read. `opened` receives the file object before anything is read; its position shows
    how far reading has come.
    """
    name = str(source) if isinstance(source, Path) else "standard input"
    with _usage_errors(name), _open(source, opened) as file:
        lines = _lines(file, name)
        if name.lower().removesuffix(".gz").endswith(".csv"):
            lines = _first_column(lines)
        for line in lines:
            url = line.strip()
            if url and not url.startswith("#"):
                yield url


@contextmanager
def _usage_errors(name: str) -> Iterator[None]:
    """Turn errors of reading into UsageErrors about `name`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        hint = "download or compress it again; the URLs before the damage were read"
        raise UsageError(f"{name} is damaged: {error}", hint=hint) from error
    except OSError as error:
        hint = "check the name and its permissions; `-` reads standard input"
        raise UsageError(f"cannot read {name}: {error.strerror or error}", hint=hint) from error
    except csv.Error as error:
        hint = "is a quote missing? a file with one URL per line and another ending needs no quotes"
        raise UsageError(f"{name} is not valid CSV: {error}", hint=hint) from error


@contextmanager
def _open(source: Path | IO[bytes], opened: Callable[[IO[bytes]], None] | None) -> Iterator[IO[bytes]]:
    if not isinstance(source, Path):
        # The caller's stream: it stays open.
        with _unzip(source) as stream:
            yield stream
        return
    with source.open("rb") as file:
        if opened is not None:
            opened(file)
        with _unzip(file) as stream:
            yield stream


@contextmanager
def _unzip(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    peek = getattr(stream, "peek", None)
    if peek is None or not _is_gzip(peek(2)):
        yield stream
        return
    with gzip.GzipFile(fileobj=stream) as plain:
        yield plain  # type: ignore[misc]  # a GzipFile reads like any binary stream


def _is_gzip(start: bytes) -> bool:
    return start.startswith(b"\x1f\x8b")


def _lines(file: IO[bytes], name: str) -> Iterator[str]:
    line = file.readline(_LINE)
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{name} is UTF-16", hint="save it as UTF-8")
    line = line.removeprefix(b"\xef\xbb\xbf")
    while line:
        if len(line) >= _LINE and not line.endswith(b"\n"):
            _skip_line(file)
        yield line.decode(errors="replace")
        line = file.readline(_LINE)


def _skip_line(file: IO[bytes]) -> None:
    rest = file.readline(_SAMPLE)
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(_SAMPLE)


def _first_column(lines: Iterable[str]) -> Iterator[str]:
    rows = csv.reader(lines)
    first = next((row for row in rows if row), None)
    if first and "://" in first[0]:
        yield first[0]
    for row in rows:
        if row:
            yield row[0]
