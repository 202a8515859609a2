"""The frontier as a consumer sees it: leases come by message instead of by claim.

A worker works on it as on any frontier and knows nothing of brokers. `claim` takes what has
arrived, `settle` stores in the frontier first and tells the broker afterwards. If this process
dies in between, the message comes again and finds its leases settled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from shoal.dispatch.port import Delivery, Dispatch
from shoal.errors import DispatchError, DispatchRefused, ShoalError
from shoal.events import Trouble, Watcher
from shoal.frontier.port import Frontier
from shoal.model import Added, Claim, Dead, DeadLetter, Lease, Pace, Request, Settlement, Verdict
from shoal.politeness.pacing import backoff

RECEIVE = 100
"""Messages of one receive; the prefetch is what limits them."""
GOODBYE = 3.0
"""Seconds to tell the broker of failures that were not told yet."""
NEWS = 5.0
"""Seconds between two looks whether there are new queues."""
LOOK = 0.2
"""Seconds between two looks whether the frontier is drained."""
STEP = 1.0
"""Seconds that one step of priority is ahead of the next."""


class _Parcel:
    """A message under way here, and how many of its leases are not over yet."""

    __slots__ = ("delivery", "left")

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.left = len(delivery.message.leases)


class Consumer(Frontier):
    """Use it as a context manager: inside, messages are received."""

    def __init__(
        self,
        frontier: Frontier,
        dispatch: Dispatch,
        *,
        watch: Watcher,
        limit: int = RECEIVE,
        queues: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        """`limit` messages are held at most. A broker's prefetch says the same, but it knows nothing
        of messages that it forgot when it handed them out. `queues` is asked now and then what there
        is to receive from: a queue may be younger than who serves it."""
        self._frontier = frontier
        self._dispatch = dispatch
        self._watch = watch
        self._limit = limit
        self._queues = queues
        self._waiting: list[tuple[float, int, Lease]] = []
        """Leases that arrived and nobody has taken yet: a heap by their rank."""
        self._numbers = count()
        self._held = 0
        self._room = asyncio.Event()
        self._refused: DispatchRefused | None = None
        self._parcels: dict[int, list[_Parcel]] = {}
        """Token to the messages that carry it: after a reconnect one may come again while its
        visit is still under way here, and must not begin a second one."""
        self._arrived = asyncio.Event()
        self._letters: asyncio.Queue[DeadLetter] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._looked = -math.inf
        self._now = 0.0

    async def __aenter__(self) -> Self:
        work = [self._receive(), self._tell_failures()]
        if self._queues is not None:
            work.append(self._subscribe(self._queues))
        self._tasks = [asyncio.create_task(each) for each in work]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        receiving, telling, *more = self._tasks
        for task in (receiving, *more):
            task.cancel()
        # What is being told just now would be told twice if it were called off.
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                await self._letters.join()
        telling.cancel()
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
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        """What has arrived. `queues` and `job` only tell what counts as drained: a consumer
        chose its queues when it began to receive, and may get work of other jobs.

        Raises DispatchRefused when nothing will ever arrive.
        """
        if self._refused is not None:
            raise self._refused
        if job is not None and await self._drained(worker, lease_seconds, queues, job):
            # What other jobs still send is for others.
            return Claim((), None, self._now)
        while limit > 0 and self._waiting:
            chosen = [heappop(self._waiting) for _ in range(min(limit, len(self._waiting)))]
            try:
                leases = [each for _, _, each in chosen]
                claim = await self._frontier.take(leases, worker=worker, lease_seconds=lease_seconds)
            except BaseException:
                for each in chosen:
                    heappush(self._waiting, each)
                raise
            self._now = claim.now
            ours = {each.token for each in claim.leases}
            await self._over([each.token for each in leases if each.token not in ours])
            if claim.leases:
                return claim
        self._arrived.clear()
        if job is None and await self._drained(worker, lease_seconds, queues, job):
            return Claim((), None, self._now)
        return Claim((), math.inf, self._now)

    async def _drained(
        self, worker: str, lease: float, queues: Collection[str] | None, job: str | None
    ) -> bool:
        """Asked now and then only: it costs a question to the frontier."""
        now = asyncio.get_running_loop().time()
        if now - self._looked < LOOK:
            return False
        claim = await self._frontier.claim(0, worker=worker, lease_seconds=lease, queues=queues, job=job)
        self._looked, self._now = now, claim.now
        return claim.drained

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        answer = await self._frontier.settle(verdicts)
        lost = {lease.token for lease in answer.lost}
        for verdict in verdicts:
            if isinstance(verdict, Dead) and verdict.lease.token not in lost:
                lease = verdict.lease
                # As the frontier keeps it: with this visit.
                request = replace(lease.request, attempt=lease.request.attempt + 1)
                letter = DeadLetter(lease.token, request, lease.lane, verdict.failure, self._now)
                self._letters.put_nowait(letter)
        await self._over([verdict.lease.token for verdict in verdicts])
        return answer

    async def wait(self, seconds: float) -> None:
        """Nobody sends a message to say that there will be none: who waits must look."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, 2 * LOOK)):
                await self._arrived.wait()

    # -- what does not ------------------------------------------------------------------

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        return await self._frontier.add(requests)

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        return await self._frontier.take(leases, worker=worker, lease_seconds=lease_seconds)

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        return await self._frontier.extend(leases, seconds)

    async def pace(self, lane: str, pace: Pace) -> None:
        await self._frontier.pace(lane, pace)

    async def close(self) -> None:
        await self._frontier.close()

    # -- inside -------------------------------------------------------------------------

    async def _receive(self) -> None:
        attempt = 0
        while True:
            while self._held >= self._limit:
                self._room.clear()
                await self._room.wait()
            try:
                deliveries = await self._dispatch.receive(self._limit - self._held)
            except DispatchRefused as error:
                self._refused = error
                self._arrived.set()
                return
            except DispatchError as error:
                attempt += 1
                self._watch(Trouble(str(error), attempt, part="dispatch"))
                await asyncio.sleep(backoff(attempt, base=0.2, cap=10.0, jitter=0.5))
                continue
            attempt = 0
            for delivery in deliveries:
                self._arrive(delivery)
            empty = [delivery for delivery in deliveries if not delivery.message.leases]
            if empty:
                with suppress(DispatchError):
                    await self._dispatch.finish(empty)
            self._arrived.set()

    async def _subscribe(self, queues: Callable[[], Awaitable[Collection[str]]]) -> None:
        while True:
            await asyncio.sleep(NEWS)
            # A frontier that does not answer is told of by who claims and settles.
            with suppress(ShoalError):
                self._dispatch.subscribe(await queues())

    def _arrive(self, delivery: Delivery) -> None:
        parcel = _Parcel(delivery)
        message = delivery.message
        self._held += bool(message.leases)
        # Urgent ones first, and nobody waits for ever: a priority is worth a second.
        rank = asyncio.get_running_loop().time() - message.priority * STEP
        for lease in message.leases:
            here = self._parcels.setdefault(lease.token, [])
            here.append(parcel)
            if len(here) == 1:
                heappush(self._waiting, (rank, next(self._numbers), lease))

    async def _over(self, tokens: Sequence[int]) -> None:
        """These leases are settled, or were never ours: finish the messages that only held such."""
        finished: list[Delivery] = []
        for token in tokens:
            for parcel in self._parcels.pop(token, ()):
                parcel.left -= 1
                if not parcel.left:
                    finished.append(parcel.delivery)
        if finished:
            self._held -= len(finished)
            self._room.set()
            # The broker is away: it will send them again, and they will be found settled.
            with suppress(DispatchError):
                await self._dispatch.finish(finished)

    async def _tell_failures(self) -> None:
        letters: list[DeadLetter] = []
        try:
            await self._tell_from(letters)
        except asyncio.CancelledError:
            for letter in letters:
                self._letters.put_nowait(letter)  # for who closes
            raise

    async def _tell_from(self, letters: list[DeadLetter]) -> None:
        """`letters` are those that were taken and not told yet."""
        attempt = 0
        while True:
            if not letters:
                letters.append(await self._letters.get())
            while not self._letters.empty() and len(letters) < RECEIVE:
                letters.append(self._letters.get_nowait())
            try:
                await self._dispatch.failed(letters)
            except DispatchError as error:
                attempt += 1
                self._watch(Trouble(str(error), attempt, part="dispatch"))
                await asyncio.sleep(backoff(attempt, base=0.2, cap=10.0, jitter=0.5))
                continue
            for _ in letters:
                self._letters.task_done()
            attempt = 0
            letters.clear()
