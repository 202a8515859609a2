"""One transfer: a pooled libcurl handle, its limits, and its result.

libcurl moves the bytes. Phases, deadlines, limits and the class of every error are decided here, because
libcurl's own codes are too coarse to decide about retries.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import pycurl
from msgspec import Struct

from shoal.errors import BadUrl, FetchError
from shoal.fetch.connections import Connection, Connections, Idle
from shoal.fetch.decode import decode, layers
from shoal.fetch.guard import Guard, refusal
from shoal.fetch.port import OURS, Ask, Limits, NotSent, Unwanted, is_readable
from shoal.fetch.redirects import REDIRECTS
from shoal.model import LARGE, Response
from shoal.urls import MAX_LENGTH, canonical

MAX_INTERIM: Final = 20
"""1xx responses before the real one."""
LIGHT: Final = 64 * 1024
"""Bytes of a body that may be kept before the gate is asked for room, and between two such questions."""
_SMALL: Final = 4096
_PIECE: Final = 64 * 1024
"""Pieces of a body smaller than `_SMALL` are joined into pieces of up to `_PIECE`: an object of its own for
every two bytes takes thirty times their memory."""
_SPARE_BODY: Final = 16 * 1024
"""A redirect's body is discarded. Reading this many bytes of it is cheaper than a new connection."""

_URL = re.compile(
    r"(https?)://(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9._~-]+)(?::([0-9]{1,5}))?(?:[/?][\x21\x22\x24-\x7e]*)?\Z"
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_CONTROL_BYTES = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)")
_STATUS = re.compile(r"HTTP/([0-9](?:\.[0-9])?) +([0-9]{3})(?: |$)")
_LENGTH = re.compile(r"[0-9]{1,30}")
_CONDITIONS = frozenset({"if-none-match", "if-modified-since", "if-range"})

# libcurl's codes by number: pycurl names only some of them.
_TLS_CODES = frozenset({35, 53, 54, 58, 59, 60, 64, 66, 77, 80, 82, 83, 90, 91, 98})
_BREAKS = ("reset by peer", "syscall", "unexpected eof", "send failure", "recv failure")
_TOO_LARGE = 100


class Target(Struct, frozen=True):
    """The parts of a URL that decide where to connect."""

    url: str
    host: str
    port: int


def target_of(url: str) -> Target:
    """Returns the parts of a URL. Raises FetchError for a URL that may not be fetched."""
    found = _URL.match(url) if len(url) <= MAX_LENGTH else None
    if found is None:
        try:
            url = canonical(url)
        except BadUrl as bad:
            raise FetchError(bad.error, bad.why) from None
        found = _URL.match(url)
        if found is None:
            raise FetchError("url_invalid", "the URL contains characters that cannot be sent")
    scheme, host, port = found.groups()
    number = int(port) if port else (443 if scheme == "https" else 80)
    if not 0 < number < 65536:
        raise FetchError("url_invalid", f"port {number} does not exist")
    return Target(url, host[1:-1] if host[0] == "[" else host, number)


class Job:
    """One fetch on its way through the driver."""

    __slots__ = (
        "addresses",
        "ask",
        "cancelled",
        "deadline",
        "future",
        "private",
        "slot",
        "started",
        "target",
    )

    def __init__(
        self,
        ask: Ask,
        target: Target,
        addresses: tuple[str, ...],
        *,
        private: bool,
        future: asyncio.Future[Response],
        started: float,
    ) -> None:
        self.ask = ask
        self.target = target
        self.addresses = addresses
        self.private = private
        self.future = future
        self.started = started
        self.deadline = started + ask.limits.total
        self.slot: Slot | None = None
        self.cancelled = False


class Setup(Struct, frozen=True):
    """What every handle of one fetcher has in common."""

    guard: Guard
    headers: tuple[tuple[str, str], ...]
    lines: tuple[bytes, ...]
    ca_file: str
    http2: bool


