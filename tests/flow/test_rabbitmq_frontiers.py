"""RabbitMQ carries the leases of every kind of frontier: each page is visited and stored once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiormq
import msgspec
import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.frontier.notes import Presence
from shoal.model import JobState
from shoal.queues import FAILED_QUEUE
from tests.rig.command import Shell, read_lines, wait_until
from tests.rig.rabbitmq_server import available

pytestmark = [
    pytest.mark.skipif(not available(), reason="rabbitmq-server is not installed"),
    pytest.mark.timeout(180),
]

PAGES = 40


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, rabbit_url: str) -> dict[str, str]:
    """A frontier and queues of one test alone, as flags."""
    if request.param == "sqlite":
        frontier = f"sqlite:///{tmp_path}/frontier.db"
    else:
        frontier = request.getfixturevalue(f"{request.param}_url")
    return {"--frontier": frontier, "--dispatch": rabbit_url}


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
        assert shell.ask(lambda frontier: frontier.leases(), place["--frontier"]) == []


def test_workers_do_what_is_enqueued_once(tmp_path: Path, place: dict[str, str]) -> None:
    where, broker = place["--frontier"], place["--dispatch"]
    env = {"SHOAL_FRONTIER": where, "SHOAL_DISPATCH": broker}
    with LoopbackSite(generated_site(pages=PAGES, links=4)) as site, Shell(tmp_path, **env) as shell:
        workers = [shell.start("worker"), shell.start("worker")]
        # Both: one that is still starting when the job is done would not know the signal yet.
        wait_until(
            lambda: len(shell.ask(lambda frontier: Presence(frontier.notes).workers(), where)) == 2,
            "two workers",
        )
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


def test_what_ends_in_the_frontier_is_told_in_the_broker_once(tmp_path: Path, place: dict[str, str]) -> None:
    """The host's first turn goes to robots.txt. Its second comes too late for these URLs."""
    where, broker = place["--frontier"], place["--dispatch"]
    env = {"SHOAL_FRONTIER": where, "SHOAL_DISPATCH": broker}
    with LoopbackSite(generated_site(pages=3, links=1)) as site, Shell(tmp_path, **env) as shell:
        urls = sorted(site.expected_urls())
        (tmp_path / "urls.txt").write_text("\n".join([*urls, "http://["]) + "\n")
        words = ["--urls-file", "urls.txt", "--allow-private", "--rate", "1/m", "--ttl", "4"]
        worker = shell.start("worker")
        wait_until(lambda: shell.ask(lambda frontier: Presence(frontier.notes).workers(), where), "a worker")
        assert shell.run("enqueue", "late", *words).code == 0

        def over() -> bool:
            return shell.ask(lambda frontier: frontier.job("late"), where).state is JobState.DONE

        wait_until(over, "the end of the job")
        worker.signal(15)
        assert worker.wait().code == 0, worker.err
        # Another one has nothing to add.
        assert shell.run("worker", "--drain", timeout=60).code == 0
        counts = shell.ask(lambda frontier: frontier.job("late"), where).counts
        assert (counts.expired, counts.dead, counts.done) == (3, 1, 0)
        assert [hit.path for hit in site.log()] == ["/robots.txt"]
        told = asyncio.run(failed(broker))
        assert sorted((each["url"], each["error"], each["attempts"]) for each in told) == sorted(
            [*((url, "expired", 0) for url in urls), ("http://[", "url_invalid", 0)]
        )


async def failed(broker: str) -> list[dict[str, Any]]:
    """What people see in `failed_urls`."""
    address, _, prefix = broker.partition("?prefix=")
    found: list[dict[str, Any]] = []
    connection = await aiormq.connect(address)
    channel = await connection.channel()
    while (message := await channel.basic_get(prefix + FAILED_QUEUE, no_ack=True)).body:
        found.append(msgspec.json.decode(message.body))
    await connection.close()
    return found
