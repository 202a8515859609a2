"""What people who run it look at: queues, health, metrics, jobs, dead letters, lanes, workers."""

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

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(alias="cursor", ge=0, le=100_000)]
Host = Annotated[str, Path(min_length=1, max_length=300)]


@router.get("/healthz", tags=["operate"])
async def healthz() -> Alive:
    """This process lives. It needs no token to ask that."""
    return Alive()


@router.get(
    "/health", tags=["operate"], responses={503: {"model": Health, "description": "A needed part is down."}}
)
async def health(service: ServiceDependency, response: Response) -> Health:
    """Overall and by part. `healthy` is false with the reasons; 503 only when a needed part is down."""
    try:
        found = await _health(service)
    except (FrontierError, TimeoutError) as error:
        late = isinstance(error, TimeoutError)
        detail = f"no answer within {PATIENCE:.0f} s" if late else "it does not answer"
        service.tell(f"/health: {'the frontier: ' + detail if late else error}")
        part = Part(name="frontier", healthy=False, needed=True, detail=detail)
        found = Health(
            status="unhealthy",
            healthy=False,
            reasons=["the frontier does not answer"],
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
        reasons.append(f"{pending:,} URLs wait, more than {settings.health_max_pending:,}")
    finished = totals.completed + totals.failed
    many = finished >= settings.health_min_finished
    if many and totals.failed > settings.health_max_failed * totals.completed:
        reasons.append(
            f"{totals.failed:,} URLs failed and {totals.completed:,} were completed,"
            f" more than {settings.health_max_failed:.0%}"
        )
    unserved = await _unserved(service, queues, workers) if workers else {}
    starting = not workers and service.starting
    alive = "starting" if starting else f"{len(workers)} alive" + (f", {stuck} stuck" if stuck else "")
    # Of a service with workers of its own they are missed as soon as they should be there.
    missed = not workers and not starting and (bool(pending) or service.staff is not None)
    if missed and not pending:
        reasons.append("no worker is alive")
    elif missed:
        reasons.append(f"no worker is alive, and {pending:,} URLs wait")
    reasons += [
        f"no worker takes from the queue {name}, and {n:,} URLs wait in it" for name, n in unserved.items()
    ]
    if stuck:
        reasons.append(f"{stuck} workers are stuck")
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
                detail=durable or "it answers",
            ),
            Part(
                name="workers",
                healthy=not (stuck or unserved or missed or starting),
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
    """Queues in which URLs wait that no live worker takes, and how many."""
    waiting = {name: row["waiting"] + row["delayed"] for name, row in of_work(queues).items()}
    lonely = {
        name: number
        for name, number in sorted(waiting.items())
        if number and not any(takes(worker, name) for worker in workers)
    }
    if not lonely:
        return {}
    # Who works on one job takes all of it, wherever a rule put it.
    routed = usual_queues(service.session.routes)
    for job in {worker.heartbeat.job for worker in workers if worker.heartbeat.job is not None}:
        with suppress(NoSuchJob):
            async with asyncio.timeout(PATIENCE):
                queue = (await service.frontier.job(job)).spec.queue
            served = {queue, *routed} if queue == DEFAULT_QUEUE else {queue}
            lonely = {name: number for name, number in lonely.items() if name not in served}
    return lonely


@router.get("/queue/status", tags=["operate"])
async def queue_status(service: ServiceDependency) -> QueueStatus:
    """Every queue and every worker. `dead` is counted over the newest thousand jobs."""
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
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: ServiceDependency) -> Response:
    """For Prometheus."""
    try:
        _, queues, workers, totals = await service.now()
        states = await service.states.get(PATIENCE, old=True)
    except TimeoutError:
        detail = f"the frontier did not answer within {PATIENCE:.0f} s"
        raise Problem(503, detail, headers={"Retry-After": "5"}) from None
    now = frontier_metrics(of_work(service.with_empty(queues)), workers, states, of_work(totals.dead))
    return Response(service.meters.text(now), media_type=MEDIA_TYPE)


