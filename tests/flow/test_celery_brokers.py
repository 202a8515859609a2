"""The same visits on RabbitMQ, and in the other pools of Celery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.frontier.port import Backend
from tests.rig import rabbitmq_server as rabbitmq
from tests.rig import redis_server as redis
from tests.rig.fleet import Fleet

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")

PAGES = 60


@pytest.fixture(scope="module")
def site() -> Iterator[LoopbackSite]:
    with LoopbackSite(generated_site(pages=PAGES, links=6, hosts=10, latency=0.02)) as made:
        yield made


def everything_once(fleet: Fleet, site: LoopbackSite, job: str) -> None:
    fleet.ended(job)
    items = fleet.asked(lambda frontier: frontier.items(job, limit=10_000))
    urls = Counter(msgspec.json.decode(item.body)["url"] for item in items)
    assert urls == dict.fromkeys(site.expected_urls(), 1)
    assert fleet.asked(lambda frontier: frontier.check()) == []


@pytest.mark.slow
@pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed")
def test_a_rabbitmq_broker_with_a_worker_killed(tmp_path: Path, site: LoopbackSite) -> None:
    """The frontier is on SQLite here: any will do that all workers can reach."""
    frontier = f"sqlite:///{tmp_path}/shoal.db"
    with rabbitmq.rabbitmq_server() as server, Fleet(tmp_path, server.url, frontier) as fleet:
        fleet.worker("w1")
        fleet.worker("w2")
        fleet.wait_for(4)
        job = fleet.submit(sorted(site.expected_urls()))

        async def some(backend: Backend) -> bool:
            return (await backend.job(job)).counts.done >= PAGES // 5

        fleet.until(some, "a fifth of the pages")
        fleet.workers.pop("w2").kill()
        everything_once(fleet, site, job)


@pytest.mark.slow
def test_threads_and_solo_side_by_side_with_several_urls_a_task(tmp_path: Path, site: LoopbackSite) -> None:
    with (
        redis.redis_server() as server,
        Fleet(tmp_path, f"{server.url}", SHOAL_CELERY_BATCH="5") as fleet,
    ):
        fleet.worker("threads", "-P", "threads", "-Q", "scraping")
        fleet.worker("solo", "-P", "solo", "-Q", "business")
        fleet.wait_for(2)
        jobs = [
            fleet.submit(sorted(site.expected_urls()), queue=queue, gap=0.0)
            for queue in ("scraping", "business")
        ]
        for job in jobs:
            fleet.ended(job)
        for job in jobs:
            everything_once(fleet, site, job)
        for name in fleet.workers:
            # Fewer tasks than pages: they came several at a time.
            assert 0 < fleet.workers[name].err.count(" succeeded in ") < PAGES
