"""The job service from outside, as its users drive it: on SQLite, Redis and PostgreSQL."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyarrow import parquet

from shoal.demo.books import DemoSite, pages
from shoal.demo.site import LoopbackSite, generated_site
from tests.rig import postgres_server, redis_server, shared
from tests.rig.command import Shell, wait_until
from tests.rig.service import Service


@pytest.fixture(scope="module")
def site() -> Iterator[DemoSite]:
    with DemoSite() as served:
        yield served


@pytest.fixture(scope="module", params=["sqlite", "redis", "postgres"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, site: DemoSite
) -> Iterator[Service]:
    """A service with one worker on each kind of frontier."""
    with ExitStack() as stack:
        env = {}
        if request.param == "redis":
            if not redis_server.available():
                pytest.skip("redis-server is not installed")
            env["SHOAL_FRONTIER"] = f"{shared.redis().url}?prefix={uuid4().hex}"
        elif request.param == "postgres":
            if postgres_server.binaries() is None:
                pytest.skip("PostgreSQL is not installed")
            env["SHOAL_FRONTIER"] = f"{shared.postgres().address}?schema=t{uuid4().hex}"
        shell = stack.enter_context(Shell(tmp_path_factory.mktemp(request.param)))
        endpoint = site.url.split("/")[2]
        made = Service(shell, "--workers", "1", "--allow-endpoint", endpoint, env=env)
        wait_until(lambda: made.get("/health").json()["workers"] == 1, "the worker")
        yield made


FAST = {"rate": "none", "per_host": 4}


def test_a_job_from_submit_to_result(service: Service, site: DemoSite) -> None:
    answer = service.post("/scrape", {"url": site.url, "expected_pages": 200, **FAST})
    assert answer.status == 202
    assert answer.json().keys() >= {"job_id", "status"}
    assert answer.json()["status"] == "PENDING"
    job = answer.json()["job_id"]
    ended = service.ended(job)
    assert (ended["status"], ended["progress"]) == ("SUCCESS", 100.0)
    assert ended["pages_done"] == len(pages())
    assert ended["pages_total"] == ended["pages_done"] + ended["failed"]
    created = service.get(f"/jobs/{job}").json()["created_at"]
    assert created < ended["started_at"] < ended["finished_at"]
    result = service.get(f"/scrape/{job}/result").json()
    assert sorted(item["url"] for item in result["items"]) == sorted(
        site.url.rstrip("/") + path for path in pages()
    )
    assert result["next_cursor"] is None
    assert "worker" not in result["items"][0], "only a batch asks for it"


def test_the_result_in_every_format(service: Service, site: DemoSite) -> None:
    job = service.post(
        "/scrape", {"url": site.url, "output_format": "csv", "fields": ["title", "text"], **FAST}
    ).json()["job_id"]
    service.ended(job)
    asked = service.get(f"/scrape/{job}/result")
    assert asked.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(asked.body.decode(), newline="")))
    assert list(rows[0]) == ["url", "title", "text"]
    lines = service.get(f"/scrape/{job}/result?format=jsonl")
    items = [json.loads(line) for line in lines.body.splitlines()]
    assert [row["url"] for row in rows] == [item["url"] for item in items]
    assert len(items) == len(pages())
    assert service.get(f"/scrape/{job}/result?output_format=jsonl").body == lines.body
    assert service.get(f"/scrape/{job}/result?output_format=jsonl&format=csv").status == 422
    assert service.get(f"/scrape/{job}/result?output_format=docx").status == 422
    markdown = service.get(f"/scrape/{job}/result?format=markdown").body.decode()
    assert service.get(f"/scrape/{job}/result?output_format=md").body.decode() == markdown
    assert all(item["title"].split()[0] in markdown for item in items)
    table = parquet.read_table(io.BytesIO(service.get(f"/scrape/{job}/result?format=parquet").body))
    assert table.to_pylist() == items
    paged: list[dict[str, object]] = []
    cursor: str | None = "0"
    while cursor is not None:
        page = service.get(f"/scrape/{job}/result?format=json&limit=7&cursor={cursor}").json()
        assert len(page["items"]) <= 7
        paged += page["items"]
        cursor = page["next_cursor"]
    assert paged == items
    assert service.get(f"/scrape/{job}/result?format=jsonl&cursor={len(items) - 2}").body.count(b"\n") == 2


def test_a_limit_counts_in_every_format(service: Service, site: DemoSite) -> None:
    asked = {"urls": [site.url, site.url + "about", site.url + "contact"], "scope": "page", **FAST}
    job = service.post("/scrape", asked).json()["job_id"]
    service.ended(job)

    def result(form: str, more: str = "&limit=2") -> bytes:
        answer = service.get(f"/scrape/{job}/result?format={form}{more}")
        assert answer.status == 200
        return answer.body

    assert result("jsonl").count(b"\n") == 2
    assert len(list(csv.reader(io.StringIO(result("csv").decode())))) == 3
    assert result("markdown").count(b"\n---\n") == 2
    assert parquet.read_table(io.BytesIO(result("parquet"))).num_rows == 2
    assert parquet.read_table(io.BytesIO(result("parquet", "&cursor=2"))).num_rows == 1
    assert result("jsonl", "&limit=20000").count(b"\n") == 3
    assert service.get(f"/scrape/{job}/result?limit=20000").status == 422


def test_unfinished_is_409_with_progress_and_partial_gives_what_there_is(
    service: Service, site: DemoSite
) -> None:
    body = {"urls": [site.url, site.url + "slow/60"], "scope": "page", "rate": "none", "per_host": 2}
    job = service.post("/scrape", body).json()["job_id"]
    wait_until(lambda: service.progress(job)["pages_done"] == 1, "the first page")
    answer = service.get(f"/scrape/{job}/result")
    assert answer.status == 409
    assert answer.json()["progress"]["status"] == "PROGRESS"
    part = service.get(f"/scrape/{job}/result?partial=true").json()
    assert [item["url"] for item in part["items"]] == [site.url]
    started = time.monotonic()
    cancelled = service.ask("DELETE", f"/scrape/{job}")
    assert (cancelled.status, cancelled.json()["status"]) == (200, "REVOKED")
    wait_until(lambda: service.progress(job)["active"] == 0, "the visit in flight to end", 10)
    assert time.monotonic() - started < 5, "two seconds, and what a crowded machine adds"
    again = service.ask("DELETE", f"/scrape/{job}").json()
    assert again["status"] == "REVOKED"
    assert service.get(f"/scrape/{job}/result").status == 200


def test_progress_as_events(service: Service, site: DemoSite) -> None:
    job = service.post("/scrape", {"url": site.url, "rate": "20/s"}).json()["job_id"]
    stream = service.get(f"/scrape/{job}/events")
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = [event for event in stream.body.decode().split("\n\n") if not event.startswith(":")]
    told = [json.loads(event.partition("data: ")[2]) for event in events if event]
    assert len(told) > 1
    assert told[-1]["status"] == "SUCCESS"
    assert told[-1] == service.progress(job)
    assert [one["pages_done"] for one in told] == sorted(one["pages_done"] for one in told)
    begun = [one["current_url"] for one in told if one["status"] == "PROGRESS" and one["pages_done"]]
    assert all(url is not None and url.startswith(site.url) for url in begun), "also between two visits"
    last = service.ask("GET", f"/scrape/{job}/events", headers={"Last-Event-ID": "3"})
    assert (last.status, last.body) == (204, b"")


def test_nothing_fetched_is_a_failure(service: Service, site: DemoSite) -> None:
    job = service.post("/scrape", {"url": site.url + "status/410", **FAST}).json()["job_id"]
    ended = service.ended(job)
    assert (ended["status"], ended["failed"], ended["errors"]) == ("FAILURE", 1, {"http_410": 1})
    # Not public, not named, and the caller did not ask for it: the guard says no.
    private = service.post("/scrape", {"url": "http://127.0.0.1:9/", **FAST}).json()["job_id"]
    ended = service.ended(private)
    assert (ended["status"], ended["errors"]) == ("FAILURE", {"egress_blocked": 1})


def test_business_pages(service: Service, site: DemoSite) -> None:
    asked = {"url": site.url, "pages_to_scrape": ["/", "/about", "contact", "/missing"], "rate": "none"}
    job = service.post("/scrape/business", asked).json()["job_id"]
    ended = service.ended(job)
    assert (ended["status"], ended["pages_done"], ended["failed"]) == ("SUCCESS", 3, 1)
    assert service.get(f"/jobs/{job}").json()["queue"] == "business"
    items = service.get(f"/scrape/{job}/result").json()["items"]
    assert sorted(item["url"].removeprefix(site.url) for item in items) == ["", "about", "contact"]
    elsewhere = service.post("/scrape/business", asked | {"pages_to_scrape": ["http://example.com/"]})
    assert elsewhere.status == 422


def test_a_batch_here(service: Service, site: DemoSite) -> None:
    urls = [site.url, site.url + "about", site.url + "missing", "nonsense", site.url]
    answer = service.post("/api/crawl/batch", {"urls": urls, "options": {"rate": "none"}}).json()
    assert answer["distributed"] is False
    assert [result["url"] for result in answer["results"]] == urls
    assert [result["status"] for result in answer["results"]] == [
        *("success", "success", "failed", "failed", "success")
    ]
    assert "boathouse" in answer["results"][1]["content"]
    assert (answer["results"][2]["error"], answer["results"][2]["status_code"]) == ("http_404", 404)
    assert answer["results"][2]["worker_id"] == answer["results"][1]["worker_id"]
    assert answer["results"][3]["worker_id"] is None, "nobody could visit it"
    pid = f"_{service.running.pid}_"
    workers = {result["worker_id"] for result in answer["results"] if result["status"] == "success"}
    assert len(workers) == 1
    assert all(pid in worker for worker in workers), "this very process did it"
    assert answer["stats"] == {"total": 5, "success": 3, "failed": 2, "pending": 0, "workers_used": 1}


def test_a_batch_by_the_workers(service: Service, site: DemoSite) -> None:
    wait_until(
        lambda: service.get("/api/crawl/distributed/status").json()["distributed_available"], "a worker"
    )
    asked = {"urls": [site.url, site.url + "about"], "distributed": True, "options": {"rate": "none"}}
    lost = service.post("/api/crawl/batch", asked | {"urls": [site.url + "status/410"]}).json()["results"][0]
    assert lost["status_code"] == 410
    answer = service.post("/api/crawl/batch", asked).json()
    assert answer["distributed"] is True
    known = {worker["id"] for worker in service.get("/workers").json()["workers"]}
    workers = {result["worker_id"] for result in [*answer["results"], lost]}
    assert workers <= known, "and who could not fetch it is known too"
    assert not any(f"_{service.running.pid}_" in worker for worker in workers), "not this process"
    assert service.progress(answer["session_id"])["status"] == "SUCCESS"


@pytest.mark.parametrize("distributed", [False, True])
def test_a_batch_with_redirects_and_robots(service: Service, site: DemoSite, distributed: bool) -> None:
    urls = [site.url + path for path in ("catalogue/", "shop", "redirect/2", "basket")]
    asked = {"urls": urls, "distributed": distributed, "options": {"rate": "none"}}
    shop, moved, far, forbidden = service.post("/api/crawl/batch", asked).json()["results"]
    assert (moved["final_url"], moved["content"]) == (urls[0], shop["content"])
    assert (far["status"], far["final_url"]) == ("success", site.url)
    assert (forbidden["error"], forbidden["message"]) == ("robots", "robots.txt forbids it")


def test_a_batch_that_takes_too_long(service: Service, site: DemoSite) -> None:
    urls = [site.url + "about", site.url + "slow/60"]
    for distributed, after in ((False, "REVOKED"), (True, "PROGRESS")):
        started = time.monotonic()
        answer = service.post(
            "/api/crawl/batch",
            {
                "urls": urls,
                "distributed": distributed,
                "timeout": 3,
                "options": {"rate": "none", "per_host": 2},
            },
        ).json()
        assert time.monotonic() - started < 20
        assert [result["status"] for result in answer["results"]] == ["success", "pending"], answer
        assert answer["stats"]["pending"] == 1
        assert service.progress(answer["session_id"])["status"] == after
        service.ask("DELETE", f"/scrape/{answer['session_id']}")


def test_the_same_key_is_done_once(service: Service, site: DemoSite) -> None:
    asked = {"url": site.url + "about", "scope": "page", "rate": "none"}
    first = service.post("/scrape", asked, Idempotency_Key="once-1")
    again = service.post("/scrape", asked, Idempotency_Key="once-1")
    assert (first.status, first.json()) == (again.status, again.json())
    assert again.headers["idempotency-replayed"] == "true"
    turned = dict(reversed(asked.items()))
    assert service.post("/scrape", turned, Idempotency_Key="once-1").json() == first.json()
    other = service.post("/scrape", asked | {"priority": 9}, Idempotency_Key="once-1")
    assert other.status == 422
    assert service.post("/scrape", asked, Idempotency_Key="once-2").json() != first.json()
    batch = {"urls": [site.url + "about"], "options": {"rate": "none"}}
    answers = [service.post("/api/crawl/batch", batch, Idempotency_Key="b").json() for _ in range(2)]
    assert answers[0] == answers[1]


def test_queues_workers_lanes_and_dead_letters(service: Service, site: DemoSite) -> None:
    job = service.post(
        "/scrape", {"urls": [site.url + "status/404", site.url + "about"], "scope": "page", **FAST}
    ).json()["job_id"]
    service.ended(job)
    status = service.get("/queue/status").json()
    assert status.keys() >= {"active", "waiting", "delayed", "dead", "queues", "workers", "throughput"}
    assert status["queues"]["scraping"]["workers"] == 1
    (worker,) = [one for one in status["workers"] if one["job"] is None]
    assert worker["queues"] == ["scraping", "business", "rag"]
    assert worker["last_heartbeat"].startswith("20")
    (letter,) = service.get(f"/dead?job_id={job}").json()["dead"]
    assert (letter["error"], letter["url"]) == ("http_404", site.url + "status/404")
    (group,) = service.get(f"/dead/groups?job_id={job}").json()["groups"]
    assert (group["error"], group["count"]) == ("http_404", 1)
    assert service.post("/dead/retry", {}).status == 422, "all of them, by mistake"
    assert service.post("/dead/retry", {"job_id": job}).json() == {"retried": 1}
    service.ended(job)
    wait_until(lambda: service.get(f"/dead?job_id={job}").json()["dead"], "its second death")
    assert service.post("/dead/purge", {"job_id": job}).json() == {"purged": 1}
    host = site.url.split("/")[2]
    changed = service.ask("PUT", f"/lanes/{host}", {"rate": "30/m", "concurrency": 3}).json()
    assert (changed["rate"], changed["concurrency"], changed["pinned"]) == ("30/m", 3, True)
    assert service.post(f"/lanes/{host}/pause").json()["paused"] is True
    assert service.post(f"/lanes/{host}/resume").json()["paused"] is False
    assert service.ask("PUT", f"/lanes/{host}", {"rate": "none", "pinned": False}).json()["pinned"] is False
    assert any(lane["host"] == host for lane in service.get("/lanes").json()["lanes"])


def test_a_pace_for_a_host_not_seen_yet(service: Service) -> None:
    lane = service.ask("PUT", "/lanes/unseen.test", {"concurrency": 2}).json()
    assert (lane["rate"], lane["concurrency"], lane["pinned"]) == ("1/s", 2, True)
    refused = service.ask("PUT", "/lanes/never.test", {})
    assert refused.status == 422
    assert refused.json()["detail"] == "body: nothing to change: give rate, concurrency, burst or pinned"
    assert service.get("/lanes/never.test").status == 404


def test_lists_have_cursors(service: Service, site: DemoSite) -> None:
    for _ in range(3):
        service.post("/scrape", {"url": site.url + "about", "scope": "page", **FAST})
    every = [job["job_id"] for job in service.get("/jobs?limit=1000").json()["jobs"]]
    walked: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = service.get(f"/jobs?limit=2{cursor and '&cursor='}{cursor}").json()
        walked += [job["job_id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
    assert walked == every


def test_metrics_are_told_in_prometheus_words(service: Service) -> None:
    answer = service.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.body.decode()
    assert 'shoal_workers{state="' in text
    assert "# TYPE shoal_api_requests_total counter" in text
    assert "# TYPE shoal_api_request_seconds histogram" in text
    assert 'route="/scrape/{job_id}/progress"' in text or 'route="/healthz"' in text
    assert "/scrape/127" not in text, "the pattern, not the path"
    names: set[str] = set()
    for family in text_string_to_metric_families(text):
        assert family.name not in names, "told twice"
        names.add(family.name)
        assert family.documentation
        assert family.type != "unknown", family.name
        assert not family.name.endswith(("_ms", "_percent", "_count")), "base units"
    assert {"shoal_queue_requests", "shoal_worker_visits", "shoal_jobs", "shoal_build_info"} <= names


def test_health(service: Service) -> None:
    answer = service.get("/health")
    assert answer.status == 200
    assert {part["name"]: part["healthy"] for part in answer.json()["parts"]}["frontier"] is True
    assert answer.json()["workers"] >= 1


def test_headers_stay_at_home(service: Service, site: DemoSite) -> None:
    """Another port is another origin: what it gets must not hold what was meant for the first."""
    with LoopbackSite(generated_site(pages=1)) as other:
        secret = {
            "Authorization": "Bearer planted-secret",
            "X-Api-Key": "planted-secret",
            "Cookie": "planted-secret=1",
        }
        urls = [site.url + "echo", f"{site.url}redirect/to?url={other.url}echo"]
        asked = {"urls": urls, "headers": secret, "scope": "page", "allow_private": True, **FAST}
        job = service.post("/scrape", asked).json()["job_id"]
        assert service.ended(job)["pages_done"] == 2
        found = service.get(f"/scrape/{job}/result").json()["items"]
        told = {item["final_url"]: item["text"] for item in found}
        assert told[site.url + "echo"].count("planted-secret") == 3
        assert "planted-secret" not in told[other.url + "echo"]


# -- on one kind of frontier ------------------------------------------------------------------


def test_health_is_bad_when_too_much_waits_or_fails(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell, LoopbackSite(generated_site(pages=3)) as site:
        env = {"SHOAL_HEALTH_MAX_PENDING": "2", "SHOAL_HEALTH_MIN_FINISHED": "2"}
        allow = ("--allow-endpoint", site.url.split("/")[2])
        service = Service(shell, "--workers", "0", *allow, env=env)
        assert service.get("/health").json()["healthy"] is True
        job = service.post("/scrape", {"urls": [f"{site.url}{n}" for n in range(3)]}).json()["job_id"]
        wait_until(lambda: service.get("/health").json()["pending"] == 3, "the URLs to be counted")
        told = service.get("/health")
        assert (told.status, told.json()["healthy"]) == (200, False)
        assert any("3 URLs are waiting; the limit is 2" in reason for reason in told.json()["reasons"])
        assert any("no worker is alive" in reason for reason in told.json()["reasons"])
        service.ask("DELETE", f"/scrape/{job}")
        bad = [site.url, site.url + "status/404"]
        service.post("/api/crawl/batch", {"urls": bad, "options": {"rate": "none"}})
        wait_until(lambda: "failed" in str(service.get("/health").json()["reasons"]), "the failures to show")


def test_a_frontier_that_is_away_is_503(tmp_path: Path) -> None:
    if not redis_server.available():
        pytest.skip("redis-server is not installed")
    with redis_server.redis_server() as redis, Shell(tmp_path) as shell:
        service = Service(shell, "--workers", "0", env={"SHOAL_FRONTIER": redis.url})
        assert service.get("/health").status == 200
        redis.kill()
        health = service.get("/health")
        assert (health.status, health.json()["healthy"]) == (503, False)
        refused = service.post("/scrape", {"url": "http://example.com/"})
        assert (refused.status, refused.json()["status"]) == (503, 503)
        assert "retry-after" in refused.headers
        assert str(redis.port) not in refused.body.decode(), "addresses of servers are not told"
        assert service.get("/healthz").status == 200
        redis.start()
        wait_until(
            lambda: service.post("/scrape", {"url": "http://example.com/"}).status == 202, "it to be back"
        )


def test_a_frontier_that_hangs_is_told_soon(tmp_path: Path) -> None:
    if not redis_server.available():
        pytest.skip("redis-server is not installed")
    with redis_server.redis_server() as redis, Shell(tmp_path) as shell:
        service = Service(shell, "--workers", "0", env={"SHOAL_FRONTIER": redis.url})
        assert service.get("/metrics").status == 200
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            health = service.ask("GET", "/health", timeout=10.0)
            assert (health.status, health.json()["parts"][0]["detail"]) == (503, "no response within 3 s")
            assert service.ask("HEAD", "/health", timeout=10.0).status == 503
            metrics = service.ask("GET", "/metrics", timeout=10.0)
            assert (metrics.status, "within 3 s" in metrics.json()["detail"]) == (503, True)
            assert service.ask("HEAD", "/healthz").status == 200
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        wait_until(lambda: service.get("/health").status == 200, "the answer of the frontier")
        assert service.ask("HEAD", "/health").body == b""


def test_a_distributed_batch_needs_a_worker(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        service = Service(shell, "--workers", "0")
        assert service.get("/api/crawl/distributed/status").json()["distributed_available"] is False
        answer = service.post("/api/crawl/batch", {"urls": ["http://example.com/"], "distributed": True})
        assert (answer.status, "worker" in answer.json()["detail"]) == (503, True)


def test_the_frontier_in_memory_has_its_worker_inside(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell, DemoSite() as site:
        allow = ("--allow-endpoint", site.url.split("/")[2])
        service = Service(shell, "--frontier", "memory:", *allow)
        job = service.post("/scrape", {"url": site.url, **FAST}).json()["job_id"]
        assert service.ended(job)["pages_done"] == len(pages())
        assert len(shell.alive()) == 1


def test_workers_are_restarted_and_end_with_the_service(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell, DemoSite() as site:
        service = Service(shell, "--workers", "2", "--allow-endpoint", site.url.split("/")[2])
        wait_until(lambda: len(service.get("/workers").json()["workers"]) == 2, "two workers")
        victim = next(pid for pid in shell.alive() if pid != service.running.pid)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len([pid for pid in shell.alive() if pid != victim]) == 3, "another one")
        job = service.post("/scrape", {"url": site.url, **FAST}).json()["job_id"]
        assert service.ended(job)["status"] == "SUCCESS"
        service.running.signal(signal.SIGTERM)
        assert service.running.wait().code == 0
        wait_until(lambda: not shell.alive(), "every process to end")
