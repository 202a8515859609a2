"""From the frontier's words to those of the API. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from shoal.api.models import (
    DeadView,
    Format,
    JobView,
    LaneView,
    Progress,
    ScheduleView,
    Status,
    WorkerView,
)
from shoal.model import Attendance, DeadLetter, Job, JobState, Lane
from shoal.politeness.pacing import format_rate
from shoal.schedule.book import Schedule
from shoal.schedule.timing import format_every

ENDED = (JobState.DONE, JobState.CANCELLED)
SHOWN_STARTS = 100
FORMATS: dict[str, Format] = {name: name for name in ("json", "jsonl", "csv", "parquet", "markdown")}


def status_of(job: Job) -> Status:
    """The job's state in the words that users of task queues know."""
    counts = job.counts
    if job.state is JobState.CANCELLED:
        return "REVOKED"
    if job.state is JobState.DONE:
        # Visits that brought nothing (robots.txt, redirects into nowhere) are no success.
        return "SUCCESS" if counts.done > counts.skipped else "FAILURE"
    begun = counts.done + counts.dead + counts.expired + counts.leased + counts.retried
    return "PROGRESS" if begun else "PENDING"


def progress_of(job: Job, now: float, current_url: str | None = None) -> Progress:
    counts = job.counts
    # Not what was cancelled: nobody has visited it.
    ended = counts.done + counts.dead + counts.expired
    pages = counts.done - counts.skipped
    status = status_of(job)
    started = job.started_at if status != "PENDING" else None
    seconds = max(0.0, (job.finished_at or now) - (started or job.created_at))
    share = 100.0 if job.state is JobState.DONE else 100.0 * ended / counts.added if counts.added else 0.0
    eta = None
    if job.state is JobState.RUNNING and ended and counts.live:
        eta = round(counts.live * seconds / ended, 1)
    return Progress(
        job_id=job.id,
        status=status,
        state=job.state.value,
        progress=round(share, 1),
        pages_done=pages,
        pages_total=counts.added - counts.skipped,
        failed=counts.dead + counts.expired,
        items=counts.items,
        queued=counts.waiting + counts.delayed,
        active=counts.leased,
        current_url=current_url if job.state is JobState.RUNNING else None,
        started_at=moment_or_none(started),
        finished_at=moment_or_none(job.finished_at),
        eta_seconds=eta,
        pages_per_second=round(pages / seconds, 3) if seconds > 0 else 0.0,
        errors=job.errors,
    )


def job_fields(job: Job) -> dict[str, object]:
    spec = job.spec
    return {
        "job_id": job.id,
        "status": status_of(job),
        "state": job.state.value,
        "scraper": spec.scraper,
        "start": list(spec.start[:SHOWN_STARTS]),
        "queue": spec.queue,
        "priority": spec.priority,
        "scope": spec.scope,
        "max_pages": spec.max_pages,
        "output_format": FORMATS.get(spec.output, "json"),
        "has_headers": bool(spec.headers),
        "webhook": spec.webhook.url if spec.webhook else None,
        "created_at": moment(job.created_at),
        "finished_at": moment_or_none(job.finished_at),
        "counts": msgspec.to_builtins(job.counts),
        "errors": job.errors,
    }


def job_view(job: Job) -> JobView:
    return JobView.model_validate(job_fields(job))


def schedule_view(schedule: Schedule) -> ScheduleView:
    spec = schedule.spec
    return ScheduleView(
        name=schedule.name,
        cron=schedule.cron or None,
        every=format_every(schedule.every) if schedule.every else None,
        timezone=schedule.timezone,
        overlap=schedule.overlap,
        catch_up=schedule.catch_up,
        paused=schedule.paused,
        scraper=spec.scraper,
        start=list(spec.start[:SHOWN_STARTS]),
        queue=spec.queue,
        priority=spec.priority,
        scope=spec.scope,
        depth=spec.depth,
        max_pages=spec.max_pages,
        output_format=FORMATS.get(spec.output, "json"),
        has_headers=bool(spec.headers),
        webhook=spec.webhook.url if spec.webhook else None,
        created_at=moment(schedule.created_at),
        next_at=moment_or_none(schedule.next_at),
        last_at=moment_or_none(schedule.last_at),
        last_job=schedule.last_job or None,
        fired=schedule.fired,
        skipped=schedule.skipped,
        error=schedule.error or None,
    )


def worker_view(worker: Attendance) -> WorkerView:
    beat = worker.beat
    return WorkerView(
        id=beat.worker,
        state=worker.state,
        queues=list(beat.queues) if beat.queues is not None else None,
        job=beat.job,
        running=beat.running,
        slots=beat.slots,
        leases=worker.leases,
        visits=beat.visits,
        failed=beat.failed,
        rate=beat.rate,
        mean_seconds=beat.mean,
        p95_seconds=beat.p95,
        since=moment(worker.since),
        last_heartbeat=moment(worker.seen),
        version=beat.version,
    )


def dead_view(letter: DeadLetter) -> DeadView:
    request = letter.request
    return DeadView(
        id=letter.id,
        job_id=request.job,
        url=request.url,
        host=letter.lane,
        state=letter.state,
        error=letter.failure.error,
        message=letter.failure.message,
        attempts=request.attempt,
        depth=request.depth,
        queue=request.queue,
        priority=request.priority,
        ended_at=moment(letter.ended_at),
        worker=letter.failure.worker or None,
    )


def lane_view(lane: Lane, now: float) -> LaneView:
    return LaneView(
        host=lane.name,
        rate=format_rate(lane.gap),
        concurrency=lane.width,
        burst=lane.burst,
        asked=format_rate(lane.floor) if lane.floor else None,
        pinned=lane.pinned,
        paused=lane.paused,
        active=lane.busy,
        waiting=lane.waiting,
        ready_at=moment_or_none(lane.ready_at),
        blocked_until=moment(lane.blocked_until) if lane.blocked_until > now else None,
    )


def throughput(workers: Iterable[Attendance]) -> tuple[float, float, float]:
    """Visits a second of all, their mean time, and the p95 of the slowest: percentiles of several
    workers cannot be added up, and this one is never too good."""
    alive = [worker.beat for worker in workers if worker.state != "silent"]
    rate = sum(beat.rate for beat in alive)
    mean = sum(beat.mean * beat.rate for beat in alive) / rate if rate else 0.0
    return round(rate, 3), round(mean, 4), max((beat.p95 for beat in alive), default=0.0)


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def moment_or_none(seconds: float | None) -> datetime | None:
    # A moment far away (a lane blocked for ever) has no date.
    return moment(seconds) if seconds is not None and seconds < 1e11 else None