class Slot:
    """One easy handle and the state of the transfer that uses it."""

    __slots__ = (
        "address", "body_limit", "coding", "connect_by", "connection", "connections", "curl", "decoded",
        "early", "error", "fd", "fresh", "head_bytes", "head_lines", "headers", "interim", "is_final", "job",
        "limits", "lines", "moved", "needed", "next_address", "no_reuse", "opened", "paused", "pieces",
        "plain", "roomy", "sent", "setup", "since", "spare", "stale", "started", "status", "version",
        "wanted", "weighed", "window_start", "window_wire", "wire", "wire_seen",
    )  # fmt: skip

    job: Job
    limits: Limits

    def __init__(self, setup: Setup, connections: Connections) -> None:
        self.setup = setup
        self.connections = connections
        self.connection: Connection | None = None
        self.plain = False
        self.fresh = False
        self.curl = self._handle()
        self.pieces: list[bytes | bytearray] = []
        self.lines: list[bytes] = []
        self.next_address = 0
        self.opened: socket.socket | None = None

    def _handle(self) -> Any:
        curl = pycurl.Curl()
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.PROXY, "")  # or the environment would decide where the bytes go
        curl.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        curl.setopt(pycurl.FOLLOWLOCATION, 0)
        curl.setopt(pycurl.PATH_AS_IS, 1)  # the URL is canonical already
        curl.setopt(pycurl.HTTP09_ALLOWED, 0)
        curl.setopt(pycurl.NETRC, pycurl.NETRC_IGNORED)
        curl.setopt(pycurl.SSL_VERIFYPEER, 1)
        curl.setopt(pycurl.SSL_VERIFYHOST, 2)
        curl.setopt(pycurl.SSLVERSION, pycurl.SSLVERSION_TLSv1_2)
        curl.setopt(pycurl.CAINFO, self.setup.ca_file)
        curl.setopt(pycurl.TCP_NODELAY, 1)
        curl.setopt(pycurl.BUFFERSIZE, 64 * 1024)
        curl.setopt(pycurl.DNS_CACHE_TIMEOUT, 0)  # libcurl is given addresses only
        # The sweep enforces deadlines. This one only replaces libcurl's own default.
        curl.setopt(pycurl.CONNECTTIMEOUT_MS, 600_000)
        http2 = pycurl.CURL_HTTP_VERSION_2TLS
        curl.setopt(pycurl.HTTP_VERSION, http2 if self.setup.http2 else pycurl.CURL_HTTP_VERSION_1_1)
        curl.setopt(pycurl.HEADERFUNCTION, self._on_header)
        curl.setopt(pycurl.WRITEFUNCTION, self._on_body)
        curl.setopt(pycurl.OPENSOCKETFUNCTION, self._on_socket)
        curl.setopt(pycurl.SOCKOPTFUNCTION, self._on_socket_made)
        curl.setopt(pycurl.PREREQFUNCTION, self._on_ready)
        return curl

    def begin(self, job: Job, now: float, *, again: bool = False) -> None:
        """Prepare the handle for `job` and its next address; with `again`, for the last address once more, on
        a new connection."""
        ask = job.ask
        self.job = job
        self.limits = limits = ask.limits
        self.body_limit = limits.body
        self.started = now
        self.error: FetchError | None = None
        self.fd = -1
        self.status = 0
        self.version = ""
        self.headers: tuple[tuple[str, str], ...] = ()
        self.coding: list[str] = []
        self.interim = self.head_bytes = self.head_lines = 0
        self.wire = self.wire_seen = self.window_wire = 0
        self.moved = self.window_start = now
        self.early = self.sent = self.spare = self.stale = self.is_final = False
        self.connection = None
        self.weighed = 0
        self.no_reuse = self.connections.doubts(job.target.host, job.target.port)
        if again:
            self.next_address -= 1
        self.roomy = LIGHT
        self.wanted = self.needed = 0
        self.decoded: bytes | None = None
        self.paused = 0.0
        self.pieces.clear()
        self.lines.clear()
        self.address = address = job.addresses[self.next_address]
        if not self.next_address:
            self.since = now
        self.next_address += 1
        left = len(job.addresses) - self.next_address
        connect = limits.connect - (now - self.since)
        # All addresses share the time to connect: each but the last may use half of the rest.
        self.connect_by = now + (connect / 2 if left else connect)

        curl = self.curl
        curl.setopt(pycurl.URL, job.target.url)
        # An empty host and port match every URL, however libcurl parses it, so the pin cannot miss.
        # (RESOLVE would stay in the multi's cache, and one pin's connection would serve another.)
        place = f"[{address}]" if ":" in address else address
        curl.setopt(pycurl.CONNECT_TO, [f"::{place}:{job.target.port}"])
        if self.fresh != (again or self.no_reuse):
            self.fresh = not self.fresh
            curl.setopt(pycurl.FRESH_CONNECT, self.fresh)
        if ask.headers:
            curl.setopt(pycurl.HTTPHEADER, list(header_lines(self.setup.headers, ask.headers)))
            self.plain = False
        elif not self.plain:
            # Always a full list: setting an empty one is silently ignored and would leave the last
            # request's headers, secrets included, on the pooled handle.
            curl.setopt(pycurl.HTTPHEADER, list(self.setup.lines))
            self.plain = True
        if ask.method != "GET" or ask.body is not None:
            self._set_method(ask)

    def _set_method(self, ask: Ask) -> None:
        # Such a handle is never pooled, so that none of its options can leak into a later request.
        curl = self.curl
        if ask.method == "HEAD":
            curl.setopt(pycurl.NOBODY, 1)
            return
        if ask.body is not None or ask.method == "POST":
            curl.setopt(pycurl.POST, 1)
            curl.setopt(pycurl.POSTFIELDS, ask.body or b"")
            # By default libcurl labels it a form and, above a megabyte, waits for a "100 Continue".
            typed = any(name.lower() == "content-type" for name, _ in ask.headers)
            unwanted = [b"Expect:"] if typed else [b"Expect:", b"Content-Type:"]
            curl.setopt(pycurl.HTTPHEADER, [*header_lines(self.setup.headers, ask.headers), *unwanted])
            self.plain = False
        if ask.method != "POST":
            curl.setopt(pycurl.CUSTOMREQUEST, ask.method)

    @property
    def poolable(self) -> bool:
        return self.job.ask.method == "GET" and self.job.ask.body is None

    # Callbacks. They run inside libcurl, where an exception would be printed and become another error.

    def _fail(self, error: FetchError) -> int:
        self.error = error
        return -1

    def _on_socket(self, _purpose: int, place: Any) -> Any:
        """The guard's second check: of the address that is about to be used, wherever it comes from."""
        try:
            address, port = place.addr[0], place.addr[1]
            pinned = address == self.address and port == self.job.target.port
            if not pinned or (not self.job.private and self.setup.guard.refuses(address)):
                self.error = refusal()
                return pycurl.SOCKET_BAD
            self.opened = socket.socket(place.family, place.socktype, place.protocol)
        except OSError as failure:
            self.error = FetchError("connect_failed", f"no socket: {os.strerror(failure.errno or 0)}")
        except Exception as failure:
            self.error = FetchError("internal", f"guard: {failure!r}")
        else:
            return self.opened
        return pycurl.SOCKET_BAD

    def _on_socket_made(self, fd: int, _purpose: int) -> int:
        self.fd = fd
        self.connections.forget(fd)
        self._close_opened()
        return 0

    def _close_opened(self) -> None:
        """Close our socket: libcurl has a duplicate of it."""
        if self.opened is not None:
            self.opened.close()
            self.opened = None

    def _is_connected(self) -> bool:
        """Whether the TCP connection is open. libcurl reports times only of a connection that is complete."""
        if self.fd < 0:
            return False
        try:
            with socket.socket(fileno=os.dup(self.fd)) as twin:
                twin.getpeername()
        except OSError:
            return False
        return True

    def _on_ready(self, *ends: object) -> int:
        """The connection is open, and libcurl writes the request as soon as this returns. It calls again if a
        reused connection turns out to be closed and the request would be sent once more."""
        if not self._is_usable(ends):
            self.stale = True
            return int(pycurl.PREREQFUNC_ABORT)
        gate = self.job.ask.gate
        if gate is None or gate.may_send():
            self.sent = True
            return int(pycurl.PREREQFUNC_OK)
        self.error = NotSent()
        return int(pycurl.PREREQFUNC_ABORT)

    def _is_usable(self, ends: tuple[object, ...]) -> bool:
        """Take note of the connection. Returns whether it is open and nothing of an earlier response waits on
        it."""
        if self.fd >= 0:
            self.connection = self.connections.add(self.fd, ends)
        else:
            self.connection = kept = self.connections.between(ends)
            if kept is not None and kept.exclusive:
                idle = kept.idle()
                if idle is Idle.SPOKE:
                    self._doubt()
                if idle is not Idle.QUIET:
                    return False
                self.weighed = kept.received() if self.secure else -1
        if self.connection is not None:
            self.connection.user = self
        return True

    def _doubt(self) -> None:
        self.connections.doubt(self.job.target.host, self.job.target.port)

    def _is_stale(self) -> bool:
        """Whether a response begins although none of its bytes was received since the request left.

        TLS reads ahead: bytes right behind the last response may be in its own buffer, where they cannot be
        seen from the socket. libcurl takes them from there as soon as anything arrives.
        """
        kept = self.connection
        if kept is None:
            return False
        unread = kept.unread()  # first: bytes that arrive in between must not count as unread
        return kept.received() - self.weighed <= unread

    @property
    def secure(self) -> bool:
        return self.job.target.url.startswith("https:")

    @property
    def is_reused(self) -> bool:
        """Whether the request was sent on a connection that earlier requests had used."""
        return self.connection is not None and self.fd < 0

    def _on_header(self, line: bytes) -> int | None:
        if not self.head_bytes and self.weighed > 0 and self._is_stale():
            self.stale = True
            self._doubt()
            return -1
        self.head_bytes += len(line)
        self.head_lines += 1
        limits = self.limits
        if self.head_bytes > limits.header_bytes or self.head_lines > limits.header_lines:
            return self._fail(FetchError("header_overflow", "the head is too large"))
        if self.status:
            return None  # a trailer: counted, not kept
        if len(line) > 2 or line not in (b"\r\n", b"\n"):
            self.lines.append(line)
            return None
        try:
            return self._on_head()
        except FetchError as error:
            return self._fail(error)
        except Exception as failure:
            return self._fail(FetchError("internal", f"head: {failure!r}"))

    def _on_head(self) -> int | None:
        """The head is complete: decide what to do with the body before it arrives."""
        raw = b"".join(self.lines)
        self.lines.clear()
        if _CONTROL_BYTES.search(raw):
            raise FetchError("protocol_error", "a header contains a control character")
        head = raw.decode("latin-1").replace("\r\n", "\n").rstrip("\n").split("\n")
        found = _STATUS.match(head[0])
        status = int(found[2]) if found else 0
        if found is None or status < 100:
            self.stale = self.is_reused and not self.interim
            raise FetchError("protocol_error", "the status line is not valid")
        if status < 200:
            self.interim += 1
            if self.interim > MAX_INTERIM or status == 101:
                raise FetchError("protocol_error", "too many interim responses, or one to switch protocols")
            return None
        headers: list[tuple[str, str]] = []
        for line in head[1:]:
            if line[:1] in (" ", "\t") and headers:
                name, value = headers.pop()  # obs-fold
                headers.append((name, f"{value} {line.strip()}"))
                continue
            name, _, value = line.partition(":")
            headers.append((name.rstrip().lower(), value.strip(" \t")))
        self.status = status
        self.version = found[1]
        if self.connection is not None:
            self.connection.exclusive = found[1][0] == "1"
        self.headers = tuple(headers)
        return self._on_fields(headers)

    def _on_fields(self, headers: list[tuple[str, str]]) -> int | None:
        length = coding = kind = ""
        chunked = False
        for name, value in headers:
            if name == "content-length":
                if not _LENGTH.fullmatch(value) or (length and int(length) != int(value)):
                    raise FetchError("protocol_error", "Content-Length is not one number")
                length = value
            elif name == "content-encoding":
                coding = f"{coding},{value}" if coding else value
            elif name == "transfer-encoding":
                chunked = True
            elif name == "content-type":
                kind = value
        status, ask = self.status, self.job.ask
        if status in (206, 304):
            asked = {name.lower() for name, _ in ask.headers}
            if not asked & (_CONDITIONS if status == 304 else {"range"}):
                raise FetchError("protocol_error", f"status {status} was not asked for")
        # Two framings at once are used to smuggle requests. The chunks win, as in all clients, but bytes that
        # follow on the connection cannot be trusted.
        self.no_reuse = self.no_reuse or bool(chunked and length)
        self.is_final = not 200 <= status < 300
        if ask.method == "HEAD" or status in (204, 304):
            return None
        self.spare = status in REDIRECTS
        size = int(length) if length and not chunked else 0
        if self.spare:
            if size > _SPARE_BODY:
                self.early = True
                return -1
            return None
        if ask.text and not self.is_final and not is_readable(kind):
            raise Unwanted(kind)
        if size > self.body_limit and not self.limits.cut:
            raise FetchError("body_too_large", f"{size:,} bytes announced, {self.body_limit:,} allowed")
        self.coding = layers(coding)
        return None

    def _on_body(self, data: bytes) -> int | None:
        if self.wire + len(data) > self.roomy and not self.has_room(self.wire + len(data) + LIGHT):
            return int(pycurl.WRITEFUNC_PAUSE)  # the same bytes come again when the transfer continues
        self.wire = wire = self.wire + len(data)
        if self.spare:
            if wire <= _SPARE_BODY:
                return None
            self.early = True
            return -1
        if wire > self.body_limit:
            if self.limits.cut:
                self.pieces.append(data)
                self.early = True
                return -1
            return self._fail(
                FetchError("body_too_large", f"the body is larger than {self.body_limit:,} bytes")
            )
        pieces = self.pieces
        if not pieces or len(data) >= _SMALL:
            pieces.append(data)
        elif isinstance(pieces[-1], bytearray) and len(pieces[-1]) < _PIECE:
            pieces[-1] += data
        else:
            pieces.append(bytearray(data))
        return None

    # Called by the driver.

    def has_room(self, size: int) -> bool:
        """Returns whether there is room for this many bytes. If not, the transfer pauses, and so do its
        deadlines."""
        gate = self.job.ask.gate
        if size > self.roomy and gate is not None and not gate.has_room(size):
            self.wanted = size
            self.paused = self.paused or time.monotonic()
            return False
        self.roomy = max(self.roomy, size)
        return True

    def needs(self) -> int:
        """Returns the bytes that the decoded body takes; for a large body, the most that it may take."""
        if not self.needed:
            self.needed = self.wire + LIGHT
            if self.body_limit > LARGE:
                # Its first part is decoded to find out. If that is all of it, it is not decoded again.
                with suppress(FetchError):  # `result` meets the error again, and raises it
                    first = decode(self.pieces, self.coding, LARGE, cut=True, torn=self.early)
                    self.needed = self.body_limit if len(first) >= LARGE else self.needed
                    self.decoded = first if len(first) < LARGE else None
        return self.needed

    def go_on(self, now: float) -> None:
        """There is room again. The time of the pause does not count."""
        self.job.deadline += now - self.paused
        self.paused = 0.0
        self.moved = self.window_start = now
        self.window_wire = self.wire

    def late(self, now: float) -> FetchError | None:
        """Returns the error of a deadline that has passed; None if none has."""
        limits, waited = self.limits, now - self.started
        if now >= self.job.deadline:
            return FetchError("deadline", f"not finished within {limits.total:g} s")
        if not self.status:
            return self._late_head(now, waited)
        if self.wire != self.wire_seen:
            self.wire_seen, self.moved = self.wire, now
        elif now - self.moved >= limits.idle:
            return FetchError("idle_timeout", f"no byte for {limits.idle:g} s")
        span = now - self.window_start
        if span >= limits.rate_window:
            if self.wire - self.window_wire < limits.min_rate * span:
                return FetchError("slow_transfer", f"less than {limits.min_rate:,} bytes/s for {span:.0f} s")
            self.window_start, self.window_wire = now, self.wire
        return None

    def _late_head(self, now: float, waited: float) -> FetchError | None:
        # The body's clocks begin with the first check after the head.
        self.moved = self.window_start = now
        limits = self.limits
        if now < self.connect_by and waited < limits.first_byte:
            return None
        ready = float(self.curl.getinfo(pycurl.PRETRANSFER_TIME))
        if ready:
            if waited - ready < limits.first_byte:
                return None
            return FetchError("first_byte_timeout", f"no complete head within {limits.first_byte:g} s")
        if now < self.connect_by:
            return None
        if self.secure and self._is_connected():
            return FetchError("tls_timeout", f"no TLS handshake within {limits.connect:g} s")
        return FetchError("connect_timeout", f"no connection within {limits.connect:g} s")

    def weigh(self, connection: Connection) -> FetchError | None:
        """Returns an error if more bytes were received than the largest body can need."""
        received = connection.received()
        if self.weighed < 0:
            self.weighed = received  # the first reads are not counted: measuring before each page costs more
        if received - self.weighed <= self.limits.wire:
            return None
        return FetchError("body_too_large", f"the response takes more than {self.limits.wire:,} bytes")

    def result(self, now: float) -> Response:
        """Returns the response of a transfer that succeeded. Raises FetchError if its body is bad."""
        if not self.status:
            raise FetchError("empty_reply", "the connection ended inside the head of the response")
        return self._response(b"" if self.spare else self._body(), now)

    def without_body(self, now: float) -> Response | None:
        """Returns the response although its body failed, if its status is enough: a redirect, or an HTTP
        error. None for any other status."""
        return self._response(b"", now) if self.is_final else None

    def _response(self, body: bytes, now: float) -> Response:
        job = self.job
        return Response(
            url=job.ask.url,
            status=self.status,
            headers=self.headers,
            body=body,
            seconds=now - job.started,
            address=self.address,
            http=self.version,
        )

    def _body(self) -> bytes:
        if self.decoded is not None:
            return self.decoded
        if self.coding:
            return decode(self.pieces, self.coding, self.body_limit, cut=self.limits.cut, torn=self.early)
        body = bytes(self.pieces[0]) if len(self.pieces) == 1 else b"".join(self.pieces)
        return body[: self.body_limit] if self.early else body

    def spoiled(self, code: int) -> bool:
        """Whether the connection is to blame, and not the server's response: it was reused, and it held bytes
        already or begins with bytes that are not a response. Another connection may work."""
        if self.stale and not self.sent:
            return True
        if self.job.ask.method not in ("GET", "HEAD") or self.job.ask.body is not None:
            return False  # the server may have executed it
        return self.stale or (code in (1, 8) and self.is_reused and not self.head_lines)

    def failure(self, code: int, text: str) -> FetchError:
        """Returns our error for libcurl's code, by the phase of the transfer."""
        if self.error is not None:
            return self.error
        if self.stale:
            return FetchError("protocol_error", "the connection held a response to another request")
        lower = text.lower()
        if code == 7:
            refused = self.curl.getinfo(pycurl.OS_ERRNO) == errno.ECONNREFUSED
            return FetchError("connect_refused" if refused else "connect_failed", "cannot connect")
        if code == 28:
            return FetchError("connect_timeout" if not self.head_bytes else "deadline", "timed out")
        if code in _TLS_CODES:
            if not self.status and any(word in lower for word in _BREAKS):
                return FetchError("reset", "the connection broke in the TLS handshake")
            return FetchError("tls_invalid", text)
        if code == 52:
            return FetchError("empty_reply", "the server closed the connection without a response")
        if code == 18:
            return FetchError("truncated", "the body is shorter than announced")
        if code in (55, 56, 92, 16):
            return self._broken(code, lower)
        if code == _TOO_LARGE:
            return FetchError("header_overflow", "the head is too large")
        if code in (1, 8):
            # Code 1 comes from a new connection, code 8 from one that carried HTTP before.
            strange = not self.head_lines and ("http/0.9" in lower or "invalid status line" in lower)
            return FetchError("not_http" if strange else "protocol_error", text)
        if code == 3:
            return FetchError("url_invalid", "the URL cannot be sent")
        if code == 61:
            return FetchError("protocol_error", text)
        return FetchError("internal", f"libcurl {code}: {text}")

    def _broken(self, code: int, lower: str) -> FetchError:
        """Returns the error of a connection that ended early, or whose bytes made no sense: libcurl has one
        code for both."""
        if "too large" in lower or "too long" in lower:
            return FetchError("header_overflow", "the head is too large")
        if "refused_stream" in lower:
            return FetchError("reset", "the server refused the stream")
        if code in (92, 16) or any(
            word in lower for word in ("chunk", "illegal", "invalid", "malformed", "hex")
        ):
            return FetchError("protocol_error", "the response is not valid HTTP")
        if "eof" in lower and self.status:
            return FetchError("truncated", "the connection ended inside the body")
        return FetchError("reset", "the connection was reset")

    def release(self) -> None:
        """Forget the request, so that an idle handle holds no page in memory."""
        self.pieces.clear()
        self.decoded = None
        self.lines.clear()
        self.headers = ()
        self.error = None
        self.next_address = 0
        self.connection = None
        self._close_opened()


@lru_cache(maxsize=1024)
def header_lines(
    defaults: tuple[tuple[str, str], ...], headers: tuple[tuple[str, str], ...]
) -> tuple[bytes, ...]:
    """Returns the header lines of a request: its own `headers`, and the defaults of other names.

    Raises FetchError for a name or value that would break out of its line.
    """
    merged = {name.lower(): (name, value) for name, value in defaults}
    for name, value in headers:
        key = name.lower()
        if not _TOKEN.match(name) or CONTROL.search(value):
            raise FetchError("protocol_error", f"request header {name[:40]!r} cannot be sent")
        if key not in OURS:
            merged[key] = (name, value)
    # For libcurl "Name;" is a header with an empty value; "Name:" would remove the header.
    return tuple((f"{name}: {value}" if value else f"{name};").encode() for name, value in merged.values())
