"""The pump: claims what may be visited now and sends it to where workers receive.

It keeps few messages waiting, about as many as the consumers will want next, so that leases do
not age in the broker and a host's turn is used soon after it came. One pump works at a time, by
a lock in the frontier; any number may stand by. When a pump dies, the next one takes back what
it had claimed: what was sent by then finds its leases gone, and is claimed and sent again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from shoal.dispatch.port import Depth, Dispatch, Message
from shoal.dispatch.routes import PRIORITY_QUEUE, URL_QUEUE, Routes, broker_queue
from shoal.errors import DispatchError, FrontierCorrupt, FrontierError
from shoal.events import Trouble, Watcher
from shoal.frontier.port import Backend
from shoal.model import DEFAULT_QUEUE, EXPIRED, TRANSIT, Claim, Dead, Failure, Lease, Release
from shoal.politeness.pacing import backoff

LOCK = 15.0
"""Seconds for which a pump is the pump; it asks again every third of that."""
NEWS = 5.0
"""Seconds between two looks which queues there are."""
FULL = 0.01
"""Seconds after which a full queue is looked at again."""
UNATTENDED = 0.5
"""The same for one that nobody consumes."""
POLL = 1.0
MISSING = 60.0
"""When nothing has waited in the broker for so long, what still is in transit must be lost."""
QUEUE_TTLS: Mapping[str, float] = {URL_QUEUE: 3600.0, PRIORITY_QUEUE: 1800.0}
"""How long a message may wait in a queue; an hour in others."""
OTHER_TTL = 3600.0

_replace = msgspec.structs.replace


class Pump:
    """`run` until cancelled. Troubles are told to the watcher and survived."""

    def __init__(
        self,
        frontier: Backend,
        dispatch: Dispatch,
        *,
        name: str,
        routes: Routes,
        watch: Watcher,
        queues: Sequence[str] | None = None,
        job: str | None = None,
        batch: int = 20,
        prefetch: int = 2,
        ttls: Mapping[str, float] = QUEUE_TTLS,
    ) -> None:
        """`queues` None: every queue in which something waits. `batch` leases a message,
        `prefetch` messages a consumer holds."""
        self._frontier = frontier
        self._dispatch = dispatch
        self._name = name
        self._worker = f"{TRANSIT}{name}"
        self._routes = routes
        self._watch = watch
        self._only = tuple(queues) if queues is not None else None
        self._job = job
        self._batch = batch
        self._prefetch = prefetch
        self._ttls = ttls
        self._lock = f"pump {job}" if job else "pump"
        self._queues: tuple[str, ...] = ()
        self.sent = 0
        """Leases handed to the broker since the start."""

    async def run(self) -> None:
        """Raises FrontierCorrupt."""
        attempt = 0
        while True:
            try:
                if await self._leads():
                    await self._take_over()
                    attempt = 0
                    await self._pump()
                else:
                    await asyncio.sleep(LOCK / 6)
            except FrontierCorrupt:
                raise
            except (FrontierError, DispatchError) as error:
                attempt += 1
                self._watch(Trouble(str(error), attempt))
                await asyncio.sleep(backoff(attempt, base=0.2, cap=10.0, jitter=0.5))
            except asyncio.CancelledError:
                with suppress(FrontierError, asyncio.CancelledError):
                    await asyncio.shield(self._frontier.unlock(self._lock, self._name))
                raise

    async def _leads(self) -> bool:
        return await self._frontier.lock(self._lock, self._name, LOCK) == self._name

    async def _take_over(self) -> None:
        """What earlier pumps claimed may never have been sent."""
        holders = await self._frontier.holders(self._job)
        gone = [name for name in holders if name.startswith(TRANSIT)]
        if gone:
            await self._frontier.evict(gone)

    async def _pump(self) -> None:
        """While this is the pump. Ends when another has become it."""
        loop = asyncio.get_running_loop()
        again = loop.time() + LOCK / 3
        expiring = asyncio.create_task(self._end_expired())
        busy_at, told = loop.time(), 0
        try:
            while not expiring.done():
                if loop.time() >= again:
                    if not await self._leads():
                        return
                    again = loop.time() + LOCK / 3
                depths = await self._dispatch.depths(await self._broker_queues())
                if any(depth.waiting for depth in depths.values()) or self.sent != told:
                    busy_at, told = loop.time(), self.sent
                elif loop.time() - busy_at > MISSING:
                    await self._take_over()
                    busy_at = loop.time()
                await self._fill(depths)
            await expiring
        finally:
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)

    async def _broker_queues(self) -> list[str]:
        if self._only is not None:
            self._queues = self._only
        else:
            await self._look_for_queues()
        return list(dict.fromkeys(map(broker_queue, self._queues)))

    _looked = -math.inf

    async def _look_for_queues(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._looked < NEWS:
            return
        found = await self._frontier.queues()
        usual = (*self._routes.queues, DEFAULT_QUEUE)
        self._queues = tuple(dict.fromkeys((*usual, *sorted(found))))
        self._looked = now

    async def _fill(self, depths: Mapping[str, Depth]) -> None:
        """Bring each queue to its window, urgent ones first; then sleep until there is a reason."""
        rest = math.inf
        moved = False
        for queue in self._queues:
            depth = depths.get(broker_queue(queue), Depth(0, 0))
            room = max(1, depth.consumers) * self._prefetch - depth.waiting
            if room <= 0:
                rest = min(rest, FULL if depth.consumers else UNATTENDED)
                continue
            claim = await self._claim(room * self._batch, [queue])
            if claim.leases:
                moved = True
                await self._send(queue, claim)
        if moved:
            return
        if rest < math.inf:
            await asyncio.sleep(rest)
            return
        # One question about all of them: it is what `wait` wakes up for.
        claim = await self._claim(0, list(self._queues) if self._only is not None else None)
        await self._frontier.wait(POLL if claim.wake_at is None else min(claim.wait + 0.0005, POLL))
        if claim.wake_at is None:
            self._looked = -math.inf  # a queue that nobody knew may be what woke us

    async def _claim(self, limit: int, queues: Sequence[str] | None) -> Claim:
        names = [broker_queue(queue) for queue in queues or ()]
        lease = max((self._ttls.get(name, OTHER_TTL) for name in names), default=OTHER_TTL) + 60.0
        return await self._frontier.claim(
            limit, worker=self._worker, lease=lease, queues=queues, job=self._job
        )

    async def _send(self, queue: str, claim: Claim) -> None:
        messages = self._messages(queue, claim)
        unsent: Sequence[Message] = messages
        try:
            unsent = await self._dispatch.send(messages)
            self.sent += len(claim.leases) - sum(len(message.leases) for message in unsent)
        finally:
            # Also when cancelled: what nobody carries must not wait for the end of its lease.
            if unsent:
                back = [Release(lease) for message in unsent for lease in message.leases]
                await asyncio.shield(self._frontier.settle(back))

    def _messages(self, queue: str, claim: Claim) -> list[Message]:
        name = broker_queue(queue)
        by_ttl: dict[float | None, list[Lease]] = {}
        for lease in claim.leases:
            ttl = self._routes.ttl(lease.request.url)
            by_ttl.setdefault(ttl, []).append(_replace(lease, since=claim.now))
        return [
            Message(name, tuple(some), ttl, max(lease.request.priority for lease in some))
            for ttl, leases in by_ttl.items()
            for start in range(0, len(leases), self._batch)
            if (some := leases[start : start + self._batch])
        ]

    async def _end_expired(self) -> None:
        """Messages whose time ran out end as expired in the frontier, unless somebody took them."""
        while True:
            deliveries = await self._dispatch.returned()
            leases = [lease for delivery in deliveries for lease in delivery.message.leases]
            # A name of its own, so that what the consumers hold stays theirs.
            taken = await self._frontier.take(leases, worker=f"{self._worker}:expired", lease=60.0)
            queue_of = {
                lease.token: delivery.message.queue
                for delivery in deliveries
                for lease in delivery.message.leases
            }
            await self._frontier.settle(
                [
                    Dead(lease, Failure(EXPIRED, f"waited in {queue_of[lease.token]} until its time ran out"))
                    for lease in taken.leases
                ]
            )
            await self._dispatch.finish(deliveries)
