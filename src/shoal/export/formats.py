"""Which exporter writes a file: its ending says so."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.addresses import shown
from shoal.errors import UsageError
from shoal.export.port import Exporter

ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".md/", "/")
"""What `exporter_for` understands; `/` is a directory with one Markdown file per item."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def exporter_for(out: str, job: str, *, csv_raw: bool = False) -> Exporter:
    """The exporter for `out`, chosen by its ending. Touches nothing until it is opened.

    Raises UsageError for an address, and for an ending nobody writes; MissingExtra for one whose library
    is not there.
    """
    # A colon alone makes no address: `a:b.jsonl` is a file.
    if scheme := _ADDRESS.match(out):
        raise UsageError(
            f"cannot export to {shown(out)!r}: nothing here writes to {scheme[0]}",
            hint=f"give the path of a file that ends in one of {' '.join(ENDINGS)}",
        )
    path, ending = Path(out), Path(out).suffix.lower()
    if out.endswith("/"):
        from shoal.export.markdown import Markdown

        return Markdown(path, job)
    if ending in (".jsonl", ".ndjson"):
        from shoal.export.jsonl import JsonLines

        return JsonLines(path, job)
    if ending == ".json":
        from shoal.export.jsonl import JsonArray

        return JsonArray(path, job)
    if ending == ".csv":
        from shoal.export.csv import Csv

        return Csv(path, job, raw=csv_raw)
    if ending == ".parquet":
        from shoal.export.parquet import Parquet

        return Parquet(path, job)
    what = f"the ending {ending!r} is not one of an export" if ending else "the ending tells the format"
    raise UsageError(f"cannot export to {out!r}: {what}", hint=f"use one of {' '.join(ENDINGS)}")
