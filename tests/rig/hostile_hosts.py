"""Many hosts on loopback in one process: honest ones, or hostile ones of more than a hundred kinds.

    python -m tests.rig.hostile_hosts honest --hosts 100 --pages 10
    python -m tests.rig.hostile_hosts hostile --hosts 345

A host is an address (127.30.0.1, 127.40.0.1…), so each is a lane of its own and no name must be resolved. The
first line on standard output tells as JSON what there is: `start`, the URL of each host; `kinds`, what the
host of each URL does; `pages`, everything that the honest hosts have. A line on standard input is answered
with the log: what was served (by a hostile host: asked for) and when (monotonic). The process ends with its
standard input.

A hostile host does one thing, as its kind says; a kind that occurs more than once is varied by `turn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import resource
import socket
import struct
import sys
import time
import zlib
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable
from functools import lru_cache

from tests.rig.hostile import bomb

HONEST, HOSTILE = "127.30", "127.40"
LATENCY = 0.02
"""Seconds that an honest host takes for a page."""
BLOCK = b"x" * 65536
OK = b"HTTP/1.1 200 OK\r\n"
HTML = b"Content-Type: text/html; charset=utf-8\r\n"
CHUNKED = OK + HTML + b"Transfer-Encoding: chunked\r\n\r\n"
PAGE = b"<!doctype html><title>A page</title><p>Some words. <a href='/next'>next</a>"
MEGA = 1024 * 1024


class Line:
    """The server's end of one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: int, port: int
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.turn = turn
        self.port = port
        self.requests = 0
        self.host: str = writer.get_extra_info("sockname")[0]

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))
        await self.writer.drain()

    async def answer(
        self,
        body: bytes | str = PAGE,
        status: str = "200 OK",
        kind: str = "text/html; charset=utf-8",
        headers: str = "",
    ) -> bool:
        body = body.encode() if isinstance(body, str) else body
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        await self.send(head.encode("latin-1"), body)
        return True

    async def redirect(self, place: str, headers: str = "") -> bool:
        return await self.answer(b"moved", "302 Found", headers=f"Location: {place}\r\n{headers}")

    async def drip(self, data: bytes, every: float, then: bytes = b"") -> None:
        """`data` byte by byte, then `then` for ever."""
        for byte in data:
            await self.send(bytes((byte,)))
            await asyncio.sleep(every)
        while then:
            await self.send(then)
            await asyncio.sleep(every)

    async def flood(self, data: bytes) -> None:
        while True:
            await self.send(data)
            await asyncio.sleep(0)

    async def stall(self) -> None:
        """Until the other side goes away."""
        while await self.reader.read(65536):
            continue

    def reset(self) -> None:
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Line, str], Awaitable[bool | None]]
"""Answers the request for a path; True keeps the connection."""


class Kind:
    def __init__(
        self, behaviour: Behaviour, at: str, make: Callable[[int], bytes] = lambda _turn: b""
    ) -> None:
        self.behaviour = behaviour
        self.make = make
        """Makes what it sends, so that it is there before anybody asks: one kind must not hold up others."""
        self.at = at
        """`page`: pages only, robots.txt is a 404. `robots`: robots.txt only. `all`: both. `accept`: before a
        request is read. `tls`: the same under an https URL. `full`: the backlog is full."""


KINDS: dict[str, Kind] = {}


def kind(at: str = "page") -> Callable[[Behaviour], Behaviour]:
    def add(behaviour: Behaviour) -> Behaviour:
        KINDS[behaviour.__name__] = Kind(behaviour, at)
        return behaviour

    return add


def fixed(name: str, *parts: bytes, at: str = "page") -> None:
    """A kind that sends these bytes and closes."""

    async def send(line: Line, _path: str) -> None:
        await line.send(*parts)

    KINDS[name] = Kind(send, at)


def pages(name: str, make: Callable[[int], bytes | str], kind: str = "text/html; charset=utf-8") -> None:
    """A kind whose every page is what `make` gives for its turn, packed: so it costs its sender nothing."""

    @lru_cache(maxsize=8)
    def packed(turn: int) -> bytes:
        body = make(turn)
        return gzip.compress(body.encode() if isinstance(body, str) else body, 1, mtime=0)

    async def send(line: Line, _path: str) -> bool:
        return await line.answer(packed(line.turn % 4), kind=kind, headers="Content-Encoding: gzip\r\n")

    KINDS[name] = Kind(send, "page", packed)


