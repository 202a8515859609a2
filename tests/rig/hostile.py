"""A web server that misbehaves on purpose, on loopback, one path for each misbehaviour.

    async with hostile_server() as server:
        await fetcher.fetch(Ask(server.url("gzip-bomb"), allow_private=True))   # body_too_large

`CASES` says what a fetcher should make of each path: an error class, or the status that it should
accept. Use it to see how your own code takes a bad day on the web.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import shutil
import socket
import ssl
import struct
import subprocess
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import brotli
from msgspec import Struct

PAGE = b"<!doctype html><title>Honest</title><p>An honest page. <a href='/honest/next'>next</a>"
BOMB = 512 * 1024 * 1024
_BLOCK = b"x" * 65536


class Hit(Struct, frozen=True):
    """One request that reached the server."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Case(Struct, frozen=True):
    """What one path does, and what a fetcher that follows redirects should make of it."""

    name: str
    does: str
    error: str = ""
    """The class of the failure; empty when there should be a response."""
    status: int = 200
    body: bytes | None = None
    """The exact body, where it matters."""


class Line:
    """The server's end of one connection, with the means to misbehave."""

    def __init__(
        self, server: HostileServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer

    async def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))
        await self.writer.drain()

    async def answer(self, body: bytes = PAGE, *, status: str = "200 OK", headers: str = "") -> None:
        """A correct answer: `headers` are whole lines, each ended by CRLF."""
        await self.send(
            f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n".encode(),
            headers.encode("latin-1"),
            b"\r\n",
            body,
        )

    async def drip(self, data: bytes, then: bytes = b"") -> None:
        """`data` one byte at a time, without end if `then` is given."""
        for byte in data:
            await self.send(bytes((byte,)))
            await asyncio.sleep(self.server.drip)
        while then:
            await self.send(then)
            await asyncio.sleep(self.server.drip)

    async def flood(self, data: bytes) -> None:
        """`data` again and again, until the other side has enough."""
        while True:
            await self.send(data)

    async def stall(self) -> None:
        """Nothing at all, until the other side goes away."""
        await self.reader.read()

    def reset(self) -> None:
        """End with a RST instead of a FIN."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Line, Hit], Awaitable[bool | None]]
"""Answers one request; True keeps the connection."""


class Book:
    """The misbehaviours by path."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.behaviours: dict[str, Behaviour] = {}

    def case(
        self, name: str, does: str, error: str = "", *, status: int = 200, body: bytes | None = None
    ) -> Callable[[Behaviour], Behaviour]:
        def add(behaviour: Behaviour) -> Behaviour:
            self.cases[name] = Case(name, does, error, status, body)
            self.behaviours[name] = behaviour
            return behaviour

        return add

    def bytes(
        self,
        name: str,
        does: str,
        error: str = "",
        *,
        sends: Callable[[], bytes] | bytes,
        status: int = 200,
        body: bytes | None = None,
    ) -> None:
        """A path that sends fixed bytes and closes."""

        async def behave(line: Line, _hit: Hit) -> None:
            await line.send(sends if isinstance(sends, bytes) else await asyncio.to_thread(sends))

        self.case(name, does, error, status=status, body=body)(behave)

    def redirect(
        self, name: str, does: str, error: str, location: Callable[[HostileServer, Hit], str | None]
    ) -> None:
        async def behave(line: Line, hit: Hit) -> bool:
            place = location(line.server, hit)
            field = "" if place is None else f"Location: {place}\r\n"
            await line.answer(b"moved", status="302 Found", headers=field)
            return True

        self.case(name, does, error)(behave)


