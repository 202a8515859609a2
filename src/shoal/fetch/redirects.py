"""Redirects, one hop at a time: every hop is checked like a submitted URL."""

from __future__ import annotations

import contextlib
import time

from msgspec.structs import replace

from shoal.errors import BadUrl, FetchError
from shoal.fetch.port import Ask, Fetcher
from shoal.model import Response
from shoal.urls import canonical, origin_of

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ABOUT_THE_BODY = ("content-type", "content-encoding", "content-language", "content-location")


def redirect_target(response: Response) -> str | None:
    """Returns the canonical URL that `response` redirects to; None if it is not a redirect.

    Raises FetchError: scheme_blocked for anything but http and https, redirect_invalid for a
    Location that is missing or not a URL that may be fetched.
    """
    if response.status not in REDIRECTS:
        return None
    location = response.header("location").strip(" \t")
    if not location:
        raise FetchError("redirect_invalid", f"status {response.status} without a Location")
    with contextlib.suppress(UnicodeError):
        # Headers arrive as latin-1, but servers that write text into them mean UTF-8. Browsers do the same.
        location = location.encode("latin-1").decode("utf-8")
    try:
        return canonical(location.replace(" ", "%20"), base=response.url)
    except BadUrl as bad:
        error = "scheme_blocked" if bad.error == "scheme_blocked" else "redirect_invalid"
        raise FetchError(error, f"redirected to a bad URL: {bad.why}") from None


def redirected(ask: Ask, status: int, target: str) -> Ask:
    """Returns the ask for `target` after the response to `ask` was a redirect with `status`.

    The caller's headers belong to one origin. When scheme, host or port changes, all of them are dropped, not
    only the well-known secrets: `X-Api-Key` may have any other name elsewhere.
    """
    headers = ask.headers if origin_of(target) == origin_of(ask.url) else ()
    becomes_get = (status == 303 and ask.method != "HEAD") or (status in (301, 302) and ask.method == "POST")
    if not becomes_get:
        return replace(ask, url=target, headers=headers)
    kept = tuple((name, value) for name, value in headers if name.lower() not in _ABOUT_THE_BODY)
    return replace(ask, url=target, headers=kept, method="GET", body=None)


def circle(target: str, *, cookie: bool) -> FetchError:
    """Returns the error for redirects that lead back to `target`. `cookie`: one of them set a cookie."""
    message = f"redirects in a circle, back to {target}"
    if not cookie:
        return FetchError("too_many_redirects", message)
    error = FetchError("too_many_redirects", f"{message}: the site sets a cookie and expects it back")
    error.hint = "cookies are not kept; pass the cookie with --header 'Cookie: name=value'"
    return error


async def follow(fetcher: Fetcher, ask: Ask, limit: int = 10) -> tuple[Response, list[str]]:
    """Fetch `ask` and follow at most `limit` redirects.

    Returns the final response, and the URLs that redirected on the way to it, in order. The total deadline of
    `ask` holds for all hops together. Raises FetchError like `Fetcher.fetch`, and too_many_redirects for a
    circle or a chain that is too long.
    """
    began = time.monotonic()
    total = ask.limits.total
    passed: list[str] = []
    seen = {(ask.method, ask.url)}
    cookie = False
    while True:
        response = await fetcher.fetch(ask)
        target = redirect_target(response)
        if target is None:
            return response, passed
        passed.append(ask.url)
        cookie = cookie or bool(response.header("set-cookie"))
        ask = redirected(ask, response.status, target)
        if (ask.method, ask.url) in seen:
            raise circle(target, cookie=cookie)
        if len(passed) > limit:
            raise FetchError("too_many_redirects", f"{len(passed)} redirects and no page")
        seen.add((ask.method, ask.url))
        left = total - (time.monotonic() - began)
        if left <= 0:
            raise FetchError("deadline", f"redirects took more than {total:g} s")
        # The gate guards the turn of the first request only.
        ask = replace(ask, limits=replace(ask.limits, total=left), gate=None)