# -- phases: what stalls, drips, resets and closes, and where ------------------------------------


@kind("accept")
async def says_nothing(line: Line, _path: str) -> None:
    await line.stall()


@kind("all")
async def never_answers(line: Line, _path: str) -> None:
    await line.stall()


@kind()
async def never_answers_pages(line: Line, _path: str) -> None:
    await line.stall()


@kind("accept")
async def closes_at_once(_line: Line, _path: str) -> None:
    return


@kind("accept")
async def resets_at_once(line: Line, _path: str) -> None:
    line.reset()


@kind()
async def closes_unanswered(_line: Line, _path: str) -> None:
    return


@kind()
async def resets_unanswered(line: Line, _path: str) -> None:
    line.reset()


@kind()
async def resets_in_head(line: Line, _path: str) -> None:
    await line.send(OK, b"X-Half: ")
    await asyncio.sleep(0.05)
    line.reset()


fixed("closes_in_head", OK, b"X-Half: ")


@kind()
async def resets_in_body(line: Line, _path: str) -> None:
    await line.send(OK, HTML, b"Content-Length: 100000\r\n\r\n", PAGE)
    await asyncio.sleep(0.05)
    line.reset()


fixed("closes_in_body", OK, HTML, b"Content-Length: 100000\r\n\r\n", PAGE)
fixed("closes_in_chunk", CHUNKED, b"fff\r\nhello")


@kind("full")
async def drops_connections(_line: Line, _path: str) -> None:
    return


@kind("tls")
async def tls_says_nothing(line: Line, _path: str) -> None:
    await line.stall()


@kind("tls")
async def tls_closes(line: Line, _path: str) -> None:
    await line.reader.read(1000)


@kind("tls")
async def tls_garbage(line: Line, _path: str) -> None:
    await line.send(os.urandom(2000))


@kind("tls")
async def tls_half_hello(line: Line, _path: str) -> None:
    await line.send(b"\x16\x03\x03\x0f\xff\x02\x00\x0f\xf0\x03\x03")
    await line.stall()


@kind("tls")
async def tls_drips(line: Line, _path: str) -> None:
    await line.drip(b"\x16\x03\x03\x0f\xff\x02\x00\x0f\xf0\x03\x03" + bytes(100), 0.5)


@kind("tls")
async def tls_speaks_http(line: Line, _path: str) -> None:
    await line.answer()


@kind("tls")
async def tls_alert(line: Line, _path: str) -> None:
    await line.send(b"\x15\x03\x03\x00\x02\x02\x28")


@kind()
async def drips_status_line(line: Line, _path: str) -> None:
    await line.drip(OK + HTML + b"\r\n", 1.0)


@kind()
async def drips_head_lines(line: Line, _path: str) -> None:
    await line.send(OK)
    await line.drip(b"", 0.5, then=b"X-Slow: 1\r\n")


@kind()
async def drips_one_header(line: Line, _path: str) -> None:
    await line.send(OK, b"X-Slow: ")
    await line.drip(b"", 0.5, then=b"s")


@kind()
async def stalls_in_head(line: Line, _path: str) -> None:
    await line.send(OK, HTML)
    await line.stall()


@kind()
async def stalls_in_body(line: Line, _path: str) -> None:
    await line.send(OK, HTML, b"Content-Length: 3000000\r\n\r\n", PAGE * 10 ** (line.turn % 4 + 1))
    await line.stall()


@kind()
async def stalls_before_the_last_byte(line: Line, _path: str) -> None:
    await line.send(OK, HTML, f"Content-Length: {len(PAGE) + 1}\r\n\r\n".encode(), PAGE)
    await line.stall()


@kind()
async def drips_body(line: Line, _path: str) -> None:
    await line.send(OK, HTML, b"Content-Length: 100000\r\n\r\n")
    await line.drip(b"", 0.5, then=b"x")


@kind()
async def drips_body_fast_enough(line: Line, _path: str) -> None:
    await line.send(OK, HTML, b"Content-Length: 9000000\r\n\r\n")
    await line.drip(b"", 0.5, then=b"x" * 1000)


