"""The frontier as a consumer sees it: leases come by message instead of by claim.

A worker works on it as on any frontier and knows nothing of brokers. `claim` takes what has
arrived, `settle` stores in the frontier first and tells the broker afterwards. If this process
dies in between, the message comes again and finds its leases settled.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from shoal.dispatch.port import Delivery, Dispatch
from shoal.errors import DispatchError
from shoal.events import Trouble, Watcher
from shoal.frontier.port import Frontier
from shoal.model import Added, Beat, Claim, Dead, DeadLetter, Lease, Pace, Request, Settlement, Verdict
from shoal.politeness.pacing import backoff

RECEIVE = 100
"""Messages of one receive; the prefetch is what limits them."""
LOOK = 0.5
"""Seconds between two looks whether the frontier is drained."""


class _Parcel:
    """A message under way here, and how many of its leases are not over yet."""

    __slots__ = ("delivery", "left")

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.left = len(delivery.message.leases)


class Consumer(Frontier):
    """Use it as a context manager: inside, messages are received."""

    def __init__(self, frontier: Frontier, dispatch: Dispatch, *, watch: Watcher) -> None:
        self._frontier = frontier
        self._dispatch = dispatch
        self._watch = watch
        self._waiting: deque[Lease] = deque()
        """Leases that arrived and nobody has taken yet."""
        self._parcels: dict[int, list[_Parcel]] = {}
        """Token to the messages that carry it: after a reconnect one may come again while its
        visit is still under way here, and must not begin a second one."""
        self._arrived = asyncio.Event()
        self._letters: asyncio.Queue[DeadLetter] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._looked = -math.inf
        self._now = 0.0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._tell_failures())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        letters = [self._letters.get_nowait() for _ in range(self._letters.qsize())]
        if letters:
            with suppress(DispatchError):
                await self._dispatch.failed(letters)

    # -- what differs from an ordinary frontier -----------------------------------------

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        """What has arrived. `queues` and `job` only tell what counts as drained: a consumer
        chose its queues when it began to receive."""
        while limit > 0 and self._waiting:
            chosen = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            try:
                claim = await self._frontier.take(chosen, worker=worker, lease=lease)
            except BaseException:
                self._waiting.extendleft(reversed(chosen))
                raise
            self._now = claim.now
            ours = {each.token for each in claim.leases}
            await self._over([each.token for each in chosen if each.token not in ours])
            if claim.leases:
                return claim
        self._arrived.clear()
        return await self._nothing(worker, lease, queues, job)

    async def _nothing(
        self, worker: str, lease: float, queues: Collection[str] | None, job: str | None
    ) -> Claim:
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked >= LOOK:
            claim = await self._frontier.claim(0, worker=worker, lease=lease, queues=queues, job=job)
            self._looked, self._now = loop.time(), claim.now
            if claim.drained and not self._parcels:
                return claim
        return Claim((), math.inf, self._now)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        answer = await self._frontier.settle(verdicts)
        lost = {lease.token for lease in answer.lost}
        for verdict in verdicts:
            if isinstance(verdict, Dead) and verdict.lease.token not in lost:
                lease = verdict.lease
                letter = DeadLetter(lease.token, lease.request, lease.lane, verdict.failure, self._now)
                self._letters.put_nowait(letter)
        await self._over([verdict.lease.token for verdict in verdicts])
        return answer

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)

    # -- what does not ------------------------------------------------------------------

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        return await self._frontier.add(requests)

    async def take(self, leases: Sequence[Lease], *, worker: str, lease: float) -> Claim:
        return await self._frontier.take(leases, worker=worker, lease=lease)

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        return await self._frontier.extend(leases, seconds)

    async def pace(self, lane: str, pace: Pace) -> None:
        await self._frontier.pace(lane, pace)

    async def beat(self, beat: Beat) -> None:
        await self._frontier.beat(beat)

    async def leave(self, worker: str) -> None:
        await self._frontier.leave(worker)

    # -- inside -------------------------------------------------------------------------

    async def _receive(self) -> None:
        attempt = 0
        while True:
            try:
                deliveries = await self._dispatch.receive(RECEIVE)
            except DispatchError as error:
                attempt += 1
                self._watch(Trouble(str(error), attempt))
                await asyncio.sleep(backoff(attempt, base=0.2, cap=10.0, jitter=0.5))
                continue
            attempt = 0
            for delivery in deliveries:
                self._arrive(delivery)
            self._arrived.set()

    def _arrive(self, delivery: Delivery) -> None:
        parcel = _Parcel(delivery)
        for lease in delivery.message.leases:
            here = self._parcels.setdefault(lease.token, [])
            here.append(parcel)
            if len(here) == 1:
                self._waiting.append(lease)

    async def _over(self, tokens: Sequence[int]) -> None:
        """These leases are settled, or were never ours: finish the messages that only held such."""
        finished: list[Delivery] = []
        for token in tokens:
            for parcel in self._parcels.pop(token, ()):
                parcel.left -= 1
                if not parcel.left:
                    finished.append(parcel.delivery)
        if finished:
            # The broker is away: it will send them again, and they will be found settled.
            with suppress(DispatchError):
                await self._dispatch.finish(finished)

    async def _tell_failures(self) -> None:
        attempt = 0
        letters: list[DeadLetter] = []
        while True:
            if not letters:
                letters.append(await self._letters.get())
            while not self._letters.empty() and len(letters) < RECEIVE:
                letters.append(self._letters.get_nowait())
            try:
                await self._dispatch.failed(letters)
            except DispatchError as error:
                attempt += 1
                self._watch(Trouble(str(error), attempt))
                await asyncio.sleep(backoff(attempt, base=0.2, cap=10.0, jitter=0.5))
                continue
            except asyncio.CancelledError:
                for letter in letters:
                    self._letters.put_nowait(letter)
                raise
            attempt = 0
            letters = []
