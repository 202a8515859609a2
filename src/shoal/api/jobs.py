"""Submitting jobs and what becomes of them: `/scrape`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from shoal import model, urls
from shoal.api import results
from shoal.api.idempotency import Key, once
from shoal.api.models import (
    DEFAULT_PAGES,
    BusinessRequest,
    FetchOptions,
    FormatName,
    Options,
    Progress,
    ResultPage,
    ScrapeRequest,
    Submitted,
    WebhookGiven,
)
from shoal.api.problems import Problem
from shoal.api.service import CallerDependency, Service, ServiceDependency, need_admin
from shoal.api.tokens import Caller
from shoal.app.views import FORMATS, status_of
from shoal.errors import BadUrl
from shoal.model import Job, JobSpec, JobState, Webhook
from shoal.politeness.pacing import parse_rate
from shoal.scrape.site import chosen

BUSINESS_QUEUE = "business"
EVENT_POLL = 0.5
HEARTBEAT = 15.0

JobId = Annotated[str, Path(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")]
Cursor = Annotated[int, Query(ge=0, lt=2**40, description="`next_cursor` of the page before.")]

router = APIRouter(tags=["jobs"])


@router.post("/scrape", status_code=202, response_model=Submitted)
async def scrape(
    asked: ScrapeRequest,
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    key: Key = None,
) -> Response:
    """Crawl from these URLs. Answers at once; workers do it."""
    start = canonical(asked.start)
    limit = page_limit(service, asked.expected_pages, len(start))
    spec = spec_for(
        service,
        caller,
        start,
        asked,
        max_pages=limit,
        queue=asked.queue or model.DEFAULT_QUEUE,
        priority=asked.priority,
        output=asked.output_format,
        webhook=webhook_of(asked.webhook),
    )
    return await submit(service, caller, request, key, spec, ttl=asked.ttl, said=asked.model_fields_set)


@router.post("/scrape/business", status_code=202, response_model=Submitted)
async def business(
    asked: BusinessRequest,
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    key: Key = None,
) -> Response:
    """Scrape the pages of a site that tell who is behind it. Its job waits in the queue `business`."""
    (site,) = canonical([asked.url])
    start = canonical(asked.pages_to_scrape, base=site)
    if "pages_to_scrape" in asked.model_fields_set:
        need_room(service, len(start), "pages_to_scrape")
    start = start[: service.session.settings.max_pages]
    options = Options(scope="page", rate=asked.rate, allow_private=asked.allow_private)
    spec = spec_for(
        service,
        caller,
        start,
        options,
        max_pages=len(start),
        queue=BUSINESS_QUEUE,
        priority=asked.priority,
        output=asked.output_format,
        webhook=webhook_of(asked.webhook),
    )
    return await submit(service, caller, request, key, spec)


@router.get("/scrape/{job_id}/progress")
async def progress(job_id: JobId, service: ServiceDependency) -> Progress:
    """How far a job is."""
    return await service.progress(await service.frontier.job(job_id))


@router.get(
    "/scrape/{job_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        204: {"description": "The job has ended and you know it: do not come back."},
    },
)
async def events(job_id: JobId, request: Request, service: ServiceDependency) -> Response:
    """The job's progress as server-sent events: whenever it changes, until the job ends."""
    job = await service.frontier.job(job_id)
    if job.state.ended and "last-event-id" in request.headers:
        # A browser comes back by itself; this is how it is told not to.
        return Response(status_code=204)
    return StreamingResponse(
        _events(service, job), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


async def _events(service: Service, job: Job) -> AsyncIterator[str]:
    """An event for each change, a comment when there was none for a while. Cancelled when the listener
    hangs up."""
    number, last, heartbeat = 0, "", time.monotonic()
    with service.meters.streams.track_inprogress():
        while True:
            told = (await service.progress(job)).model_dump_json()
            if told != last:
                number, last, heartbeat = number + 1, told, time.monotonic()
                yield f"id: {number}\nevent: progress\ndata: {told}\n\n"
            elif time.monotonic() - heartbeat >= HEARTBEAT:
                heartbeat = time.monotonic()
                yield ": still here\n\n"
            if job.state.ended or service.closing.is_set():
                return
            await asyncio.sleep(EVENT_POLL)
            job = await service.frontier.job(job.id)


@router.get(
    "/scrape/{job_id}/result",
    response_model=ResultPage,
    responses={
        200: {
            "content": {
                kind: {"schema": {"type": "string"}} for form, kind in results.TYPES.items() if form != "json"
            }
        },
        409: {"description": "The job has not ended; `progress` tells how far it is."},
        501: {"description": "The server has no library for this format."},
    },
)
async def result(
    job_id: JobId,
    service: ServiceDependency,
    format: Annotated[FormatName | None, Query(description="Instead of the job's `output_format`.")] = None,
    output_format: Annotated[FormatName | None, Query(description="The same as `format`.")] = None,
    partial: Annotated[bool, Query(description="What there is, of a job that has not ended.")] = False,
    cursor: Cursor = 0,
    limit: Annotated[
        int | None,
        Query(
            ge=1, lt=2**40, description="At most so many items. For json: 1,000 of a page, at most 10,000."
        ),
    ] = None,
) -> Response:
    """The job's items: a page of json, or all of them in another format."""
    job = await service.frontier.job(job_id)
    if format is not None and output_format is not None and format != output_format:
        raise Problem(422, "query.output_format: not the same as format", hint="give one of them")
    form = FORMATS.get(format or output_format or job.spec.output, "json")
    if form == "json" and limit is not None and limit > results.PAGE_ITEMS:
        raise Problem(
            422,
            f"query.limit: a page has {results.PAGE_ITEMS:,} items at most",
            hint="go on with ?cursor=, or ask for another format",
        )
    if not job.state.ended and not partial:
        raise Problem(
            409,
            f"{job.id} has not ended",
            hint="?partial=true gives what there is",
            progress=(await service.progress(job)).model_dump(mode="json"),
        )
    if form == "json":
        return await results.page(service.frontier, job, cursor, limit or results.USUAL_ITEMS)
    return results.stream(service.frontier, job, form, cursor, limit)


@router.delete("/scrape/{job_id}")
async def cancel(job_id: JobId, service: ServiceDependency) -> Progress:
    """Cancel: nothing of it starts any more, what is in flight ends within two seconds. What is stored
    stays. A job that has ended stays as it is."""
    return await service.progress(await service.frontier.update_job(job_id, state=JobState.CANCELLED))


# -- what submitting takes -----------------------------------------------------------------


def canonical(given: Iterable[str], base: str | None = None) -> tuple[str, ...]:
    """The URLs in their one form, each once, in order. With `base` they must be of its host.

    Raises Problem that names the first bad one.
    """
    found: dict[str, None] = {}
    for number, url in enumerate(given):
        try:
            made = urls.canonical(url, base=base)
        except BadUrl as error:
            raise _bad_url(number, str(error), error.hint) from None
        if base is not None and urls.origin_of(made) != urls.origin_of(base):
            raise _bad_url(number, "a page of another site", "give paths, such as /about")
        found[made] = None
    return tuple(found)


def _bad_url(number: int, why: str, hint: str) -> Problem:
    return Problem(422, why, hint=hint, errors=[{"where": f"URL {number}", "message": why}])


def page_limit(service: Service, wanted: int | None, start: int) -> int:
    """How many pages the job may have: what was asked for, within what the server allows."""
    most = service.session.settings.max_pages
    if start > (most if wanted is None else min(wanted, most)):
        raise Problem(
            422,
            f"{start:,} URLs to start from, but at most {min(wanted or most, most):,} pages",
            hint="raise expected_pages, or MAX_PAGES of the server",
        )
    return min(most, wanted if wanted is not None else max(DEFAULT_PAGES, start))


def need_room(service: Service, number: int, field: str) -> None:
    """Raises Problem when more pages are named than a job may have."""
    most = service.session.settings.max_pages
    if number > most:
        raise Problem(
            422,
            f"body.{field}: {number:,} pages, but this server allows {most:,} for one job",
            hint=f"give fewer {field}, or raise MAX_PAGES of the server",
        )


def webhook_of(given: WebhookGiven | None) -> Webhook | None:
    if given is None:
        return None
    (url,) = canonical([given.url])
    return Webhook(url, given.secret)


def spec_for(
    service: Service, caller: Caller, start: tuple[str, ...], options: FetchOptions, **more: Any
) -> JobSpec:
    """What a job is asked to do: the caller's wishes over the server's settings.

    Raises Problem and UsageError.
    """
    return service.session.spec("site", start, **({"dedicated": False} | wishes_of(caller, options) | more))


def wishes_of(caller: Caller, options: FetchOptions) -> dict[str, Any]:
    """What the caller said of a job, in the words of its spec. Raises Problem if it may not."""
    if options.allow_private:
        need_admin(caller, "visit private addresses")
    if options.robots is False:
        need_admin(caller, "ignore robots.txt")
    wishes: dict[str, Any] = {
        "gap": parse_rate(options.rate) if options.rate is not None else None,
        "width": options.per_host,
        "fields": tuple(options.fields) or None,
        "headers": options.headers or None,
        "retries": options.retries,
        "timeout": options.page_timeout,
        "robots": options.robots,
        "allow_private": options.allow_private,
    }
    if isinstance(options, Options):
        wishes |= {
            "scope": options.scope,
            "depth": options.depth,
            "include": tuple(options.include) or None,
            "exclude": tuple(options.exclude) or None,
        }
    given = {name: value for name, value in wishes.items() if value is not None}
    chosen(given.get("fields", ()))
    return given


async def fill(
    service: Service, job: Job, *, ttl: float | None = None, said: Collection[str] | None = None
) -> None:
    """Add a job's start URLs. Doing it twice changes nothing.

    Rules send them where they send URLs of `shoal enqueue`; `said` are the fields that the caller gave,
    which count more. None: no rule counts."""
    spec, routes = job.spec, service.session.routes
    requests = [
        model.Request(url, job.id, queue=spec.queue, priority=spec.priority, ttl=ttl) for url in spec.start
    ]
    if routes is not None and said is not None:
        explicit = {name: name in said for name in ("queue", "priority", "ttl")}
        requests = [routes.submitted(request, spec, **explicit) for request in requests]
    await service.adder.add(requests)


async def submit(
    service: Service,
    caller: Caller,
    request: Request,
    key: str | None,
    spec: JobSpec,
    *,
    ttl: float | None = None,
    said: Collection[str] = (),
) -> Response:
    async with once(
        service.frontier.notes, caller, request.scope["path"], key, await request.body()
    ) as attempt:
        if attempt.answer is None:
            job = await service.session.open_job(spec, attempt.job)
            await fill(service, job, ttl=ttl, said=said)
            if spec.webhook is not None:
                service.messenger.watch(job.id)
            answer = Submitted(
                job_id=job.id, status=status_of(job), expected_pages=spec.max_pages or 0
            ).model_dump_json()
            await attempt.keep(answer.encode())
            return Response(answer, 202, media_type="application/json")
        return Response(
            attempt.answer, 202, media_type="application/json", headers={"Idempotency-Replayed": "true"}
        )
