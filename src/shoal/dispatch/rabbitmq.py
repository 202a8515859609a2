"""Dispatch by RabbitMQ, version 3.10 or newer.

It uses one exchange and these queues, all durable. `?prefix=` in the address is put before each name:

    url_queue_ttl, priority_queue, …   leases in transit; messages that wait too long go to
    failed_exchange (direct)           with the routing key `failed`, and from there to
    failed_urls                        for people: shoal never reads it
    returned_urls                      the same messages for the pump, which ends their requests

They are classic queues. With `?queue_type=quorum`, the queues that carry work are quorum queues, for a
cluster: they are replicated, and they count deliveries, so a message that kills its consumers is removed
after DELIVERIES of them. On a single broker they do not survive everything: see docs/decisions/0011.

Queues and exchanges that others declared under these names are used as they are: the state is in the
frontier, so few differences matter. The differences are reported once.

Publishing and consuming have a connection each. When RabbitMQ runs low on memory or disk, it stops reading
from connections that publish, while acknowledgements must continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import aiormq
import msgspec
from aiormq.abc import AbstractConnection, DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPChannelError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionInternalError,
    ConnectionNotAllowed,
    DeliveryError,
    InvalidFrameError,
    ProbableAuthenticationError,
    PublishError,
)
from pamqp.commands import Basic

from shoal.addresses import shown
from shoal.dispatch.port import Delivery, Depth, Dispatch, Message, decode_message, encode_message
from shoal.dispatch.pump import OTHER_TTL, QUEUE_TTLS
from shoal.errors import DispatchError, DispatchRefused
from shoal.events import Notice, Trouble, Watcher, ignore
from shoal.model import DeadLetter
from shoal.queues import FAILED_QUEUE, RETURNED_QUEUE

FAILED_EXCHANGE = "failed_exchange"
FAILED_KEY = "failed"
FAILED_TTL = 24 * 3600.0
CLASSIC, QUORUM = "classic", "quorum"
DELIVERIES = 20
"""How often a quorum queue may deliver a message. A worker that ends returns its messages, which counts as
a delivery too: a low number would punish messages for the restarts of workers."""
HEARTBEAT = 15
ANSWER = 10.0
"""Seconds for a connection, or for the reply to a call."""
CONFIRM = 5.0
"""Seconds until the broker must have confirmed a message."""
GLANCE = 0.2
"""Seconds between two checks whether the broker has stopped accepting messages."""
GOODBYE = 3.0
COLLISIONS = 5
"""How often a call is repeated because another process declares the same queue at that moment."""
DIFFERENCES = 30
"""How many differences to an existing declaration are looked up: RabbitMQ reports one at a time."""
TTL, TYPE, LENGTH = "x-message-ttl", "x-queue-type", "x-max-length"
DEAD_EXCHANGE, DEAD_KEY = "x-dead-letter-exchange", "x-dead-letter-routing-key"

T = TypeVar("T")
Receiver = Callable[[DeliveredMessage], Coroutine[Any, Any, None]]

# Problems reach people as events. The log of aiormq is only for those who configure it.
logging.getLogger("aiormq").addHandler(logging.NullHandler())


class _Tag(NamedTuple):
    """The handle of a delivery. Its number is valid only on the connection that delivered it."""

    link: int
    number: int


class _Arrival(NamedTuple):
    queue: str
    message: DeliveredMessage


class Address:
    """A parsed `amqp://user:password@host:port/vhost?prefix=name&queue_type=quorum`."""

    def __init__(self, text: str) -> None:
        """Raises DispatchRefused for an invalid address."""
        parts = urlsplit(text)
        try:
            port = parts.port or (5671 if parts.scheme == "amqps" else 5672)
        except ValueError:
            port = 0
        if parts.scheme not in ("amqp", "amqps") or not parts.hostname or not port:
            raise DispatchRefused(
                f"not a RabbitMQ address: {shown(text)!r}", hint="write amqp://user:password@host:5672/vhost"
            )
        options = dict(parse_qsl(parts.query))
        self.prefix = options.pop("prefix", "")
        self.queue_type = options.pop("queue_type", CLASSIC)
        if self.queue_type not in (CLASSIC, QUORUM):
            raise DispatchRefused(
                f"unknown queue type: {self.queue_type!r}",
                hint="write ?queue_type=classic or ?queue_type=quorum",
            )
        options = {"heartbeat": str(HEARTBEAT), "name": "shoal", **options}
        if not parts.username:
            parts = parts._replace(netloc=f"guest:guest@{parts.netloc}")
        vhost = quote(parts.path[1:].replace("%2F", "/").replace("%2f", "/") or "/", safe="")
        self.url = parts._replace(path=f"/{vhost}", query=urlencode(options)).geturl()
        self.vhost = unquote(vhost)
        self.place = f"RabbitMQ at {parts.hostname}:{port}"


class _Declared(NamedTuple):
    """A queue or an exchange that exists now."""

    ours: Mapping[str, Any]
    """The properties that shoal would declare."""
    theirs: Mapping[str, Any]
    """Those of its actual properties that differ."""
    known: bool = True
    """Whether `theirs` is complete. RabbitMQ does not show the differences to users who may not declare."""

    @property
    def differences(self) -> str:
        texts = (
            f"{name} {_shown(value)}, ours {_shown(self.ours.get(name))}"
            for name, value in self.theirs.items()
        )
        return "; ".join(texts) or ("" if self.known else "this user may not declare it")


class _Collision(DispatchError):
    """Two processes declared the same queue at the same moment, which RabbitMQ calls an internal error."""


class _Link:
    """One connection with one channel. It is opened when it is needed, and opened again when it was lost."""

    _numbers = count(1)

    def __init__(self, address: Address, watch: Watcher, *, confirms: bool) -> None:
        self._address = address
        self._watch = watch
        self._confirms = confirms
        self._connecting = asyncio.Lock()
        self._connection: AbstractConnection | None = None
        self._channel: Channel | None = None
        self._failures = 0
        self._was_open = False
        self._blocked = False
        self.number = 0
        """The number of this connection; 0 before the first one."""
        self.declared: set[str] = set()
        self.broken = asyncio.Event()
        self.broken.set()
        self.version = ""

    @property
    def open(self) -> bool:
        return self._channel is not None and not self.broken.is_set()

    async def channel(self) -> Channel:
        """Return the open channel. Raises DispatchError; DispatchRefused if trying again cannot help."""
        if self._channel is not None and not self.broken.is_set():
            return self._channel
        async with self._connecting:
            if self._channel is None or self.broken.is_set():
                self._channel = await self._connect()
            return self._channel

    async def _connect(self) -> Channel:
        await self.close()
        connection = aiormq.Connection(self._address.url)
        try:
            await within(ANSWER, connection.connect())
            channel = await within(
                ANSWER, connection.channel(publisher_confirms=self._confirms, on_return_raises=True)
            )
        except asyncio.CancelledError:
            self._abandon(connection)
            raise
        except Exception as error:
            self._abandon(connection)
            self._failures += 1
            raise self.to_dispatch_error(error) from None
        self.number = next(self._numbers)
        self.declared = set()
        self.broken = broken = asyncio.Event()
        self.version = str(connection.server_properties.get("version", ""))
        assert isinstance(channel, Channel)
        for ends in (connection.closing, channel.closing):
            ends.add_done_callback(_ignore_error)
            ends.add_done_callback(lambda _: broken.set())
        # The broker cancels a consumer when its queue is deleted: then everything is declared again.
        channel.on_consumer_cancel_callbacks.add(lambda _: broken.set())
        self._connection = connection
        if self._failures and self._was_open:
            self._watch(Trouble(f"Connected to RabbitMQ on attempt {self._failures + 1}", part="dispatch"))
        self._failures, self._was_open = 0, True
        return channel

    def lost(self) -> DispatchError:
        """Return the error for a lost connection. It counts as the first failed attempt to connect."""
        self.broken.set()
        self._failures = max(1, self._failures)
        return DispatchError(f"{self._address.place} closed the connection", hint=RUNNING)

    def check_taking(self) -> None:
        """Raises DispatchError while the broker accepts no messages from publishers."""
        if self._is_blocked():
            self._blocked = True
            raise DispatchError(
                f"{self._address.place} takes no messages: it is low on memory or disk",
                hint="`rabbitmqctl status` shows which; sending resumes by itself",
            )
        if self._blocked:
            self._blocked = False
            self._watch(Trouble("RabbitMQ takes messages again", part="dispatch"))

    def _is_blocked(self) -> bool:
        return self._connection is not None and _blocked(self._connection)

    async def wait_for(self, tasks: Collection[asyncio.Future[Any]], seconds: float) -> None:
        """Wait until these are done, the time is over, or the broker blocks this connection: then it sends no
        replies on it, however long the wait is."""
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0:
            _, pending = await asyncio.wait(tasks, timeout=min(left, GLANCE))
            if not pending or self._is_blocked():
                return

    async def ask(self, question: Awaitable[T]) -> T:
        """Return the broker's reply to a call. Without a reply in time, the connection is given up."""
        task = asyncio.ensure_future(question)
        try:
            await self.wait_for({task}, ANSWER)
        except asyncio.CancelledError:
            # aiormq closes a channel when a call on it is cancelled.
            task.cancel()
            task.add_done_callback(_ignore_error)
            self.broken.set()
            raise
        if not task.done():
            task.add_done_callback(_ignore_error)
            # While the connection is blocked, the call stays open: cancelled, it would close the channel.
            self.check_taking()
            task.cancel()
        try:
            return _result(task, ANSWER)
        except ConnectionInternalError as error:
            self.broken.set()
            raise _Collision(f"{self._address.place}: {_reason(error)}", hint=RUNNING) from None
        except Exception as error:
            self.broken.set()
            self._failures = max(1, self._failures)
            raise self.to_dispatch_error(error) from None

    async def ask_apart(self, question: Callable[[Channel], Awaitable[T]]) -> T:
        """The same on a separate channel, which the broker closes when it refuses the call. Then this raises
        the error of aiormq."""
        await self.channel()
        assert self._connection is not None
        channel = await self.ask(self._connection.channel(publisher_confirms=False))
        assert isinstance(channel, Channel)
        channel.closing.add_done_callback(_ignore_error)
        refused: list[AMQPChannelError] = []

        async def ask() -> T | None:
            try:
                return await question(channel)
            except AMQPChannelError as error:
                refused.append(error)
                return None

        answer = await self.ask(ask())
        if refused:
            raise refused[0]
        await self.ask(channel.close())
        return cast(T, answer)

    def to_dispatch_error(self, error: Exception) -> DispatchError:
        place = self._address.place
        why = _reason(error)
        if isinstance(error, ChannelPreconditionFailed):
            return DispatchRefused(f"{place}: {why}", hint=OTHER_NAMES)
        if isinstance(error, ChannelAccessRefused):
            return DispatchRefused(
                f"{place}: {why}", hint="give the user the permissions to configure, write and read"
            )
        if not self._was_open:
            # Only before the first login: after it, the broker may be restarting.
            if isinstance(error, ProbableAuthenticationError):
                hint = "write amqp://user:password@host, or set RABBITMQ_USER and RABBITMQ_PASSWORD"
                return DispatchRefused(f"{place} refused the login: {why}", hint=hint)
            if isinstance(error, ConnectionNotAllowed | InvalidFrameError):
                # aiormq does not show the broker's reply to `open`.
                why = f"cannot open the virtual host {self._address.vhost!r}"
                return DispatchRefused(
                    f"{place}: {why}", hint="check that it exists: `rabbitmqctl list_vhosts`"
                )
        return DispatchError(f"{place} does not answer: {why}", hint=RUNNING)

    async def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        self.broken.set()
        if connection is not None and not connection.is_closed:
            with suppress(Exception):
                await within(GOODBYE, connection.close())

    @staticmethod
    def _abandon(connection: AbstractConnection) -> None:
        if connection.is_closed:
            return
        closing = asyncio.ensure_future(connection.close())
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())


