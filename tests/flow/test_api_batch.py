"""What a batch answers, from outside: redirects, robots.txt, options, limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply
from tests.rig.command import Shell
from tests.rig.service import Service

MOVED = {"/a": "/b", "/b": "/c", "/old": "/b", "/round": "/about", "/about": "/round", "/door": "/secret/x"}


def moving(call: Call) -> Reply:
    """A few pages, and paths that lead to them."""
    if call.bare in MOVED:
        return Reply(302, headers=(("Location", MOVED[call.bare]),))
    if call.bare in ("/gone", "/lost"):
        return Reply(410)
    if call.bare == "/to-gone":
        return Reply(301, headers=(("Location", "/gone"),))
    return Reply(200, f"<title>{call.bare}</title><p>Here is {call.bare}.".encode())


@pytest.fixture(scope="module")
def site() -> Iterator[LoopbackSite]:
    with LoopbackSite(moving, robots="User-agent: *\nDisallow: /secret/\n") as served:
        yield served


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, site: LoopbackSite) -> Iterator[Service]:
    with Shell(tmp_path_factory.mktemp("batch")) as shell:
        yield Service(shell, "--workers", "1", "--allow-endpoint", site.url.split("/")[2], "--quiet")


def batch(service: Service, site: LoopbackSite, paths: list[str], **more: Any) -> list[dict[str, Any]]:
    """The results for these paths, in their order."""
    asked = {"urls": [site.url.rstrip("/") + path for path in paths], "options": {"rate": "none"}} | more
    answer = service.post("/api/crawl/batch", asked)
    assert answer.status == 200, answer.body
    results: list[dict[str, Any]] = answer.json()["results"]
    assert [result["url"] for result in results] == asked["urls"]
    return results


@pytest.mark.parametrize("paths", [["/c", "/a", "/old", "/b", "/other", "/a"], ["/old", "/a"], ["/a", "/b"]])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_redirect_into_the_batch_has_the_content_of_its_target(
    service: Service, site: LoopbackSite, distributed: bool, paths: list[str]
) -> None:
    # One at a time: what others lead to is asked for too, was visited before, or was led to already.
    results = batch(service, site, paths, distributed=distributed)
    assert [result["status"] for result in results] == ["success"] * len(paths), results
    ends = [result["final_url"].removeprefix(site.url) for result in results]
    assert ends == [path[1:] if path == "/other" else "c" for path in paths]
    assert all(f"Here is /{end}." in result["content"] for result, end in zip(results, ends, strict=True))
    assert all(result["worker_id"] and result["status_code"] == 200 for result in results)


@pytest.mark.parametrize("distributed", [False, True])
def test_what_ends_without_a_page_says_why(service: Service, site: LoopbackSite, distributed: bool) -> None:
    paths = ["/gone", "/to-gone", "/secret/x", "/door", "/round", "/about"]
    results = batch(service, site, paths, distributed=distributed)
    assert {result["status"] for result in results} == {"failed"}
    assert [result["error"] for result in results] == [
        *("http_410", "http_410", "robots", "robots", "too_many_redirects", "too_many_redirects")
    ]
    assert [result["message"] for result in results[2:4]] == [
        "robots.txt forbids it",
        f"robots.txt forbids {site.url}secret/x, to which it redirects",
    ]
    # Both are on the circle; which of them is visited first, and so which is told, is not promised.
    assert {result["message"] for result in results[4:]} < {
        f"redirects in a circle, back to {site.url}{path}" for path in ("round", "about")
    }
    assert [bool(result["worker_id"]) for result in results] == [True, True, False, True, True, True]


def test_a_distributed_batch_waits_for_the_worker_that_is_starting(
    tmp_path: Path, site: LoopbackSite
) -> None:
    with Shell(tmp_path) as shell:
        made = Service(shell, "--workers", "1", "--allow-endpoint", site.url.split("/")[2], "--quiet")
        told = made.get("/health").json()
        assert told["status"] == "starting" or told["workers"] == 1
        (result,) = batch(made, site, ["/other"], distributed=True)
        assert result["status"] == "success"


def test_the_options_of_a_batch(service: Service, site: LoopbackSite) -> None:
    (plain,) = batch(service, site, ["/other"], options=None)
    assert (plain["title"], plain["item"]) == ("/other", None)
    (some,) = batch(service, site, ["/other"], options={"rate": "none", "fields": ["depth", "title"]})
    assert (some["item"], some["content"]) == ({"depth": 0, "title": "/other"}, None)
    asked = {"urls": [site.url + "other"], "options": {"rate": "none", "priority": 8}}
    answer = service.post("/api/crawl/batch", asked).json()
    assert service.get(f"/jobs/{answer['session_id']}").json()["priority"] == 8
    for name, value in {
        "scope": "host",
        "depth": 1,
        "exclude": ["*"],
        "include": ["*"],
        "queue": "x",
    }.items():
        refused = service.post("/api/crawl/batch", asked | {"options": {name: value}})
        assert (refused.status, name in refused.json()["detail"]) == (422, True)
    unknown = service.post("/api/crawl/batch", asked | {"options": {"fields": ["colour"]}})
    assert (unknown.status, "colour" in unknown.json()["detail"]) == (422, True)
