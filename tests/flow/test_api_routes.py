"""Routing rules and the job service: what a rule sends elsewhere is worked on all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.demo.site import Call, LoopbackSite, Reply
from tests.rig.command import Shell, wait_until
from tests.rig.service import Service

RULES = json.dumps([{"pattern": "*/news/*", "queue": "urgent", "priority": 8, "ttl": 600}])


def linked(call: Call) -> Reply:
    return Reply(200, b'<title>a page</title><a href="/news/1">new</a>' if call.path == "/" else b"<p>it</p>")


def test_a_job_ends_although_a_rule_sends_its_links_elsewhere(tmp_path: Path) -> None:
    with LoopbackSite(linked) as site, Shell(tmp_path) as shell:
        allow = ("--allow-endpoint", site.url.split("/")[2])
        service = Service(shell, "--workers", "1", *allow, env={"SHOAL_ROUTES": RULES})
        job = service.post("/scrape", {"url": site.url, "rate": "none"}).json()["job_id"]
        assert service.ended(job)["pages_done"] == 2
        wait_until(lambda: service.get("/workers").json()["workers"], "the worker")
        (worker,) = service.get("/workers").json()["workers"]
        assert worker["queues"] == ["scraping", "business", "rag", "urgent"]


def test_a_job_is_routed_unless_it_names_its_queue(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        service = Service(shell, "--workers", "0", env={"SHOAL_ROUTES": RULES})
        url = {"url": "http://example.com/news/1"}
        routed = service.post("/scrape", url).json()["job_id"]
        service.post("/scrape", url | {"queue": "scraping"})
        service.post("/scrape/business", {"url": "http://example.com/", "pages_to_scrape": ["/news/1"]})
        wait_until(lambda: service.get("/queue/status").json()["waiting"] == 3, "all three")
        queues = service.get("/queue/status").json()["queues"]
        assert {name: row["waiting"] for name, row in queues.items() if row["waiting"]} == {
            "urgent": 1,
            "scraping": 1,
            "business": 1,
        }
        assert service.get(f"/jobs/{routed}").json()["queue"] == "scraping"


@pytest.mark.slow
def test_the_usual_rules_count_with_a_broker(tmp_path: Path, rabbit_url: str) -> None:
    with LoopbackSite(linked) as site, Shell(tmp_path) as shell:
        env = {"SHOAL_DISPATCH": rabbit_url}
        service = Service(shell, "--workers", "1", "--allow-endpoint", site.url.split("/")[2], env=env)
        job = service.post("/scrape", {"url": site.url, "rate": "none"}).json()["job_id"]
        assert service.ended(job)["pages_done"] == 2
        assert service.get("/health").json()["reasons"] == []
