"""The pump: claims requests that may be visited now, and sends them to the broker.

It keeps only a few messages waiting, about as many as the consumers will want next, so that leases do not
age in the broker and a host's turn is used soon. A lock in the frontier lets one pump work at a time; any
number may stand by. When a pump dies, the next one takes back its leases. Messages that were already sent
find their leases gone, and their requests are claimed and sent again.
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
"""Seconds for which a pump holds the lock; it renews it after every third of that."""
NEWS = 5.0
"""Seconds between two checks for new queues."""
FULL = 0.01
"""Seconds after which a full queue is checked again."""
UNATTENDED = 0.5
"""The same for a queue without consumers."""
POLL = 1.0
TELL = 1.0
"""Seconds between two reports of requests that the frontier itself ended dead."""
GOODBYE = 3.0
"""Seconds for the last of these reports."""
MOMENT = 1.0
"""Seconds that the last send gets to finish when the pump ends."""
MISSING = 60.0
"""After so many seconds with no message waiting in the broker, leases that are still in transit are lost."""
FULL_QUEUE = "maxlen"
"""RabbitMQ's reason for a message that a full queue dropped."""
QUEUE_TTLS: Mapping[str, float] = {URL_QUEUE: 3600.0, PRIORITY_QUEUE: 1800.0}
"""Seconds that a message may wait, by queue; an hour in others."""
OTHER_TTL = 3600.0

_replace = msgspec.structs.replace


def _lock_name(job: str | None) -> str:
    return f"pump {job}" if job else "pump"


