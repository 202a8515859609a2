"""May this URL be fetched? robots.txt, fetched once a host and shared between workers.

Asking for robots.txt is a visit to the host like any other, so it pays with the host's turn:
whoever holds a lease for a host whose rules are unknown fetches them *instead of* the page and
hands the page back. With several workers only the lane's width of them can do so at once.

Only what a server answered is remembered. When there was no answer (our guard said no, nobody listens,
it is no web server) nothing is known, and the page fails as it would have failed by itself. What was
learnt at addresses that are not public is remembered apart, for jobs that may go there.
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

# One byte more, so that a file which was cut is known from one that ends there.
LIMITS = Limits(total=30.0, body=MAX_BYTES + 1, cut=True)
SHELF = "robots"
MAX_HOSTS = 20_000
MAX_SIZE = 2_000_000
"""Rules kept in memory, by hosts and by characters (about ten bytes each); the shared notes hold the rest."""
_NOWHERE = frozenset({"too_many_redirects", "redirect_invalid", "scheme_blocked"})
"""Redirects that lead to no file: the site's way of having no rules."""


class Permission:
    """The rules of every host this worker meets."""

    def __init__(self, fetcher: Fetcher, notes: Notes, *, now: clock.Clock = clock.system) -> None:
        self._fetcher = fetcher
        self._notes = notes
        self._now = now
        self._rules: dict[str, tuple[float, Robots]] = {}
        self._size = 0
        self._asking: dict[str, asyncio.Future[Robots]] = {}

    async def rules(self, url: str, *, allow_private: Private, agent: str = AGENT) -> Robots | None:
        """What is known of the host of `url` without going there; None when nothing is."""
        name = note_name(url, allow_private=allow_private)
        until, robots = self._rules.get(name, (0.0, None))
        if robots is None or until <= self._now():
            robots = await self._shared(name)
            if robots is not None:
                self._keep(name, robots)
        return robots and await _ready(robots, agent)

    async def ask(
        self, url: str, *, allow_private: Private, agent: str = AGENT, gate: Gate | None = None
    ) -> Robots:
        """Fetch the host's robots.txt, now. Raises FetchError if there is no answer, NotSent if the gate did
        not let it out. Whoever asks while it is being fetched gets the same answer."""
        name = note_name(url, allow_private=allow_private)
        asking = self._asking.get(name)
        if asking is None:
            ask = Ask(
                f"{urls.origin_of(url)}/robots.txt", allow_private=allow_private, limits=LIMITS, gate=gate
            )
            asking = asyncio.ensure_future(self._fetch(name, ask))
            self._asking[name] = asking
            asking.add_done_callback(partial(self._asked, name))
        return await _ready(await asyncio.shield(asking), agent)

    async def learn(self, url: str, body: bytes, *, allow_private: Private) -> Robots:
        """Remember the rules of the host of `url`, which somebody has fetched as a page."""
        return await self._learn(note_name(url, allow_private=allow_private), body, 200)

    async def allows(self, robots: Robots, url: str, agent: str = AGENT) -> bool:
        """Whether `rules` or `ask` for this agent gave its consent to `url`."""
        slow = robots.group(agent).slow
        return await asyncio.to_thread(robots.allowed, url, agent) if slow else robots.allowed(url, agent)

    async def close(self) -> None:
        """Stop asking."""
        for asking in self._asking.values():
            asking.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _asked(self, name: str, asking: asyncio.Future[Robots]) -> None:
        self._asking.pop(name, None)
        if not asking.cancelled():
            asking.exception()  # who asked may be gone, and then nobody looks at it

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
        slow = Robots.slow(body)
        robots = await asyncio.to_thread(Robots.parse, body, status) if slow else Robots.parse(body, status)
        self._keep(name, robots)
        await self._notes.put(SHELF, name, robots.dump(), robots.ttl)
        return robots

    async def _shared(self, name: str) -> Robots | None:
        noted = await self._notes.get(SHELF, name)
        if noted is None:
            return None
        try:
            return await asyncio.to_thread(Robots.load, noted) if Robots.slow(noted) else Robots.load(noted)
        except ValueError:
            return None

    def _keep(self, name: str, robots: Robots) -> None:
        self._drop(name)
        # Less than the shared note lives, so that a change there is seen here.
        self._rules[name] = (self._now() + min(robots.ttl, 300.0), robots)
        self._size += robots.size
        while len(self._rules) > MAX_HOSTS or self._size > MAX_SIZE:
            self._drop(next(iter(self._rules)))

    def _drop(self, name: str) -> None:
        _, dropped = self._rules.pop(name, (0.0, None))
        self._size -= dropped.size if dropped else 0


def note_name(url: str, *, allow_private: Private) -> str:
    """The name of the note with the rules of the host of `url`, for jobs that may visit the same addresses
    although they are not public."""
    origin = urls.origin_of(url)
    if isinstance(allow_private, bool):
        return f"private {origin}" if allow_private else origin
    places = " ".join(sorted(allow_private))
    return f"private {places} {origin}" if places else origin


def _about_robots(error: FetchError) -> FetchError:
    told = FetchError(error.error, f"robots.txt: {error.message}", retry_after=error.retry_after)
    told.hint = error.hint
    return told


async def _ready(robots: Robots, agent: str) -> Robots:
    """With the group of the agent made, off the loop if it is large: from then on it is only looked up."""
    if robots.unread(agent):
        await asyncio.to_thread(robots.group, agent)
    return robots
