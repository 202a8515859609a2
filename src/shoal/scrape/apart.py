"""Reads heavy pages in a process of their own.

The parser keeps the interpreter for itself while it works, so a heavy page would stop every other visit, and
a hostile page can make it work without end. A process can have limits, and it can be killed: then only the
page that is to blame fails. Starting a process takes about 0.2 s, so the built-in scraper keeps it for the
pages that follow.
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
"""Bytes that the process may return, three times the largest page."""
KEPT = 10.0
"""Seconds that the process waits for another page."""
SMALL = 96 << 20
"""Bytes of memory that the process may still use after a page. If it uses more, it is replaced."""
_HEAD = 4
"""Bytes of the length that precedes each task and each result."""

_one_at_a_time = threading.Lock()
"""The handlers of a worker have at most one such process, however many heavy pages they read."""


class _Task(Struct, frozen=True):
    kind: str
    """`text`, `main` or `whole`: a text that `Page` makes; `site`: the built-in scraper's item and links."""
    response: Response
    request: Request
    fields: frozenset[str] | None = None
    fetched_at: str = ""


def text_apart(response: Response, kind: str) -> str:
    """Returns the text that `Page` makes of this response: `text`, `main` or `whole`. Blocks its thread, but
    not the interpreter.

    Raises FetchError `page_too_complex` about a page that needs too much memory or time.
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
    """Reads heavy pages for the built-in scraper, one at a time, in a process that it keeps for a while."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._leaving: asyncio.subprocess.Process | None = None

    async def site(
        self, page: Page, fields: frozenset[str] | None, fetched_at: str
    ) -> tuple[bytes, list[str]]:
        """Returns the item of a page, as JSON, and its links. Raises as `text_apart` does."""
        asked = page.request
        request = Request(asked.url, "apart", depth=asked.depth, origin=asked.origin)
        async with self._one_at_a_time:
            # Not before the lock: the pages that wait for it would be in memory twice.
            message = msgspec.msgpack.encode(_Task("site", page.response, request, fields, fetched_at))
            kept = self._process is not None
            read = await self._read(message)
            if read is None and kept:
                read = await self._read(message)  # in a new process: earlier pages may be to blame
        if read is None:
            raise _too_complex(page.response)
        return msgspec.msgpack.decode(read, type=tuple[bytes, list[str]])

    async def close(self) -> None:
        """End the process. The next page starts another."""
        async with self._one_at_a_time:
            for process in (self._take(), self._leaving):
                if process is not None:
                    await _kill(process)

    async def _read(self, message: bytes) -> bytes | None:
        """Returns what the process makes of the page; None if it failed, was too slow or returned too
        much."""
        process = self._take() or await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the worker: if it ended the process, the page would look hostile
            limit=1 << 20,
        )
        assert process.stdin is not None and process.stdout is not None
        read = None
        try:
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(2 * SECONDS):
                    # Not drained: the page is in memory anyway. And cancelling a drain into a process that
                    # has just died leaves an exception that is never retrieved.
                    process.stdin.write(_head(message))
                    process.stdin.write(message)
                    size = int.from_bytes(await process.stdout.readexactly(_HEAD), "big")
                    read = await process.stdout.readexactly(size)
        finally:
            if read is None:
                await _kill(process)
        if read is None:
            return None
        self._process = process
        self._rest = asyncio.get_running_loop().call_later(KEPT, self._dismiss)
        return read

    def _take(self) -> asyncio.subprocess.Process | None:
        if self._rest is not None:
            self._rest.cancel()
        process, self._process, self._rest = self._process, None, None
        return process

    def _dismiss(self) -> None:
        self._leaving = process = self._take()
        if process is not None and process.stdin is not None:
            process.stdin.close()  # it ends by itself


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    # Its pipes are read to their ends, so that none of them stays open.
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
        score.write("1000")  # if memory runs short, the kernel kills this process and not the worker
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(_HEAD):
        # The limit counts CPU seconds from the start of the process, so it is raised for each page.
        until = int(time.process_time()) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        result = _run(msgspec.msgpack.decode(source.read(int.from_bytes(head, "big")), type=_Task))
        if len(result) > MAX_WRITTEN:
            os._exit(1)
        target.write(_head(result))
        target.write(result)
        target.flush()
        del result
        if _memory_used() > SMALL:
            break
    os._exit(0)  # without freeing objects one by one


def _memory_used() -> int:
    """Returns the bytes of memory in use; without /proc, the most that were ever in use."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10
    return int(pages) * resource.getpagesize()


def _run(task: _Task) -> bytes:
    page = Page(task.request, task.response, apart=True)
    if task.kind == "site":
        links = page.links()
        item = site_item(page, task.fields, links, task.fetched_at)
        return msgspec.msgpack.encode((msgspec.json.encode(item), links))
    text = page.text() if task.kind == "text" else page.markdown(main=task.kind == "main")
    return text.encode("utf-8", "replace")


if __name__ == "__main__":
    _main()
