"""Following the item log: all exports of items go through here.

The crawl never waits for an exporter. A follower reads the log after a cursor, passes batches to an exporter
in a thread, and moves the cursor only after the exporter has returned, when the batch is durable. So a crash
repeats at most one batch, which is harmless for exporters.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

from shoal.errors import FrontierCorrupt, FrontierError
from shoal.export.port import Exporter
from shoal.frontier.notes import Cursor
from shoal.model import Item

BATCH = 1000
"""Items per write: one fsync per batch, and one batch in memory at a time."""

logger = logging.getLogger("shoal.export")

P = ParamSpec("P")
T = TypeVar("T")


class ItemLog(Protocol):
    """The part of `Catalog` that a follower needs."""

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]: ...


async def follow(
    log: ItemLog,
    job: str,
    exporter: Exporter,
    *,
    cursor: Cursor | None,
    ended: asyncio.Event,
    poll: float = 0.2,
    give_up_after: float = 60.0,
) -> int:
    """Open the exporter and write the job's items to it until `ended` is set and all are written. Without a
    `cursor` it begins with the first item and saves no position. Once `ended` is set, it raises the error of
    a log that cannot be read for `give_up_after` seconds. Before that, the worker decides.

    Returns the number of items written. The caller calls `finish` when the job is over, otherwise `close`. A
    cancellation waits for the batch being written, so that no thread touches the exporter afterwards.
    """
    position = await _run_blocking(exporter.open, 0 if cursor is None else await cursor.get())
    count = 0
    failing_since = 0.0
    while True:
        # Checked before reading: items stored after the last read but before `ended` are still written.
        last = ended.is_set()
        try:
            items = await log.items(job, after=position, limit=BATCH)
        except FrontierCorrupt:
            raise
        except FrontierError as error:
            # While the job runs, its worker waits too, and logs it.
            if last and not failing_since:
                failing_since = time.monotonic()
                logger.warning("%s; the export retries for %g s", error, give_up_after)
            if last and time.monotonic() >= failing_since + give_up_after:
                raise
            await asyncio.sleep(poll)
            continue
        failing_since = 0.0
        if items:
            await _run_blocking(exporter.write, items)
            position = items[-1].seq
            if cursor is not None:
                with suppress(FrontierError):  # the output itself records its position
                    await cursor.save(position)
            count += len(items)
            continue
        if last:
            return count
        with suppress(TimeoutError):
            async with asyncio.timeout(poll):
                await ended.wait()


async def export_all(log: ItemLog, job: str, exporter: Exporter, cursor: Cursor | None) -> int | None:
    """Write everything that the log holds now, and finish. Returns the number of items written; None if there
    are none and the output of an earlier job stays.

    If it fails or is cancelled, the exporter is closed and the next call continues from there.
    """
    ended = asyncio.Event()
    ended.set()
    try:
        count = await follow(log, job, exporter, cursor=cursor, ended=ended)
        replaced = await _run_blocking(exporter.finish)
    finally:
        await _run_blocking(exporter.close)
    return count if replaced else None


async def _run_blocking(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread. A cancellation is delivered only after the call has returned."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            # Further cancellations mean the same.
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # the cancellation takes precedence; unread, asyncio would log it as lost
        raise
