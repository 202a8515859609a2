"""Redis gives a task that is not over in time to another worker as well. Nothing is done twice by that."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from shoal.demo.site import LoopbackSite, generated_site
from tests.rig import redis_server as redis
from tests.rig.command import wait_until
from tests.rig.fleet import Fleet

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")

HASTY = """
from shoal.celery import app

# One second, and looked at every second: any task that takes longer comes twice.
app.conf.broker_transport_options = {
    "visibility_timeout": 1, "unacked_restore_interval": 1, "unacked_restore_throttle": 1
}
"""
ASK = """
import json, sys
from shoal.celery import scrape_site
task = scrape_site.delay(sys.argv[1])
print(json.dumps([task.id, task.get(timeout=60)]))
"""
PAGES = 6


@pytest.mark.slow
def test_a_task_longer_than_the_visibility_timeout_visits_each_page_once(tmp_path: Path) -> None:
    (tmp_path / "hasty.py").write_text(HASTY)
    with (
        redis.redis_server() as server,
        Fleet(tmp_path, server.url) as fleet,
        # Each page takes longer than the broker waits, and pages are found one after the other.
        LoopbackSite(generated_site(pages=PAGES, links=1, latency=1.2)) as site,
    ):
        for name in ("w1", "w2"):
            words = ("-A", "hasty", "worker", "-n", f"{name}@%h", "-l", "info", "-c", "1", "-Q", "scraping")
            fleet.workers[name] = fleet.start(*words, program=(sys.executable, "-m", "celery"))
        fleet.wait_for(2)
        told = fleet.start(site.url, program=(sys.executable, "-c", ASK)).wait()
        assert told.code == 0, told.err + fleet.said()
        task, summary = told.json()
        assert (summary["pages"], summary["dead"], summary["job"]) == (PAGES, 0, f"task-{task}")

        client: Any = Redis.from_url(server.url)

        def over() -> bool:
            logs = "".join(worker.err for worker in fleet.workers.values())
            twice = len(re.findall(rf"Task shoal.scrape_site\[{task}\] succeeded", logs)) > 1
            return twice and not client.llen("scraping") and not client.hlen("unacked")

        wait_until(over, "the end of all copies")
        client.close()

        items = fleet.asked(lambda frontier: frontier.items(summary["job"], limit=1000))
        stored = Counter(msgspec.json.decode(item.body)["url"] for item in items)
        assert stored == dict.fromkeys(site.expected_urls(), 1)
        visited = Counter(hit.path for hit in site.log() if hit.path != "/robots.txt")
        assert set(visited.values()) == {1}, visited
        assert len(visited) == PAGES
        assert fleet.asked(lambda frontier: frontier.check()) == []
