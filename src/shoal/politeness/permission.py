"""May this URL be fetched? robots.txt, fetched once a host and shared between workers.

Asking for robots.txt is a visit to the host like any other, so it pays with the host's turn:
whoever holds a lease for a host whose rules are unknown fetches them *instead of* the page and
hands the page back. With several workers only the lane's width of them can do so at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from shoal import clock, urls
from shoal.errors import FetchError, class_of
from shoal.fetch.port import Ask, Fetcher, Gate, Limits, NotSent
from shoal.fetch.redirects import follow
from shoal.politeness.robots import MAX_BYTES, Robots

LIMITS = Limits(total=30.0, body=2 * MAX_BYTES)
MAX_HOSTS = 20_000
"""Rules kept in memory; the shared notes hold the rest."""


class Permission:
    """The rules of every host this worker meets."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        note: Callable[[str, bytes, float], Awaitable[None]],
        noted: Callable[[str], Awaitable[bytes | None]],
        now: clock.Clock = clock.system,
    ) -> None:
        self._fetcher = fetcher
        self._note = note
        self._noted = noted
        self._now = now
        self._rules: dict[str, tuple[float, Robots]] = {}
        self._asking: dict[str, asyncio.Future[Robots]] = {}

    async def rules(self, url: str) -> Robots | None:
        """What is known of the host of `url` without going there; None when nothing is."""
        origin = urls.origin_of(url)
        until, robots = self._rules.get(origin, (0.0, None))
        if robots is not None and until > self._now():
            return robots
        shared = await self._noted(f"robots {origin}")
        if shared is None:
            return None
        try:
            robots = (
                await asyncio.to_thread(Robots.load, shared) if Robots.slow(shared) else Robots.load(shared)
            )
        except ValueError:
            return None
        self._keep(origin, robots)
        return robots

    async def ask(self, url: str, *, allow_private: bool, gate: Gate | None = None) -> Robots:
        """Fetch the host's robots.txt, now. An unreachable one is an answer too: raises NotSent only, if
        the gate did not let it out. Whoever asks while it is being fetched gets the same answer."""
        origin = urls.origin_of(url)
        asking = self._asking.get(origin)
        if asking is None:
            asking = asyncio.ensure_future(self._fetch(origin, allow_private, gate))
            self._asking[origin] = asking
            asking.add_done_callback(partial(self._asked, origin))
        return await asyncio.shield(asking)

    def _asked(self, origin: str, asking: asyncio.Future[Robots]) -> None:
        self._asking.pop(origin, None)
        if not asking.cancelled():
            asking.exception()  # who asked may be gone, and then nobody looks at it

    async def _fetch(self, origin: str, allow_private: bool, gate: Gate | None) -> Robots:
        ask = Ask(f"{origin}/robots.txt", allow_private=allow_private, limits=LIMITS, gate=gate)
        try:
            response, _ = await follow(self._fetcher, ask, limit=5)
            slow = Robots.slow(response.body)
            given = (response.body, response.status)
            robots = await asyncio.to_thread(Robots.parse, *given) if slow else Robots.parse(*given)
        except NotSent:
            raise
        except FetchError as error:
            robots = _without_answer(error)
        self._keep(origin, robots)
        await self._note(f"robots {origin}", robots.dump(), robots.ttl)
        return robots

    async def allows(self, robots: Robots, url: str) -> bool:
        return await asyncio.to_thread(robots.allowed, url) if robots.large else robots.allowed(url)

    async def close(self) -> None:
        """Stop asking."""
        for asking in self._asking.values():
            asking.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _keep(self, origin: str, robots: Robots) -> None:
        if len(self._rules) >= MAX_HOSTS:
            self._rules.clear()
        # Less than the shared note lives, so that a change there is seen here.
        self._rules[origin] = (self._now() + min(robots.ttl, 300.0), robots)


def _without_answer(error: FetchError) -> Robots:
    if error.error in ("too_many_redirects", "redirect_invalid", "egress_blocked"):
        return Robots.parse(b"", 404)  # the site's way of having no rules
    if class_of(error.error).group in ("connection", "timeout"):
        return Robots.unanswered(error.error, error.message)
    return Robots.parse(b"", 0)
