"""Works on a job to its end in this process, and sums up how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress

import msgspec

from shoal import events
from shoal.app.outcome import Seen, nothing_fetched
from shoal.app.session import Session
from shoal.errors import ExportError, FrontierError, NothingFetched, ungrouped
from shoal.export.follow import follow
from shoal.export.formats import exporter_for
from shoal.export.port import Exporter
from shoal.frontier.notes import Cursor
from shoal.frontier.port import Frontier
from shoal.model import Job, JobState

GIVE_UP_AFTER = 60.0
"""Seconds that a run waits for a frontier that fails, unless the setting says otherwise: its caller waits."""


class Summary(msgspec.Struct, frozen=True):
    """How a crawl ended."""

    job: str
    status: str
    pages: int
    items: int
    failed: int
    dead: int
    seconds: float
    pages_per_second: float
    out: str | None


class Run:
    """Works on a job to its end in this process, with its export beside it."""

    def __init__(
        self,
        session: Session,
        job: str,
        *,
        out: str | None = None,
        watch: events.Watcher | None = None,
        frontier: Frontier | None = None,
    ) -> None:
        """`frontier` is where the worker here gets its leases, if not from the session's."""
        self.session = session
        self.job = job
        self.out = out
        self.ended = asyncio.Event()
        self._seen = Seen()
        self._worker = session.worker(
            job=job,
            watch=events.all_of(self._seen.watch, watch),
            give_up_after=GIVE_UP_AFTER,
            frontier=frontier,
        )
        self._started = time.perf_counter()
        self.before = 0
        """Pages that earlier runs of the job fetched."""
        self.nothing: NothingFetched | None = None
        """Why the finished job could fetch nothing; None if it fetched something."""
        self.spared = False
        """Whether an existing output file was left unchanged, because the job found no items."""

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._started

    @property
    def running(self) -> int:
        return self._worker.running

    @property
    def stopped(self) -> bool:
        return self._worker.stopped

    def stop(self) -> None:
        self._worker.stop()

    async def to_end(self, work: Awaitable[None] | None = None) -> Summary:
        """Works on the job (or awaits `work`, if other processes do the work), exports, and sums up."""
        session, job = self.session, self.job
        counts = (await session.frontier.job(job)).counts
        self.before = counts.done - counts.skipped
        exporter = exporter_for(self.out, job) if self.out else None
        try:
            with ungrouped():
                async with asyncio.TaskGroup() as group:
                    if exporter is not None:
                        group.create_task(self._export(exporter))
                    try:
                        await (work if work is not None else self._worker.run())
                    finally:
                        self.ended.set()
            view = await session.frontier.job(job)
            if exporter is not None and view.state is JobState.DONE:
                self.spared = not await asyncio.to_thread(exporter.finish)
        finally:
            self.ended.set()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        view = await session.frontier.job(job)
        self.nothing = await nothing_fetched(session, view, self._seen if work is None else None)
        return summarise(view, self.seconds, self.out, self.before)

    async def _export(self, exporter: Exporter) -> None:
        frontier = self.session.frontier
        try:
            cursor = Cursor(frontier.notes, self.job, f"file:{self.out}")
            await follow(frontier, self.job, exporter, cursor=cursor, ended=self.ended)
        except ExportError:
            await self.pause()
            raise

    async def pause(self) -> None:
        """Pauses the job, because its items cannot be written: this process stops working on it, and it can
        be resumed."""
        with suppress(FrontierError):
            await self.session.frontier.update_job(self.job, state=JobState.PAUSED)


def summarise(job: Job, seconds: float, out: str | None, before: int = 0) -> Summary:
    """Returns the summary of a job. `before` counts the pages that earlier runs fetched."""
    counts = job.counts
    pages = counts.done - counts.skipped
    status = "interrupted" if job.state is JobState.RUNNING else job.state.value
    return Summary(
        job=job.id,
        status=status,
        pages=pages,
        items=counts.items,
        failed=sum(job.errors.values()),
        dead=counts.dead + counts.expired,
        seconds=round(seconds, 3),
        pages_per_second=round((pages - before) / seconds, 2) if seconds > 0 else 0.0,
        out=out,
    )
