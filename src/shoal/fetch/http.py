"""The HTTP fetcher: libcurl on a thread of its own.

    fetch()  ──inbox──▶  driver thread  ──one call per turn──▶  futures of the event loop
                         epoll, CurlMulti, slots

Only the driver thread touches libcurl. A *slot* is a pooled easy handle with its callbacks bound
once and its state reset for each request. Every address comes from the resolver, is pinned for
the transfer and is checked once more when libcurl asks for the socket.

libcurl moves the bytes; the judgement is ours: phases, deadlines, limits, decoding and the class
of every error are decided here, because its own codes are too coarse to retry by.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import re
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import certifi
import pycurl
from msgspec import Struct

from shoal.errors import BadUrl, FetchError, UsageError
from shoal.fetch.decode import ACCEPTED, decode, layers
from shoal.fetch.guard import Guard, Resolver, refusal
from shoal.fetch.port import Ask, Limits
from shoal.model import Response
from shoal.urls import canonical

SWEEP: Final = 0.25
"""Seconds between two looks at every running transfer: how late a deadline can be."""
MAX_INTERIM: Final = 20
"""1xx answers before the real one."""
_SPARE_BODY: Final = 16 * 1024
"""A redirect's body is thrown away; reading this much of it is cheaper than a new connection."""
_IDLE_SLOTS: Final = 256
_MAX_EVENTS: Final = 256

