"""Signing in with a browser: what it gets, what its cookie opens, and what it does not."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import urlencode

import pytest
from starlette.routing import Route
from starlette.types import Message, Scope

from shoal.api import service as api
from shoal.api.app import ROUTERS, build
from shoal.api.middleware import Gate
from shoal.api.problems import Problem
from shoal.api.rate_limit import RateLimiter
from shoal.api.signin import LIFE, Sessions, cookie_name, local_path
from shoal.api.tokens import Tokens
from shoal.app import Session
from shoal.settings import NamedToken, load
from tests.rig.command import Shell
from tests.rig.service import Answer, Service

READER = "r" * 43
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
JOB = {"url": "http://example.com/"}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with Shell(tmp_path_factory.mktemp("session")) as made:
        yield made


@pytest.fixture(scope="module")
def service(shell: Shell) -> Service:
    sha256 = hashlib.sha256(READER.encode()).hexdigest()
    tokens = json.dumps([{"name": "reader", "sha256": sha256, "scopes": ["read"]}])
    return Service(shell, "--workers", "0", "--require-token", env={"SHOAL_TOKENS": tokens})


class Form(HTMLParser):
    """What a browser would send of a page's form."""

    def __init__(self, page: Answer) -> None:
        super().__init__()
        self.action = self.method = ""
        self.fields: dict[str, str] = {}
        self.feed(page.body.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.action, self.method = given["action"], given["method"].upper()
        if tag == "input":
            self.fields[given["name"]] = given.get("value", "")


def own(service: Service) -> str:
    return f"127.0.0.1:{service.port}"


def submit(service: Service, form: Form, *, scheme: str = "http", **headers: str) -> Answer:
    kind = {"Content-Type": "application/x-www-form-urlencoded", "Origin": f"{scheme}://{own(service)}"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = urlencode(form.fields).encode()
    return service.ask(form.method, form.action, raw=body, headers={**HTML, **kind, **named})


def signed_in(service: Service, token: str, path: str = "/docs") -> Answer:
    form = Form(service.ask("GET", path, headers=HTML))
    form.fields["token"] = token
    return submit(service, form)


def cookie(answer: Answer) -> dict[str, str]:
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


@pytest.fixture(scope="module")
def owner(service: Service) -> dict[str, str]:
    """The cookie of somebody who signed in with the owner's token."""
    return cookie(signed_in(service, service.token))


# -- the page -------------------------------------------------------------------------------


def test_a_browser_without_a_token_is_asked_for_it(service: Service) -> None:
    for path in ("/docs", "/jobs?limit=3", "/nothing", "/"):
        page = service.ask("GET", path, headers=HTML)
        assert (page.status, page.headers["www-authenticate"]) == (401, "Bearer")
        assert page.headers["content-type"].startswith("text/html")
        form = Form(page)
        assert (form.method, form.action) == ("POST", "/login")
        assert form.fields == {"next": path, "token": ""}


def test_the_page_needs_nothing_from_elsewhere_and_no_script(service: Service) -> None:
    page = service.ask("GET", "/docs", headers=HTML)
    text = page.body.decode()
    assert "://" not in text and "<script" not in text
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    digest = hashlib.sha256(style[1].encode()).digest()
    assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy, "the browser would drop the style"
    # A form of a page with no-referrer comes with `Origin: null`, which is refused.
    assert page.headers["referrer-policy"] == "same-origin"
    assert page.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {}),
        ("GET", {"Accept": "*/*"}),
        ("GET", {"Accept": "application/json"}),
        ("GET", {**HTML, "Sec-Fetch-Mode": "cors"}),
        ("POST", HTML),
    ],
)
def test_everybody_else_gets_the_problem(service: Service, method: str, headers: dict[str, str]) -> None:
    answer = service.ask(method, "/scrape/x/progress", headers=headers)
    assert (answer.status, answer.json()["status"]) == (401, 401)
    assert answer.headers["content-type"] == "application/problem+json"
    assert "set-cookie" not in answer.headers


def test_what_somebody_wrote_into_a_path_is_text(service: Service) -> None:
    page = service.ask("GET", '/docs?"><script>alert(1)</script>', headers=HTML)
    assert b"<script>" not in page.body
    assert Form(page).fields["next"] == '/docs?"><script>alert(1)</script>'


