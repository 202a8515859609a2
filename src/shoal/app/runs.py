"""Runs of named scrapers: jobs that workers on any machine can work on."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, count, islice
from typing import Any

import msgspec

from shoal.app.jobs import check_not_cancelled, resume_job
from shoal.app.processes import evict_dead_workers, holder_name, process_gone
from shoal.app.session import Session
from shoal.errors import NoSuchJob, UsageError
from shoal.frontier.notes import Lock
from shoal.model import Heartbeat, Job, JobSpec, JobState, WorkerStatus
from shoal.scrape.router import Scraper

LOCK_SECONDS = 60.0
"""Seconds that the lock of a single run outlives its holder, if that is on another machine."""


class Started(msgspec.Struct, frozen=True):
    """A run whose URLs have been added."""

    run_id: str
    scraper: Scraper
    enqueued: int
    known: int
    bad: int

    @property
    def queued(self) -> dict[str, Any]:
        """The output of a distributed run, with the command that starts a worker for it."""
        words = ["shoal", "worker", "--scraper", self.scraper.name, "--run-id", self.run_id]
        command = shlex.join([*words, "--batch-size", "50"])
        return {
            "status": "queued",
            "run_id": self.run_id,
            "enqueued": self.enqueued,
            "worker_command": command,
        }


async def open_run(
    session: Session,
    name: str,
    given: Iterable[str] | None = None,
    *,
    start: tuple[str, ...] = (),
    run_id: str = "",
    resume: bool = False,
    limit: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Started:
    """Opens a run of a named scraper and adds its URLs. Raises UsageError.

    `given` are URLs that replace the scraper's own start; `start` replaces it too, and also defines the
    scope. `resume` continues the last unfinished run, or the one with `run_id`, and adds only the URLs that
    are given. A `run_id` that exists gets more URLs. Adding a URL twice changes nothing.
    """
    scraper = session.scraper(name)
    if scraper is None:
        raise UsageError("the built-in scraper has no runs", hint="use `shoal crawl URL`")
    job = await _earlier_run(session, name, run_id) if resume or run_id else None
    if job is not None:
        check_not_cancelled(job, "run")
    elif resume:
        raise await _nothing_to_resume(session, name, run_id)
    # A run that was started from a file has its URLs; the scraper's own start may not be among them.
    nothing_given = resume and given is None and not start
    start = start or scraper.start
    if given is None and not start and not nothing_given:
        raise UsageError(
            f"scraper {name!r} has no start=", hint=f"give URLs: `shoal run {name} URL`, or --urls-file"
        )
    wanted = iter(() if nothing_given else start if given is None else given)
    first = list(islice(wanted, 1))
    if not first and not nothing_given:
        # Checked before anything is stored: a run without URLs would never end.
        raise UsageError(
            "no URL to fetch", hint="give at least one; in a file, one per line, and # starts a comment"
        )
    if job is None:
        more: dict[str, Any] = {"max_pages": None, "max_per_host": None}
        if given is not None and "scope" not in session.settings.model_fields_set:
            more["scope"] = scraper.scope
        job = await _new_run(session, run_id, session.spec(name, start, **more))
    elif not first and not job.counts.added:
        raise UsageError(f"run {job.id} was interrupted before URLs were added", hint="give its URLs again")
    if resume and job.state is JobState.PAUSED:
        await resume_job(session, job.id)
    await evict_dead_workers(session.frontier, job.id)
    added = await session.submit(job.id, islice(chain(first, wanted), limit), on_progress=on_progress)
    return Started(job.id, scraper, added["new"], added["known"], added["bad"])


async def _earlier_run(session: Session, name: str, run_id: str) -> Job | None:
    if run_id:
        with suppress(NoSuchJob):
            job = await session.frontier.job(run_id)
            if job.spec.scraper != name:
                raise UsageError(
                    f"run {run_id} belongs to scraper {job.spec.scraper!r}", hint="use another --run-id"
                )
            return job
        return None
    for job in await session.frontier.jobs(limit=1000):
        if job.spec.scraper == name and job.state in (JobState.RUNNING, JobState.PAUSED):
            return job
    return None


async def _nothing_to_resume(session: Session, name: str, run_id: str) -> UsageError:
    runs = [job.id for job in await session.frontier.jobs(limit=1000) if job.spec.scraper == name]
    if not run_id:
        return UsageError(f"no run of {name!r} to resume", hint="leave out --resume to start one")
    there = f"its runs are {', '.join(runs[:5])}" if runs else f"{name!r} has no runs yet"
    more = f" and {len(runs) - 5:,} more" if len(runs) > 5 else ""
    return UsageError(
        f"no run {run_id!r} to resume", hint=f"{there}{more}; leave out --resume to start this one"
    )


async def _new_run(session: Session, run_id: str, spec: JobSpec) -> Job:
    """Opens a new run. Without a name it is named after the current time, with a number if that name is
    taken.

    The name is locked while this is checked, so that two runs that start in the same second, on any machine,
    get different names.
    """
    if run_id:
        return await session.frontier.open_job(run_id, spec)
    stem, owner = datetime.now(UTC).strftime("%Y%m%d_%H%M%S"), holder_name()
    for number in count(1):
        name = stem if number == 1 else f"{stem}_{number}"
        lock = Lock(session.frontier.notes, f"run id {name}", owner, LOCK_SECONDS)
        if not await lock.take():
            continue
        try:
            with suppress(NoSuchJob):
                await session.frontier.job(name)
                continue
            return await session.frontier.open_job(name, spec)
        finally:
            await lock.release()
    raise AssertionError("count() does not end")


@asynccontextmanager
async def exclusive_run(session: Session, name: str) -> AsyncIterator[None]:
    """Holds the lock of a scraper, so that two single runs of it cannot overlap, on any machine.

    Raises UsageError if another process holds it. A dead holder of this machine does not count.
    """
    lock = Lock(session.frontier.notes, f"run {name}", holder_name(), LOCK_SECONDS, is_dead=process_gone)
    if not await lock.take():
        raise UsageError(
            f"scraper {name!r} is already running, as {lock.holder}",
            hint='wait for that run, or set execution="distributed" and add workers',
        )
    async with lock.keep():
        yield


def is_serving(heartbeat: Heartbeat, job: Job) -> bool:
    """Whether a worker takes requests of this job."""
    if heartbeat.job is not None:
        return heartbeat.job == job.id
    return heartbeat.queues is None or job.spec.queue in heartbeat.queues or job.id in heartbeat.current


def run_rate(job: Job, present: Iterable[WorkerStatus], queues: Mapping[str, Mapping[str, int]]) -> float:
    """Returns the visits per second that a job gets now, from the heartbeats of the workers.

    A worker of this job alone is counted in full. For a worker of several jobs, the job's part is estimated
    from its current visits. If it has none (between two visits to a slow host), it is estimated from the
    job's share of the worker's queues.
    """
    total = 0.0
    for worker in present:
        heartbeat = worker.heartbeat
        if worker.state == "silent" or not is_serving(heartbeat, job):
            continue
        if heartbeat.job is not None:
            total += heartbeat.rate
        elif heartbeat.current:
            total += heartbeat.rate / len(heartbeat.current) if job.id in heartbeat.current else 0.0
        else:
            names = queues if heartbeat.queues is None else heartbeat.queues
            held = sum(sum(queues.get(name, {}).values()) for name in names)
            total += heartbeat.rate * min(1.0, job.counts.live / held) if held else 0.0
    return total
