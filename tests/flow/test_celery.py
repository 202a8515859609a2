"""Visits in ordinary Celery workers on a Redis broker, seen in Flower."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.app import Session
from shoal.demo.site import LoopbackSite, generated_site
from shoal.dispatch.celery import VISIT, CeleryDispatch
from shoal.dispatch.port import Message
from shoal.frontier.notes import Presence
from shoal.frontier.port import Backend
from shoal.model import TRANSIT, Selection
from tests.rig import redis_server as redis
from tests.rig.command import Running, read_lines, wait_until
from tests.rig.fleet import Fleet, Flower
from tests.rig.service import Service

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGES = 100
BATCH = "/api/crawl"


@pytest.fixture(scope="module")
def site() -> Iterator[LoopbackSite]:
    with LoopbackSite(generated_site(pages=PAGES, links=6, hosts=10, errors=0.05, latency=0.02)) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers with two processes each, and nothing else. Leases are long: what comes back soon was
    not waited for."""
    root = tmp_path_factory.mktemp("fleet")
    with redis.redis_server() as server, Fleet(root, server.url, SHOAL_LEASE="600") as made:
        made.worker("w1", "-Q", "scraping,business,rag")
        made.worker("w2", "-Q", "scraping,business,rag")
        made.wait_for(4)
        yield made


@pytest.fixture(scope="module")
def flower(fleet: Fleet) -> Flower:
    made = fleet.flower()
    wait_until(lambda: len(made.get("/api/workers?refresh=1") or {}) >= 2, "both workers in Flower")
    return made


def stored(fleet: Fleet, job: str) -> Counter[str]:
    """How often each URL is in the item log."""
    items = fleet.asked(lambda frontier: frontier.items(job, limit=10_000))
    return Counter(msgspec.json.decode(item.body)["url"] for item in items)


def dead(fleet: Fleet, job: str) -> dict[str, str]:
    letters = fleet.asked(lambda frontier: frontier.dead(Selection(job=job), limit=10_000))
    return {letter.request.url: letter.failure.error for letter in letters}


def nothing_lost_nothing_doubled(fleet: Fleet, site: LoopbackSite, job: str) -> None:
    good = {url for url, status in site.expected().items() if status == 200}
    assert stored(fleet, job) == dict.fromkeys(good, 1)
    assert dead(fleet, job) == dict.fromkeys(site.expected_urls() - good, "http_404")
    assert fleet.asked(lambda frontier: frontier.check()) == []


def test_a_batch_is_visited_by_both_workers_and_flower_shows_it(
    fleet: Fleet, site: LoopbackSite, flower: Flower
) -> None:
    """From a web back end that hands a list of URLs to Celery, to what people see of it."""
    service = Service(fleet, "--workers", "0", env={"SHOAL_FRONTIER": fleet.frontier})
    wait_until(lambda: service.get(f"{BATCH}/distributed/status").json()["distributed_available"], "workers")
    urls = sorted(site.expected_urls())
    asked = {"urls": urls, "distributed": True, "options": {"rate": "none", "per_host": 8}}
    answer = service.post(f"{BATCH}/batch", asked).json()
    job = answer["session_id"]
    nothing_lost_nothing_doubled(fleet, site, job)
    stats = answer["stats"]
    assert (stats["total"], stats["pending"], stats["failed"]) == (PAGES, 0, len(dead(fleet, job)))
    assert 2 <= stats["workers_used"] <= 4

    def tasks() -> list[dict[str, Any]]:
        told = flower.get(f"/api/tasks?limit=1000&taskname={VISIT}") or {}
        return [task for task in told.values() if task["state"] in ("SUCCESS", "FAILURE")]

    # Events travel beside the tasks, and may come a moment later.
    wait_until(lambda: len(tasks()) >= PAGES, "every visit in Flower")
    seen = tasks()
    states = Counter(task["state"] for task in seen)
    assert states["FAILURE"] == len(dead(fleet, job))
    assert all("http_404" in task["exception"] for task in seen if task["state"] == "FAILURE")
    assert {task["worker"].partition("@")[0] for task in seen} == {"w1", "w2"}
    assert {url for url in site.expected_urls() if any(url in task["args"] for task in seen)} == (
        site.expected_urls()
    )
    # One message a URL, and nothing of it stays behind.
    assert sum(states.values()) == PAGES
    # Celery logs what any worker of ours does.
    ended = Counter(re.findall(r"\] (done|given up) http\S+ \d+ \d+ ms attempt 1/\d+", fleet.said(None)))
    assert (ended["done"], ended["given up"]) == (states["SUCCESS"], states["FAILURE"])


def test_redirects_and_the_current_url_of_a_job_are_told(fleet: Fleet, site: LoopbackSite) -> None:
    service = Service(fleet, "--workers", "0", env={"SHOAL_FRONTIER": fleet.frontier})
    wait_until(lambda: service.get(f"{BATCH}/distributed/status").json()["distributed_available"], "workers")
    urls = [site.url, f"{site.url}redirect/1", f"{site.url}redirect/2"]
    asked = {"urls": urls, "distributed": True, "options": {"rate": "none"}}
    results = service.post(f"{BATCH}/batch", asked).json()["results"]
    assert [(result["url"], result["final_url"]) for result in results] == [(url, site.url) for url in urls]
    slow = f"{site.url}slow/60"
    job = service.post("/scrape", {"url": slow, "scope": "page", "rate": "none"}).json()["job_id"]
    wait_until(lambda: service.progress(job)["current_url"] == slow, "the URL that is visited")
    service.ask("DELETE", f"/scrape/{job}")


