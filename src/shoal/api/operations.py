"""What operators look at: health, queues, metrics, workers, jobs, dead letters, lanes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from shoal import __version__
from shoal.api.jobs import JobId
from shoal.api.metrics import MEDIA_TYPE, frontier_metrics
from shoal.api.models import (
    Alive,
    DeadGroups,
    DeadGroupView,
    DeadList,
    DeadRetry,
    DeadSelection,
    DeadView,
    Health,
    JobDetail,
    JobList,
    JobView,
    LaneChange,
    LaneList,
    LaneView,
    Part,
    Purged,
    QueueStatus,
    QueueView,
    Retried,
    WebhookView,
    WorkerList,
    WorkerView,
)
from shoal.api.problems import Problem
from shoal.api.service import EMPTY, PATIENCE, Admin, Service, ServiceDependency, of_work, takes, usual_queues
from shoal.api.views import throughput
from shoal.app.views import dead_group_view, dead_view, job_view, lane_view, worker_view
from shoal.errors import CLASSES, FrontierError, NoSuchJob, UsageError
from shoal.model import DEFAULT_QUEUE, Job, JobState, Lane, Pace, Selection, WorkerStatus
from shoal.politeness.pacing import parse_rate
from shoal.urls import lane_named

router = APIRouter()

PREVIOUS = "`next_cursor` of the previous page."
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of entries.")]
Offset = Annotated[int, Query(alias="cursor", ge=0, le=100_000, description=PREVIOUS)]
Host = Annotated[
    str,
    Path(
        min_length=1, max_length=300, description="Name of the host, with its port unless it is the default."
    ),
]


@router.get("/healthz", tags=["operate"], summary="Liveness")
async def healthz() -> Alive:
    """Returns 200 while this process is alive. Needs no token."""
    return Alive()


@router.get(
    "/health",
    tags=["operate"],
    summary="Health",
    responses={503: {"model": Health, "description": "A needed part is down."}},
)
async def health(service: ServiceDependency, response: Response) -> Health:
    """Returns the health of the service and of each part. If `healthy` is false, `reasons` says why; the
    status is 503 only if a needed part is down."""
    try:
        found = await _health(service)
    except (FrontierError, TimeoutError) as error:
        late = isinstance(error, TimeoutError)
        detail = f"no response within {PATIENCE:.0f} s" if late else "not responding"
        service.tell(f"/health: {'the frontier: ' + detail if late else error}")
        part = Part(name="frontier", healthy=False, needed=True, detail=detail)
        found = Health(
            status="unhealthy",
            healthy=False,
            reasons=["the frontier is not responding"],
            parts=[part],
            workers=0,
            pending=0,
            completed=0,
            failed=0,
            version=__version__,
        )
    if any(part.needed and not part.healthy for part in found.parts):
        response.status_code = 503
    return found


async def _health(service: Service) -> Health:
    settings = service.session.settings
    warnings, queues, present, totals = await service.now()
    durable = "; ".join(warning.text for warning in warnings)
    workers = [worker for worker in present if worker.state != "silent"]
    pending = sum(row["waiting"] + row["delayed"] for row in queues.values())
    stuck = sum(worker.state == "stuck" for worker in workers)
    reasons: list[str] = []
    if pending > settings.health_max_pending:
        reasons.append(f"{pending:,} URLs are waiting; the limit is {settings.health_max_pending:,}")
    finished = totals.completed + totals.failed
    enough = finished >= settings.health_min_finished
    if enough and totals.failed > settings.health_max_failed * totals.completed:
        reasons.append(
            f"{totals.failed:,} URLs failed and {totals.completed:,} were completed;"
            f" the limit is {settings.health_max_failed:.0%}"
        )
    unserved = await _unserved(service, queues, workers) if workers else {}
    starting = not workers and service.starting
    alive = "starting" if starting else f"{len(workers)} alive" + (f", {stuck} stuck" if stuck else "")
    # A service with workers of its own misses them as soon as they should be there, others when URLs wait.
    missing = not workers and not starting and (bool(pending) or service.staff is not None)
    if missing and not pending:
        reasons.append("no worker is alive")
    elif missing:
        reasons.append(f"no worker is alive, and {pending:,} URLs are waiting")
    reasons += [
        f"no worker takes from the queue {name}, and {n:,} URLs are waiting in it"
        for name, n in unserved.items()
    ]
    if stuck:
        reasons.append(f"stuck workers: {stuck}")
    status: Literal["healthy", "starting", "unhealthy"] = "unhealthy" if reasons else "healthy"
    if starting:
        status = status if reasons else "starting"
        reasons.append("the workers are starting")
    return Health(
        status=status,
        healthy=not reasons,
        reasons=reasons,
        parts=[
            Part(
                name="frontier",
                healthy=True,
                needed=True,
                detail=durable or "responding",
            ),
            Part(
                name="workers",
                healthy=not (stuck or unserved or missing or starting),
                needed=False,
                detail=alive,
            ),
        ],
        workers=len(workers),
        pending=pending,
        completed=totals.completed,
        failed=totals.failed,
        version=__version__,
    )


async def _unserved(
    service: Service, queues: Mapping[str, Mapping[str, int]], workers: list[WorkerStatus]
) -> dict[str, int]:
    """Returns the number of waiting URLs by queue, for queues that no live worker takes from."""
    waiting = {name: row["waiting"] + row["delayed"] for name, row in of_work(queues).items()}
    unserved = {
        name: number
        for name, number in sorted(waiting.items())
        if number and not any(takes(worker, name) for worker in workers)
    }
    if not unserved:
        return {}
    # A worker of one job takes all its URLs, whatever queue a routing rule put them into.
    routed = usual_queues(service.session.routes)
    for job in {worker.heartbeat.job for worker in workers if worker.heartbeat.job is not None}:
        with suppress(NoSuchJob):
            async with asyncio.timeout(PATIENCE):
                queue = (await service.frontier.job(job)).spec.queue
            served = {queue, *routed} if queue == DEFAULT_QUEUE else {queue}
            unserved = {name: number for name, number in unserved.items() if name not in served}
    return unserved


@router.get("/queue/status", tags=["operate"], summary="Queues and workers")
async def queue_status(service: ServiceDependency) -> QueueStatus:
    """Returns every queue, every worker and the throughput. `dead` covers the newest thousand jobs."""
    queues = await service.queues.get()
    workers = await service.workers.get()
    dead = (await service.totals.get()).dead
    named = {queue for worker in workers for queue in worker.heartbeat.queues or ()}
    views = {
        name: QueueView(
            active=row["leased"],
            waiting=row["waiting"],
            delayed=row["delayed"],
            dead=dead[name],
            workers=sum(takes(worker, name) for worker in workers),
        )
        for name in sorted({*queues, *named, *(queue for queue, number in dead.items() if number)})
        for row in (queues.get(name, EMPTY),)
    }
    rate, mean, p95 = throughput(workers)
    return QueueStatus(
        active=sum(view.active for view in views.values()),
        waiting=sum(view.waiting for view in views.values()),
        delayed=sum(view.delayed for view in views.values()),
        dead=sum(view.dead for view in views.values()),
        queues=of_work(views),
        workers=[_worker(worker) for worker in workers],
        throughput=rate,
        mean_seconds=mean,
        p95_seconds=p95,
    )


@router.get(
    "/metrics",
    tags=["operate"],
    summary="Metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: ServiceDependency) -> Response:
    """Returns metrics in the text format of Prometheus."""
    try:
        _, queues, workers, totals = await service.now()
        states = await service.states.get(PATIENCE, old=True)
    except TimeoutError:
        detail = f"the frontier did not respond within {PATIENCE:.0f} s"
        raise Problem(503, detail, headers={"Retry-After": "5"}) from None
    now = frontier_metrics(of_work(service.with_empty(queues)), workers, states, of_work(totals.dead))
    return Response(service.meters.text(now), media_type=MEDIA_TYPE)


@router.get("/workers", tags=["operate"], summary="List workers")
async def workers(service: ServiceDependency, limit: Limit = 100, cursor: Offset = 0) -> WorkerList:
    """Returns the workers of this frontier and their figures."""
    found = await service.workers.get()
    shown = [_worker(worker) for worker in found[cursor : cursor + limit]]
    return WorkerList(workers=shown, next_cursor=_next(cursor, limit, len(found)))


# -- jobs -----------------------------------------------------------------------------------


@router.get("/jobs", tags=["jobs"], summary="List jobs")
async def jobs(
    service: ServiceDependency,
    limit: Limit = 100,
    cursor: Annotated[float | None, Query(gt=0, lt=1e12, allow_inf_nan=False, description=PREVIOUS)] = None,
) -> JobList:
    """Returns the jobs, newest first."""
    found = await service.frontier.jobs(limit=limit + 1, before=cursor)
    shown = found[:limit]
    more = repr(shown[-1].created_at) if len(found) > limit else None
    return JobList(jobs=[_job(job) for job in shown], next_cursor=more)


@router.get("/jobs/{job_id}", tags=["jobs"], summary="Get a job")
async def job(job_id: JobId, service: ServiceDependency) -> JobDetail:
    """Returns one job with its settings, counters, progress and webhook delivery."""
    found = await service.frontier.job(job_id)
    delivery = None
    if found.spec.webhook is not None:
        state, attempts, error = await service.messenger.delivery(found)
        delivery = WebhookView(url=found.spec.webhook.url, state=state, attempts=attempts, error=error)
    more = {"progress": await service.progress(found), "webhook_delivery": delivery}
    return JobDetail.model_validate(job_view(found, time.time()) | more)


@router.post("/jobs/{job_id}/pause", tags=["jobs"], summary="Pause a job")
async def pause_job(job_id: JobId, service: ServiceDependency) -> JobView:
    """Pauses a job: no visit of it starts until it is resumed. Visits in flight end as usual."""
    return _job(await service.frontier.update_job(job_id, state=JobState.PAUSED))


@router.post("/jobs/{job_id}/resume", tags=["jobs"], summary="Resume a job")
async def resume_job(job_id: JobId, service: ServiceDependency) -> JobView:
    """Resumes a paused job."""
    return _job(await service.frontier.update_job(job_id, state=JobState.RUNNING))


# -- dead letters ---------------------------------------------------------------------------

_JobFilter = Annotated[str | None, Query(min_length=1, max_length=300, description="Id of a job.")]
_HostFilter = Annotated[
    str | None, Query(max_length=300, description="Empty for invalid URLs, which have no host.")
]
_ErrorFilter = Annotated[
    str | None, Query(min_length=1, max_length=64, description="Error class, such as `http_404`.")
]


@router.get("/dead", tags=["dead letters"], summary="List dead letters")
async def dead(
    service: ServiceDependency,
    job_id: _JobFilter = None,
    host: _HostFilter = None,
    error: _ErrorFilter = None,
    limit: Limit = 100,
    cursor: Annotated[int, Query(ge=0, lt=2**63, description=PREVIOUS)] = 0,
) -> DeadList:
    """Returns the URLs that ended dead or expired, oldest first."""
    which = await _selection(service, job_id, host, error)
    found = await service.frontier.dead(which, after=cursor, limit=limit + 1)
    shown = found[:limit]
    more = str(shown[-1].id) if len(found) > limit else None
    return DeadList(dead=[DeadView.model_validate(dead_view(letter)) for letter in shown], next_cursor=more)


@router.get("/dead/groups", tags=["dead letters"], summary="Group dead letters")
async def dead_groups(
    service: ServiceDependency,
    job_id: _JobFilter = None,
    host: _HostFilter = None,
    error: _ErrorFilter = None,
    limit: Limit = 100,
    cursor: Offset = 0,
) -> DeadGroups:
    """Returns the number of dead letters by host and error class, largest group first."""
    found = await service.frontier.dead_groups(await _selection(service, job_id, host, error))
    shown = [DeadGroupView.model_validate(dead_group_view(group)) for group in found[cursor : cursor + limit]]
    return DeadGroups(groups=shown, next_cursor=_next(cursor, limit, len(found)))


@router.post("/dead/retry", tags=["dead letters"], dependencies=[Admin], summary="Retry dead letters")
async def dead_retry(body: DeadRetry, service: ServiceDependency) -> Retried:
    """Puts dead letters back into their queues for another visit. Those of cancelled jobs stay dead."""
    which = await _selection(service, body.job_id, body.host, body.error, body.ids)
    return Retried(retried=await service.frontier.revive(which, reset_attempts=body.reset_attempts))


@router.post("/dead/purge", tags=["dead letters"], dependencies=[Admin], summary="Delete dead letters")
async def dead_purge(body: DeadSelection, service: ServiceDependency) -> Purged:
    """Deletes dead letters for good. Their URLs stay known to their jobs and stay counted as dead."""
    which = await _selection(service, body.job_id, body.host, body.error, body.ids)
    return Purged(purged=await service.frontier.purge(which))


async def _selection(
    service: Service, job: str | None, host: str | None, error: str | None, ids: list[int] | None = None
) -> Selection:
    """Raises UsageError and NoSuchJob: a typing mistake must not look like an empty result."""
    if error is not None and error not in CLASSES and not re.fullmatch(r"http_[1-5]\d\d", error):
        raise UsageError(
            "no such error class", hint="use a class such as http_404, connect_timeout or tls_invalid"
        )
    if job is not None:
        await service.frontier.job(job)
    lane = host if not host else lane_named(host)
    return Selection(job=job, lane=lane, error=error, ids=tuple(ids) if ids else None)


# -- lanes ----------------------------------------------------------------------------------


@router.get("/lanes", tags=["lanes"], summary="List hosts")
async def lanes(service: ServiceDependency, limit: Limit = 100, cursor: Offset = 0) -> LaneList:
    """Returns the hosts that have waiting URLs or a pace of their own, busiest first."""
    found = await service.frontier.lanes(limit=cursor + limit + 1)
    shown = [_lane_view(lane) for lane in found[cursor : cursor + limit]]
    return LaneList(lanes=shown, next_cursor=_next(cursor, limit, len(found)))


@router.get("/lanes/{host}", tags=["lanes"], summary="Get the pace of a host")
async def lane(host: Host, service: ServiceDependency) -> LaneView:
    """Returns the pace of one host."""
    return await _lane(service, lane_named(host))


@router.put("/lanes/{host}", tags=["lanes"], dependencies=[Admin], summary="Set the pace of a host")
async def set_lane(host: Host, change: LaneChange, service: ServiceDependency) -> LaneView:
    """Sets and pins the pace of a host. It holds from now on, whatever jobs and the host itself ask for."""
    gap = parse_rate(change.rate) if change.rate is not None else None
    changed = any(value is not None for value in (gap, change.concurrency, change.burst))
    pinned = change.pinned if change.pinned is not None else True if changed else None
    return await _pace(
        service, host, Pace(gap=gap, width=change.concurrency, burst=change.burst, pinned=pinned)
    )


@router.post("/lanes/{host}/pause", tags=["lanes"], dependencies=[Admin], summary="Pause a host")
async def pause_lane(host: Host, service: ServiceDependency) -> LaneView:
    """Pauses a host: no visit of it starts until it is resumed."""
    return await _pace(service, host, Pace(paused=True))


@router.post("/lanes/{host}/resume", tags=["lanes"], dependencies=[Admin], summary="Resume a host")
async def resume_lane(host: Host, service: ServiceDependency) -> LaneView:
    """Resumes a host: ends a pause, and also a rest that errors or the host itself imposed."""
    return await _pace(service, host, Pace(paused=False, blocked=0.0))


async def _pace(service: Service, host: str, pace: Pace) -> LaneView:
    return _lane_view(await service.session.set_pace(lane_named(host), pace))


async def _lane(service: Service, name: str) -> LaneView:
    found = await service.frontier.lanes(names=[name], limit=1)
    if not found:
        raise Problem(404, f"no host {name!r}", hint="`GET /lanes` lists the known hosts")
    return _lane_view(found[0])


def _job(job: Job) -> JobView:
    return JobView.model_validate(job_view(job, time.time()))


def _worker(worker: WorkerStatus) -> WorkerView:
    return WorkerView.model_validate(worker_view(worker))


def _lane_view(lane: Lane) -> LaneView:
    return LaneView.model_validate(lane_view(lane, time.time()))


def _next(cursor: int, limit: int, total: int) -> str | None:
    return str(cursor + limit) if total > cursor + limit else None
