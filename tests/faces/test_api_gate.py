"""What the gate of the API refuses, each attack by itself, against a real server."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.api.rate_limit import RateLimiter
from tests.rig.command import Shell
from tests.rig.service import Answer, Service

READER, SENDER = "r" * 43, "s" * 43
SECRET = "Bearer-like-secret-in-a-header"


def named(token: str, *scopes: str) -> dict[str, object]:
    return {
        "name": f"the-{scopes[0]}er",
        "sha256": hashlib.sha256(token.encode()).hexdigest(),
        "scopes": scopes,
    }


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with Shell(tmp_path_factory.mktemp("gate")) as made:
        yield made


@pytest.fixture(scope="module")
def local(shell: Shell) -> Service:
    """On loopback, as `shoal serve` starts it; no workers: nothing here is visited."""
    return Service(shell, "--workers", "0")


@pytest.fixture(scope="module")
def closed(shell: Shell) -> Service:
    """Reachable from elsewhere, so a token is needed."""
    tokens = json.dumps([named(READER, "read"), named(SENDER, "submit")])
    return Service(shell, "--workers", "0", "--host", "0.0.0.0", env={"SHOAL_TOKENS": tokens})


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def is_problem(answer: Answer, status: int) -> bool:
    document = answer.json()
    return (
        answer.status == status == document["status"]
        and answer.headers["content-type"] == "application/problem+json"
        and {"type", "title", "detail"} <= document.keys()
    )


# -- tokens ---------------------------------------------------------------------------------


def routes(service: Service) -> list[tuple[str, str]]:
    schema = service.ask("GET", "/openapi.json", headers=bearer(service.token)).json()
    found = [
        (method.upper(), re.sub(r"\{\w+\}", "x", path))
        for path, operations in schema["paths"].items()
        for method in operations
    ]
    others = [
        "/openapi.json",
        "/docs",
        "/docs/swagger-ui-bundle.js",
        "/docs/start.js",
        "/nothing",
        "//docs",
        "/",
    ]
    return found + [("GET", path) for path in others]


def test_every_route_needs_a_token(closed: Service) -> None:
    table = routes(closed)
    assert len(table) > 30
    assert ("GET", "/scrape/x/events") in table
    for method, path in table:
        answer = closed.ask(method, path)
        if path == "/healthz":
            assert (answer.status, answer.json()) == (200, {"status": "ok"})
        else:
            assert is_problem(answer, 401), (method, path, answer)
            assert answer.headers["www-authenticate"] == "Bearer"


def test_the_token_is_in_a_file_of_its_owner_and_opens_everything(closed: Service) -> None:
    mode = (closed.shell.root / ".shoal/token").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert len(closed.token) >= 43
    assert closed.ask("GET", "/jobs", headers=bearer(closed.token)).status == 200


def test_a_wrong_token_is_401_whatever_it_is_and_guessing_is_slowed_down(shell: Shell) -> None:
    service = Service(shell, "--workers", "0", "--require-token")
    odd = ["Bearer wrong", "Bearer", "Basic b3duZXI6eA==", "Bearer tok\u00e9n", "Bearer a b", "\u00ff"]
    for given in odd:
        with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
            head = "GET /jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            connection.sendall(f"{head}Authorization: {given}\r\n\r\n".encode())
            said = b"".join(iter(lambda c=connection: c.recv(65536), b""))  # type: ignore[misc]
        assert said.startswith(b"HTTP/1.1 401 "), (given, said)
    answers = [service.ask("GET", "/jobs", headers=bearer(f"guess-{n}")) for n in range(5)]
    assert [answer.status for answer in answers] == [401] * 4 + [429]
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert service.ask("GET", "/jobs", headers=bearer(service.token)).status == 200
    service.running.kill()


def test_scopes(closed: Service) -> None:
    job = {"url": "http://example.com/"}

    def ask(token: str, method: str, path: str, body: object = None) -> int:
        return closed.ask(method, path, body, bearer(token)).status

    assert ask(READER, "GET", "/jobs") == 200
    assert ask(READER, "POST", "/scrape", job) == 403
    assert ask(READER, "DELETE", "/scrape/x") == 403
    assert ask(SENDER, "POST", "/scrape", job) == 202
    assert ask(SENDER, "POST", "/scrape", job | {"allow_private": True}) == 403
    assert ask(SENDER, "POST", "/scrape", job | {"robots": False}) == 403
    assert ask(SENDER, "POST", "/dead/purge", {"all": True}) == 403
    assert ask(SENDER, "PUT", "/lanes/example.com", {"rate": "1/s"}) == 403
    assert ask(closed.token, "POST", "/dead/purge", {"all": True}) == 200
    assert ask(closed.token, "POST", "/scrape", job | {"allow_private": True}) == 202


def test_elsewhere_than_on_loopback_nothing_starts_without_a_token(shell: Shell, tmp_path: Path) -> None:
    for content, mode in (("", 0o600), ("short\n", 0o600), ("x" * 43, 0o644)):
        token = tmp_path / f"token-{len(content)}"
        token.write_text(content)
        token.chmod(mode)
        ended = shell.run("serve", "--host", "0.0.0.0", "--port", "0", "--token-file", str(token))
        assert (ended.code, "hint:" in ended.err) == (2, True), ended
    for place in ("/proc/none/token", ""):
        ended = shell.run("serve", "--host", "0.0.0.0", "--port", "0", env={"SHOAL_TOKEN_FILE": place})
        assert (ended.code, "hint:" in ended.err) == (2, True), ended


def test_what_came_through_a_proxy_is_not_local(local: Service) -> None:
    assert local.get("/jobs").status == 200
    assert is_problem(local.ask("GET", "/jobs", headers={"X-Forwarded-For": "203.0.113.9"}), 401)
    through = {"X-Forwarded-For": "203.0.113.9", **bearer(local.token)}
    assert local.ask("GET", "/jobs", headers=through).status == 200


# -- other sites ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.test", "127.0.0.1.evil.test", "169.254.169.254", "0.0.0.0"])
def test_another_name_is_refused(local: Service, host: str) -> None:
    """DNS rebinding: the page of evil.test talks to us under its own name."""
    assert is_problem(local.ask("GET", "/jobs", headers={"Host": host}), 421)


@pytest.mark.parametrize("host", ["a/?x=", "a b", "a@b", "[::1", "localhost:80:80", ""])
def test_a_host_that_is_none_is_refused(local: Service, closed: Service, host: str) -> None:
    for service in (local, closed):
        answer = service.ask("GET", "/jobs", headers={"Host": host, **bearer(service.token)})
        assert answer.status == 400, answer


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:9"])
def test_our_own_names_are_fine(local: Service, host: str) -> None:
    assert local.ask("GET", "/jobs", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_the_pages_of_other_sites_cannot_post(local: Service, headers: dict[str, str]) -> None:
    before = len(local.get("/jobs").json()["jobs"])
    assert is_problem(local.ask("POST", "/scrape", {"url": "http://example.com/"}, headers), 403)
    assert is_problem(local.ask("DELETE", "/scrape/x", headers=headers), 403)
    assert len(local.get("/jobs").json()["jobs"]) == before


def test_the_pages_of_other_sites_cannot_listen(local: Service) -> None:
    job = local.post("/scrape", {"url": "http://example.com/"}).json()["job_id"]
    for headers in (
        {"Origin": "http://evil.test"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
    ):
        assert is_problem(local.ask("GET", f"/scrape/{job}/events", headers=headers), 403)
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert local.ask("GET", "/docs", headers=followed).status == 200


def test_our_own_page_may_post(local: Service) -> None:
    headers = {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
    assert local.ask("POST", "/scrape", {"url": "http://example.com/"}, headers).status == 202


def test_nobody_is_told_that_they_may_come_from_elsewhere(local: Service) -> None:
    asked = {"Origin": "http://evil.test", "Access-Control-Request-Method": "POST"}
    answer = local.ask("OPTIONS", "/scrape", headers=asked)
    assert answer.status in (403, 405)
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_only_json_is_read(local: Service, kind: str) -> None:
    body = json.dumps({"url": "http://example.com/"}).encode()
    assert is_problem(local.ask("POST", "/scrape", raw=body, headers={"Content-Type": kind}), 415)


def test_every_answer_has_the_headers_that_protect(local: Service) -> None:
    for path in ("/jobs", "/nothing", "/healthz", "/docs"):
        headers = local.get(path).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"].partition("style-src")[0]
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


# -- size and number ------------------------------------------------------------------------


def test_a_body_is_counted_as_it_comes(local: Service) -> None:
    """Chunked, without a length that could be believed: it ends at ten mebibytes."""
    sent = 0
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", local.port), timeout=30) as connection:
        connection.sendall(
            b"POST /scrape HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        try:
            while sent < 1 << 30:
                connection.sendall(chunk)
                sent += 65536
        except OSError:
            pass  # it hung up, as it should
    assert 10 << 20 <= sent < 64 << 20
    assert local.get("/healthz").status == 200
    memory = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{local.running.pid}/status").read_text())
    assert memory is not None
    assert int(memory[1]) < 400 * 1024


def test_a_body_that_says_it_is_too_large_is_not_read(local: Service) -> None:
    head = b"POST /scrape HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", local.port), timeout=30) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % (1 << 40))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_who_sends_before_listening_sees_why_a_body_is_refused(local: Service, closed: Service) -> None:
    """More than any socket holds: if nobody read it, the connection would break before the answer."""
    assert is_problem(local.ask("POST", "/scrape", raw=b" " * (16 << 20)), 413)
    assert is_problem(closed.ask("POST", "/scrape", raw=b" " * (16 << 20)), 401)
    assert is_problem(
        local.ask("POST", "/scrape", raw=b" " * (9 << 20), headers={"Content-Type": "a/b"}), 415
    )


def test_who_asks_before_sending_is_refused_at_once(local: Service) -> None:
    head = b"POST /scrape HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", local.port), timeout=30) as connection:
        connection.sendall(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (1 << 30))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 "), "and not asked to send it"


def test_a_deep_document_is_refused(local: Service) -> None:
    answer = local.ask("POST", "/scrape", raw=b'{"url":' * 100_000)
    assert answer.status in (400, 422)
    assert is_problem(answer, answer.status)


@pytest.mark.parametrize(
    "body",
    [
        {"url": "http://example.com/" + "x" * 2_000_000},
        {"urls": [f"http://example.com/{n}" for n in range(10_001)]},
        {"url": "http://user:password@example.com/"},
        {"url": "file:///etc/passwd"},
        {"url": "javascript:alert(1)"},
        {"url": "http://"},
        {"url": ""},
        {"urls": []},
        {},
        {"url": "http://example.com/", "queue": "x; FLUSHALL"},
        {"url": "http://example.com/", "queue": "q\r\nCONFIG SET dir /"},
        {"url": "http://example.com/", "queue": "'; drop table job--"},
        {"url": "http://example.com/", "headers": {"X-A": "a\r\nX-B: y"}},
        {"url": "http://example.com/", "headers": {"Host": "evil.test"}},
        {"url": "http://example.com/", "headers": {"Transfer-Encoding": "chunked"}},
        {"url": "http://example.com/", "headers": {"a b": "x"}},
        {"url": "http://example.com/", "priority": 10},
        {"url": "http://example.com/", "rate": "fast"},
        {"url": "http://example.com/", "include": ["re:("]},
        {"url": "http://example.com/", "fields": ["nonsense"]},
        {"url": "http://example.com/", "hook": "__reduce__"},
        {"url": "http://example.com/", "webhook": {"url": "ftp://example.com/", "secret": "12345678"}},
        {"py/object": "os.system", "url": "http://example.com/"},
        [1],
        "http://example.com/",
    ],
    ids=lambda body: str(body)[:60],
)
def test_what_cannot_be_is_a_422_and_nothing_is_stored(local: Service, body: object) -> None:
    before = job_ids(local)
    answer = local.post("/scrape", body)
    assert is_problem(answer, 422), answer
    assert job_ids(local) == before


def job_ids(service: Service) -> list[str]:
    return [job["job_id"] for job in service.get("/jobs?limit=1000").json()["jobs"]]


def test_ranges_are_not_served(local: Service) -> None:
    many = "bytes=" + ",".join(f"{n}-{n}" for n in range(10_000))
    started = time.monotonic()
    answer = local.ask("GET", "/docs/swagger-ui.css", headers={"Range": many[:60_000]})
    assert answer.status == 200
    assert time.monotonic() - started < 5


def test_too_many_requests_are_told_when_to_come_back(shell: Shell) -> None:
    service = Service(shell, "--workers", "0", env={"SHOAL_API_RATE": "5/h"})
    answers = [service.get("/jobs") for _ in range(7)]
    assert [answer.status for answer in answers] == [200] * 5 + [429] * 2, "as many as it says, and no more"
    assert is_problem(answers[-1], 429)
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 720
    # By token, not by address: somebody else is not held up.
    assert service.ask("GET", "/jobs", headers=bearer(service.token)).status == 200
    service.running.kill()


def test_an_allowance_comes_back_with_time_and_forgets_the_longest_gone() -> None:
    now = 0.0
    allowance = RateLimiter(1.0, 3, keys=2, clock=lambda: now)
    assert [allowance.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
    now = 1.0
    assert [allowance.take("a"), allowance.take("a")] == [0.0, 1.0]
    assert allowance.take("b") == allowance.take("c") == 0.0
    assert [allowance.take("a") for _ in range(3)] == [0.0] * 3, "a was forgotten"


def test_it_answers_where_it_listens(shell: Shell) -> None:
    service = Service(shell, "--workers", "0", "--host", "127.0.0.2")
    assert "127.0.0.2" in service.url
    assert service.get("/jobs").status == 200
    assert is_problem(service.ask("GET", "/jobs", headers={"Host": "evil.example"}), 421)
    assert is_problem(service.ask("GET", "/jobs", headers={"Host": "0.0.0.0"}), 421)
    service.running.kill()


def test_the_server_caps_pages(shell: Shell) -> None:
    service = Service(shell, "--workers", "0", env={"MAX_PAGES": "3"})
    site = {"url": "http://example.com/"}
    assert service.post("/scrape/business", site).json()["expected_pages"] == 3, "of the usual ones"
    refused = service.post("/scrape/business", site | {"pages_to_scrape": ["/1", "/2", "/3", "/4"]})
    assert is_problem(refused, 422)
    assert "pages_to_scrape" in refused.json()["hint"]
    many = service.post("/api/crawl/batch", {"urls": [f"http://example.com/{n}" for n in range(4)]})
    assert is_problem(many, 422)
    assert "give fewer urls" in many.json()["hint"]
    service.running.kill()


def test_how_many_pages_are_expected(local: Service) -> None:
    schema = local.get("/openapi.json").json()["components"]["schemas"]
    assert schema["ScrapeRequest"]["properties"]["expected_pages"]["default"] == 100
    assert local.post("/scrape", {"url": "http://example.com/"}).json()["expected_pages"] == 100
    assert local.post("/scrape/business", {"url": "http://example.com/"}).json()["expected_pages"] == 7


@pytest.mark.parametrize(("secret", "status"), [("x", 202), ("", 422)])
def test_a_secret_is_anything_but_nothing(local: Service, secret: str, status: int) -> None:
    hook = {"url": "http://example.com/hook", "secret": secret}
    assert local.post("/scrape", {"url": "http://example.com/", "webhook": hook}).status == status


# -- what is told ---------------------------------------------------------------------------


def test_secrets_go_in_and_do_not_come_out(local: Service) -> None:
    hook = {"url": "http://example.com/hook", "secret": "hook-secret-0123456789"}
    asked = {"url": "http://example.com/", "headers": {"Authorization": SECRET}, "webhook": hook}
    job = local.post("/scrape?probe=query-secret", asked).json()["job_id"]
    wrong = local.post("/scrape", asked | {"priority": 99})
    told = [
        local.get(path).body.decode()
        for path in ("/jobs", f"/jobs/{job}", f"/scrape/{job}/progress", "/metrics", "/openapi.json")
    ]
    told += [wrong.body.decode(), local.running.err, local.running.out]
    for text in told:
        assert SECRET not in text
        assert "hook-secret" not in text
        assert "query-secret" not in text
    assert local.get(f"/jobs/{job}").json()["has_headers"] is True
    assert "POST /scrape 202" in local.running.err


def test_every_error_is_a_problem_document(local: Service) -> None:
    assert is_problem(local.get("/nothing/here"), 404)
    assert is_problem(local.get("/scrape/no-such-job/progress"), 404)
    assert is_problem(local.ask("PATCH", "/jobs"), 405)
    assert is_problem(local.ask("POST", "/scrape", raw=b"{"), 422)
    assert is_problem(local.get("/jobs?limit=0"), 422)
    assert is_problem(local.get("/dead?error=nonsense"), 422)
    assert is_problem(local.get("/lanes/not%20a%20host"), 422)


def test_a_path_cannot_write_lines_into_the_log(local: Service) -> None:
    local.get("/x%0d%0aERROR%20admin%20login%1b[31m%e2%80%a8")
    assert "\nERROR admin login" not in local.running.err
    assert "\x1b" not in local.running.err


def test_the_docs_page_needs_nothing_from_elsewhere(local: Service) -> None:
    page = local.get("/docs")
    assert "http://" not in page.body.decode()
    assert "https://" not in page.body.decode()
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.body.decode()):
        answer = local.get(name)
        assert answer.status == 200, name
        assert len(answer.body) > 50
    assert local.get("/docs/..%2f..%2fsecret").status == 404


def test_home_says_where_to_go(local: Service, closed: Service) -> None:
    for method in ("GET", "HEAD"):
        assert closed.ask(method, "/").status == 401
    links = local.get("/").json()["links"]
    assert {"/docs", "/health", "/metrics", "/jobs"} <= {*links.values()}
    for path in links.values():
        assert local.get(path).status == 200, path
    page = local.get("/", Accept="text/html,*/*;q=0.8")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in links.values():
        assert f'href="{path}"' in page.body.decode()
    assert b"<script" not in page.body and "accept" in page.headers["vary"].lower()


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", "GET, HEAD"),
        ("/jobs", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/scrape", "POST"),
        ("/scrape/x", "DELETE"),
        ("/lanes/a.example", "GET, HEAD, PUT"),
        ("/schedules", "GET, HEAD, POST"),
        ("/schedules/x", "DELETE, GET, HEAD, PATCH"),
        ("/dead/purge", "POST"),
    ],
)
def test_a_405_names_every_method(local: Service, path: str, methods: str) -> None:
    for method in ("TRACE", "OPTIONS"):
        refused = local.ask(method, path)
        assert is_problem(refused, 405) and refused.headers["allow"] == methods


def test_the_head_of_everything_can_be_asked_for(local: Service) -> None:
    job = local.post("/scrape", {"url": "http://example.com/"}).json()["job_id"]
    for path in ("/jobs", "/health", "/healthz", "/docs", "/metrics", f"/scrape/{job}/progress", "/nothing"):
        head, whole = local.ask("HEAD", path), local.get(path)
        assert (head.status, head.body) == (whole.status, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
    stream = local.ask("HEAD", f"/scrape/{job}/events", timeout=10.0)
    assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    local.ask("DELETE", f"/scrape/{job}")


def test_a_slash_too_many_is_named(local: Service) -> None:
    for path in ("/jobs/", "/scrape/", "/health/", "/jobs/x/"):
        refused = local.get(path)
        assert is_problem(refused, 404) and path.rstrip("/") in refused.json()["hint"]
    assert "/docs" in local.get("/nothing").json()["hint"]


PLANTED = "planted-pass-word"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/scrape", {"url": f"http://user:{PLANTED}@example.com/"}),
        ("POST", "/scrape", {"url": f"ftp://user:{PLANTED}@example.com/"}),
        ("POST", "/scrape", {"url": f"user:{PLANTED}@example.com"}),
        ("POST", "/scrape", {"url": f"http://{PLANTED}@example.com/"}),
        ("POST", "/scrape", {"urls": ["http://a.example/", f"http://user:{PLANTED}/x@example.com/"]}),
        (
            "POST",
            "/scrape",
            {
                "url": "http://a.example/",
                "webhook": {"url": f"http://user:{PLANTED}@a.example/", "secret": "s"},
            },
        ),
        ("POST", "/scrape/business", {"url": f"http://user:{PLANTED}@example.com/"}),
        ("POST", "/api/crawl/batch", {"urls": [f"http://user:{PLANTED}@example.com/"]}),
        ("POST", "/schedules", {"name": "n", "every": "1h", "url": f"http://user:{PLANTED}@example.com/"}),
        ("GET", f"/lanes/user:{PLANTED}@example.com", None),
        ("PUT", f"/lanes/user:{PLANTED}@example.com", {"rate": "1/s"}),
        ("GET", f"/dead?host=http://user:{PLANTED}@example.com/", None),
        ("POST", "/dead/retry", {"host": f"user:{PLANTED}@example.com"}),
    ],
)
def test_a_password_in_a_url_is_not_told_again(local: Service, method: str, path: str, body: object) -> None:
    answer = local.ask(method, path, body)
    assert is_problem(answer, 422)
    assert PLANTED not in answer.body.decode()
    assert PLANTED not in local.running.err, "nor in the log"


def test_a_password_in_a_list_of_urls_is_not_kept(local: Service, shell: Shell) -> None:
    ended = shell.run("enqueue", "planted", f"http://user:{PLANTED}@example.com/", "http://example.com/")
    assert PLANTED not in ended.out + ended.err
    for path in ("/dead", "/dead/groups", "/jobs", "/jobs/planted"):
        told = local.get(path)
        assert told.status == 200 and PLANTED not in told.body.decode(), path
    assert "http://user:***@example.com/" in local.get("/dead?job_id=planted").body.decode()
    assert PLANTED not in shell.run("dead", "list").out


def test_what_is_no_http_gets_a_problem(local: Service) -> None:
    for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000):
        with socket.create_connection(("127.0.0.1", local.port), timeout=10) as connection:
            connection.sendall(sent)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 400 ") and b"application/problem+json" in answer, sent[:20]


def test_a_port_in_use_is_told(local: Service, shell: Shell) -> None:
    ended = shell.run("serve", "--port", str(local.port))
    assert (ended.code, "in use" in ended.err, "--port" in ended.err) == (2, True, True), ended
