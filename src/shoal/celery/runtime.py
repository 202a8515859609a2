"""The thread in each process that runs tasks: a session, and a worker for the leases in the tasks' messages.

A task passes its message to the worker and waits until all its leases are settled in the frontier. The worker
takes the leases as from any dispatch: a message that arrives twice leads to one visit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from shoal.app import Session, process_name
from shoal.celery.session_thread import SessionThread, one_line
from shoal.dispatch.consumer import Consumer
from shoal.dispatch.port import MARK, Delivery, Depth, Dispatch, Message
from shoal.errors import ShoalError
from shoal.events import Event, Visited
from shoal.model import DeadLetter
from shoal.settings import Settings

T = TypeVar("T")


class InProcessDispatch(Dispatch):
    """A dispatch inside one process: tasks pass their messages through it to the worker."""

    def __init__(self) -> None:
        self._in: asyncio.Queue[Delivery] = asyncio.Queue()

    async def hand_over(self, message: Message) -> None:
        """Returns when all leases of the message are settled, or turn out to belong to another worker."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in.put_nowait(Delivery(message, over))
        await over

    async def receive(self, limit: int) -> list[Delivery]:
        received = [await self._in.get()]
        while not self._in.empty() and len(received) < limit:
            received.append(self._in.get_nowait())
        return received

    def subscribe(self, queues: Collection[str]) -> None:
        """Celery chooses the queues."""

    async def finish(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if not delivery.tag.done():
                delivery.tag.set_result(None)

    async def send(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages)

    async def receive_returned(self) -> list[Delivery]:
        never: asyncio.Future[list[Delivery]] = asyncio.get_running_loop().create_future()
        return await never

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        """The task reports it."""

    async def depths(self, queues: Collection[str]) -> dict[str, Depth]:
        return dict.fromkeys(queues, Depth(self._in.qsize(), 1))

    async def info(self) -> str:
        return "tasks of this process"

    async def close(self) -> None:
        """Celery delivers unfinished messages again."""


class Runtime(SessionThread):
    """Starts at once, and is ready when the frontier has responded; callers wait for that."""

    name = "shoal-celery"

    def __init__(self, settings: Settings, queues: Collection[str], *, tasks: int, stay: float) -> None:
        """`tasks` is the number of tasks that run in this process at a time. A visit waits `stay` seconds at
        most for its host's next turn, instead of ending its task without a page."""
        super().__init__(settings)
        self.worker = f"{process_name()}{MARK}"
        self._queues = tuple(queues)
        self._slots = tasks * settings.celery_batch
        self._stay = stay
        self._dispatch: InProcessDispatch | None = None
        self._session: Session | None = None
        self._events: dict[tuple[str, str], Visited | None] = {}

    def visit(self, message: Message) -> list[Visited | None]:
        """Returns how each visit ended, in the order of the leases; None if another worker has the lease.

        Raises ShoalError if this process cannot work any more.
        """
        return self.call(lambda _session: self._visit(message))

    def call(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Run `work` with the session and wait for its result. Raises as `visit` does."""
        self._ready.wait()
        if self._error is not None or self._loop is None or self._session is None:
            why = one_line(self._error) if self._error else "it is stopping"
            raise ShoalError(f"this process cannot work: {why}")
        try:
            return asyncio.run_coroutine_threadsafe(work(self._session), self._loop).result()
        except concurrent.futures.CancelledError:
            raise ShoalError("this process is stopping", hint="another will run the task") from None

    async def _visit(self, message: Message) -> list[Visited | None]:
        assert self._dispatch is not None
        keys = [(lease.request.job, lease.request.url) for lease in message.leases]
        self._events.update(dict.fromkeys(keys))
        await self._dispatch.hand_over(message)
        return [self._events.pop(key, None) for key in keys]

    async def _live(self, session: Session, closing: asyncio.Event, ready: Callable[[], None]) -> None:
        self._session, self._dispatch = session, InProcessDispatch()
        async with Consumer(session.frontier, self._dispatch, watch=session.log) as consumer:
            worker = session.worker(
                queues=self._queues,
                drain=False,
                name=self.worker,
                batch=self._slots,
                stay=self._stay,
                frontier=consumer,
                watch=self._watch,
            )
            running = asyncio.create_task(worker.run())
            ending = asyncio.create_task(closing.wait())
            ready()
            try:
                await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ending.cancel()
                # Twice: Celery has already waited for its tasks. Visits still in flight are released.
                worker.stop()
                worker.stop()
                await running

    def _watch(self, event: Event) -> None:
        if isinstance(event, Visited) and (event.job, event.url) in self._events:
            self._events[event.job, event.url] = event
