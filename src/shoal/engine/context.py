"""What a worker must know to make a job's visits. Built once for each job, by `app`, from its spec."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
from shoal.scrape.router import Scrape, Scraped
from shoal.urls import origin_of

MAX_REDIRECTS = 50_000


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
    """Origins of the start URLs: only they are sent the job's headers."""
    links: Links
    """Remembers how this worker resolved links: sites repeat their navigation on every page."""
    agent: str = AGENT
    """The name by which sites address us, in robots.txt and in pages."""
    known: KnownLinks = field(default_factory=KnownLinks)
    route: Callable[[Request, Request], Request] | None = None
    """Gives a found request (first argument) its queue, by its URL and its page. None: that of its page."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Redirects that this worker met: the mark of the request, and that of its target."""
    on_skip: Callable[[Done], Awaitable[None]] | None = None
    """Called with the verdict of a visit that left nothing, before it is stored. None: the reason is not
    kept."""
    on_request: Callable[[Request], Awaitable[Request]] | None = None
    """Returns a request with more headers, or raises, before it is fetched. None: no hook is registered."""
    on_response: Callable[[Page], Awaitable[Page]] | None = None
    """Returns a page with another response, or raises. None: no hook is registered."""

    def ask(self, request: Request, gate: Gate | None = None) -> Ask:
        """The request as the fetcher wants it. The job's headers, which may be secrets, go to `origins`
        only."""
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
        """Whether the host's robots.txt allows this visit."""
        return await self.permission.allows(robots, request.url, self.agent)

    def max_attempts(self, request: Request) -> int:
        """How many visits of this request may fail before it is dead."""
        return self.spec.max_attempts

    def closes_circle(self, here: str, there: str, hops: int) -> bool:
        """Note that `here` redirects to `there`. Returns whether that closes a circle of redirects.

        A request's own trail shows a circle too, but only if each request was found through the one before.
        """
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
        """Requests for the links that are not known and are in scope, and for those requests of the scraper
        that are."""
        depth = page.request.depth + 1
        refusal = self.scope.refusal
        parent = page.request
        found = [
            Request(url, parent.job, "", parent.queue, parent.priority, depth)
            for url in self.known.unknown(scraped.links)
            if not refusal(url, depth)
        ]
        found += [one for one in scraped.requests if not refusal(one.url, one.depth)]
        if self.route is not None:
            found = [self.route(request, parent) for request in found]
        return self.with_starts(found, parent)

    def with_starts(self, found: list[Request], parent: Request, target: str = "") -> list[Request]:
        """Returns the same requests with the redirected start URLs that their visits must know; mostly
        none."""
        starts = self.scope.carried(parent, target)
        return [replace(request, starts=starts) for request in found] if starts else found