@router.get("/workers", tags=["operate"])
async def workers(service: ServiceDependency, limit: Limit = 100, cursor: Offset = 0) -> WorkerList:
    """Who works on this frontier, and how it fares."""
    found = await service.workers.get()
    shown = [_worker(worker) for worker in found[cursor : cursor + limit]]
    return WorkerList(workers=shown, next_cursor=_next(cursor, limit, len(found)))


# -- jobs -----------------------------------------------------------------------------------


@router.get("/jobs", tags=["jobs"])
async def jobs(
    service: ServiceDependency,
    limit: Limit = 100,
    cursor: Annotated[float | None, Query(gt=0, lt=1e12, allow_inf_nan=False)] = None,
) -> JobList:
    """The jobs, newest first."""
    found = await service.frontier.jobs(limit=limit + 1, before=cursor)
    shown = found[:limit]
    more = repr(shown[-1].created_at) if len(found) > limit else None
    return JobList(jobs=[_job(job) for job in shown], next_cursor=more)


@router.get("/jobs/{job_id}", tags=["jobs"])
async def job(job_id: JobId, service: ServiceDependency) -> JobDetail:
    """One job with everything about it."""
    found = await service.frontier.job(job_id)
    delivery = None
    if found.spec.webhook is not None:
        state, attempts, error = await service.messenger.told(found)
        delivery = WebhookView(url=found.spec.webhook.url, state=state, attempts=attempts, error=error)
    more = {"progress": await service.progress(found), "webhook_delivery": delivery}
    return JobDetail.model_validate(job_view(found, time.time()) | more)


@router.post("/jobs/{job_id}/pause", tags=["jobs"])
async def pause_job(job_id: JobId, service: ServiceDependency) -> JobView:
    """Let nothing of it start; what is under way ends as usual."""
    return _job(await service.frontier.update_job(job_id, state=JobState.PAUSED))


@router.post("/jobs/{job_id}/resume", tags=["jobs"])
async def resume_job(job_id: JobId, service: ServiceDependency) -> JobView:
    """Let a paused job go on."""
    return _job(await service.frontier.update_job(job_id, state=JobState.RUNNING))


# -- dead letters ---------------------------------------------------------------------------

_OfJob = Annotated[str | None, Query(min_length=1, max_length=300)]
_OfHost = Annotated[str | None, Query(max_length=300, description="Empty for URLs that were none.")]
_OfError = Annotated[str | None, Query(min_length=1, max_length=64)]


@router.get("/dead", tags=["dead letters"])
async def dead(
    service: ServiceDependency,
    job_id: _OfJob = None,
    host: _OfHost = None,
    error: _OfError = None,
    limit: Limit = 100,
    cursor: Annotated[int, Query(ge=0, lt=2**63)] = 0,
) -> DeadList:
    """URLs that ended without a page, oldest first."""
    which = await _selected(service, job_id, host, error)
    found = await service.frontier.dead(which, after=cursor, limit=limit + 1)
    shown = found[:limit]
    more = str(shown[-1].id) if len(found) > limit else None
    return DeadList(dead=[DeadView.model_validate(dead_view(letter)) for letter in shown], next_cursor=more)


@router.get("/dead/groups", tags=["dead letters"])
async def dead_groups(
    service: ServiceDependency,
    job_id: _OfJob = None,
    host: _OfHost = None,
    error: _OfError = None,
    limit: Limit = 100,
    cursor: Offset = 0,
) -> DeadGroups:
    """Dead letters by host and error class, most frequent first."""
    found = await service.frontier.dead_groups(await _selected(service, job_id, host, error))
    shown = [DeadGroupView.model_validate(dead_group_view(group)) for group in found[cursor : cursor + limit]]
    return DeadGroups(groups=shown, next_cursor=_next(cursor, limit, len(found)))


@router.post("/dead/retry", tags=["dead letters"], dependencies=[Admin])
async def dead_retry(asked: DeadRetry, service: ServiceDependency) -> Retried:
    """Let dead letters wait for a visit again. Those of cancelled jobs stay dead."""
    which = await _selected(service, asked.job_id, asked.host, asked.error, asked.ids)
    return Retried(retried=await service.frontier.revive(which, reset_attempts=asked.reset_attempts))


