"""Jobs that are submitted by the clock: `/schedules`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from shoal.api.idempotency import Key, once
from shoal.api.jobs import canonical, page_limit, spec_options, webhook_of
from shoal.api.models import (
    ScheduleChange,
    ScheduleList,
    ScheduleName,
    ScheduleRequest,
    ScheduleTiming,
    ScheduleView,
    Submitted,
)
from shoal.api.service import CallerDependency, Service, ServiceDependency
from shoal.api.tokens import Caller
from shoal.app import (
    SITE,
    Timing,
    add_schedule,
    change_schedule,
    new_schedule,
    remove_schedule,
    run_schedule,
)
from shoal.app.views import schedule_view, status_of
from shoal.errors import ScheduleExists
from shoal.schedule.book import Book, Schedule

Name = Annotated[ScheduleName, Path(description="Name of the schedule.")]
_TAKEN: dict[int | str, dict[str, Any]] = {
    409: {"description": "A schedule of this name exists, or the same request is still running."}
}
_REPLAYED = {"Idempotency-Replayed": "true"}

router = APIRouter(prefix="/schedules", tags=["schedules"])


@router.get("", summary="List schedules")
async def schedules(
    service: ServiceDependency,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of entries.")] = 100,
    cursor: Annotated[ScheduleName | None, Query(description="`next_cursor` of the previous page.")] = None,
) -> ScheduleList:
    """Returns the schedules, ordered by name."""
    found = [
        each
        for name, each in (await Book(service.frontier.notes).all()).items()
        if cursor is None or name > cursor
    ]
    more = found[limit - 1].name if len(found) > limit else None
    return ScheduleList(schedules=[_view(each) for each in found[:limit]], next_cursor=more)


@router.post("", status_code=201, response_model=ScheduleView, responses=_TAKEN, summary="Add a schedule")
async def add(
    body: ScheduleRequest,
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    key: Key = None,
) -> Response:
    """Adds a schedule that submits this job at the given times. Fields and permissions are those of
    `POST /scrape`."""
    wanted = _timing(body).on(_schedule(body, service, caller))
    async with once(
        service.frontier.notes, caller, request.scope["path"], key, await request.body()
    ) as attempt:
        if attempt.answer is not None:
            return Response(attempt.answer, 201, media_type="application/json", headers=_REPLAYED)
        added = await _add(service, wanted, replace=body.replace, again=key is not None)
        service.scheduler.wake()
        answer = _view(added).model_dump_json().encode()
        await attempt.keep(answer)
        return Response(answer, 201, media_type="application/json")


@router.get("/{name}", summary="Get a schedule")
async def schedule(name: Name, service: ServiceDependency) -> ScheduleView:
    """Returns one schedule."""
    return _view(await Book(service.frontier.notes).one(name))


@router.patch("/{name}", summary="Change a schedule")
async def change(name: Name, body: ScheduleChange, service: ServiceDependency) -> ScheduleView:
    """Changes when a schedule fires, pauses it or resumes it. The next firing is counted from now: firings
    missed during a pause are not made up for."""
    changed = await change_schedule(service.session, name, _timing(body))
    service.scheduler.wake()
    return _view(changed)


@router.delete("/{name}", status_code=204, response_class=Response, summary="Remove a schedule")
async def remove(name: Name, service: ServiceDependency) -> Response:
    """Removes a schedule. The jobs that it has submitted stay."""
    await remove_schedule(service.session, name)
    return Response(status_code=204)


@router.post(
    "/{name}/run", status_code=202, response_model=Submitted, responses=_TAKEN, summary="Run a schedule now"
)
async def run(
    name: Name, request: Request, service: ServiceDependency, caller: CallerDependency, key: Key = None
) -> Response:
    """Submits the schedule's job now, even if the schedule is paused or its last job is still running."""
    async with once(
        service.frontier.notes, caller, request.scope["path"], key, await request.body()
    ) as attempt:
        if attempt.answer is not None:
            return Response(attempt.answer, 202, media_type="application/json", headers=_REPLAYED)
        job = await service.frontier.job(await run_schedule(service.session, name, attempt.job))
        if job.spec.webhook is not None:
            service.messenger.watch(job.id)
        answer = Submitted(job_id=job.id, status=status_of(job), expected_pages=job.spec.max_pages or 0)
        body = answer.model_dump_json().encode()
        await attempt.keep(body)
        return Response(body, 202, media_type="application/json")


def _timing(body: ScheduleTiming) -> Timing:
    return Timing(body.cron, body.every, body.timezone, body.overlap, body.catch_up, body.paused)


def _schedule(body: ScheduleRequest, service: Service, caller: Caller) -> Schedule:
    """Raises Problem and UsageError, as submitting the job would."""
    start = canonical(body.start)
    # A scraper has its own page limit, within the server's.
    wanted = body.expected_pages or (service.session.settings.max_pages if body.scraper else None)
    return new_schedule(
        service.session,
        body.name,
        start,
        body.scraper or SITE,
        **spec_options(caller, body),
        max_pages=page_limit(service, wanted, len(start)),
        output=body.output_format,
        webhook=webhook_of(body.webhook),
        queue=body.queue,
        priority=body.priority if "priority" in body.model_fields_set else None,
        ttl=body.ttl,
    )


async def _add(service: Service, wanted: Schedule, *, replace: bool, again: bool) -> Schedule:
    """Add a schedule. With `again` an equal one may exist: from a first attempt that was cut off before its
    response."""
    try:
        return await add_schedule(service.session, wanted, replace=replace)
    except ScheduleExists:
        existing = await Book(service.frontier.notes).one(wanted.name)
        if again and existing.same_as(wanted):
            return existing
        raise


def _view(schedule: Schedule) -> ScheduleView:
    return ScheduleView.model_validate(schedule_view(schedule))
