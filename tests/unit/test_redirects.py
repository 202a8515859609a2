"""Redirects: where they lead, what travels along, and where they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.errors import FetchError
from shoal.fetch.port import Ask, Limits
from shoal.fetch.redirects import follow, redirect_target, redirected
from shoal.model import Response

START = "https://a.example/start"


def moved(location: str | None, status: int = 302, url: str = START) -> Response:
    headers = () if location is None else (("location", location),)
    return Response(url, status, headers, b"", 0.0)


class Web:
    """A fetcher that answers from a function and keeps what it was asked."""

    def __init__(self, answer: Callable[[Ask], tuple[int, str | None]]) -> None:
        self.answer = answer
        self.asked: list[Ask] = []

    async def fetch(self, ask: Ask) -> Response:
        self.asked.append(ask)
        status, location = self.answer(ask)
        return moved(location, status, ask.url)

    async def close(self) -> None:
        return


def site(**pages: tuple[int, str | None]) -> Web:
    return Web(lambda ask: pages.get(ask.url.rpartition("/")[2], (200, None)))


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/next", "https://a.example/next"),
        ("next?x=1#part", "https://a.example/next?x=1"),
        ("//b.example/x", "https://b.example/x"),
        ("HTTP://B.example:80/../x", "http://b.example/x"),
        ("  /spaces around  ", "https://a.example/spaces%20around"),
        ("/caf\u00c3\u00a9", "https://a.example/caf%C3%A9"),
        ("/caf\u00e9", "https://a.example/caf%C3%A9"),
        ("http://2130706433/", "http://127.0.0.1/"),
    ],
)
def test_target(location: str, target: str) -> None:
    assert redirect_target(moved(location)) == target


@pytest.mark.parametrize("status", [200, 204, 300, 304, 305, 404, 500])
def test_no_redirect(status: int) -> None:
    assert redirect_target(moved("/next", status)) is None


@pytest.mark.parametrize(
    "location", [None, "", "http://[bad", "https://u:p@a.example/", "/" + "x" * 3000, "/a\tb"]
)
def test_invalid(location: str | None) -> None:
    with pytest.raises(FetchError) as caught:
        redirect_target(moved(location))
    assert caught.value.error == "redirect_invalid"


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "data:,x", "javascript:alert(1)", "ftp://a/", "gopher://a/", "s3://b/k"],
)
def test_scheme_blocked(location: str) -> None:
    with pytest.raises(FetchError) as caught:
        redirect_target(moved(location))
    assert caught.value.error == "scheme_blocked"


async def test_follow_returns_the_way() -> None:
    web = site(start=(301, "/b"), b=(302, "/c"))
    response, passed = await follow(web, Ask(START))
    assert response.url == "https://a.example/c"
    assert passed == [START, "https://a.example/b"]


async def test_no_redirect_is_one_fetch() -> None:
    web = site()
    response, passed = await follow(web, Ask(START))
    assert (response.url, passed, len(web.asked)) == (START, [], 1)


async def test_loops_end_at_once() -> None:
    web = site(start=(302, "/b"), b=(302, "/start"))
    with pytest.raises(FetchError) as caught:
        await follow(web, Ask(START))
    assert caught.value.error == "too_many_redirects"
    assert len(web.asked) == 2


async def test_a_chain_ends_at_the_limit() -> None:
    web = Web(lambda ask: (302, f"{ask.url}x"))
    with pytest.raises(FetchError) as caught:
        await follow(web, Ask(START), limit=10)
    assert caught.value.error == "too_many_redirects"
    assert len(web.asked) == 11


async def test_exactly_the_limit_is_fine() -> None:
    web = Web(lambda ask: (302, f"{ask.url}x") if len(web.asked) <= 10 else (200, None))
    _, passed = await follow(web, Ask(START), limit=10)
    assert len(passed) == 10


SECRETS = (("X-Api-Key", "secret"), ("Authorization", "Bearer secret"))


@pytest.mark.parametrize("location", ["https://b.example/", "http://a.example/", "https://a.example:8443/"])
async def test_headers_stay_with_their_origin(location: str) -> None:
    web = Web(lambda ask: (302, location) if ask.url == START else (200, None))
    await follow(web, Ask(START, headers=SECRETS))
    assert web.asked[0].headers == SECRETS
    assert web.asked[1].headers == ()


async def test_headers_do_not_come_back() -> None:
    ways = {START: "https://b.example/", "https://b.example/": "https://a.example/end"}
    web = Web(lambda ask: (302, ways[ask.url]) if ask.url in ways else (200, None))
    await follow(web, Ask(START, headers=SECRETS))
    assert [ask.headers for ask in web.asked] == [SECRETS, (), ()]


async def test_headers_stay_within_the_origin() -> None:
    web = site(start=(302, "https://a.example:443/b"))
    await follow(web, Ask(START, headers=SECRETS))
    assert web.asked[1].headers == SECRETS


@pytest.mark.parametrize(
    ("status", "method", "becomes"),
    [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "POST", "GET"),
        (303, "PUT", "GET"),
        (303, "HEAD", "HEAD"),
        (302, "PUT", "PUT"),
        (307, "POST", "POST"),
        (308, "POST", "POST"),
    ],
)
def test_method(status: int, method: str, becomes: str) -> None:
    body = None if method == "HEAD" else b"data"
    ask = Ask(START, method=method, body=body, headers=(("Content-Type", "text/plain"), ("X-A", "1")))
    after = redirected(ask, status, "https://a.example/b")
    assert after.method == becomes
    if becomes == "GET":
        assert after.body is None
        assert after.headers == (("X-A", "1"),)
    else:
        assert after.body == body
        assert after.headers == ask.headers


async def test_one_deadline_for_all_hops() -> None:
    web = site(start=(302, "/b"), b=(302, "/c"))
    await follow(web, Ask(START, limits=Limits(total=10)))
    totals = [ask.limits.total for ask in web.asked]
    assert totals[0] == 10
    assert totals == sorted(totals, reverse=True)
    with pytest.raises(FetchError) as caught:
        await follow(web, Ask(START, limits=Limits(total=0)))
    assert caught.value.error == "deadline"
