"""Visiting a list of URLs and returning their contents in one request: `/api/crawl/batch`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request

from shoal import urls
from shoal.addresses import without_password
from shoal.api.idempotency import Key, once
from shoal.api.jobs import check_page_limit, fill, spec_for
from shoal.api.models import Availability, BatchAnswer, BatchOptions, BatchRequest, BatchResult, BatchStats
from shoal.api.problems import Problem
from shoal.api.results import batches
from shoal.api.service import LOCAL_QUEUE, PATIENCE, CallerDependency, Service, ServiceDependency
from shoal.engine.skip_notes import skip_of
from shoal.errors import BadUrl, FrontierError
from shoal.events import Event, Visited
from shoal.model import DEFAULT_QUEUE, JobSpec, JobState, Selection
from shoal.scrape.site import chosen

POLL = 0.05
BROKER_AWAY = "the broker of the Celery workers is not responding: is it running?"
MOST_BYTES = 64 * 1024 * 1024
"""Maximum content of one response. The rest stays in the job's result, which is paged."""
Json = dict[str, Any]
NEEDED = ("url", "final_url", "status")
"""Fields that every result needs."""
CONTENT = ("title", "text")
"""Fields that are kept too, unless the request names others."""

router = APIRouter(prefix="/api/crawl", tags=["batch"])


@router.post("/batch", summary="Visit URLs and return their contents")
async def batch(
    body: BatchRequest,
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    key: Key = None,
) -> BatchAnswer:
    """Visits these URLs and returns their contents, after `timeout` seconds at most.

    With `distributed`, workers visit the URLs; after a timeout they continue, and the batch has progress
    and a result like any job: its `session_id` is a `job_id`. Otherwise this server process visits them,
    and a timeout cancels the rest.
    """
    wanted, bad = _canonical(body.urls)
    if not wanted:
        raise Problem(422, str(next(iter(bad.values()))), hint="give at least one valid URL")
    options = body.options or BatchOptions()
    start = tuple(dict.fromkeys(wanted.values()))
    check_page_limit(service, len(start), "urls")
    fields = [name.strip() for name in options.fields]
    chosen(fields)
    spec = spec_for(
        service,
        caller,
        start,
        options.model_copy(update={"fields": [*NEEDED, *(fields or CONTENT)]}),
        scope="page",
        max_pages=len(start),
        queue=DEFAULT_QUEUE if body.distributed else LOCAL_QUEUE,
        priority=options.priority,
        dedicated=not body.distributed,
        record_worker=True,
    )
    end = time.monotonic() + body.timeout
    if body.distributed:
        why = BROKER_AWAY if await service.broker_away() else ""
        if why or not await service.wait_for_worker(DEFAULT_QUEUE, body.timeout):
            raise Problem(
                503,
                why or "no worker is alive",
                hint=f"start one with `{service.worker_command}`, or leave distributed out",
                headers={"Retry-After": "5"},
            )
    async with once(
        service.frontier.notes, caller, request.scope["path"], key, await request.body()
    ) as attempt:
        opened = await service.session.open_job(spec, attempt.job)
        await fill(service, opened)
    job = opened.id
    visited: dict[str, str] = {}
    working = nullcontext() if body.distributed else _local_worker(service, job, spec, visited)
    async with working:
        ended = await _wait(service, job, request, end - time.monotonic())
        if not ended and not body.distributed:
            await service.frontier.update_job(job, state=JobState.CANCELLED)
    ends = await _Ends.read(service, job, fields, visited, ended=ended)
    results = await _results(body.urls, wanted, bad, ends)
    return BatchAnswer(
        session_id=job,
        results=results,
        stats=_stats(results),
        distributed=body.distributed,
        timed_out=not ended,
    )


@router.get("/distributed/status", summary="Availability of workers for a batch")
async def distributed_status(service: ServiceDependency) -> Availability:
    """Returns whether workers can visit a distributed batch, and if not, why. If a broker of Celery workers
    is configured, the service's own workers do not count."""
    try:
        number = len(await service.taking(DEFAULT_QUEUE, PATIENCE))
    except (FrontierError, TimeoutError):
        return Availability(
            distributed_available=False,
            message="the frontier is not responding: is its server running?",
            workers=0,
        )
    message = (
        f"live workers: {number}"
        if number
        else f"no worker is alive: start one with `{service.worker_command}`"
    )
    if not number and service.starting and not service.by_celery:
        message = "the workers are starting; a distributed batch waits for them"
    away = await service.broker_away()
    return Availability(
        distributed_available=number > 0 and not away,
        message=BROKER_AWAY if away else message,
        workers=number,
    )


def _canonical(given: list[str]) -> tuple[dict[str, str], dict[str, BadUrl]]:
    """Returns the canonical form of each valid URL, and the error of each invalid one."""
    wanted: dict[str, str] = {}
    bad: dict[str, BadUrl] = {}
    for url in given:
        try:
            wanted[url] = urls.canonical(url)
        except BadUrl as error:
            bad[url] = error
    return wanted, bad


@asynccontextmanager
async def _local_worker(
    service: Service, job: str, spec: JobSpec, visited: dict[str, str]
) -> AsyncIterator[None]:
    """Run a worker for this job in this process while the body runs. `visited` receives its name for each URL
    that it visits: visits without an item or a dead letter are recorded nowhere else."""

    def watch(event: Event) -> None:
        if isinstance(event, Visited):
            visited[event.url] = worker.name

    async with service.local_slot():
        worker = service.session.worker(job=job, lease=spec.lease, watch=watch)
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            # Twice: visits still in flight are released at once.
            worker.stop()
            worker.stop()
            with suppress(FrontierError):
                await asyncio.shield(_over(running))


