"""`/schedules` over HTTP, against a real server. Nothing here is visited."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

import shoal
from shoal.client import ApiError
from tests.rig.command import Shell
from tests.rig.service import Answer, Service

READER, SENDER = "r" * 43, "s" * 43
URL = "http://example.com/"
APP = """
from shoal import Page, Shoal

app = Shoal()


@app.scraper("books", start=["http://books.test/"])
async def books(page: Page):
    yield {"url": page.url}
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Shell(tmp_path_factory.mktemp("schedules")) as shell:
        (shell.root / "app.py").write_text(APP)
        tokens = [
            {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": [name]}
            for name, token in (("read", READER), ("submit", SENDER))
        ]
        yield Service(shell, "--workers", "0", "--app", "app.py", env={"SHOAL_TOKENS": json.dumps(tokens)})


@pytest.fixture(autouse=True)
def empty(service: Service) -> None:
    for each in service.get("/schedules").json()["schedules"]:
        service.ask("DELETE", f"/schedules/{each['name']}")


def add(service: Service, name: str = "news", **more: Any) -> Answer:
    when = {} if {"cron", "every"} & more.keys() else {"every": "1d"}
    return service.post("/schedules", {"name": name, "url": URL} | when | more)


def test_from_making_to_removing(service: Service) -> None:
    made = add(service, cron="0 6 * * *", timezone="Europe/Berlin", depth=1, expected_pages=7, queue="rag")
    assert made.status == 201
    told = made.json()
    assert (told["cron"], told["every"], told["timezone"]) == ("0 6 * * *", None, "Europe/Berlin")
    assert (told["start"], told["depth"], told["max_pages"], told["queue"]) == ([URL], 1, 7, "rag")
    assert (told["overlap"], told["paused"], told["fired"], told["last_job"]) == ("skip", False, 0, None)
    assert told["next_at"].startswith("20")
    assert service.get("/schedules/news").json() == told
    assert service.get("/schedules").json() == {"schedules": [told], "next_cursor": None}
    paused = service.ask("PATCH", "/schedules/news", {"paused": True}).json()
    assert (paused["paused"], paused["next_at"], paused["cron"]) == (True, None, "0 6 * * *")
    moved = service.ask("PATCH", "/schedules/news", {"paused": False, "every": "2h"}).json()
    assert (moved["every"], moved["cron"], moved["paused"]) == ("2h", None, False)
    assert moved["timezone"] == "UTC", "that of an interval"
    gone = service.ask("DELETE", "/schedules/news")
    assert (gone.status, gone.body) == (204, b"")
    assert service.get("/schedules/news").status == 404


def test_run_submits_a_job(service: Service) -> None:
    add(service, paused=True, expected_pages=3)
    submitted = service.post("/schedules/news/run")
    assert (submitted.status, submitted.json()["expected_pages"]) == (202, 3)
    job = service.get(f"/jobs/{submitted.json()['job_id']}").json()
    assert (job["start"], job["counts"]["added"], job["max_pages"]) == ([URL], 1, 3)
    told = service.get("/schedules/news").json()
    assert (told["last_job"], told["fired"], told["next_at"]) == (job["job_id"], 1, None)
    first, again = (service.post("/schedules/news/run", None, Idempotency_Key="one") for _ in range(2))
    assert (first.json(), again.headers["idempotency-replayed"]) == (again.json(), "true")
    assert service.get("/schedules/news").json()["fired"] == 2


def test_a_scraper_of_the_server_may_be_named(service: Service) -> None:
    made = service.post("/schedules", {"name": "books", "scraper": "books", "every": "1h"})
    assert (made.status, made.json()["scraper"], made.json()["start"]) == (201, "books", [])
    job = service.post("/schedules/books/run").json()["job_id"]
    assert service.get(f"/jobs/{job}").json()["start"] == ["http://books.test/"]
    assert service.post("/schedules", {"name": "no", "scraper": "no", "every": "1h"}).status == 422
    evil = {"name": "x", "scraper": "x", "app": "/etc/passwd", "every": "1h"}
    assert service.post("/schedules", evil).status == 422, "no file of the server is loaded by its name"


def test_lists_have_cursors(service: Service) -> None:
    for name in ("c", "a", "e", "d", "b"):
        add(service, name)
    walked: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = service.get(f"/schedules?limit=2{cursor and '&cursor='}{cursor}").json()
        walked += [each["name"] for each in page["schedules"]]
        cursor = page["next_cursor"]
    assert walked == ["a", "b", "c", "d", "e"]


def test_a_name_is_taken_once(service: Service) -> None:
    add(service)
    taken = add(service)
    assert (taken.status, taken.headers["content-type"]) == (409, "application/problem+json")
    assert "replace" in taken.json()["hint"]
    assert add(service, every="2h", replace=True).json()["every"] == "2h"


def test_the_same_key_is_done_once(service: Service) -> None:
    asked = {"name": "news", "url": URL, "every": "1d"}
    first, again = (service.post("/schedules", asked, Idempotency_Key="k1") for _ in range(2))
    assert (first.status, first.json()) == (again.status, again.json())
    assert again.headers["idempotency-replayed"] == "true"
    # The answer was lost with the process that made it: the same is asked under a key that has none.
    assert service.post("/schedules", asked, Idempotency_Key="k2").status == 201
    other = asked | {"every": "2d"}
    assert service.post("/schedules", other, Idempotency_Key="k3").status == 409
    assert service.post("/schedules", other, Idempotency_Key="k1").status == 422


@pytest.mark.parametrize(
    "body",
    [
        {"cron": "61 * * * *"},
        {"cron": "0 6 * * *", "every": "1h"},
        {"cron": "0 6 * * *", "timezone": "Mars"},
        {"cron": "0 6 * * *", "timezone": "../../etc/passwd"},
        {"cron": "* * */20 * 1L"},
        {"cron": "1" * 100_000},
        {"every": "0s"},
        {"every": "1h", "timezone": "Europe/Berlin"},
        {"every": "1h", "catch_up": True},
        {"every": "1h", "name": "a/b"},
        {"every": "1h", "name": "x" * 65},
        {"every": "1h", "url": "file:///etc/passwd"},
        {"every": "1h", "url": "http://u:p@example.com/"},
        {"every": "1h", "urls": [f"{URL}{n}" for n in range(1001)]},
        {"every": "1h", "headers": {"Host": "evil.test"}},
        {"every": "1h", "queue": "failed_urls"},
        {"every": "1h", "expected_pages": 0},
        {"every": "1h", "overlap": "maybe"},
        {"every": "1h", "hook": 1},
    ],
    ids=lambda body: str(body)[:50],
)
def test_what_cannot_be_is_a_422_and_nothing_is_kept(service: Service, body: dict[str, Any]) -> None:
    answer = service.post("/schedules", {"name": "news", "url": URL} | body)
    assert (answer.status, answer.headers["content-type"]) == (422, "application/problem+json"), answer
    assert service.get("/schedules").json()["schedules"] == []


def test_a_bad_change_changes_nothing(service: Service) -> None:
    told = add(service).json()
    for body in ({}, {"cron": "x"}, {"timezone": "Mars"}, {"catch_up": True}, {"name": "other"}):
        assert service.ask("PATCH", "/schedules/news", body).status == 422, body
    assert service.get("/schedules/news").json() == told
    for method, path in (
        ("GET", "/schedules/x"),
        ("PATCH", "/schedules/x"),
        ("DELETE", "/schedules/x"),
        ("POST", "/schedules/x/run"),
    ):
        answer = service.ask(method, path, {"paused": True} if method == "PATCH" else None)
        assert (answer.status, answer.headers["content-type"]) == (404, "application/problem+json")
        assert "/schedules" in answer.json()["hint"]


def test_scopes_are_those_of_jobs(service: Service) -> None:
    def ask(token: str, method: str, path: str, body: object = None) -> int:
        return service.ask(method, path, body, {"Authorization": f"Bearer {token}"}).status

    asked = {"name": "news", "url": URL, "every": "1d"}
    assert ask(READER, "POST", "/schedules", asked) == 403
    assert ask(SENDER, "POST", "/schedules", asked | {"allow_private": True}) == 403
    assert ask(SENDER, "POST", "/schedules", asked | {"robots": False}) == 403
    assert ask(SENDER, "POST", "/schedules", asked) == 201
    assert ask(READER, "GET", "/schedules") == ask(READER, "GET", "/schedules/news") == 200
    for method, path, body in (
        ("PATCH", "/schedules/news", {"paused": True}),
        ("POST", "/schedules/news/run", None),
        ("DELETE", "/schedules/news", None),
    ):
        assert ask(READER, method, path, body) == 403
        assert ask(SENDER, method, path, body) in (200, 202, 204)
    assert ask(service.token, "POST", "/schedules", asked | {"allow_private": True}) == 201


def test_secrets_go_in_and_do_not_come_out(service: Service) -> None:
    hook = {"url": "http://example.com/hook", "secret": "hook-secret-0123456789"}
    made = add(service, headers={"Authorization": "planted-secret"}, webhook=hook)
    job = service.post("/schedules/news/run").json()["job_id"]
    told = [
        made.body,
        *(service.get(path).body for path in ("/schedules", "/schedules/news", f"/jobs/{job}")),
    ]
    assert not any(b"planted-secret" in text or b"hook-secret" in text for text in told)
    assert (made.json()["has_headers"], made.json()["webhook"]) == (True, "http://example.com/hook")
    assert service.get(f"/jobs/{job}").json()["has_headers"] is True


def test_the_client_has_it_all(service: Service) -> None:
    with shoal.Client(service.url, service.token) as client:
        made = client.add_schedule("news", URL, cron="@daily", expected_pages=5)
        assert (made["cron"], made["max_pages"]) == ("0 0 * * *", 5)
        with pytest.raises(ApiError) as refused:
            client.add_schedule("news", URL, every="1h")
        assert refused.value.status == 409
        assert client.change_schedule("news", paused=True)["paused"] is True
        assert client.schedule("news")["next_at"] is None
        job = client.run_schedule("news")
        assert client.progress(job)["status"] == "PENDING"
        assert [each["last_job"] for each in client.schedules()] == [job]
        client.remove_schedule("news")
        assert client.schedules() == []
