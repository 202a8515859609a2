"""Four workers over RabbitMQ with everything that goes wrong: bad pages, killed workers, a killed broker.

`make rabbit-storm` runs it at full size: 2,000 URLs, ten kills of the broker and of workers each.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import aiormq
import msgspec
import pytest

from shoal.demo.site import Call, LoopbackSite, Reply, by_host, max_overlap
from shoal.frontier.port import Backend
from shoal.model import Counts, DeadLetter, Item, JobState, Selection
from shoal.queues import FAILED_QUEUE
from shoal.registry import open_frontier
from tests.rig import redis_server as redis
from tests.rig.command import Running, Shell, wait_until
from tests.rig.rabbitmq_server import RabbitServer, available, rabbitmq_server

pytestmark = [
    pytest.mark.skipif(not available(), reason="rabbitmq-server is not installed"),
    pytest.mark.skipif(not redis.available(), reason="redis-server is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(1800 if os.environ.get("SHOAL_STORM") else 300),
]

FULL = bool(os.environ.get("SHOAL_STORM"))
URLS = 2_000 if FULL else 300
KILLS = 10 if FULL else 2
HOSTS = 20
WORKERS = 4
LEASE = 3.0
GAP = 0.05

T = TypeVar("T")


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitServer]:
    with rabbitmq_server() as server:
        yield server


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis.redis_server() as server:
        yield server.url


class Place:
    """A frontier on Redis, a broker, a directory to run commands in."""

    def __init__(self, shell: Shell, frontier: str, server: RabbitServer) -> None:
        self.shell = shell
        self.frontier = frontier
        self.server = server

    def ask(self, question: Callable[[Backend], Awaitable[T]]) -> T:
        async def answer() -> T:
            frontier = await open_frontier(self.frontier)
            try:
                return await question(frontier)
            finally:
                await frontier.close()

        return asyncio.run(answer())

    def counts(self) -> Counts:
        return self.ask(lambda frontier: frontier.job("storm")).counts

    def over(self) -> bool:
        return self.ask(lambda frontier: frontier.job("storm")).state is JobState.DONE

    def letters(self) -> list[DeadLetter]:
        return self.ask(lambda frontier: frontier.dead(Selection(job="storm"), limit=100_000))

    def items(self) -> list[dict[str, Any]]:
        async def everything(frontier: Backend) -> list[Item]:
            found: list[Item] = []
            while page := await frontier.items("storm", after=found[-1].seq if found else 0):
                found += page
            return found

        return [msgspec.json.decode(item.body) for item in self.ask(everything)]

    def enqueue(self, urls: list[str], *options: str) -> dict[str, int]:
        (self.shell.root / "urls.txt").write_text("\n".join(urls))
        words = ["enqueue", "storm", "--urls-file", "urls.txt", "--allow-private", "--no-robots", "--json"]
        ended = self.shell.run(*words, *options)
        assert ended.code == 0, ended.err
        answer: dict[str, int] = ended.json()
        return answer

    def worker(self) -> Running:
        return self.shell.start("worker", "--drain", "--lease", str(LEASE))

    def failed(self) -> list[dict[str, Any]]:
        """What people see in `failed_urls`. Looking takes it away."""

        async def look() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            connection = await aiormq.connect(self.server.url)
            channel = await connection.channel()
            while (message := await channel.basic_get(f"{self.prefix}{FAILED_QUEUE}", no_ack=True)).body:
                found.append(msgspec.json.decode(message.body))
            await connection.close()
            return found

        return asyncio.run(look())

    prefix = ""


@contextmanager
def place(root: Path, redis_url: str, broker: RabbitServer) -> Iterator[Place]:
    name = uuid4().hex
    frontier = f"{redis_url}?prefix={name}"
    env = {"SHOAL_FRONTIER": frontier, "SHOAL_DISPATCH": f"{broker.url}?prefix={name}.", "SHOAL_TIMEOUT": "1"}
    with Shell(root, **env) as shell:
        made = Place(shell, frontier, broker)
        made.prefix = f"{name}."
        yield made


def mixed(call: Call) -> Reply:
    kind = call.bare.split("/")[1]
    if kind == "missing":
        return Reply(404, b"no such page")
    if kind == "broken":
        return Reply(500, b"oh dear")
    delay = {"late": 0.3, "hang": 30.0}.get(kind, 0.01)
    return Reply(200, f"<title>{call.bare}</title>".encode(), delay=delay)


def test_good_and_bad_pages_by_four_workers(tmp_path: Path, redis_url: str, broker: RabbitServer) -> None:
    kinds = Counter(missing=URLS // 20, broken=URLS // 20, late=URLS // 20, hang=6)
    kinds["fine"] = URLS - kinds.total() - 10
    malformed = [f"http://exa mple.com/{n}" if n % 2 else f"ftp://host/{n}" for n in range(10)]
    with (
        LoopbackSite(mixed, hosts=HOSTS + 6) as site,
        place(tmp_path, redis_url, broker) as here,
    ):

        def url(kind: str, number: int) -> str:
            # Hosts that hang rest after each failure: they are apart, so that nobody waits for them.
            host = HOSTS + number % 6 + 1 if kind == "hang" else number % HOSTS + 1
            return f"http://127.0.0.{host}:{site.port}/{kind}/{number}"

        wanted = [url(kind, number) for kind, total in kinds.items() for number in range(total)]
        random.Random(1).shuffle(wanted)
        answer = here.enqueue([*wanted, *malformed], "--rate", "none", "--per-host", "4")
        assert (answer["new"], answer["bad"]) == (len(wanted), len(malformed))
        workers = [here.worker() for _ in range(WORKERS)]
        for worker in workers:
            ended = worker.wait(1500 if FULL else 200)
            assert ended.code == 0, ended.err

        good = {url(kind, n) for kind in ("fine", "late") for n in range(kinds[kind])}
        assert Counter(item["url"] for item in here.items()) == Counter(good), "each stored once"
        visits = Counter(hit.url for hit in site.log())
        assert all(visits[each] == 1 for each in good), "each visited once"
        letters = here.letters()
        classes = Counter(letter.failure.error for letter in letters)
        timeouts = sum(n for name, n in classes.items() if name in ("first_byte_timeout", "deadline"))
        assert timeouts == kinds["hang"], classes
        assert classes["http_404"] == kinds["missing"] and classes["http_500"] == kinds["broken"]
        assert classes["url_invalid"] + classes["scheme_blocked"] == len(malformed), classes
        tried = {
            hit.url: visits[hit.url] for hit in site.log() if "/broken/" in hit.url or "/hang/" in hit.url
        }
        assert set(tried.values()) == {3}, "three attempts, then dead"
        # The broker tells the same, and `shoal status` tells what the broker tells.
        listed = here.server.ctl("list_queues", "name", "messages_ready", "--formatter", "json")
        depths = {row["name"]: row["messages_ready"] for row in msgspec.json.decode(listed)}
        status = here.shell.run("status", "storm", "--json").json()["broker"]["queues"]
        assert {name: row["waiting"] for name, row in status.items()} == {
            name: depths[here.prefix + name] for name in status
        }
        failed = here.failed()
        assert Counter(row["url"] for row in failed) == Counter(letter.request.url for letter in letters)
        assert depths[here.prefix + FAILED_QUEUE] == len(failed)
        assert {row["attempts"] for row in failed if row["error"] == "http_500"} == {3}

        retried = here.shell.run("dead", "retry", "--job", "storm", "--error", "http_404", "--json")
        assert retried.code == 0, retried.err
        before = len(site.log())
        ended = here.worker().wait()
        assert ended.code == 0, ended.err
        assert len(site.log()) - before == kinds["missing"]
        assert here.ask(lambda frontier: frontier.check()) == []
        print(f"{URLS} URLs: {here.counts()}; dead by class: {dict(classes)}")  # `make rabbit-storm` shows it


def page(call: Call) -> Reply:
    return Reply(200, f"<title>{call.bare}</title>".encode(), delay=0.02)


def test_killed_workers_and_a_killed_broker_lose_nothing(
    tmp_path: Path, redis_url: str, broker: RabbitServer
) -> None:
    dice = random.Random(7)
    with LoopbackSite(page, hosts=HOSTS) as site, place(tmp_path, redis_url, broker) as here:
        # Enough to last through all the kills, at the pace of its hosts.
        total = max(URLS, KILLS * 150)
        wanted = [f"http://127.0.0.{n % HOSTS + 1}:{site.port}/page/{n}" for n in range(total)]
        here.enqueue(wanted, "--rate", f"{1 / GAP:.0f}/s")
        running = [here.worker() for _ in range(WORKERS)]
        killed = 0
        for round in range(KILLS):
            mark = total * (round + 1) // (KILLS + 2)
            wait_until(lambda: here.counts().done >= mark, f"{mark} pages", 240)  # noqa: B023
            victim = dice.randrange(WORKERS)
            running[victim].kill()
            running[victim] = here.worker()
            time.sleep(dice.uniform(0.0, 0.2))
            broker.kill()
            killed += 1
            broker.start()
        end = time.monotonic() + 240
        while not here.over():
            assert time.monotonic() < end, (here.counts(), running[0].err)
            for number, worker in enumerate(running):
                # A worker that found the job drained between two kills has done its part.
                if worker.over:
                    assert worker.wait().code == 0, worker.err
                    running[number] = here.worker()
            time.sleep(0.1)
        said = "".join(worker.err for worker in here.shell.started)
        counts = here.counts()
        stored = Counter(item["url"] for item in here.items())
        lost = set(wanted) - stored.keys()
        twice = [url for url, times in stored.items() if times > 1]
        assert (len(lost), len(twice), counts.dead, counts.expired) == (0, 0, 0, 0), counts
        assert here.ask(lambda frontier: frontier.check()) == []
        assert "Attempt 1 failed: RabbitMQ at" in said and "Connected to RabbitMQ on attempt" in said
        for hits in by_host(site.log()).values():
            assert max_overlap(hits) <= 1
            span = hits[-1].start - hits[0].start
            assert span >= (len(hits) - 1) * GAP * 0.9, "no host was visited faster than its pace"
        again = len(site.log()) - total
        print(
            f"{total} URLs, {killed} kills of broker and workers: lost 0, stored twice 0, {again} visits more"
        )
