"""Dispatch by Celery: leases travel as tasks `shoal.visit` on ordinary Celery queues.

This is the sending side. Receiving is what Celery workers do, so `receive` and its like say so. A
queue of the frontier is the Celery queue of the same name, on whatever broker the Celery app has.

Celery drops a task whose time ran out in the worker that received it. That worker tells the
frontier (`shoal.celery.worker`), so nothing ever comes back here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from celery import Celery
from kombu import Queue
from kombu.exceptions import KombuError

from shoal.addresses import shown
from shoal.dispatch.port import FORMAT, MARK, Delivery, Depth, Dispatch, Message
from shoal.dispatch.routes import frontier_queue
from shoal.errors import DispatchError, DispatchRefused
from shoal.frontier.notes import Presence
from shoal.frontier.port import Notes
from shoal.model import HEARTBEAT_TIMEOUT, DeadLetter, Lease

VISIT = "shoal.visit"
"""The name of the task that visits."""
TRAVEL = 120.0
"""Seconds after which a message is dropped. Few wait at a time (see `Roll`), so one that waited so
long is stuck, and its leases are claimed and sent again."""
LOOK = 0.02
"""Seconds between two looks at the broker: each is a question that Celery's client asks in Python."""
ROLL = 1.0
"""Seconds for which a roll call counts."""

MISSED = 5.0
"""Seconds after which a lease must have been taken, if its message no longer waits. A worker that is
killed takes with it what it had received and not begun, and a Redis broker says nothing of it."""

T = TypeVar("T")


