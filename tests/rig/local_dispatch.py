"""A dispatch inside one process: the model for the others, and quick enough for any test.

Handles that share an `Exchange` see the same queues. Nothing survives the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count

from shoal import clock as clocks
from shoal.dispatch.port import Delivery, Depth, Dispatch, Message
from shoal.errors import DispatchError
from shoal.model import DeadLetter

TICK = 0.05


class Exchange:
    """The queues themselves. Belongs to one event loop."""

    def __init__(self, *, clock: clocks.Clock = time.monotonic, ttls: dict[str, float] | None = None) -> None:
        self.clock = clock
        self.ttls = ttls or {}
        self.queues: dict[str, deque[tuple[float, Message, bool]]] = {}
        self.gone: deque[Message] = deque()
        """Messages whose time ran out."""
        self.letters: list[DeadLetter] = []
        self.handles: list[LocalDispatch] = []
        self.changed = asyncio.Condition()
        self.down = False

    def put(self, message: Message, *, again: bool = False) -> None:
        waits = min(message.ttl or 1e18, self.ttls.get(message.queue, 1e18))
        entry = (self.clock() + waits, message, again)
        queue = self.queues.setdefault(message.queue, deque())
        if again:
            queue.appendleft(entry)
        else:
            queue.append(entry)

    def expire(self) -> None:
        """As a broker does it: only at the head of a queue."""
        now = self.clock()
        for queue in self.queues.values():
            while queue and queue[0][0] <= now:
                self.gone.append(queue.popleft()[1])


class LocalDispatch(Dispatch):
    def __init__(
        self,
        exchange: Exchange,
        queues: Collection[str] = (),
        *,
        prefetch: int = 10,
        fast: Collection[str] = (),
    ) -> None:
        self._exchange = exchange
        self._queues = tuple(queues)
        self._prefetch = prefetch
        self._fast = frozenset(fast)
        self._tags = count(1)
        self._open: dict[int, Message] = {}
        self._consuming = False
        exchange.handles.append(self)

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        self._reachable()
        async with self._exchange.changed:
            for message in messages:
                self._exchange.put(message)
            self._exchange.changed.notify_all()
        return []

    async def receive(self, limit: int) -> list[Delivery]:
        self._reachable()
        self._consuming = True
        async with self._exchange.changed:
            while True:
                self._reachable()
                if got := self._take(limit):
                    return got
                await self._change()

    def _take(self, limit: int) -> list[Delivery]:
        self._exchange.expire()
        got: list[Delivery] = []
        for name in self._queues:
            queue = self._exchange.queues.get(name, deque())
            while queue and len(got) < limit and len(self._open) < self._prefetch:
                _, message, again = queue.popleft()
                tag = next(self._tags)
                if name not in self._fast:
                    self._open[tag] = message
                got.append(Delivery(message, tag, again))
        return got

    def subscribe(self, queues: Collection[str]) -> None:
        self._queues = tuple(dict.fromkeys([*self._queues, *queues]))

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        self._reachable()
        async with self._exchange.changed:
            for delivery in deliveries:
                self._open.pop(delivery.tag, None)
            self._exchange.changed.notify_all()

    async def receive_returned(self) -> list[Delivery]:
        self._reachable()
        async with self._exchange.changed:
            while True:
                self._exchange.expire()
                if self._exchange.gone:
                    gone = [Delivery(message, reason="expired") for message in self._exchange.gone]
                    self._exchange.gone.clear()
                    return gone
                await self._change()

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        self._reachable()
        self._exchange.letters += letters

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        self._reachable()
        self._exchange.expire()
        consumers = [handle for handle in self._exchange.handles if handle._consuming]
        return {
            name: Depth(
                len(self._exchange.queues.get(name, ())),
                sum(name in handle._queues for handle in consumers),
            )
            for name in queues
        }

    async def info(self) -> str:
        return "inside this process"

    async def close(self) -> None:
        if self not in self._exchange.handles:
            return
        self._exchange.handles.remove(self)
        async with self._exchange.changed:
            for message in reversed(self._open.values()):
                self._exchange.put(message, again=True)
            self._open.clear()
            self._exchange.changed.notify_all()

    async def _change(self) -> None:
        """Until something happened, or the time of a message may have run out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK):
                await self._exchange.changed.wait()

    def _reachable(self) -> None:
        if self._exchange.down:
            raise DispatchError("the exchange is down", hint="wait, or start it again")