OTHER_NAMES = (
    "add ?prefix=NAME. to the address to use other names, or delete the existing queue"
    " (`rabbitmqctl delete_queue NAME`)"
)
RUNNING = "check that it runs; its address comes from --dispatch, SHOAL_DISPATCH or RABBITMQ_HOST"


class RabbitDispatch(Dispatch):
    def __init__(
        self,
        address: str,
        queues: Collection[str] = (),
        *,
        prefetch: int = 10,
        fast: Collection[str] = (),
        ttls: Mapping[str, float] = QUEUE_TTLS,
        watch: Watcher = ignore,
    ) -> None:
        """`queues` are those to receive from, with `prefetch` messages of each at a time. Messages of `fast`
        queues are acknowledged as soon as they are delivered."""
        where = Address(address)
        self._place = where.place
        self._names = f"{where.place}/{where.vhost}"
        self._prefix = where.prefix
        self._queue_type = where.queue_type
        self._queues = tuple(queues)
        self._prefetch = prefetch
        self._fast = frozenset(fast)
        self._ttls = ttls
        self._watch = watch
        self._out = _Link(where, watch, confirms=True)
        self._in = _Link(where, watch, confirms=False)
        self._starting = asyncio.Lock()
        self._theirs: dict[str, dict[str, Any]] = {}
        """Queues that others declared differently, with their properties."""
        self._dropping: set[str] = set()
        """Those of them that drop expired messages, so that they are not returned."""
        self._internal = False
        """Whether others declared the exchange as internal, so that clients cannot publish to it."""
        self._consuming: dict[str, int] = {}
        """The number of the connection on which each queue is consumed."""
        self._arrived: dict[bool, deque[_Arrival]] = {False: deque(), True: deque()}
        """False: messages with work. True: returned messages."""
        self._news = asyncio.Event()
        self._subscribed = asyncio.Event()
        self._open: dict[int, None] = {}
        """Deliveries of the present connection that are not acknowledged, in their order."""

    # -- sending ------------------------------------------------------------------------

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        channel = await self._ready_to_send({message.queue for message in messages})
        sending = [
            self._publish(
                channel,
                "",
                self._prefix + message.queue,
                encode_message(message),
                self._limit(message),
                message.priority,
            )
            for message in messages
        ]
        taken = await self._confirm(sending)
        return [message for message, took in zip(messages, taken, strict=True) if not took]

    def _limit(self, message: Message) -> float | None:
        """Return the ttl to send with a message. The queue's own limit holds as well; for a queue that others
        declared, it is sent with the message. If the queue drops expired messages, there is no ttl: they
        would be lost without a trace."""
        if message.queue in self._dropping:
            return None
        if message.queue not in self._theirs:
            return message.ttl
        ttl = self._ttls.get(message.queue, OTHER_TTL)
        return ttl if message.ttl is None else min(ttl, message.ttl)

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        channel = await self._ready_to_send(())
        exchange, key = self._prefix + FAILED_EXCHANGE, FAILED_KEY
        if self._internal:
            exchange, key = "", self._prefix + FAILED_QUEUE
        sending = [self._publish(channel, exchange, key, _describe(letter)) for letter in letters]
        taken = await self._confirm(sending)
        full = sum(_is_full(task) for task in sending)
        if full:
            # The letters are in the frontier, so a full queue must not stop the pump.
            self._note_once(
                FAILED_QUEUE,
                f"{FAILED_QUEUE} is full and takes no more: `shoal dead list` shows all dead letters",
            )
        refused = taken.count(False) - full
        if refused:
            raise DispatchError(f"RabbitMQ did not take {refused} messages for {FAILED_QUEUE}")

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        async def ask() -> dict[str, Depth]:
            channel = await self._prepare(queues)
            return {queue: await self._depth(channel, queue) for queue in queues}

        return await self._retry_collisions(ask)

    async def _depth(self, channel: Channel, queue: str) -> Depth:
        answer = await self._out.ask(channel.queue_declare(self._prefix + queue, passive=True))
        waiting = answer.message_count or 0
        theirs = self._theirs.get(queue, {})
        most, ttl = theirs.get(LENGTH), theirs.get(TTL)
        room = None if most is None else max(0, most - waiting)
        drops_after = ttl / 1000 if queue in self._dropping and ttl is not None else None
        return Depth(waiting, answer.consumer_count or 0, room, drops_after)

    async def info(self) -> str:
        await self._out.channel()
        return f"RabbitMQ {self._out.version}"

    async def _ready_to_send(self, queues: Collection[str]) -> Channel:
        return await self._retry_collisions(lambda: self._prepare(queues))

    async def _prepare(self, queues: Collection[str]) -> Channel:
        channel = await self._out.channel()
        self._out.check_taking()
        await self._declare_all(self._out, queues)
        return channel

    def _publish(
        self,
        channel: Channel,
        exchange: str,
        key: str,
        body: bytes,
        ttl: float | None = None,
        priority: int | None = None,
    ) -> asyncio.Task[object]:
        properties = Basic.Properties(
            content_type="application/json",
            delivery_mode=2,
            priority=priority,
            expiration=None if ttl is None else str(max(1, int(ttl * 1000))),
        )
        return asyncio.ensure_future(
            channel.basic_publish(
                body, exchange=exchange, routing_key=key, properties=properties, mandatory=True, wait=False
            )
        )

    async def _confirm(self, sending: Sequence[asyncio.Task[object]]) -> list[bool]:
        """Return for each message whether the broker has confirmed it. Others may be delivered
        nevertheless."""
        if not sending:
            return []
        try:
            await self._out.wait_for(sending, CONFIRM)
        finally:
            for task in sending:
                if not task.done():
                    task.cancel()
                task.add_done_callback(_ignore_error)
        taken = [task.done() and not task.cancelled() and task.exception() is None for task in sending]
        if not all(taken):
            # A queue may have been deleted: declare all of them again before the next send.
            self._out.declared.clear()
            self._out.check_taking()
        return taken

    # -- receiving ----------------------------------------------------------------------

    async def receive(self, limit: int) -> list[Delivery]:
        while True:
            await self._consume(self._queues, self._prefetch)
            arrivals = self._peek(limit, returned=False)
            opened = [(arrival, self._decode(arrival)) for arrival in arrivals]
            deliveries = [delivery for _, delivery in opened if delivery is not None]
            quick = [delivery for delivery in deliveries if delivery.message.queue in self._fast]
            await self._reject([arrival for arrival, delivery in opened if delivery is None])
            await self.finish(quick)
            self._drop(arrivals, returned=False)
            if deliveries:
                return deliveries
            if not arrivals:
                await self._wait_for_more(returned=False)

    def subscribe(self, queues: Collection[str]) -> None:
        more = [queue for queue in queues if queue not in self._queues]
        if more:
            self._queues = (*self._queues, *more)
            self._subscribed.set()

    async def receive_returned(self) -> list[Delivery]:
        while True:
            await self._consume((RETURNED_QUEUE,), 100)
            deliveries: list[Delivery] = []
            strange: list[Delivery] = []
            arrivals = self._peek(100, returned=True)
            for arrival in arrivals:
                message, reason = decode_message(arrival.message.body), _death(arrival.message)
                tag = self._tag(arrival.message)
                if message is None or not reason:
                    # Reports of dead letters come here as well; the frontier has them already.
                    strange.append(Delivery(Message("", ()), tag))
                else:
                    deliveries.append(Delivery(message, tag, reason=reason))
            await self.finish(strange)
            self._drop(arrivals, returned=True)
            if deliveries:
                return deliveries
            if not strange:
                await self._wait_for_more(returned=True)

    def _peek(self, limit: int, *, returned: bool) -> list[_Arrival]:
        """Return messages that have arrived, and keep them until `_drop`, after the last await: a caller that
        is cancelled in between loses nothing."""
        return list(islice(self._arrived[returned], limit))

    def _drop(self, arrivals: Sequence[_Arrival], *, returned: bool) -> None:
        waiting = self._arrived[returned]
        for arrival in arrivals:
            if waiting and waiting[0] is arrival:
                waiting.popleft()

    async def _wait_for_more(self, *, returned: bool) -> None:
        """Wait until a message has arrived or there is a new queue to receive from. Raises DispatchError if
        the connection is lost."""
        while not self._arrived[returned]:
            self._news.clear()
            if not self._in.open:
                raise self._in.lost()
            if self._subscribed.is_set() and not returned:
                self._subscribed.clear()
                return
            waits = {
                asyncio.ensure_future(event.wait())
                for event in (self._news, self._in.broken, self._subscribed)[: 2 if returned else 3]
            }
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()

    async def _consume(self, queues: Sequence[str], prefetch: int) -> None:
        """Start to consume these queues, unless the present connection does so already."""
        if self._in.open and all(self._consuming.get(queue) == self._in.number for queue in queues):
            return
        async with self._starting:
            if not self._in.open and self._in.number and self._consuming:
                # Raise before connecting again: a lost connection counts as one failed attempt.
                self._consuming.clear()
                raise self._in.lost()
            await self._retry_collisions(lambda: self._start(queues, prefetch))

    async def _start(self, queues: Sequence[str], prefetch: int) -> None:
        channel = await self._in.channel()
        link = self._in.number
        if link not in self._consuming.values():
            # The messages of an earlier connection are delivered again.
            self._consuming.clear()
            self._open.clear()
            for waiting in self._arrived.values():
                waiting.clear()
        await self._declare_all(self._in, queues)
        for queue in queues:
            if queue not in self._consuming:
                await self._in.ask(channel.basic_qos(prefetch_count=prefetch))
                receiver = self._receiver(queue, link)
                self._consuming[queue] = link
                try:
                    await self._in.ask(channel.basic_consume(self._prefix + queue, receiver))
                except BaseException:
                    self._consuming.clear()
                    raise

    def _receiver(self, queue: str, link: int) -> Receiver:
        waiting = self._arrived[queue == RETURNED_QUEUE]

        async def arrived(message: DeliveredMessage) -> None:
            if link == self._in.number and message.delivery_tag is not None:
                self._open[message.delivery_tag] = None
                waiting.append(_Arrival(queue, message))
                self._news.set()

        return arrived

    def _decode(self, arrival: _Arrival) -> Delivery | None:
        """Decode a delivery. Returns None if it is not a message of shoal."""
        raw = arrival.message
        message = decode_message(raw.body)
        if message is None:
            return None
        if message.queue != arrival.queue:
            message = msgspec.structs.replace(message, queue=arrival.queue)
        return Delivery(message, self._tag(raw), again=bool(raw.redelivered))

    async def _reject(self, arrivals: Sequence[_Arrival]) -> None:
        """Reject messages that are not of shoal. They go where failed messages go."""
        for queue, raw in arrivals:
            tag = self._tag(raw)
            if tag.number not in self._open:
                continue
            exchange = self._theirs.get(queue, {}).get(DEAD_EXCHANGE, self._prefix + FAILED_EXCHANGE)
            ours = exchange == self._prefix + FAILED_EXCHANGE
            where = f"moved to {FAILED_QUEUE if ours else exchange}" if exchange else "dropped"
            text = f"a message of {len(raw.body)} bytes in {queue} is not a message of shoal: {where}"
            self._watch(Trouble(text, part="dispatch"))
            with suppress(Exception):
                await raw.channel.basic_reject(tag.number, requeue=False, wait=False)
            self._open.pop(tag.number, None)

    def _tag(self, message: DeliveredMessage) -> _Tag:
        return _Tag(self._in.number, message.delivery_tag or 0)

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge. Deliveries of an earlier connection are skipped: the broker took them back when it
        ended."""
        ours = {
            delivery.tag.number
            for delivery in deliveries
            if isinstance(delivery.tag, _Tag) and delivery.tag.link == self._in.number
        }
        ours &= self._open.keys()
        if not ours or not self._in.open:
            return
        channel = await self._in.channel()
        # One acknowledgement for the longest prefix of finished deliveries.
        together = 0
        for number in self._open:
            if number not in ours:
                break
            together = number
        try:
            if together:
                await channel.basic_ack(together, multiple=True, wait=False)
            for number in sorted(ours):
                del self._open[number]
                if number > together:
                    await channel.basic_ack(number, wait=False)
        except Exception as error:
            raise self._in.lost() from error

    # -- declaring queues ---------------------------------------------------------------

    async def _retry_collisions(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, and repeat it while another process declares the same queues."""
        for _ in range(COLLISIONS):
            with suppress(_Collision):
                return await work()
            await asyncio.sleep(random.uniform(0.05, 0.5))
        return await work()

    async def _declare_all(self, link: _Link, queues: Collection[str]) -> None:
        """Declare the exchange and the queues that are missing. Existing ones are used as they are."""
        found: dict[str, _Declared] = {}
        if FAILED_EXCHANGE not in link.declared:
            channel = await link.channel()
            found[FAILED_EXCHANGE] = exchange = await self._make_exchange(link)
            self._internal = exchange.theirs.get("internal") is True
            for queue in (FAILED_QUEUE, RETURNED_QUEUE):
                found[queue] = await self._make_queue(link, queue)
                name = self._prefix + queue
                await link.ask(channel.queue_bind(name, self._prefix + FAILED_EXCHANGE, FAILED_KEY))
            link.declared.add(FAILED_EXCHANGE)
        for queue in queues:
            if queue not in link.declared:
                found[queue] = made = await self._make_queue(link, queue)
                if queue not in (FAILED_QUEUE, RETURNED_QUEUE):
                    await self._bind_return(link, queue, made)
        self._report_differences(found)

    async def _make_exchange(self, link: _Link) -> _Declared:
        name = self._prefix + FAILED_EXCHANGE

        def declare(channel: Channel, how: dict[str, Any]) -> Awaitable[Any]:
            return channel.exchange_declare(
                name,
                exchange_type=how["type"],
                durable=how["durable"],
                auto_delete=how["auto_delete"],
                internal=how["internal"],
                arguments=_extra_arguments(how),
            )

        ours = {"type": "direct", "durable": True, "auto_delete": False, "internal": False}
        return await self._declare(
            link, FAILED_EXCHANGE, ours, declare, lambda channel: channel.exchange_declare(name, passive=True)
        )

    async def _make_queue(self, link: _Link, queue: str) -> _Declared:
        name = self._prefix + queue

        def declare(channel: Channel, how: dict[str, Any]) -> Awaitable[Any]:
            return channel.queue_declare(
                name, durable=how["durable"], auto_delete=how["auto_delete"], arguments=_extra_arguments(how)
            )

        ours = {"durable": True, "auto_delete": False, **self._arguments(queue)}
        made = await self._declare(
            link, queue, ours, declare, lambda channel: channel.queue_declare(name, passive=True)
        )
        if made.theirs.get(TYPE) == "stream" and queue != FAILED_QUEUE:
            raise DispatchRefused(
                f"{self._place} has the queue {name} as a stream ({TYPE}: theirs stream, ours"
                f" {self._queue_type}): messages stay in a stream after they are read",
                hint=OTHER_NAMES,
            )
        if made.theirs or not made.known:
            self._theirs[queue] = {**made.ours, **made.theirs}
        else:
            self._theirs.pop(queue, None)
        link.declared.add(queue)
        return made

    async def _declare(
        self,
        link: _Link,
        name: str,
        ours: Mapping[str, Any],
        declare: Callable[[Channel, dict[str, Any]], Awaitable[Any]],
        look: Callable[[Channel], Awaitable[Any]],
    ) -> _Declared:
        """Declare a queue or an exchange, or find out its properties. RabbitMQ refuses a declaration that
        differs from the existing one, and names one difference; adopt it and repeat until they agree."""
        how, theirs = dict(ours), dict[str, Any]()
        try:
            for _ in range(DIFFERENCES):
                try:
                    await link.ask_apart(lambda channel: declare(channel, how))
                    return _Declared(ours, theirs)
                except ChannelPreconditionFailed as error:
                    difference = _difference(str(error.args[0]), how)
                    if difference is None or difference[0] in theirs:
                        break
                    theirs[difference[0]] = how[difference[0]] = difference[1]
                except ChannelAccessRefused as error:
                    # A user who may not declare may still use existing queues.
                    with suppress(ChannelNotFoundEntity):
                        await link.ask_apart(look)
                        return _Declared(ours, theirs, known=False)
                    raise link.to_dispatch_error(error) from None
            await link.ask_apart(look)
            return _Declared(ours, theirs, known=False)
        except ChannelLockedResource:
            raise DispatchRefused(
                f"{self._place} reserves the queue {self._prefix}{name} for another connection"
                " (exclusive: theirs true, ours false)",
                hint=OTHER_NAMES,
            ) from None
        except AMQPChannelError as error:
            raise link.to_dispatch_error(error) from None

    async def _bind_return(self, link: _Link, queue: str, made: _Declared) -> None:
        """Find where a queue that others declared sends expired messages, and bind the pump's queue there."""
        ours = made.ours
        exchange, key = (made.theirs.get(name, ours[name]) for name in (DEAD_EXCHANGE, DEAD_KEY))
        self._dropping.discard(queue)
        if (exchange, key) == (ours[DEAD_EXCHANGE], ours[DEAD_KEY]):
            return
        if not exchange:
            # There is none, or it is the default exchange, to which no queue can be bound.
            self._dropping.add(queue)
            return
        # Without a dead-letter key, a message keeps its own.
        key = self._prefix + queue if key is None else key
        try:
            await self._bind(link, RETURNED_QUEUE, exchange, key)
            if exchange == ours[DEAD_EXCHANGE]:
                await self._bind(link, FAILED_QUEUE, exchange, key)
        except (ChannelNotFoundEntity, ChannelAccessRefused):
            self._dropping.add(queue)

    async def _bind(self, link: _Link, queue: str, exchange: str, key: str) -> None:
        await link.ask_apart(lambda channel: channel.queue_bind(self._prefix + queue, exchange, key))

    def _report_differences(self, found: Mapping[str, _Declared]) -> None:
        """Report in one line everything that differs from shoal's own declaration."""
        new = {name: made for name, made in found.items() if made.differences and self._is_first(name)}
        if not new:
            return
        which = ", ".join(f"{self._prefix}{name} ({made.differences})" for name, made in new.items())
        lost = ", ".join(name for name in new if name in self._dropping)
        late = f"; expired messages in {lost} are sent again and do not end as expired" if lost else ""
        self._watch(Notice(f"{self._place}: used as others declared it: {which}{late}", "dispatch"))

    def _note_once(self, name: str, text: str) -> None:
        if self._is_first(f"{name} takes no more"):
            self._watch(Notice(f"{self._place}: {text}", "dispatch"))

    def _is_first(self, name: str) -> bool:
        """Return whether this process has not reported this yet. It may have several connections, but people
        should read one line."""
        key = f"{self._names} {self._prefix}{name}"
        known = key in _noted
        _noted.add(key)
        return not known

    def _arguments(self, queue: str) -> dict[str, Any]:
        if queue == FAILED_QUEUE:
            # The plain arguments that people write when they declare it to look at it.
            return {TTL: int(FAILED_TTL * 1000)}
        kind: dict[str, Any] = {TYPE: QUORUM} if self._queue_type == QUORUM else {}
        if queue == RETURNED_QUEUE:
            return {TTL: int(FAILED_TTL * 1000), **kind}
        if self._queue_type == QUORUM:
            kind["x-delivery-limit"] = DELIVERIES
        return {
            TTL: int(self._ttls.get(queue, OTHER_TTL) * 1000),
            DEAD_EXCHANGE: self._prefix + FAILED_EXCHANGE,
            DEAD_KEY: FAILED_KEY,
            **kind,
        }

    async def close(self) -> None:
        await self._in.close()
        await self._out.close()


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of work that may hang, and that may not even react to its cancellation in time.

    When a connection closes, aiormq ends waiting calls with CancelledError, although the caller was not
    cancelled. That is raised as an ordinary error."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_ignore_error)
        raise
    if not task.done():
        task.cancel()
        task.add_done_callback(_ignore_error)
    return _result(task, seconds)


