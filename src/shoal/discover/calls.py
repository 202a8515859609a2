"""Fetches that belong to no job, at each host's pace.

A visit waits for its turn in the frontier. These few fetches have no lease, so they keep the pace
themselves: one at a time, robots.txt asked first, the gap of the host between two of them. With a
frontier that others work on, the host is blocked for them around each call, so that neither side
comes too early for the other.
"""

from __future__ import annotations

import asyncio
import random
import time

from shoal import urls
from shoal.errors import FetchError, UsageError, class_of, classify_status
from shoal.fetch.port import Ask, Fetcher
from shoal.fetch.redirects import redirect_target, redirected
from shoal.frontier.port import Backend
from shoal.model import Lane, Pace, Response
from shoal.politeness.pacing import backoff, retry_after
from shoal.politeness.permission import Permission
from shoal.politeness.robots import Robots

MAX_REST = 120.0
"""A host that wants to be left alone for longer is not waited for."""
_MAX_HOPS = 5
_BUSY_SECONDS = 60.0
"""How long the visits that others have under way on a host may hold us up."""
_SLACK = 0.01


class Calls:
    """Fetches URLs, one after the other."""

    def __init__(
        self,
        fetcher: Fetcher,
        permission: Permission,
        ask: Ask,
        *,
        gap: float,
        obey: bool = True,
        retries: int = 3,
        shared: Backend | None = None,
    ) -> None:
        """`ask` is the pattern of every fetch (limits, headers for its origin). `shared` is the
        frontier of others who may visit the same hosts."""
        self._fetcher = fetcher
        self._permission = permission
        self._ask = ask
        self._obey = obey
        self._retries = retries
        self._turns = _Turns(gap, shared)

    async def robots(self, url: str) -> Robots:
        """The rules of the host of `url`. Never raises FetchError; see `Robots.reachable`."""
        robots = await self._permission.rules(url)
        if robots is None:
            await self._turns.take(urls.lane_of(url))
            robots = await self._permission.ask(url, allow_private=self._ask.allow_private)
        delay = robots.crawl_delay() if self._obey else None
        if delay is not None:
            await self._turns.slow_down(urls.lane_of(url), delay)
        return robots

    @staticmethod
    def excuse(url: str, robots: Robots) -> str:
        """Why the rules at `url` are not known, in words."""
        return ": ".join(robots.failure) if robots.failure else robots.rule(url)

    async def get(self, url: str, *, invited: bool = False, persistent: bool = True) -> Response:
        """The page at `url`, redirects followed. What its robots.txt names itself is `invited` and
        not asked about. Raises FetchError, also for a status that is no success."""
        for attempt in range(1, self._retries + 1):
            try:
                return await self._get(url, invited=invited)
            except FetchError as error:
                if class_of(error.error).slows and _passing(error):
                    rest = error.retry_after or backoff(attempt, base=5.0)
                    await self._turns.rest(urls.lane_of(url), rest)
                if not persistent or attempt == self._retries or not _passing(error):
                    raise
                wait = error.retry_after or backoff(attempt, jitter=random.random())
                if wait > MAX_REST:
                    raise
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _get(self, url: str, *, invited: bool) -> Response:
        ask = redirected(self._ask, 302, url)  # headers stay at home
        seen = {url}
        for _ in range(_MAX_HOPS + 1):
            await self._permit(ask.url, invited=invited)
            await self._turns.take(urls.lane_of(ask.url))
            response = await self._fetcher.fetch(ask)
            target = redirect_target(response)
            if target is None:
                return _succeeded(response)
            if target in seen:
                break
            seen.add(target)
            ask = redirected(ask, response.status, target)
        raise FetchError("too_many_redirects", f"{len(seen)} redirects and no page")

    async def _permit(self, url: str, *, invited: bool) -> None:
        if not self._obey:
            return
        robots = await self.robots(url)
        if robots.failure is not None:
            raise FetchError(*robots.failure)
        if not robots.reachable:
            raise FetchError("robots_unreachable", robots.rule(url))
        if not invited and not await self._permission.allows(robots, url):
            raise FetchError("robots", robots.rule(url))


