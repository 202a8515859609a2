"""Jobs on one frontier: a big one does not hold up an urgent one, and two crawls do not see each other."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.frontier.port import Backend
from shoal.model import Job, JobSpec, JobState, Request
from tests.rig import redis_server
from tests.rig.command import Shell, wait_until
from tests.rig.postgres_server import binaries
from tests.rig.storm import (
    Ground,
    all_dead,
    all_items,
    asked,
    postgres_ground,
    redis_ground,
    sqlite_ground,
)

FULL = bool(os.environ.get("SHOAL_STORM"))
BIG = 200_000 if FULL else 20_000
URGENT = 50
LANES = 10
SOON = 10.0
"""Seconds: the big one alone would take many times as long."""

BACKENDS = [
    "sqlite",
    pytest.param("redis", marks=pytest.mark.skipif(not redis_server.available(), reason="no redis-server")),
    pytest.param("postgresql", marks=pytest.mark.skipif(binaries() is None, reason="no PostgreSQL")),
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 if FULL else 120)]

CLIENT = """
import asyncio, os, sys
from shoal.model import Done
from shoal.registry import open_frontier

async def main(address):
    frontier = await open_frontier(address)
    while True:
        claim = await frontier.claim(20, worker=f"client-{os.getpid()}", lease_seconds=60)
        if claim.leases:
            await asyncio.sleep(0.02)  # as if it visited them
            await frontier.settle([Done(lease, items=[b'{}']) for lease in claim.leases])
        else:
            await frontier.wait(min(claim.retry_in, 0.1))

asyncio.run(main(sys.argv[1]))
"""


@contextmanager
def ground_of(kind: str, shell: Shell) -> Iterator[Ground]:
    makers = {
        "sqlite": lambda: sqlite_ground(shell.root),
        "redis": lambda: redis_ground(shell.root),
        "postgresql": lambda: postgres_ground(shell.root, fsync=FULL),
    }
    with makers[kind]() as ground:
        yield ground


async def _submit(frontier: Backend, job: str, count: int, priority: int) -> None:
    await frontier.open_job(job, JobSpec(gap=0.0, width=50, priority=priority))
    urls = [f"http://host{number % LANES}.example/{job}/{number}" for number in range(count)]
    for at in range(0, count, 10_000):
        await frontier.add([Request(url, job, priority=priority) for url in urls[at : at + 10_000]])


@pytest.mark.parametrize("kind", BACKENDS)
def test_an_urgent_job_beside_a_big_one(kind: str, shell: Shell) -> None:
    with ground_of(kind, shell) as ground:

        def job(name: str) -> Job:
            return asked(shell, ground.address, lambda frontier: frontier.job(name))

        asked(shell, ground.address, lambda frontier: _submit(frontier, "big", BIG, 5))
        (shell.root / "client.py").write_text(CLIENT)
        for _ in range(2):
            shell.start(ground.address, program=(sys.executable, str(shell.root / "client.py")))
        wait_until(lambda: job("big").counts.done > 200, "the big one to be under way")
        asked(shell, ground.address, lambda frontier: _submit(frontier, "urgent", URGENT, 9))
        before, began = job("big").counts.done, time.monotonic()
        wait_until(lambda: job("urgent").state is JobState.DONE, "the urgent one", SOON)
        took = time.monotonic() - began
        between = job("big")
        assert between.state is JobState.RUNNING, "the big one was over too soon to prove anything"
        assert between.counts.done > before, "the big one stood still meanwhile"
        wait_until(lambda: job("big").counts.done > between.counts.done + 100, "the big one to go on")
        advanced = between.counts.done - before
        print(f"{kind}: {URGENT} urgent URLs in {took:.2f} s, the big one did {advanced} in that time")
        assert asked(shell, ground.address, lambda frontier: frontier.check()) == []


@pytest.mark.parametrize("kind", BACKENDS)
def test_two_crawls_at_once_do_not_see_each_other(kind: str, shell: Shell) -> None:
    fine = generated_site(pages=60, links=4, seed=1, latency=0.01)
    shaky = generated_site(pages=80, links=4, seed=2, latency=0.01, errors=0.2)
    with ground_of(kind, shell) as ground, LoopbackSite(fine) as one, LoopbackSite(shaky) as other:
        flags = ["--rate", "none", "--per-host", "4", "--allow-private", "--no-robots", "--json"]
        flags += ["--frontier", ground.address]
        crawls = {
            site: shell.start("crawl", site.url, *flags, "--out", f"{number}.jsonl")
            for number, site in enumerate((one, other))
        }
        for number, (site, crawl) in enumerate(crawls.items()):
            expected = site.expected()
            good = {url for url, status in expected.items() if status == 200}
            ended = crawl.wait()
            assert ended.code == (0 if len(good) == len(expected) else 1), ended.err
            summary = ended.json()
            assert (summary["items"], summary["dead"]) == (len(good), len(expected) - len(good))
            job, items, dead = asked(shell, ground.address, partial(_seen, job=summary["job"]))
            assert Counter(items) == Counter(good)
            assert set(dead) == expected.keys() - good
            assert (job.counts.added, job.counts.done) == (len(expected), len(good))
            assert {hit.url for hit in site.log()} == expected.keys(), "nobody came for the other's pages"
            lines = (shell.root / f"{number}.jsonl").read_bytes().splitlines()
            assert Counter(msgspec.json.decode(line)["url"] for line in lines) == Counter(good)
        assert asked(shell, ground.address, lambda frontier: frontier.check()) == []


async def _seen(frontier: Backend, job: str) -> tuple[Job, list[str], list[str]]:
    items = [msgspec.json.decode(item.body)["url"] for item in await all_items(frontier, job)]
    return await frontier.job(job), items, [letter.request.url for letter in await all_dead(frontier, job)]
