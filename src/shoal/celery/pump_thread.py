"""The thread in the main process of `celery worker`: the pump, and the recovery of lost and dropped tasks.

Any number of workers may be started; a lock in the frontier decides which one pumps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from celery import Celery

from shoal.app import Session, evict_dead_workers, process_gone, process_name
from shoal.celery.session_thread import SessionThread, logger
from shoal.dispatch.celery import TRAVEL, CeleryDispatch, Roll
from shoal.dispatch.port import Message
from shoal.dispatch.pump import Pump
from shoal.dispatch.routes import Routes
from shoal.errors import FrontierError
from shoal.events import Trouble
from shoal.model import EXPIRED, Dead, Failure, Lease, Release, Verdict
from shoal.settings import Settings

EVICT = 2.0
"""Seconds between two checks for dead processes that held leases."""

LOOK = 1.0
"""Seconds between two checks for messages that got lost."""


class PumpThread(SessionThread):
    name = "shoal-pump"

    def __init__(
        self, app: Celery, settings: Settings, tasks: Mapping[str, int], seconds: Callable[[], float]
    ) -> None:
        """`tasks` is the number of tasks that this worker runs at a time, by queue; `seconds` returns how
        long its rate limit delays each visit now."""
        super().__init__(settings)
        self._app = app
        self._tasks = tasks
        self._seconds = seconds
        self._name = f"{process_name()}_hand"
        """The worker that takes leases in order to give them back."""
        self._back: asyncio.Queue[tuple[Message, bool]] = asyncio.Queue()

    def give_back(self, message: Message, *, expired: bool) -> None:
        """Give back the leases of a task that Celery dropped before it began: it expired or was revoked."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._back.put_nowait, (message, expired))

    async def _live(self, session: Session, closing: asyncio.Event, ready: Callable[[], None]) -> None:
        batch = session.settings.celery_batch
        roll = Roll(session.frontier.notes, self._tasks, batch=batch)
        dispatch = CeleryDispatch(self._app, roll.call, self._seconds)
        pump = Pump(
            session.frontier,
            dispatch,
            name=f"{process_name()}_pump",
            routes=Routes(()),
            watch=session.log,
            batch=batch,
            # A URL that waits in Celery has used its host's turn: send no more than can begin next.
            prefetch=1,
            queues=roll.queues,
            ttls={},
            other_ttl=TRAVEL,
            is_dead=process_gone,
            # Flower shows failures; there is no queue of dead letters.
            letters=False,
        )
        tasks = [
            asyncio.ensure_future(part)
            for part in (
                pump.run(),
                self._evict(session),
                self._take_back(session),
                self._look_for_missing(session, dispatch),
                closing.wait(),
            )
        ]
        ready()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await dispatch.close()

    async def _evict(self, session: Session) -> None:
        """Take back the leases of killed processes, which cannot give them back themselves."""
        while True:
            try:
                if count := await evict_dead_workers(session.frontier):
                    logger.warning("took back %d URLs of a process that died", count)
            except FrontierError as error:
                session.log(Trouble(str(error), server=error.server, part="frontier"))
            await asyncio.sleep(EVICT)

    async def _look_for_missing(self, session: Session, dispatch: CeleryDispatch) -> None:
        while True:
            await asyncio.sleep(LOOK)
            leases = dispatch.missing()
            if not leases:
                continue
            try:
                taken = await session.frontier.take(leases, worker=self._name, lease_seconds=60.0)
                if taken.leases:
                    await session.frontier.settle([Release(lease) for lease in taken.leases])
                    logger.warning("took back %d URLs whose tasks got lost in the broker", len(taken.leases))
            except FrontierError as error:
                session.log(Trouble(str(error), server=error.server, part="frontier"))

    async def _take_back(self, session: Session) -> None:
        while True:
            message, expired = await self._back.get()
            try:
                taken = await session.frontier.take(message.leases, worker=self._name, lease_seconds=60.0)
                await session.frontier.settle([_end(lease, message, expired) for lease in taken.leases])
            except FrontierError as error:
                # Their leases expire, and they are sent again.
                session.log(Trouble(str(error), server=error.server, part="frontier"))


def _end(lease: Lease, message: Message, expired: bool) -> Verdict:
    if not expired:
        return Dead(lease, Failure(EXPIRED, "its task was revoked in Celery before it began"))
    if message.ttl is None:
        return Release(lease)  # it has no time limit: the task was stuck, the request is not too old
    return Dead(lease, Failure(EXPIRED, f"waited in {message.queue} until its time ran out"))
