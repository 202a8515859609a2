"""Hides async from scripts and notebooks; no other module does.

A crawl, or the calls of a client, run on a thread with its own loop, so that they also work where a loop is
already running (notebooks). Leaving the iteration early stops the crawl.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterable, Coroutine, Iterator
from typing import Any, TypeVar

from shoal.errors import UsageError

T = TypeVar("T")


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def iterate(source: AsyncIterable[T], ahead: int = 1000) -> Iterator[T]:
    """Yields the items of an async iterable as they come, reading at most `ahead` of them in advance."""
    box: queue.Queue[T | _End] = queue.Queue(maxsize=ahead)
    left = threading.Event()

    def put(value: T | _End) -> None:
        while not left.is_set():
            try:
                box.put(value, timeout=0.2)
            except queue.Full:
                continue
            return

    async def pour() -> None:
        async for value in source:
            await asyncio.to_thread(put, value) if box.full() else box.put(value)
            if left.is_set():
                return

    def run() -> None:
        error: BaseException | None = None
        try:
            asyncio.run(pour())
        except BaseException as raised:
            error = raised
        put(_End(error))

    thread = threading.Thread(target=run, name="shoal-crawl", daemon=True)
    thread.start()
    try:
        while not isinstance(value := box.get(), _End):
            yield value
        if value.error is not None:
            raise value.error
    finally:
        left.set()
        thread.join()


class LoopThread:
    """An event loop on a thread, for code without async: runs one coroutine per call, until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. An interrupt cancels it. Raises UsageError if this is closed."""
        if self.closed:
            work.close()  # else Python warns that it was never awaited
            raise UsageError("this client is closed", hint="open a new one, or close it later")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        if self.closed:
            return
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
