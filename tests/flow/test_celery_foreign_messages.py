"""What others put into a queue of Celery's broker is Celery's to deal with. Ours lose nothing by it, and
nothing is ever unpickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kombu
import msgspec
import pytest
from redis import Redis

from shoal.demo.site import LoopbackSite, generated_site
from tests.rig import redis_server as redis
from tests.rig.command import Running, wait_until
from tests.rig.fleet import Fleet

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")

JSON = "application/json"
PICKLE = "application/x-python-serialize"
EMPTY: list[Any] = [[], {}, {}]
TASK = {"task": "shoal.process_results", "id": "one"}
PAGES = 6


class Exploding:
    """Leaves a file behind when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def foreign(mark: Path) -> list[dict[str, Any]]:
    """Messages that are no task of ours."""
    pickled = pickle.dumps(Exploding(mark))

    def said(body: object, **headers: Any) -> dict[str, Any]:
        return {"body": msgspec.json.encode(body), "content_type": JSON, "headers": headers}

    return [
        {"body": pickled, "content_type": PICKLE, "headers": TASK},
        {"body": pickled, "content_type": PICKLE, "headers": {}},
        {"body": pickled, "content_type": JSON, "headers": TASK},
        {"body": b"text", "content_type": "text/plain", "headers": TASK},
        {"body": b"{", "content_type": JSON, "headers": TASK},
        said([]),
        said({}),
        said(EMPTY, **TASK, eta="soon"),
        said(EMPTY, task="others.task", id="two"),
        said([[{"format": 0}], {}, {}], task="shoal.visit", id="three"),
    ]


def publish(broker: str, messages: list[dict[str, Any]]) -> None:
    with kombu.Connection(broker) as connection:
        producer = kombu.Producer(connection, auto_declare=False)
        for message in messages:
            producer.publish(**message, content_encoding="utf-8", exchange="", routing_key="scraping")


def ready(fleet: Fleet, name: str) -> Running:
    worker = fleet.worker(name, "-Q", "scraping")
    wait_until(lambda: " ready." in worker.err or worker.over, "the worker and its queue")
    return worker


def test_a_worker_drops_what_it_does_not_know_and_unpickles_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    with (
        LoopbackSite(generated_site(pages=PAGES)) as site,
        redis.redis_server() as server,
        Fleet(tmp_path, server.url) as fleet,
    ):
        worker = ready(fleet, "w1")
        publish(server.url, foreign(mark))
        job = fleet.submit(sorted(site.expected_urls()))
        assert fleet.ended(job).counts.items == PAGES
        assert not worker.over, worker.err
        client: Any = Redis.from_url(server.url)
        wait_until(lambda: not client.hlen("unacked") and not client.llen("scraping"), "all of them")
        client.close()
        for said in (
            "Refusing to deserialize untrusted content of type pickle",
            "Received and deleted unknown message",
            "Received unregistered task",
            "the message is of another release",
        ):
            assert said in worker.err, worker.err
    assert not mark.exists()


def test_a_worker_that_rubbish_ended_leaves_everything_to_the_next(tmp_path: Path) -> None:
    with (
        LoopbackSite(generated_site(pages=PAGES)) as site,
        redis.redis_server() as server,
        Fleet(tmp_path, server.url) as fleet,
    ):
        worker = ready(fleet, "w1")
        client: Any = Redis.from_url(server.url)
        client.lpush("scraping", b"not a message")
        client.close()
        assert worker.wait().code != 0
        job = fleet.submit(sorted(site.expected_urls()))
        ready(fleet, "w2")
        assert fleet.ended(job).counts.items == PAGES
