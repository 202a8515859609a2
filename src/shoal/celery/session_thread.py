"""An open session on a thread of its own: shoal is asynchronous, Celery's processes are not."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count

from celery.utils.log import get_logger

from shoal.app import Session
from shoal.errors import FrontierUnreachable, ShoalError
from shoal.politeness.pacing import backoff
from shoal.settings import Settings

logger = get_logger("shoal.celery")

CLOSING = 15.0
"""Seconds that a thread may take to close."""


class SessionThread:
    """Runs `_live`, which subclasses implement, with an open session until it is closed."""

    name = "shoal"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._ready = threading.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    def end(self) -> None:
        """Ask the thread to end, without waiting. Harmless if it has ended, and in a signal handler."""
        self._closed = True
        loop, closing = self._loop, self._closing
        if loop is not None and closing is not None:
            with suppress(RuntimeError):  # the loop is closed: the thread has ended
                loop.call_soon_threadsafe(closing.set)

    def close(self) -> None:
        """End the thread and wait for it."""
        self.end()
        self._thread.join(CLOSING)

    async def _live(self, session: Session, closing: asyncio.Event, ready: Callable[[], None]) -> None:
        """Runs until `closing` is set. Calls `ready` when the thread can be used."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
            logger.critical("%s", one_line(error))
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        if self._closed:
            return
        living = asyncio.create_task(self._live_with_session(self._closing))
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({living, closing}, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not self._ready.is_set():
            living.cancel()  # an unreachable frontier must not delay the end
        with suppress(asyncio.CancelledError):
            await living

    async def _live_with_session(self, closing: asyncio.Event) -> None:
        async with self._open_session() as session:
            await self._live(session, closing, self._ready.set)

    @asynccontextmanager
    async def _open_session(self) -> AsyncIterator[Session]:
        """The frontier may still be starting: every failed attempt is logged and repeated, without limit."""
        for attempt in count(1):
            opened = Session.opened(self.settings)
            try:
                session = await opened.__aenter__()
            except FrontierUnreachable as error:
                wait = backoff(attempt, base=0.5, cap=10.0, jitter=random.random())
                logger.warning("Attempt %d failed: %s; again in %.1f s", attempt, error, wait)
                await asyncio.sleep(wait)
                continue
            if attempt > 1:
                logger.warning("Connected to the frontier on attempt %d", attempt)
            try:
                yield session
            finally:
                await opened.__aexit__(None, None, None)
            return


def one_line(error: BaseException) -> str:
    """Returns an error and its hint as one line."""
    hint = error.hint if isinstance(error, ShoalError) else ""
    return f"{error or type(error).__name__}{'; ' + hint if hint else ''}"