def test_who_followed_a_link_of_another_site_can_go_on(service: Service) -> None:
    """A strict cookie does not come with it."""
    followed = {**HTML, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert b'<a href="/docs">' in service.ask("GET", "/docs", headers=followed).body
    assert b"<a " not in service.ask("GET", "/docs", headers=HTML).body


# -- signing in and out ---------------------------------------------------------------------


def test_signing_in_leads_to_what_was_asked_for(service: Service) -> None:
    answer = signed_in(service, f" {service.token}\n", "/jobs?limit=3")
    assert (answer.status, answer.headers["location"]) == (303, "/jobs?limit=3")
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert {each.lower() for each in attributes} == {
        "httponly",
        "samesite=strict",
        "path=/",
        f"max-age={LIFE}",
    }
    assert name.startswith(f"shoal-{service.port}=")
    digest = hashlib.sha256(service.token.encode()).hexdigest()
    assert service.token not in name and digest not in name
    for path in ("/jobs?limit=3", "/docs", "/docs/start.js", "/openapi.json"):
        assert service.ask("GET", path, headers=cookie(answer)).status == 200
    assert "owner POST /login 303" in service.running.err
    assert service.token not in service.running.err


def test_by_https_the_cookie_stays_there(service: Service) -> None:
    form = Form(service.ask("GET", "/docs", headers=HTML))
    form.fields["token"] = service.token
    answer = submit(service, form, scheme="https")
    assert answer.headers["set-cookie"].startswith(f"__Host-shoal-{service.port}=")
    assert "; Secure" in answer.headers["set-cookie"]
    assert service.ask("GET", "/jobs", headers=cookie(answer)).status == 200


def test_a_wrong_token_is_told_on_the_page(service: Service) -> None:
    answer = signed_in(service, "<wrong>", "/jobs")
    assert answer.status == 401
    assert b"This token is not valid." in answer.body and b"wrong" not in answer.body
    assert Form(answer).fields["next"] == "/jobs"
    assert "set-cookie" not in answer.headers


def test_signing_out_takes_the_cookie_away(service: Service, owner: dict[str, str]) -> None:
    form = Form(service.ask("GET", "/logout", headers={**HTML, **owner}))
    answer = submit(service, form, **owner)
    assert (answer.status, answer.headers["location"]) == (303, "/login")
    assert re.match(rf'shoal-{service.port}="?"?;', answer.headers["set-cookie"])
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert Form(service.ask("GET", "/login", headers=HTML)).action == "/login"


def test_guessing_is_slowed_down_and_then_nothing_is_compared(shell: Shell) -> None:
    service = Service(shell, "--workers", "0", "--require-token")
    answers = [signed_in(service, f"guess-{n}") for n in range(11)]
    assert [answer.status for answer in answers] == [401] * 10 + [429]
    last = signed_in(service, service.token)
    assert last.status == 429 and "set-cookie" not in last.headers
    assert 1 <= int(last.headers["retry-after"]) <= 6
    assert b"Try again in" in last.body
    bearer = {"Authorization": f"Bearer {service.token}"}
    assert service.ask("GET", "/jobs", headers=bearer).status == 200, "who has a token is not held up"
    wrong = {"Authorization": "Bearer wrong"}
    assert service.ask("GET", "/jobs", headers=wrong).status == 429, "one count for both ways"
    service.running.kill()


def test_a_session_outlives_the_service_but_not_its_token(shell: Shell) -> None:
    first = Service(shell, "--workers", "0", "--require-token")
    value = cookie(signed_in(first, first.token))["Cookie"].partition("=")[2]
    first.running.kill()
    second = Service(shell, "--workers", "0", "--require-token")
    there = {"Cookie": f"shoal-{second.port}={value}"}
    assert second.ask("GET", "/jobs", headers=there).status == 200
    second.running.kill()
    other = shell.root / "other-token"
    other.write_text("o" * 43)
    other.chmod(0o600)
    third = Service(shell, "--workers", "0", "--require-token", "--token-file", str(other))
    there = {"Cookie": f"shoal-{third.port}={value}"}
    assert third.ask("GET", "/jobs", headers=there).status == 401
    third.running.kill()


# -- nothing else opens ---------------------------------------------------------------------


async def test_of_all_routes_three_need_no_token() -> None:
    """By the routes that there are, also those that no schema tells of."""
    async with Session.opened(load(frontier="memory:", require_token=True)) as session:
        gate = build(api.Service(session, tell=lambda line: None), made(), loopback=True)
        routes = [route for router in ROUTERS for route in router.routes if isinstance(route, Route)]
        assert len(routes) > 30
        without = {
            route.path
            for route in routes
            for method in route.methods or ()
            for accept in (b"*/*", b"text/html")
            if await asked(gate, method, re.sub(r"\{\w+\}", "x", route.path), accept) != 401
        }
    assert without == {"/healthz", "/login", "/logout"}


async def asked(gate: Gate, method: str, path: str, accept: bytes) -> int:
    """The status of an answer of this process."""
    said: list[Message] = []
    headers = [(b"host", b"localhost"), (b"accept", accept), (b"origin", b"http://localhost")]
    scope: Scope = {
        "type": "http",
        "method": method,
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        said.append(message)

    await gate(scope, receive, send)
    status: int = said[0]["status"]
    return status


@pytest.mark.parametrize(
    "path",
    [
        "/login/",
        "//login",
        "/LOGIN",
        "/login/x",
        "/login/../jobs",
        "/login%2f..%2fjobs",
        "/login;x/jobs",
        "/login%00",
        "/login%20",
        "/x/login",
        "/logout/",
        "/logout/../dead/purge",
        "/logoutx",
        "/.well-known/../jobs",
    ],
)
def test_no_path_that_looks_like_the_door_is_open(service: Service, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
        origin = {"Origin": f"http://{own(service)}"}
        assert service.ask(method, path, headers=origin).status == 401, method


def test_the_door_is_no_way_to_anything_else(service: Service) -> None:
    origin = {"Origin": f"http://{own(service)}"}
    for path in ("/login", "/logout", "/%6cogin"):
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            assert service.ask(method, path, headers=origin).status == 405
        assert service.ask("GET", path).status == 200
        assert service.ask("GET", path, headers={"Host": "evil.test"}).status == 421
        assert service.ask("POST", path, JOB, headers=origin).status == 415
        large = {**origin, "Content-Type": "application/x-www-form-urlencoded"}
        assert service.ask("POST", path, raw=b"x" * 20_000, headers=large).status == 413


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://evil.test", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_only_our_own_page_changes_anything(
    service: Service, owner: dict[str, str], headers: dict[str, str]
) -> None:
    """A browser sends its cookie whoever asked it to."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    signing = urlencode({"token": service.token}).encode()
    assert service.ask("POST", "/scrape", JOB, {**owner, **headers}).status == 403
    assert service.ask("DELETE", "/scrape/x", headers={**owner, **headers}).status == 403
    assert service.ask("PUT", "/lanes/a.test", {"rate": "1/s"}, {**owner, **headers}).status == 403
    assert service.ask("POST", "/login", raw=signing, headers={**form, **headers}).status == 403
    assert service.ask("POST", "/logout", headers={**owner, **headers}).status == 403


@pytest.mark.parametrize("by", ["Origin", "Sec-Fetch-Site"])
def test_our_own_page_may(service: Service, owner: dict[str, str], by: str) -> None:
    word = {"Origin": f"http://{own(service)}"} if by == "Origin" else {by: "same-origin"}
    assert service.ask("POST", "/scrape", JOB, {**owner, **word}).status == 202
    bearer = {"Authorization": f"Bearer {service.token}"}
    assert service.ask("POST", "/scrape", JOB, bearer).status == 202, "a script needs no such word"


def test_a_session_may_what_its_token_may(service: Service) -> None:
    reader = cookie(signed_in(service, READER))
    word = {"Origin": f"http://{own(service)}"}
    assert service.ask("GET", "/jobs", headers=reader).status == 200
    assert service.ask("POST", "/scrape", JOB, {**reader, **word}).status == 403


def test_a_cookie_that_is_none_opens_nothing(service: Service, owner: dict[str, str]) -> None:
    name, _, value = owner["Cookie"].partition("=")
    until, nonce, signature = value.split(".")
    digest = hashlib.sha256(service.token.encode()).hexdigest()
    for bad in (
        "",
        service.token,
        digest,
        f"{int(until) + 1}.{nonce}.{signature}",
        f"{until}.{nonce}x.{signature}",
        f"{until}.{nonce}.{signature[:-1]}",
        f"{until}.{nonce}.",
        f"{until}.{nonce}.\u00e9",
        f"-1.{nonce}.{signature}",
        f"{'9' * 5000}.{nonce}.{signature}",
        "..",
    ):
        assert service.ask("GET", "/jobs", headers={"Cookie": f"{name}={bad}"}).status == 401, bad
    assert service.ask("GET", "/jobs", headers={"Cookie": f"other={value}"}).status == 401
    # Somebody planted another of this name: the good one counts.
    assert service.ask("GET", "/jobs", headers={"Cookie": f"a=b; {name}=bad; {name}={value}"}).status == 200
    wrong = {"Cookie": f"{name}={value}", "Authorization": "Bearer wrong"}
    assert service.ask("GET", "/jobs", headers=wrong).status == 401, "a token counts more"


@pytest.mark.parametrize(
    "text",
    [
        "//evil.test",
        "/\\evil.test",
        "\\\\evil.test",
        "https://evil.test/",
        "javascript:alert(1)",
        "/\t/evil.test",
        "/\n/evil.test",
        " /docs",
        "docs",
        "",
        "/docs\r\nSet-Cookie: a=b",
        "/\u00e9",
        "/" + "x" * 3000,
        "/login?next=/login",
        "/logout",
    ],
)
def test_nobody_is_sent_elsewhere(service: Service, text: str) -> None:
    assert local_path(text) == "/docs"
    form = Form(service.ask("GET", "/login", headers=HTML))
    form.fields |= {"token": service.token, "next": text}
    assert submit(service, form).headers["location"] == "/docs"
    assert (
        Form(service.ask("GET", "/login?" + urlencode({"next": text}), headers=HTML)).fields["next"]
        == "/docs"
    )


# -- sessions by themselves -----------------------------------------------------------------


def made(owner: str = "o" * 43, *others: str) -> Tokens:
    return Tokens(
        owner,
        [
            NamedToken(name=t[:1], sha256=hashlib.sha256(t.encode()).hexdigest(), scopes=("read",))
            for t in others
        ],
    )


def sent(value: str) -> dict[bytes, bytes]:
    return {b"host": b"localhost:8000", b"cookie": f"shoal-8000={value}".encode()}


def test_a_session_ends() -> None:
    now = 1_000_000.0
    sessions = Sessions(made(), RateLimiter(6.0, 10), clock=lambda: now)
    value, caller = sessions.begin("o" * 43, "here")
    assert sessions.caller(sent(value)) == caller
    now += LIFE - 1
    assert sessions.caller(sent(value)) == caller
    now += 1
    assert sessions.caller(sent(value)) is None


def test_who_knows_the_hash_of_a_token_can_make_no_session() -> None:
    """Hashes stand in the settings. With the same hash under another owner's token, or under none, a
    session is another one."""
    guesses = RateLimiter(6.0, 10)
    value, _ = Sessions(made("o" * 43, READER), guesses).begin(READER, "here")
    assert Sessions(made("o" * 43, READER), guesses).caller(sent(value)) is not None
    assert Sessions(made("p" * 43, READER), guesses).caller(sent(value)) is None
    assert Sessions(made("", READER), guesses).caller(sent(value)) is None
    assert Sessions(made("o" * 43), guesses).caller(sent(value)) is None, "the token was taken away"


def test_a_right_token_does_not_count_as_a_guess() -> None:
    sessions = Sessions(made(), RateLimiter(6.0, 2, clock=lambda: 0.0))
    for _ in range(5):
        sessions.begin("o" * 43, "here")
    for status in (401, 401, 429):
        with pytest.raises(Problem) as refused:
            sessions.begin("wrong", "here")
        assert refused.value.status == status
    sessions.begin("o" * 43, "elsewhere")


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost:8000", "shoal-8000"), ("example.org", "shoal"), ("[::1]", "shoal"), ("[::1]:9", "shoal-9")],
)
def test_services_on_one_host_have_their_own_cookies(host: str, name: str) -> None:
    assert cookie_name(host, secure=False) == name
    assert cookie_name(host, secure=True) == f"__Host-{name}"
