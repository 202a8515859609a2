"""The outermost layer: a request reaches a route only after it has passed these checks.

    host → token or session → rate limit → origin → content type → size

The gate decides on `scope["path"]`, the value that routing uses too, and denies by default: a route that is
added later is protected without further code. Any error below becomes a problem document here at the latest.
One line is logged for each request, without its query.
"""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.addresses import without_password
from shoal.api.problems import Problem
from shoal.api.rate_limit import RateLimiter, retry_after
from shoal.api.signin import (
    FORM,
    LOGIN,
    LOGOUT,
    Sessions,
    path_and_query,
    sign_in_page,
    too_many,
    wants_page,
)
from shoal.api.tokens import CALLER, LOCAL, READ, SUBMIT, Caller, Tokens

OPEN_PATH = "/healthz"
"""Liveness only: needs neither a token nor an allowed Host."""
SIGN_IN_PATHS = frozenset((LOGIN, LOGOUT))
"""Where a browser signs in and out: every check but the token."""
LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
STRANGER_BODY = 16 * 1024
"""Maximum bytes of a body that comes without a token."""
BODY_SECONDS = 30.0
"""Time limit for a body: a client that sends one byte per minute must not hold a slot for ever."""
DROPPED_BODY = 32 * 1024 * 1024
DROPPED_SECONDS = 1.0
"""How much of a refused body is read and discarded, and for how long."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)
_READING = ("GET", "HEAD", "OPTIONS")
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}
"""Headers of every response, unless the route sets them itself."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`hosts` are the allowed names in the Host header; None allows any well-formed one. With `open` no token
    is needed: for loopback addresses only."""

    hosts: Collection[str] | None
    open: bool
    max_body: int
    gap: float = 0.0
    burst: int = 1


Meter = Callable[[Scope, int, float], None]
Log = Callable[[str], None]


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        policy: Policy,
        tokens: Tokens,
        sessions: Sessions,
        guesses: RateLimiter,
        *,
        tell: Log,
        log: Log | None,
        meter: Meter,
    ) -> None:
        """`guesses` counts wrong tokens; `tell` receives internal errors, `log` a line for each request."""
        self._app = app
        self._policy = policy
        self._tokens = tokens
        self._sessions = sessions
        self._guesses = guesses
        self._tell = tell
        self._log = log
        self._meter = meter
        self._rate_limiter = RateLimiter(policy.gap, policy.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        answer = _Answer(send, head=scope["method"] == "HEAD")
        incoming = _Incoming(scope, receive)
        try:
            if scope["path"] in SIGN_IN_PATHS:
                self._admit_without_token(scope)
            elif scope["path"] != OPEN_PATH:
                self._admit(scope)
            body = await self._body(scope, incoming)
            # HEAD is served by the route of GET.
            routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            try:
                await self._app(routed, _again(body, receive, answer), answer.send)
            finally:
                scope["route"] = routed.get("route")
        except Problem as problem:
            await incoming.drop()
            await answer.give(_refusal(problem, scope), scope, receive)
        except ClientDisconnect:
            pass  # there is no client to respond to
        except Exception:
            # The framework's own layer has responded by now, unless it failed itself.
            self._tell(traceback.format_exc())
            internal = Problem(500, "internal error", hint="the server's log has the details")
            await answer.give(internal.response(), scope, receive)
        finally:
            seconds = time.perf_counter() - started
            self._meter(scope, answer.status, seconds)
            if self._log is not None:
                self._log(_line(scope, answer.status, seconds))

    def _admit(self, scope: Scope) -> None:
        """Set the request's caller. Raises Problem unless it may send this request from this origin."""
        headers = _first_of_each(scope)
        host = self._host(headers)
        caller = self._caller(scope, headers)
        scope[CALLER] = caller
        self._count(caller.name if caller.named else _address(scope))
        _refuse_other_sites(scope, headers, host)
        if caller.named and b"authorization" not in headers:
            _require_own_page(scope, headers)
        needed = READ if scope["method"] in _READING else SUBMIT
        if needed not in caller.scopes:
            raise Problem(403, f"this token may not {needed}", hint=f"use a token with the scope {needed!r}")
        _refuse_other_types(scope, headers, b"application/json")

    def _admit_without_token(self, scope: Scope) -> None:
        """The same for signing in and out. One of our own pages must have sent the request: another site
        could sign a browser in as a different caller, unnoticed."""
        headers = _first_of_each(scope)
        host = self._host(headers)
        self._count(_address(scope))
        _refuse_other_sites(scope, headers, host)
        _require_own_page(scope, headers)
        _refuse_other_types(scope, headers, FORM)

    def _count(self, caller: str) -> None:
        wait = self._rate_limiter.take(caller)
        if wait > 0:
            raise Problem(429, "too many requests", headers=retry_after(wait))

    def _host(self, headers: Mapping[bytes, bytes]) -> str:
        text = headers.get(b"host", b"").decode("latin-1")
        matched = _HOST.fullmatch(text)
        if matched is None:
            raise Problem(400, "the Host header is missing or malformed")
        name = matched[1].strip("[]").lower().rstrip(".")
        allowed = self._policy.hosts
        if allowed is not None and name not in allowed:
            # A page of another site may have pointed its own name at this address (DNS rebinding).
            raise Problem(421, "this Host is not allowed", hint="add it to the setting `allowed_hosts`")
        return text.lower()

    def _caller(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        presented = headers.get(b"authorization")
        if presented is not None:
            matched = _BEARER.fullmatch(presented)
            caller = self._tokens.caller(matched[1]) if matched else None
            if caller is not None:
                return caller
            wait = self._guesses.take(_address(scope))
            if wait > 0:
                raise too_many(wait)
            raise _unauthorized("this token is not valid")
        caller = self._sessions.caller(headers)
        if caller is not None:
            return caller
        if not self._policy.open:
            raise _unauthorized("a token is needed")
        if any(name in headers for name in _FORWARDED):
            # Behind a proxy on this machine every client looks local.
            raise _unauthorized("a token is needed for requests through a proxy")
        return LOCAL

    async def _body(self, scope: Scope, incoming: _Incoming) -> bytes:
        """Returns the whole body. Its bytes are counted as they arrive, whatever Content-Length says."""
        most = self._policy.max_body if CALLER in scope else STRANGER_BODY
        too_large = Problem(413, f"the body is larger than {most:,} bytes", headers={"Connection": "close"})
        headers = _first_of_each(scope)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while not incoming.over:
                    part = await incoming.part()
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
                return b"".join(parts)
        except TimeoutError:
            raise Problem(
                408,
                f"the body was not complete after {BODY_SECONDS:.0f} s",
                headers={"Connection": "close"},
            ) from None


class _Incoming:
    """The body of a request, part by part."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = dict(scope["headers"])
        self._receive = receive
        self._waits = headers.get(b"expect", b"").lower() == b"100-continue"
        """The client sends the body only after the server has asked for it."""
        self.over = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

    async def part(self) -> bytes:
        self._waits = False
        message = await self._receive()
        self.over = not message.get("more_body", False)
        if message["type"] == "http.disconnect":
            raise Problem(400, "the connection was closed before the body was complete")
        body: bytes = message.get("body", b"")
        return body

    async def drop(self) -> None:
        """Keep reading for a moment and discard what comes. Many clients read the response only after they
        have sent everything: if the connection is closed earlier, they see that and not the problem."""
        if self._waits:
            return
        left = DROPPED_BODY
        with suppress(TimeoutError, Problem):
            async with asyncio.timeout(DROPPED_SECONDS):
                while not self.over and left > 0:
                    left -= len(await self.part())


class _Answer:
    """Passes the response on with the headers of every response, and remembers its status."""

    def __init__(self, send: Send, *, head: bool) -> None:
        self._send = send
        self.head = head
        self.status = 0
        self.over = asyncio.Event()
        """Set when a HEAD request has its response."""

    async def send(self, message: Message) -> None:
        if self.over.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            given = {name.lower() for name, _ in headers}
            headers += [(name, value) for name, value in _HEADERS.items() if name not in given]
            message = {**message, "headers": headers}
        await self._send(message)
        if self.head:
            self.over.set()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def give(self, response: Response, scope: Scope, receive: Receive) -> None:
        """Send this response, unless another has begun."""
        if not self.status:
            await response(scope, receive, self.send)


def _refusal(problem: Problem, scope: Scope) -> Response:
    """Returns the sign-in page if a browser needs a token, otherwise the problem document."""
    if problem.status != 401 or scope["method"] != "GET":
        return problem.response()
    headers = _first_of_each(scope)
    if not wants_page(headers):
        return problem.response()
    link = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
    return sign_in_page(path_and_query(scope), problem, link=link)


def _again(body: bytes, receive: Receive, answer: _Answer) -> Receive:
    """Returns a `receive` that gives the body to the route and then whatever else arrives (a disconnect). For
    HEAD, a stream ends as if the client had disconnected."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given and answer.head:
            await answer.over.wait()
            return {"type": "http.disconnect"}
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _first_of_each(scope: Scope) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name == b"host" and name in found:
            raise Problem(400, "the request has two Host headers")
        found.setdefault(name, value)
    return found


def _refuse_other_sites(scope: Scope, headers: Mapping[bytes, bytes], host: str) -> None:
    """Refuse requests from pages of other sites that are open in a user's browser. A link to us may be
    followed."""
    method = scope["method"]
    site = headers.get(b"sec-fetch-site", b"")
    follows = headers.get(b"sec-fetch-mode") == b"navigate" and method in _READING
    if site in (b"cross-site", b"same-site") and not follows:
        raise Problem(403, "requests from pages of other sites are refused")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() not in (f"http://{host}", f"https://{host}"):
        raise Problem(403, "requests from pages of other sites are refused")


def _require_own_page(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Require a header in which the browser confirms that one of our own pages sent a request that changes
    something: browsers send cookies with requests from any page. `_refuse_other_sites` has checked its value.
    """
    if scope["method"] in _READING:
        return
    if b"origin" not in headers and headers.get(b"sec-fetch-site") != b"same-origin":
        raise Problem(
            403,
            "cross-site request refused: it has no Origin header",
            hint="scripts send `Authorization: Bearer TOKEN` instead of a cookie",
        )


def _refuse_other_types(scope: Scope, headers: Mapping[bytes, bytes], only: bytes) -> None:
    """Refuse bodies of another content type than `only`. For the API that is JSON, which a form of another
    site cannot send."""
    if scope["method"] in _READING:
        return
    if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
        return
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != only:
        what = "JSON" if only != FORM else "a form"
        raise Problem(415, f"the body must be {what}", hint=f"send Content-Type: {only.decode()}")


def _unauthorized(detail: str) -> Problem:
    return Problem(
        401,
        detail,
        hint="send `Authorization: Bearer TOKEN`; `shoal serve` prints where the token is",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "?"


def _line(scope: Scope, status: int, seconds: float) -> str:
    caller = scope.get(CALLER)
    name = caller.name if caller is not None else "-"
    path = "".join(c if c.isprintable() else "\ufffd" for c in scope["path"][:200])
    path = "/".join(map(without_password, path.split("/")))
    return f"{_address(scope)} {name} {scope['method'][:20]} {path} {status} {seconds * 1000:.1f} ms"
