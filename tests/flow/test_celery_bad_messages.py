"""Whatever somebody puts into a queue of the broker, Celery workers live, and keep it for people to see."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kombu
import msgspec
import pytest
from redis import Redis

from shoal.celery.bad import KEPT
from shoal.testing import rabbitmq_server as rabbitmq
from shoal.testing import redis_server as redis
from shoal.testing.command import wait_until
from shoal.testing.fleet import Fleet
from shoal.testing.site import LoopbackSite, generated_site

pytestmark = pytest.mark.skipif(not redis.available(), reason="redis-server is not installed")

JSON = "application/json"
PICKLE = "application/x-python-serialize"
EMPTY: list[Any] = [[], {}, {}]
TASK = {"task": "shoal.process_results", "id": "one"}
STEPS = ("", "\x06\x163", "\x06\x169")
"""kombu's lists for priorities, after the name of the queue."""


class Exploding:
    """Leaves a file behind when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def envelope(**changes: Any) -> bytes:
    """A message as kombu writes it, but for these changes."""
    properties: dict[str, Any] = {
        "delivery_tag": "tag",
        "delivery_info": {"exchange": "", "routing_key": "scraping"},
        "body_encoding": "base64",
    }
    whole = {"body": "W10=", "headers": {}, "content-type": JSON, "content-encoding": "utf-8"}
    properties |= {name: value for name, value in changes.items() if name in properties}
    whole |= {name: value for name, value in changes.items() if name not in properties}
    return msgspec.json.encode({"properties": properties, **whole})


RUBBISH = [
    b"\x80\x04pickle",
    b'{"a":',
    b"[]",
    b"{}",
    b"5",
    b"",
    b'"text"',
    b"null",
    b"[" * 100_000,
    b'{"__type__": "datetime", "__value__": "never"}',
]
RAW = [
    *RUBBISH,
    envelope(delivery_tag=None),
    envelope(delivery_tag={"a": 1}),
    envelope(delivery_info=None),
    envelope(delivery_info={"exchange": [], "routing_key": "scraping"}),
    envelope(body_encoding="rot13"),
    envelope(body="not base64"),
    envelope(headers=[1]),
]
"""What is no message for kombu."""


def crafted(mark: Path) -> list[dict[str, Any]]:
    """What is a message, but not one of which Celery could make a task."""
    pickled = pickle.dumps(Exploding(mark))

    def said(body: object, **headers: Any) -> dict[str, Any]:
        return {"body": msgspec.json.encode(body), "content_type": JSON, "headers": headers}

    return [
        {"body": pickled, "content_type": PICKLE, "headers": TASK},
        {"body": pickled, "content_type": PICKLE, "headers": {}},
        {"body": pickled, "content_type": JSON, "headers": TASK},
        {"body": b"text", "content_type": "text/plain", "headers": TASK},
        {"body": b"raw", "content_type": "application/data", "headers": TASK},
        {"body": b"{", "content_type": JSON, "headers": TASK},
        {"body": b"{}", "content_type": JSON, "headers": {**TASK, "compression": "zlib"}},
        said([]),
        said(5),
        said({}),
        said(5, **TASK),
        said([], **TASK),
        said([1, 2, 3], **TASK),
        said(EMPTY, task="shoal.process_results"),
        said(EMPTY, task=["shoal.process_results"], id="one"),
        said(EMPTY, task="shoal.process_results", id={"a": 1}),
        said(EMPTY, **TASK, eta="soon"),
        said(EMPTY, **TASK, timelimit=["a", "b", "c"]),
        said({"task": "shoal.process_results", "args": 5}),
    ]


def publish(broker: str, messages: list[dict[str, Any]]) -> None:
    with kombu.Connection(broker) as connection:
        producer = kombu.Producer(connection, auto_declare=False)
        for message in messages:
            producer.publish(**message, content_encoding="utf-8", exchange="", routing_key="scraping")


def command(broker: str, body: bytes) -> None:
    """To the mailbox of all workers."""
    with kombu.Connection(broker) as connection:
        exchange = kombu.Exchange("celery.pidbox", type="fanout", durable=False, delivery_mode="transient")
        producer = kombu.Producer(connection, exchange)
        producer.publish(body, content_type=PICKLE, content_encoding="binary")


@contextmanager
def working(fleet: Fleet) -> Iterator[None]:
    """The same worker does what comes before and after."""
    with LoopbackSite(generated_site(pages=6)) as site:
        worker = fleet.worker("w1", "-Q", "scraping")
        wait_until(lambda: " ready." in worker.err or worker.over, "the worker and its queue")
        yield
        job = fleet.submit(sorted(site.expected_urls()))
        assert fleet.ended(job).counts.items == 6
        assert not worker.over, worker.err
        assert "Traceback" not in worker.err, worker.err
        assert "CRITICAL" not in worker.err
        assert "Connection to broker lost" not in worker.err


def complaints(fleet: Fleet) -> int:
    return fleet.workers["w1"].err.count("bad_message in scraping: ")


def test_a_redis_queue_keeps_aside_what_is_no_message_and_no_task(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    with redis.redis_server() as server, Fleet(tmp_path, server.url) as fleet, working(fleet):
        client: Any = Redis.from_url(server.url)
        for number, item in enumerate(RAW):
            client.lpush(f"scraping{STEPS[number % len(STEPS)]}", item)
        wait_until(lambda: client.llen("scraping.bad") == len(RAW) or fleet.workers["w1"].over, "raw ones")
        # As they were.
        assert sorted(client.lrange("scraping.bad", 0, -1)) == sorted(RAW), fleet.said()
        messages = crafted(mark)
        publish(server.url, messages)
        wait_until(lambda: complaints(fleet) >= len(RAW) + len(messages) or fleet.workers["w1"].over, "all")
        assert client.llen("scraping.bad") == len(RAW) + len(messages), fleet.said()
        assert client.hlen("unacked") == client.zcard("unacked_index") == 0
        # Commands for all workers travel another way.
        for item in RUBBISH:
            client.publish("/0.celery.pidbox", item)
        command(server.url, pickle.dumps(Exploding(mark)))
        wait_until(lambda: "bad_message among the commands" in fleet.workers["w1"].err, "the last command")
        assert client.llen("scraping.bad") == len(RAW) + len(messages)
        # Not more than people will look at.
        client.lpush("scraping", *(b"rubbish %d" % number for number in range(KEPT + 1)))
        last = b"rubbish %d" % KEPT
        wait_until(lambda: client.lindex("scraping.bad", 0) == last, "the last one")
        assert client.llen("scraping.bad") == KEPT
        client.close()
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.skipif(not rabbitmq.available(), reason="rabbitmq-server is not installed")
def test_a_rabbitmq_queue_keeps_aside_what_is_no_task(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    frontier = f"sqlite:///{tmp_path}/shoal.db"
    with (
        rabbitmq.rabbitmq_server() as server,
        Fleet(tmp_path, server.url, frontier) as fleet,
        working(fleet),
    ):
        messages = crafted(mark)
        command(server.url, messages[0]["body"])
        publish(server.url, messages)
        wait_until(lambda: complaints(fleet) >= len(messages) or fleet.workers["w1"].over, "all of them")
        wait_until(lambda: "bad_message among the commands" in fleet.workers["w1"].err, "the command")
        with kombu.Connection(server.url) as connection:
            channel = connection.default_channel
            kept = [channel.basic_get("scraping.bad", no_ack=True) for _ in messages]
            assert channel.basic_get("scraping.bad", no_ack=True) is None
        assert all(kept), fleet.said()
        first = messages[0]
        assert (kept[0].body, kept[0].content_type) == (first["body"], PICKLE)
        assert kept[0].headers["task"] == TASK["task"]
        assert kept[0].headers["x-shoal-error"].startswith("bad_message: its content type is ")
    assert not mark.exists()
