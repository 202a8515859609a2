"""An open session on a thread of its own: Celery's processes are not asynchronous, shoal is."""

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
"""Seconds that a thread gets to put its things away."""


class SessionThread:
    """Runs `_live` with an open session until it is closed. Subclasses say what living is."""

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
        """Let it end, without waiting. Harmless when it is over, and in a signal handler."""
        self._closed = True
        loop, closing = self._loop, self._closing
        if loop is not None and closing is not None:
            with suppress(RuntimeError):  # its loop is closed: it has ended
                loop.call_soon_threadsafe(closing.set)

    def close(self) -> None:
        """End it, gently."""
        self.end()
        self._thread.join(CLOSING)

    async def _live(self, session: Session, closing: asyncio.Event, ready: Callable[[], None]) -> None:
        """Until `closing` is set. `ready` is called when it can be used."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
            logger.critical("%s", told(error))
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        if self._closed:
            return
        living = asyncio.create_task(self._lived(self._closing))
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({living, closing}, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not self._ready.is_set():
            living.cancel()  # a frontier that is away must not hold up the end
        with suppress(asyncio.CancelledError):
            await living

    async def _lived(self, closing: asyncio.Event) -> None:
        async with self._session() as session:
            await self._live(session, closing, self._ready.set)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        """The frontier may still be starting: every attempt is told, and there is always another."""
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


def told(error: BaseException) -> str:
    """An error as one line, with its way out."""
    hint = error.hint if isinstance(error, ShoalError) else ""
    return f"{error or type(error).__name__}{'; ' + hint if hint else ''}"
