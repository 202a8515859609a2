"""The bodies of the tasks. `application` registers them with Celery."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Any

import msgspec

from shoal import urls
from shoal.app import SITE, Session, evict_dead_workers, process_name, summarise
from shoal.celery.config import LONGEST
from shoal.celery.failure import ScrapeFailed
from shoal.errors import BadUrl, ExportError, UsageError
from shoal.events import Visited
from shoal.export.formats import exporter_for
from shoal.model import Item, Job, JobSpec, JobState, Selection
from shoal.politeness.scope import Scope
from shoal.queues import TASK_QUEUE
from shoal.scrape.site import chosen
from shoal.settings import load

OPTIONS = frozenset(
    (
        *("scope", "rate", "per_host", "max_pages", "depth", "include", "exclude", "fields"),
        *("cache", "headers", "retries", "page_timeout"),
    )
)
"""Options of a task. The worker's settings decide about private addresses and robots.txt."""
MERGE = 1000


# -- visits ---------------------------------------------------------------------------------


def document(url: str, visited: Visited | None) -> dict[str, Any]:
    """Returns one visit as it is in the task's result."""
    if visited is None:
        return {"url": url, "outcome": "lost"}
    fields: dict[str, Any] = {
        "url": url,
        "outcome": visited.outcome,
        "status": visited.status,
        "seconds": round(visited.seconds, 3),
    }
    if visited.error:
        fields |= {"error": visited.error, "message": visited.message}
    return fields


# -- one page, one site ---------------------------------------------------------------------


def parse_options(
    config: Any, options: dict[str, Any], url: Any, timeout: float
) -> tuple[dict[str, Any], float, bool]:
    """Returns the options of a task, from `config` and by name, its time limit, and whether it fails if there
    is no result. Raises ScrapeFailed."""
    shown = url if isinstance(url, str) else ""
    if config is not None and not (isinstance(config, dict) and all(isinstance(key, str) for key in config)):
        raise ScrapeFailed(
            "usage", f"config must be an object of options, not {type(config).__name__}", shown
        )
    given = {**(config or {}), **options}
    within, fail = given.pop("timeout", timeout), given.pop("fail", True)
    if isinstance(within, bool) or not isinstance(within, int | float) or not 0 < within <= LONGEST:
        raise ScrapeFailed("usage", f"timeout must be above 0 and at most {LONGEST} seconds", shown)
    if not isinstance(fail, bool):
        raise ScrapeFailed("usage", f"fail must be true or false, not {fail!r}", shown)
    if unknown := sorted(set(given) - OPTIONS):
        known = ", ".join(sorted((*OPTIONS, "timeout", "fail")))
        raise ScrapeFailed("usage", f"there is no option {unknown[0]!r}; the options are {known}", shown)
    return given, float(within), fail


async def scrape_page(
    session: Session, url: str, job: str, options: dict[str, Any], *, within: float, retries: int
) -> dict[str, Any]:
    """Returns the item of one page. Raises ScrapeFailed."""
    target = _canonical(url)
    # A redirect is a URL of its own.
    spec = _spec(target, {"scope": "page", "max_pages": 20, **options}, retries)
    view = await _crawl(session, target, job, spec, within)
    if view is None:
        raise ScrapeFailed("deadline", f"not finished within {within:g} s", url)
    async for item in _items(session, job):
        return item | {"worker_id": process_name()}
    for letter in await session.frontier.dead(Selection(job=job), limit=1):
        raise ScrapeFailed(letter.failure.error, letter.failure.message, url)
    raise ScrapeFailed(
        "skipped", "the page has no item: robots.txt forbids it, or it redirects out of scope", url
    )


async def scrape_whole(
    session: Session, url: str, job: str, options: dict[str, Any], *, within: float, retries: int
) -> dict[str, Any]:
    """Returns the summary of a site's crawl. When the time is up the rest is cancelled. Raises
    ScrapeFailed."""
    target = _canonical(url)
    spec = _spec(target, {"max_pages": 100, **options}, retries)
    started = time.perf_counter()
    view = await _crawl(session, target, job, spec, within)
    summary = summarise(view or await session.frontier.job(job), time.perf_counter() - started, None)
    fields: dict[str, Any] = msgspec.to_builtins(summary)
    fields |= {"url": url, "worker_id": process_name()}
    return fields if view is not None else fields | {"status": "timeout"}


def _canonical(url: str) -> str:
    if not isinstance(url, str):
        raise ScrapeFailed("usage", f"url must be a string, not {type(url).__name__}")
    try:
        return urls.canonical(url)
    except BadUrl as error:
        raise ScrapeFailed(error.error, error.why, url) from None


