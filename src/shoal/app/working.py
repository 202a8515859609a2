"""A job worked on to its end in this process, and how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

import msgspec

from shoal import events
from shoal.app.session import Session
from shoal.errors import first_of
from shoal.export.follow import follow
from shoal.export.formats import exporter_for
from shoal.model import Job, JobState


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
    """A job worked on to its end in this process, with its export beside it."""

    def __init__(
        self, session: Session, job: str, *, out: str | None = None, watch: events.Watcher = events.nobody
    ) -> None:
        self.session = session
        self.job = job
        self.out = out
        self.ended = asyncio.Event()
        self._worker = session.worker(job=job, watch=watch)
        self._started = time.perf_counter()
        self.before = 0
        """Pages that earlier runs of the job brought."""

    @property
    def seconds(self) -> float:
        """Since it began."""
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
        """Work (or wait for `work`, when other processes do it), export, and sum up."""
        session, job = self.session, self.job
        counts = (await session.frontier.job(job)).counts
        self.before = counts.done - counts.skipped
        exporter = exporter_for(self.out, job) if self.out else None
        try:
            async with asyncio.TaskGroup() as group:
                if exporter is not None:
                    group.create_task(
                        follow(session.frontier, job, exporter, sink=f"file:{self.out}", ended=self.ended)
                    )
                try:
                    await (work if work is not None else self._worker.run())
                finally:
                    self.ended.set()
            view = await session.frontier.job(job)
            if exporter is not None and view.state is JobState.DONE:
                await asyncio.to_thread(exporter.finish)
        except* Exception as group_error:
            raise first_of(group_error) from None
        finally:
            self.ended.set()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        view = await session.frontier.job(job)
        return summarise(view, self.seconds, self.out, self.before)


def summarise(job: Job, seconds: float, out: str | None, before: int = 0) -> Summary:
    """`before` are the pages that earlier runs of the job brought."""
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
