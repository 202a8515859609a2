"""A distributed run on three nodes with a PostgreSQL of their own; one node dies in the middle."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from shoal.demo.site import Hit, generated_site
from tests.rig import FIND_RIG, nodes
from tests.rig.checker import longest_silence
from tests.rig.command import SHOAL, Running, Shell, wait_until
from tests.rig.nodes import World
from tests.rig.postgres_server import UNSYNCED, PostgresServer, binaries, postgres_process

FULL = bool(os.environ.get("SHOAL_STORM"))
URLS = 100_000 if FULL else 2_000
HOSTS = 40
PORT = 8080
LEASE = 5
WIDTH = 8 if FULL else 2
"""The small run is slow on purpose, or it would be over before a node can die."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800 if FULL else 120),
    pytest.mark.skipif(not nodes.possible(), reason="network namespaces need root and `ip`"),
    pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed"),
]

APP = f"""
import os
from shoal import Page, Shoal

app = Shoal()


@app.scraper("far", rate="none", per_host={WIDTH}, execution="distributed", lease={LEASE})
async def far(page: Page):
    yield {{"url": page.url, "worker": os.environ["SHOAL_USER_AGENT"]}}
"""

LOOK = """
import asyncio, sys
import msgspec
from shoal.registry import open_frontier
from tests.rig.storm import all_items

async def main(address, job):
    frontier = await open_frontier(address)
    items = [msgspec.Raw(item.body) for item in await all_items(frontier, job)]
    counts = (await frontier.job(job)).counts
    print(msgspec.json.encode({"items": items, "counts": counts, "check": await frontier.check()}).decode())
    await frontier.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def world() -> Iterator[World]:
    with World(nodes=3, hosts=HOSTS) as made:
        yield made


@pytest.fixture
def server(world: World) -> Iterator[PostgresServer]:
    options = () if FULL else UNSYNCED
    hub = world.on(0, ())
    with postgres_process(durable=True, options=options, host=world.address, inside=hub) as running:
        yield running


def hits(log: Path) -> list[Hit]:
    """The whole lines of the site's log so far."""
    if not log.exists():
        return []
    lines = log.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=Hit) for line in lines if line.endswith(b"\n")]


def test_a_run_on_three_nodes_of_which_one_dies(shell: Shell, world: World, server: PostgresServer) -> None:
    app, log = shell.root / "scrapers.py", shell.root / "site.log"
    app.write_text(APP)
    (shell.root / "look.py").write_text(FIND_RIG + LOOK)
    graph = msgspec.structs.replace(
        generated_site(pages=URLS, links=1, hosts=HOSTS, size=50), network=world.network
    )
    urls = [graph.url_of(number, PORT) for number in range(URLS)]
    (shell.root / "urls.txt").write_text("\n".join(urls) + "\n")
    site_words = ["--pages", str(URLS), "--links", "1", "--hosts", str(HOSTS), "--network", world.network]
    site = shell.start(
        *site_words,
        *("--latency", "0.02" if FULL else "0.25"),
        *("--port", str(PORT), "--port-file", "site.port", "--log-file", str(log)),
        program=world.on(0, (sys.executable, "-m", "shoal.demo.site")),
    )
    wait_until((shell.root / "site.port").exists, "the site")
    env = {
        "SHOAL_FRONTIER": server.address,
        "SHOAL_APP": str(app),
        "SHOAL_ALLOW_PRIVATE": "1",
        "SHOAL_NO_ROBOTS": "1",
    }
    hub = world.on(0, SHOAL)
    queued = shell.start("run", "far", "--urls-file", "urls.txt", env=env, program=hub).wait(600).json()
    run_id = queued["run_id"]
    assert queued["enqueued"] == URLS

    words = ("worker", "--scraper", "far", "--run-id", run_id, "--batch-size", "50")
    workers: dict[int, list[Running]] = {}
    for node in (1, 2, 3):
        workers[node] = [
            shell.start(
                *words, env=env | {"SHOAL_USER_AGENT": f"node{node}-{number}"}, program=world.on(node, SHOAL)
            )
            for number in (1, 2)
        ]

    def status() -> dict[str, int]:
        told = shell.start("status", run_id, "--json", env=env, program=hub).wait().json()
        return {name: told[name] for name in ("pending", "claimed", "completed", "failed", "remaining")}

    wait_until(lambda: len({hit.agent for hit in hits(log)}) == 6, "all six at work")
    wait_until(lambda: len(hits(log)) >= URLS // 4, "a quarter of the run", 900)
    # The cable first: the server is not even told that they are gone.
    world.unplug(3)
    for worker in workers[3]:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    assert status()["remaining"], "it was over before the node died"
    for worker in (*workers[1], *workers[2]):
        ended = worker.wait(1500 if FULL else 60)
        assert ended.code == 0, ended.err

    assert status() == {"pending": 0, "claimed": 0, "completed": URLS, "failed": 0, "remaining": 0}
    look = shell.start(server.address, run_id, program=world.on(0, (sys.executable, "look.py"))).wait(300)
    seen = msgspec.json.decode(look.out)
    assert seen["check"] == []
    assert Counter(item["url"] for item in seen["items"]) == Counter(urls)
    assert (seen["counts"]["done"], seen["counts"]["items"]) == (URLS, URLS)
    settled = Counter(item["worker"] for item in seen["items"])
    assert len(settled) == 6, settled
    site.signal(signal.SIGINT)
    site.wait()
    visits = hits(log)
    silence = longest_silence(visits)
    seconds = max(hit.end for hit in visits) - min(hit.start for hit in visits)
    print(
        f"{URLS} URLs in {seconds:.1f} s by {len(settled)} workers, {len(visits) - URLS} visits repeated,"
        f" longest silence {silence:.1f} s; {dict(sorted(settled.items()))}"
    )
    assert silence <= LEASE + 10, silence