@lru_cache(maxsize=4)
def bomb(coding: str) -> bytes:
    """BOMB bytes of zeros, packed: `gzip` (0.5 MB), `br` (0.1 MB) or `gzip, gzip` (1 KB)."""
    if coding == "gzip, gzip":
        return gzip.compress(bomb("gzip"), mtime=0)
    block = bytes(1024 * 1024)
    if coding == "br":
        packer = brotli.Compressor(quality=1)
        packed = [packer.process(block) for _ in range(BOMB // len(block))]
        return b"".join((*packed, packer.finish()))
    # One block, flushed so that it stands alone, repeated: a single stream without the work.
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed_block = deflater.compress(block) + deflater.flush(zlib.Z_FULL_FLUSH)
    check = 0
    for _ in range(BOMB // len(block)):
        check = zlib.crc32(block, check)
    tail = struct.pack("<II", check, BOMB & 0xFFFFFFFF)
    header = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"
    return b"".join((header, packed_block * (BOMB // len(block)), b"\x03\x00", tail))


def _encoded(coding: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _packed_bomb(coding: str) -> bytes:
    return _encoded(coding, bomb(coding))


def _raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


_OK = b"HTTP/1.1 200 OK\r\n"
_EARLY = b"HTTP/1.1 103 Early Hints\r\n\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"


def _book() -> Book:
    book = Book()
    _timing(book)
    _sizes(book)
    _codings(book)
    _framing(book)
    _heads(book)
    _redirects(book)
    return book


def _timing(book: Book) -> None:
    @book.case("honest", "a plain page", body=PAGE)
    async def honest(line: Line, _hit: Hit) -> bool:
        await line.answer()
        return True

    @book.case("never-replies", "takes the request and says nothing", "first_byte_timeout")
    async def never(line: Line, _hit: Hit) -> None:
        await line.stall()

    @book.case("closes", "closes without a byte", "empty_reply")
    async def closes(_line: Line, _hit: Hit) -> None:
        return

    @book.case("reset", "resets the connection instead of answering", "reset")
    async def reset(line: Line, _hit: Hit) -> None:
        line.reset()

    @book.case("reset-mid-body", "resets the connection inside the body", "reset")
    async def reset_mid_body(line: Line, _hit: Hit) -> None:
        await line.send(_OK, b"Content-Length: 100000\r\n\r\n", b"x" * 1000)
        await asyncio.sleep(line.server.drip)  # or the RST may overtake the bytes
        line.reset()

    @book.case("drip-headers", "one header line after the other, without end", "first_byte_timeout")
    async def drip_headers(line: Line, _hit: Hit) -> None:
        await line.send(_OK)
        await line.drip(b"", then=b"X-Slow: 1\r\n")

    @book.case("drip-header-line", "one header line that never ends", "first_byte_timeout")
    async def drip_line(line: Line, _hit: Hit) -> None:
        await line.send(_OK, b"X-Slow: ")
        await line.drip(b"", then=b"s")

    @book.case("drip-body", "a body of one byte at a time", "slow_transfer")
    async def drip_body(line: Line, _hit: Hit) -> None:
        await line.send(_OK, b"Content-Length: 100000\r\n\r\n")
        await line.drip(b"", then=b"x")

    @book.case("stall-body", "stops inside the body", "idle_timeout")
    async def stall_body(line: Line, _hit: Hit) -> None:
        await line.send(_OK, b"Content-Length: 100000\r\n\r\n", b"x" * 5000)
        await line.stall()

    @book.case("closes-idle", "closes a connection that looked kept alive", body=PAGE)
    async def closes_idle(line: Line, _hit: Hit) -> None:
        await line.answer()

    for name, part in (("status-line", _OK), ("header", _OK + b"Content-Le"), ("interim", _EARLY + b"HTT")):
        book.bytes(f"closes-in-{name}", f"closes inside the head ({name})", "empty_reply", sends=part)


def _sizes(book: Book) -> None:
    @book.case("endless-extensions", "a gigabyte of chunk extensions for each byte", "body_too_large")
    async def endless_extensions(line: Line, _hit: Hit) -> None:
        await line.send(_CHUNKED)
        await line.flood(b"1;" + b"x" * 60_000 + b"\r\ny\r\n")

    for status in ("404 Not Found", "429 Too Many Requests", "503 Service Unavailable"):

        @book.case(f"endless-{status[:3]}", "an error page without end", status=int(status[:3]), body=b"")
        async def endless_error(line: Line, _hit: Hit, status: str = status) -> None:
            await line.send(f"HTTP/1.1 {status}\r\n\r\n".encode())
            await line.flood(_BLOCK)

    large = b"HTTP/1.1 503 Busy\r\nContent-Length: 10000000000\r\n\r\n"
    book.bytes("large-503", "announces an error page of ten gigabytes", sends=large, status=503, body=b"")
    bomb_404 = b"HTTP/1.1 404 Gone\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nwrong"
    book.bytes("broken-404", "an error page that is not gzip", sends=bomb_404, status=404, body=b"")

    @book.case("endless-chunked", "chunks without end", "body_too_large")
    async def endless_chunked(line: Line, _hit: Hit) -> None:
        await line.send(_CHUNKED)
        await line.flood(b"10000\r\n" + _BLOCK + b"\r\n")

    @book.case("endless-close", "a body without end and without length", "body_too_large")
    async def endless_close(line: Line, _hit: Hit) -> None:
        await line.send(_OK, b"\r\n")
        await line.flood(_BLOCK)

    @book.case("huge-length", "announces ten gigabytes and means it", "body_too_large")
    async def huge_length(line: Line, _hit: Hit) -> None:
        await line.send(_OK, b"Content-Length: 10000000000\r\n\r\n")
        await line.flood(_BLOCK)

    @book.case("endless-trailers", "a short body and trailers without end", "header_overflow")
    async def endless_trailers(line: Line, _hit: Hit) -> None:
        await line.send(_CHUNKED, b"1\r\nx\r\n0\r\n")
        await line.flood(b"X-Trailer: 1\r\n" * 100)

    @book.case("endless-extension", "a chunk extension that never ends", "idle_timeout")
    async def endless_extension(line: Line, _hit: Hit) -> None:
        await line.send(_CHUNKED, b"5;a=")
        await line.drip(b"", then=b"b")


def _codings(book: Book) -> None:
    for name, coding in (("gzip-bomb", "gzip"), ("br-bomb", "br"), ("double-gzip-bomb", "gzip, gzip")):
        book.bytes(
            name,
            f"{coding} of half a gigabyte of zeros",
            "body_too_large",
            sends=partial(_packed_bomb, coding),
        )
    packed = gzip.compress(PAGE, mtime=0)
    chain = ", ".join(["gzip"] * 500)
    book.bytes("gzip-chain", "claims 500 encodings", "protocol_error", sends=_encoded(chain, packed))
    book.bytes("gzip-twice", "two encodings", sends=_encoded("gzip, br", brotli.compress(packed)), body=PAGE)
    book.bytes("deflate", "zlib, as written", sends=_encoded("deflate", zlib.compress(PAGE)), body=PAGE)
    book.bytes("deflate-raw", "raw deflate", sends=_encoded("deflate", _raw_deflate(PAGE)), body=PAGE)
    zstd = b"\x28\xb5\x2f\xfd\x24\x05\x29\x00\x00hello\x00\x00\x00\x00"
    book.bytes("zstd", "an encoding nobody asked for", "decode_error", sends=_encoded("zstd", zstd))
    book.bytes("invalid-gzip", "calls plain text gzip", "decode_error", sends=_encoded("gzip", PAGE))
    book.bytes("invalid-br", "calls noise brotli", "decode_error", sends=_encoded("br", b"\xff\xfe" * 40))
    page = PAGE * 50
    book.bytes(
        "truncated-gzip", "gzip cut, length right", "truncated",
        sends=_encoded("gzip", gzip.compress(page, mtime=0)[:-9]),
    )  # fmt: skip
    book.bytes(
        "truncated-br", "brotli cut, length right", "truncated",
        sends=_encoded("br", brotli.compress(page)[:-2]),
    )  # fmt: skip


def _framing(book: Book) -> None:
    def fixed(name: str, does: str, error: str, *parts: bytes) -> None:
        book.bytes(name, does, error, sends=b"".join(parts))

    fixed("short-body", "less than announced", "truncated", _OK, b"Content-Length: 1000\r\n\r\nshort")
    fixed("short-chunked", "chunks without an end", "truncated", _CHUNKED, b"5\r\nhello\r\n")
    fixed("negative-length", "Content-Length: -5", "protocol_error", _OK, b"Content-Length: -5\r\n\r\nhello")
    for name, length in (
        ("absurd", b"9" * 5000),
        ("padded", b"0" * 5000 + b"5"),
        ("signed", b"+5"),
        ("list", b"5, 5"),
    ):
        fields = b"Content-Length: " + length + b"\r\n\r\nhello"
        fixed(f"{name}-length", f"a Content-Length that is {name}", "protocol_error", _OK, fields)
    lengths = b"Content-Length: 5\r\nContent-Length: 9\r\n\r\nhello"
    fixed("two-lengths", "two different lengths", "protocol_error", _OK, lengths)
    fixed("chunk-overflow", "a chunk of 2^64-1", "protocol_error", _CHUNKED, b"ffffffffffffffff\r\nhello")
    fixed("chunk-too-long", "a chunk size of 40 digits", "protocol_error", _CHUNKED, b"f" * 40, b"\r\nhello")
    fixed("chunk-garbage", "a chunk size that is none", "protocol_error", _CHUNKED, b"ZZ\r\nhello\r\n")

    @book.case("extra-bytes", "more bytes than announced", body=PAGE)
    async def extra_bytes(line: Line, _hit: Hit) -> bool:
        await line.send(
            _OK, f"Content-Length: {len(PAGE)}\r\n\r\n".encode(), PAGE, b"more than was said" * 20
        )
        return True

    @book.case("length-and-chunked", "both framings; chunks win, the connection ends", body=b"hello")
    async def length_and_chunked(line: Line, _hit: Hit) -> bool:
        await line.send(
            _OK, b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n"
        )
        return True

    @book.case("204-with-body", "a body where none may be", status=204, body=b"")
    async def no_content(line: Line, _hit: Hit) -> bool:
        await line.send(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello")
        return True

    fixed("304-unasked", "not modified since never", "protocol_error", b"HTTP/1.1 304 Not Modified\r\n\r\n")
    partial = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nhello"
    fixed("206-unasked", "a part nobody asked for", "protocol_error", partial)
    fixed("http-0.9", "no head at all", "not_http", PAGE)
    fixed("garbage", "noise", "not_http", bytes(range(128, 256)) * 4)
    fixed("ssh-banner", "is an SSH server", "not_http", b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
    fixed("smtp-banner", "is a mail server", "not_http", b"220 mail.example ESMTP\r\n500 what?\r\n")
    fixed("tls-alert", "speaks TLS on a plain port", "not_http", b"\x15\x03\x01\x00\x02\x02\x46")


def _heads(book: Book) -> None:
    @book.case("long-header", "a header line of 20 MB", "header_overflow")
    async def long_header(line: Line, _hit: Hit) -> None:
        await line.send(_OK, b"X-Long: ")
        for _ in range(320):
            await line.send(_BLOCK)

    @book.case("many-headers", "200,000 headers", "header_overflow")
    async def many_headers(line: Line, _hit: Hit) -> None:
        await line.send(_OK)
        for _ in range(2000):
            await line.send(b"X-Many: 1\r\n" * 100)

    @book.case("many-cookies", "5,000 cookies", "header_overflow")
    async def many_cookies(line: Line, _hit: Hit) -> None:
        cookies = "".join(f"Set-Cookie: c{n}=1\r\n" for n in range(5000))
        await line.answer(headers=cookies)

    for status, name in (("103 Early Hints", "endless-103"), ("100 Continue", "endless-100")):
        interim = f"HTTP/1.1 {status}\r\n\r\n".encode()

        @book.case(name, f"{status} without end", "protocol_error")
        async def endless_interim(line: Line, _hit: Hit, interim: bytes = interim) -> None:
            await line.flood(interim * 50)

    def head(name: str, does: str, error: str, sends: bytes, status: int = 200) -> None:
        book.bytes(name, does, error, sends=sends + b"Content-Length: 2\r\n\r\nok", status=status)

    head("nul-in-header", "a NUL in a header", "protocol_error", _OK + b"X-Nul: a\0b\r\n")
    head(
        "control-in-header", "a control character in a header", "protocol_error", _OK + b"X-Bell: a\x07b\r\n"
    )
    head("no-colon", "a header without a colon", "protocol_error", _OK + b"what is this\r\n")
    head("status-999", "a status of its own", "", b"HTTP/1.1 999 Request denied\r\n", 999)
    head("status-000", "status 000", "protocol_error", b"HTTP/1.1 000 Nothing\r\n")
    head("status-negative", "status -1", "protocol_error", b"HTTP/1.1 -1 Nothing\r\n")
    head("folded-header", "a header over two lines, as in 1997", "", _OK + b"X-Folded: one\r\n two\r\n")
    bare = b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok"
    book.bytes("bare-lf", "lines that end with LF only", sends=bare, body=b"ok")


def _redirects(book: Book) -> None:
    def to(name: str, does: str, error: str, location: str | None) -> None:
        book.redirect(name, does, error, lambda _server, _hit: location)

    to("redirect-loop", "to itself", "too_many_redirects", "/redirect-loop")
    to("redirect-a", "to B, which leads back", "too_many_redirects", "/redirect-b")
    to("redirect-b", "to A, which leads back", "too_many_redirects", "/redirect-a")
    book.redirect(
        "redirect-chain",
        "fifty hops",
        "too_many_redirects",
        lambda _server, hit: f"/redirect-chain?{int(hit.target.partition('?')[2] or 0) + 1}",
    )
    book.redirect(
        "redirect-grow", "to a longer URL each time", "too_many_redirects",
        lambda _server, hit: f"{hit.target}{'&' if '?' in hit.target else '?'}more=1",
    )  # fmt: skip
    to("redirect-nowhere", "without a Location", "redirect_invalid", None)
    to("redirect-empty", "with an empty Location", "redirect_invalid", "")
    to("redirect-bad", "to something that is no URL", "redirect_invalid", "http://[bad")
    to("redirect-long", "to a URL of 20 KB", "redirect_invalid", "/" + "x" * 20000)
    to("redirect-userinfo", "to a URL with a password", "redirect_invalid", "http://user:secret@127.0.0.1/")
    for scheme in ("file:///etc/passwd", "data:text/html,hi", "javascript:alert(1)", "ftp://127.0.0.1/",
                   "gopher://127.0.0.1:70/"):  # fmt: skip
        name = f"redirect-{scheme.partition(':')[0]}"
        to(name, f"to {scheme}", "scheme_blocked", scheme)
    for name, place in INTERNAL.items():
        to(f"redirect-{name}", f"to {place}", "egress_blocked", place)

    async def elsewhere(line: Line, _hit: Hit) -> bool:
        place = f"Location: {line.server.other_url('honest')}\r\n"
        await line.answer(b"", status="302 Found", headers=place)
        return True

    book.case("redirect-other-origin", "to another port", body=PAGE)(elsewhere)

    async def bomb_behind(line: Line, _hit: Hit) -> None:
        body = await asyncio.to_thread(bomb, "gzip")
        await line.send(
            b"HTTP/1.1 302 Found\r\nLocation: /honest\r\nContent-Encoding: gzip\r\n",
            f"Content-Length: {len(body)}\r\n\r\n".encode(),
            body,
        )

    book.case("redirect-bomb", "a redirect whose body is a bomb", body=PAGE)(bomb_behind)

    async def endless_behind(line: Line, _hit: Hit) -> None:
        await line.send(b"HTTP/1.1 302 Found\r\nLocation: /honest\r\nTransfer-Encoding: chunked\r\n\r\n")
        await line.flood(b"10000\r\n" + _BLOCK + b"\r\n")

    book.case("redirect-endless", "a redirect whose body never ends", body=PAGE)(endless_behind)


# Places inside, in the forms in which they hide.
INTERNAL = {
    "metadata": "http://169.254.169.254/latest/meta-data/",
    "short-form": "http://127.1:8080/",
    "decimal": "http://2130706433:8080/",
    "hex": "http://0x7f000001:8080/",
    "octal": "http://0177.0.0.1:8080/",
    "any": "http://0:8080/",
    "ipv6-any": "http://[::]:8080/",
    "ipv6": "http://[::1]:8080/",
    "mapped": "http://[::ffff:169.254.169.254]/",
    "compatible": "http://[::127.0.0.1]:8080/",
    "nat64": "http://[64:ff9b::a9fe:a9fe]/",
    "nat64-local": "http://[64:ff9b:1::a9fe:a9fe]/",
    "6to4": "http://[2002:a9fe:a9fe::]/",
    "site-local": "http://[fec0::1]/",
    "private": "http://10.0.0.1/",
}

_BOOK = _book()
CASES: dict[str, Case] = _BOOK.cases
"""What each path does and what should come of it."""


class HostileServer:
    """A running server. `hits` are the requests of the main port, `other_hits` of the other one."""

    def __init__(self, drip: float) -> None:
        self.drip = drip
        self.accepted = 0
        self.hits: list[Hit] = []
        self.other_hits: list[Hit] = []
        self.port = 0
        self.other_port = 0
        self.closed_port = 0
        self.tls_ports: dict[str, int] = {}
        self.ca_file = ""
        self.contexts: dict[str, ssl.SSLContext] = {}
        """What the TLS ports show, for servers of your own."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    def url(self, name: str) -> str:
        """The URL of a case. Anything below it, and any query, behaves the same."""
        return f"http://127.0.0.1:{self.port}/{name}"

    def other_url(self, name: str) -> str:
        """The same on another port: another origin."""
        return f"http://127.0.0.1:{self.other_port}/{name}"

    def tls_url(self, certificate: str, name: str = "honest") -> str:
        """Over TLS: `good` (signed by `ca_file`), `expired`, `self-signed`, `wrong-host`, `silent`."""
        return f"https://127.0.0.1:{self.tls_ports[certificate]}/{name}"

    @property
    def refused_url(self) -> str:
        """A port that nobody listens on."""
        return f"http://127.0.0.1:{self.closed_port}/"

    @property
    def endpoints(self) -> frozenset[str]:
        """The `host:port` of every listener, for `Guard(allow=…)`."""
        ports = (self.port, self.other_port, self.closed_port, *self.tls_ports.values())
        return frozenset(f"127.0.0.1:{port}" for port in ports)

    async def heard(self, count: int) -> None:
        """Wait until `count` requests have reached the main port."""
        while len(self.hits) < count:
            self._news.clear()
            await self._news.wait()

    def talk(self, hits: list[Hit]) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """A handler for `asyncio.start_server` that writes down what it hears in `hits`."""

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted += 1
            # Our own tasks, so that the server can end all of them: some cases never end alone.
            task = asyncio.get_running_loop().create_task(self._serve(Line(self, reader, writer), hits))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return connected

    async def _serve(self, line: Line, hits: list[Hit]) -> None:
        try:
            while (hit := await _read(line.reader)) is not None:
                hits.append(hit)
                self._news.set()
                name = hit.path.strip("/").partition("/")[0]
                behaviour = _BOOK.behaviours.get(name)
                if behaviour is None:
                    await line.answer(b"no such case", status="404 Not Found")
                elif not await behaviour(line, hit):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # the client had enough, which is what most cases are for
        finally:
            line.writer.close()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> Hit | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _version = first.split(" ", 2)
    headers = {}
    for text in lines:
        name, colon, value = text.partition(":")
        if colon:
            headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Hit(method, target, headers, body)


@contextlib.asynccontextmanager
async def hostile_server(*, tls: bool = False, drip: float = 0.02) -> AsyncIterator[HostileServer]:
    """Start it on loopback, on ports that the system picks; with `tls` also the TLS ports.

    `drip` is the pause between two bytes of the cases that drip. TLS needs the `openssl` command,
    which makes the certificates on the spot.
    """
    server = HostileServer(drip)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.end)

        async def listen(hits: list[Hit], context: ssl.SSLContext | None = None) -> int:
            listener = await asyncio.start_server(
                server.talk(hits), "127.0.0.1", 0, ssl=context, backlog=1024
            )
            stack.callback(listener.close)
            port: int = listener.sockets[0].getsockname()[1]
            return port

        server.port = await listen(server.hits)
        server.other_port = await listen(server.other_hits)
        # Bound but not listening: connections are refused, and nobody else can take the port.
        reserved = stack.enter_context(socket.socket())
        reserved.bind(("127.0.0.1", 0))
        server.closed_port = reserved.getsockname()[1]
        if tls:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
            made = await asyncio.to_thread(_certificates, folder)
            server.ca_file = str(folder / "ca.pem")
            server.contexts = dict(made)
            for name, context in made:
                server.tls_ports[name] = await listen(server.hits, context)
            server.tls_ports["silent"] = await _silent(server, stack)
        yield server


async def _silent(server: HostileServer, stack: contextlib.AsyncExitStack) -> int:
    """A port that accepts and never says a word: a TLS handshake that does not come."""

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.accepted += 1
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                pass
        writer.close()

    listener = await asyncio.start_server(hear, "127.0.0.1", 0)
    stack.callback(listener.close)
    port: int = listener.sockets[0].getsockname()[1]
    return port


def _certificates(folder: Path) -> list[tuple[str, ssl.SSLContext]]:
    """A root, and leaves that are each wrong in their own way."""
    command = shutil.which("openssl")
    if command is None:
        raise RuntimeError("the TLS ports need the `openssl` command")

    def openssl(line: str) -> None:
        subprocess.run([command, *line.split()], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "leaf"):
        openssl(f"ecparam -name prime256v1 -genkey -noout -out {name}.key")
    openssl("req -x509 -new -key ca.key -days 2 -subj /CN=hostile-root -out ca.pem")
    openssl("req -new -key leaf.key -subj /CN=127.0.0.1 -out leaf.csr")
    (folder / "here").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    (folder / "elsewhere").write_text("subjectAltName=DNS:elsewhere.example\n")
    signed = "x509 -req -in leaf.csr -CA ca.pem -CAkey ca.key -CAcreateserial"
    openssl(f"{signed} -days 2 -extfile here -out good.pem")
    openssl(f"{signed} -days -1 -extfile here -out expired.pem")
    openssl(f"{signed} -days 2 -extfile elsewhere -out wrong-host.pem")
    openssl("x509 -req -in leaf.csr -signkey leaf.key -days 2 -extfile here -out self-signed.pem")
    return list(_contexts(folder))


def _contexts(folder: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    for name in ("good", "expired", "wrong-host", "self-signed"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / f"{name}.pem", folder / "leaf.key")
        yield name, context
