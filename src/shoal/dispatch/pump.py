"""The pump: claims what may be visited now and sends it to where workers receive.

It keeps few messages waiting, about as many as the consumers will want next, so that leases do
not age in the broker and a host's turn is used soon after it came. One pump works at a time, by
a lock in the frontier; any number may stand by. When a pump dies, the next one takes back what
it had claimed: what was sent by then finds its leases gone, and is claimed and sent again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from shoal.dispatch.dead_letters import DeadLetterReporter
from shoal.dispatch.port import Delivery, Depth, Dispatch, Message
from shoal.dispatch.routes import PRIORITY_QUEUE, URL_QUEUE, Routes, broker_queue
from shoal.errors import DispatchError, DispatchRefused, FrontierCorrupt, FrontierError
from shoal.events import Reconnected, Trouble, Watcher
from shoal.frontier.notes import Lock
from shoal.frontier.port import Backend
from shoal.model import (
    DEFAULT_QUEUE,
    EXPIRED,
    TRANSIT,
    Claim,
    Dead,
    Failure,
    Lease,
    Release,
)
from shoal.politeness.pacing import backoff
from shoal.queues import BROKER_QUEUES, RESERVED_QUEUES

LOCK = 15.0
"""Seconds for which a pump is the pump; it asks again every third of that."""
NEWS = 5.0
"""Seconds between two looks which queues there are."""
FULL = 0.01
"""Seconds after which a full queue is looked at again."""
UNATTENDED = 0.5
"""The same for one that nobody consumes."""
POLL = 1.0
TELL = 1.0
"""Seconds between two looks for what the frontier itself ended dead."""
GOODBYE = 3.0
"""Seconds to tell of the last of them."""
MOMENT = 1.0
"""Seconds that a send gets to end when nobody waits for it."""
MISSING = 60.0
"""When nothing has waited in the broker for so long, what still is in transit must be lost."""
FULL_QUEUE = "maxlen"
"""RabbitMQ's word for what a queue with a limit dropped."""
QUEUE_TTLS: Mapping[str, float] = {URL_QUEUE: 3600.0, PRIORITY_QUEUE: 1800.0}
"""How long a message may wait in a queue; an hour in others."""
OTHER_TTL = 3600.0

_replace = msgspec.structs.replace