def _result(task: asyncio.Future[T], seconds: float) -> T:
    if not task.done():
        raise TimeoutError(f"no reply in {seconds:.0f} s")
    if task.cancelled():
        raise ConnectionError("the connection was closed")
    return task.result()


def _ignore_error(task: asyncio.Future[Any]) -> None:
    """Mark the error of a task as seen: it is reported in another way."""
    if not task.cancelled():
        task.exception()


def _blocked(connection: AbstractConnection) -> bool:
    """Return whether RabbitMQ has sent `connection.blocked`. aiormq shows that only by `ready`, which waits
    while the connection is blocked and does not wait otherwise."""
    looking = connection.ready()
    try:
        looking.send(None)
    except StopIteration:
        return False
    looking.close()
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, ChannelNotFoundEntity | ChannelPreconditionFailed | ChannelAccessRefused):
        return str(error)
    if error.args and isinstance(error.args[0], int) and isinstance(error, OSError):
        return os.strerror(error.args[0]).lower()
    text = ", ".join(str(part) for part in error.args if part)
    return text or type(error).__name__


_noted: set[str] = set()
"""What this process has reported."""
_DIFFERENT = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for .*: received .* but current is"
    r" (?:(?P<none>none)|the value '(?P<value>.*)' of type '(?P<type>\w+)'|'(?P<same>.*)')",
    re.DOTALL,
)
_IMPOSSIBLE = re.compile(r"invalid arg '(?P<name>[^']+)'")


