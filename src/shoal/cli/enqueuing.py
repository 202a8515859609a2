"""URLs that are being enqueued: their source, and a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from shoal.cli.output import talk
from shoal.discover.urlfile import read_urls


class Source:
    """The URLs of a file, or of standard input (`-`), and how much of it has been read."""

    def __init__(self, name: str) -> None:
        self._place = None if name == "-" else Path(name)
        self._file: IO[bytes] | None = None
        # A pipe has no size; a missing file is reported when it is read.
        regular = self._place is not None and self._place.is_file()
        self.size = self._place.stat().st_size if self._place and regular else 0

    def __iter__(self) -> Iterator[str]:
        if self._place is None:
            return read_urls(sys.stdin.buffer)
        return read_urls(self._place, self._remember)

    @property
    def position(self) -> int:
        """Bytes read so far, of `size`. Equal to it once the file is read to its end."""
        if self._file is None:
            return 0
        return self.size if self._file.closed else self._file.tell()

    def _remember(self, file: IO[bytes]) -> None:
        self._file = file if self.size else None


class Bar:
    """A progress bar on a terminal; nothing elsewhere. Shows how much of the file is read, the number of
    URLs, their rate and the time left. Call it with the number of URLs so far."""

    def __init__(self, source: Source | None, *, limit: int | None = None, quiet: bool = False) -> None:
        self._source = source
        self._limit = limit
        self._live = not quiet and sys.stderr.isatty()
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[urls]}"),
                TimeRemainingColumn(),
                console=talk(),
                transient=True,
            )
            size = self._source.size if self._source is not None else 0
            self._task = self._progress.add_task("enqueue", total=self._limit or size or None, urls="")
            self._progress.start()
        return self

    def __call__(self, urls: int) -> None:
        if not self._live:
            return
        spent = time.monotonic() - self._started
        text = f"{urls:,} URLs" + (f"  {urls / spent:,.0f}/s" if spent > 0 else "")
        read = self._source.position if self._source is not None else 0
        self._progress.update(self._task, completed=urls if self._limit else read, urls=text)

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()