@kind()
async def drips_megabytes(line: Line, _path: str) -> None:
    await line.send(OK, HTML, b"Content-Length: 10000000\r\n\r\n")
    await line.drip(b"", 0.5, then=b"<p>" + b"x" * 100_000)


@kind()
async def drips_chunks(line: Line, _path: str) -> None:
    await line.send(CHUNKED)
    await line.drip(b"", 0.5, then=b"1\r\nx\r\n")


@kind()
async def waits_then_sends_much(line: Line, _path: str) -> bool:
    await asyncio.sleep(2 + line.turn)
    return await line.answer(b"<p>" + b"x" * (9 * MEGA))


@kind()
async def answers_in_five_seconds(line: Line, _path: str) -> bool:
    await asyncio.sleep(5)
    return await line.answer()


@kind()
async def stalls_every_other_page(line: Line, path: str) -> bool | None:
    if len(path) % 2:
        return await line.answer("".join(f"<a href='/{'x' * n}'>{n}</a>" for n in range(1, 20)))
    await line.stall()
    return None


@kind()
async def stalls_in_a_redirect(line: Line, _path: str) -> None:
    await line.send(b"HTTP/1.1 302 Found\r\nLocation: /next\r\nContent-Length: 10000\r\n\r\nmov")
    await line.stall()


@kind()
async def reads_nothing(line: Line, _path: str) -> None:
    await asyncio.sleep(30)


# -- sizes and framing -----------------------------------------------------------------------------


@kind()
async def head_without_end(line: Line, _path: str) -> None:
    await line.send(OK)
    await line.flood(b"X-Many: 1\r\n" * 100)


@kind()
async def header_without_end(line: Line, _path: str) -> None:
    await line.send(OK, b"X-Long: ")
    await line.flood(BLOCK)


@kind()
async def status_line_without_end(line: Line, _path: str) -> None:
    await line.send(b"HTTP/1.1 200 ")
    await line.flood(BLOCK)


@kind()
async def interim_flood(line: Line, _path: str) -> None:
    await line.flood(
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n")[line.turn % 2] * 50
    )


@kind()
async def interim_drip(line: Line, _path: str) -> None:
    await line.drip(b"", 1.0, then=b"HTTP/1.1 102 Processing\r\n\r\n")


@kind()
async def body_without_end(line: Line, _path: str) -> None:
    await line.send(OK, HTML, b"\r\n")
    await line.flood(BLOCK)


@kind()
async def chunks_without_end(line: Line, _path: str) -> None:
    await line.send(CHUNKED)
    await line.flood(b"10000\r\n" + BLOCK + b"\r\n")


@kind()
async def ten_gigabytes(line: Line, _path: str) -> None:
    await line.send(OK, HTML, b"Content-Length: 10000000000\r\n\r\n")
    await line.flood(BLOCK)


@kind()
async def chunk_extensions(line: Line, _path: str) -> None:
    await line.send(CHUNKED)
    await line.flood(b"1;" + b"a" * 15000 + b"\r\nx\r\n")


@kind()
async def chunk_extension_without_end(line: Line, _path: str) -> None:
    await line.send(CHUNKED, b"1;a=")
    await line.flood(b"b" * 15000)


@kind()
async def tiny_chunks(line: Line, _path: str) -> None:
    await line.send(CHUNKED)
    for _ in range(300):
        await line.send(b"2\r\nxx\r\n" * 5000)
        await asyncio.sleep(0)
    await line.send(b"0\r\n\r\n")


@kind()
async def trailers_without_end(line: Line, _path: str) -> None:
    await line.send(CHUNKED, b"1\r\nx\r\n0\r\n")
    await line.flood(b"X-Trailer: 1\r\n" * 100)


fixed("length_of_5000_digits", OK, HTML, b"Content-Length: ", b"9" * 5000, b"\r\n\r\nhello")
fixed("length_negative", OK, HTML, b"Content-Length: -5\r\n\r\nhello")
fixed("length_too_long", OK, HTML, b"Content-Length: 1000\r\n\r\nhello")
fixed("length_not_a_number", OK, HTML, b"Content-Length: 0x10\r\n\r\nhello")
fixed("two_lengths", OK, HTML, b"Content-Length: 5\r\nContent-Length: 9\r\n\r\nhello")
fixed("chunk_overflow", CHUNKED, b"ffffffffffffffff\r\nhello")
fixed("chunk_garbage", CHUNKED, b"ZZ\r\nhello\r\n")
fixed(
    "length_and_chunks", OK, b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
)


