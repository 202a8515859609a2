"""The joiner: scrapers, settings, frontier, fetcher and worker become one thing here only.

`Shoal` is what users hold. `Session` is an open frontier with everything a worker needs around
it; the faces (command line, API) work through it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal import __version__, events, urls
from shoal.dispatch.consumer import Consumer
from shoal.dispatch.port import Dispatch
from shoal.dispatch.pump import Pump
from shoal.dispatch.routes import Routes, broker_queue, frontier_queue
from shoal.engine.brief import Brief, Scraped
from shoal.engine.worker import Worker, WorkerSettings
from shoal.errors import BadUrl, DispatchError, FetchError, FrontierError, NoSuchJob, UsageError
from shoal.export.follow import export_all, follow
from shoal.export.formats import exporter_for
from shoal.fetch.cache import CachingFetcher, DiskCache, LayeredCache, MemoryCache, NotesCache, PageCache
from shoal.fetch.guard import Guard
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Fetcher, Limits
from shoal.fetch.redirects import follow as follow_redirects
from shoal.frontier.move import Moved, Watch, move, moving
from shoal.frontier.parcel import arriving_key
from shoal.frontier.port import Backend, Frontier
from shoal.frontier.rules import check_queue
from shoal.model import (
    BROKER_QUEUES,
    FAILED_QUEUE,
    RESERVED_QUEUES,
    Attendance,
    Beat,
    Counts,
    Job,
    JobSpec,
    JobState,
    Lane,
    Pace,
    Request,
    Response,
)
from shoal.politeness.permission import Permission
from shoal.politeness.scope import Scope
from shoal.registry import (
    DEFAULT_FRONTIER,
    on_server,
    open_dispatch,
    open_frontier,
    reach_dispatch,
    reach_frontier,
    shown,
)
from shoal.scrape.links import Links, canonical_href
from shoal.scrape.page import Page
from shoal.scrape.router import Handler, Scraper, collect
from shoal.scrape.site import chosen, site_item
from shoal.settings import Settings, known, load

if TYPE_CHECKING:
    # Imported when it is used: the XML parser behind it takes time that no other command has.
    from shoal.discover.entry import Entry
    from shoal.discover.site import Bounds, Discovery, Read

SITE = "site"
"""The name of the built-in scraper."""
FEED_TYPES = ("application/rss+xml", "application/atom+xml", "application/rdf+xml", "application/feed+json")
ADD_CHUNK = 20_000
LOCK_SECONDS = 60.0
"""How long the lock of a single run outlives its holder, if that is on another machine."""

_encode = msgspec.json.Encoder().encode


class Shoal:
    """An application: named scrapers and how they run.

    app = Shoal()

    @app.scraper("books", start=["https://books.example/"], rate="2/s")
    async def books(page):
        for a in page.css("article h3 a"):
            yield page.follow(a, label="book")
    """

    def __init__(self, **settings: Any) -> None:
        """Settings by name (see `shoal.settings.Settings`); the environment fills in the rest."""
        known(settings)
        self._given = settings
        self.scrapers: dict[str, Scraper] = {}

    def settings(self, **more: Any) -> Settings:
        return load(**(self._given | more))

    def scraper(self, name: str, **options: Any) -> Callable[[Handler], Scraper]:
        """Decorator: register the function as the scraper `name`."""

        def register(function: Handler) -> Scraper:
            if name in self.scrapers or name == SITE:
                raise UsageError(f"there is a scraper {name!r} already", hint="give it another name")
            self.scrapers[name] = Scraper(name, function, **options)
            return self.scrapers[name]

        return register

    def crawl(self, *start: str, scraper: str = SITE, out: str | None = None, **settings: Any) -> Crawl:
        """Crawl to the end. `await` it for a summary, or iterate over the items as they come.

        `start` are URLs; the name of a scraper works too: `app.crawl("books")`.
        """
        if start and start[0] in self.scrapers:
            scraper, start = start[0], start[1:]
        known(settings)  # now, not when the crawl is first asked for items
        return Crawl(self, start, scraper, out, settings)

    async def submit(
        self, name: str, urls: Iterable[str] | None = None, *, run_id: str = "", **settings: Any
    ) -> dict[str, Any]:
        """Enqueue a run of a scraper and return at once: workers elsewhere do it."""
        async with Session.opened(self.settings(**settings), self) as session:
            return (await session.open_run(name, urls, run_id=run_id)).queued

    async def run(
        self,
        name: str,
        urls: Iterable[str] | None = None,
        *,
        run_id: str = "",
        resume: bool = False,
        out: str | None = None,
        **settings: Any,
    ) -> Summary | dict[str, Any]:
        """Run a scraper by its execution mode: here and to the end, or enqueued for workers."""
        async with Session.opened(self.settings(**settings), self) as session:
            scraper = session.scraper(name)
            if scraper is not None and scraper.execution == "distributed":
                return (await session.open_run(name, urls, run_id=run_id, resume=resume)).queued
            async with session.only(name):
                started = await session.open_run(name, urls, run_id=run_id, resume=resume)
                return await Run(session, started.run_id, out=out).to_end()

    async def discover(self, site: str, *, since: str = "", **settings: Any) -> AsyncIterator[Entry]:
        """The URLs that a site tells of in sitemaps and feeds, as they are read.

        `since` is a date, or `7d` for seven days ago. Files that cannot be read are passed over.
        """
        from shoal.discover.entry import parse_since

        moment = parse_since(since) if since else None
        async with Session.opened(self.settings(**({"frontier": "memory:"} | settings)), self) as session:
            async for entry in session.discovery(site, since=moment):
                yield entry

    async def status(self, run_id: str, **settings: Any) -> dict[str, int]:
        """Counts of a run: pending, claimed, completed, failed, remaining."""
        async with Session.opened(self.settings(**settings), self, create=False) as session:
            return run_counts((await session.frontier.job(run_id)).counts)


class Started(msgspec.Struct, frozen=True):
    """A run that was opened and filled."""

    run_id: str
    scraper: Scraper
    enqueued: int
    known: int
    bad: int

    @property
    def queued(self) -> dict[str, Any]:
        """What a distributed run answers: how to work on it."""
        words = ["shoal", "worker", "--scraper", self.scraper.name, "--run-id", self.run_id]
        command = shlex.join([*words, "--batch-size", "50"])
        return {
            "status": "queued",
            "run_id": self.run_id,
            "enqueued": self.enqueued,
            "worker_command": command,
        }


class Summary(msgspec.Struct, frozen=True):
    """How a crawl ended."""

    job: str
    status: str
    pages: int
    items: int
    failed: int
    dead: int
    seconds: float
    pages_per_second: float
    out: str | None


class Crawl:
    """A crawl that runs when it is awaited or iterated over."""

    def __init__(
        self, app: Shoal, start: tuple[str, ...], scraper: str, out: str | None, settings: dict[str, Any]
    ) -> None:
        self._app = app
        self._start = start
        self._scraper = scraper
        self._out = out
        self._settings = settings
        self.summary: Summary | None = None

    def __await__(self) -> Any:
        return self._run().__await__()

    async def _run(self) -> Summary:
        async for _ in self:
            pass
        assert self.summary is not None
        return self.summary

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        settings = self._app.settings(**self._settings)
        async with Session.opened(settings, self._app) as session:
            scraper = session.scraper(self._scraper)
            start = tuple(urls.canonical(url) for url in self._start) or (scraper.start if scraper else ())
            if not start:
                raise UsageError("no URL to start from", hint="give one, or a scraper with start=")
            spec = session.spec(self._scraper, start)
            job = await session.open_job(spec)
            await session.submit(job.id, start)
            run = Run(session, job.id, out=self._out)
            worker = asyncio.create_task(run.to_end())
            try:
                async for body in session.items_as_they_come(job.id, run.ended):
                    yield msgspec.json.decode(body)
                self.summary = await worker
            finally:
                if not worker.done():
                    run.stop()
                    run.stop()
                    await asyncio.gather(worker, return_exceptions=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The same without async, for scripts and notebooks."""
        from shoal.blocking import iterate

        return iterate(self)


