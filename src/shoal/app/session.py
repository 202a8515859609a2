"""`Session`: an open frontier with everything a worker needs around it.

Everything else that can be done with a session is in the files beside this one, as functions that take it:
runs, jobs, brokers, discovery.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import count
from math import inf
from typing import Any

import msgspec

from shoal import __version__, events, urls
from shoal.addresses import without_password
from shoal.app.errands import DISCOVER, ErrandContext, errand_scope, errand_scrape
from shoal.app.loading import Application, load_app
from shoal.app.parts import Parts
from shoal.app.processes import process_name
from shoal.app.scrapers import SITE, hooked_scrape, site_scrape
from shoal.dispatch.routes import Routes
from shoal.engine.context import JobContext
from shoal.engine.keeper import OpenFrontier
from shoal.engine.skip_notes import note_skip
from shoal.engine.worker import Worker, WorkerSettings
from shoal.errors import BadUrl, FetchError, UsageError
from shoal.fetch.cache import CachingFetcher, MemoryCache, NotesCache, PageCache
from shoal.fetch.guard import Guard
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Fetcher, Limits
from shoal.fetch.redirects import follow as follow_redirects
from shoal.frontier.port import Backend, Frontier, Notes
from shoal.logs import LogWatcher, Troubles
from shoal.model import Job, JobSpec, Lane, Pace, Request
from shoal.politeness.permission import Permission
from shoal.politeness.robots import AGENT, agent_of
from shoal.politeness.scope import Scope
from shoal.queues import BROKER_QUEUES, check_queue
from shoal.registry import in_process, on_server, open_frontier, reach_frontier
from shoal.scrape.apart import Reader
from shoal.scrape.hooks import Hooks
from shoal.scrape.links import Links
from shoal.scrape.page import Page
from shoal.scrape.router import Scraper
from shoal.scrape.site import chosen
from shoal.settings import Settings

ADD_CHUNK = 20_000
FILE_CACHE = 256 * 1024 * 1024
"""Maximum bytes of cached pages per worker in the notes of a file: a disk has more room than a server's
memory. Searching so many for expired ones takes 20 ms, every ten seconds."""


class Session:
    """An open frontier with everything a worker needs around it. Open it with `opened`."""

    def __init__(
        self, settings: Settings, app: Application | None, frontier: Backend, parts: Parts | None = None
    ) -> None:
        self.settings = settings
        self.frontier = frontier
        self.parts = parts or Parts()
        self._app = app
        self._scrapers = {} if app is None else app.scrapers
        self._guard = Guard()
        self._http: HttpFetcher | None = None
        self._reader = Reader()
        self._caches: dict[float, Fetcher] = {}
        self._memory = MemoryCache()
        self._permission: Permission | None = None
        self._links = Links()
        self._numbers = count(1)
        self._routes: Routes | None = None
        self._apps: dict[str, Application] = {}
        self._troubles = Troubles()
        self.log = LogWatcher("", self._troubles)
        """The watcher of parts that are no worker, such as a pump."""
        self.one_job = False
        """Whether this session works for a single job. No URL is then fetched twice, so a cache that
        ends with the process would only cost time (measured: 6 % of the CPU)."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        settings: Settings,
        app: Application | None = None,
        *,
        create: bool = True,
        tell: Callable[[str], None] | None = None,
        parts: Parts | None = None,
    ) -> AsyncIterator[Session]:
        """Opens a session on the frontier that the settings name; `create` creates it if it does not exist.
        With `tell`, the session waits for a server that is still starting, and `tell` gets each attempt.
        `parts` are used instead of what the settings name, and stay open."""
        if parts is not None and parts.frontier is not None:
            frontier = parts.frontier
        elif tell is None:
            frontier = await open_frontier(settings.frontier, create=create)
        else:
            attempts = settings.connect_attempts
            frontier = await reach_frontier(settings.frontier, attempts=attempts, tell=tell)
        session = cls(settings, app, frontier, parts)
        try:
            yield session
        finally:
            await session._close()

    async def _close(self) -> None:
        if self._permission is not None:
            await self._permission.close()
        if self._http is not None:
            await self._http.close()
        await self._reader.close()
        if self.parts.frontier is None:
            await self.frontier.close()

    # -- scrapers and jobs -------------------------------------------------------------

    def scraper(self, name: str, app: str = "") -> Scraper | None:
        """Returns the registered scraper; None for the built-in one. Raises UsageError.

        `app` is the application that a job names. Paths differ between machines, so it counts only if the
        settings name none.
        """
        if name in (SITE, DISCOVER):
            return None
        known = self._scrapers
        if name not in known and self.settings.app:
            known.update(self._loaded(self.settings.app).scrapers)
        elif name not in known and app:
            known = self._loaded(app).scrapers
        if name not in known:
            here = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"no scraper {name!r}", hint=f"known scrapers: {here}; name their file with --app"
            )
        return known[name]

    def _loaded(self, where: str) -> Application:
        """Returns an application. It is loaded once, so that what it prints at import is printed once."""
        if where not in self._apps:
            self._apps[where] = load_app(where)
        return self._apps[where]

    def adopt(self, app: Application | None) -> None:
        """Uses an application that the caller has already loaded as the one that the settings name."""
        if app is not None:
            self._apps[self.settings.app] = app

    def hooks(self, app: str = "") -> Hooks:
        """The hooks of the application that was given, else of the one that the settings name, else of `app`,
        where a job says that its application is. Raises UsageError."""
        if self._app is not None:
            return self._app.hooks
        where = self.settings.app or app
        return self._loaded(where).hooks if where else Hooks()

    def scraper_of(self, job: str, spec: JobSpec) -> Scraper | None:
        """Returns the scraper of a job. Raises UsageError if it cannot be loaded here."""
        try:
            return self.scraper(spec.scraper, spec.app)
        except UsageError as error:
            raise UsageError(
                f"cannot load scraper {spec.scraper!r} of job {job!r}: {error}", hint=error.hint
            ) from error

    def spec(self, scraper: str, start: tuple[str, ...], **more: Any) -> JobSpec:
        """Returns the spec of a job: the scraper's options win over settings that were not given."""
        chosen(self.settings.fields)
        named = self.scraper(scraper)
        if named is None:
            spec = self.settings.spec(start, **({"scraper": SITE, "dedicated": True} | more))
            if spec.scraper == SITE and self.settings.app and self.hooks():
                spec = msgspec.structs.replace(spec, app=self.settings.app)  # other workers need them too
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
                "kinds": "any",
            }
            flags = {
                "scope": "scope",
                "gap": "rate",
                "width": "per_host",
                "retries": "retries",
                "lease": "lease",
                "kinds": "kinds",
            }
            kept = {name: value for name, value in wishes.items() if flags.get(name) not in given}
            spec = self.settings.spec(
                start, scraper=scraper, app=self.settings.app, dedicated=True, **(kept | more)
            )
        Scope(spec)  # a bad pattern must fail here, not in a worker
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
        """Adds URLs to a job, in bounded memory. Invalid ones become dead letters of class url_*.

        Returns how many were new, known, refused and bad.
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
                # It is stored so that people see it, and never visited.
                shown = without_password(url[: urls.MAX_LENGTH])
                shown = shown.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
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
        """Changes the pace of a lane and returns the lane. For an unknown host, missing values are those of a
        new job: a lane without a pace would have no limit."""
        if not await self.frontier.lanes(names=[lane], limit=1):
            gap = self.settings.gap if pace.gap is None else pace.gap
            width = self.settings.per_host if pace.width is None else pace.width
            pace = msgspec.structs.replace(pace, gap=gap, width=width)
        await self.frontier.pace(lane, pace)
        return (await self.frontier.lanes(names=[lane], limit=1))[0]

    # -- working ----------------------------------------------------------------------

    @property
    def http(self) -> Fetcher:
        """What fetches, without a cache."""
        if self.parts.fetcher is not None:
            return self.parts.fetcher
        if self._http is None:
            agent = self.settings.user_agent
            self._http = HttpFetcher(
                user_agent=agent or None, guard=self._guard, http2=self.settings.http2, concurrency=2000
            )
        return self._http

    def fetcher(self, ttl: float) -> Fetcher:
        """Returns the fetcher with its response cache: in memory for up to a minute on a frontier of this
        machine, else in the frontier's notes, for other workers and later crawls."""
        if ttl <= 0 or (ttl <= 60 and self.one_job):
            return self.http
        if ttl not in self._caches:
            cache: PageCache = self._memory
            given = self.parts.frontier is not None  # counts as a file: it lasts, and others may see it
            if not given and on_server(self.settings.frontier):
                cache = NotesCache(self.frontier.notes, ttl)
            elif ttl > 60 and (given or not in_process(self.settings.frontier)):
                cache = NotesCache(self.frontier.notes, ttl, FILE_CACHE, private=True)
            self._caches[ttl] = CachingFetcher(self.http, cache, ttl)
        return self._caches[ttl]

    @property
    def permission(self) -> Permission:
        if self._permission is None:
            self._permission = Permission(self.http, self.frontier.notes)
        return self._permission

    def agent(self, spec: JobSpec) -> str:
        """Returns the user agent name by which robots.txt and pages address the visits of a job."""
        said = {name.lower(): value for name, value in (spec.headers or {}).items()}
        return agent_of(said.get("user-agent") or self.settings.user_agent or AGENT)

    @property
    def has_dispatch(self) -> bool:
        """Whether leases reach workers by a dispatch."""
        return bool(self.settings.dispatch) or self.parts.dispatch is not None

    @property
    def routes(self) -> Routes | None:
        """The routing rules; None if there is no broker and no rule is set."""
        if self._routes is None and (self.has_dispatch or self.settings.routes):
            self._routes = Routes(self.settings.rules)
        return self._routes

    async def context_for(self, job: str, worker: str = "") -> JobContext:
        """Returns everything that a worker needs to visit pages of this job."""
        spec = (await self.frontier.job(job)).spec
        if spec.scraper == DISCOVER:
            scrape = errand_scrape(spec, self.permission)
            return ErrandContext(**self._context(job, spec), scope=errand_scope(spec), scrape=scrape)
        named = self.scraper_of(job, spec)
        routes, hooks = self.routes, self.hooks(spec.app)
        scrape = site_scrape(spec, self._reader, worker) if named is None else named.scrape
        return JobContext(
            **self._context(job, spec),
            scope=Scope(spec),
            scrape=hooked_scrape(scrape, hooks, spec) if hooks.item else scrape,
            on_request=hooks.on_request if hooks.request else None,
            on_response=hooks.on_response if hooks.response else None,
            route=None if routes is None else lambda link, page: routes.found(link, page, spec),
            on_skip=partial(note_skip, self.frontier.notes, worker) if spec.record_worker else None,
        )

    def _context(self, job: str, spec: JobSpec) -> dict[str, Any]:
        """Returns the fields that all job contexts share."""
        return {
            "job": job,
            "spec": spec,
            "fetcher": self.fetcher(spec.cache),
            "permission": self.permission,
            "limits": limits_of(spec),
            "origins": frozenset(urls.origin_of(url) for url in spec.start),
            "links": self._links,
            "agent": self.agent(spec),
        }

    def worker(
        self,
        *,
        job: str | None = None,
        queues: Collection[str] | None = None,
        drain: bool = True,
        watch: events.Watcher | None = None,
        log: bool = True,
        give_up_after: float = inf,
        name: str = "",
        lease: float | None = None,
        batch: int | None = None,
        stay: float = 0.0,
        patience: float = inf,
        frontier: Frontier | None = None,
    ) -> Worker:
        """Returns a worker on this session's frontier, or on the given one, such as a broker's consumer. It
        logs its visits unless `log` is false, and passes its events to `watch`. The setting `give_up_after`
        wins over the argument."""
        said = self.settings.give_up_after
        settings = WorkerSettings(
            name=name or f"{process_name()}_{next(self._numbers)}",
            concurrency=batch or self.settings.concurrency,
            lease=lease or self.settings.lease,
            queues=queues,
            job=job,
            drain=drain,
            stay=stay,
            patience=patience,
            give_up_after=give_up_after if said is None else said or inf,
            version=__version__,
        )
        return Worker(
            frontier or self.frontier,
            self.frontier.notes,
            partial(self.context_for, worker=settings.name),
            settings,
            watch=events.all_of(LogWatcher(settings.name, self._troubles) if log else None, watch),
            keeper_frontier=self.keeper_frontier(),
        )

    def keeper_frontier(self) -> OpenFrontier | None:
        """Returns how a keeper opens this frontier for itself; None if it exists in this process only, or if
        it is an object that a user gave."""
        if self.parts.frontier is not None or in_process(self.settings.frontier):
            return None
        return self._open_again

    async def _open_again(self) -> tuple[Frontier, Notes]:
        frontier = await open_frontier(self.settings.frontier)
        return frontier, frontier.notes

    async def scrape(self, url: str) -> Page:
        """Fetches one page now, following redirects. Raises FetchError and BadUrl."""
        target = urls.canonical(url)
        spec = self.settings.spec((target,))
        if spec.robots:
            agent, private = self.agent(spec), spec.allow_private
            robots = await self.permission.rules(target, allow_private=private, agent=agent)
            robots = robots or await self.permission.ask(target, allow_private=private, agent=agent)
            if not await self.permission.allows(robots, target, agent):
                rule = robots.rule(target, agent)
                raise FetchError("robots", f"{rule}; --no-robots ignores it")
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
    """Returns a readable, unique id: scraper or host, time, and four random letters."""
    what = spec.scraper if spec.scraper != SITE else urls.lane_of(spec.start[0]) if spec.start else "crawl"
    when = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    return f"{re.sub(r'[^a-zA-Z0-9.]+', '-', what)}-{when}-{secrets.token_hex(2)}"
