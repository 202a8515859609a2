"""A body waits until its gate has room for it, and nothing but a little of it is kept meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shoal.errors import FetchError
from shoal.fetch.guard import Guard
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Limits
from shoal.fetch.slot import LIGHT

LARGE = b"x" * (3 * 1024 * 1024)


class Door:
    """A gate that has room when the test says so."""

    def __init__(self) -> None:
        self.open = False
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def may_connect(self) -> bool:
        return True

    def may_send(self) -> bool:
        return True

    def has_room(self, size: int) -> bool:
        self._loop.call_soon_threadsafe(self.asked.set)
        return self.open


class Server:
    def __init__(self) -> None:
        self.head = b""
        self.body = b""
        self.announces = True
        self.url = ""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        length = f"Content-Length: {len(self.body)}\r\n".encode() if self.announces else b""
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\n" + self.head + length + b"\r\n" + self.body)
            await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.talk, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
    yield made
    listening.close()


Fetch = Callable[[Door], Awaitable[bytes]]


@pytest.fixture
async def fetch(server: Server) -> AsyncIterator[Fetch]:
    fetcher = HttpFetcher(guard=Guard(allow={server.url.split("/")[2]}))

    async def body(door: Door) -> bytes:
        limits = Limits(first_byte=1, idle=1, total=2, min_rate=10**6, rate_window=1)
        return (await fetcher.fetch(Ask(server.url, limits=limits, gate=door))).body

    yield body
    await fetcher.close()


async def test_a_large_body_stands_still_until_there_is_room(server: Server, fetch: Fetch) -> None:
    server.body = LARGE
    door = Door()
    fetching = asyncio.ensure_future(fetch(door))
    await door.asked.wait()
    # Longer than any of its limits: what is waited for room is not the host's fault.
    done, _ = await asyncio.wait([fetching], timeout=3)
    assert not done
    door.open = True
    assert await fetching == LARGE


async def test_a_packed_body_is_not_unpacked_before_there_is_room(server: Server, fetch: Fetch) -> None:
    server.head, server.body = b"Content-Encoding: gzip\r\n", gzip.compress(LARGE)
    assert len(server.body) < LIGHT
    door = Door()
    fetching = asyncio.ensure_future(fetch(door))
    await door.asked.wait()
    done, _ = await asyncio.wait([fetching], timeout=1)
    assert not done
    door.open = True
    assert await fetching == LARGE


async def test_a_small_body_needs_no_room(server: Server, fetch: Fetch) -> None:
    server.body = b"x" * 1000
    door = Door()
    assert await fetch(door) == server.body
    assert not door.asked.is_set()


async def test_what_is_too_large_is_refused_after_the_wait_too(server: Server, fetch: Fetch) -> None:
    server.body = b"x" * (10 * 1024 * 1024 + 1)
    server.announces = False
    door = Door()
    fetching = asyncio.ensure_future(fetch(door))
    await door.asked.wait()
    door.open = True
    with pytest.raises(FetchError, match="larger than"):
        await fetching


@pytest.mark.parametrize("packed", [True, False])
async def test_one_that_waits_for_room_can_be_called_off(server: Server, fetch: Fetch, packed: bool) -> None:
    server.head, server.body = (
        (b"Content-Encoding: gzip\r\n", gzip.compress(LARGE)) if packed else (b"", LARGE)
    )
    door = Door()
    fetching = asyncio.ensure_future(fetch(door))
    await door.asked.wait()
    fetching.cancel()
    await asyncio.wait([fetching])
    open_door = Door()
    open_door.open = True
    assert await fetch(open_door) == LARGE
