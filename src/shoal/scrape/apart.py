"""Large pages are read in a process of their own.

The parser keeps the interpreter for itself while it works, so a large page would stop every other visit, and
what it makes of a page that was built for it has no end. A process can be given limits, and be ended: then
the page is at fault, and nobody else pays. To start one costs about 0.2 s, so the built-in scraper keeps it
for the pages that follow.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from shoal.errors import FetchError
from shoal.model import Request, Response
from shoal.scrape.page import Page
from shoal.scrape.site import site_item

MEMORY = 384 << 20
SECONDS = 10
MAX_WRITTEN = 32_000_000
"""Bytes that come back, three times the largest page."""
KEPT = 10.0
"""Seconds that the process waits for another page."""
SMALL = 96 << 20
"""Bytes that it may still hold after a page. With more it is replaced."""
_HEAD = 4
"""Bytes before each task and each answer: how long it is."""

_one_at_a_time = threading.Lock()
"""Handlers of a worker have at most one such process, however many large pages they write."""


class _Task(Struct, frozen=True):
    kind: str
    """`text`, `main`, `whole`: what `Page` writes; `site`: the built-in scraper's item and links."""
    response: Response
    request: Request
    fields: frozenset[str] | None = None
    fetched_at: str = ""


def written_apart(response: Response, kind: str) -> str:
    """What `Page` writes of this response: `text`, `main` or `whole`. Blocks, but not the interpreter.

    Raises FetchError `page_too_complex` about a page that takes too much memory or time.
    """
    message = msgspec.msgpack.encode(_Task(kind, response, Request(response.url, "apart")))
    with _one_at_a_time:
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter and our own module
                _COMMAND,
                input=_head(message) + message,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=2 * SECONDS,
                check=False,
                process_group=0,
            )
        except subprocess.TimeoutExpired:
            done = None
    if done is None or done.returncode:
        raise _too_complex(response)
    return done.stdout[_HEAD:].decode("utf-8", "replace")


class Reader:
    """Reads large pages for the built-in scraper, one at a time, in a process that it keeps for a while."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._leaving: asyncio.subprocess.Process | None = None

    async def site(
        self, page: Page, fields: frozenset[str] | None, fetched_at: str
    ) -> tuple[bytes, list[str]]:
        """The item of a page, as JSON, and its links. Raises as `written_apart` does."""
        asked = page.request
        request = Request(asked.url, "apart", depth=asked.depth, origin=asked.origin)
        async with self._one_at_a_time:
            # Not before: those that wait for their turn would hold each page twice.
            message = msgspec.msgpack.encode(_Task("site", page.response, request, fields, fetched_at))
            kept = self._process is not None
            read = await self._read(message)
            if read is None and kept:
                read = await self._read(message)  # what the pages before left behind may be to blame
        if read is None:
            raise _too_complex(page.response)
        return msgspec.msgpack.decode(read, type=tuple[bytes, list[str]])

    async def close(self) -> None:
        """End the process. The next page starts another."""
        async with self._one_at_a_time:
            for process in (self._taken(), self._leaving):
                if process is not None:
                    await _ended(process)

    async def _read(self, message: bytes) -> bytes | None:
        """What the process makes of the page, None if it was too much."""
        process = self._taken() or await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for us: whoever ends the process makes the page look hostile
            limit=1 << 20,
        )
        assert process.stdin is not None and process.stdout is not None
        read = None
        try:
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(2 * SECONDS):
                    # Not drained: the page is in memory anyway, and who is cancelled while it drains into a
                    # process that has just died leaves an exception that nobody retrieves.
                    process.stdin.write(_head(message))
                    process.stdin.write(message)
                    size = int.from_bytes(await process.stdout.readexactly(_HEAD), "big")
                    read = await process.stdout.readexactly(size)
        finally:
            if read is None:
                await _ended(process)
        if read is None:
            return None
        self._process = process
        self._rest = asyncio.get_running_loop().call_later(KEPT, self._dismiss)
        return read

    def _taken(self) -> asyncio.subprocess.Process | None:
        if self._rest is not None:
            self._rest.cancel()
        process, self._process, self._rest = self._process, None, None
        return process

    def _dismiss(self) -> None:
        self._leaving = process = self._taken()
        if process is not None and process.stdin is not None:
            process.stdin.close()  # it ends by itself


async def _ended(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    # Its pipes are read to their ends, so that nothing of it stays open.
    with suppress(OSError):
        await process.communicate()


_COMMAND = (sys.executable, "-P", "-m", __name__)


def _too_complex(response: Response) -> FetchError:
    return FetchError(
        "page_too_complex",
        f"{response.url} ({len(response.body):,} bytes) cannot be read "
        f"within {MEMORY >> 20} MB of memory, {SECONDS} s and {MAX_WRITTEN:,} bytes",
    )


def _head(message: bytes) -> bytes:
    return len(message).to_bytes(_HEAD, "big")


def _main() -> None:
    for limit, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # elsewhere than on Linux only the time is bounded
            resource.setrlimit(limit, (most, most))
    with suppress(OSError), Path("/proc/self/oom_score_adj").open("w", encoding="ascii") as score:
        score.write("1000")  # where memory is short, this process goes and not the worker
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(_HEAD):
        # Seconds of CPU count from the start of the process, so each page gets its own beyond the last's.
        until = int(time.process_time()) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        written = _done(msgspec.msgpack.decode(source.read(int.from_bytes(head, "big")), type=_Task))
        if len(written) > MAX_WRITTEN:
            os._exit(1)
        target.write(_head(written))
        target.write(written)
        target.flush()
        del written
        if _held() > SMALL:
            break
    os._exit(0)  # nothing here is worth being freed one by one


def _held() -> int:
    """Bytes of memory; where there is no /proc the most that there ever were."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10
    return int(pages) * resource.getpagesize()


def _done(task: _Task) -> bytes:
    page = Page(task.request, task.response, apart=True)
    if task.kind == "site":
        links = page.links()
        item = site_item(page, task.fields, links, task.fetched_at)
        return msgspec.msgpack.encode((msgspec.json.encode(item), links))
    text = page.text() if task.kind == "text" else page.markdown(main=task.kind == "main")
    return text.encode("utf-8", "replace")


if __name__ == "__main__":
    _main()