def _lock_name(job: str | None) -> str:
    return f"pump {job}" if job else "pump"


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
        queues: Sequence[str] | Callable[[], Awaitable[Sequence[str]]] | None = None,
        job: str | None = None,
        batch: int = 20,
        prefetch: int = 2,
        ttls: Mapping[str, float] = QUEUE_TTLS,
        other_ttl: float = OTHER_TTL,
        is_dead: Callable[[str], bool] = lambda _: False,
        letters: bool = True,
    ) -> None:
        """`queues` are those to pump, or somebody who is asked again and again; None: every queue in
        which something waits. `batch` leases a message, `prefetch` messages a consumer holds. `ttls` are
        the seconds a message may wait, by queue, `other_ttl` in those not named. `gone` tells of a
        pump's name whether it is known to be dead: its lock need not run out then. `letters`: the broker
        is told of what the frontier itself ends dead."""
        self._is_dead = is_dead
        self._frontier = frontier
        self._dispatch = dispatch
        self._name = name
        # Tells whose they are: other pumps take back only what nobody pumps any more.
        self._worker = f"{TRANSIT}{self._scope(job)}{name}"
        self._routes = routes
        self._watch = watch
        self._only = queues
        self._job = job
        self._batch = batch
        self._prefetch = prefetch
        self._ttls = ttls
        self._other_ttl = other_ttl
        self._lock = self._lock_of(job)
        self._reporter: DeadLetterReporter | None = None
        if letters:
            notes, lock = frontier.notes, _lock_name(job)
            self._reporter = DeadLetterReporter(
                frontier, notes, dispatch, name=lock, job=job, ours=self._pumps
            )
        self._now = 0.0
        """The frontier's time at the last claim."""
        self._held = 0.0
        """Seconds for which consumers may hold back what they received."""
        self._queues: dict[str, list[str]] = {}
        """Queues of the broker, and those of the frontier that wait in them."""
        self._left_alone: frozenset[str] = frozenset()
        """Queues of the frontier that are none of ours."""
        self._told: set[str] = set()
        self._looked = -math.inf
        self._sending: asyncio.Task[None] | None = None
        """The last send. While the broker stores it, the next leases are claimed."""
        self._under_way: dict[str, int] = {}
        """Messages of it that the broker may not have counted yet, by queue."""
        self.leads = False
        self.sent = 0
        """Leases handed to the broker since the start."""

    async def run(self) -> None:
        """Raises FrontierCorrupt, and DispatchRefused when the broker does not let us."""
        attempt, away = 0, ""
        while True:
            try:
                led, self.leads = self.leads, await self._lock.take()
                if away:
                    self._watch(Reconnected(away, "pump"))
                    away = ""
                if not self.leads:
                    await asyncio.sleep(LOCK / 6)
                    continue
                if not led:
                    await self._take_over()
                before = self.sent
                try:
                    await self._pump()
                finally:
                    attempt = 0 if self.sent != before else attempt
            except (FrontierCorrupt, DispatchRefused):
                raise
            except (FrontierError, DispatchError) as error:
                attempt += 1
                away = error.server or away
                wait = backoff(attempt, base=0.2, cap=10.0, jitter=0.5)
                self._watch(Trouble(str(error), attempt, error.server, wait, "pump"))
                await asyncio.sleep(wait)
            except asyncio.CancelledError:
                if self.leads:
                    await self._tell_last()
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(self._lock.release())
                raise

    def _lock_of(self, job: str | None) -> Lock:
        return Lock(self._frontier.notes, _lock_name(job), self._name, LOCK, is_dead=self._is_dead)

    @staticmethod
    def _scope(job: str | None) -> str:
        return f"{job}|" if job else ""

    async def _take_over(self) -> None:
        """What earlier pumps claimed may never have been sent."""
        travelling = {each.worker for each in await self._frontier.leases(job=self._job) if each.in_transit}
        is_dead = [name for name in travelling if await self._abandoned(name)]
        if is_dead:
            await self._frontier.evict(is_dead)

    async def _abandoned(self, holder: str) -> bool:
        """Whether nobody pumps any more what this pump claimed."""
        job, bar, _ = holder.removeprefix(TRANSIT).partition("|")
        if not bar or job == self._job:
            return (job if bar else None) == self._job
        # The pump of one job. Who gets its lock finds it dead; it is given back at once.
        lock = self._lock_of(job)
        if not await lock.take():
            return False
        await lock.release()
        return True

    async def _pump(self) -> None:
        """While this is the pump. Ends when another has become it."""
        loop = asyncio.get_running_loop()
        again = loop.time() + LOCK / 3
        beside = [asyncio.create_task(self._end_expired())]
        if self._reporter is not None:
            beside.append(asyncio.create_task(self._tell_failures(self._reporter)))
        busy_at, told = loop.time(), 0
        try:
            while not any(task.done() for task in beside):
                if loop.time() >= again:
                    if not await self._lock.take():
                        return
                    again = loop.time() + LOCK / 3
                depths = await self._dispatch.depths(await self._broker_queues())
                self._held = max((depth.held for depth in depths.values()), default=0.0)
                if any(depth.waiting for depth in depths.values()) or self.sent != told:
                    busy_at, told = loop.time(), self.sent
                elif loop.time() - busy_at > MISSING + self._held:
                    await self._take_over()
                    busy_at = loop.time()
                await self._fill(depths)
            await asyncio.gather(*(task for task in beside if task.done()))
        finally:
            await self._end_telling()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self._end_sending()

    async def _broker_queues(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        if callable(self._only):
            found = await self._only()
        elif self._only is not None:
            found = self._only
        elif now - self._looked < NEWS:
            return list(self._queues)
        else:
            found = (*self._routes.queues, DEFAULT_QUEUE, *sorted(await self._frontier.queues()))
        self._looked = now
        self._queues = {}
        self._left_alone = RESERVED_QUEUES.intersection(found)
        self._tell_of(self._left_alone & BROKER_QUEUES)
        for queue in dict.fromkeys(found):
            if queue in self._left_alone:
                continue
            self._queues.setdefault(broker_queue(queue), []).append(queue)
        return list(self._queues)

    def _tell_of(self, queues: Collection[str]) -> None:
        """An old frontier may hold queues that are named like those of the broker."""
        for queue in set(queues) - self._told:
            self._told.add(queue)
            self._watch(
                Trouble(
                    f"queue {queue} is the broker's own: a worker without --dispatch takes what waits",
                    part="pump",
                )
            )

    async def _fill(self, depths: Mapping[str, Depth]) -> None:
        """Bring each queue to its window, urgent ones first; then sleep until there is a reason."""
        rest = math.inf
        moved = False
        for name, queues in self._queues.items():
            depth = depths.get(name, Depth(0, 0))
            room = max(1, depth.consumers) * self._prefetch - depth.waiting
            room = (room if depth.room is None else min(room, depth.room)) - self._under_way.get(name, 0)
            if room <= 0:
                rest = min(rest, FULL if depth.consumers else UNATTENDED)
                continue
            if not depth.consumers and (depth.drops_after or math.inf) < MISSING:
                # Nobody would find out soon that it is gone.
                rest = min(rest, UNATTENDED)
                continue
            claim = await self._claim(room * self._batch, queues, depth.drops_after)
            if claim.leases:
                moved = True
                await self._begin_to_send(name, claim)
        if moved:
            return
        await self._sent()
        if rest < math.inf:
            await asyncio.sleep(rest)
            return
        # One question about all of them: it is what `wait` wakes up for.
        every = self._only is None and not self._left_alone
        asked = None if every else [one for some in self._queues.values() for one in some]
        claim = await self._claim(0, asked)
        await self._frontier.wait(POLL if claim.wake_at is None else min(claim.retry_in + 0.0005, POLL))
        if claim.wake_at is None:
            self._looked = -math.inf  # a queue that nobody knew may be what woke us

    async def _claim(self, limit: int, queues: Sequence[str] | None, ttl: float | None = None) -> Claim:
        """`ttl` are the seconds after which they would be gone, where that is not what we say."""
        names = [broker_queue(queue) for queue in queues or ()]
        usual = max((self._ttls.get(name, self._other_ttl) for name in names), default=self._other_ttl)
        lease = (usual if ttl is None else min(ttl, usual)) + self._held + 60.0
        claim = await self._frontier.claim(
            limit, worker=self._worker, lease_seconds=lease, queues=queues, job=self._job
        )
        self._now = claim.now
        return claim

    async def _begin_to_send(self, name: str, claim: Claim) -> None:
        """One send at a time: whatever the broker does, no more than two claims can be in its hands."""
        try:
            await self._sent()
        except BaseException:
            await asyncio.shield(self._frontier.settle([Release(lease) for lease in claim.leases]))
            raise
        messages = self._messages(name, claim)
        self._under_way = {name: len(messages)}
        self._sending = asyncio.create_task(self._send(messages, claim))

    async def _sent(self) -> None:
        """The last send is over. Raises what it raised."""
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending
        self._under_way = {}

    async def _end_sending(self) -> None:
        """Nobody waits for the last send any more. It gets a moment, in which it begins at least: one
        that is called off before would not give its leases back."""
        sending, self._sending, self._under_way = self._sending, None, {}
        if sending is None:
            return
        await asyncio.wait({sending}, timeout=MOMENT)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, messages: Sequence[Message], claim: Claim) -> None:
        unsent: Sequence[Message] = messages
        try:
            unsent = await self._dispatch.send(messages)
            self.sent += len(claim.leases) - sum(len(message.leases) for message in unsent)
        finally:
            # Also when cancelled: what nobody carries must not wait for the end of its lease.
            if unsent:
                back = [Release(lease) for message in unsent for lease in message.leases]
                await asyncio.shield(self._frontier.settle(back))
        if unsent:
            # Claiming them again at once would only turn in a circle.
            raise DispatchError(f"the broker did not take {len(unsent)} of {len(messages)} messages")

    def _messages(self, name: str, claim: Claim) -> list[Message]:
        by_ttl: dict[float | None, list[Lease]] = {}
        for lease in claim.leases:
            # What is left of its own limit, which ends with the first attempt.
            own = None if lease.request_expires_at is None else max(0.0, lease.request_expires_at - claim.now)
            limits = (self._routes.ttl(lease.request.url), own)
            ttl = min((limit for limit in limits if limit is not None), default=None)
            by_ttl.setdefault(ttl, []).append(_replace(lease, claimed_at=claim.now))
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
            await self._expire([each for each in deliveries if each.reason == EXPIRED])
            await self._send_again([each for each in deliveries if each.reason == FULL_QUEUE])
            await self._give_up([each for each in deliveries if each.reason not in (EXPIRED, FULL_QUEUE)])
            await self._dispatch.finish(deliveries)

    def _pumps(self, queue: str) -> bool:
        if self._only is None:
            return queue not in self._left_alone
        return any(queue in some for some in self._queues.values())

    async def _tell_failures(self, reporter: DeadLetterReporter) -> None:
        """The broker hears of what the frontier itself ended dead, a little later."""
        while True:
            await asyncio.sleep(TELL)
            if self._now:
                await reporter.tell(self._now)

    async def _end_telling(self) -> None:
        """Letters that are being told would be told twice if that were called off."""
        if self._reporter is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(MOMENT), self._reporter.busy:
                    return

    async def _tell_last(self) -> None:
        if self._reporter is not None and self._now:
            # What cannot be told now is told by the next pump.
            with suppress(TimeoutError, FrontierError, DispatchError):
                async with asyncio.timeout(GOODBYE):
                    await self._reporter.tell_all(self._now)

    async def _expire(self, deliveries: Sequence[Delivery]) -> None:
        # A name of its own, so that what the consumers hold stays theirs.
        taken = await self._taken(deliveries, f"{self._worker}:expired")
        queue_of = {
            lease.token: delivery.message.queue
            for delivery in deliveries
            for lease in delivery.message.leases
        }
        await self._frontier.settle(
            [
                Dead(lease, Failure(EXPIRED, f"waited in {queue_of[lease.token]} until its time ran out"))
                for lease in taken
            ]
        )

    async def _send_again(self, deliveries: Sequence[Delivery]) -> None:
        """Their queue is shorter than what was sent. Nobody is to blame: they wait in the frontier."""
        taken = await self._taken(deliveries, f"{self._worker}:full")
        await self._frontier.settle([Release(lease) for lease in taken])

    async def _give_up(self, deliveries: Sequence[Delivery]) -> None:
        """Whoever received such a message did not live to finish it, or could not read it. Its
        requests are suspects of a crash: they wait again, and end dead when it happens too often."""
        suspects = f"{self._name}:returned"
        if await self._taken(deliveries, suspects):
            await self._frontier.evict([suspects])

    async def _taken(self, deliveries: Sequence[Delivery], worker: str) -> Sequence[Lease]:
        leases = [lease for delivery in deliveries for lease in delivery.message.leases]
        if not leases:
            return ()
        return (await self._frontier.take(leases, worker=worker, lease_seconds=60.0)).leases