def _difference(text: str, ours: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the argument that differs, and its existing value (None: it has none). Returns None if the text,
    which RabbitMQ cuts at 255 bytes, does not say."""
    if found := _IMPOSSIBLE.search(text):
        # An argument that belongs to the requested type of queue, but not to the existing one.
        return found["name"], None
    found = _DIFFERENT.search(text)
    if found is None:
        return None
    name = found["name"]
    if found["none"]:
        return name, None
    value = found["same"] if found["value"] is None else found["value"]
    kind = found["type"] or {bool: "bool", int: "long"}.get(type(ours.get(name)), "longstr")
    if kind == "bool":
        return name, value == "true"
    if kind == "longstr":
        return name, value
    return (name, int(value)) if re.fullmatch(r"-?\d+", value) else None


def _extra_arguments(how: Mapping[str, Any]) -> dict[str, Any]:
    fields = ("type", "durable", "auto_delete", "internal")
    return {name: value for name, value in how.items() if name not in fields and value is not None}


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _is_full(task: asyncio.Task[object]) -> bool:
    """Return whether a queue is full: the broker refused a message that it could have routed."""
    error = task.exception() if task.done() and not task.cancelled() else None
    return isinstance(error, DeliveryError) and not isinstance(error, PublishError)


def _death(message: DeliveredMessage) -> str:
    """Return why a queue dead-lettered a message: expired, rejected, delivery_limit… Empty if none did."""
    deaths = (message.header.properties.headers or {}).get("x-death")
    if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict):
        return str(deaths[0].get("reason", ""))
    return ""


def _describe(letter: DeadLetter) -> bytes:
    """Encode a dead letter for people who read `failed_urls`."""
    request, failure = letter.request, letter.failure
    return msgspec.json.encode(
        {
            "url": request.url,
            "job": request.job,
            "error": failure.error,
            "message": failure.message,
            "attempts": request.attempt,
            "queue": request.queue,
            "host": letter.lane,
            "failed_at": letter.ended_at,
        }
    )
