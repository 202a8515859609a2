"""A job's items as responses. Everything but a page of JSON is streamed: a million items take the memory of
one batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import mkdtemp

import msgspec
from starlette.responses import Response, StreamingResponse

from shoal.api.problems import Problem
from shoal.app.views import Format, status_of
from shoal.errors import MissingExtra
from shoal.export.csv import cell, csv_lines, row_of
from shoal.export.follow import export_all
from shoal.export.formats import exporter_for
from shoal.frontier.port import Backend
from shoal.model import Item, Job
from shoal.scrape.site import FIELDS

BATCH_BYTES = 256 * 1024
"""Approximate size of one read: items of one job differ little in size. Formatting a batch delays other
requests, as CSV by 5 ms."""
USUAL_ITEMS, PAGE_ITEMS = 1000, 10_000
"""Default and maximum number of items in a page of JSON."""
PAGE_BYTES = 8 * 1024 * 1024
"""A page of JSON ends here even if more items were requested."""
TYPES: dict[Format, str] = {
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "markdown": "text/markdown; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
_ENDINGS: dict[Format, str] = {"markdown": "md"}


async def batches(
    frontier: Backend, job: str, after: int, limit: int | None = None
) -> AsyncIterator[list[Item]]:
    """Yields the items after a position, about BATCH_BYTES at a time and at most `limit` in all."""
    size, left = 16, math.inf if limit is None else limit
    while left and (items := await frontier.items(job, after=after, limit=int(min(size, left)))):
        yield items
        after = items[-1].seq
        left -= len(items)
        weight = sum(len(item.body) for item in items) // len(items) + 1
        size = max(1, min(1000, BATCH_BYTES // weight))


async def page(frontier: Backend, job: Job, after: int, limit: int) -> Response:
    """Returns `{job_id, status, items, next_cursor}`. Items are stored as JSON and are not parsed again."""
    bodies: list[bytes] = []
    size, last, more = 0, after, False
    async for items in batches(frontier, job.id, after):
        for item in items:
            if len(bodies) >= limit or size >= PAGE_BYTES:
                more = True
                break
            bodies.append(item.body)
            size += len(item.body)
            last = item.seq
        if more:
            break
    head = msgspec.json.encode({"job_id": job.id, "status": status_of(job)})
    cursor = f'"{last}"'.encode() if more else b"null"
    body = head[:-1] + b',"items":[' + b",".join(bodies) + b'],"next_cursor":' + cursor + b"}"
    return Response(body, media_type="application/json")


def stream(frontier: Backend, job: Job, form: Format, after: int, limit: int | None = None) -> Response:
    """Returns the items after a position as one document. Raises Problem if a library for it is missing."""
    headers = {"Content-Disposition": f'attachment; filename="items.{_ENDINGS.get(form, form)}"'}
    match form:
        case "csv":
            chunks = _csv(frontier, job, after, limit)
        case "markdown":
            chunks = _markdown(frontier, job, after, limit)
        case "parquet":
            chunks = _file(_Log(frontier, after, limit), job, _temporary_file(job, form))
        case _:
            chunks = _lines(frontier, job, after, limit)
    return StreamingResponse(chunks, headers=headers, media_type=TYPES[form])


async def _lines(frontier: Backend, job: Job, after: int, limit: int | None) -> AsyncIterator[bytes]:
    async for items in batches(frontier, job.id, after, limit):
        yield b"".join(item.body.replace(b"\n", b" ") + b"\n" for item in items)


async def _csv(frontier: Backend, job: Job, after: int, limit: int | None) -> AsyncIterator[bytes]:
    """The header comes first, so the columns must be known: those of the site scraper are; for other scrapers
    the log is read once beforehand."""
    columns = await _columns(frontier, job, after, limit)
    yield csv_lines([[cell(column) for column in columns]])
    async for items in batches(frontier, job.id, after, limit):
        rows = [row_of(item) for item in items]
        yield csv_lines([[cell(row.get(name)) for name in columns] for row in rows])


async def _columns(frontier: Backend, job: Job, after: int, limit: int | None) -> list[str]:
    spec = job.spec
    if spec.scraper == "site":
        known = [name for name in FIELDS if not spec.fields or name in spec.fields or name == "url"]
        return [*known, "worker"] if spec.record_worker else known
    found: dict[str, None] = {}
    async for items in batches(frontier, job.id, after, limit):
        for item in items:
            found.update(dict.fromkeys(row_of(item)))
    return list(found)


async def _markdown(frontier: Backend, job: Job, after: int, limit: int | None) -> AsyncIterator[bytes]:
    """Yields one document: a heading, the URL and the text of each item."""
    async for items in batches(frontier, job.id, after, limit):
        yield "".join(_section(item.body) for item in items).encode(errors="replace")


def _section(body: bytes) -> str:
    fields = msgspec.json.decode(body)
    if not isinstance(fields, dict):
        fields = {"text": str(fields)}
    url = str(fields.get("final_url") or fields.get("url") or "")
    title = " ".join(str(fields.get("title") or url or "Untitled").split())
    text = fields.get("markdown") or fields.get("text") or ""
    source = f"<{url}>\n\n" if url else ""
    return f"# {title}\n\n{source}{str(text).strip()}\n\n---\n\n"


class _Log:
    """A part of the item log, for an export that always starts anew: it keeps no cursor."""

    def __init__(self, frontier: Backend, after: int, limit: int | None) -> None:
        self._frontier = frontier
        self._after = after
        self._left = limit

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        most = limit if self._left is None else min(limit, self._left)
        if not most:
            return []
        found = await self._frontier.items(job, after=max(after, self._after), limit=most)
        if self._left is not None:
            self._left -= len(found)
        return found


def _temporary_file(job: Job, form: Format) -> Path:
    """Returns a path for a file of this format. Raises Problem if its exporter cannot be imported."""
    try:
        exporter_for(f"items.{form}", job.id)
    except MissingExtra as error:
        raise Problem(501, str(error), hint=f"{error.hint} on the server, or use another format") from None
    return Path(mkdtemp(prefix="shoal-")) / f"items.{form}"


async def _file(log: _Log, job: Job, path: Path) -> AsyncIterator[bytes]:
    """Yields the document of a format with its index at the end, which is first written to disk."""
    try:
        await export_all(log, job.id, exporter_for(str(path), job.id), None)
        with await asyncio.to_thread(path.open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, BATCH_BYTES):
                yield chunk
    finally:
        await asyncio.to_thread(_remove, path.parent)


def _remove(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()
