"""The quick start of Celery users: they name their broker, and everybody looks at the same frontier."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.dispatch.port import MARK
from tests.rig import redis_server as redis
from tests.rig.command import Shell, wait_until
from tests.rig.fleet import Fleet
from tests.rig.ports import free_port
from tests.rig.service import Service

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")

STATUS = "/api/crawl/distributed/status"


@contextmanager
def broker_named(root: Path, url: str, **more: str) -> Iterator[Shell]:
    """A folder in which nothing but the broker is set, and what tests on loopback need."""
    with Shell(root, CELERY_BROKER_URL=url, SHOAL_ALLOW_PRIVATE="1", SHOAL_RATE="none", **more) as shell:
        yield shell


def status(service: Service) -> dict[str, Any]:
    answer = service.get(STATUS)
    assert answer.status == 200, answer
    told: dict[str, Any] = answer.json()
    return told


def test_a_batch_and_a_job_are_done_by_celery_workers(tmp_path: Path) -> None:
    with (
        redis.redis_server() as server,
        LoopbackSite(generated_site(pages=4)) as site,
        broker_named(tmp_path, server.url) as shell,
    ):
        service = Service(shell)
        said = service.running.err
        assert f"frontier: redis://127.0.0.1:{server.port}/0" in said and "CELERY_BROKER_URL" in said
        assert "no worker processes: Celery workers do the visits" in said
        assert len(shell.alive()) == 1
        ignore = status(service)
        assert (
            ignore["distributed_available"] is False and "celery -A shoal.celery worker" in ignore["message"]
        )
        asked = {"urls": sorted(site.expected_urls()), "distributed": True, "options": {"rate": "none"}}
        assert service.post("/api/crawl/batch", asked).status == 503

        program = (sys.executable, "-m", "celery", "-A", "shoal.celery")
        shell.start("worker", "-Q", "scraping,business,rag", "-l", "info", program=program)
        wait_until(lambda: status(service)["distributed_available"], "the Celery worker")
        answer = service.post("/api/crawl/batch", asked).json()
        assert [result["status"] for result in answer["results"]] == ["success"] * 4
        assert all(result["worker_id"].endswith(MARK) for result in answer["results"])

        assert shell.run("enqueue", "news", site.url).code == 0
        ended = shell.run("watch", "news")
        assert ended.code == 0, ended.err
        assert len(shell.run("results", "news").out.splitlines()) == 1
        assert not shell.db.exists()


def test_redis_goes_away_and_comes_back(tmp_path: Path) -> None:
    with redis.redis_server() as server, broker_named(tmp_path, server.url) as shell:
        service = Service(shell)
        worker = shell.start("worker")
        wait_until(lambda: status(service)["distributed_available"], "a worker of its own process")
        for away, back in (
            (server.kill, server.start),
            (lambda: os.kill(server.pid, signal.SIGSTOP), lambda: os.kill(server.pid, signal.SIGCONT)),
        ):
            away()
            wait_until(lambda: not status(service)["distributed_available"], "the loss of Redis")
            asked = time.monotonic()
            assert "is not responding" in status(service)["message"]
            assert time.monotonic() - asked < 6.0
            back()
            wait_until(lambda: status(service)["distributed_available"], "Redis again")
        assert not worker.over


def test_a_broker_beside_the_frontier_that_is_away(tmp_path: Path) -> None:
    ignore = f"amqp://guest:secret-word@127.0.0.1:{free_port()}//"
    with broker_named(tmp_path, ignore) as shell:
        service = Service(shell)
        assert "no worker processes: Celery workers do the visits" in service.running.err
        shell.start("worker")
        wait_until(lambda: status(service)["workers"] == 1, "a worker")
        told = status(service)
        assert told["distributed_available"] is False and "broker" in told["message"]
        assert "secret-word" not in told["message"]
        asked = {"urls": ["http://127.0.0.1:1/"], "distributed": True}
        assert service.post("/api/crawl/batch", asked).status == 503


def test_an_own_worker_is_asked_for_and_does_not_count(tmp_path: Path) -> None:
    with redis.redis_server() as server, broker_named(tmp_path, server.url) as shell:
        service = Service(shell, "--workers", "1")
        wait_until(lambda: service.get("/workers").json()["workers"], "its own worker")
        told = status(service)
        assert told["distributed_available"] is False and "no worker is alive" in told["message"]


def test_a_frontier_that_is_named_wins(tmp_path: Path) -> None:
    with broker_named(tmp_path, f"redis://127.0.0.1:{free_port()}/0", SHOAL_FRONTIER="mine.db") as shell:
        service = Service(shell)
        assert "CELERY_BROKER_URL" not in service.running.err
        assert " with 1 worker on mine.db" in service.running.err
        assert status(service)["distributed_available"] is False


def test_a_config_after_the_url(tmp_path: Path) -> None:
    program = """
from shoal.celery import ScrapeFailed, scrape_site, scrape_url
url = "{url}"
for task in (
    scrape_url.s(url, {{"fields": ["url", "title"], "timeout": 60, "retries": 1, "page_timeout": 5}}),
    scrape_url.s(url, {{"fields": ["title"]}}, fields=["url"]),
    scrape_url.s(url, None),
    scrape_site.s(url, {{"max_pages": 2}}),
    scrape_url.s(url, {{"colour": "red"}}),
    scrape_url.s(url, {{"allow_private": True}}),
    scrape_url.s(url, ["fields"]),
    scrape_url.s(url, {{"timeout": "soon"}}),
):
    try:
        told = task.apply_async().get(timeout=60)
        print(*sorted(set(told) - {{"worker_id"}})[:5], told.get("pages", ""))
    except ScrapeFailed as failed:
        print(failed.error, failed.message)
"""
    with (
        redis.redis_server() as server,
        LoopbackSite(generated_site(pages=3)) as site,
        Fleet(tmp_path, server.url) as fleet,
    ):
        fleet.worker("w1", "-c", "1")
        fleet.wait_for(1)
        done = fleet.start(program=(sys.executable, "-c", program.format(url=site.url))).wait()
    lines = done.out.splitlines()
    assert len(lines) == 8, done.err
    assert [line.strip() for line in lines[:2]] == ["title url", "url"]
    assert lines[2].startswith("content_hash content_type depth")
    assert lines[3].endswith(" 2")
    assert lines[4].startswith("usage there is no option 'colour'; the options are cache, depth, ")
    assert lines[5].startswith("usage there is no option 'allow_private'")
    assert lines[6] == "usage config must be an object of options, not list"
    assert lines[7] == "usage timeout must be above 0 and at most 1500 seconds"
