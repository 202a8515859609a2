"""Connections that are used again: what a server leaves on one is nobody's answer, and what the wire brings
is counted."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from threading import Thread
from typing import Any, TypeVar

import pytest

from shoal.errors import FetchError, class_of
from shoal.fetch.http import HttpFetcher
from shoal.fetch.port import Ask, Limits
from tests.rig.hostile import hostile_server

MB = 1024 * 1024
T = TypeVar("T")


def page(text: str, headers: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{headers}Content-Length: {len(text)}\r\n\r\n{text}".encode()


class Host:
    """Answers each path with itself, and says more whenever the test wants it to."""

    def __init__(self) -> None:
        self.url = ""
        self.accepted = 0
        self.asked: list[str] = []
        self.sent = 0
        self.after: Callable[[str], bytes] = lambda _path: b""
        """Sent together with the answer to a path, behind it."""
        self.before: Callable[[str], bytes] = lambda _path: b""
        """Sent when a path is asked for, in front of its answer."""
        self.answer: Callable[[str, asyncio.StreamWriter], Awaitable[None]] | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None] | None] = []

    async def speak(self, data: bytes, *, close: bool = False) -> None:
        """Send `data` on every open connection. On loopback it has arrived when this returns."""
        for writer in list(self._writers):
            writer.write(data)
            await writer.drain()
            if close:
                self._writers.remove(writer)
                writer.close()
                if self.url.startswith("http:"):  # TLS would wait for the other side's good-bye
                    await writer.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)
        self._tasks.append(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                self.asked.append(path)
                if self.answer is not None:
                    await self.answer(path, writer)
                    continue
                writer.write(self.before(path) + page(path) + self.after(path))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            if writer in self._writers:
                self._writers.remove(writer)
            writer.close()

    async def end(self) -> None:
        tasks = [task for task in self._tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def opened(scheme: str) -> AsyncIterator[tuple[Host, HttpFetcher]]:
    host = Host()
    async with hostile_server(tls=scheme == "https") as hostile:
        context = None
        if scheme == "https":
            context = hostile.contexts["good"]
        listener = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=context)
        host.url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        fetcher = HttpFetcher(ca_file=hostile.ca_file or None)
        try:
            yield host, fetcher
        finally:
            await fetcher.close()
            listener.close()
            await host.end()


@pytest.fixture(params=["http", "https"])
async def both(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Host, HttpFetcher]]:
    async with opened(request.param) as made:
        yield made


@pytest.fixture
async def plain() -> AsyncIterator[tuple[Host, HttpFetcher]]:
    async with opened("http") as made:
        yield made


async def fetched(fetcher: HttpFetcher, host: Host, path: str, **limits: Any) -> str:
    ask = Ask(host.url + path, allow_private=True, limits=Limits(**limits))
    return (await fetcher.fetch(ask)).body.decode()


STRAY = {
    "an answer": page("/not-asked-for"),
    "a line break": b"\r\n",
    "a timeout": b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "noise": bytes(range(128, 256)),
}


@pytest.mark.parametrize("stray", STRAY.values(), ids=STRAY)
@pytest.mark.parametrize("close", [False, True], ids=["", "then closes"])
async def test_what_comes_while_nobody_asks_is_nobody_s_answer(
    both: tuple[Host, HttpFetcher], stray: bytes, close: bool
) -> None:
    host, fetcher = both
    for n in range(20):
        assert await fetched(fetcher, host, f"/{n}") == f"/{n}"
        await host.speak(stray, close=close)
    assert host.asked == [f"/{n}" for n in range(20)]  # nothing was asked for twice either


@pytest.mark.parametrize("stray", STRAY.values(), ids=STRAY)
async def test_what_comes_right_behind_an_answer_is_not_the_next_one(
    both: tuple[Host, HttpFetcher], stray: bytes
) -> None:
    host, fetcher = both
    host.after = lambda _path: stray
    for n in range(20):
        assert await fetched(fetcher, host, f"/{n}") == f"/{n}"
    assert host.asked == [f"/{n}" for n in range(20)]


def talk_in_two_records(connection: socket.socket, context: ssl.SSLContext, asked: list[str]) -> None:
    """Answers each path with itself and then another, in TLS records of their own that travel together."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(coming, going, server_side=True)

    def done(step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                connection.sendall(going.read())
                coming.write(connection.recv(65536) or b"?")  # an end is nothing that TLS could read

    with connection, suppress(OSError):
        done(tls.do_handshake)
        while True:
            path = done(lambda: tls.read(65536)).split(b" ", 2)[1].decode()
            asked.append(path)
            tls.write(page(path))
            tls.write(page("/not-asked-for"))
            connection.sendall(going.read())


async def test_an_answer_that_tls_has_read_already_is_not_the_next_one() -> None:
    asked: list[str] = []
    async with hostile_server(tls=True) as hostile:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def accept() -> None:
                with suppress(OSError):
                    while True:
                        talk = (listener.accept()[0], hostile.contexts["good"], asked)
                        Thread(target=talk_in_two_records, args=talk, daemon=True).start()

            Thread(target=accept, daemon=True).start()
            fetcher = HttpFetcher(ca_file=hostile.ca_file)
            try:
                for n in range(20):
                    url = f"https://127.0.0.1:{listener.getsockname()[1]}/{n}"
                    assert (await fetcher.fetch(Ask(url, allow_private=True))).body.decode() == f"/{n}"
            finally:
                await fetcher.close()
                listener.shutdown(socket.SHUT_RDWR)
    assert asked == ["/0", "/1", "/1", *(f"/{n}" for n in range(2, 20))]


async def test_a_connection_that_was_closed_is_not_asked(both: tuple[Host, HttpFetcher]) -> None:
    host, fetcher = both
    for n in range(5):
        assert await fetched(fetcher, host, f"/{n}") == f"/{n}"
        await host.speak(b"", close=True)
    assert (host.accepted, len(host.asked)) == (5, 5)


async def test_a_quiet_connection_is_kept(both: tuple[Host, HttpFetcher]) -> None:
    host, fetcher = both
    for n in range(20):
        assert await fetched(fetcher, host, f"/{n}") == f"/{n}"
    assert host.accepted == 1


async def test_who_spoke_out_of_turn_once_is_given_a_connection_for_each_request(
    plain: tuple[Host, HttpFetcher],
) -> None:
    host, fetcher = plain
    await fetched(fetcher, host, "/1")
    await host.speak(page("/not-asked-for"))
    for n in range(2, 6):
        assert await fetched(fetcher, host, f"/{n}") == f"/{n}"
    assert host.accepted == 5


class Counted:
    """A gate that lets everything out, and counts."""

    sent = 0

    def may_connect(self) -> bool:
        return True

    def may_send(self) -> bool:
        self.sent += 1
        return True

    def has_room(self, size: int) -> bool:
        return True


async def test_nonsense_in_front_of_an_answer_earns_another_connection(
    plain: tuple[Host, HttpFetcher],
) -> None:
    host, fetcher = plain
    host.before = lambda path: b"\r\n" if path == "/odd" and host.accepted == 1 else b""
    await fetched(fetcher, host, "/1")
    gate = Counted()
    response = await fetcher.fetch(Ask(f"{host.url}/odd", allow_private=True, gate=gate))
    assert response.body == b"/odd"
    assert (host.accepted, host.asked) == (2, ["/1", "/odd", "/odd"])
    assert gate.sent == 2  # the host was asked twice, and the pace hears of it


async def test_nonsense_on_a_new_connection_earns_nothing(plain: tuple[Host, HttpFetcher]) -> None:
    host, fetcher = plain
    host.before = lambda _path: b"\r\n"
    with pytest.raises(FetchError) as caught:
        await fetched(fetcher, host, "/odd")
    assert caught.value.error in ("not_http", "protocol_error")
    assert host.asked == ["/odd"]


async def test_the_gate_is_not_asked_for_a_connection_that_is_not_used(
    plain: tuple[Host, HttpFetcher],
) -> None:
    host, fetcher = plain
    await fetched(fetcher, host, "/1")
    await host.speak(b"\r\n")
    gate = Counted()
    await fetcher.fetch(Ask(f"{host.url}/2", allow_private=True, gate=gate))
    assert gate.sent == 1


# What the wire brings


def flood(block: bytes, head: str = "Transfer-Encoding: chunked\r\n") -> Callable[..., Awaitable[None]]:
    async def answer(host: Host, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode())
        while not writer.transport.is_closing():
            writer.write(block)
            await writer.drain()
            await asyncio.sleep(0)  # or a lost connection is never heard of: drain does not wait for it
            host.sent += len(block)

    return answer


FRAMES = {
    "extensions": b"1;" + b"x" * 60_000 + b"\r\ny\r\n",
    "short extensions": b"1;x=yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\nz\r\n" * 1000,
    "an extension without end": b"1;" + b"x" * 60_000,
    "two bytes": b"2\r\nab\r\n" * 5000,
}


@pytest.mark.parametrize("block", FRAMES.values(), ids=FRAMES)
async def test_frames_count(both: tuple[Host, HttpFetcher], block: bytes) -> None:
    host, fetcher = both
    await fetched(fetcher, host, "/first")  # the second time the connection has carried bytes before
    flooding = flood(block * (1 + 60_000 // len(block)))
    host.answer = lambda _path, writer: flooding(host, writer)
    for _ in range(2):
        host.sent = 0
        with pytest.raises(FetchError) as caught:
            await fetched(fetcher, host, "/endless", body=MB // 4)
        assert caught.value.error in ("body_too_large", "protocol_error")
        # The limit, what is read between two looks, and what the system takes in for us and for the server.
        assert host.sent < Limits(body=MB // 4).wire + 20 * MB


async def test_two_byte_chunks_take_no_more_memory_than_their_page(plain: tuple[Host, HttpFetcher]) -> None:
    host, fetcher = plain
    size = 600_000

    async def answer(_path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(size // 20_000):
            writer.write(b"2\r\nab\r\n" * 10_000)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    host.answer = answer
    tracemalloc.start()
    try:
        text = await fetched(fetcher, host, "/", body=10 * MB)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == "ab" * (size // 20_000 * 10_000)
    assert most < 8 * size


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_an_honest_page_in_small_chunks_comes(plain: tuple[Host, HttpFetcher], size: int) -> None:
    host, fetcher = plain
    text = "".join(f"{n} " for n in range(20_000))

    async def answer(_path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            writer.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    host.answer = answer
    assert await fetched(fetcher, host, "/", body=len(text)) == text


async def test_the_largest_body_comes_on_a_used_connection(both: tuple[Host, HttpFetcher]) -> None:
    host, fetcher = both
    body = "x" * (3 * MB)

    async def answer(_path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(page(body))
        await writer.drain()

    host.answer = answer
    for _ in range(5):
        assert await fetched(fetcher, host, "/", body=len(body)) == body
    assert host.accepted == 1


# What ends too early


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x03\x00\x7a\x02\x00\x00"], ids=["at once", "inside"])
async def test_an_end_inside_the_handshake_is_worth_another_try(hello: bytes) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(hello)
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with listener:
        fetcher = HttpFetcher()
        url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch(Ask(url, allow_private=True))
        await fetcher.close()
    assert caught.value.error == "reset"
    assert class_of(caught.value.error).retry
