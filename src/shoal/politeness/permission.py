"""Permission to fetch a URL: robots.txt, fetched once per host and shared between workers.

Fetching robots.txt is a visit to the host like any other, so it takes the host's turn: a visit to a host
whose rules are unknown fetches them *instead of* the page and hands the page back. With several workers, at
most as many do so at once as the lane is wide.

Only a server's response is remembered. If there was none (the guard refused, the connection was refused, it
is not a web server) nothing is known, and the page fails as it would have failed anyway. Rules from addresses
that are not public are stored separately, for jobs that may go there.
"""

from __future__ import annotations

import asyncio
from functools import partial

from shoal import clock, urls
from shoal.errors import FetchError
from shoal.fetch.port import Ask, Fetcher, Gate, Limits, NotSent
from shoal.fetch.redirects import follow
from shoal.frontier.port import Notes
from shoal.model import Private
from shoal.politeness.robots import AGENT, MAX_BYTES, Robots

# One byte more, to distinguish a file that was cut from one that ends there.
LIMITS = Limits(total=30.0, body=MAX_BYTES + 1, cut=True)
SHELF = "robots"
MAX_HOSTS = 20_000
MAX_SIZE = 2_000_000
"""Limits of the rules in memory: hosts, and characters (about ten bytes each). The shared notes hold the
rest."""
_NOWHERE = frozenset({"too_many_redirects", "redirect_invalid", "scheme_blocked"})
"""Errors of redirects that lead to no file. A site that has them has no rules."""


class Permission:
    """The robots.txt rules of every host that this worker meets."""

    def __init__(self, fetcher: Fetcher, notes: Notes, *, now: clock.Clock = clock.system) -> None:
        self._fetcher = fetcher
        self._notes = notes
        self._now = now
        self._rules: dict[str, tuple[float, Robots]] = {}
        self._size = 0
        self._asking: dict[str, asyncio.Future[Robots]] = {}

    async def rules(self, url: str, *, allow_private: Private, agent: str = AGENT) -> Robots | None:
        """Returns the known rules of the host of `url` without a request to it; None if there are none."""
        name = note_name(url, allow_private=allow_private)
        until, robots = self._rules.get(name, (0.0, None))
        if robots is None or until <= self._now():
            robots = await self._load_shared(name)
            if robots is not None:
                self._keep(name, robots)
        return robots and await _ready(robots, agent)

    async def ask(
        self, url: str, *, allow_private: Private, agent: str = AGENT, gate: Gate | None = None
    ) -> Robots:
        """Fetch the host's robots.txt now. All who call while it is in flight get the same rules.

        Raises FetchError if there is no response, and NotSent if the gate did not let the request leave.
        """
        name = note_name(url, allow_private=allow_private)
        asking = self._asking.get(name)
        if asking is None:
            ask = Ask(
                f"{urls.origin_of(url)}/robots.txt", allow_private=allow_private, limits=LIMITS, gate=gate
            )
            asking = asyncio.ensure_future(self._fetch(name, ask))
            self._asking[name] = asking
            asking.add_done_callback(partial(self._forget, name))
        return await _ready(await asyncio.shield(asking), agent)

    async def learn(self, url: str, body: bytes, *, allow_private: Private) -> Robots:
        """Remember the rules of the host of `url` from its robots.txt, which was fetched as a page."""
        return await self._learn(note_name(url, allow_private=allow_private), body, 200)

    async def allows(self, robots: Robots, url: str, agent: str = AGENT) -> bool:
        """Whether `robots`, which `rules` or `ask` returned for this agent, allows `url`."""
        slow = robots.group(agent).is_slow
        return await asyncio.to_thread(robots.allowed, url, agent) if slow else robots.allowed(url, agent)

    async def close(self) -> None:
        """Cancel the requests in flight."""
        for asking in self._asking.values():
            asking.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _forget(self, name: str, asking: asyncio.Future[Robots]) -> None:
        self._asking.pop(name, None)
        if not asking.cancelled():
            asking.exception()  # marks it as retrieved: the caller may have been cancelled

    async def _fetch(self, name: str, ask: Ask) -> Robots:
        try:
            response, _ = await follow(self._fetcher, ask, limit=5)
            body, status = response.body, response.status
        except NotSent:
            raise
        except FetchError as error:
            if error.error not in _NOWHERE:
                raise _about_robots(error) from None
            body, status = b"", 404
        return await self._learn(name, body, status)

    async def _learn(self, name: str, body: bytes, status: int) -> Robots:
        slow = Robots.is_slow(body)
        robots = await asyncio.to_thread(Robots.parse, body, status) if slow else Robots.parse(body, status)
        self._keep(name, robots)
        await self._notes.put(SHELF, name, robots.dump(), robots.ttl)
        return robots

    async def _load_shared(self, name: str) -> Robots | None:
        noted = await self._notes.get(SHELF, name)
        if noted is None:
            return None
        try:
            return (
                await asyncio.to_thread(Robots.load, noted) if Robots.is_slow(noted) else Robots.load(noted)
            )
        except ValueError:
            return None

    def _keep(self, name: str, robots: Robots) -> None:
        self._drop(name)
        # Shorter than the life of the shared note, so that a change of the note is noticed here.
        self._rules[name] = (self._now() + min(robots.ttl, 300.0), robots)
        self._size += robots.size
        while len(self._rules) > MAX_HOSTS or self._size > MAX_SIZE:
            self._drop(next(iter(self._rules)))

    def _drop(self, name: str) -> None:
        _, dropped = self._rules.pop(name, (0.0, None))
        self._size -= dropped.size if dropped else 0


def note_name(url: str, *, allow_private: Private) -> str:
    """Returns the name of the note with the rules of the host of `url`. Jobs that may visit the same
    non-public addresses share it."""
    origin = urls.origin_of(url)
    if isinstance(allow_private, bool):
        return f"private {origin}" if allow_private else origin
    places = " ".join(sorted(allow_private))
    return f"private {places} {origin}" if places else origin


def _about_robots(error: FetchError) -> FetchError:
    about = FetchError(error.error, f"robots.txt: {error.message}", retry_after=error.retry_after)
    about.hint = error.hint
    return about


async def _ready(robots: Robots, agent: str) -> Robots:
    """Returns `robots` with the agent's group made, on a thread if it is large: later calls only look it
    up."""
    if robots.is_group_slow(agent):
        await asyncio.to_thread(robots.group, agent)
    return robots