_URL = re.compile(
    r"(https?)://(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9._~-]+)(?::([0-9]{1,5}))?(?:[/?][\x21\x22\x24-\x7e]*)?\Z"
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_METHOD = re.compile(r"[A-Z]{1,20}\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_CONTROL_BYTES = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)")
_STATUS = re.compile(r"HTTP/([0-9](?:\.[0-9])?) +([0-9]{3})(?: |$)")
# These describe the connection or the coding, which are ours to choose: a header set copied from a
# browser would otherwise ask for encodings we do not speak or desynchronise the connection.
_OURS = frozenset((
    "accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
))  # fmt: skip
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CONDITIONS = frozenset({"if-none-match", "if-modified-since", "if-range"})

# libcurl's codes by number: pycurl names only some of them.
_TLS_CODES = frozenset({35, 53, 54, 58, 59, 60, 64, 66, 77, 80, 82, 83, 90, 91, 98})
_WRITE_ERROR = 23
_TOO_LARGE = 100


def default_user_agent() -> str:
    """`shoal/<version> (+<project page>)`: says who we are and where to complain."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("shoal")
    except PackageNotFoundError:
        release = "0"
    return f"shoal/{release} (+https://github.com/shoal/shoal)"


class _Target(Struct, frozen=True):
    """The parts of a URL that decide where to connect."""

    url: str
    host: str
    port: int


def _target(url: str) -> _Target:
    """Raises FetchError for a URL that nobody may fetch."""
    found = _URL.match(url)
    if found is None:
        try:
            url = canonical(url)
        except BadUrl as bad:
            raise FetchError(bad.error, bad.why) from None
        found = _URL.match(url)
        if found is None:
            raise FetchError("url_invalid", "the URL holds characters that cannot be sent")
    scheme, host, port = found.groups()
    number = int(port) if port else (443 if scheme == "https" else 80)
    if not 0 < number < 65536:
        raise FetchError("url_invalid", f"port {number}")
    return _Target(url, host[1:-1] if host[0] == "[" else host, number)


class _Job:
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
        target: _Target,
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
        self.slot: _Slot | None = None
        self.cancelled = False


class _Setup(Struct, frozen=True):
    """What every handle of one fetcher has in common."""

    guard: Guard
    headers: tuple[tuple[str, str], ...]
    lines: tuple[bytes, ...]
    ca_file: str
    http2: bool


class _Slot:
    """One easy handle and the state of the transfer that uses it."""

    __slots__ = (
        "address", "body_limit", "coding", "connect_by", "curl", "early", "error", "fd", "head_bytes",
        "head_lines", "headers", "interim", "job", "limits", "lines", "moved", "next_address", "no_reuse",
        "pieces", "plain", "setup", "since", "spare", "started", "status", "version", "window_start",
        "window_wire", "wire", "wire_seen",
    )  # fmt: skip

    job: _Job
    limits: Limits

    def __init__(self, setup: _Setup) -> None:
        self.setup = setup
        self.plain = False
        self.curl = self._handle()
        self.pieces: list[bytes] = []
        self.lines: list[bytes] = []
        self.next_address = 0

    def _handle(self) -> Any:
        curl = pycurl.Curl()
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.PROXY, "")  # or the environment decides where our bytes go
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
        curl.setopt(pycurl.DNS_CACHE_TIMEOUT, 0)  # it only ever sees addresses
        # Deadlines are the sweep's; this one only ends what libcurl would wait for by default.
        curl.setopt(pycurl.CONNECTTIMEOUT_MS, 600_000)
        http2 = pycurl.CURL_HTTP_VERSION_2TLS
        curl.setopt(pycurl.HTTP_VERSION, http2 if self.setup.http2 else pycurl.CURL_HTTP_VERSION_1_1)
        curl.setopt(pycurl.HEADERFUNCTION, self._on_header)
        curl.setopt(pycurl.WRITEFUNCTION, self._on_body)
        curl.setopt(pycurl.OPENSOCKETFUNCTION, self._on_socket)
        curl.setopt(pycurl.SOCKOPTFUNCTION, self._on_socket_made)
        return curl

    def begin(self, job: _Job, now: float) -> None:
        """Make the handle ready for `job` and the next address that was not tried yet."""
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
        self.early = self.spare = self.no_reuse = False
        self.pieces.clear()
        self.lines.clear()
        self.address = address = job.addresses[self.next_address]
        if not self.next_address:
            self.since = now
        self.next_address += 1
        left = len(job.addresses) - self.next_address
        connect = limits.connect - (now - self.since)
        # All addresses share the time to connect: each but the last may use half of what is left.
        self.connect_by = now + (connect / 2 if left else connect)

        curl = self.curl
        curl.setopt(pycurl.URL, job.target.url)
        # An empty host and port match whatever libcurl makes of the URL, so the pin cannot miss.
        # (RESOLVE would stay in the multi's cache and let one pin's connection serve another.)
        place = f"[{address}]" if ":" in address else address
        curl.setopt(pycurl.CONNECT_TO, [f"::{place}:{job.target.port}"])
        if ask.headers:
            curl.setopt(pycurl.HTTPHEADER, request_lines(self.setup.headers, ask))
            self.plain = False
        elif not self.plain:
            # Always a full list: setting an empty one is silently ignored and would leave the last
            # request's headers, secrets included, on the pooled handle.
            curl.setopt(pycurl.HTTPHEADER, list(self.setup.lines))
            self.plain = True
        if ask.method != "GET" or ask.body is not None:
            self._other_method(ask)

    def _other_method(self, ask: Ask) -> None:
        # A handle that did this is never pooled: no option of it can leak into a later request.
        curl = self.curl
        if ask.method == "HEAD":
            curl.setopt(pycurl.NOBODY, 1)
            return
        if ask.body is not None or ask.method == "POST":
            curl.setopt(pycurl.POST, 1)
            curl.setopt(pycurl.POSTFIELDS, ask.body or b"")
            # libcurl would label it a form and, above a megabyte, wait for a "100 Continue".
            typed = any(name.lower() == "content-type" for name, _ in ask.headers)
            unwanted = [b"Expect:"] if typed else [b"Expect:", b"Content-Type:"]
            curl.setopt(pycurl.HTTPHEADER, request_lines(self.setup.headers, ask) + unwanted)
            self.plain = False
        if ask.method != "POST":
            curl.setopt(pycurl.CUSTOMREQUEST, ask.method)

    @property
    def poolable(self) -> bool:
        return self.job.ask.method == "GET" and self.job.ask.body is None

    # Callbacks: they run inside libcurl, where an exception would be printed and mislabelled.

    def _fail(self, error: FetchError) -> int:
        self.error = error
        return -1

    def _on_socket(self, _purpose: int, place: Any) -> Any:
        """The second lock: the address that is about to be used, whatever led to it."""
        try:
            address, port = place.addr[0], place.addr[1]
            pinned = address == self.address and port == self.job.target.port
            if not pinned or (not self.job.private and self.setup.guard.refuses(address)):
                self.error = refusal()
                return pycurl.SOCKET_BAD
            return socket.socket(place.family, place.socktype, place.protocol)
        except OSError as failure:
            self.error = FetchError("connect_failed", f"no socket: {os.strerror(failure.errno or 0)}")
        except Exception as failure:
            self.error = FetchError("internal", f"guard: {failure!r}")
        return pycurl.SOCKET_BAD

    def _on_socket_made(self, fd: int, _purpose: int) -> int:
        self.fd = fd
        return 0

    def _connected(self) -> bool:
        """Whether TCP is through. libcurl only tells the times of a connection that is complete."""
        if self.fd < 0:
            return False
        try:
            with socket.socket(fileno=os.dup(self.fd)) as twin:
                twin.getpeername()
        except OSError:
            return False
        return True

    def _on_header(self, line: bytes) -> int | None:
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
        """The blank line came: decide what to do with the body before it arrives."""
        raw = b"".join(self.lines)
        self.lines.clear()
        if _CONTROL_BYTES.search(raw):
            raise FetchError("protocol_error", "a header holds a control character")
        head = raw.decode("latin-1").replace("\r\n", "\n").rstrip("\n").split("\n")
        found = _STATUS.match(head[0])
        status = int(found[2]) if found else 0
        if found is None or status < 100:
            raise FetchError("protocol_error", "the status line is not valid")
        if status < 200:
            self.interim += 1
            if self.interim > MAX_INTERIM or status == 101:
                raise FetchError("protocol_error", "interim answers without end")
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
        self.headers = tuple(headers)
        return self._on_fields(headers)

    def _on_fields(self, headers: list[tuple[str, str]]) -> int | None:
        length = coding = ""
        chunked = False
        for name, value in headers:
            if name == "content-length":
                if not (value.isascii() and value.isdigit()) or (length and int(length) != int(value)):
                    raise FetchError("protocol_error", "Content-Length is not one number")
                length = value
            elif name == "content-encoding":
                coding = f"{coding},{value}" if coding else value
            elif name == "transfer-encoding":
                chunked = True
        status, ask = self.status, self.job.ask
        if status in (206, 304):
            asked = {name.lower() for name, _ in ask.headers}
            if not asked & (_CONDITIONS if status == 304 else {"range"}):
                raise FetchError("protocol_error", f"status {status} was not asked for")
        # Both framings at once is how requests are smuggled. The chunks win, as for everybody, but
        # what the connection holds after them belongs to nobody.
        self.no_reuse = bool(chunked and length)
        if ask.method == "HEAD" or status in (204, 304):
            return None
        self.spare = status in _REDIRECTS
        size = int(length) if length and not chunked else 0
        if self.spare:
            if size > _SPARE_BODY:
                self.early = True
                return -1
            return None
        if size > self.body_limit:
            raise FetchError("body_too_large", f"{size:,} bytes announced, {self.body_limit:,} allowed")
        self.coding = layers(coding)
        return None

    def _on_body(self, data: bytes) -> int | None:
        self.wire = wire = self.wire + len(data)
        if self.spare:
            if wire <= _SPARE_BODY:
                return None
            self.early = True
            return -1
        if wire > self.body_limit:
            return self._fail(
                FetchError("body_too_large", f"the body is larger than {self.body_limit:,} bytes")
            )
        self.pieces.append(data)
        return None

    # What the driver asks.

    def late(self, now: float) -> FetchError | None:
        """The deadline that passed, if one did."""
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
        # The body's clocks begin with the first look after the head.
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
        if self.job.target.url.startswith("https:") and self._connected():
            return FetchError("tls_timeout", "the TLS handshake did not end in time")
        return FetchError("connect_timeout", f"no connection within {limits.connect:g} s")

    def result(self, now: float) -> Response:
        """The response of a transfer that ended well. Raises FetchError if its body is not."""
        body = b"" if self.spare else self._body()
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
        if self.coding:
            return decode(self.pieces, self.coding, self.body_limit)
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)

    def failure(self, code: int, text: str) -> FetchError:
        """libcurl's code in our words, by the phase that we saw ourselves."""
        if self.error is not None:
            return self.error
        lower = text.lower()
        if code == 7:
            refused = self.curl.getinfo(pycurl.OS_ERRNO) == errno.ECONNREFUSED
            return FetchError("connect_refused" if refused else "connect_failed", "cannot connect")
        if code == 28:
            return FetchError("connect_timeout" if not self.head_bytes else "deadline", "timed out")
        if code in _TLS_CODES:
            if not self.status and ("reset by peer" in lower or "syscall" in lower):
                return FetchError("reset", "the connection broke in the TLS handshake")
            return FetchError("tls_invalid", text)
        if code == 52:
            return FetchError("empty_reply", "the server closed the connection without an answer")
        if code == 18:
            return FetchError("truncated", "the body is shorter than announced")
        if code in (55, 56, 92, 16):
            return self._broken(code, lower)
        if code == _TOO_LARGE:
            return FetchError("header_overflow", "the head is too large")
        if code in (1, 8):
            strange = not self.head_lines and "http/0.9" in lower
            return FetchError("not_http" if strange else "protocol_error", text)
        if code == 3:
            return FetchError("url_invalid", "the URL cannot be sent")
        if code == 61:
            return FetchError("protocol_error", text)
        return FetchError("internal", f"libcurl {code}: {text}")

    def _broken(self, code: int, lower: str) -> FetchError:
        """The connection ended early, or what it carried made no sense: one code for both."""
        if "too large" in lower or "too long" in lower:
            return FetchError("header_overflow", "the head is too large")
        if "refused_stream" in lower:
            return FetchError("reset", "the server refused the stream")
        if code in (92, 16) or any(
            word in lower for word in ("chunk", "illegal", "invalid", "malformed", "hex")
        ):
            return FetchError("protocol_error", "the answer does not follow HTTP")
        if "eof" in lower and self.status:
            return FetchError("truncated", "the connection ended inside the body")
        return FetchError("reset", "the connection was reset")

    def release(self) -> None:
        """Forget the request, so that an idle handle holds no page in memory."""
        self.pieces.clear()
        self.lines.clear()
        self.headers = ()
        self.error = None
        self.next_address = 0


@lru_cache(maxsize=1024)
def _custom_lines(
    defaults: tuple[tuple[str, str], ...], headers: tuple[tuple[str, str], ...]
) -> tuple[bytes, ...]:
    merged = {name.lower(): (name, value) for name, value in defaults}
    for name, value in headers:
        key = name.lower()
        if not _TOKEN.match(name) or _CONTROL.search(value):
            raise FetchError("protocol_error", f"request header {name[:40]!r} cannot be sent")
        if key not in _OURS:
            merged[key] = (name, value)
    # "Name;" is libcurl's way to say a header with an empty value; "Name:" would remove it.
    return tuple((f"{name}: {value}" if value else f"{name};").encode() for name, value in merged.values())


def request_lines(defaults: tuple[tuple[str, str], ...], ask: Ask) -> list[bytes]:
    """The header lines of `ask`: its own ones instead of the defaults of the same name.

    Raises FetchError for a name or value that would break out of its line.
    """
    return list(_custom_lines(defaults, ask.headers))


_Outcome = tuple[_Job, Response | None, FetchError | None]


class _Driver(threading.Thread):
    """The thread that owns libcurl."""

    def __init__(
        self,
        setup: _Setup,
        deliver: Callable[[list[_Outcome]], None],
        *,
        concurrency: int,
        keep_alive: int,
    ) -> None:
        super().__init__(name="shoal-http", daemon=True)
        self._setup = setup
        self._deliver = deliver
        self._concurrency = concurrency
        self._keep_alive = keep_alive
        self._inbox: deque[_Job] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sleeping = False
        self._stopping = False
        self._multi: Any = None
        self._epoll = select.epoll()
        self._watched: set[int] = set()
        self._waiting: deque[_Job] = deque()
        self._active: dict[Any, _Slot] = {}
        self._free: list[_Slot] = []
        self._outcomes: list[_Outcome] = []
        self._timer: float | None = None
        self._notified = False
        self._next_sweep = 0.0

    # Called by other threads.

    def post(self, job: _Job) -> None:
        """Start `job`, or look at it again because it was cancelled."""
        self._inbox.append(job)
        # The order matters: append, then look. The thread says "sleeping", then looks again.
        if self._sleeping:
            self._sleeping = False
            self._ring()

    @property
    def stopped(self) -> bool:
        """No job that is posted from now on will end."""
        return self._stopping

    def stop(self) -> None:
        self._stopping = True
        self._ring()

    def _ring(self) -> None:
        try:
            os.eventfd_write(self._wake, 1)
        except OSError:
            return  # the thread has ended and closed it

    # The thread.

    def run(self) -> None:
        failure = FetchError("internal", "the fetcher was closed")
        try:
            self._open()
            while not self._stopping:
                self._turn()
        except Exception as crash:
            failure = FetchError("internal", f"the fetcher's thread ended: {crash!r}")
        finally:
            self._stopping = True
            self._shut(failure)

    def _open(self) -> None:
        self._multi = multi = pycurl.CurlMulti()
        multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_interest)
        multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        multi.setopt(pycurl.M_NOTIFYFUNCTION, self._on_notify)
        multi.notify_enable(pycurl.M_NOTIFY_INFO_READ)
        multi.setopt(pycurl.M_MAXCONNECTS, self._keep_alive)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._next_sweep = time.monotonic() + SWEEP

    def _turn(self) -> None:
        """Wait for something, do it, hand back everything that ended."""
        events = self._epoll.poll(self._patience(), _MAX_EVENTS)
        self._sleeping = False
        multi = self._multi
        for fd, event in events:
            if fd == self._wake:
                os.eventfd_read(self._wake)
                continue
            mask = 0
            if event & (select.EPOLLIN | select.EPOLLHUP):
                mask |= pycurl.CSELECT_IN
            if event & select.EPOLLOUT:
                mask |= pycurl.CSELECT_OUT
            if event & select.EPOLLERR:
                mask |= pycurl.CSELECT_ERR
            if fd in self._watched:
                multi.socket_action(fd, mask)
        if self._notified:
            self._collect()
        self._take_in()
        if self._timer is not None and time.monotonic() >= self._timer:
            self._timer = None
            multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        if self._notified:
            self._collect()
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP
            self._sweep(now)
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._deliver(outcomes)

    def _patience(self) -> float:
        """Seconds to wait for events; also announces that we sleep."""
        self._sleeping = True
        if self._inbox or self._stopping or self._notified:
            return 0.0
        now = time.monotonic()
        until = self._next_sweep if self._active else now + 60.0
        if self._timer is not None and self._timer < until:
            until = self._timer
        return max(0.0, until - now)

    def _on_interest(self, what: int, fd: int, _multi: Any, _data: Any) -> None:
        if what == pycurl.POLL_REMOVE:
            if fd in self._watched:
                self._watched.discard(fd)
                try:
                    self._epoll.unregister(fd)
                except OSError:
                    return  # closed already: the kernel forgot it by itself
            return
        mask = 0
        if what & pycurl.POLL_IN:
            mask |= select.EPOLLIN
        if what & pycurl.POLL_OUT:
            mask |= select.EPOLLOUT
        if fd in self._watched:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
            self._watched.add(fd)

    def _on_timer(self, milliseconds: int) -> None:
        self._timer = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000

    def _on_notify(self, _what: int, _curl: Any) -> None:
        self._notified = True

    def _take_in(self) -> None:
        inbox, waiting = self._inbox, self._waiting
        while inbox:
            job = inbox.popleft()
            if not job.cancelled:
                waiting.append(job)
            elif job.slot is not None:
                self._end(job.slot)
        while waiting and len(self._active) < self._concurrency:
            job = waiting.popleft()
            if not job.cancelled:
                self._start(self._free.pop() if self._free else _Slot(self._setup), job)

    def _start(self, slot: _Slot, job: _Job) -> None:
        job.slot = slot
        try:
            slot.begin(job, time.monotonic())
            self._multi.add_handle(slot.curl)
        except FetchError as error:
            self._drop(slot)
            self._outcomes.append((job, None, error))
            return
        except (pycurl.error, UnicodeError, ValueError) as failure:
            # An option that libcurl does not take: the handle may be half set up.
            self._drop(slot)
            self._outcomes.append((job, None, FetchError("internal", f"cannot start: {failure!r}")))
            return
        self._active[slot.curl] = slot

    def _drop(self, slot: _Slot) -> None:
        slot.job.slot = None
        slot.curl.close()

    def _end(self, slot: _Slot) -> None:
        """Take the handle out of libcurl and keep it for later."""
        self._active.pop(slot.curl, None)
        self._multi.remove_handle(slot.curl)
        slot.job.slot = None
        if slot.poolable and len(self._free) < _IDLE_SLOTS:
            slot.release()
            self._free.append(slot)
        else:
            slot.curl.close()

    def _collect(self) -> None:
        self._notified = False
        more = 1
        now = time.monotonic()
        while more:
            more, good, bad = self._multi.info_read()
            for curl in good:
                self._settle(self._active[curl], 0, "", now)
            for curl, code, text in bad:
                self._settle(self._active[curl], code, text, now)

    def _settle(self, slot: _Slot, code: int, text: str, now: float) -> None:
        job = slot.job
        response: Response | None = None
        error: FetchError | None = None
        if code and not (slot.early and code == _WRITE_ERROR):
            error = slot.failure(code, text)
            if not slot.head_bytes and self._try_next(slot, error, now):
                return
        else:
            try:
                response = slot.result(now)
            except FetchError as failure:
                error = failure
            except Exception as failure:
                error = FetchError("internal", f"result: {failure!r}")
        if slot.no_reuse:
            self._poison(slot)
        self._end(slot)
        self._outcomes.append((job, response, error))

    def _try_next(self, slot: _Slot, error: FetchError, now: float) -> bool:
        """Use the next address when this one does not take connections."""
        job = slot.job
        if slot.next_address >= len(job.addresses) or job.cancelled:
            return False
        if error.error not in ("connect_refused", "connect_failed", "connect_timeout"):
            return False
        if now >= min(job.deadline, slot.since + slot.limits.connect):
            return False
        self._active.pop(slot.curl)
        self._multi.remove_handle(slot.curl)
        self._start(slot, job)
        return True

    def _poison(self, slot: _Slot) -> None:
        """Make sure that nobody uses this transfer's connection again.

        libcurl decides on reuse before we may change an option, so the socket is shut under it: the
        next transfer that picks it sees a dead connection and opens another.
        """
        fd = slot.curl.getinfo(pycurl.ACTIVESOCKET)
        if fd < 0:
            return
        try:
            with socket.socket(fileno=os.dup(fd)) as twin:
                twin.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the server closed it first

    def _sweep(self, now: float) -> None:
        while self._waiting and (self._waiting[0].cancelled or self._waiting[0].deadline <= now):
            job = self._waiting.popleft()
            self._outcomes.append((job, None, FetchError("deadline", "no free slot in time")))
        for slot in list(self._active.values()):
            error = slot.late(now)
            if error is None or self._try_next_after(slot, error, now):
                continue
            job = slot.job
            self._end(slot)
            self._outcomes.append((job, None, error))

    def _try_next_after(self, slot: _Slot, error: FetchError, now: float) -> bool:
        return error.error == "connect_timeout" and self._try_next(slot, error, now)

    def _shut(self, failure: FetchError) -> None:
        outcomes = self._outcomes
        for slot in list(self._active.values()):
            outcomes.append((slot.job, None, failure))
            self._quietly(self._multi.remove_handle, slot.curl)
            self._quietly(slot.curl.close)
        outcomes.extend((job, None, failure) for job in (*self._waiting, *self._inbox))
        for slot in self._free:
            self._quietly(slot.curl.close)
        if self._multi is not None:
            self._quietly(self._multi.close)
        self._active.clear()
        self._free.clear()
        self._epoll.close()
        os.close(self._wake)
        if outcomes:
            self._deliver(outcomes)

    def _quietly(self, action: Callable[..., Any], *details: Any) -> None:
        try:
            action(*details)
        except Exception:  # closing goes on whatever one handle says
            return


