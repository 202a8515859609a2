"""`Session`: an open frontier with everything a worker needs around it.

What can be done with one beside work lies in the files around this, as functions that take it: runs,
jobs, brokers, discovery.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal import __version__, events, urls
from shoal.app.processes import process_name
from shoal.app.scrapers import SITE, named_scrape, site_scrape
from shoal.dispatch.routes import Routes
from shoal.engine.brief import Brief
from shoal.engine.skips import note_skip
from shoal.engine.worker import Worker, WorkerSettings
from shoal.errors import BadUrl, FetchError, UsageError
from shoal.fetch.cache import CachingFetcher, DiskCache, LayeredCache, MemoryCache, NotesCache, PageCache
from shoal.fetch.guard import Guard
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Fetcher, Limits
from shoal.fetch.redirects import follow as follow_redirects
from shoal.frontier.port import Backend, Frontier
from shoal.frontier.rules import check_queue
from shoal.model import BROKER_QUEUES, Job, JobSpec, Lane, Pace, Request
from shoal.politeness.permission import Permission
from shoal.politeness.scope import Scope
from shoal.registry import DEFAULT_FRONTIER, on_server, open_frontier, reach_frontier
from shoal.scrape.links import Links
from shoal.scrape.page import Page
from shoal.scrape.router import Scraper
from shoal.scrape.site import chosen
from shoal.settings import Settings

ADD_CHUNK = 20_000


class Application(Protocol):
    """What a session must know of an application. `Shoal` is one."""

    scrapers: dict[str, Scraper]


class Session:
    """An open frontier and what works on it. Make it with `opened`."""

    def __init__(
        self, settings: Settings, app: Application | None, frontier: Backend, allow: Collection[str]
    ) -> None:
        self.settings = settings
        self.frontier = frontier
        self._scrapers = {} if app is None else app.scrapers
        self._guard = Guard(allow=allow)
        self._http: HttpFetcher | None = None
        self._caches: dict[float, Fetcher] = {}
        self._memory = MemoryCache()
        self._disk: DiskCache | None = None
        self._permission: Permission | None = None
        self._links = Links()
        self._numbers = count(1)
        self._routes: Routes | None = None
        self._apps: dict[str, Application] = {}
        self.one_job = False
        """Everything here is done for a single job. No URL is fetched twice then, so a cache that
        ends with the process would only cost (measured: 6 % of the CPU)."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        settings: Settings,
        app: Application | None = None,
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
        session = cls(settings, app, frontier, allow)
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

    # -- scrapers and jobs -------------------------------------------------------------

    def scraper(self, name: str, app: str = "") -> Scraper | None:
        """The registered scraper; None for the built-in one. Raises UsageError.

        `app` is where a job says that it is. Paths differ from machine to machine, so it counts only
        for those who were given no application of their own.
        """
        if name == SITE:
            return None
        known = self._scrapers
        if name not in known and self.settings.app:
            known.update(self._loaded(self.settings.app).scrapers)
        elif name not in known and app:
            known = self._loaded(app).scrapers
        if name not in known:
            here = ", ".join(sorted(known)) or "none is registered"
            raise UsageError(f"no scraper {name!r}", hint=f"scrapers here: {here}; give --app FILE")
        return known[name]

    def _loaded(self, where: str) -> Application:
        """An application, loaded once: what it says at import is not said again."""
        # Here, not above: an application is made of sessions, so that module imports this one.
        from shoal.app.application import load_app

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
                bad = Request(shown, job, queue=queue or spec.queue)
                await self.frontier.bury(bad, error.error, error.why)
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

    async def set_pace(self, lane: str, pace: Pace) -> Lane:
        """Change a lane's pace from now on. A host that nobody has seen yet gets the pace of a new job for
        what is left out: a lane without one has no limit."""
        if not await self.frontier.lanes(names=[lane], limit=1):
            gap = self.settings.gap if pace.gap is None else pace.gap
            width = self.settings.per_host if pace.width is None else pace.width
            pace = msgspec.structs.replace(pace, gap=gap, width=width)
        await self.frontier.pace(lane, pace)
        return (await self.frontier.lanes(names=[lane], limit=1))[0]

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

    @property
    def routes(self) -> Routes | None:
        """Where URLs go. None when nobody asked: workers claim for themselves and no rule is set."""
        if self._routes is None and (self.settings.dispatch or self.settings.routes):
            self._routes = Routes(self.settings.rules)
        return self._routes

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
            skipped=partial(note_skip, self.frontier.note, worker) if spec.signed else None,
        )

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


def limits_of(spec: JobSpec) -> Limits:
    return Limits(total=spec.timeout, body=spec.max_body, connect=min(10.0, spec.timeout))


def new_job_id(spec: JobSpec) -> str:
    """Readable and unique: what, when, and four random letters."""
    what = spec.scraper if spec.scraper != SITE else urls.lane_of(spec.start[0]) if spec.start else "crawl"
    when = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    return f"{re.sub(r'[^a-zA-Z0-9.]+', '-', what)}-{when}-{secrets.token_hex(2)}"
