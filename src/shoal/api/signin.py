"""Signing in with a browser, which cannot send a token by itself: `/login` and `/logout`.

A browser that opens a page without a token gets a form. The token that it posts becomes a session: a value
that expires after some hours, signed with a key derived from the token's hash, in a cookie that scripts
cannot read and other sites cannot send. Nothing is stored here. Removing a token ends its sessions; a new
owner's token ends all.
"""

from __future__ import annotations

import hmac
import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from html import escape
from urllib.parse import parse_qs

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from shoal.api.problems import Problem
from shoal.api.rate_limit import RateLimiter, retry_after
from shoal.api.tokens import CALLER, Caller, Tokens

LOGIN, LOGOUT = "/login", "/logout"
HOME = "/docs"
"""Where a browser goes after signing in if it did not ask for a page."""
LIFE = 12 * 3600
"""Seconds until a session expires."""
LONGEST_NEXT = 2000
FORM = b"application/x-www-form-urlencoded"


class Sessions:
    """Exchanges tokens for sessions, and finds the caller of a session."""

    def __init__(
        self, tokens: Tokens, guesses: RateLimiter, *, clock: Callable[[], float] = time.time
    ) -> None:
        """`guesses` is shared with all code that compares tokens."""
        # Not derived from the hash alone: hashes are in the settings, and reading those must not be enough.
        self._keys = [
            (digest, hmac.digest(tokens.secret, digest, "sha256"), caller) for digest, caller in tokens.known
        ]
        self._guesses = guesses
        self._clock = clock

    def begin(self, token: str, address: str) -> tuple[str, Caller]:
        """Returns a session for this token, and its caller. Raises Problem: 401 for a wrong token, and 429
        after too many, then for a right one too."""
        wait = self._guesses.wait(address)
        if wait > 0:
            raise too_many(wait)
        presented = sha256(token.encode("utf-8", "replace")).digest()
        found = None
        for digest, key, caller in self._keys:
            if hmac.compare_digest(digest, presented):
                found = key, caller
        if found is None:
            self._guesses.take(address)
            raise Problem(401, "this token is not valid", headers={"WWW-Authenticate": "Bearer"})
        plain = f"{int(self._clock()) + LIFE}.{secrets.token_urlsafe(9)}"
        return f"{plain}.{_signature(found[0], plain)}", found[1]

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Returns the caller whose session came with a request."""
        host = headers.get(b"host", b"").decode("latin-1")
        given = _cookies(headers.get(b"cookie", b"").decode("latin-1"))
        # The cookie that only https can set comes first.
        for name in (cookie_name(host, secure=True), cookie_name(host, secure=False)):
            for value in given.get(name, ()):
                caller = self._verify(value)
                if caller is not None:
                    return caller
        return None

    def _verify(self, value: str) -> Caller | None:
        plain, _, signature = value.rpartition(".")
        until = plain.partition(".")[0]
        if not (value.isascii() and until.isdecimal() and len(until) < 15):
            return None
        found = None
        for _, key, caller in self._keys:
            if hmac.compare_digest(_signature(key, plain), signature):
                found = caller
        return found if int(until) > self._clock() else None


def too_many(wait: float) -> Problem:
    return Problem(429, "too many wrong tokens", headers=retry_after(wait))


def _signature(key: bytes, plain: str) -> str:
    return hmac.new(key, plain.encode(), sha256).hexdigest()


def cookie_name(host: str, *, secure: bool) -> str:
    """Returns a name with the port: browsers share cookies between ports, so two services on one host would
    sign each other out."""
    port = host.rpartition(":")[2]
    name = f"shoal-{port}" if port.isdecimal() else "shoal"
    # With this prefix a browser accepts the cookie from this very host and by https only.
    return f"__Host-{name}" if secure else name


def _cookies(header: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        found.setdefault(name, []).append(value)
    return found


def local_path(text: str) -> str:
    """Returns `text` if it is a path of this service, otherwise the default page. `//elsewhere`,
    `/\\elsewhere` and what a browser would read as these lead to other sites."""
    good = (
        text.startswith("/")
        and not text.startswith("//")
        and len(text) <= LONGEST_NEXT
        and all("!" <= c <= "~" and c != "\\" for c in text)
        and text.partition("?")[0] not in (LOGIN, LOGOUT)
    )
    return text if good else HOME


# -- pages ----------------------------------------------------------------------------------

_STYLE = """
:root{color-scheme:light dark}
body{font:1rem/1.5 system-ui,sans-serif;max-width:24rem;margin:15vh auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}
label,input,button{display:block;font:inherit;width:100%;box-sizing:border-box}
input,button{padding:.5rem;margin:.25rem 0 1rem;border:1px solid GrayText;border-radius:.25rem}
[role=alert]{font-weight:600;border-left:.25rem solid #c33;padding-left:.75rem}
"""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'sha256-"
        + b64encode(sha256(_STYLE.encode()).digest()).decode()
        + "'; img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # With no-referrer a browser sends `Origin: null` with a form, as it does for pages of other sites.
    "Referrer-Policy": "same-origin",
    "Vary": "Accept, Cookie",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title} · shoal</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><h1>shoal</h1>
{body}</main></body></html>
"""
_SIGN_IN = """<p>This service needs a token. The owner's token is in the file <code>.shoal/token</code> on the
server, unless <code>--token-file</code> names another; <code>shoal serve</code> prints where.</p>
{lines}<form method="post" action="/login"><input type="hidden" name="next" value="{next}">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Sign in</button></form>
"""
_SIGN_OUT = """<p>To use this service again, this browser will need a token.</p>
<form method="post" action="/logout"><button>Sign out</button></form>
"""


def wants_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a person will see the response: a browser opens a page, and not a script in one."""
    return (
        b"text/html" in headers.get(b"accept", b"").lower()
        and headers.get(b"sec-fetch-mode", b"navigate") == b"navigate"
    )


def path_and_query(scope: Scope) -> str:
    """Returns path and query of a request as they were sent."""
    query = scope.get("query_string", b"")
    sent = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    return str((sent + (b"?" + query if query else b"")).decode("latin-1"))


def sign_in_page(
    path: str, problem: Problem | None = None, *, alert: str = "", link: bool = False
) -> Response:
    """Returns the form. `link`: the browser followed a link from another site and therefore sent no cookie of
    ours; a link on this page lets it send one."""
    target = escape(local_path(path))
    lines = f'<p role="alert">{escape(alert)}</p>\n' if alert else ""
    if link:
        lines += f'<p><a href="{target}">I am signed in already</a></p>\n'
    status, headers = (problem.status, problem.headers) if problem is not None else (200, {})
    body = _SIGN_IN.format(lines=lines, next=target)
    return html_page("Sign in", body, status, headers)


def html_page(title: str, body: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = _PAGE.format(title=title, style=_STYLE, body=body)
    return HTMLResponse(text, status, headers={**_HEADERS, **(headers or {})})


# -- routes ---------------------------------------------------------------------------------

router = APIRouter(include_in_schema=False)


@router.get(LOGIN)
async def login_page(next: str = "") -> Response:
    return sign_in_page(next)


@router.post(LOGIN)
async def login(request: Request) -> Response:
    """Needs no token: it brings one. The gate has checked that one of our own pages sent it."""
    sessions: Sessions = request.app.state.sessions
    fields = _fields(await request.body())
    try:
        session, caller = sessions.begin(fields.get("token", "").strip(), _address(request))
    except Problem as problem:
        if not wants_page(dict(request.headers.raw)):
            raise
        alert = problem.detail[:1].upper() + problem.detail[1:] + "."
        if problem.status == 429:
            alert += f" Try again in {problem.headers['Retry-After']} seconds."
        return sign_in_page(fields.get("next", ""), problem, alert=alert)
    request.scope[CALLER] = caller  # for the log
    return _redirect(request, local_path(fields.get("next", "")), session, LIFE)


@router.get(LOGOUT)
async def logout_page() -> Response:
    return html_page("Sign out", _SIGN_OUT)


@router.post(LOGOUT)
async def logout(request: Request) -> Response:
    return _redirect(request, LOGIN, "", 0)


def _fields(body: bytes) -> dict[str, str]:
    try:
        found = parse_qs(body.decode("ascii"), max_num_fields=10, errors="strict")
    except ValueError:
        raise Problem(422, "the form is malformed") from None
    return {name: values[0] for name, values in found.items()}


def _redirect(request: Request, path: str, session: str, life: int) -> Response:
    """Returns a redirect that sets the session's cookie. 303 means GET: reloading the page must not post the
    token again."""
    response = Response(status_code=303, headers={"Location": path})
    name = cookie_name(request.headers["host"], secure=_secure(request))
    response.set_cookie(
        name, session, max_age=life, path="/", secure=_secure(request), httponly=True, samesite="strict"
    )
    return response


def _secure(request: Request) -> bool:
    """Whether the browser uses https, to us or to a proxy before us. The request's headers say so; a client
    that lies makes its own cookie useless."""
    headers = request.headers
    return (
        request.scope["scheme"] == "https"
        or headers.get("origin", "").lower().startswith("https:")
        or headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower() == "https"
    )


def _address(request: Request) -> str:
    return request.client.host if request.client else "?"