class Pump:
    """Call `run`, which runs until it is cancelled. Problems are reported to the watcher and survived."""

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
        """`queues` are those to pump, or a function that is called again and again; None means every queue
        that has requests. `batch` is the number of leases in a message, `prefetch` the number of messages
        that a consumer holds. `ttls` are the seconds that a message may wait, by queue; `other_ttl` holds for
        all others. `is_dead` returns whether the pump of this name is known to be dead, so that its lock can
        be taken at once. `letters`: report to the broker the requests that the frontier itself ends dead."""
        self._is_dead = is_dead
        self._frontier = frontier
        self._dispatch = dispatch
        self._name = name
        # It names the owner: other pumps take back only leases that no pump serves any more.
        self._worker = f"{TRANSIT}{self._owner_prefix(job)}{name}"
        self._routes = routes
        self._watch = watch
        self._chosen = queues
        self._job = job
        self._batch = batch
        self._prefetch = prefetch
        self._ttls = ttls
        self._other_ttl = other_ttl
        self._lock = self._make_lock(job)
        self._reporter: DeadLetterReporter | None = None
        if letters:
            notes, lock = frontier.notes, _lock_name(job)
            self._reporter = DeadLetterReporter(
                frontier, notes, dispatch, name=lock, job=job, ours=self._is_pumped
            )
        self._now = 0.0
        """The frontier's time at the last claim."""
        self._held_back = 0.0
        """Seconds for which consumers may hold back messages."""
        self._queues: dict[str, list[str]] = {}
        """The broker's queues, and the frontier's queues that each of them carries."""
        self._left_alone: frozenset[str] = frozenset()
        """Queues of the frontier that this pump must not serve."""
        self._warned: set[str] = set()
        self._looked = -math.inf
        self._sending: asyncio.Task[None] | None = None
        """The last send. While the broker stores it, the next leases are claimed."""
        self._uncounted: dict[str, int] = {}
        """Messages of the last send that the broker may not have counted yet, by queue."""
        self.leads = False
        self.sent = 0
        """Leases sent to the broker since the start."""

    async def run(self) -> None:
        """Pump until cancelled. Raises FrontierCorrupt, and DispatchRefused if the broker refuses the
        work."""
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
                    await self._report_last()
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(self._lock.release())
                raise

    def _make_lock(self, job: str | None) -> Lock:
        return Lock(self._frontier.notes, _lock_name(job), self._name, LOCK, is_dead=self._is_dead)

    @staticmethod
    def _owner_prefix(job: str | None) -> str:
        return f"{job}|" if job else ""

    async def _take_over(self) -> None:
        """Take back the leases of earlier pumps, which may never have sent them."""
        in_transit = {each.worker for each in await self._frontier.leases(job=self._job) if each.in_transit}
        abandoned = [name for name in in_transit if await self._is_abandoned(name)]
        if abandoned:
            await self._frontier.evict(abandoned)

    async def _is_abandoned(self, holder: str) -> bool:
        """Return whether no pump serves the leases of this holder any more."""
        job, bar, _ = holder.removeprefix(TRANSIT).partition("|")
        if not bar or job == self._job:
            return (job if bar else None) == self._job
        # It is the pump of one job. If its lock can be taken, it is dead. Give the lock back at once.
        lock = self._make_lock(job)
        if not await lock.take():
            return False
        await lock.release()
        return True

    async def _pump(self) -> None:
        """Pump while this process holds the lock. Returns when another pump has it."""
        loop = asyncio.get_running_loop()
        again = loop.time() + LOCK / 3
        beside = [asyncio.create_task(self._end_expired())]
        if self._reporter is not None:
            beside.append(asyncio.create_task(self._report_dead(self._reporter)))
        busy_at, sent_before = loop.time(), 0
        try:
            while not any(task.done() for task in beside):
                if loop.time() >= again:
                    if not await self._lock.take():
                        return
                    again = loop.time() + LOCK / 3
                depths = await self._dispatch.depths(await self._broker_queues())
                self._held_back = max((depth.held for depth in depths.values()), default=0.0)
                if any(depth.waiting for depth in depths.values()) or self.sent != sent_before:
                    busy_at, sent_before = loop.time(), self.sent
                elif loop.time() - busy_at > MISSING + self._held_back:
                    await self._take_over()
                    busy_at = loop.time()
                await self._fill(depths)
            await asyncio.gather(*(task for task in beside if task.done()))
        finally:
            await self._finish_report()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self._end_sending()

    async def _broker_queues(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        if callable(self._chosen):
            found = await self._chosen()
        elif self._chosen is not None:
            found = self._chosen
        elif now - self._looked < NEWS:
            return list(self._queues)
        else:
            found = (*self._routes.queues, DEFAULT_QUEUE, *sorted(await self._frontier.queues()))
        self._looked = now
        self._queues = {}
        self._left_alone = RESERVED_QUEUES.intersection(found)
        self._warn_of_reserved(self._left_alone & BROKER_QUEUES)
        for queue in dict.fromkeys(found):
            if queue in self._left_alone:
                continue
            self._queues.setdefault(broker_queue(queue), []).append(queue)
        return list(self._queues)

    def _warn_of_reserved(self, queues: Collection[str]) -> None:
        """Warn of queues in an old frontier that have names of the broker's own queues."""
        for queue in set(queues) - self._warned:
            self._warned.add(queue)
            self._watch(
                Trouble(
                    f"queue {queue} belongs to the broker: a worker without --dispatch can serve its URLs",
                    part="pump",
                )
            )

    async def _fill(self, depths: Mapping[str, Depth]) -> None:
        """Fill each queue up to its window, urgent queues first; then wait until there is more to do."""
        rest = math.inf
        moved = False
        for name, queues in self._queues.items():
            depth = depths.get(name, Depth(0, 0))
            room = max(1, depth.consumers) * self._prefetch - depth.waiting
            room = (room if depth.room is None else min(room, depth.room)) - self._uncounted.get(name, 0)
            if room <= 0:
                rest = min(rest, FULL if depth.consumers else UNATTENDED)
                continue
            if not depth.consumers and (depth.drops_after or math.inf) < MISSING:
                # The broker would drop the messages long before the pump noticed.
                rest = min(rest, UNATTENDED)
                continue
            claim = await self._claim(room * self._batch, queues, depth.drops_after)
            if claim.leases:
                moved = True
                await self._begin_to_send(name, claim)
        if moved:
            return
        await self._finish_send()
        if rest < math.inf:
            await asyncio.sleep(rest)
            return
        # One empty claim for all queues, because `wait` wakes up for the last claim.
        every = self._chosen is None and not self._left_alone
        asked = None if every else [one for some in self._queues.values() for one in some]
        claim = await self._claim(0, asked)
        await self._frontier.wait(POLL if claim.wake_at is None else min(claim.retry_in + 0.0005, POLL))
        if claim.wake_at is None:
            self._looked = -math.inf  # a new queue may have ended the wait

    async def _claim(self, limit: int, queues: Sequence[str] | None, ttl: float | None = None) -> Claim:
        """Claim in transit. `ttl`: the seconds after which the broker drops messages, if its queue has a
        limit of its own."""
        names = [broker_queue(queue) for queue in queues or ()]
        usual = max((self._ttls.get(name, self._other_ttl) for name in names), default=self._other_ttl)
        lease = (usual if ttl is None else min(ttl, usual)) + self._held_back + 60.0
        claim = await self._frontier.claim(
            limit, worker=self._worker, lease_seconds=lease, queues=queues, job=self._job
        )
        self._now = claim.now
        return claim

    async def _begin_to_send(self, name: str, claim: Claim) -> None:
        """Start to send a claim. There is one send at a time, so the pump never holds more than two claims,
        whatever the broker does."""
        try:
            await self._finish_send()
        except BaseException:
            await asyncio.shield(self._frontier.settle([Release(lease) for lease in claim.leases]))
            raise
        messages = self._messages(name, claim)
        self._uncounted = {name: len(messages)}
        self._sending = asyncio.create_task(self._send(messages, claim))

    async def _finish_send(self) -> None:
        """Wait for the last send. Raises its error."""
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending
        self._uncounted = {}

    async def _end_sending(self) -> None:
        """End the last send when the pump ends. It gets a moment, so that it starts at least: a send that is
        cancelled before that would not release its leases."""
        sending, self._sending, self._uncounted = self._sending, None, {}
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
            # Also when cancelled: requests that were not sent must not wait for the end of their leases.
            if unsent:
                back = [Release(lease) for message in unsent for lease in message.leases]
                await asyncio.shield(self._frontier.settle(back))
        if unsent:
            # Without an error, the pump would claim them again at once, in a circle.
            raise DispatchError(f"the broker did not take {len(unsent)} of {len(messages)} messages")

    def _messages(self, name: str, claim: Claim) -> list[Message]:
        by_ttl: dict[float | None, list[Lease]] = {}
        for lease in claim.leases:
            # The rest of the request's own ttl, which holds until the first attempt.
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
        """Handle returned messages: expired ones end as expired in the frontier, unless a consumer took
        them."""
        while True:
            deliveries = await self._dispatch.receive_returned()
            await self._end_as_expired([each for each in deliveries if each.reason == EXPIRED])
            await self._send_again([each for each in deliveries if each.reason == FULL_QUEUE])
            await self._give_up([each for each in deliveries if each.reason not in (EXPIRED, FULL_QUEUE)])
            await self._dispatch.finish(deliveries)

    def _is_pumped(self, queue: str) -> bool:
        if self._chosen is None:
            return queue not in self._left_alone
        return any(queue in some for some in self._queues.values())

    async def _report_dead(self, reporter: DeadLetterReporter) -> None:
        """Report to the broker, with a little delay, the requests that the frontier itself ended dead."""
        while True:
            await asyncio.sleep(TELL)
            if self._now:
                await reporter.report(self._now)

    async def _finish_report(self) -> None:
        """Wait for a report that is in flight: the next pump would repeat it if it were cancelled."""
        if self._reporter is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(MOMENT), self._reporter.busy:
                    return

    async def _report_last(self) -> None:
        if self._reporter is not None and self._now:
            # The next pump reports the letters that this one cannot report now.
            with suppress(TimeoutError, FrontierError, DispatchError):
                async with asyncio.timeout(GOODBYE):
                    await self._reporter.report_all(self._now)

    async def _end_as_expired(self, deliveries: Sequence[Delivery]) -> None:
        # A worker name of its own, so that leases that consumers have taken stay with them.
        taken = await self._take(deliveries, f"{self._worker}:expired")
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
        """Release requests that a full queue dropped. That is no failure of theirs: they wait in the
        frontier."""
        taken = await self._take(deliveries, f"{self._worker}:full")
        await self._frontier.settle([Release(lease) for lease in taken])

    async def _give_up(self, deliveries: Sequence[Delivery]) -> None:
        """Treat the requests as suspects of a crash: a consumer that received such a message died before it
        finished it, or could not read it. They wait again, and end dead if it happens too often."""
        suspects = f"{self._name}:returned"
        if await self._take(deliveries, suspects):
            await self._frontier.evict([suspects])

    async def _take(self, deliveries: Sequence[Delivery], worker: str) -> Sequence[Lease]:
        leases = [lease for delivery in deliveries for lease in delivery.message.leases]
        if not leases:
            return ()
        return (await self._frontier.take(leases, worker=worker, lease_seconds=60.0)).leases
