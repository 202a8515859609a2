"""Submitting jobs, their progress and their results: `/scrape`."""

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
    WebhookRequest,
)
from shoal.api.problems import Problem
from shoal.api.service import CallerDependency, Service, ServiceDependency, require_admin
from shoal.api.tokens import Caller
from shoal.app.views import FORMATS, status_of
from shoal.errors import BadUrl
from shoal.model import Job, JobSpec, JobState, Webhook
from shoal.politeness.pacing import parse_rate
from shoal.scrape.site import chosen

BUSINESS_QUEUE = "business"
EVENT_POLL = 0.5
HEARTBEAT = 15.0

JobId = Annotated[
    str, Path(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$", description="Id of the job.")
]
Cursor = Annotated[int, Query(ge=0, lt=2**40, description="`next_cursor` of the previous page.")]

router = APIRouter(tags=["jobs"])


@router.post("/scrape", status_code=202, response_model=Submitted, summary="Submit a crawl")
async def scrape(
    body: ScrapeRequest,
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    key: Key = None,
) -> Response:
    """Submits a job that crawls from these URLs. Returns its id at once; workers visit the pages."""
    start = canonical(body.start)
    limit = page_limit(service, body.expected_pages, len(start))
    spec = spec_for(
        service,
        caller,
        start,
        body,
        max_pages=limit,
        queue=body.queue or model.DEFAULT_QUEUE,
        priority=body.priority,
        output=body.output_format,
        webhook=webhook_of(body.webhook),
    )
    return await submit(service, caller, request, key, spec, ttl=body.ttl, given=body.model_fields_set)


@router.post(
    "/scrape/business",
    status_code=202,
    response_model=Submitted,
    summary="Submit a scrape of a company's pages",
)
async def business(
    body: BusinessRequest,
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    key: Key = None,
) -> Response:
    """Submits a job that scrapes the pages of a site that describe the company behind it. The job's queue is
    `business`."""
    (site,) = canonical([body.url])
    start = canonical(body.pages_to_scrape, base=site)
    if "pages_to_scrape" in body.model_fields_set:
        check_page_limit(service, len(start), "pages_to_scrape")
    start = start[: service.session.settings.max_pages]
    options = Options(scope="page", rate=body.rate, allow_private=body.allow_private)
    spec = spec_for(
        service,
        caller,
        start,
        options,
        max_pages=len(start),
        queue=BUSINESS_QUEUE,
        priority=body.priority,
        output=body.output_format,
        webhook=webhook_of(body.webhook),
    )
    return await submit(service, caller, request, key, spec)


@router.get("/scrape/{job_id}/progress", summary="Get a job's progress")
async def progress(job_id: JobId, service: ServiceDependency) -> Progress:
    """Returns the progress of a job."""
    return await service.progress(await service.frontier.job(job_id))


@router.get(
    "/scrape/{job_id}/events",
    summary="Stream a job's progress",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        204: {"description": "The job has ended and its last event was sent before: do not reconnect."},
    },
)
async def events(job_id: JobId, request: Request, service: ServiceDependency) -> Response:
    """Streams the job's progress as server-sent events: one for each change, until the job ends."""
    job = await service.frontier.job(job_id)
    if job.state.ended and "last-event-id" in request.headers:
        # A browser reconnects by itself; 204 stops it.
        return Response(status_code=204)
    return StreamingResponse(
        _events(service, job), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


async def _events(service: Service, job: Job) -> AsyncIterator[str]:
    """Yields an event for each change, and a comment if there was none for a while. Cancelled when the client
    disconnects."""
    number, last, heartbeat = 0, "", time.monotonic()
    with service.meters.streams.track_inprogress():
        while True:
            data = (await service.progress(job)).model_dump_json()
            if data != last:
                number, last, heartbeat = number + 1, data, time.monotonic()
                yield f"id: {number}\nevent: progress\ndata: {data}\n\n"
            elif time.monotonic() - heartbeat >= HEARTBEAT:
                heartbeat = time.monotonic()
                yield ": still here\n\n"
            if job.state.ended or service.closing.is_set():
                return
            await asyncio.sleep(EVENT_POLL)
            job = await service.frontier.job(job.id)


@router.get(
    "/scrape/{job_id}/result",
    summary="Get a job's result",
    response_model=ResultPage,
    responses={
        200: {
            "content": {
                kind: {"schema": {"type": "string"}} for form, kind in results.TYPES.items() if form != "json"
            }
        },
        409: {"description": "The job has not ended; the field `progress` of the document has its progress."},
        501: {"description": "The server lacks the library that writes this format."},
    },
)
async def result(
    job_id: JobId,
    service: ServiceDependency,
    format: Annotated[FormatName | None, Query(description="Default: the job's `output_format`.")] = None,
    output_format: Annotated[FormatName | None, Query(description="Another name of `format`.")] = None,
    partial: Annotated[
        bool, Query(description="Whether to return the items so far of a job that has not ended.")
    ] = False,
    cursor: Cursor = 0,
    limit: Annotated[
        int | None,
        Query(
            ge=1,
            lt=2**40,
            description=(
                "Maximum number of items. With json, the size of a page: 1,000 by default, 10,000 at most."
            ),
        ),
    ] = None,
) -> Response:
    """Returns the job's items: one page of them as json, or all of them in another format."""
    job = await service.frontier.job(job_id)
    if format is not None and output_format is not None and format != output_format:
        raise Problem(
            422, "query.output_format: differs from format", hint="give only one of them: they mean the same"
        )
    form = FORMATS.get(format or output_format or job.spec.output, "json")
    if form == "json" and limit is not None and limit > results.PAGE_ITEMS:
        raise Problem(
            422,
            f"query.limit: a page of json has at most {results.PAGE_ITEMS:,} items",
            hint="follow `next_cursor` with ?cursor=, or use another format",
        )
    if not job.state.ended and not partial:
        raise Problem(
            409,
            f"{job.id} has not ended",
            hint="?partial=true returns the items so far",
            progress=(await service.progress(job)).model_dump(mode="json"),
        )
    if form == "json":
        return await results.page(service.frontier, job, cursor, limit or results.USUAL_ITEMS)
    return results.stream(service.frontier, job, form, cursor, limit)


@router.delete("/scrape/{job_id}", summary="Cancel a job")
async def cancel(job_id: JobId, service: ServiceDependency) -> Progress:
    """Cancels a job: no visit of it starts any more, and visits in flight end within two seconds. Its items
    are kept. A job that has ended does not change."""
    return await service.progress(await service.frontier.update_job(job_id, state=JobState.CANCELLED))


# -- parts of a submission -----------------------------------------------------------------


def canonical(given: Iterable[str], base: str | None = None) -> tuple[str, ...]:
    """Returns the canonical URLs in order, without repetitions. With `base`, all must be on its host.

    Raises Problem that names the first bad one.
    """
    found: dict[str, None] = {}
    for number, url in enumerate(given):
        try:
            form = urls.canonical(url, base=base)
        except BadUrl as error:
            raise _bad_url(number, str(error), error.hint) from None
        if base is not None and urls.origin_of(form) != urls.origin_of(base):
            raise _bad_url(number, "this page is on another site", "give paths, such as /about")
        found[form] = None
    return tuple(found)


def _bad_url(number: int, why: str, hint: str) -> Problem:
    return Problem(422, why, hint=hint, errors=[{"where": f"URL {number}", "message": why}])


def page_limit(service: Service, wanted: int | None, start: int) -> int:
    """Returns the job's page limit: the requested one, or the server's if that is lower.

    Raises Problem if there are more start URLs than pages.
    """
    most = service.session.settings.max_pages
    if start > (most if wanted is None else min(wanted, most)):
        raise Problem(
            422,
            f"{start:,} start URLs, but the job may visit at most {min(wanted or most, most):,} pages",
            hint="raise expected_pages, or the server's MAX_PAGES",
        )
    return min(most, wanted if wanted is not None else max(DEFAULT_PAGES, start))


def check_page_limit(service: Service, number: int, field: str) -> None:
    """Raises Problem if a request names more pages than a job may visit."""
    most = service.session.settings.max_pages
    if number > most:
        raise Problem(
            422,
            f"body.{field}: {number:,} pages, but this server allows {most:,} per job",
            hint=f"give fewer {field}, or raise the server's MAX_PAGES",
        )


def webhook_of(given: WebhookRequest | None) -> Webhook | None:
    if given is None:
        return None
    (url,) = canonical([given.url])
    return Webhook(url, given.secret)


def spec_for(
    service: Service, caller: Caller, start: tuple[str, ...], options: FetchOptions, **more: Any
) -> JobSpec:
    """Returns the spec of a job: the caller's options over the server's settings.

    Raises Problem and UsageError.
    """
    return service.session.spec(
        "site", start, **({"dedicated": False} | spec_options(caller, options) | more)
    )


def spec_options(caller: Caller, options: FetchOptions) -> dict[str, Any]:
    """Returns the given options by the names of a job's spec. Raises Problem if the caller may not give one
    of them."""
    if options.allow_private:
        require_admin(caller, "visit private addresses")
    if options.robots is False:
        require_admin(caller, "ignore robots.txt")
    spec: dict[str, Any] = {
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
        spec |= {
            "scope": options.scope,
            "depth": options.depth,
            "include": tuple(options.include) or None,
            "exclude": tuple(options.exclude) or None,
        }
    given = {name: value for name, value in spec.items() if value is not None}
    chosen(given.get("fields", ()))
    return given


async def fill(
    service: Service, job: Job, *, ttl: float | None = None, given: Collection[str] | None = None
) -> None:
    """Add a job's start URLs. Doing it twice changes nothing.

    The routing rules apply to them as to URLs of `shoal enqueue`. `given` names the fields that the caller
    set, which take precedence over the rules. With None no rule applies."""
    spec, routes = job.spec, service.session.routes
    requests = [
        model.Request(url, job.id, queue=spec.queue, priority=spec.priority, ttl=ttl) for url in spec.start
    ]
    if routes is not None and given is not None:
        explicit = {name: name in given for name in ("queue", "priority", "ttl")}
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
    given: Collection[str] = (),
) -> Response:
    """Open the job of this request and add its start URLs; with an idempotency key only once."""
    async with once(
        service.frontier.notes, caller, request.scope["path"], key, await request.body()
    ) as attempt:
        if attempt.answer is None:
            job = await service.session.open_job(spec, attempt.job)
            await fill(service, job, ttl=ttl, given=given)
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
