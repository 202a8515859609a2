"""Signing in with a browser, which cannot send a token by itself: `/login` and `/logout`.

A browser that opens a page without a token gets a form. The token it posts becomes a session: a value
that ends after some hours, signed with a key made from the token's hash, in a cookie that no script can
read and no other site can send. Nothing is stored here. A token that is taken away ends its sessions; a
new owner's token ends all.
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
from shoal.api.rate_limit import Allowance, retry_after
from shoal.api.tokens import CALLER, Caller, Tokens

LOGIN, LOGOUT = "/login", "/logout"
HOME = "/docs"
"""Where somebody lands who did not say where to."""
LIFE = 12 * 3600
"""Seconds until the token is asked for again."""
LONGEST_NEXT = 2000
FORM = b"application/x-www-form-urlencoded"


class Sessions:
    """Makes sessions of tokens and callers of sessions."""

    def __init__(self, tokens: Tokens, guesses: Allowance, *, clock: Callable[[], float] = time.time) -> None:
        """`guesses` is shared with whoever else compares tokens."""
        # Not of the hash alone: hashes stand in the settings, and who reads them is nobody's caller.
        self._keys = [
            (digest, hmac.digest(tokens.secret, digest, "sha256"), caller) for digest, caller in tokens.known
        ]
        self._guesses = guesses
        self._clock = clock

    def begin(self, token: str, address: str) -> tuple[str, Caller]:
        """A session for whoever has this token. Raises Problem: 401, and 429 after too many wrong ones,
        whatever comes then."""
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
            raise Problem(401, "this token is not known", headers={"WWW-Authenticate": "Bearer"})
        plain = f"{int(self._clock()) + LIFE}.{secrets.token_urlsafe(9)}"
        return f"{plain}.{_signature(found[0], plain)}", found[1]

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Whose session came with a request."""
        host = headers.get(b"host", b"").decode("latin-1")
        given = _cookies(headers.get(b"cookie", b"").decode("latin-1"))
        # The one that only https can set counts first.
        for name in (cookie_name(host, secure=True), cookie_name(host, secure=False)):
            for value in given.get(name, ()):
                caller = self._opened(value)
                if caller is not None:
                    return caller
        return None

    def _opened(self, value: str) -> Caller | None:
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
    """Browsers keep no ports apart, so two services on one host would sign each other out."""
    port = host.rpartition(":")[2]
    name = f"shoal-{port}" if port.isdecimal() else "shoal"
    # With this prefix a browser takes it from this very host by https only.
    return f"__Host-{name}" if secure else name


def _cookies(header: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        found.setdefault(name, []).append(value)
    return found


def local_path(text: str) -> str:
    """Where to go after signing in: a path of ours, or the usual page. `//elsewhere`, `/\\elsewhere` and
    what a browser would read as these are no paths of ours."""
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
    # With no-referrer a browser sends `Origin: null` with a form, and then it could be anybody's.
    "Referrer-Policy": "same-origin",
    "Vary": "Accept, Cookie",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title} · shoal</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><h1>shoal</h1>
{body}</main></body></html>
"""
_SIGN_IN = """<p>This service needs a token. <code>shoal serve</code> tells where the owner's is: in the file
<code>.shoal/token</code> of its machine, unless it was put elsewhere.</p>
{told}<form method="post" action="/login"><input type="hidden" name="next" value="{next}">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Sign in</button></form>
"""
_SIGN_OUT = """<p>Requests of this browser will need a token again.</p>
<form method="post" action="/logout"><button>Sign out</button></form>
"""


def wants_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a person looks at the answer: a browser that opens a page, and no script in one."""
    return (
        b"text/html" in headers.get(b"accept", b"").lower()
        and headers.get(b"sec-fetch-mode", b"navigate") == b"navigate"
    )


def asked_path(scope: Scope) -> str:
    """What a request asked for, as it was sent."""
    query = scope.get("query_string", b"")
    sent = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    return str((sent + (b"?" + query if query else b"")).decode("latin-1"))


def sign_in_page(
    asked: str, problem: Problem | None = None, *, told: str = "", link: bool = False
) -> Response:
    """The form. `link`: a link of another site was followed, and with it a browser sends no cookie of ours;
    from here it does."""
    target = escape(local_path(asked))
    lines = f'<p role="alert">{escape(told)}</p>\n' if told else ""
    if link:
        lines += f'<p><a href="{target}">I am signed in already</a></p>\n'
    status, headers = (problem.status, problem.headers) if problem is not None else (200, {})
    body = _SIGN_IN.format(told=lines, next=target)
    return html_page("Sign in", body, status, headers)


def html_page(title: str, body: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    made = _PAGE.format(title=title, style=_STYLE, body=body)
    return HTMLResponse(made, status, headers={**_HEADERS, **(headers or {})})


# -- routes ---------------------------------------------------------------------------------

router = APIRouter(include_in_schema=False)


@router.get(LOGIN)
async def login_page(next: str = "") -> Response:
    return sign_in_page(next)


@router.post(LOGIN)
async def login(request: Request) -> Response:
    """Needs no token: it brings one. The gate has seen that one of our own pages sent it."""
    sessions: Sessions = request.app.state.sessions
    fields = _fields(await request.body())
    try:
        session, caller = sessions.begin(fields.get("token", "").strip(), _address(request))
    except Problem as problem:
        if not wants_page(dict(request.headers.raw)):
            raise
        told = problem.detail[:1].upper() + problem.detail[1:] + "."
        if problem.status == 429:
            told += f" Try again in {problem.headers['Retry-After']} seconds."
        return sign_in_page(fields.get("next", ""), problem, told=told)
    request.scope[CALLER] = caller  # for the log
    return _sent(request, local_path(fields.get("next", "")), session, LIFE)


@router.get(LOGOUT)
async def logout_page() -> Response:
    return html_page("Sign out", _SIGN_OUT)


@router.post(LOGOUT)
async def logout(request: Request) -> Response:
    return _sent(request, LOGIN, "", 0)


def _fields(body: bytes) -> dict[str, str]:
    try:
        found = parse_qs(body.decode("ascii"), max_num_fields=10, errors="strict")
    except ValueError:
        raise Problem(422, "this form cannot be read") from None
    return {name: values[0] for name, values in found.items()}


def _sent(request: Request, path: str, session: str, life: int) -> Response:
    """There, with the session. By GET: reloading that page must not post the token again."""
    response = Response(status_code=303, headers={"Location": path})
    name = cookie_name(request.headers["host"], secure=_secure(request))
    response.set_cookie(
        name, session, max_age=life, path="/", secure=_secure(request), httponly=True, samesite="strict"
    )
    return response


def _secure(request: Request) -> bool:
    """Whether the browser speaks https, to us or to what stands before us. It says so itself; who lies
    about it makes his own cookie useless."""
    given = request.headers
    return (
        request.scope["scheme"] == "https"
        or given.get("origin", "").lower().startswith("https:")
        or given.get("x-forwarded-proto", "").partition(",")[0].strip().lower() == "https"
    )


def _address(request: Request) -> str:
    return request.client.host if request.client else "?"
