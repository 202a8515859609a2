"""Dispatch by Celery: leases travel as tasks `shoal.visit` on ordinary Celery queues.

This is the sending side. Celery workers do the receiving, so `receive` raises an error that says so. A
queue of the frontier is the Celery queue of the same name, on the broker of the Celery app.

Celery drops an expired task in the worker that received it. That worker tells the frontier
(`shoal.celery.worker`), so no message is ever returned here.
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
"""Seconds after which a message is dropped. Few messages wait at a time (see `Roll`), so one that has waited
so long is stuck, and its leases are claimed and sent again."""
LOOK = 0.02
"""Seconds between two checks of the broker: each is a call by Celery's client, which is written in Python."""
ROLL = 1.0
"""Seconds for which a count of the workers is valid."""

MISSED = 5.0
"""Seconds after which a lease must have been taken if its message no longer waits. Messages that a killed
worker had received and not started are lost with it, and a Redis broker does not report that."""

T = TypeVar("T")


class Roll:
    """Counts how many tasks the Celery workers run at a time, by queue. They send heartbeats like all
    workers, so the frontier knows, whichever broker carries the tasks."""

    def __init__(self, notes: Notes, own: Mapping[str, int], *, batch: int) -> None:
        """`own` has the tasks that this worker itself will run: it may not have sent a heartbeat yet."""
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
            # Only Celery workers receive the messages that are sent here.
            if not heartbeat.worker.endswith(MARK) or each.now - each.seen > HEARTBEAT_TIMEOUT:
                continue
            for queue in heartbeat.queues or ():
                called[queue] = called.get(queue, 0) + max(1, heartbeat.slots // self._batch)
        for queue, tasks in self._own.items():
            called[queue] = max(called.get(queue, 0), tasks)
        self._called, self._again = called, now + ROLL
        return called

    async def queues(self) -> list[str]:
        """Return the queues that Celery workers serve. Requests in other queues are for other workers."""
        return sorted(await self.call())


class CeleryDispatch(Dispatch):
    def __init__(
        self,
        app: Celery,
        consumers: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
        seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`consumers` returns how many tasks run at a time, by queue; without it the broker's count is used.
        `seconds` returns for how long a rate limit holds back each visit now."""
        self._app = app
        self._consumers = consumers
        self._seconds = seconds
        self._held: dict[str, float] = {}
        # One thread and one connection: kombu's connections must not be shared, nor the worker's own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-celery-send")
        self._connection: Any = None
        self._producer: Any = None
        self._queues: dict[str, Queue] = {}
        self._next_look = 0.0
        self._sent: deque[tuple[float, str, Lease]] = deque()
        """When each lease was sent, and to which queue, until `missing` has decided about it."""
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
        """Return leases that were sent a while ago and no longer wait in the broker, each once. If one is
        still in transit, the worker that received it is gone."""
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
            # Workers have received as many tasks as they run, as many wait behind these, and all of them may
            # have to pass one rate limiter.
            self._held[name] = 2 * tasks * seconds
            depths[name] = Depth(depth.waiting, tasks, held=self._held[name])
        return depths

    async def receive(self, limit: int) -> list[Delivery]:
        raise DispatchRefused(
            "tasks are received by Celery workers", hint="start one: celery -A shoal.celery worker"
        )

    def subscribe(self, queues: Collection[str]) -> None:
        """Does nothing: `-Q` gives Celery workers their queues."""

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        """Does nothing: Celery acknowledges a task when it ends."""

    async def receive_returned(self) -> list[Delivery]:
        never: asyncio.Future[list[Delivery]] = asyncio.get_running_loop().create_future()
        return await never

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        """Does nothing: Flower shows the task as failed, and there is no other place to report it."""

    async def info(self) -> str:
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
            # Each transport has its own error classes, which only a connection knows.
            if self._connection is None or not isinstance(error, self._transport_errors()):
                raise
            raise self._trouble(error) from error

    def _transport_errors(self) -> tuple[type[BaseException], ...]:
        known = self._connection
        return (KombuError, OSError, *known.connection_errors, *known.channel_errors)

    def _trouble(self, error: BaseException) -> DispatchError:
        self._thread.submit(self._disconnect)
        place = shown(str(self._app.conf.broker_write_url))
        return DispatchError(f"the Celery broker {place} does not answer: {error}", hint="check that it runs")

    def _connect(self) -> Any:
        if self._connection is None:
            self._connection = self._app.connection_for_write()
            # One attempt: the pump tries again and reports it.
            self._connection.ensure_connection(max_retries=1, timeout=5.0)
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # it may be broken in any way; drop it anyway
                connection.release()

    def _send(self, messages: Sequence[Message]) -> list[Message]:
        connection = self._connect()
        # Redis serves small numbers first, RabbitMQ large ones, as shoal does.
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
                    # Flower shows this text.
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
        """Return the queue as Celery would declare it, without making this worker consume it."""
        name = frontier_queue(name)
        if name not in self._queues:
            known = self._app.amqp.queues
            self._queues[name] = (
                dict.get(known, name)
                or self._app.amqp.Queues([known.new_missing(name)], max_priority=known.max_priority)[name]
            )
        return self._queues[name]


def message_of(given: object) -> Message | None:
    """Decode the message of a task; None if it is not a message of shoal, or one of another format
    version."""
    try:
        message = msgspec.convert(given, Message)
    except msgspec.ValidationError:
        return None
    return message if message.format == FORMAT else None
