"""A frontier whose leases come by message instead of by claim.

A worker uses it like any frontier and knows nothing of brokers. `claim` takes the leases that have arrived.
`settle` stores in the frontier first and acknowledges the message afterwards. If this process dies in
between, the message is delivered again and its leases are found settled.
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
"""The most messages of one `receive`; in practice the prefetch is the limit."""
GOODBYE = 3.0
"""Seconds that closing waits for dead letters to be reported."""
NEWS = 5.0
"""Seconds between two checks for new queues."""
LOOK = 0.2
"""Seconds between two checks whether the frontier is drained."""
STEP = 1.0
"""Seconds by which one step of priority is ahead of the next."""


class _OpenMessage:
    """A message that is in flight here, and how many of its leases have not ended."""

    __slots__ = ("delivery", "left")

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.left = len(delivery.message.leases)


class Consumer(Frontier):
    """Use it as a context manager: it receives messages while the body runs."""

    def __init__(
        self,
        frontier: Frontier,
        dispatch: Dispatch,
        *,
        watch: Watcher,
        limit: int = RECEIVE,
        queues: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        """`limit` is the most messages that it holds. A broker's prefetch has the same purpose, but does not
        count the messages of fast queues, which the broker forgets at delivery. `queues` returns the queues
        to receive from; it is called now and then, because a queue may be newer than its consumer."""
        self._frontier = frontier
        self._dispatch = dispatch
        self._watch = watch
        self._limit = limit
        self._queues = queues
        self._waiting: list[tuple[float, int, Lease]] = []
        """Leases that have arrived and are not taken yet: a heap by rank."""
        self._numbers = count()
        self._held = 0
        self._room = asyncio.Event()
        self._refused: DispatchRefused | None = None
        self._open: dict[int, list[_OpenMessage]] = {}
        """The messages that carry a token. After a reconnect, a message may be delivered again while its
        visit is still in flight here; it must not start a second one."""
        self._arrived = asyncio.Event()
        self._letters: asyncio.Queue[DeadLetter] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._looked = -math.inf
        self._now = 0.0

    async def __aenter__(self) -> Self:
        work = [self._receive(), self._report_dead()]
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
        # A report that is in flight would be repeated if it were cancelled.
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                await self._letters.join()
        telling.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        letters = [self._letters.get_nowait() for _ in range(self._letters.qsize())]
        if letters:
            with suppress(DispatchError):
                await self._dispatch.report_dead(letters)

    # -- where it differs from other frontiers ------------------------------------------

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        """Take leases that have arrived. `queues` and `job` only decide what counts as drained: a consumer
        chose its queues when it started to receive, and may get work of other jobs.

        Raises DispatchRefused if no message will ever arrive.
        """
        if self._refused is not None:
            raise self._refused
        if job is not None and await self._drained(worker, lease_seconds, queues, job):
            # Messages of other jobs are for other consumers.
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
            await self._finish_messages([each.token for each in leases if each.token not in ours])
            if claim.leases:
                return claim
        self._arrived.clear()
        if job is None and await self._drained(worker, lease_seconds, queues, job):
            return Claim((), None, self._now)
        return Claim((), math.inf, self._now)

    async def _drained(
        self, worker: str, lease: float, queues: Collection[str] | None, job: str | None
    ) -> bool:
        """Return whether the frontier is drained. It is asked only now and then, because that costs a
        call."""
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
                # As the frontier stores it: this visit counts as an attempt.
                request = replace(lease.request, attempt=lease.request.attempt + 1)
                letter = DeadLetter(lease.token, request, lease.lane, verdict.failure, self._now)
                self._letters.put_nowait(letter)
        await self._finish_messages([verdict.lease.token for verdict in verdicts])
        return answer

    async def wait(self, seconds: float) -> None:
        """Wait for messages, but not for long: no message announces that there is nothing left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, 2 * LOOK)):
                await self._arrived.wait()

    # -- where it does not --------------------------------------------------------------

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
                self._accept(delivery)
            empty = [delivery for delivery in deliveries if not delivery.message.leases]
            if empty:
                with suppress(DispatchError):
                    await self._dispatch.finish(empty)
            self._arrived.set()

    async def _subscribe(self, queues: Callable[[], Awaitable[Collection[str]]]) -> None:
        while True:
            await asyncio.sleep(NEWS)
            # If the frontier cannot be reached, claim and settle report that.
            with suppress(ShoalError):
                self._dispatch.subscribe(await queues())

    def _accept(self, delivery: Delivery) -> None:
        opened = _OpenMessage(delivery)
        message = delivery.message
        self._held += bool(message.leases)
        # Urgent messages first, but none waits for ever: a step of priority is worth a second.
        rank = asyncio.get_running_loop().time() - message.priority * STEP
        for lease in message.leases:
            here = self._open.setdefault(lease.token, [])
            here.append(opened)
            if len(here) == 1:
                heappush(self._waiting, (rank, next(self._numbers), lease))

    async def _finish_messages(self, tokens: Sequence[int]) -> None:
        """Note that these leases are settled or were lost, and finish messages that have no other leases."""
        finished: list[Delivery] = []
        for token in tokens:
            for opened in self._open.pop(token, ()):
                opened.left -= 1
                if not opened.left:
                    finished.append(opened.delivery)
        if finished:
            self._held -= len(finished)
            self._room.set()
            # If the broker is away, it delivers them again later, and their leases are found settled.
            with suppress(DispatchError):
                await self._dispatch.finish(finished)

    async def _report_dead(self) -> None:
        letters: list[DeadLetter] = []
        try:
            await self._report_from(letters)
        except asyncio.CancelledError:
            for letter in letters:
                self._letters.put_nowait(letter)  # `__aexit__` reports them
            raise

    async def _report_from(self, letters: list[DeadLetter]) -> None:
        """Report dead letters for ever. `letters` has those that were taken from the queue and not
        reported."""
        attempt = 0
        while True:
            if not letters:
                letters.append(await self._letters.get())
            while not self._letters.empty() and len(letters) < RECEIVE:
                letters.append(self._letters.get_nowait())
            try:
                await self._dispatch.report_dead(letters)
            except DispatchError as error:
                attempt += 1
                self._watch(Trouble(str(error), attempt, part="dispatch"))
                await asyncio.sleep(backoff(attempt, base=0.2, cap=10.0, jitter=0.5))
                continue
            for _ in letters:
                self._letters.task_done()
            attempt = 0
            letters.clear()
