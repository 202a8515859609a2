"""Loopback sites: whole web sites on this machine, for tests, examples and benchmarks.

    with LoopbackSite(generated_site(pages=200, hosts=5)) as site:
        crawl(site.url)
        assert site.expected_urls() <= {hit.url for hit in site.log()}
        assert min_gap(by_host(site.log())["127.0.0.1"]) >= 1.0

A site is a pure function from a call to a reply, so the URLs that a crawl must find can be computed. Every
site also serves the paths of `behaviours`. Hosts are loopback addresses (127.0.0.1, 127.0.0.2…) on one port:
each is a lane of its own, and no name needs to be resolved. The server keeps the log, so pace and overlap are
measured where the visited host sees them.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import mimetypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from msgspec import Struct

HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
WORKER_HEADER = "x-shoal-worker"
"""The log records the value of this request header: the name of the worker."""
LOOPBACK = "127.0.0"
_MAX_HEAD = 64 * 1024
_MAX_HOSTS = 250
_SO_TIMESTAMPNS = 35
"""From asm-generic/socket.h: the socket option, and the type of the control message that it adds."""


class Call(Struct, frozen=True):
    """One request as the server received it. `address` is the host that received it: 127.0.0.N."""

    method: str
    path: str
    """Including the query."""
    headers: dict[str, str]
    """By lower-case name."""
    address: str
    port: int
    body: bytes = b""

    @property
    def bare(self) -> str:
        """The path without the query."""
        return self.path.partition("?")[0]

    def query(self, name: str, default: str = "") -> str:
        """Returns the first value of a query parameter."""
        return parse_qs(urlsplit(self.path).query).get(name, [default])[0]


class Reply(Struct, frozen=True):
    """The response, sent after `delay` seconds. Status 0 closes the connection without one.

    With an `etag`, a client that has it gets 304.
    """

    status: int = 200
    body: bytes = b""
    type: str = HTML
    headers: tuple[tuple[str, str], ...] = ()
    delay: float = 0.0
    etag: str = ""


Responder = Callable[[Call], Reply]


class Hit(Struct, frozen=True):
    """One request in the log. Times are CLOCK_MONOTONIC, the same for all processes here.

    `start` is when its head arrived, as recorded by the kernel, so it is right however busy this server is.
    `end` is when the reply was sent, or when the client disconnected: then `status` is 0.
    """

    start: float
    end: float
    address: str
    host: str
    method: str
    path: str
    status: int
    connection: int
    """Number of the connection, so that reuse is visible."""
    worker: str = ""
    agent: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}{self.path}"


def by_host(hits: Iterable[Hit]) -> dict[str, list[Hit]]:
    """Returns the hits of each address, in order of their start."""
    found: dict[str, list[Hit]] = {}
    for hit in sorted(hits, key=lambda hit: hit.start):
        found.setdefault(hit.address, []).append(hit)
    return found


def min_gap(hits: Iterable[Hit]) -> float:
    """Returns the shortest time between two starts; infinity for fewer than two hits."""
    starts = sorted(hit.start for hit in hits)
    return min((after - before for before, after in pairwise(starts)), default=float("inf"))


def max_overlap(hits: Iterable[Hit]) -> int:
    """Returns the maximum number of hits in flight at the same time. A hit that ends when another starts does
    not overlap it."""
    moments = sorted(moment for hit in hits for moment in ((hit.start, 1), (hit.end, -1)))
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


class GeneratedSite(Struct, frozen=True, tag="generated"):
    """A graph of pages that is computed, not stored. See `generated_site`."""

    pages: int = 100
    links: int = 5
    seed: int = 0
    hosts: int = 1
    errors: float = 0.0
    error_status: int = 404
    latency: float = 0.0
    size: int = 500
    network: str = LOOPBACK
    """The first three parts of its addresses."""

    def __call__(self, call: Call) -> Reply:
        number = self.number_of(call.bare)
        if number is None or self.address_of(number) != call.address:
            return Reply(404, b"no such page", TEXT)
        if self.status_of(number) != 200:
            return Reply(self.status_of(number), b"out of order", TEXT, delay=self.latency)
        etag = f'"{self.seed}-{number}"'
        return Reply(200, self.body_of(number, call.port), etag=etag, delay=self.latency)

    def number_of(self, path: str) -> int | None:
        """Returns the number of the page at a path; None if there is none."""
        if path == "/":
            return 0
        digits = path.removeprefix("/page/")
        if digits == path or not digits.isdecimal() or len(digits) > 12 or digits.startswith("0"):
            return None
        number = int(digits)
        return number if number < self.pages else None

    def address_of(self, number: int) -> str:
        return f"{self.network}.{number % self.hosts + 1}"

    def url_of(self, number: int, port: int) -> str:
        path = f"/page/{number}" if number else "/"
        return f"http://{self.address_of(number)}:{port}{path}"

    def links_of(self, number: int) -> list[int]:
        """Returns the links of a page. Half of them form a tree that reaches every page, the others lead
        anywhere.
        """
        branches = (self.links + 1) // 2
        first = number * branches + 1
        tree = list(range(first, min(first + branches, self.pages)))
        noise = self._noise("link", number, (self.links - branches) * 4)
        return tree + [
            int.from_bytes(noise[at : at + 4], "big") % self.pages for at in range(0, len(noise), 4)
        ]

    def status_of(self, number: int) -> int:
        """Returns the status of a page. The first is always 200: otherwise there would be no site."""
        if not number or not self.errors:
            return 200
        share = int.from_bytes(self._noise("error", number, 4), "big") / 2**32
        return self.error_status if share < self.errors else 200

    def body_of(self, number: int, port: int) -> bytes:
        anchors = "\n".join(
            f'<li><a href="{self.url_of(other, port)}">Page {other}</a></li>'
            for other in self.links_of(number)
        )
        filler = f"The tide brings page {number} of {self.pages}. "
        text = (filler * (self.size // len(filler) + 1))[: self.size]
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Page {number}</title>\n'
            f'<meta name="description" content="Generated page {number}"></head>\n'
            f"<body><h1>Page {number}</h1><p>{text}</p>\n<ul>\n{anchors}\n</ul></body></html>\n"
        ).encode()

    def expected(self, port: int) -> dict[str, int]:
        """Returns every URL that a crawl from the first page reaches, with its status."""
        found = {0: 200}
        waiting = [0]
        while waiting:
            for other in self.links_of(waiting.pop()):
                if other not in found:
                    found[other] = self.status_of(other)
                    if found[other] == 200:
                        waiting.append(other)
        return {self.url_of(number, port): status for number, status in found.items()}

    def _noise(self, what: str, number: int, size: int) -> bytes:
        noise = b""
        while len(noise) < size:
            noise += blake2b(f"{self.seed} {what} {number} {len(noise)}".encode(), digest_size=64).digest()
        return noise[:size]


def generated_site(
    pages: int = 100,
    links: int = 5,
    seed: int = 0,
    hosts: int = 1,
    errors: float = 0.0,
    *,
    error_status: int = 404,
    latency: float = 0.0,
    size: int = 500,
) -> GeneratedSite:
    """Returns a site of `pages` pages with `links` links each, spread over `hosts` addresses.

    `errors` is the share of pages that always return `error_status`, `latency` the seconds until each
    response, `size` the number of characters of text on a page. Equal arguments give equal sites.
    """
    if pages < 1 or links < 1 or not 1 <= hosts <= _MAX_HOSTS:
        raise ValueError(f"a site needs a page, a link and 1 to {_MAX_HOSTS} hosts")
    return GeneratedSite(pages, links, seed, hosts, errors, error_status, latency, size)


class StaticSite(Struct, frozen=True, tag="static"):
    """Serves the files below a directory, with ETags."""

    root: str

    def __call__(self, call: Call) -> Reply:
        root = Path(self.root).resolve()
        try:
            path = root.joinpath(unquote(call.bare).lstrip("/")).resolve()
        except ValueError:
            return Reply(400, b"bad path", TEXT)
        if not path.is_relative_to(root):
            return Reply(404, b"no such file", TEXT)
        if path.is_dir():
            if not call.bare.endswith("/"):
                return Reply(301, headers=(("Location", f"{call.bare}/"),))
            path /= "index.html"
        try:
            body, stat = path.read_bytes(), path.stat()
        except OSError:
            return Reply(404, b"no such file", TEXT)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        kind = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        return Reply(200, body, kind, etag=f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"')


def behaviours(call: Call) -> Reply | None:
    """Returns the reply of paths with a behaviour, which every site has; None for any other path.

    /status/CODE            that status
    /redirect/N             N redirects (302) to /; /redirect/to?url=U&code=301 redirects to U
    /slow/SECONDS           responds after that delay
    /retry-after/SECONDS    503 (or ?code=429) with Retry-After
    /etag/NAME              200 with an ETag, 304 to a client that has it
    /size/BYTES             a body of that size
    /echo                   the request's headers as JSON
    /drop                   closes the connection without a response
    """
    _, first, rest = (*call.bare.split("/", 2), "", "")[:3]
    if first == "drop" and not rest:
        return Reply(0)
    if first == "echo" and not rest:
        return Reply(200, json.dumps(call.headers).encode(), "application/json")
    if first == "etag" and rest:
        return Reply(200, f"<title>{rest}</title>".encode(), etag=f'"{rest}"')
    if first == "redirect" and rest == "to":
        return _redirect(call.query("url", "/"), int(call.query("code", "302")))
    if first == "slow" and _is_number(rest):
        return Reply(200, f"<title>slow {rest}</title>".encode(), delay=float(rest))
    if first not in ("status", "redirect", "retry-after", "size") or not rest.isdecimal():
        return None
    number = int(rest)
    if first == "status":
        return Reply(number, f"<title>status {number}</title>".encode()) if 100 <= number < 1000 else None
    if first == "redirect":
        return _redirect(f"/redirect/{number - 1}" if number > 1 else "/")
    if first == "retry-after":
        return Reply(int(call.query("code", "503")), b"later", TEXT, headers=(("Retry-After", rest),))
    return Reply(200, b"x" * number, TEXT)


def _redirect(to: str, status: int = 302) -> Reply:
    return Reply(status, headers=(("Location", to),))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


class _Server:
    """The sockets, the replies and the log. Belongs to one event loop."""

    def __init__(self, respond: Responder, hosts: int, robots: str | None, log_file: Path | None) -> None:
        self._respond = respond
        self._hosts = hosts
        self._robots = robots
        self._file: IO[bytes] | None = log_file.open("ab") if log_file else None
        self._servers: list[asyncio.Server] = []
        self._encoder = msgspec.json.Encoder()
        self.open: set[_Connection] = set()
        self.hits: list[Hit] = []
        self.connections = 0
        self.port = 0

    async def start(self, port: int = 0) -> None:
        network = getattr(self._respond, "network", LOOPBACK)
        sockets = _bind(network, self._hosts, port)
        self.port = int(sockets[0].getsockname()[1])
        loop = asyncio.get_running_loop()
        for sock in sockets:
            server = await loop.create_server(lambda: _Connection(self), sock=sock, backlog=1024)
            self._servers.append(server)

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for connection in list(self.open):
            connection.abort()
        # One iteration of the loop, in which the transports close their sockets.
        await asyncio.sleep(0)
        for server in self._servers:
            await server.wait_closed()
        if self._file:
            self._file.close()

    def answer(self, call: Call) -> Reply:
        try:
            if call.bare == "/robots.txt" and self._robots is not None:
                return Reply(200, self._robots.encode(), TEXT)
            return behaviours(call) or self._respond(call)
        except Exception as error:  # a mistake in a test's responder: show it in the response
            return Reply(500, f"{type(error).__name__}: {error}".encode(), TEXT)

    def record(self, hit: Hit) -> None:
        self.hits.append(hit)
        if self._file:
            self._file.write(self._encoder.encode(hit) + b"\n")

    def flush(self) -> None:
        if self._file and not self._file.closed:
            self._file.flush()


def _bind(network: str, hosts: int, port: int) -> list[socket.socket]:
    """Returns one bound socket per host, all on one port that is free on each of them."""
    for attempt in range(50):
        sockets: list[socket.socket] = []
        wanted = port
        try:
            for number in range(1, hosts + 1):
                sock: socket.socket = _Stamped()
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # Connections inherit it: what comes before they are accepted has a stamp too.
                with suppress(OSError):  # no such option: only Linux has it
                    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                sock.bind((f"{network}.{number}", wanted))
                wanted = sock.getsockname()[1]
        except OSError as error:
            for sock in sockets:
                sock.close()
            if port or error.errno != errno.EADDRINUSE or attempt == 49:
                raise
            continue
        return sockets
    raise AssertionError("the loop returns or raises")


class _Stamped(socket.socket):
    """Knows when the kernel received the data of the last read. With these timestamps the log is right even
    if the server was delayed and read the data late."""

    arrived = 0.0
    """CLOCK_MONOTONIC; 0 if the kernel gives no timestamps."""

    def accept(self) -> tuple[_Stamped, Any]:
        plain, address = super().accept()
        return _Stamped(fileno=plain.detach()), address

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data, notes, _, _ = self.recvmsg(size, 128, flags)
        for level, kind, stamp in notes:
            if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                seconds, nanoseconds = struct.unpack_from("qq", stamp)
                self.arrived = _monotonic(seconds + nanoseconds / 1e9)
        return data


def _monotonic(moment: float) -> float:
    """Returns a recent moment of the wall clock as CLOCK_MONOTONIC."""
    while True:
        before = time.monotonic()
        ago = time.time() - moment
        after = time.monotonic()
        if after - before < 0.001:  # otherwise the process was interrupted between reading the two clocks
            # If the wall clock was set meanwhile, the result must not be a moment of another day.
            return after - min(max(ago, 0.0), 5.0)


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, one request at a time; pipelined requests wait in the buffer."""

    __slots__ = (
        "_address",
        "_buffer",
        "_call",
        "_number",
        "_server",
        "_socket",
        "_start",
        "_timer",
        "_transport",
    )

    _transport: asyncio.Transport
    _socket: _Stamped

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._buffer = b""
        self._address = ""
        self._number = 0
        self._call: Call | None = None
        self._start = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._address = transport.get_extra_info("sockname")[0]
        self._socket = transport.get_extra_info("socket")._sock
        self._server.connections += 1
        self._number = self._server.connections
        self._server.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open.discard(self)
        if self._timer:
            self._timer.cancel()
        if self._call:
            self._record(self._call, 0)

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._call is None and self._buffer and not self._transport.is_closing():
            call = self._parse()
            if call is None:
                return
            self._call, self._start = call, self._socket.arrived or time.monotonic()
            reply = self._server.answer(call)
            if reply.delay > 0:
                self._timer = asyncio.get_running_loop().call_later(reply.delay, self._late, call, reply)
                return
            self._send(call, reply)

    def _late(self, call: Call, reply: Reply) -> None:
        self._timer = None
        self._send(call, reply)
        self.data_received(b"")

    def _parse(self) -> Call | None:
        """Returns the next whole request, or None if more bytes are needed (or it was refused)."""
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            if len(head) > _MAX_HEAD:
                self._refuse(431)
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self._refuse(400)
            return None
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        if words[2] == "HTTP/1.0":
            headers.setdefault("connection", "close")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or "transfer-encoding" in headers:
            self._refuse(400 if not length.isdecimal() else 501)
            return None
        if len(rest) < int(length):
            return None
        self._buffer = rest[int(length) :]
        path = (
            words[1]
            if words[1].startswith("/")
            else urlsplit(words[1])._replace(scheme="", netloc="").geturl()
        )
        return Call(words[0], path, headers, self._address, self._server.port, rest[: int(length)])

    def _refuse(self, status: int) -> None:
        self._transport.write(
            f"HTTP/1.1 {status} no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        self._transport.close()

    def _send(self, call: Call, reply: Reply) -> None:
        status, body = reply.status, reply.body
        if reply.etag and status == 200 and _has(call.headers.get("if-none-match", ""), reply.etag):
            status, body = 304, b""
        # Before the bytes are sent: every response that a client has seen is in the log.
        self._call = None
        self._record(call, status)
        if not status:
            self._transport.abort()
            return
        last = call.headers.get("connection", "").lower() == "close"
        self._transport.write(_head(status, reply, body, last) + (b"" if call.method == "HEAD" else body))
        if last:
            self._transport.close()

    def _record(self, call: Call, status: int) -> None:
        headers = call.headers
        host = headers.get("host", "")
        worker, agent = headers.get(WORKER_HEADER, ""), headers.get("user-agent", "")
        moment = time.monotonic()
        hit = Hit(
            self._start,
            moment,
            self._address,
            host,
            call.method,
            call.path,
            status,
            self._number,
            worker,
            agent,
        )
        self._server.record(hit)


def _has(tags: str, etag: str) -> bool:
    return tags.strip() == "*" or etag in [tag.strip().removeprefix("W/") for tag in tags.split(",")]


def _head(status: int, reply: Reply, body: bytes, last: bool) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {status} {phrase}"]
    if status >= 200 and status not in (204, 304):
        lines += [f"Content-Type: {reply.type}", f"Content-Length: {len(body)}"]
    if reply.etag:
        lines.append(f"ETag: {reply.etag}")
    lines += [f"{name}: {value}" for name, value in reply.headers]
    if last:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


class _Site:
    """The interface of a running site, in this process or another."""

    port: int

    def __init__(self, respond: Responder, hosts: int | None) -> None:
        self._respond = respond
        self.hosts = hosts or int(getattr(respond, "hosts", 1))
        self.port = 0

    @property
    def url(self) -> str:
        """The first page of the first host."""
        return f"http://127.0.0.1:{self.port}/"

    @property
    def urls(self) -> list[str]:
        """The first page of each host."""
        return [f"http://127.0.0.{number}:{self.port}/" for number in range(1, self.hosts + 1)]

    def expected(self) -> dict[str, int]:
        """Returns every URL that a crawl of a generated site reaches, with its status."""
        if not isinstance(self._respond, GeneratedSite):
            raise TypeError("only a generated site knows what a crawl must find")
        return self._respond.expected(self.port)

    def expected_urls(self) -> set[str]:
        """Returns the URLs of `expected`, errors included."""
        return set(self.expected())

    def log(self) -> list[Hit]:
        """Returns all requests that have ended, in order of their start."""
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def start(self) -> Self:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class LoopbackSite(_Site):
    """A site served from a thread of this process. `stop` leaves no thread and no socket."""

    def __init__(
        self,
        respond: Responder,
        *,
        hosts: int | None = None,
        robots: str | None = None,
        log_file: Path | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(respond, hosts)
        self._robots = robots
        self._log_file = log_file
        self._wanted = port
        self._server: _Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Start the site, which listens when this returns. Harmless if it is running already."""
        if self._loop is not None:
            return self
        loop = asyncio.new_event_loop()
        server = _Server(self._respond, self.hosts, self._robots, self._log_file)
        thread = threading.Thread(target=loop.run_forever, name="loopback-site", daemon=True)
        thread.start()
        self._server, self._loop, self._thread = server, loop, thread
        try:
            asyncio.run_coroutine_threadsafe(server.start(self._wanted), loop).result(30)
        except BaseException:
            self.stop()
            raise
        self.port = server.port
        return self

    def log(self) -> list[Hit]:
        if self._server is None:
            return []
        self._server.flush()
        return sorted(self._server.hits, key=lambda hit: hit.start)

    def clear(self) -> None:
        """Clear the log so far (not the file)."""
        if self._server is not None:
            self._server.hits.clear()

    def stop(self) -> None:
        """Stop the site; its log stays readable. Harmless if it is not running."""
        loop, thread, server = self._loop, self._thread, self._server
        if loop is None or thread is None or server is None:
            return
        self._loop = self._thread = None
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class ProcessSite(_Site):
    """A site served by a process of its own, so that it does not share our interpreter.

    The process ends with `stop`, and also when its parent dies, for whatever reason.
    """

    def __init__(
        self,
        respond: GeneratedSite | StaticSite,
        *,
        hosts: int | None = None,
        robots: str | None = None,
        log_file: Path | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(respond, hosts)
        self._options = _Options(respond, self.hosts, robots, str(log_file) if log_file else "", port)
        self._process: subprocess.Popen[bytes] | None = None
        self._last: list[Hit] = []

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> Self:
        """Start the site, which listens when this returns. Harmless if it is running already."""
        if self._process is not None:
            return self
        options = msgspec.json.encode(self._options).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.demo.site", "--options", options, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.port = int(self._line(self._process))
        except BaseException:
            self.stop()
            raise
        return self

    def log(self) -> list[Hit]:
        process = self._process
        if process is None:
            return self._last
        assert process.stdin is not None
        process.stdin.write(b"log\n")
        process.stdin.flush()
        return msgspec.json.decode(self._line(process), type=list[Hit])

    def stop(self) -> None:
        """Stop the site; its log stays readable. Harmless if it is not running."""
        process = self._process
        if process is None:
            return
        if self.port:
            # If the process was killed, its log is lost and there is nothing left to stop.
            with suppress(OSError, RuntimeError):
                self._last = self.log()
        self._process = None
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()  # which ends the process
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise RuntimeError(f"the site's process ended with {process.wait(10)}")
        return line


def serve_in_process(
    site: GeneratedSite | StaticSite,
    *,
    hosts: int | None = None,
    robots: str | None = None,
    log_file: Path | None = None,
    port: int = 0,
) -> ProcessSite:
    """Start `site` in a process of its own. Use it as a context manager, or call `stop`."""
    return ProcessSite(site, hosts=hosts, robots=robots, log_file=log_file, port=port).start()


class _Options(Struct, frozen=True):
    site: GeneratedSite | StaticSite
    hosts: int
    robots: str | None = None
    log_file: str = ""
    port: int = 0


def _die_with(parent: int) -> None:
    """Let the kernel kill us when the thread that started us ends. The pipe on standard input
    does the same when all is well; this also holds if somebody else inherited its other end."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):  # only Linux has it
        libc.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the parent was gone before we started")


async def _serve(options: _Options, port_file: Path | None, commands: IO[bytes] | None) -> None:
    log_file = Path(options.log_file) if options.log_file else None
    server = _Server(options.site, options.hosts, options.robots, log_file)
    await server.start(options.port)
    if port_file:
        fresh = port_file.with_name(f"{port_file.name}.tmp")
        fresh.write_text(str(server.port))
        fresh.replace(port_file)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    try:
        if commands is None:
            await asyncio.Event().wait()
        else:
            await _obey(commands, server)
    finally:
        await server.stop()


async def _obey(commands: IO[bytes], server: _Server) -> None:
    """For each line of standard input, until its end, write the log on one line."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), commands)
    while await reader.readline():
        server.flush()
        hits = sorted(server.hits, key=lambda hit: hit.start)
        sys.stdout.buffer.write(msgspec.json.encode(hits) + b"\n")
        sys.stdout.buffer.flush()
    pipe.close()


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m shoal.demo.site`: serve a generated site or a directory until interrupted."""
    parser = ArgumentParser(prog="python -m shoal.demo.site", description=main.__doc__)
    parser.add_argument("--root", help="serve the files below this directory instead")
    parser.add_argument("--pages", type=int, default=100)
    parser.add_argument("--links", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--errors", type=float, default=0.0, help="share of pages that return 404")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds until each response")
    parser.add_argument("--network", default=LOOPBACK, help="first three parts of the addresses")
    parser.add_argument("--robots", help="text of robots.txt")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 for any free one")
    parser.add_argument("--port-file", type=Path, help="file that receives the port once the site listens")
    parser.add_argument("--log-file", default="", help="one JSON line per request")
    parser.add_argument("--options", help="all of the above as JSON; used by serve_in_process")
    parser.add_argument("--parent", type=int, help="end with this process; take commands on stdin")
    given = parser.parse_args(argv)
    if given.parent:
        _die_with(given.parent)
    if given.options:
        options = msgspec.json.decode(given.options, type=_Options)
    else:
        site = (
            StaticSite(given.root)
            if given.root
            else generated_site(
                given.pages, given.links, given.seed, given.hosts, given.errors, latency=given.latency
            )
        )
        if isinstance(site, GeneratedSite):
            site = msgspec.structs.replace(site, network=given.network)
        options = _Options(site, given.hosts, given.robots, given.log_file, given.port)
    try:
        asyncio.run(_serve(options, given.port_file, sys.stdin.buffer if given.parent else None))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
