"""Jobs, workers, lanes, dead letters and schedules as JSON, in the same words for `--json` and for the API.

No I/O. A job's name is `job`, as in every command, and `job_id`, as in every endpoint. Times are ISO 8601 in
UTC. A job's headers and secrets are never included, only whether it has some.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from shoal.model import Counts, DeadGroup, DeadLetter, Job, JobState, Lane, WorkerStatus
from shoal.politeness.pacing import format_rate
from shoal.schedule.book import Schedule
from shoal.schedule.timing import format_every

Format = Literal["json", "jsonl", "csv", "parquet", "markdown"]
Status = Literal["PENDING", "PROGRESS", "SUCCESS", "FAILURE", "REVOKED"]

SHOWN_STARTS = 100
FORMATS: dict[str, Format] = {name: name for name in ("json", "jsonl", "csv", "parquet", "markdown")}


def status_of(job: Job) -> Status:
    """Returns the job's state in the words of task queues."""
    counts = job.counts
    if job.state is JobState.CANCELLED:
        return "REVOKED"
    if job.state is JobState.DONE:
        # Skipped visits (robots.txt, redirects out of scope) are not a success.
        return "SUCCESS" if counts.done > counts.skipped else "FAILURE"
    begun = counts.done + counts.dead + counts.expired + counts.leased + counts.retried
    return "PROGRESS" if begun else "PENDING"


def run_counts(counts: Counts) -> dict[str, int]:
    """Returns the counters of a job in the words of a work table."""
    pending, claimed = counts.waiting + counts.delayed, counts.leased
    return {
        "pending": pending,
        "claimed": claimed,
        "completed": counts.done,
        "failed": counts.dead + counts.expired,
        "remaining": pending + claimed,
    }


def job_view(job: Job, now: float) -> dict[str, Any]:
    """Returns a job: the counters of a run (pending, claimed…), and in `counts` every counter by its name."""
    spec = job.spec
    speed, eta = speed_of(job, now)
    return {
        "job": job.id,
        "job_id": job.id,
        "status": status_of(job),
        "state": job.state.value,
        **run_counts(job.counts),
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
        "seconds": round(lasted(job, now), 3),
        "pages_per_second": speed,
        "eta_seconds": eta,
        "counts": msgspec.to_builtins(job.counts),
        "errors": job.errors,
    }


def lasted(job: Job, now: float) -> float:
    """Returns the seconds from the job's creation to its end, or until now."""
    return max(0.0, (job.finished_at or now) - job.created_at)


def speed_of(job: Job, now: float) -> tuple[float, float | None]:
    """Returns pages per second since a worker first took one of its URLs, and the estimated seconds left."""
    counts = job.counts
    seconds = max(0.0, (job.finished_at or now) - (job.started_at or job.created_at))
    # Without cancelled URLs: they were not visited.
    ended = counts.done + counts.dead + counts.expired
    # Only for running jobs: the end of a paused job is unknown.
    going = job.state is JobState.RUNNING and ended and counts.live
    eta = round(counts.live * seconds / ended, 1) if going else None
    return round((counts.done - counts.skipped) / seconds, 3) if seconds > 0 else 0.0, eta


def worker_view(worker: WorkerStatus) -> dict[str, Any]:
    heartbeat = worker.heartbeat
    return {
        "id": heartbeat.worker,
        "state": worker.state,
        "queues": list(heartbeat.queues) if heartbeat.queues is not None else None,
        "job": heartbeat.job,
        "running": heartbeat.running,
        "slots": heartbeat.slots,
        "leases": worker.leases,
        "visits": heartbeat.visits,
        "failed": heartbeat.failed,
        "rate": heartbeat.rate,
        "mean_seconds": heartbeat.mean,
        "p95_seconds": heartbeat.p95,
        "still_seconds": heartbeat.stalled_for,
        "since": moment(worker.since),
        "last_heartbeat": moment(worker.seen),
        "seen_ago": round(max(0.0, worker.now - worker.seen), 3),
        "current": heartbeat.current,
        "version": heartbeat.version,
    }


def dead_view(letter: DeadLetter) -> dict[str, Any]:
    request = letter.request
    return {
        "id": letter.id,
        "job": request.job,
        "job_id": request.job,
        "url": request.url,
        "host": letter.lane,
        "state": letter.state,
        "error": letter.failure.error,
        "message": letter.failure.message,
        "attempts": request.attempt,
        "depth": request.depth,
        "queue": request.queue,
        "priority": request.priority,
        "method": request.method,
        "label": request.label,
        "origin": request.origin,
        "ended_at": moment(letter.ended_at),
        "worker": letter.failure.worker or None,
    }


def dead_group_view(group: DeadGroup) -> dict[str, Any]:
    return {"host": group.lane, "error": group.error, "count": group.count, "example": group.example}


def lane_view(lane: Lane, now: float) -> dict[str, Any]:
    """Returns a host with its pace. `rate` is in force now; `asked` is what the host itself asked for."""
    return {
        "host": lane.name,
        "rate": format_rate(lane.gap),
        "concurrency": lane.width,
        "burst": lane.burst,
        "asked": format_rate(lane.floor) if lane.floor else None,
        "pinned": lane.pinned,
        "paused": lane.paused,
        "active": lane.busy,
        "waiting": lane.waiting,
        "ready_at": moment_or_none(lane.ready_at),
        "blocked_until": moment_or_none(lane.blocked_until) if lane.blocked_until > now else None,
    }


def schedule_view(schedule: Schedule) -> dict[str, Any]:
    spec = schedule.spec
    return {
        "name": schedule.name,
        "cron": schedule.cron or None,
        "every": format_every(schedule.every) if schedule.every else None,
        "timezone": schedule.timezone,
        "overlap": schedule.overlap,
        "catch_up": schedule.catch_up,
        "paused": schedule.paused,
        "scraper": spec.scraper,
        "start": list(spec.start[:SHOWN_STARTS]),
        "queue": spec.queue,
        "priority": spec.priority,
        "scope": spec.scope,
        "depth": spec.depth,
        "max_pages": spec.max_pages,
        "output_format": FORMATS.get(spec.output, "json"),
        "has_headers": bool(spec.headers),
        "webhook": spec.webhook.url if spec.webhook else None,
        "created_at": moment(schedule.created_at),
        "next_at": moment_or_none(schedule.next_at),
        "last_at": moment_or_none(schedule.last_at),
        "last_job": schedule.last_job or None,
        "fired": schedule.fired,
        "skipped": schedule.skipped,
        "error": schedule.error or None,
    }


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def moment_or_none(seconds: float | None) -> str | None:
    # A lane that is blocked for ever has no date.
    return moment(seconds) if seconds is not None and seconds < 1e11 else None
