"""What a worker must know to visit for one job. Made once a job, by `app`, from its spec."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from shoal.engine.known import KnownLinks
from shoal.fetch.port import Ask, Fetcher, Gate, Limits
from shoal.model import Done, JobSpec, Request
from shoal.politeness.permission import Permission
from shoal.politeness.robots import AGENT, Robots
from shoal.politeness.scope import Scope
from shoal.scrape.links import Links
from shoal.scrape.page import Page
from shoal.urls import origin_of

MAX_REDIRECTS = 50_000


@dataclass(frozen=True, slots=True)
class Scraped:
    """What a scraper took out of a page: items as JSON, links as URLs, and its own requests."""

    items: list[bytes]
    links: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


Scrape = Callable[[Page], Awaitable[Scraped]]


@dataclass(frozen=True, slots=True)
class JobContext:
    job: str
    spec: JobSpec
    scope: Scope
    scrape: Scrape
    fetcher: Fetcher
    permission: Permission
    limits: Limits
    origins: frozenset[str]
    """Origins of the start URLs: the only ones that are sent the job's headers."""
    links: Links
    """Remembers how this worker resolved links: sites repeat their navigation on every page."""
    agent: str = AGENT
    """The name by which sites address us: in robots.txt, and in pages."""
    known: KnownLinks = field(default_factory=KnownLinks)
    route: Callable[[Request, Request], Request] | None = None
    """Where a found request goes, by its URL and its page. None: where its page came from."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Where this worker was redirected, by the marks of both ends."""
    skipped: Callable[[Done], Awaitable[None]] | None = None
    """Hears of a visit that left nothing, before its verdict is stored. None: nobody asks why."""
    on_request: Callable[[Request], Awaitable[Request]] | None = None
    """Gives a request more headers, or raises, before it is fetched. None: no hook is registered."""
    on_response: Callable[[Page], Awaitable[Page]] | None = None
    """Puts another response in the place of what was fetched, or raises. None: no hook is registered."""

    def ask(self, request: Request, gate: Gate | None = None) -> Ask:
        """The request as the fetcher wants it. Headers (which may be secrets) stay at home."""
        headers: dict[str, str] = {}
        if self.spec.headers and origin_of(request.url) in self.origins:
            headers.update(self.spec.headers)
        if request.headers:
            headers.update(request.headers)
        return Ask(
            request.url,
            request.method,
            tuple(headers.items()),
            request.body,
            self.spec.allow_private,
            self.limits,
            gate,
            self.spec.kinds == "text",
        )

    async def permits(self, robots: Robots, request: Request) -> bool:
        """Whether the host's rules allow this visit."""
        return await self.permission.allows(robots, request.url, self.agent)

    def max_attempts(self, request: Request) -> int:
        """Visits of this request that may fail before it is dead."""
        return self.spec.max_attempts

    def circles(self, here: str, there: str, hops: int) -> bool:
        """Whether `here` now redirects to what redirects back to it. Requests that were found one by one, and
        not through each other, have no trail that could tell."""
        if len(self.redirects) >= MAX_REDIRECTS:
            self.redirects.clear()
        self.redirects[here] = there
        for _ in range(hops):
            if there == here:
                return True
            if (there := self.redirects.get(there, "")) == "":
                return False
        return False

    def admit(self, page: Page, scraped: Scraped) -> list[Request]:
        """Requests for what was found and is wanted: not known, in scope, not too deep."""
        depth = page.request.depth + 1
        refusal = self.scope.refusal
        parent = page.request
        found = [
            Request(url, parent.job, "", parent.queue, parent.priority, depth)
            for url in self.known.unknown(scraped.links)
            if not refusal(url, depth)
        ]
        found += self.admitted(scraped.requests)
        if self.route is not None:
            found = [self.route(request, parent) for request in found]
        return self.carrying(found, parent)

    def admitted(self, requests: Iterable[Request]) -> list[Request]:
        return [request for request in requests if not self.scope.refusal(request.url, request.depth)]

    def carrying(self, found: list[Request], parent: Request, target: str = "") -> list[Request]:
        """The same requests, with what their visitors must know of redirected start URLs: mostly nothing."""
        starts = self.scope.carried(parent, target)
        return [replace(request, starts=starts) for request in found] if starts else found
