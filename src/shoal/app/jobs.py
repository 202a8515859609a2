"""Existing jobs: resuming them, and reading and exporting their items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from shoal.app.session import Session
from shoal.errors import FrontierCorrupt, FrontierError, UsageError
from shoal.export.follow import export_all
from shoal.export.formats import exporter_for
from shoal.frontier.notes import Cursor
from shoal.model import Job, JobSpec, JobState


async def find_unfinished(session: Session, spec: JobSpec) -> Job | None:
    """Returns the newest job with the same start and scraper that is not cancelled; it may be finished."""
    for job in await session.frontier.jobs(limit=1000):
        same = (job.spec.start, job.spec.scraper) == (spec.start, spec.scraper)
        if same and job.state is not JobState.CANCELLED:
            return job
    return None


async def resume_job(session: Session, job: str) -> Job:
    """Resumes a paused job. Raises UsageError if it is cancelled."""
    check_not_cancelled(await session.frontier.job(job), "job")
    return await session.frontier.update_job(job, state=JobState.RUNNING)


def check_not_cancelled(job: Job, what: str) -> None:
    """Raises UsageError if the job is cancelled: URLs added to it would be dropped."""
    if job.state is JobState.CANCELLED:
        raise UsageError(
            f"{what} {job.id} is cancelled",
            hint=f"a cancelled {what} cannot be resumed; start a new one with another name",
        )


async def items_as_they_come(session: Session, job: str, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """Yields item bodies from the first to the last, while the job runs. Retries a failing frontier until the
    job's worker has given up."""
    position = 0
    while True:
        last = ended.is_set()
        try:
            items = await session.frontier.items(job, after=position, limit=500)
        except FrontierCorrupt:
            raise
        except FrontierError:
            if last:
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await ended.wait()
            continue
        for item in items:
            yield item.body
            position = item.seq
        if items:
            continue
        if last:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await ended.wait()


async def export_job(session: Session, job: str, out: str, *, csv_raw: bool = False) -> int | None:
    """Writes a job's items to a file, from where an earlier export stopped. Returns the number of items;
    None if the job has none, and then an existing file is not changed."""
    exporter = exporter_for(out, job, csv_raw=csv_raw)
    await session.frontier.job(job)
    cursor = Cursor(session.frontier.notes, job, f"file:{out}")
    return await export_all(session.frontier, job, exporter, cursor)
