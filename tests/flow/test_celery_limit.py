"""Visits under a rate limit of Celery: each URL is paid for once, and every host keeps its pace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.demo.site import Call, Hit, LoopbackSite, Reply
from shoal.dispatch.celery import VISIT
from shoal.model import Job
from tests.rig import redis_server as redis
from tests.rig.command import wait_until
from tests.rig.fleet import Fleet

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")

HOSTS = 10
EARLY = 0.15
"""How much too early a visit may seem on a busy machine."""


def page(call: Call) -> Reply:
    return Reply(200, f"<title>{call.path}</title>".encode())


@pytest.fixture
def site() -> Iterator[LoopbackSite]:
    with LoopbackSite(page, hosts=HOSTS, robots="User-agent: *\n") as made:
        yield made


@contextmanager
def limited(root: Path, limit: str) -> Iterator[Fleet]:
    with redis.redis_server() as server, Fleet(root, server.url, CELERY_TASK_RATE_LIMIT=limit) as fleet:
        yield fleet


def visited(fleet: Fleet, urls: list[str], **more: Any) -> Job:
    """A job of these pages at its end, robots.txt and pace as by default."""
    wishes = {"robots": True, "gap": 1.0, "width": 1, **more}
    return fleet.ended(fleet.submit(urls, **wishes))


def tasks(fleet: Fleet) -> int:
    """Visits that were begun, each of which cost a token."""
    return sum(running.err.count(f"Task {VISIT}[") // 2 for running in fleet.workers.values())


def between(hits: list[Hit]) -> list[float]:
    return [after.start - before.start for before, after in pairwise(hits)]


def assert_paced(site: LoopbackSite, gap: float) -> None:
    """By every host: robots.txt is a visit like any other."""
    for host in site.urls:
        hits = [hit for hit in site.log() if hit.host in host]
        assert min(between(hits), default=gap) > gap - EARLY, hits


def test_ten_urls_on_ten_hosts_take_what_ten_tokens_take(tmp_path: Path, site: LoopbackSite) -> None:
    with limited(tmp_path, "2/s") as fleet:
        fleet.worker("w1", "-c", "2")
        fleet.wait_for(2)
        job = visited(fleet, site.urls)
        assert job.counts.items == HOSTS
        assert tasks(fleet) == HOSTS
    first = [hit for hit in site.log() if hit.path == "/robots.txt"]
    assert len(first) == HOSTS
    assert min(between(first)) > 0.5 - EARLY, "the limit holds"
    # The last one has its token after 4.5 s, asks for robots.txt and waits for its host's next turn.
    assert site.log()[-1].start - first[0].start < 2 * 4.5
    assert_paced(site, 1.0)


def test_late_ones_keep_the_pace_of_their_hosts_with_several_workers(
    tmp_path: Path, site: LoopbackSite
) -> None:
    """Tasks wait for longer in the limiter than their hosts' turns last."""
    urls = [f"{host}{number}" for host in site.urls[:3] for number in range(4)]
    with limited(tmp_path, "2/s") as fleet:
        fleet.worker("w1", "-c", "3")
        fleet.worker("w2", "-P", "threads", "-c", "3")
        fleet.wait_for(4)
        assert visited(fleet, urls, gap=0.4).counts.items == len(urls)
        assert tasks(fleet) == len(urls)
        assert min(running.err.count(VISIT) for running in fleet.workers.values()) > 0
    assert_paced(site, 0.4)


@pytest.mark.slow
def test_a_limit_that_is_set_while_they_run(tmp_path: Path, site: LoopbackSite) -> None:
    """What a worker holds back for many seconds is not lost, and is not sent again."""
    urls = [f"{host}page" for host in site.urls[:6]]
    with limited(tmp_path, "none") as fleet:
        fleet.worker("w1", "-c", "6")
        fleet.wait_for(6)
        # Celery listens for commands a little later than its processes are there.
        limit = ("control", "rate_limit", VISIT, "30/m")
        wait_until(lambda: fleet.celery(*limit).wait().code == 0, "the worker to hear of its limit")
        assert visited(fleet, urls, robots=False).counts.items == len(urls)
        assert tasks(fleet) == len(urls)
        assert "got lost" not in fleet.said()
    assert min(between(site.log())) > 2.0 - EARLY
