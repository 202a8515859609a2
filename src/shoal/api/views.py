"""Views of jobs and workers that only the API has. Those that `--json` shares are in `shoal.app.views`."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.api.models import Progress
from shoal.app.views import moment_or_none, run_counts, speed_of, status_of
from shoal.model import Job, JobState, WorkerStatus


def progress_of(job: Job, now: float, current_url: str | None = None) -> Progress:
    counts, runs = job.counts, run_counts(job.counts)
    # Cancelled URLs do not count: they were not visited.
    ended = counts.done + counts.dead + counts.expired
    status = status_of(job)
    share = 100.0 if job.state is JobState.DONE else 100.0 * ended / counts.added if counts.added else 0.0
    speed, eta = speed_of(job, now)
    return Progress.model_validate(
        {
            "job_id": job.id,
            "status": status,
            "state": job.state.value,
            "progress": round(share, 1),
            "pages_done": counts.done - counts.skipped,
            "pages_total": counts.added - counts.skipped,
            "failed": runs["failed"],
            "items": counts.items,
            "queued": runs["pending"],
            "active": runs["claimed"],
            "current_url": current_url if job.state is JobState.RUNNING else None,
            "started_at": moment_or_none(job.started_at) if status != "PENDING" else None,
            "finished_at": moment_or_none(job.finished_at),
            "eta_seconds": eta,
            "pages_per_second": speed,
            "errors": job.errors,
        }
    )


def throughput(workers: Iterable[WorkerStatus]) -> tuple[float, float, float]:
    """Returns the visits per second of all workers, their mean time, and the 95th percentile of the slowest
    worker. Percentiles of several workers cannot be added up; this one is never too low."""
    alive = [worker.heartbeat for worker in workers if worker.state != "silent"]
    rate = sum(heartbeat.rate for heartbeat in alive)
    mean = sum(heartbeat.mean * heartbeat.rate for heartbeat in alive) / rate if rate else 0.0
    return round(rate, 3), round(mean, 4), max((heartbeat.p95 for heartbeat in alive), default=0.0)
