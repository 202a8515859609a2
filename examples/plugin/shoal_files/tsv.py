"""An exporter of your own: tab-separated values, one line for each item, the columns of the first item.

`PartFile` brings what all exporters to files share: readers never see half a file, and a crawl that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.export.files import PartFile
from shoal.model import Item


class Tsv:
    def __init__(self, out: str, job: str) -> None:
        self._file = PartFile(Path(out), job)

    def open(self, seq: int) -> int:
        return self._file.open().seq

    def write(self, items: Sequence[Item]) -> None:
        at = self._file.at
        new: list[dict[str, Any]] = [msgspec.json.decode(item.body) for item in items if item.seq > at.seq]
        if not new:
            return
        columns: list[str] = at.state or list(new[0])
        lines = [] if at.state else ["\t".join(columns)]
        lines += ["\t".join(cell(item.get(column)) for column in columns) for item in new]
        self._file.append("".join(f"{line}\n" for line in lines).encode(), items[-1].seq, columns)

    def finish(self) -> bool:
        return self._file.finish()

    def close(self) -> None:
        self._file.close()


def cell(value: Any) -> str:
    """A value without tabs and line breaks, which would end the cell."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return " ".join(text.split())
