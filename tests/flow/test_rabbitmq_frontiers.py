"""RabbitMQ carries the leases of every kind of frontier: each page is visited and stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from shoal.model import JobState
from shoal.testing import postgres_server, redis_server
from shoal.testing.command import Shell, read_lines, wait_until
from shoal.testing.rabbitmq_server import RabbitServer, available, rabbitmq_server
from shoal.testing.site import LoopbackSite, generated_site

pytestmark = [
    pytest.mark.skipif(not available(), reason="rabbitmq-server is not installed"),
    pytest.mark.timeout(180),
]

PAGES = 40
KINDS = [
    "sqlite",
    pytest.param("redis", marks=pytest.mark.skipif(not redis_server.available(), reason="no redis-server")),
    pytest.param(
        "postgres",
        marks=pytest.mark.skipif(postgres_server.binaries() is None, reason="no PostgreSQL server"),
    ),
]


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitServer]:
    with rabbitmq_server() as server:
        yield server


@pytest.fixture(scope="module", params=KINDS)
def frontiers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An address; `NAME` in it tells the frontiers of two tests apart."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('frontier')}/NAME.db"
    elif request.param == "redis":
        with redis_server.redis_server() as server:
            yield f"{server.url}?prefix=NAME"
    else:
        with postgres_server.postgres_server() as address:
            yield f"{address}?schema=NAME"


@pytest.fixture
def place(frontiers: str, broker: RabbitServer) -> dict[str, str]:
    """A frontier and queues of one test alone, as flags."""
    name = f"t{uuid4().hex[:12]}"
    return {
        "--frontier": frontiers.replace("NAME", name),
        "--dispatch": f"{broker.url}?prefix={name}.",
    }


def test_a_crawl_stores_every_page_once(tmp_path: Path, place: dict[str, str]) -> None:
    flags = [word for pair in place.items() for word in pair]
    with LoopbackSite(generated_site(pages=PAGES, links=4)) as site, Shell(tmp_path) as shell:
        words = ["--allow-private", "--rate", "none", "--per-host", "4", "--workers", "2"]
        ended = shell.run("crawl", site.url, *words, *flags, "-o", "pages.jsonl", "--json", timeout=120)
        assert ended.code == 0, ended.err
        told = ended.json()
        assert (told["pages"], told["items"], told["dead"]) == (PAGES, PAGES, 0)
        stored = Counter(item["url"] for item in read_lines(tmp_path / "pages.jsonl"))
        assert stored == Counter(site.expected_urls())
        fetched = Counter(hit.url for hit in site.log() if not hit.path.endswith("robots.txt"))
        assert fetched == stored, "nothing was visited twice"
        assert shell.ask(lambda frontier: frontier.check(), place["--frontier"]) == []
        assert shell.ask(lambda frontier: frontier.holders(), place["--frontier"]) == {}


def test_workers_do_what_is_enqueued_once(tmp_path: Path, place: dict[str, str]) -> None:
    where, broker = place["--frontier"], place["--dispatch"]
    env = {"SHOAL_FRONTIER": where, "SHOAL_DISPATCH": broker}
    with LoopbackSite(generated_site(pages=PAGES, links=4)) as site, Shell(tmp_path, **env) as shell:
        workers = [shell.start("worker"), shell.start("worker")]
        urls = sorted(site.expected_urls())
        words = ["--allow-private", "--no-robots", "--rate", "none", "--per-host", "4"]
        assert shell.run("enqueue", "both", *urls, *words).code == 0

        def ended() -> bool:
            return shell.ask(lambda frontier: frontier.job("both"), where).state is JobState.DONE

        wait_until(ended, "the end of the job")
        items = shell.ask(lambda frontier: frontier.items("both", limit=10 * PAGES), where)
        assert Counter(msgspec.json.decode(item.body)["url"] for item in items) == Counter(urls)
        assert Counter(hit.url for hit in site.log()) == Counter(urls)
        for worker in workers:
            worker.signal(15)
        assert [worker.wait().code for worker in workers] == [0, 0]
        assert not any("Traceback" in worker.err for worker in workers)
        assert shell.ask(lambda frontier: frontier.check(), where) == []
