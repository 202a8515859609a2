"""The one place where async is hidden: a crawl for scripts and notebooks.

Runs the crawl on a thread with a loop of its own, so that it also works where a loop is running
already (notebooks). Leaving the iteration early stops the crawl.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def iterate(source: AsyncIterable[T], ahead: int = 1000) -> Iterator[T]:
    """The items of an async iterable, as they come, at most `ahead` of them in advance."""
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