def _spec(target: str, options: dict[str, Any], retries: int) -> JobSpec:
    names = {"page_timeout": "timeout"}
    try:
        settings = load(**{"retries": retries, **{names.get(k, k): v for k, v in options.items()}})
        chosen(settings.fields)
        spec = settings.spec((target,), scraper=SITE, dedicated=True, queue=TASK_QUEUE, priority=9)
        Scope(spec)
    except UsageError as error:
        raise ScrapeFailed("usage", str(error), target) from None
    return spec


async def _crawl(session: Session, target: str, job: str, spec: JobSpec, within: float) -> Job | None:
    """Crawl the job in this process. Returns it when it has ended; None if the time was up first, in which
    case the rest is cancelled.

    The job is named after the task, so a task that is given to another process continues it.
    """
    await session.open_job(spec, job)
    await evict_dead_workers(session.frontier, job)
    await session.submit(job, [target])
    worker = session.worker(job=job)
    running = asyncio.create_task(worker.run())
    try:
        done, _ = await asyncio.wait({running}, timeout=within)
        if not done:
            await session.frontier.update_job(job, state=JobState.CANCELLED)
    finally:
        worker.stop()
        worker.stop()
        await asyncio.gather(running, return_exceptions=True)
    if not done:
        return None
    running.result()
    return await session.frontier.job(job)


async def _items(session: Session, job: str) -> AsyncIterator[dict[str, Any]]:
    position = 0
    while items := await session.frontier.items(job, after=position, limit=MERGE):
        for item in items:
            yield msgspec.json.decode(item.body)
        position = items[-1].seq


# -- the end of a chord ---------------------------------------------------------------------


class Results:
    """The results of earlier tasks, sorted: items, summaries of sites, failures. An item that occurs twice
    counts once."""

    def __init__(self, given: Any) -> None:
        self.items: dict[Any, dict[str, Any]] = {}
        self.sites: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self._add(given)

    def _add(self, result: Any) -> None:
        if isinstance(result, list | tuple):
            for each in result:
                self._add(each)
        elif not isinstance(result, dict):
            message = f"not the result of a task: {str(result)[:100]!r}"
            self.failures.append({"error": "usage", "message": message})
        elif "error" in result:
            self.failures.append(result)
        elif "job" in result:
            self.sites.append(result)
        else:
            self.items.setdefault(result.get("url", len(self.items)), result)

    @property
    def document(self) -> dict[str, Any]:
        pages = len(self.items) + sum(site.get("pages", 0) for site in self.sites)
        failed = len(self.failures) + sum(site.get("dead", 0) for site in self.sites)
        workers = {each.get("worker_id") for each in (*self.items.values(), *self.sites)} - {None}
        return {
            "total": pages + failed,
            "success": pages,
            "failed": failed,
            "workers_used": len(workers),
            "jobs": [site["job"] for site in self.sites],
            "failures": self.failures,
        }


def check_out(out: str) -> str:
    """Returns the file name. Raises ScrapeFailed unless it is below the directory in which the worker was
    started: it comes in a message."""
    path = PurePosixPath(out)
    if path.is_absolute() or ".." in path.parts:
        raise ScrapeFailed("usage", f"{out!r} is not below the worker's directory")
    try:
        exporter_for(out, "")
    except UsageError as error:
        raise ScrapeFailed("usage", str(error)) from None
    return out


async def export(session: Session, results: Results, out: str, name: str) -> int:
    """Write all items into one file; those of whole sites come from the frontier. Returns their number.

    `name` is the task's, so a task that is given to another process continues the same file.
    """
    exporter = exporter_for(out, name)
    seen: set[Any] = set()
    batch: list[Item] = []
    seq = 0
    try:
        at = await asyncio.to_thread(exporter.open, 0)
        async for item in _all_items(session, results):
            if (url := item.get("url")) is not None and url in seen:
                continue
            seen.add(url)
            seq += 1
            if seq > at:
                batch.append(Item(seq, msgspec.json.encode(item)))
            if len(batch) >= MERGE:
                await asyncio.to_thread(exporter.write, batch)
                batch = []
        if batch:
            await asyncio.to_thread(exporter.write, batch)
        await asyncio.to_thread(exporter.finish)
    except ExportError as error:
        raise ScrapeFailed("export", str(error)) from None
    finally:
        await asyncio.to_thread(exporter.close)
    return seq


async def _all_items(session: Session, results: Results) -> AsyncIterator[dict[str, Any]]:
    for item in results.items.values():
        yield item
    for site in results.sites:
        async for item in _items(session, site["job"]):
            yield item