def _stop_at_exit(reference: weakref.ref[_Driver]) -> None:
    """A daemon thread that is inside libcurl while the interpreter goes away may crash it."""
    driver = reference()
    if driver is not None and driver.is_alive():
        driver.stop()
        driver.join(2.0)


class HttpFetcher:
    """Fetches over HTTP/1.1 (and HTTP/2 over TLS if asked to). Belongs to one event loop.

    - Connects only to addresses that the guard permits; never follows a redirect by itself.
    - A body is decoded, complete and at most `limits.body` long, or it is a FetchError.
    - Keeps up to `keep_alive` idle connections and runs up to `concurrency` transfers; more of
      them wait, and what they wait counts against their total deadline only.
    """

    def __init__(
        self,
        *,
        user_agent: str | None = None,
        guard: Guard | None = None,
        resolver: Resolver | None = None,
        http2: bool = False,
        ca_file: str | None = None,
        keep_alive: int = 256,
        concurrency: int = 512,
    ) -> None:
        agent = default_user_agent() if user_agent is None else user_agent
        if not agent.strip() or _CONTROL.search(agent) or not agent.isascii():
            raise UsageError(
                "the user agent must be one line of plain text",
                hint="name your crawler and a page or address where its owner can be reached",
            )
        if resolver is not None and guard is None:
            guard = resolver.guard
        self.guard = guard or Guard()
        self.resolver = resolver or Resolver(self.guard)
        headers = (
            ("User-Agent", agent),
            ("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"),
            ("Accept-Language", "en;q=0.9,*;q=0.5"),
            ("Accept-Encoding", ACCEPTED),
        )
        self._headers = headers
        self._setup = _Setup(
            guard=self.guard,
            headers=headers,
            lines=_custom_lines(headers, ()),
            ca_file=ca_file or certifi.where(),
            http2=http2,
        )
        self._concurrency = concurrency
        self._keep_alive = keep_alive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: _Driver | None = None
        self._closed = False
        self._at_exit: Callable[[], None] | None = None

    async def fetch(self, ask: Ask) -> Response:
        """Fetch one hop. Raises FetchError with one of `errors.CLASSES`, nothing else."""
        driver = self._driver or self._open()
        started = time.monotonic()
        target = _target(ask.url)
        if ask.headers:
            _custom_lines(self._headers, ask.headers)
        if ask.method != "GET" and not _METHOD.match(ask.method):
            raise FetchError("protocol_error", f"method {ask.method[:40]!r}")
        host, port = target.host, target.port
        addresses = self.resolver.known(host, port, ask.allow_private)
        if addresses is None:
            wait = min(ask.limits.dns, ask.limits.total)
            addresses = await self.resolver.resolve(host, port, allow_private=ask.allow_private, within=wait)
        private = ask.allow_private or self.guard.permits(host, port)
        assert self._loop is not None
        future: asyncio.Future[Response] = self._loop.create_future()
        job = _Job(ask, target, addresses, private=private, future=future, started=started)
        driver.post(job)
        if driver.stopped:
            # Posted first and looked at afterwards, so the job is either ended by the thread or here.
            future.cancel()
            raise FetchError("internal", "the fetcher is closed")
        try:
            response = await future
        except asyncio.CancelledError:
            job.cancelled = True
            driver.post(job)
            raise
        if response.address != addresses[0]:
            self.resolver.prefer(host, response.address)
        return response

    async def close(self) -> None:
        """End the thread and every transfer. What still runs fails; calling it twice is fine."""
        self._closed = True
        driver, self._driver = self._driver, None
        self.resolver.close()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if driver is None:
            return
        driver.stop()
        await asyncio.to_thread(driver.join)

    def _open(self) -> _Driver:
        if self._closed:
            raise FetchError("internal", "the fetcher is closed")
        self._loop = asyncio.get_running_loop()
        self._driver = driver = _Driver(
            self._setup, self._hand_over, concurrency=self._concurrency, keep_alive=self._keep_alive
        )
        reference = weakref.ref(driver)
        self._at_exit = lambda: _stop_at_exit(reference)
        atexit.register(self._at_exit)
        driver.start()
        return driver

    def _hand_over(self, outcomes: list[_Outcome]) -> None:
        """Called by the driver thread: one wake-up of the loop for a whole turn."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_resolve, outcomes)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more


def _resolve(outcomes: list[_Outcome]) -> None:
    for job, response, error in outcomes:
        if job.future.done():
            continue  # cancelled meanwhile
        if error is not None:
            job.future.set_exception(error)
        elif response is not None:
            job.future.set_result(response)