class Roll:
    """How many tasks the Celery workers run at a time, by queue. They beat like all workers, so the
    frontier knows, whichever broker carries the tasks."""

    def __init__(self, notes: Notes, own: Mapping[str, int], *, batch: int) -> None:
        """`own` counts what this worker itself will run: it may not have beaten yet."""
        self._presence = Presence(notes)
        self._own = dict(own)
        self._batch = batch
        self._called = self._own
        self._again = 0.0

    async def call(self) -> Mapping[str, int]:
        now = asyncio.get_running_loop().time()
        if now < self._again:
            return self._called
        called: dict[str, int] = {}
        for each in await self._presence.workers():
            heartbeat = each.heartbeat
            # Only they take what is sent here.
            if not heartbeat.worker.endswith(MARK) or each.now - each.seen > HEARTBEAT_TIMEOUT:
                continue
            for queue in heartbeat.queues or ():
                called[queue] = called.get(queue, 0) + max(1, heartbeat.slots // self._batch)
        for queue, tasks in self._own.items():
            called[queue] = max(called.get(queue, 0), tasks)
        self._called, self._again = called, now + ROLL
        return called

    async def queues(self) -> list[str]:
        """What Celery workers take from: what waits in other queues is for others."""
        return sorted(await self.call())


class CeleryDispatch(Dispatch):
    def __init__(
        self,
        app: Celery,
        consumers: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
        seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`consumers` tells how many tasks run at a time, by queue; without it the broker is believed.
        `seconds` tells for how long a rate limit holds each visit back now."""
        self._app = app
        self._consumers = consumers
        self._seconds = seconds
        self._held: dict[str, float] = {}
        # One thread, one connection: kombu's are not to be shared, nor is the worker's own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-celery-send")
        self._connection: Any = None
        self._producer: Any = None
        self._queues: dict[str, Queue] = {}
        self._next_look = 0.0
        self._sent: deque[tuple[float, str, Lease]] = deque()
        """What was sent when and to which queue, until `missing` has asked for it."""
        self._empty_at: dict[str, float] = {}

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        unsent = await self._there(self._send, messages)
        now = asyncio.get_running_loop().time()
        self._sent += [
            (now, message.queue, lease)
            for message in messages[: len(messages) - len(unsent)]
            for lease in message.leases
        ]
        return unsent

    def missing(self) -> list[Lease]:
        """Leases that were sent and received a while ago: if one is still in transit, whoever received
        it is gone. Tells of each once."""
        now = asyncio.get_running_loop().time()
        found: list[Lease] = []
        kept: deque[tuple[float, str, Lease]] = deque()
        for sent_at, queue, lease in self._sent:
            held = self._held.get(queue, 0.0)
            if sent_at + MISSED + held <= now and self._empty_at.get(queue, 0.0) > sent_at:
                found.append(lease)
            elif sent_at + TRAVEL + held > now:
                kept.append((sent_at, queue, lease))
        self._sent = kept
        return found

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        loop = asyncio.get_running_loop()
        if self._next_look > loop.time():
            await asyncio.sleep(self._next_look - loop.time())
        self._next_look = loop.time() + LOOK
        consumers = await self._consumers() if self._consumers is not None else None
        asked_at = loop.time()
        found = await self._there(self._depths, queues)
        self._empty_at |= dict.fromkeys((name for name in found if not found[name].waiting), asked_at)
        if consumers is None:
            return found
        seconds = self._seconds()
        depths: dict[str, Depth] = {}
        for name, depth in found.items():
            tasks = consumers.get(frontier_queue(name), 0)
            # Workers have received as many as they run, as many wait behind these, and all of them may
            # have to pass one limiter.
            self._held[name] = 2 * tasks * seconds
            depths[name] = Depth(depth.waiting, tasks, held=self._held[name])
        return depths

    async def receive(self, limit: int) -> list[Delivery]:
        raise DispatchRefused(
            "tasks are received by Celery workers", hint="start one: celery -A shoal.celery worker"
        )

    def subscribe(self, queues: Collection[str]) -> None:
        """Celery workers are told their queues by `-Q`."""

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        """Celery acknowledges a task when it is over."""

    async def returned(self) -> list[Delivery]:
        never: asyncio.Future[list[Delivery]] = asyncio.get_running_loop().create_future()
        return await never

    async def failed(self, letters: Sequence[DeadLetter]) -> None:
        """Flower shows the task as failed; there is no other place to tell."""

    async def about(self) -> str:
        from celery import __version__

        return f"Celery {__version__}"

    async def close(self) -> None:
        with suppress(DispatchError):
            await self._there(self._disconnect)
        self._thread.shutdown(wait=False)

    # -- in the thread ------------------------------------------------------------------

    async def _there(self, call: Callable[..., T], *given: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)
        except (KombuError, OSError) as error:
            raise self._trouble(error) from error
        except Exception as error:
            # Each transport has its own errors, and only a connection knows them.
            if self._connection is None or not isinstance(error, self._transport_errors()):
                raise
            raise self._trouble(error) from error

    def _transport_errors(self) -> tuple[type[BaseException], ...]:
        known = self._connection
        return (KombuError, OSError, *known.connection_errors, *known.channel_errors)

    def _trouble(self, error: BaseException) -> DispatchError:
        self._thread.submit(self._disconnect)
        place = shown(str(self._app.conf.broker_write_url))
        return DispatchError(f"the Celery broker {place} does not answer: {error}", hint="is it running?")

    def _connect(self) -> Any:
        if self._connection is None:
            self._connection = self._app.connection_for_write()
            # One attempt: the pump tries again by itself, and tells of it.
            self._connection.ensure_connection(max_retries=1, timeout=5.0)
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # it may be broken in any way; it is dropped all the same
                connection.release()

    def _send(self, messages: Sequence[Message]) -> list[Message]:
        connection = self._connect()
        # Redis serves small numbers first, RabbitMQ large ones. Ours is the way of RabbitMQ.
        small_first = connection.transport.driver_type == "redis"
        for number, message in enumerate(messages):
            priority = max(0, min(9, message.priority))
            try:
                self._app.send_task(
                    VISIT,
                    args=[msgspec.to_builtins(message)],
                    queue=self._queue(message.queue),
                    priority=9 - priority if small_first else priority,
                    expires=message.ttl or TRAVEL + self._held.get(message.queue, 0.0),
                    producer=self._producer,
                    retry=False,
                    ignore_result=True,
                    # What people read in Flower.
                    argsrepr=" ".join(lease.request.url for lease in message.leases)[:500],
                    kwargsrepr="{}",
                )
            except self._transport_errors():
                if not number:
                    raise
                self._disconnect()
                return list(messages[number:])
        return []

    def _depths(self, queues: Collection[str]) -> dict[str, Depth]:
        channel = self._connect().default_channel
        found: dict[str, Depth] = {}
        for name in queues:
            _, waiting, consumers = self._queue(name)(channel).queue_declare()
            found[name] = Depth(waiting, consumers)
        return found

    def _queue(self, name: str) -> Queue:
        """As Celery itself would declare it, without making this worker consume it."""
        name = frontier_queue(name)
        if name not in self._queues:
            known = self._app.amqp.queues
            self._queues[name] = (
                dict.get(known, name)
                or self._app.amqp.Queues([known.new_missing(name)], max_priority=known.max_priority)[name]
            )
        return self._queues[name]


def message_of(given: object) -> Message | None:
    """A message as it came in a task; None if it is none of ours, or of another release."""
    try:
        message = msgspec.convert(given, Message)
    except msgspec.ValidationError:
        return None
    return message if message.format == FORMAT else None
