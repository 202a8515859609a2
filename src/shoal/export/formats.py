"""Which exporter writes an output: the ending of a file or the scheme of an address says so.

A table has those that are built in, and imports them when they are asked for; other names are looked up
among installed packages (`plugins`). To add one: docs/guides/extending.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from shoal import plugins
from shoal.addresses import shown
from shoal.errors import UsageError
from shoal.export.port import Exporter

ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".md/", "/")
"""What is built in; `/` is a directory with one Markdown file per item."""

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


class MakeExporter(Protocol):
    def __call__(self, out: str, job: str) -> Exporter:
        """The exporter of a job's items to `out`, a path or an address. Touches nothing until it is
        opened."""
        ...


def exporter_for(out: str, job: str, *, csv_raw: bool = False) -> Exporter:
    """The exporter for `out`, chosen by its ending or its scheme. Touches nothing until it is opened.

    Raises UsageError for an ending or a scheme that nothing here writes; MissingExtra for one whose
    library is not there.
    """
    # A colon alone makes no address: `a:b.jsonl` is a file.
    if scheme := _ADDRESS.match(out):
        if (make := _plugged(scheme[1].lower())) is not None:
            return make(out, job)
        raise UsageError(f"cannot export to {shown(out)!r}: nothing here writes to {scheme[0]}", hint=_ways())
    if out.endswith("/"):
        return _markdown(out, job)
    ending = Path(out).suffix.lower()
    if ending == ".csv" and csv_raw:
        return _csv(out, job, raw=True)
    if (built_in := _EXPORTERS.get(ending)) is not None:
        return built_in(out, job)
    for name in _names(out):
        if (make := _plugged(name)) is not None:
            return make(out, job)
    what = f"no format has the ending {ending!r}" if ending else "the ending decides the format"
    raise UsageError(f"cannot export to {out!r}: {what}", hint=_ways())


def _names(out: str) -> Iterator[str]:
    """What an entry point for this file may be called: `warc.gz` before `gz`."""
    _, *parts = Path(out).name.lower().split(".")
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _plugged(name: str) -> MakeExporter | None:
    """The exporter that an installed package offers under this name. Raises BrokenPlugin."""
    found: MakeExporter | None = plugins.plugin(plugins.EXPORTERS, name) if name else None
    return found


def _ways() -> str:
    also = plugins.offered(plugins.EXPORTERS)
    more = f", or by an installed package {', '.join(also)}" if also else ""
    return (
        f"give the path of a file that ends in one of {' '.join(ENDINGS)}{more};"
        f" a package can add one by the entry point group {plugins.EXPORTERS}"
    )


# -- what is built in --------------------------------------------------------------------------


def _markdown(out: str, job: str) -> Exporter:
    from shoal.export.markdown import Markdown

    return Markdown(Path(out), job)


def _json_lines(out: str, job: str) -> Exporter:
    from shoal.export.jsonl import JsonLines

    return JsonLines(Path(out), job)


def _json(out: str, job: str) -> Exporter:
    from shoal.export.jsonl import JsonArray

    return JsonArray(Path(out), job)


def _csv(out: str, job: str, *, raw: bool = False) -> Exporter:
    from shoal.export.csv import Csv

    return Csv(Path(out), job, raw=raw)


def _parquet(out: str, job: str) -> Exporter:
    from shoal.export.parquet import Parquet

    return Parquet(Path(out), job)


_EXPORTERS: dict[str, MakeExporter] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