@router.post("/dead/purge", tags=["dead letters"], dependencies=[Admin])
async def dead_purge(asked: DeadSelection, service: ServiceDependency) -> Purged:
    """Forget dead letters for good. Their URLs stay known and stay counted as dead."""
    which = await _selected(service, asked.job_id, asked.host, asked.error, asked.ids)
    return Purged(purged=await service.frontier.purge(which))


async def _selected(
    service: Service, job: str | None, host: str | None, error: str | None, ids: list[int] | None = None
) -> Selection:
    """Raises UsageError and NoSuchJob: a typing mistake must not look like "none"."""
    if error is not None and error not in CLASSES and not re.fullmatch(r"http_[1-5]\d\d", error):
        raise UsageError("no such error class", hint="for example http_404, connect_timeout, tls_invalid")
    if job is not None:
        await service.frontier.job(job)
    lane = host if not host else lane_named(host)
    return Selection(job=job, lane=lane, error=error, ids=tuple(ids) if ids else None)


# -- lanes ----------------------------------------------------------------------------------


@router.get("/lanes", tags=["lanes"])
async def lanes(service: ServiceDependency, limit: Limit = 100, cursor: Offset = 0) -> LaneList:
    """Hosts that have work or a pace of their own, busiest first."""
    found = await service.frontier.lanes(limit=cursor + limit + 1)
    shown = [_lane_view(lane) for lane in found[cursor : cursor + limit]]
    return LaneList(lanes=shown, next_cursor=_next(cursor, limit, len(found)))


@router.get("/lanes/{host}", tags=["lanes"])
async def lane(host: Host, service: ServiceDependency) -> LaneView:
    """The pace of one host."""
    return await _lane(service, lane_named(host))


@router.put("/lanes/{host}", tags=["lanes"], dependencies=[Admin])
async def set_lane(host: Host, asked: LaneChange, service: ServiceDependency) -> LaneView:
    """Pin the pace of a host: from now on, whatever jobs and the host itself ask for."""
    gap = parse_rate(asked.rate) if asked.rate is not None else None
    changed = any(value is not None for value in (gap, asked.concurrency, asked.burst))
    pinned = asked.pinned if asked.pinned is not None else True if changed else None
    return await _pace(
        service, host, Pace(gap=gap, width=asked.concurrency, burst=asked.burst, pinned=pinned)
    )


@router.post("/lanes/{host}/pause", tags=["lanes"], dependencies=[Admin])
async def pause_lane(host: Host, service: ServiceDependency) -> LaneView:
    """Visit a host no more until it is resumed."""
    return await _pace(service, host, Pace(paused=True))


@router.post("/lanes/{host}/resume", tags=["lanes"], dependencies=[Admin])
async def resume_lane(host: Host, service: ServiceDependency) -> LaneView:
    """Visit a host again: ends a pause, and a rest that errors or the host itself imposed."""
    return await _pace(service, host, Pace(paused=False, blocked=0.0))


async def _pace(service: Service, host: str, pace: Pace) -> LaneView:
    return _lane_view(await service.session.set_pace(lane_named(host), pace))


async def _lane(service: Service, name: str) -> LaneView:
    found = await service.frontier.lanes(names=[name], limit=1)
    if not found:
        raise Problem(404, f"no host {name!r}", hint="`GET /lanes` lists them")
    return _lane_view(found[0])


def _job(job: Job) -> JobView:
    return JobView.model_validate(job_view(job, time.time()))


def _worker(worker: WorkerStatus) -> WorkerView:
    return WorkerView.model_validate(worker_view(worker))


def _lane_view(lane: Lane) -> LaneView:
    return LaneView.model_validate(lane_view(lane, time.time()))


def _next(cursor: int, limit: int, total: int) -> str | None:
    return str(cursor + limit) if total > cursor + limit else None