async def _over(running: Awaitable[None]) -> None:
    await running


async def _wait(service: Service, job: str, request: Request, within: float) -> bool:
    """Wait until the job ends. Returns False if the time is up, the client disconnects or the service
    stops."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            while not (await service.frontier.job(job)).state.ended:
                if service.closing.is_set() or await request.is_disconnected():
                    return False
                await asyncio.sleep(POLL)
            return True
    return False


async def _results(
    given: list[str], wanted: dict[str, str], bad: dict[str, BadUrl], ends: _Ends
) -> list[BatchResult]:
    """Returns one result per URL, in the order of the request."""
    results: list[BatchResult] = []
    size = 0
    for url in given:
        if url in bad:
            error, shown = bad[url], without_password(url)
            results.append(BatchResult(status="failed", url=shown, error=error.error, message=error.why))
            continue
        end = await ends.of(wanted[url])
        # A page counts once per URL: a thousand URLs may lead to one page.
        weight = end.pop("size", 0)
        if size + weight > MOST_BYTES:
            end |= {"content": None, "item": None, "truncated": True}
        else:
            size += weight
        results.append(BatchResult(url=url, **end))
    return results


class _Ends:
    """How the URLs of a batch ended, as fields of a result."""

    def __init__(
        self, service: Service, job: str, found: dict[str, Json], lost: dict[str, Json], *, ended: bool
    ) -> None:
        self._service = service
        self._job = job
        self._found = found
        self._lost = lost
        self._ended = ended

    @classmethod
    async def read(
        cls, service: Service, job: str, fields: list[str], visited: dict[str, str], *, ended: bool
    ) -> _Ends:
        return cls(
            service, job, await _found(service, job, fields), await _lost(service, job, visited), ended=ended
        )

    async def of(self, url: str) -> Json:
        """Returns the fields of one URL's result. A redirect ends as its target does, even if that was
        visited for another URL: each URL is visited once. `size` is its approximate share of the
        response."""
        passed: set[str] = set()
        at, worker = url, ""
        while at not in passed:
            if at in self._found:
                return dict(self._found[at])
            if at in self._lost:
                return dict(self._lost[at])
            passed.add(at)
            skip = await skip_of(self._service.frontier.notes, self._job, at)
            if skip is None:
                return {"status": "pending"} if not self._ended else _failure("skipped", "it has no item")
            if skip.why != "redirect":
                worker = worker if skip.why == "robots" else skip.worker
                return _failure(skip.why, _message(skip.why, at, redirected=at != url), worker)
            at, worker = skip.to, skip.worker
        return _failure("too_many_redirects", "redirects in a circle", worker)


def _failure(error: str, message: str, worker: str = "") -> Json:
    return {"status": "failed", "error": error, "message": message, "worker_id": worker or None}


def _message(why: str, url: str, *, redirected: bool) -> str:
    page = f"{url}, to which it redirects" if redirected else "it"
    if why == "robots":
        return f"robots.txt forbids {page}"
    return f"{page}{',' if redirected else ''} has no item: {why}"


async def _found(service: Service, job: str, wanted: list[str]) -> dict[str, Json]:
    """Returns the successful results, by the requested URL and by the final URL."""
    found: dict[str, Json] = {}
    targets: dict[str, Json] = {}
    size = 0
    async for items in batches(service.frontier, job, 0):
        for item in items:
            fields = msgspec.json.decode(item.body)
            # Fields that the request names are there twice: as content and in `item`.
            weight = len(item.body) * (2 if wanted else 1)
            size += weight
            kept = size <= MOST_BYTES
            target = fields.get("final_url")
            found[fields["url"]] = targets[target] = {
                "status": "success",
                "final_url": target,
                "content": fields.get("text") if kept else None,
                "title": fields.get("title"),
                "item": {name: fields.get(name) for name in wanted} if kept and wanted else None,
                "status_code": fields.get("status"),
                "worker_id": fields.get("worker"),
                "truncated": not kept,
                "size": weight if kept else 0,
            }
    return targets | found


async def _lost(service: Service, job: str, visited: dict[str, str]) -> dict[str, Json]:
    """Returns the failed results of dead letters, by the requested URL and by the URL that failed."""
    lost: dict[str, Json] = {}
    targets: dict[str, Json] = {}
    after = 0
    while letters := await service.frontier.dead(Selection(job=job), after=after, limit=1000):
        for letter in letters:
            request, failure = letter.request, letter.failure
            lost[request.origin or request.url] = targets[request.url] = {
                "status": "failed",
                "error": failure.error,
                "message": failure.message,
                "status_code": _status_of(failure.error),
                "worker_id": failure.worker or visited.get(request.url),
            }
        after = letters[-1].id
    return targets | lost


def _status_of(error: str) -> int | None:
    """Returns the HTTP status in the name of a class such as http_404."""
    number = error.removeprefix("http_")
    return int(number) if error.startswith("http_") and number.isdigit() else None


def _stats(results: list[BatchResult]) -> BatchStats:
    states = [result.status for result in results]
    return BatchStats(
        total=len(results),
        success=states.count("success"),
        failed=states.count("failed"),
        pending=states.count("pending"),
        workers_used=len({result.worker_id for result in results if result.worker_id}),
    )