@kind()
async def length_too_short(line: Line, _path: str) -> bool:
    await line.send(OK, HTML, b"Content-Length: 5\r\n\r\nhello and much more" * 50)
    return True


@kind()
async def late_extra_answer(line: Line, _path: str) -> bool:
    await line.answer("".join(f"<a href='/e{n}'>{n}</a>" for n in range(20)))
    await asyncio.sleep(0.1)
    return await line.answer(b"<title>Poison</title>")


@kind()
async def stray_line_ends(line: Line, _path: str) -> bool:
    await line.answer("".join(f"<a href='/s{n}'>{n}</a>" for n in range(20)))
    await asyncio.sleep(0.05)
    await line.send(b"\r\n" * (line.turn + 1))
    return True


@kind()
async def stalls_on_the_second_request(line: Line, _path: str) -> bool:
    if line.requests > 2:
        await line.stall()
    return await line.answer("".join(f"<a href='/k{n}'>{n}</a>" for n in range(20)))


@kind()
async def closes_what_it_kept(line: Line, _path: str) -> None:
    await line.answer(
        "".join(f"<a href='/c{n}'>{n}</a>" for n in range(20)), headers="Connection: keep-alive\r\n"
    )


# -- encodings ---------------------------------------------------------------------------------------


@lru_cache
def _deflated(wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(bytes(64 * MEGA)) + packer.flush()


@lru_cache
def _words() -> bytes:
    """Ten megabytes, nearly, in ten kilobytes."""
    return gzip.compress(b"<p>" + b" word" * (2 * MEGA - 10), 9, mtime=0)


@lru_cache
def _wildcards() -> bytes:
    return b"User-agent: *\n" + b"".join(b"Disallow: /*%b%d$\n" % (b"a*" * 20, n) for n in range(9000))


async def _encoded(line: Line, coding: str, body: bytes) -> bool:
    return await line.answer(body, headers=f"Content-Encoding: {coding}\r\n")


@kind()
async def gzip_bomb(line: Line, _path: str) -> bool:
    return await _encoded(line, "gzip", bomb("gzip"))


@kind()
async def br_bomb(line: Line, _path: str) -> bool:
    return await _encoded(line, "br", bomb("br"))


@kind()
async def double_gzip_bomb(line: Line, _path: str) -> bool:
    return await _encoded(line, "gzip, gzip", bomb("gzip, gzip"))


@kind()
async def deflate_bomb(line: Line, _path: str) -> bool:
    return await _encoded(line, "deflate", _deflated(-15 if line.turn % 2 else 15))


@kind()
async def bomb_just_allowed(line: Line, _path: str) -> bool:
    return await _encoded(line, "gzip", _words())


@kind()
async def coding_chain(line: Line, _path: str) -> bool:
    return await _encoded(line, ", ".join(["gzip"] * (3, 10, 100, 500)[line.turn % 4]), gzip.compress(PAGE))


@kind()
async def coding_lies(line: Line, _path: str) -> bool:
    return await _encoded(line, ("gzip", "br", "deflate", "zstd")[line.turn % 4], PAGE)


@kind()
async def coding_cut(line: Line, _path: str) -> bool:
    return await _encoded(line, "gzip", gzip.compress(PAGE * 50)[:-9])


@kind()
async def gzip_dripped(line: Line, _path: str) -> None:
    body = gzip.compress(PAGE * 500)
    await line.send(OK, HTML, f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    await line.drip(body, 0.5)


@kind()
async def bomb_after_a_wait(line: Line, _path: str) -> bool:
    await asyncio.sleep(3)
    return await _encoded(line, "gzip", _words())


# -- other protocols and odd heads ---------------------------------------------------------------

fixed("ssh", b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", at="accept")
fixed("smtp", b"220 mail.example ESMTP\r\n500 what?\r\n", at="accept")
fixed("http_0_9", PAGE)
fixed("noise", bytes(range(128, 256)) * 40)
fixed("tls_on_a_plain_port", b"\x15\x03\x01\x00\x02\x02\x46", at="accept")
fixed("http2_preface", b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18), at="accept")
fixed("status_000", b"HTTP/1.1 000 Nothing\r\nContent-Length: 2\r\n\r\nok")
fixed("status_999", b"HTTP/1.1 999 Denied\r\nContent-Length: 2\r\n\r\nok")
fixed("nul_in_header", OK, b"X-Nul: a\0b\r\nContent-Length: 2\r\n\r\nok")
fixed("unasked_304", b"HTTP/1.1 304 Not Modified\r\n\r\n")
fixed("unasked_206", b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nhello")
fixed("upgrades", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", bytes(100))


@kind()
async def header_bomb(line: Line, _path: str) -> bool:
    fields = (200, 250, 1000, 5000)[line.turn % 4]
    return await line.answer(headers="".join(f"X-{n}: {'v' * 200}\r\n" for n in range(fields)))


@kind()
async def cookie_bomb(line: Line, path: str) -> bool:
    cookies = "".join(f"Set-Cookie: {path[1:]}{n}={'v' * 3000}\r\n" for n in range(20))
    return await line.answer("".join(f"<a href='/b{n}'>{n}</a>" for n in range(20)), headers=cookies)


@kind()
async def hostile_retry_after(line: Line, _path: str) -> bool:
    value = ("999999999999", "-1", "soon", "0")[line.turn % 4]
    return await line.answer(
        b"later", ("503 Busy", "429 Slow")[line.turn % 2], headers=f"Retry-After: {value}\r\n"
    )


@kind()
async def every_status(line: Line, path: str) -> bool:
    codes = [*range(400, 418), *range(421, 432), 451, *range(500, 512)]
    links = "".join(f"<a href='/{code}'>{code}</a>" for code in codes)
    if path[1:].isdigit():
        return await line.answer(links, f"{path[1:]} Status")
    return await line.answer(links)


@kind()
async def error_page_without_end(line: Line, _path: str) -> None:
    await line.send(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n")
    await line.flood(b"10000\r\n" + BLOCK + b"\r\n")


# -- redirects ---------------------------------------------------------------------------------------


@kind()
async def redirects_to_itself(line: Line, path: str) -> bool:
    return await line.redirect(path)


@kind()
async def redirects_in_a_circle(line: Line, path: str) -> bool:
    return await line.redirect("/a" if path != "/a" else "/b")


@kind()
async def redirects_without_end(line: Line, path: str) -> bool:
    return await line.redirect(f"/r{len(path)}{path}")


@kind()
async def redirect_fan(line: Line, path: str) -> bool:
    if path == "/":
        return await line.answer("".join(f"<a href='/f{n}'>{n}</a>" for n in range(300)))
    return await line.redirect(f"{path}/on")


@kind()
async def redirects_to_the_stalling(line: Line, path: str) -> bool:
    place = f"http://{HOSTILE}.0.{1 + len(path) % 3}:{line.port}{path}x"
    return await line.redirect(place)


@kind()
async def redirects_elsewhere(line: Line, _path: str) -> bool:
    places = ("file:///etc/passwd", "http://[bad", "/" + "x" * 20000, "gopher://127.0.0.1:70/")
    return await line.redirect(places[line.turn % 4])


@kind()
async def redirect_with_a_flood(line: Line, _path: str) -> None:
    await line.send(b"HTTP/1.1 302 Found\r\nLocation: /next\r\nTransfer-Encoding: chunked\r\n\r\n")
    await line.flood(b"10000\r\n" + BLOCK + b"\r\n")


@kind()
async def cookie_gate(line: Line, path: str) -> bool:
    return await line.redirect(path, headers="Set-Cookie: seen=1\r\n")


@kind()
async def refreshes_for_ever(line: Line, path: str) -> bool:
    return await line.answer(f"<meta http-equiv=refresh content='0;url={path}x'><a href='{path}y'>on</a>")


# -- farms --------------------------------------------------------------------------------------------


@kind()
async def link_farm(line: Line, path: str) -> bool:
    return await line.answer("".join(f"<a href='{path[:200]}{n}/'>{n}</a>" for n in range(100)))


@kind()
async def calendar(line: Line, path: str) -> bool:
    month = int(path.rpartition("=")[2]) if "=" in path else 0
    return await line.answer(
        f"<a href='/?month={month + 1}'>next</a><a href='/?month={month - 1}'>before</a>"
    )


@kind()
async def session_ids(line: Line, _path: str) -> bool:
    names = (os.urandom(8).hex() for _ in range(30))
    return await line.answer("".join(f"<a href='/page;jsessionid={name}?s={name}'>x</a>" for name in names))


@kind()
async def deeper_and_deeper(line: Line, path: str) -> bool:
    return await line.answer(f"<a href='{path}a/'>a</a><a href='{path}a/../b/'>b</a>")


@kind()
async def links_to_everywhere(line: Line, _path: str) -> bool:
    odd = [
        "http://127.0.0.1:99999/",
        "http:///x",
        "http://user:pw@127.0.0.1/",
        "javascript:x()",
        "http://[::",
        "//",
        "tel:1",
        "http://127.0.0.1:0/",
        "mailto:a@b",
        "data:,x",
        "/%00",
    ]
    odd += ["\\\\x\\y", "/a\nb", "/a\tb"]
    return await line.answer("".join(f"<a href='{place}'>x</a>" for place in odd))


pages("million_links", lambda turn: "".join(f"<a href=/l{n}>" for n in range(250_000 * (turn + 1))))
pages("long_links", lambda _turn: "".join(f"<a href='/{'x' * 3000}{n}'>x</a>" for n in range(3000)))
pages("base_elsewhere", lambda _turn: "<base href='http://127.40.0.1:9/'>" + "<a href=x>x</a>" * 1000)


# -- documents ---------------------------------------------------------------------------------------

pages("deep_divs", lambda turn: "<div>" * (50_000 * (turn + 1)) + "x")
pages("deep_mixed", lambda turn: "<b><i><a href=/><p>" * (10_000 * (turn + 1)))
pages("deep_lists_around_pre", lambda turn: "<ul><li>" * (500 * (turn + 1)) + "<pre>" + "line\n" * 100_000)
pages(
    "deep_quotes_around_pre", lambda turn: "<blockquote>" * (500 * (turn + 1)) + "<pre>" + "line\n" * 100_000
)
pages("nested_headers", lambda turn: "<header>" * (600 * (turn + 1)) + "x")
pages("nested_tables", lambda turn: "<table><tr><td>" * (2000 * (turn + 1)) + "x")
pages("wide_table", lambda turn: "<table>" + ("<tr>" + "<td>x" * 500) * (500 * (turn + 1)))
pages("million_paragraphs", lambda turn: "<p>" * (500_000 * (turn + 1)))
pages(
    "million_attributes", lambda turn: "<p " + " ".join(f"a{n}=x" for n in range(200_000 * (turn + 1))) + ">"
)
pages("giant_attribute", lambda turn: f"<a href='/{'x' * (2_000_000 * (turn + 1))}' title=x>x</a>")
pages("giant_title", lambda turn: f"<title>{'x' * (2_000_000 * (turn + 1))}</title>")
pages("giant_text", lambda turn: "<p>" + "word " * (400_000 * (turn + 1)))
pages("open_comment", lambda turn: "<!--" * (500_000 * (turn + 1)))
pages("open_script", lambda turn: "<script>" * (250_000 * (turn + 1)))
pages("entities", lambda turn: "&amp;&#x41;&nosuch;" * (100_000 * (turn + 1)))
pages("formatting_bomb", lambda turn: "<b><p>" * (5_000 * (turn + 1)))
pages("nested_forms", lambda turn: "<form><select><option>" * (5_000 * (turn + 1)))
pages("svg_and_math", lambda turn: "<svg><math><annotation-xml>" * (5_000 * (turn + 1)))
pages("nul_bytes", lambda turn: bytes(2 * MEGA * (turn + 1)))
pages("no_markup", lambda turn: os.urandom(2 * MEGA * (turn + 1)))


@kind()
async def charsets(line: Line, _path: str) -> bool:
    name = ("zlib_codec", "utf-7", "utf-16", "x-nobody-knows")[line.turn % 4]
    return await line.answer(PAGE * 20 + b"\xff\xfe\x00" * 333, kind=f"text/html; charset={name}")


@kind()
async def types_that_lie(line: Line, _path: str) -> bool:
    kinds = ("image/png", "application/octet-stream", "a" * 5000, "text/html; charset=\"'; x")
    return await line.answer(PAGE, kind=kinds[line.turn % 4])


@kind()
async def video(line: Line, _path: str) -> None:
    await line.send(OK, b"Content-Type: video/mp4\r\nContent-Length: 9000000\r\n\r\n")
    for _ in range(137):
        await line.send(BLOCK)


@kind()
async def mixed_replace(line: Line, _path: str) -> None:
    await line.send(OK, b"Content-Type: multipart/x-mixed-replace; boundary=b\r\n\r\n")
    await line.drip(b"", 0.3, then=b"--b\r\nContent-Type: image/jpeg\r\n\r\n" + BLOCK)


LAUGHS = "<!DOCTYPE l [<!ENTITY a 'lol'>" + "".join(
    f"<!ENTITY {chr(98 + n)} '{f'&{chr(97 + n)};' * 10}'>" for n in range(9)
)
pages("xml_laughs", lambda _turn: f"<?xml version='1.0'?>{LAUGHS}]><l>&j;</l>", "application/xml")
pages(
    "sitemap_bomb",
    lambda turn: "<urlset>" + "".join(f"<url><loc>/{n}</loc></url>" for n in range(100_000 * (turn + 1))),
    "application/xml",
)
pages("json_bomb", lambda turn: "[" * (1_000_000 * (turn + 1)), "application/json")


# -- robots.txt ---------------------------------------------------------------------------------------


@kind("robots")
async def robots_stalls(line: Line, _path: str) -> None:
    await line.stall()


@kind("robots")
async def robots_drips(line: Line, _path: str) -> None:
    await line.send(OK, b"Content-Type: text/plain\r\nContent-Length: 500000\r\n\r\nUser-agent: *\n")
    await line.drip(b"", 0.3, then=b"Disallow: /private/" + b"x" * 600 + b"\n")


@kind("robots")
async def robots_without_end(line: Line, _path: str) -> None:
    await line.send(OK, b"Content-Type: text/plain\r\n\r\nUser-agent: *\n")
    await line.flood(b"Disallow: /private\n" * 1000)


@kind("robots")
async def robots_redirects(line: Line, path: str) -> bool:
    return await line.redirect(path if line.turn % 2 else f"{path}x")


@kind("robots")
async def robots_fails(line: Line, _path: str) -> bool:
    return await line.answer(b"no", ("500 No", "503 Busy", "429 Slow", "401 Who")[line.turn % 4])


@kind("robots")
async def robots_wildcards(line: Line, _path: str) -> bool:
    return await line.answer(_wildcards(), kind="text/plain")


@kind("robots")
async def robots_crawl_delay(line: Line, _path: str) -> bool:
    delay = ("1e9", "86400", "-5", "nan")[line.turn % 4]
    return await line.answer(f"User-agent: *\nCrawl-delay: {delay}\n", kind="text/plain")


@kind("robots")
async def robots_noise(line: Line, _path: str) -> bool:
    return await line.answer(os.urandom(300_000), kind="text/plain")


@kind("robots")
async def robots_bomb(line: Line, _path: str) -> bool:
    return await _encoded(line, "gzip", bomb("gzip"))


@kind("robots")
async def robots_closes(_line: Line, _path: str) -> None:
    return


@kind("robots")
async def robots_forbids_all(line: Line, _path: str) -> bool:
    return await line.answer("User-agent: *\nDisallow: /\n", kind="text/plain")


@kind("robots")
async def robots_long_line(line: Line, _path: str) -> bool:
    return await line.answer(b"User-agent: *\nDisallow: /" + b"x" * 900_000, kind="text/plain")


# -- serving ----------------------------------------------------------------------------------------


def honest(count: int) -> Behaviour:
    """Pages in a chain, each with a link to the next two and home."""

    async def serve(line: Line, path: str) -> bool:
        await asyncio.sleep(LATENCY)
        number = int(path[1:] or 0)
        links = "".join(f"<a href='/{n}'>page {n}</a>" for n in (number + 1, number + 2) if n < count)
        words = "Plain words that somebody may want to read. " * 40
        await line.answer(f"<title>Page {number} of {line.host}</title><p>{words}<a href='/'>home</a>{links}")
        return True

    return serve


class Hosts:
    def __init__(self, network: str, kinds: list[tuple[str, Kind]]) -> None:
        self.kinds = kinds
        self.network = network
        self.port = 0
        self.log: list[tuple[float, str]] = []
        self._kept: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def address(self, number: int) -> str:
        return f"{self.network}.{number // 250}.{number % 250 + 1}"

    async def start(self) -> None:
        for number, (_, kind) in enumerate(self.kinds):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self.address(number), self.port))
            self.port = sock.getsockname()[1]
            if kind.at == "full":
                self._fill(sock)
                continue
            await asyncio.start_server(self._connected(number), sock=sock, backlog=64)

    def _fill(self, sock: socket.socket) -> None:
        """Listen, and let nobody in: what is more than the backlog is dropped."""
        sock.listen(0)
        self._kept.append(sock)
        for _ in range(4):
            idle = socket.socket()
            idle.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                idle.connect(sock.getsockname())
            self._kept.append(idle)

    def url(self, number: int) -> str:
        scheme = "https" if self.kinds[number][1].at == "tls" else "http"
        return f"{scheme}://{self.address(number)}:{self.port}/"

    def turn(self, number: int) -> int:
        """How many of the same kind there are before this one."""
        return sum(kind is self.kinds[number][1] for _, kind in self.kinds[:number])

    def _connected(self, number: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        kind, turn = self.kinds[number][1], self.turn(number)

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = Line(reader, writer, turn, self.port)
            task = asyncio.ensure_future(self._talk(line, kind))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return connected

    async def _talk(self, line: Line, kind: Kind) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, ValueError):
            try:
                if kind.at in ("accept", "tls"):
                    self.log.append((time.monotonic(), line.origin))
                    await kind.behaviour(line, "")
                    return
                while await self._answered(line, kind):
                    continue
            finally:
                line.writer.close()

    async def _answered(self, line: Line, kind: Kind) -> bool:
        head = await line.reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode("latin-1")
        line.requests += 1
        if self.network == HOSTILE:
            self.log.append((time.monotonic(), line.origin + path))
        if (path.startswith("/robots.txt")) == (kind.at == "robots") or kind.at == "all":
            kept = await kind.behaviour(line, path)
        else:
            kept = await line.answer(*((b"none", "404 None") if path == "/robots.txt" else (PAGE,)))
        if self.network == HONEST:
            self.log.append((time.monotonic(), line.origin + path))
        return bool(kept)


async def serve(role: str, hosts: int, count: int, kinds: str) -> None:
    if role == "honest":
        served = Hosts(HONEST, [("honest", Kind(honest(count), "page"))] * hosts)
    else:
        os.nice(5)  # in life these are on machines of their own
        names = [name for name in KINDS if re.fullmatch(kinds, name)]
        served = Hosts(HOSTILE, [(name, KINDS[name]) for name in (names * (hosts // len(names) + 1))[:hosts]])
        for coding in ("gzip", "br", "gzip, gzip"):
            bomb(coding)
        for make in (_words, _wildcards, lambda: (_deflated(15), _deflated(-15))):
            make()
        for number, (_, each) in enumerate(served.kinds):
            each.make(served.turn(number) % 4)
    await served.start()
    start = [served.url(number) for number in range(hosts)]
    told = {
        "start": start,
        "kinds": {url: name for url, (name, _) in zip(start, served.kinds, strict=True)},
        "pages": [f"{url}{n or ''}" for url in start for n in range(count)] if role == "honest" else [],
    }
    print(json.dumps(told), flush=True)
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin.buffer)
    while await commands.readline():
        print(json.dumps(served.log), flush=True)


def main() -> None:
    parser = ArgumentParser(description="Honest or hostile hosts on loopback, until standard input ends.")
    parser.add_argument("role", choices=("honest", "hostile"))
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--kinds", default=".*", help="only hostile kinds whose name is like this")
    given = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    asyncio.run(serve(given.role, given.hosts, given.pages, given.kinds))


if __name__ == "__main__":
    main()