def _passing(error: FetchError) -> bool:
    """Whether it may be gone when we ask again. Rules are not asked for again for minutes."""
    return error.error not in ("robots", "robots_unreachable") and class_of(error.error).retry


def _succeeded(response: Response) -> Response:
    if 200 <= response.status < 300:
        return response
    raise FetchError(
        classify_status(response.status),
        f"the server answered {response.status}",
        retry_after=retry_after(response.header("retry-after"), time.time()),
    )


class _Turns:
    """When a host may be called next."""

    def __init__(self, gap: float, shared: Backend | None) -> None:
        self._gap = gap
        self._shared = shared
        self._floors: dict[str, float] = {}
        self._next: dict[str, float] = {}
        """Our own clock: not before this."""
        self._ours: dict[str, float] = {}
        """The frontier's clock: until then we have blocked the lane ourselves."""

    async def take(self, lane: str) -> None:
        """Return when the lane may be called, and count the call. Raises FetchError if it rests
        for too long, UsageError if somebody paused it."""
        gap = max(self._gap, self._floors.get(lane, 0.0))
        wait = max(0.0, self._next.get(lane, 0.0) - time.monotonic())
        if self._shared is not None:
            gap, wait = await self._agree(self._shared, lane, gap, wait)
        if wait > MAX_REST:
            raise FetchError("http_503", f"the host rests for another {wait:.0f} s", retry_after=wait)
        await asyncio.sleep(wait)
        if self._shared is not None and wait > 0:
            await self._quiet(self._shared, lane)
        self._next[lane] = time.monotonic() + gap

    async def slow_down(self, lane: str, delay: float) -> None:
        """The host itself asked for so many seconds between two calls."""
        if self._floors.get(lane) == delay:
            return
        self._floors[lane] = delay
        if lane in self._next:
            # The call that brought the delay knew nothing of it: it also counts from now.
            self._next[lane] = max(self._next[lane], time.monotonic() + delay)
        if self._shared is not None and await _lane(self._shared, lane):
            await self._shared.pace(lane, Pace(floor=delay))

    async def rest(self, lane: str, seconds: float) -> None:
        """The host is in trouble: nobody calls it for a while."""
        self._next[lane] = max(self._next.get(lane, 0.0), time.monotonic() + seconds)
        if self._shared is not None and await _lane(self._shared, lane):
            await self._shared.pace(lane, Pace(blocked=seconds))

    async def _agree(self, shared: Backend, lane: str, gap: float, wait: float) -> tuple[float, float]:
        """The gap, and how long to wait, so that visits of others count too. Keeps them away from
        now until a gap after our call."""
        view = await _lane(shared, lane)
        if view is None:
            return gap, wait  # nobody goes there
        if view.paused:
            raise UsageError(f"{lane} is paused", hint=f"`shoal lanes resume {lane}` lets it go on")
        gap = view.gap if view.pinned else max(gap, view.gap, view.floor)
        # A claim on a queue that nobody fills brings nothing but the frontier's clock.
        now = (await shared.claim(1, worker="discover", lease=1.0, queues=("",))).now
        if view.blocked_until > self._ours.get(lane, 0.0) + _SLACK:
            wait = max(wait, view.blocked_until - now)
        if lane not in self._next:
            wait = max(wait, gap)  # somebody may have been there just now
        if wait + gap > 0:
            # 0 would lift what others blocked.
            await shared.pace(lane, Pace(blocked=wait + gap))
            self._ours[lane] = now + wait + gap
        return gap, wait

    async def _quiet(self, shared: Backend, lane: str) -> None:
        """Wait for a free place: the visits of others under way end, and none begins."""
        end = time.monotonic() + _BUSY_SECONDS
        while time.monotonic() < end:
            view = await _lane(shared, lane)
            if view is None or view.busy < max(view.width, 1):
                return
            await shared.pace(lane, Pace(blocked=max(1.0, 2 * self._gap)))
            await asyncio.sleep(0.1)


async def _lane(shared: Backend, lane: str) -> Lane | None:
    views = await shared.lanes(names=(lane,))
    return views[0] if views else None
