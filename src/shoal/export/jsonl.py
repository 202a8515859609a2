"""JSON Lines, and a JSON array: item bodies are stored as JSON and copied, never re-encoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.export.files import PartFile
from shoal.model import Item


class JsonLines:
    """An exporter that writes one item per line."""

    def __init__(self, out: Path, job: str) -> None:
        self._file = PartFile(out, job)

    def open(self, seq: int) -> int:
        return self._file.open().seq

    def write(self, items: Sequence[Item]) -> None:
        bodies = fresh_bodies(items, self._file.at.seq)
        if bodies:
            self._file.append(b"\n".join(bodies) + b"\n", items[-1].seq)

    def finish(self) -> bool:
        return self._file.finish()

    def close(self) -> None:
        self._file.close()


class JsonArray:
    """An exporter that writes one array with one item per line.

    The closing bracket comes with `finish`, so until then the part is not valid JSON.
    """

    def __init__(self, out: Path, job: str) -> None:
        self._file = PartFile(out, job)

    def open(self, seq: int) -> int:
        return self._file.open().seq

    def write(self, items: Sequence[Item]) -> None:
        at = self._file.at
        bodies = fresh_bodies(items, at.seq)
        if bodies:
            self._file.append((b",\n" if at.bytes else b"[\n") + b",\n".join(bodies), items[-1].seq)

    def finish(self) -> bool:
        return self._file.finish(b"\n]\n" if self._file.at.bytes else b"[]\n")

    def close(self) -> None:
        self._file.close()


def fresh_bodies(items: Sequence[Item], seq: int) -> list[bytes]:
    """Returns the bodies of the items after `seq`, each on one line.

    A raw line break in JSON can only be between tokens, where a space means the same. Left in place it would
    split the record for readers of lines.
    """
    return [
        item.body.replace(b"\r", b" ").replace(b"\n", b" ") if b"\n" in item.body else item.body
        for item in items
        if item.seq > seq
    ]
