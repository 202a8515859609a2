"""Jobs that exist: how they go on, and where what they brought goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from shoal.app.processes import process_gone, process_name
from shoal.app.session import Session
from shoal.errors import UsageError
from shoal.export.follow import export_all
from shoal.export.formats import exporter_for
from shoal.frontier.move import Moved, Watch, move, moving
from shoal.frontier.parcel import arriving_key
from shoal.frontier.port import Backend
from shoal.model import Job, JobSpec, JobState


async def unfinished(session: Session, spec: JobSpec) -> Job | None:
    """The newest job that was asked for the same and can go on, or was finished already. Raises
    UsageError if it goes on elsewhere."""
    for job in await session.frontier.jobs(limit=1000):
        same = (job.spec.start, job.spec.scraper) == (spec.start, spec.scraper)
        if same and job.state is not JobState.CANCELLED:
            return job
        left = await moving(session.frontier, job.id) if same else None
        if left is not None and left.complete:
            raise UsageError(f"job {job.id!r} has moved to {left.to}", hint="give that with --frontier")
    return None


async def resume_job(session: Session, job: str) -> Job:
    """Let a paused job go on. Raises UsageError if it is cancelled or goes on elsewhere, and while it
    is still arriving from another frontier: half of it would run."""
    await can_go_on(session, await session.frontier.job(job), "job")
    if await session.frontier.noted(arriving_key(job)) is not None:
        raise UsageError(
            f"job {job!r} is still arriving from another frontier",
            hint="run `shoal copy` again: it completes the move and resumes the job",
        )
    return await session.frontier.resume(job)


async def can_go_on(session: Session, job: Job, what: str) -> None:
    """Raises UsageError for a job that is cancelled or has moved: what it is given would be dropped."""
    if job.state in (JobState.RUNNING, JobState.PAUSED):
        return
    left = await moving(session.frontier, job.id)
    if left is not None and left.complete:
        raise UsageError(
            f"{what} {job.id} is {job.state.value}: it has moved to {left.to}",
            hint="give that with --frontier",
        )
    if job.state is JobState.CANCELLED:
        raise UsageError(
            f"{what} {job.id} is cancelled",
            hint=f"that is for good; begin another {what} with another name",
        )


async def items_as_they_come(session: Session, job: str, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """Item bodies, from the first to the last, while the job runs."""
    position = 0
    while True:
        last = ended.is_set()
        items = await session.frontier.items(job, after=position, limit=500)
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


async def export_job(session: Session, job: str, out: str, *, csv_raw: bool = False) -> int:
    """Write a job's items to a file, from where an earlier export stopped."""
    await session.frontier.job(job)
    exporter = exporter_for(out, job, csv_raw=csv_raw)
    return await export_all(session.frontier, job, exporter, f"file:{out}")


async def move_job(
    source: Backend, target: Backend, job: str, *, to: str, now: bool = False, watch: Watch
) -> Moved:
    """Move a job to another frontier, where it goes on; `to` is that one's name for people. Run again
    after an interruption, it completes the move."""
    return await move(
        source, target, job, to=to, owner=process_name(), gone=process_gone, now=now, watch=watch
    )
