"""Dispatch by RabbitMQ, version 3.10 or newer.

One exchange and these queues, all durable; `?prefix=` of the address is put before each name:

    url_queue_ttl, priority_queue, …   leases on their way; what waits too long goes to
    failed_exchange (direct)           with the routing key `failed`, and from there to
    failed_urls                        where people look: nobody of ours ever reads it
    returned_urls                      the same messages for the pump, which ends their requests

They are classic queues. `?queue_type=quorum` makes quorum queues of those that carry work, for a
cluster: they are replicated, and they count deliveries, so a message that kills whoever receives it
leaves after DELIVERIES of them. On a single broker they do not survive everything: see
docs/decisions/0011.

What others declared under these names is used as it is: the truth is in the frontier, so few
differences matter. What they are is told once.

Publishing and consuming have a connection each. When RabbitMQ runs low on memory or disk it stops
reading from connections that publish, and acknowledgements must go on then.
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
from shoal.dispatch.port import Delivery, Depth, Dispatch, Message, packed, unpacked
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
"""How often a quorum queue may deliver a message. A worker that ends gives back what it held, which
counts too: few would punish messages for the restarts of workers."""
HEARTBEAT = 15
ANSWER = 10.0
"""Seconds for a connection, or the answer to a question."""
CONFIRM = 5.0
"""Seconds until the broker has stored what it was given."""
GLANCE = 0.2
"""Seconds between two looks whether it has stopped taking messages."""
GOODBYE = 3.0
COLLISIONS = 5
"""How often somebody else may make our queues at the same moment before it is told."""
DIFFERENCES = 30
"""How many differences to what somebody else declared are asked for: RabbitMQ tells one at a time."""
TTL, TYPE, LENGTH = "x-message-ttl", "x-queue-type", "x-max-length"
DEAD_EXCHANGE, DEAD_KEY = "x-dead-letter-exchange", "x-dead-letter-routing-key"

T = TypeVar("T")
Receiver = Callable[[DeliveredMessage], Coroutine[Any, Any, None]]

# Everything it tells reaches people as an event. What it logs beside is for those who ask for it.
logging.getLogger("aiormq").addHandler(logging.NullHandler())


class _Tag(NamedTuple):
    """A delivery belongs to the connection it came over; on another one it means something else."""

    link: int
    number: int


class _Arrival(NamedTuple):
    queue: str
    message: DeliveredMessage


class Address:
    """`amqp://user:password@host:port/vhost?prefix=name&queue_type=quorum`, taken apart."""

    def __init__(self, text: str) -> None:
        """Raises DispatchRefused about an address that cannot be meant."""
        parts = urlsplit(text)
        try:
            port = parts.port or (5671 if parts.scheme == "amqps" else 5672)
        except ValueError:
            port = 0
        if parts.scheme not in ("amqp", "amqps") or not parts.hostname or not port:
            raise DispatchRefused(
                f"no RabbitMQ at {shown(text)!r}", hint="write amqp://user:password@host:5672/vhost"
            )
        options = dict(parse_qsl(parts.query))
        self.prefix = options.pop("prefix", "")
        self.queue_type = options.pop("queue_type", CLASSIC)
        if self.queue_type not in (CLASSIC, QUORUM):
            raise DispatchRefused(
                f"no such kind of queue: {self.queue_type!r}", hint="write ?queue_type=classic or quorum"
            )
        options = {"heartbeat": str(HEARTBEAT), "name": "shoal", **options}
        if not parts.username:
            parts = parts._replace(netloc=f"guest:guest@{parts.netloc}")
        vhost = quote(parts.path[1:].replace("%2F", "/").replace("%2f", "/") or "/", safe="")
        self.url = parts._replace(path=f"/{vhost}", query=urlencode(options)).geturl()
        self.vhost = unquote(vhost)
        self.place = f"RabbitMQ at {parts.hostname}:{port}"


class _Made(NamedTuple):
    """A queue or an exchange that is there now."""

    ours: Mapping[str, Any]
    """How we would have declared it."""
    theirs: Mapping[str, Any]
    """How it is, where that is something else."""
    known: bool = True
    """Whether `theirs` is all that differs. RabbitMQ does not tell those who may not declare."""

    @property
    def differences(self) -> str:
        told = (
            f"{name} {_shown(value)}, ours {_shown(self.ours.get(name))}"
            for name, value in self.theirs.items()
        )
        return "; ".join(told) or ("" if self.known else "we may not declare it")


class _Collision(DispatchError):
    """Two made the same queue at the same moment, which RabbitMQ calls an internal error."""


class _Link:
    """One connection with one channel, made when it is needed and made again when it has broken."""

    _numbers = count(1)

    def __init__(self, address: Address, watch: Watcher, *, confirms: bool) -> None:
        self._address = address
        self._watch = watch
        self._confirms = confirms
        self._making = asyncio.Lock()
        self._connection: AbstractConnection | None = None
        self._channel: Channel | None = None
        self._failures = 0
        self._was_open = False
        self._held_back = False
        self.number = 0
        """Which connection this is; 0: none yet."""
        self.declared: set[str] = set()
        self.broken = asyncio.Event()
        self.broken.set()
        self.version = ""

    @property
    def open(self) -> bool:
        return self._channel is not None and not self.broken.is_set()

    async def channel(self) -> Channel:
        """Raises DispatchError; DispatchRefused when trying again cannot help."""
        if self._channel is not None and not self.broken.is_set():
            return self._channel
        async with self._making:
            if self._channel is None or self.broken.is_set():
                self._channel = await self._made()
            return self._channel

    async def _made(self) -> Channel:
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
            raise self.told(error) from None
        self.number = next(self._numbers)
        self.declared = set()
        self.broken = broken = asyncio.Event()
        self.version = str(connection.server_properties.get("version", ""))
        assert isinstance(channel, Channel)
        for ends in (connection.closing, channel.closing):
            ends.add_done_callback(_heard_of)
            ends.add_done_callback(lambda _: broken.set())
        # The broker stops a consumer when its queue is deleted: everything is made anew then.
        channel.on_consumer_cancel_callbacks.add(lambda _: broken.set())
        self._connection = connection
        if self._failures and self._was_open:
            self._watch(Trouble(f"Connected to RabbitMQ on attempt {self._failures + 1}", part="dispatch"))
        self._failures, self._was_open = 0, True
        return channel

    def lost(self) -> DispatchError:
        """The connection is gone. Counts as the first of the attempts to have one."""
        self.broken.set()
        self._failures = max(1, self._failures)
        return DispatchError(f"{self._address.place} closed the connection", hint=RUNNING)

    def check_taking(self) -> None:
        """Raises DispatchError while the broker takes nothing from those who publish."""
        if self._is_held_back():
            self._held_back = True
            raise DispatchError(
                f"{self._address.place} takes no messages: it is low on memory or disk",
                hint="rabbitmqctl status tells which; it goes on by itself",
            )
        if self._held_back:
            self._held_back = False
            self._watch(Trouble("RabbitMQ takes messages again", part="dispatch"))

    def _is_held_back(self) -> bool:
        return self._connection is not None and _held_back(self._connection)

    async def over(self, tasks: Collection[asyncio.Future[Any]], seconds: float) -> None:
        """Until these are done, or the time is over, or the broker takes nothing any more: then
        nothing will be answered on this connection, however long one waits."""
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0:
            _, pending = await asyncio.wait(tasks, timeout=min(left, GLANCE))
            if not pending or self._is_held_back():
                return

    async def ask(self, question: Awaitable[T]) -> T:
        """An answer of the broker. Without one in time the connection is given up."""
        task = asyncio.ensure_future(question)
        try:
            await self.over({task}, ANSWER)
        except asyncio.CancelledError:
            # aiormq closes a channel whose question was called off.
            task.cancel()
            task.add_done_callback(_heard_of)
            self.broken.set()
            raise
        if not task.done():
            task.add_done_callback(_heard_of)
            # It stays asked: called off, it would take the channel with it.
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
            raise self.told(error) from None

    async def apart(self, question: Callable[[Channel], Awaitable[T]]) -> T:
        """The same on a channel of its own, which the broker closes when it says no. Raises what it
        said then, as aiormq does."""
        await self.channel()
        assert self._connection is not None
        channel = await self.ask(self._connection.channel(publisher_confirms=False))
        assert isinstance(channel, Channel)
        channel.closing.add_done_callback(_heard_of)
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

    def told(self, error: Exception) -> DispatchError:
        place = self._address.place
        why = _reason(error)
        if isinstance(error, ChannelPreconditionFailed):
            return DispatchRefused(f"{place}: {why}", hint=OTHER_NAMES)
        if isinstance(error, ChannelAccessRefused):
            return DispatchRefused(
                f"{place}: {why}", hint="give the user the right to configure, write and read"
            )
        if not self._was_open:
            # Later the broker has let us in before: it may just be starting again.
            if isinstance(error, ProbableAuthenticationError):
                hint = "amqp://user:password@host, or RABBITMQ_USER and RABBITMQ_PASSWORD"
                return DispatchRefused(f"{place} refuses us: {why}", hint=hint)
            if isinstance(error, ConnectionNotAllowed | InvalidFrameError):
                # Where an answer to `open` was expected, aiormq does not tell what came instead.
                why = f"no way into the virtual host {self._address.vhost!r}"
                return DispatchRefused(
                    f"{place}: {why}", hint="check the virtual host: rabbitmqctl list_vhosts"
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
    "put ?prefix=NAME. after the address for queues and an exchange of our own, or delete what is there"
    " (rabbitmqctl delete_queue NAME)"
)
RUNNING = "is it running? the address is --dispatch, SHOAL_DISPATCH or RABBITMQ_HOST"


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
        """`queues` are those it will receive from, `prefetch` messages of each at a time. Messages
        of `fast` queues are acknowledged when they are handed out."""
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
        self._beginning = asyncio.Lock()
        self._theirs: dict[str, dict[str, Any]] = {}
        """Queues that somebody else declared, and how they are."""
        self._no_way_back: set[str] = set()
        """Those of them that drop what waits too long."""
        self._internal = False
        """Somebody else made the exchange, and only queues may publish there."""
        self._consuming: dict[str, int] = {}
        """Queue to the connection over which it is consumed."""
        self._arrived: dict[bool, deque[_Arrival]] = {False: deque(), True: deque()}
        """Work, and what came back."""
        self._news = asyncio.Event()
        self._subscribed = asyncio.Event()
        self._open: dict[int, None] = {}
        """Delivered over the present connection and not acknowledged, in this order."""

    # -- sending ------------------------------------------------------------------------

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        channel = await self._ready_to_send({message.queue for message in messages})
        sending = [
            self._publish(
                channel,
                "",
                self._prefix + message.queue,
                packed(message),
                self._limit(message),
                message.priority,
            )
            for message in messages
        ]
        taken = await self._confirmed(sending)
        return [message for message, took in zip(messages, taken, strict=True) if not took]

    def _limit(self, message: Message) -> float | None:
        """The queue's own limit holds as well; in a queue of somebody else it goes with the message.
        Without a way back, what expired would only be missing."""
        if message.queue in self._no_way_back:
            return None
        if message.queue not in self._theirs:
            return message.ttl
        ttl = self._ttls.get(message.queue, OTHER_TTL)
        return ttl if message.ttl is None else min(ttl, message.ttl)

    async def failed(self, letters: Sequence[DeadLetter]) -> None:
        channel = await self._ready_to_send(())
        exchange, key = self._prefix + FAILED_EXCHANGE, FAILED_KEY
        if self._internal:
            exchange, key = "", self._prefix + FAILED_QUEUE
        sending = [self._publish(channel, exchange, key, _described(letter)) for letter in letters]
        taken = await self._confirmed(sending)
        full = sum(_is_full(task) for task in sending)
        if full:
            # The letters are in the frontier; nobody waits until somebody has read these.
            self._note(
                FAILED_QUEUE, f"{FAILED_QUEUE} takes no more: `shoal dead list` has what it does not hold"
            )
        refused = taken.count(False) - full
        if refused:
            raise DispatchError(f"RabbitMQ did not take {refused} messages for {FAILED_QUEUE}")

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        async def ask() -> dict[str, Depth]:
            channel = await self._prepared(queues)
            return {queue: await self._depth(channel, queue) for queue in queues}

        return await self._patiently(ask)

    async def _depth(self, channel: Channel, queue: str) -> Depth:
        answer = await self._out.ask(channel.queue_declare(self._prefix + queue, passive=True))
        waiting = answer.message_count or 0
        theirs = self._theirs.get(queue, {})
        most, ttl = theirs.get(LENGTH), theirs.get(TTL)
        room = None if most is None else max(0, most - waiting)
        drops_after = ttl / 1000 if queue in self._no_way_back and ttl is not None else None
        return Depth(waiting, answer.consumer_count or 0, room, drops_after)

    async def about(self) -> str:
        await self._out.channel()
        return f"RabbitMQ {self._out.version}"

    async def _ready_to_send(self, queues: Collection[str]) -> Channel:
        return await self._patiently(lambda: self._prepared(queues))

    async def _prepared(self, queues: Collection[str]) -> Channel:
        channel = await self._out.channel()
        self._out.check_taking()
        await self._make(self._out, queues)
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

    async def _confirmed(self, sending: Sequence[asyncio.Task[object]]) -> list[bool]:
        """For each whether the broker has it for certain. What is not confirmed in time may arrive
        all the same."""
        if not sending:
            return []
        try:
            await self._out.over(sending, CONFIRM)
        finally:
            for task in sending:
                if not task.done():
                    task.cancel()
                task.add_done_callback(_heard_of)
        taken = [task.done() and not task.cancelled() and task.exception() is None for task in sending]
        if not all(taken):
            # A queue may have been deleted: it is made again with the next connection.
            self._out.declared.clear()
            self._out.check_taking()
        return taken

    # -- receiving ----------------------------------------------------------------------

    async def receive(self, limit: int) -> list[Delivery]:
        while True:
            await self._consume(self._queues, self._prefetch)
            arrivals = self._first(limit, returned=False)
            opened = [(arrival, self._opened(arrival)) for arrival in arrivals]
            deliveries = [delivery for _, delivery in opened if delivery is not None]
            quick = [delivery for delivery in deliveries if delivery.message.queue in self._fast]
            await self._reject([arrival for arrival, delivery in opened if delivery is None])
            await self.finish(quick)
            self._forget(arrivals, returned=False)
            if deliveries:
                return deliveries
            if not arrivals:
                await self._more(returned=False)

    def subscribe(self, queues: Collection[str]) -> None:
        more = [queue for queue in queues if queue not in self._queues]
        if more:
            self._queues = (*self._queues, *more)
            self._subscribed.set()

    async def returned(self) -> list[Delivery]:
        while True:
            await self._consume((RETURNED_QUEUE,), 100)
            deliveries: list[Delivery] = []
            strange: list[Delivery] = []
            arrivals = self._first(100, returned=True)
            for arrival in arrivals:
                message, reason = unpacked(arrival.message.body), _death(arrival.message)
                tag = self._tag(arrival.message)
                if message is None or not reason:
                    # What ended dead is told here as well, and is in the frontier already.
                    strange.append(Delivery(Message("", ()), tag))
                else:
                    deliveries.append(Delivery(message, tag, reason=reason))
            await self.finish(strange)
            self._forget(arrivals, returned=True)
            if deliveries:
                return deliveries
            if not strange:
                await self._more(returned=True)

    def _first(self, limit: int, *, returned: bool) -> list[_Arrival]:
        """What has arrived. It stays until `_forget`, after the last await: who is called off in
        between has lost nothing."""
        return list(islice(self._arrived[returned], limit))

    def _forget(self, arrivals: Sequence[_Arrival], *, returned: bool) -> None:
        waiting = self._arrived[returned]
        for arrival in arrivals:
            if waiting and waiting[0] is arrival:
                waiting.popleft()

    async def _more(self, *, returned: bool) -> None:
        """Until something has arrived, or there is another queue to receive from. Raises DispatchError
        when the connection is lost."""
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
        """Receive from these queues, over a connection that works."""
        if self._in.open and all(self._consuming.get(queue) == self._in.number for queue in queues):
            return
        async with self._beginning:
            if not self._in.open and self._in.number and self._consuming:
                # Told before a new one is made: a lost connection is one attempt.
                self._consuming.clear()
                raise self._in.lost()
            await self._patiently(lambda: self._begin(queues, prefetch))

    async def _begin(self, queues: Sequence[str], prefetch: int) -> None:
        channel = await self._in.channel()
        link = self._in.number
        if link not in self._consuming.values():
            # What came over an earlier connection is delivered again.
            self._consuming.clear()
            self._open.clear()
            for waiting in self._arrived.values():
                waiting.clear()
        await self._make(self._in, queues)
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

    def _opened(self, arrival: _Arrival) -> Delivery | None:
        """None for what is no message of ours."""
        raw = arrival.message
        message = unpacked(raw.body)
        if message is None:
            return None
        if message.queue != arrival.queue:
            message = msgspec.structs.replace(message, queue=arrival.queue)
        return Delivery(message, self._tag(raw), again=bool(raw.redelivered))

    async def _reject(self, arrivals: Sequence[_Arrival]) -> None:
        """What is no message of ours goes where the failed ones go."""
        for queue, raw in arrivals:
            tag = self._tag(raw)
            if tag.number not in self._open:
                continue
            exchange = self._theirs.get(queue, {}).get(DEAD_EXCHANGE, self._prefix + FAILED_EXCHANGE)
            ours = exchange == self._prefix + FAILED_EXCHANGE
            where = f"see {FAILED_QUEUE}" if ours else f"they went to {exchange}" if exchange else "dropped"
            told = f"{queue} held {len(raw.body)} bytes that are no message of ours: {where}"
            self._watch(Trouble(told, part="dispatch"))
            with suppress(Exception):
                await raw.channel.basic_reject(tag.number, requeue=False, wait=False)
            self._open.pop(tag.number, None)

    def _tag(self, message: DeliveredMessage) -> _Tag:
        return _Tag(self._in.number, message.delivery_tag or 0)

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        """What came over an earlier connection has been given back by its end."""
        ours = {
            delivery.tag.number
            for delivery in deliveries
            if isinstance(delivery.tag, _Tag) and delivery.tag.link == self._in.number
        }
        ours &= self._open.keys()
        if not ours or not self._in.open:
            return
        channel = await self._in.channel()
        # All that came before it is finished too: one word for them together.
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

    # -- what there must be ---------------------------------------------------------------

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of something that makes or uses queues while others may just be making them."""
        for _ in range(COLLISIONS):
            with suppress(_Collision):
                return await work()
            await asyncio.sleep(random.uniform(0.05, 0.5))
        return await work()

    async def _make(self, link: _Link, queues: Collection[str]) -> None:
        """See that everything is there. What somebody else declared under a name of ours will do."""
        found: dict[str, _Made] = {}
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
                    await self._find_way_back(link, queue, made)
        self._tell_of(found)

    async def _make_exchange(self, link: _Link) -> _Made:
        name = self._prefix + FAILED_EXCHANGE

        def declare(channel: Channel, how: dict[str, Any]) -> Awaitable[Any]:
            return channel.exchange_declare(
                name,
                exchange_type=how["type"],
                durable=how["durable"],
                auto_delete=how["auto_delete"],
                internal=how["internal"],
                arguments=_arguments_in(how),
            )

        ours = {"type": "direct", "durable": True, "auto_delete": False, "internal": False}
        return await self._agreed(
            link, FAILED_EXCHANGE, ours, declare, lambda channel: channel.exchange_declare(name, passive=True)
        )

    async def _make_queue(self, link: _Link, queue: str) -> _Made:
        name = self._prefix + queue

        def declare(channel: Channel, how: dict[str, Any]) -> Awaitable[Any]:
            return channel.queue_declare(
                name, durable=how["durable"], auto_delete=how["auto_delete"], arguments=_arguments_in(how)
            )

        ours = {"durable": True, "auto_delete": False, **self._arguments(queue)}
        made = await self._agreed(
            link, queue, ours, declare, lambda channel: channel.queue_declare(name, passive=True)
        )
        if made.theirs.get(TYPE) == "stream" and queue != FAILED_QUEUE:
            raise DispatchRefused(
                f"{self._place} has the queue {name} as a stream ({TYPE}: theirs stream, ours"
                f" {self._queue_type}): what is read from a stream stays in it",
                hint=OTHER_NAMES,
            )
        if made.theirs or not made.known:
            self._theirs[queue] = {**made.ours, **made.theirs}
        else:
            self._theirs.pop(queue, None)
        link.declared.add(queue)
        return made

    async def _agreed(
        self,
        link: _Link,
        name: str,
        ours: Mapping[str, Any],
        declare: Callable[[Channel, dict[str, Any]], Awaitable[Any]],
        look: Callable[[Channel], Awaitable[Any]],
    ) -> _Made:
        """Declare it, or find out how it is. RabbitMQ refuses to declare again what is there with other
        arguments and tells one of them; so each is taken over until it agrees."""
        how, theirs = dict(ours), dict[str, Any]()
        try:
            for _ in range(DIFFERENCES):
                try:
                    await link.apart(lambda channel: declare(channel, how))
                    return _Made(ours, theirs)
                except ChannelPreconditionFailed as error:
                    difference = _difference(str(error.args[0]), how)
                    if difference is None or difference[0] in theirs:
                        break
                    theirs[difference[0]] = how[difference[0]] = difference[1]
                except ChannelAccessRefused as error:
                    # Who may not declare may still use what is there.
                    with suppress(ChannelNotFoundEntity):
                        await link.apart(look)
                        return _Made(ours, theirs, known=False)
                    raise link.told(error) from None
            await link.apart(look)
            return _Made(ours, theirs, known=False)
        except ChannelLockedResource:
            raise DispatchRefused(
                f"{self._place} has the queue {self._prefix}{name} for another connection alone"
                " (exclusive: theirs true, ours false)",
                hint=OTHER_NAMES,
            ) from None
        except AMQPChannelError as error:
            raise link.told(error) from None

    async def _find_way_back(self, link: _Link, queue: str, made: _Made) -> None:
        """What waits too long in a queue of somebody else may go elsewhere: the pump listens there."""
        ours = made.ours
        exchange, key = (made.theirs.get(name, ours[name]) for name in (DEAD_EXCHANGE, DEAD_KEY))
        self._no_way_back.discard(queue)
        if (exchange, key) == (ours[DEAD_EXCHANGE], ours[DEAD_KEY]):
            return
        if not exchange:
            # None, or the one that knows queues only, which nobody can bind to.
            self._no_way_back.add(queue)
            return
        # Without a key a message keeps the one it came with.
        key = self._prefix + queue if key is None else key
        try:
            await self._bound(link, RETURNED_QUEUE, exchange, key)
            if exchange == ours[DEAD_EXCHANGE]:
                await self._bound(link, FAILED_QUEUE, exchange, key)
        except (ChannelNotFoundEntity, ChannelAccessRefused):
            self._no_way_back.add(queue)

    async def _bound(self, link: _Link, queue: str, exchange: str, key: str) -> None:
        await link.apart(lambda channel: channel.queue_bind(self._prefix + queue, exchange, key))

    def _tell_of(self, found: Mapping[str, _Made]) -> None:
        """One line about everything that is not as we would have declared it."""
        new = {name: made for name, made in found.items() if made.differences and self._first_time(name)}
        if not new:
            return
        told = ", ".join(f"{self._prefix}{name} ({made.differences})" for name, made in new.items())
        lost = ", ".join(name for name in new if name in self._no_way_back)
        late = f"; what waits too long in {lost} is sent again and does not end as expired" if lost else ""
        self._watch(Notice(f"{self._place}: used as others declared it: {told}{late}", "dispatch"))

    def _note(self, name: str, text: str) -> None:
        if self._first_time(f"{name} takes no more"):
            self._watch(Notice(f"{self._place}: {text}", "dispatch"))

    def _first_time(self, name: str) -> bool:
        """A process has several handles and connections, and people read one line."""
        key = f"{self._names} {self._prefix}{name}"
        known = key in _noted
        _noted.add(key)
        return not known

    def _arguments(self, queue: str) -> dict[str, Any]:
        if queue == FAILED_QUEUE:
            # Just what anybody would write who declares it to look at it.
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
    """The result of something that may hang and may not even let itself be called off in time.

    aiormq ends what waits with CancelledError when a connection closes. Nobody called us off then:
    it is an error like others."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_heard_of)
        raise
    if not task.done():
        task.cancel()
        task.add_done_callback(_heard_of)
    return _result(task, seconds)


def _result(task: asyncio.Future[T], seconds: float) -> T:
    if not task.done():
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    if task.cancelled():
        raise ConnectionError("the connection was closed")
    return task.result()


def _heard_of(task: asyncio.Future[Any]) -> None:
    """Its error has been told otherwise."""
    if not task.cancelled():
        task.exception()


def _held_back(connection: AbstractConnection) -> bool:
    """Whether RabbitMQ said `connection.blocked`. `ready` is what aiormq lets us see of it: it waits
    while that is so, and does not wait otherwise."""
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
"""What this process has told of."""
_DIFFERENT = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for .*: received .* but current is"
    r" (?:(?P<none>none)|the value '(?P<value>.*)' of type '(?P<type>\w+)'|'(?P<same>.*)')",
    re.DOTALL,
)
_IMPOSSIBLE = re.compile(r"invalid arg '(?P<name>[^']+)'")


def _difference(text: str, ours: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Which argument is another one, and its value there (None: it has none). None if the text, which
    RabbitMQ cuts at 255 bytes, does not tell."""
    if found := _IMPOSSIBLE.search(text):
        # One of ours that goes with the type that we asked for and not with theirs.
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


def _arguments_in(how: Mapping[str, Any]) -> dict[str, Any]:
    fields = ("type", "durable", "auto_delete", "internal")
    return {name: value for name, value in how.items() if name not in fields and value is not None}


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _is_full(task: asyncio.Task[object]) -> bool:
    """Whether a queue takes no more: the broker says no to a message that it could have routed."""
    error = task.exception() if task.done() and not task.cancelled() else None
    return isinstance(error, DeliveryError) and not isinstance(error, PublishError)


def _death(message: DeliveredMessage) -> str:
    """Why a queue gave a message away: expired, rejected, delivery_limit… Empty: nobody did."""
    deaths = (message.header.properties.headers or {}).get("x-death")
    if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict):
        return str(deaths[0].get("reason", ""))
    return ""


def _described(letter: DeadLetter) -> bytes:
    """A dead letter as people read it in `failed_urls`."""
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