def test_the_commands_of_celery_work(fleet: Fleet) -> None:
    told = fleet.celery("inspect", "active_queues", "--json").wait()
    assert told.code == 0, told.err
    workers = msgspec.json.decode(told.out)
    assert {name.partition("@")[0] for name in workers} == {"w1", "w2"}
    for queues in workers.values():
        assert {queue["name"] for queue in queues} == {"scraping", "business", "rag"}


def example(fleet: Fleet, name: str, *words: str) -> list[str]:
    done = fleet.start(*words, program=(sys.executable, str(EXAMPLES / name))).wait()
    assert done.code == 0, done.err + fleet.said()
    return done.out.splitlines()


def test_pages_in_a_chain_a_group_and_a_chord(fleet: Fleet, site: LoopbackSite) -> None:
    expected = site.expected()
    good = sorted(url for url in expected if expected[url] == 200)[:4]
    [bad, *_] = sorted(url for url in expected if expected[url] == 404)
    lines = example(fleet, "celery_pages.py", *good, bad)
    assert lines[0].startswith("Page ")
    assert lines[1:6] == [*(f"{url} 200" for url in good), f"{bad} http_404"]
    assert lines[6] == "4 pages, 1 failed, 4 items in pages.jsonl"
    assert {item["url"] for item in read_lines(fleet.root / "pages.jsonl")} == set(good)


def test_sites_in_a_chord(fleet: Fleet) -> None:
    small = generated_site(pages=8, links=3)
    with LoopbackSite(small) as one, LoopbackSite(small) as other:
        lines = example(fleet, "celery_site.py", one.url, other.url)
        expected = one.expected_urls() | other.expected_urls()
    assert lines == [
        f"{len(expected)} pages of 2 sites, 0 failed",
        f"{len(expected)} items in sites.csv",
    ]
    with (fleet.root / "sites.csv").open(newline="", encoding="utf-8-sig") as file:
        assert Counter(row["url"] for row in csv.DictReader(file)) == dict.fromkeys(expected, 1)


def test_what_a_task_may_not_ask_for(fleet: Fleet, site: LoopbackSite) -> None:
    program = f"""
from shoal.celery import ScrapeFailed, process_results, scrape_url
for task in (
    scrape_url.s("{site.url}", allow_private=True),
    scrape_url.s("ftp://nowhere/"),
    scrape_url.s("{site.url}", rate="fast"),
    scrape_url.s("{site.url}", timeout=99999),
    process_results.s([], out="/etc/passwd.csv"),
):
    try:
        task.apply_async().get(timeout=60)
        print("taken")
    except ScrapeFailed as failed:
        print(failed.error)
"""
    done = fleet.start(program=(sys.executable, "-c", program)).wait()
    assert done.out.split() == ["usage", "scheme_blocked", "usage", "usage", "usage"], done.err


def test_a_task_whose_time_ran_out_ends_its_request_as_expired(fleet: Fleet, site: LoopbackSite) -> None:
    job = fleet.submit([f"{site.url}page/1"], queue="unattended")

    async def send_late(session: Session) -> None:
        from celery import Celery

        frontier = session.frontier
        claim = await frontier.claim(1, worker=f"{TRANSIT}test", lease_seconds=60.0, queues=["unattended"])
        assert len(claim.leases) == 1
        app = Celery(broker=fleet.frontier, set_as_current=False)
        dispatch = CeleryDispatch(app)
        try:
            assert await dispatch.send([Message("scraping", tuple(claim.leases), ttl=0.001)]) == []
        finally:
            await dispatch.close()

    fleet.within(send_late)
    view = fleet.ended(job)
    assert (view.counts.expired, view.counts.done) == (1, 0)


def children(worker: Running) -> list[int]:
    listed = subprocess.run(
        ["ps", "--ppid", str(worker.pid), "-o", "pid="], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def test_a_killed_worker_loses_nothing(fleet: Fleet, site: LoopbackSite) -> None:
    """First one process that visits, then a whole worker with its pump."""
    job = fleet.submit(sorted(site.expected_urls()))

    async def some(frontier: Backend) -> bool:
        return (await frontier.job(job)).counts.done >= PAGES // 5

    fleet.until(some, "a fifth of the pages")
    os.kill(children(fleet.workers["w1"])[0], signal.SIGKILL)
    fleet.workers["w2"].kill()
    del fleet.workers["w2"]
    fleet.ended(job)
    nothing_lost_nothing_doubled(fleet, site, job)


def test_a_worker_leaves_in_peace(fleet: Fleet) -> None:
    worker = fleet.workers.pop("w1")
    # A process was killed before. Celery replaces it at once, or if it missed its end, within five seconds.
    wait_until(lambda: len(children(worker)) >= 2, "both processes")
    pids = children(worker)
    said = len(worker.err)
    worker.signal(signal.SIGTERM)
    assert worker.wait().code == 0
    assert "Traceback" not in worker.err[said:]

    async def here(frontier: Backend) -> set[str]:
        return {each.heartbeat.worker.rsplit("_", 2)[1] for each in await Presence(frontier.notes).workers()}

    assert fleet.asked(here) & set(map(str, pids)) == set()
    assert fleet.asked(lambda frontier: frontier.leases()) == []