class Session:
    """An open frontier and what works on it. Make it with `opened`."""

    def __init__(self, settings: Settings, app: Shoal, frontier: Backend, allow: Collection[str]) -> None:
        self.settings = settings
        self.app = app
        self.frontier = frontier
        self._guard = Guard(allow=allow)
        self._http: HttpFetcher | None = None
        self._caches: dict[float, Fetcher] = {}
        self._memory = MemoryCache()
        self._disk: DiskCache | None = None
        self._permission: Permission | None = None
        self._links = Links()
        self._numbers = count(1)
        self._routes: Routes | None = None
        self._apps: dict[str, Shoal] = {}
        self.one_job = False
        """Everything here is done for a single job. No URL is fetched twice then, so a cache that
        ends with the process would only cost (measured: 6 % of the CPU)."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        settings: Settings,
        app: Shoal | None = None,
        *,
        allow: Collection[str] = (),
        create: bool = True,
        tell: Callable[[str], None] | None = None,
    ) -> AsyncIterator[Session]:
        """A session on the frontier that the settings name. `allow` are endpoints (`host:port`)
        that may be visited although they are private; `create` makes a frontier if there is none.
        With `tell`, a server that is still starting is waited for, and `tell` hears of every attempt."""
        if tell is None:
            frontier = await open_frontier(settings.frontier, create=create)
        else:
            attempts = settings.connect_attempts
            frontier = await reach_frontier(settings.frontier, attempts=attempts, tell=tell)
        session = cls(settings, app or Shoal(), frontier, allow)
        try:
            yield session
        finally:
            await session._close()

    async def _close(self) -> None:
        if self._permission is not None:
            await self._permission.close()
        if self._http is not None:
            await self._http.close()
        if self._disk is not None:
            await self._disk.close()
        await self.frontier.close()

    # -- jobs -------------------------------------------------------------------------

    def scraper(self, name: str, app: str = "") -> Scraper | None:
        """The registered scraper; None for the built-in one. Raises UsageError.

        `app` is where a job says that it is. Paths differ from machine to machine, so it counts only
        for those who were given no application of their own.
        """
        if name == SITE:
            return None
        known = self.app.scrapers
        if name not in known and self.settings.app:
            known.update(self._loaded(self.settings.app).scrapers)
        elif name not in known and app:
            known = self._loaded(app).scrapers
        if name not in known:
            here = ", ".join(sorted(known)) or "none is registered"
            raise UsageError(f"no scraper {name!r}", hint=f"scrapers here: {here}; give --app FILE")
        return known[name]

    def _loaded(self, where: str) -> Shoal:
        """An application, loaded once: what it says at import is not said again."""
        if where not in self._apps:
            self._apps[where] = load_app(where)
        return self._apps[where]

    def scraper_of(self, job: str, spec: JobSpec) -> Scraper | None:
        """The scraper that a job asks for. Raises UsageError when it cannot be had here."""
        try:
            return self.scraper(spec.scraper, spec.app)
        except UsageError as error:
            raise UsageError(
                f"cannot load scraper {spec.scraper!r} of job {job!r}: {error}", hint=error.hint
            ) from error

    def spec(self, scraper: str, start: tuple[str, ...], **more: Any) -> JobSpec:
        """What a job is asked to do: the scraper's own wishes over the settings."""
        chosen(self.settings.fields)
        named = self.scraper(scraper)
        if named is None:
            spec = self.settings.spec(start, **({"scraper": SITE, "apart": True} | more))
        else:
            given = self.settings.model_fields_set
            wishes: dict[str, Any] = {
                "scope": named.scope,
                "gap": named.gap,
                "width": named.per_host,
                "retries": named.retries,
                "lease": named.lease,
                "queue": named.queue,
                "priority": named.priority,
                "headers": named.headers,
                "fetcher": named.fetcher,
            }
            flags = {
                "scope": "scope",
                "gap": "rate",
                "width": "per_host",
                "retries": "retries",
                "lease": "lease",
            }
            kept = {name: value for name, value in wishes.items() if flags.get(name) not in given}
            spec = self.settings.spec(
                start, scraper=scraper, app=self.settings.app, apart=True, **(kept | more)
            )
        Scope(spec)  # a bad pattern is the caller's mistake, not the worker's
        if spec.lease <= 0 or spec.timeout <= 0:
            raise UsageError("lease and timeout must be above 0")
        return spec

    async def open_job(self, spec: JobSpec, job: str = "") -> Job:
        check_queue(spec.queue, BROKER_QUEUES)
        return await self.frontier.open_job(job or new_job_id(spec), spec)

    async def submit(
        self,
        job: str,
        start: Iterable[str],
        *,
        priority: int | None = None,
        ttl: float | None = None,
        queue: str | None = None,
        delay: float = 0.0,
        on_progress: Callable[[int], None] | None = None,
    ) -> dict[str, int]:
        """Add URLs to a job, in bounded memory. Bad ones become dead letters of class url_*.

        Answers how many were new, known, refused and bad.
        """
        if queue is not None:
            check_queue(queue)
        spec = (await self.frontier.job(job)).spec
        routes = self.routes
        said = {"queue": queue is not None, "priority": priority is not None, "ttl": ttl is not None}
        answers = {"new": 0, "known": 0, "refused": 0, "bad": 0}
        batch: list[Request] = []

        async def send() -> None:
            for added in await self.frontier.add(batch):
                answers[added.value] += 1
            batch.clear()
            if on_progress is not None:
                on_progress(sum(answers.values()))
            await asyncio.sleep(0)

        for url in start:
            try:
                canonical = urls.canonical(url)
            except BadUrl as error:
                answers["bad"] += 1
                shown = url[: urls.MAX_LENGTH].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
                await self.frontier.bury(Request(shown, job), error.error, error.why)
                continue
            request = Request(
                canonical,
                job,
                queue=queue or spec.queue,
                priority=priority or spec.priority,
                ttl=ttl,
                delay=delay,
            )
            batch.append(request if routes is None else routes.submitted(request, spec, **said))
            if len(batch) >= ADD_CHUNK:
                await send()
        await send()
        return answers

    async def unfinished(self, spec: JobSpec) -> Job | None:
        """The newest job that was asked for the same and can go on, or was finished already. Raises
        UsageError if it goes on elsewhere."""
        for job in await self.frontier.jobs(limit=1000):
            same = (job.spec.start, job.spec.scraper) == (spec.start, spec.scraper)
            if same and job.state is not JobState.CANCELLED:
                return job
            left = await moving(self.frontier, job.id) if same else None
            if left is not None and left.complete:
                raise UsageError(f"job {job.id!r} has moved to {left.to}", hint="give that with --frontier")
        return None

    async def resume(self, job: str) -> Job:
        """Let a paused job go on. Raises UsageError if it is cancelled or goes on elsewhere, and while it
        is still arriving from another frontier: half of it would run."""
        await self._can_go_on(await self.frontier.job(job), "job")
        if await self.frontier.noted(arriving_key(job)) is not None:
            raise UsageError(
                f"job {job!r} is still arriving from another frontier",
                hint="run `shoal copy` again: it completes the move and resumes the job",
            )
        return await self.frontier.resume(job)

    async def _can_go_on(self, job: Job, what: str) -> None:
        """Raises UsageError for a job that is cancelled or has moved: what it is given would be dropped."""
        if job.state in (JobState.RUNNING, JobState.PAUSED):
            return
        left = await moving(self.frontier, job.id)
        if left is not None and left.complete:
            raise UsageError(
                f"{what} {job.id} is {job.state.value}: it has moved to {left.to}",
                hint="give that with --frontier",
            )
        if job.state is JobState.CANCELLED:
            raise UsageError(
                f"{what} {job.id} is cancelled",
                hint=f"that is for good; begin another {what} with another name",
            )

    async def evict_dead_workers(self, job: str | None = None) -> int:
        """Take back at once what workers of this machine held that no longer live. Those of
        other machines may live: their leases run out by themselves."""
        dead = [name for name in await self.frontier.holders(job) if process_gone(name)]
        return await self.frontier.evict(dead) if dead else 0

    async def set_pace(self, lane: str, pace: Pace) -> Lane:
        """Change a lane's pace from now on. A host that nobody has seen yet gets the pace of a new job for
        what is left out: a lane without one has no limit."""
        if not await self.frontier.lanes(names=[lane], limit=1):
            gap = self.settings.gap if pace.gap is None else pace.gap
            width = self.settings.per_host if pace.width is None else pace.width
            pace = msgspec.structs.replace(pace, gap=gap, width=width)
        await self.frontier.pace(lane, pace)
        return (await self.frontier.lanes(names=[lane], limit=1))[0]

    async def process_died(self, pid: int) -> int:
        """A worker process that was started here ended without a word: take back what it held now,
        not when its leases end, and look for it no longer."""
        prefix = f"{process_name(pid)}_"
        dead = [name for name in await self.frontier.holders() if name.startswith(prefix)]
        freed = await self.frontier.evict(dead) if dead else 0
        for present in await self.frontier.workers():
            if present.beat.worker.startswith(prefix):
                await self.frontier.leave(present.beat.worker)
        return freed

    async def items_as_they_come(self, job: str, ended: asyncio.Event) -> AsyncIterator[bytes]:
        """Item bodies, from the first to the last, while the job runs."""
        position = 0
        while True:
            last = ended.is_set()
            items = await self.frontier.items(job, after=position, limit=500)
            for item in items:
                yield item.body
                position = item.seq
            if items:
                continue
            if last:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await ended.wait()

    # -- runs of named scrapers -------------------------------------------------------

    async def open_run(
        self,
        name: str,
        given: Iterable[str] | None = None,
        *,
        start: tuple[str, ...] = (),
        run_id: str = "",
        resume: bool = False,
        limit: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Started:
        """A run of a registered scraper: a job that workers anywhere can be pointed at.

        `given` are URLs instead of the scraper's own start; a few that stand for it, and tell the scope
        too, come as `start`. `resume` goes on with the last run that is not finished, or with `run_id`,
        and adds only what is given; a `run_id` that exists gets more URLs. Adding twice changes nothing.
        """
        scraper = self.scraper(name)
        if scraper is None:
            raise UsageError("the built-in scraper has no runs", hint="use `shoal crawl URL`")
        job = await self._earlier_run(name, run_id) if resume or run_id else None
        if job is not None:
            await self._can_go_on(job, "run")
        elif resume:
            raise await self._nothing_to_resume(name, run_id)
        # A run that was begun with a file has its URLs: the scraper's own start need not be among them.
        nothing_given = resume and given is None and not start
        start = start or scraper.start
        if given is None and not start and not nothing_given:
            raise UsageError(
                f"scraper {name!r} has no start=", hint=f"`shoal run {name} URL`, or URLs with --urls-file"
            )
        wanted = iter(() if nothing_given else start if given is None else given)
        first = list(islice(wanted, 1))
        if not first and not nothing_given:
            # Before anything is stored: a run without a URL would never end.
            raise UsageError(
                "no URL to visit", hint="give at least one; in a file one a line, # begins a comment"
            )
        if job is None:
            more: dict[str, Any] = {"max_pages": None, "max_per_host": None}
            if given is not None and "scope" not in self.settings.model_fields_set:
                more["scope"] = scraper.scope
            job = await self._begun(run_id, self.spec(name, start, **more))
        elif not first and not job.counts.added:
            raise UsageError(
                f"run {job.id} was interrupted before it had a URL", hint="give its URLs once more"
            )
        if resume and job.state is JobState.PAUSED:
            await self.resume(job.id)
        await self.evict_dead_workers(job.id)
        added = await self.submit(job.id, islice(chain(first, wanted), limit), on_progress=on_progress)
        return Started(job.id, scraper, added["new"], added["known"], added["bad"])

    async def _earlier_run(self, name: str, run_id: str) -> Job | None:
        if run_id:
            with suppress(NoSuchJob):
                job = await self.frontier.job(run_id)
                if job.spec.scraper != name:
                    raise UsageError(
                        f"run {run_id} is of scraper {job.spec.scraper!r}", hint="use another --run-id"
                    )
                return job
            return None
        for job in await self.frontier.jobs(limit=1000):
            if job.spec.scraper == name and job.state in (JobState.RUNNING, JobState.PAUSED):
                return job
        return None

    async def _nothing_to_resume(self, name: str, run_id: str) -> UsageError:
        runs = [job.id for job in await self.frontier.jobs(limit=1000) if job.spec.scraper == name]
        if not run_id:
            return UsageError(f"no run of {name!r} to resume", hint="leave --resume out to begin one")
        there = f"there are {', '.join(runs[:5])}" if runs else f"{name!r} has none yet"
        more = f" and {len(runs) - 5:,} more" if len(runs) > 5 else ""
        return UsageError(f"no run {run_id!r} to resume", hint=f"{there}{more}; without --resume it begins")

    async def _begun(self, run_id: str, spec: JobSpec) -> Job:
        """A new run. Without a name it gets the time as its own, and a number if that is taken.

        A name is locked while we look whether it is taken: of two runs that begin in the same
        second, wherever they begin, each gets its own.
        """
        if run_id:
            return await self.frontier.open_job(run_id, spec)
        stem, owner = datetime.now(UTC).strftime("%Y%m%d_%H%M%S"), holder_name()
        for number in count(1):
            name = stem if number == 1 else f"{stem}_{number}"
            lock = f"run id {name}"
            if await self.frontier.lock(lock, owner, LOCK_SECONDS) != owner:
                continue
            try:
                with suppress(NoSuchJob):
                    await self.frontier.job(name)
                    continue
                return await self.frontier.open_job(name, spec)
            finally:
                with suppress(FrontierError):
                    await self.frontier.unlock(lock, owner)
        raise AssertionError("count() does not end")

    @asynccontextmanager
    async def only(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a scraper: two single runs of it cannot overlap, on any machine.

        Raises UsageError when somebody holds it. A holder of this machine that died is passed over.
        """
        lock, owner = f"run {name}", holder_name()
        holder = await self.frontier.lock(lock, owner, LOCK_SECONDS)
        if holder != owner and process_gone(holder):
            await self.frontier.unlock(lock, holder)
            holder = await self.frontier.lock(lock, owner, LOCK_SECONDS)
        if holder != owner:
            raise UsageError(
                f"scraper {name!r} is running already, as {holder}",
                hint='wait for it, or make it execution="distributed" and add workers',
            )
        keeping = asyncio.create_task(self._keep_lock(lock, owner))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            with suppress(FrontierError):
                await self.frontier.unlock(lock, owner)

    async def _keep_lock(self, lock: str, owner: str) -> None:
        while True:
            await asyncio.sleep(LOCK_SECONDS / 3)
            with suppress(FrontierError):
                await self.frontier.lock(lock, owner, LOCK_SECONDS)

    # -- working ----------------------------------------------------------------------

    @property
    def http(self) -> HttpFetcher:
        if self._http is None:
            agent = self.settings.user_agent
            self._http = HttpFetcher(
                user_agent=agent or None, guard=self._guard, http2=self.settings.http2, concurrency=2000
            )
        return self._http

    def fetcher(self, ttl: float) -> Fetcher:
        """The fetcher with its response cache. What must last longer than a minute goes to disk,
        where other processes and later crawls find it; with a frontier on a server, everybody who
        works on it finds it there."""
        if ttl <= 0 or (ttl <= 60 and self.one_job):
            return self.http
        if ttl not in self._caches:
            cache: PageCache = self._memory if ttl <= 60 else self._disk_cache()
            if on_server(self.settings.frontier) and not self.one_job:
                cache = LayeredCache(cache, NotesCache(self.frontier.note, self.frontier.noted, ttl), ttl)
            self._caches[ttl] = CachingFetcher(self.http, cache, ttl)
        return self._caches[ttl]

    def _disk_cache(self) -> DiskCache:
        if self._disk is None:
            path = getattr(self.frontier, "path", None) or Path(DEFAULT_FRONTIER.removeprefix("sqlite:///"))
            self._disk = DiskCache(path.parent / "cache.db")
        return self._disk

    @property
    def permission(self) -> Permission:
        if self._permission is None:
            self._permission = Permission(self.http, note=self.frontier.note, noted=self.frontier.noted)
        return self._permission

    async def brief_for(self, job: str, worker: str = "") -> Brief:
        """Everything a worker must know to visit for this job."""
        spec = (await self.frontier.job(job)).spec
        named = self.scraper_of(job, spec)
        routes = self.routes
        return Brief(
            job=job,
            spec=spec,
            scope=Scope(spec),
            scrape=site_scrape(spec, worker) if named is None else named_scrape(named),
            fetcher=self.fetcher(spec.cache),
            permission=self.permission,
            limits=limits_of(spec),
            origins=frozenset(urls.origin_of(url) for url in spec.start),
            links=self._links,
            route=None if routes is None else lambda link, page: routes.found(link, page, spec),
        )

    @property
    def routes(self) -> Routes | None:
        """Where URLs go. None when nobody asked: workers claim for themselves and no rule is set."""
        if self._routes is None and (self.settings.dispatch or self.settings.routes):
            self._routes = Routes(self.settings.rules)
        return self._routes

    def broker(self, queues: Collection[str] = (), *, watch: events.Watcher = events.nobody) -> Dispatch:
        """A handle on the dispatch that the settings name; it receives from these queues."""
        settings = self.settings
        fast = self.routes.fast if self.routes else ()
        return open_dispatch(settings.dispatch, queues, prefetch=settings.prefetch, fast=fast, watch=watch)

    async def broker_queues(self, queues: Collection[str] | None = None) -> list[str]:
        """The broker's queues for these of the frontier; for all of them, and those of the routes.
        Raises UsageError about names that no work has."""
        assert self.routes is not None
        for queue in queues or ():
            check_queue(queue)
        names = self.routes.queues if queues is None else ()
        # An old frontier may hold such names: what is dead in the broker would be taken for work.
        more = sorted(set(await self.frontier.queues()) - RESERVED_QUEUES) if queues is None else queues
        return list(dict.fromkeys([*names, *map(broker_queue, more)]))

    async def broker_state(self) -> dict[str, Any] | None:
        """What the broker says of itself and of its queues; None when there is none."""
        if not self.settings.dispatch:
            return None
        state: dict[str, Any] = {"address": shown(self.settings.dispatch), "about": "", "queues": {}}
        dispatch = self.broker()
        try:
            depths = await dispatch.depths([*await self.broker_queues(), FAILED_QUEUE])
            state["about"] = await dispatch.about()
            state["queues"] = {name: msgspec.to_builtins(depth) for name, depth in depths.items()}
        except DispatchError as error:
            state |= {"error": str(error), "hint": error.hint}
        finally:
            await dispatch.close()
        return state

    @asynccontextmanager
    async def received(
        self,
        queues: Collection[str] | None,
        *,
        watch: events.Watcher,
        tell: Callable[[str], None],
    ) -> AsyncIterator[Frontier]:
        """The frontier as a worker with a dispatch sees it; without one, the frontier itself.

        Raises DispatchError when the broker does not answer, after as many attempts as the settings
        allow. `tell` hears of them."""
        if not self.settings.dispatch:
            yield self.frontier
            return
        names = await self.broker_queues(queues)
        dispatch = self.broker(names, watch=watch)
        try:
            await reach_dispatch(dispatch, names, attempts=self.settings.connect_attempts, tell=tell)
            limit = self.settings.prefetch * len(names)
            every = self.broker_queues if queues is None else None
            async with Consumer(self.frontier, dispatch, watch=watch, limit=limit, queues=every) as consumer:
                yield consumer
        finally:
            await dispatch.close()

    @asynccontextmanager
    async def pumped(
        self,
        *,
        watch: events.Watcher,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> AsyncIterator[Pump]:
        """A pump beside the body: it pumps, or stands by while another does. If it cannot go on, the
        body ends with its error."""
        settings = self.settings
        dispatch = self.broker(watch=watch)
        pump = Pump(
            self.frontier,
            dispatch,
            name=f"{process_name()}_pump",
            routes=self.routes or Routes(settings.rules),
            watch=watch,
            queues=None if queues is None else [*dict.fromkeys([*queues, *map(frontier_queue, queues)])],
            job=job,
            batch=settings.dispatch_batch,
            prefetch=settings.prefetch,
            gone=process_gone,
        )
        try:
            async with asyncio.TaskGroup() as group:
                pumping = group.create_task(pump.run())
                yield pump
                pumping.cancel()
        except* Exception as several:
            raise _first(several) from None
        finally:
            await dispatch.close()

    def worker(
        self,
        *,
        job: str | None = None,
        queues: Collection[str] | None = None,
        drain: bool = True,
        watch: events.Watcher = events.nobody,
        name: str = "",
        lease: float | None = None,
        batch: int | None = None,
        frontier: Frontier | None = None,
    ) -> Worker:
        """A worker on this session's frontier, or on what `received` gives."""
        settings = WorkerSettings(
            name=name or f"{process_name()}_{next(self._numbers)}",
            concurrency=batch or self.settings.concurrency,
            lease=lease or self.settings.lease,
            queues=queues,
            job=job,
            drain=drain,
            version=__version__,
        )
        return Worker(
            frontier or self.frontier,
            partial(self.brief_for, worker=settings.name),
            settings,
            watch=watch,
            keeper_frontier=self.keeper_frontier(),
        )

    def keeper_frontier(self) -> Callable[[], Awaitable[Backend]] | None:
        if self.settings.frontier.startswith("memory"):
            return None
        return lambda: open_frontier(self.settings.frontier)

    async def scrape(self, url: str) -> Page:
        """One page, now, with its redirects followed. Raises FetchError and BadUrl."""
        target = urls.canonical(url)
        spec = self.settings.spec((target,))
        if spec.robots:
            robots = await self.permission.rules(target)
            robots = robots or await self.permission.ask(target, allow_private=spec.allow_private)
            if not robots.allowed(target):
                raise FetchError("robots", f"{robots.rule(target)}; --no-robots fetches it all the same")
        ask = Ask(
            target,
            headers=tuple((spec.headers or {}).items()),
            allow_private=spec.allow_private,
            limits=limits_of(spec),
        )
        response, hops = await follow_redirects(self.fetcher(spec.cache), ask)
        request = Request(response.url, "scrape", origin=target if hops else "")
        return Page(request, response)

    # -- discovering ------------------------------------------------------------------

    def discovery(
        self,
        site: str,
        *,
        since: float | None = None,
        undated: bool = False,
        images: bool = False,
        bounds: Bounds | None = None,
        tell: Callable[[Read], None] = lambda _read: None,
    ) -> Discovery:
        """The URLs that a site tells of itself, fetched at its pace. Raises BadUrl and UsageError."""
        from shoal.discover.calls import Calls
        from shoal.discover.site import Bounds, Discovery

        bounds = bounds or Bounds()
        start = urls.canonical(site if "://" in site else f"https://{site.strip()}")
        spec = self.settings.spec((start,))
        ask = Ask(
            start,
            headers=tuple((spec.headers or {}).items()),
            allow_private=spec.allow_private,
            limits=msgspec.structs.replace(limits_of(spec), body=bounds.file_bytes),
        )
        calls = Calls(
            self.http,
            self.permission,
            ask,
            gap=spec.gap,
            obey=spec.robots,
            retries=spec.retries,
            shared=None if self.settings.frontier.startswith("memory") else self.frontier,
        )
        return Discovery(
            start,
            calls,
            spec,
            feeds_of=feeds_of,
            bounds=bounds,
            since=since,
            undated=undated,
            images=images,
            tell=tell,
        )

    async def enqueue_entries(self, job: str, entries: Iterable[Entry]) -> dict[str, int]:
        """Add discovered URLs to a job; what was told of each is in its request's data.

        Answers how many were new, known and refused.
        """
        spec = (await self.frontier.job(job)).spec
        requests = [
            Request(
                entry.url,
                job,
                queue=spec.queue,
                priority=spec.priority,
                data={name: value for name, value in entry.document().items() if name != "url" and value},
            )
            for entry in entries
        ]
        answers = Counter(added.value for added in await self.frontier.add(requests))
        return {word: answers[word] for word in ("new", "known", "refused")}


class Run:
    """A job worked on to its end in this process, with its export beside it."""

    def __init__(
        self, session: Session, job: str, *, out: str | None = None, watch: events.Watcher = events.nobody
    ) -> None:
        self.session = session
        self.job = job
        self.out = out
        self.ended = asyncio.Event()
        self._worker = session.worker(job=job, watch=watch)
        self._started = time.perf_counter()
        self.before = 0
        """Pages that earlier runs of the job brought."""

    @property
    def running(self) -> int:
        return self._worker.running

    @property
    def stopped(self) -> bool:
        return self._worker.stopped

    def stop(self) -> None:
        self._worker.stop()

    async def to_end(self, work: Awaitable[None] | None = None) -> Summary:
        """Work (or wait for `work`, when other processes do it), export, and sum up."""
        session, job = self.session, self.job
        counts = (await session.frontier.job(job)).counts
        self.before = counts.done - counts.skipped
        exporter = exporter_for(self.out, job) if self.out else None
        try:
            async with asyncio.TaskGroup() as group:
                if exporter is not None:
                    group.create_task(
                        follow(session.frontier, job, exporter, sink=f"file:{self.out}", ended=self.ended)
                    )
                try:
                    await (work if work is not None else self._worker.run())
                finally:
                    self.ended.set()
            view = await session.frontier.job(job)
            if exporter is not None and view.state is JobState.DONE:
                await asyncio.to_thread(exporter.finish)
        except* Exception as group_error:
            raise _first(group_error) from None
        finally:
            self.ended.set()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        view = await session.frontier.job(job)
        return summarise(view, time.perf_counter() - self._started, self.out, self.before)


async def export_job(session: Session, job: str, out: str, *, csv_raw: bool = False) -> int:
    """Write a job's items to a file, from where an earlier export stopped."""
    await session.frontier.job(job)
    exporter = exporter_for(out, job, csv_raw=csv_raw)
    return await export_all(session.frontier, job, exporter, f"file:{out}")


async def move_job(
    source: Backend, target: Backend, job: str, *, to: str, now: bool = False, watch: Watch
) -> Moved:
    """Move a job to another frontier, where it goes on; `to` is that one's name for people. Run again
    after an interruption, it completes the move."""
    return await move(
        source, target, job, to=to, owner=process_name(), gone=process_gone, now=now, watch=watch
    )


def run_counts(counts: Counts) -> dict[str, int]:
    """The counters of a job in the words of a work table."""
    pending, claimed = counts.waiting + counts.delayed, counts.leased
    return {
        "pending": pending,
        "claimed": claimed,
        "completed": counts.done,
        "failed": counts.dead + counts.expired,
        "remaining": pending + claimed,
    }


def serves(beat: Beat, job: Job) -> bool:
    """Whether a worker takes requests of this job."""
    if beat.job is not None:
        return beat.job == job.id
    return beat.queues is None or job.spec.queue in beat.queues or job.id in beat.current


def run_rate(job: Job, present: Iterable[Attendance], queues: Mapping[str, Mapping[str, int]]) -> float:
    """Visits a second that a job gets now, by what the workers say of themselves.

    Who works for this job alone is counted in full. Of those who work for all, the part that is this
    job's is estimated: by what they have in hand, and when that is nothing (between two visits to a
    host with a slow pace) by the job's share of what their queues hold.
    """
    total = 0.0
    for worker in present:
        beat = worker.beat
        if worker.state == "silent" or not serves(beat, job):
            continue
        if beat.job is not None:
            total += beat.rate
        elif beat.current:
            total += beat.rate / len(beat.current) if job.id in beat.current else 0.0
        else:
            names = queues if beat.queues is None else beat.queues
            held = sum(sum(queues.get(name, {}).values()) for name in names)
            total += beat.rate * min(1.0, job.counts.live / held) if held else 0.0
    return total


def summarise(job: Job, seconds: float, out: str | None, before: int = 0) -> Summary:
    """`before` are the pages that earlier runs of the job brought."""
    counts = job.counts
    pages = counts.done - counts.skipped
    status = "interrupted" if job.state is JobState.RUNNING else job.state.value
    return Summary(
        job=job.id,
        status=status,
        pages=pages,
        items=counts.items,
        failed=sum(job.errors.values()),
        dead=counts.dead + counts.expired,
        seconds=round(seconds, 3),
        pages_per_second=round((pages - before) / seconds, 2) if seconds > 0 else 0.0,
        out=out,
    )


def site_scrape(spec: JobSpec, worker: str = "") -> Callable[[Page], Awaitable[Scraped]]:
    """The built-in scraper: one item a page, every link followed."""
    fields = chosen(spec.fields)
    signature = {"worker": worker} if spec.signed else {}

    async def scrape(page: Page) -> Scraped:
        links = page.links()
        fetched_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        item = site_item(page, fields, links, fetched_at)
        item.update(signature)
        return Scraped([_encode(item)], links)

    return scrape


def named_scrape(scraper: Scraper) -> Callable[[Page], Awaitable[Scraped]]:
    async def scrape(page: Page) -> Scraped:
        handler = scraper.handler_for(page.label)
        collected = await collect(handler, page, timeout=scraper.timeout)
        return Scraped(collected.items, requests=collected.found)

    return scrape


def feeds_of(response: Response) -> list[str]:
    """The feeds that a page declares with `<link rel=alternate>`, canonical, each once."""
    page = Page(Request(response.url, "discover"), response)
    found: dict[str, None] = {}
    for link in page.css("link[rel~=alternate][href]") if page.is_html else ():
        if link.attr("type").partition(";")[0].strip().lower() in FEED_TYPES:
            with suppress(BadUrl):
                found[canonical_href(link.attr("href"), page.base)] = None
    return list(found)


def limits_of(spec: JobSpec) -> Limits:
    return Limits(total=spec.timeout, body=spec.max_body, connect=min(10.0, spec.timeout))


def load_app(where: str) -> Shoal:
    """The application in `file.py` or `module:app`. Raises UsageError."""
    path, _, name = where.partition(":")
    try:
        if path.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            if spec is None or spec.loader is None or not Path(path).is_file():
                raise UsageError(f"no file {path!r}", hint="give --app the path of your scrapers")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)
            spec.loader.exec_module(module)
        else:
            here = str(Path.cwd())
            if here not in sys.path:
                sys.path.insert(0, here)
            module = importlib.import_module(path)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script may end itself: that is no end of ours
        raise UsageError(
            f"cannot load {where!r}: {type(error).__name__}: {error}",
            hint="run the file by itself to see why",
        ) from error
    found = [value for value in vars(module).values() if isinstance(value, Shoal)]
    chosen_app = getattr(module, name, None) if name else (found[0] if found else None)
    if not isinstance(chosen_app, Shoal):
        raise UsageError(f"{where!r} holds no Shoal()", hint="write `app = Shoal()` in it")
    return chosen_app


def new_job_id(spec: JobSpec) -> str:
    """Readable and unique: what, when, and four random letters."""
    what = spec.scraper if spec.scraper != SITE else urls.lane_of(spec.start[0]) if spec.start else "crawl"
    when = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    return f"{re.sub(r'[^a-zA-Z0-9.]+', '-', what)}-{when}-{secrets.token_hex(2)}"


def process_name(pid: int | None = None) -> str:
    """`host_pid`: tells where to look for whoever holds something."""
    return f"{socket.gethostname()}_{pid or os.getpid()}"


_holders = count(1)


def holder_name() -> str:
    """`host_pid_n`: one of several in this process that hold something, each by itself."""
    return f"{process_name()}_{next(_holders)}"


def process_gone(name: str) -> bool:
    """Whether `host_pid…` names a process of this machine that no longer lives."""
    here = f"{socket.gethostname()}_"
    return name.startswith(here) and not _alive(name.removeprefix(here).partition("_")[0])


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    """The one error a person should read."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


__all__ = [
    "Crawl",
    "NoSuchJob",
    "Run",
    "Session",
    "Shoal",
    "Summary",
    "export_job",
    "load_app",
]
