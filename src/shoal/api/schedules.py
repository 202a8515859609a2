"""Jobs that are submitted again and again: `/schedules`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from shoal.api.idempotency import Key, once
from shoal.api.jobs import canonical, page_limit, webhook_of, wishes_of
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
    remove_schedule,
    run_schedule,
    scheduled,
)
from shoal.app.views import schedule_view, status_of
from shoal.errors import ScheduleExists
from shoal.schedule.book import Book, Schedule

Name = Annotated[ScheduleName, Path()]
_TAKEN: dict[int | str, dict[str, Any]] = {
    409: {"description": "There is one of this name, or the same request is being worked on."}
}
_REPLAYED = {"Idempotency-Replayed": "true"}

router = APIRouter(prefix="/schedules", tags=["schedules"])


@router.get("")
async def schedules(
    service: ServiceDependency,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[ScheduleName | None, Query(description="`next_cursor` of the page before.")] = None,
) -> ScheduleList:
    """The schedules by name."""
    found = [
        each
        for name, each in (await Book(service.frontier.notes).all()).items()
        if cursor is None or name > cursor
    ]
    more = found[limit - 1].name if len(found) > limit else None
    return ScheduleList(schedules=[_view(each) for each in found[:limit]], next_cursor=more)


@router.post("", status_code=201, response_model=ScheduleView, responses=_TAKEN)
async def add(
    asked: ScheduleRequest,
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    key: Key = None,
) -> Response:
    """Submit a job like this whenever it is time. The same is asked and allowed as for `POST /scrape`."""
    made = _timing(asked).on(_made(asked, service, caller))
    async with once(
        service.frontier.notes, caller, request.scope["path"], key, await request.body()
    ) as attempt:
        if attempt.answer is not None:
            return Response(attempt.answer, 201, media_type="application/json", headers=_REPLAYED)
        kept = await _kept(service, made, replace=asked.replace, again=key is not None)
        service.scheduler.wake()
        answer = _view(kept).model_dump_json().encode()
        await attempt.keep(answer)
        return Response(answer, 201, media_type="application/json")


@router.get("/{name}")
async def schedule(name: Name, service: ServiceDependency) -> ScheduleView:
    return _view(await Book(service.frontier.notes).one(name))


@router.patch("/{name}")
async def change(name: Name, asked: ScheduleChange, service: ServiceDependency) -> ScheduleView:
    """Change when it fires, pause it or let it go on. The next firing is counted from now: what was
    missed while it was paused is not made up for."""
    changed = await change_schedule(service.session, name, _timing(asked))
    service.scheduler.wake()
    return _view(changed)


@router.delete("/{name}", status_code=204, response_class=Response)
async def remove(name: Name, service: ServiceDependency) -> Response:
    """Its jobs stay."""
    await remove_schedule(service.session, name)
    return Response(status_code=204)


@router.post("/{name}/run", status_code=202, response_model=Submitted, responses=_TAKEN)
async def run(
    name: Name, request: Request, service: ServiceDependency, caller: CallerDependency, key: Key = None
) -> Response:
    """Submit its job now, also if it is paused or its last job still runs."""
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


def _timing(asked: ScheduleTiming) -> Timing:
    return Timing(asked.cron, asked.every, asked.timezone, asked.overlap, asked.catch_up, asked.paused)


def _made(asked: ScheduleRequest, service: Service, caller: Caller) -> Schedule:
    """Raises Problem and UsageError, as submitting the job would."""
    start = canonical(asked.start)
    said = asked.model_fields_set
    # A scraper knows how much it wants, within what the server allows.
    wanted = asked.expected_pages or (service.session.settings.max_pages if asked.scraper else None)
    return scheduled(
        service.session,
        asked.name,
        start,
        asked.scraper or SITE,
        **wishes_of(caller, asked),
        max_pages=page_limit(service, wanted, len(start)),
        output=asked.output_format,
        webhook=webhook_of(asked.webhook),
        queue=asked.queue,
        priority=asked.priority if "priority" in said else None,
        ttl=asked.ttl,
    )


async def _kept(service: Service, made: Schedule, *, replace: bool, again: bool) -> Schedule:
    """With `again` it may be there already: from an attempt that did not come to its answer."""
    try:
        return await add_schedule(service.session, made, replace=replace)
    except ScheduleExists:
        known = await Book(service.frontier.notes).one(made.name)
        if again and known.same_as(made):
            return known
        raise


def _view(schedule: Schedule) -> ScheduleView:
    return ScheduleView.model_validate(schedule_view(schedule))
