"""The recipes for people who come from a work table, on every frontier that processes can share."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.frontier.port import Backend
from shoal.registry import open_frontier
from tests.rig.command import wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN = "nightly"

# A worker in a process of its own: shows each batch, and waits for a line before it goes on. It ends when
# nothing is left.
WORKER = f"""
import asyncio, json, sys
sys.path.insert(0, {str(EXAMPLES)!r})
from shoal.registry import open_frontier
from work_table import claim_batch, complete_url, get_queue_stats

async def main(address, worker, lease):
    frontier = await open_frontier(address)
    while (await get_queue_stats(frontier, {RUN!r}))["remaining"]:
        batch = await claim_batch(frontier, {RUN!r}, worker, size=7, lease_seconds=float(lease))
        print(json.dumps([each.request.url for each in batch]), flush=True)
        if not sys.stdin.readline():
            break
        for lease_ in batch:
            assert await complete_url(frontier, lease_, {{"url": lease_.request.url, "by": worker}})
    await frontier.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/work.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def recipes() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("work_table", EXAMPLES / "work_table.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(address: str, name: str, *given: Any) -> Any:
    """One recipe on a connection of its own."""

    async def ask() -> Any:
        frontier: Backend = await open_frontier(address)
        try:
            return await getattr(recipes(), name)(frontier, RUN, *given)
        finally:
            await frontier.close()

    return asyncio.run(ask())


def stats(address: str) -> dict[str, int]:
    found: dict[str, int] = asked(address, "get_queue_stats")
    return found


@contextmanager
def working(address: str, name: str, lease: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER, address, name, str(lease)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def batch(process: subprocess.Popen[str]) -> list[str] | None:
    """The URLs it claimed (it may have got none just now); None when it is through."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found: list[str] | None = json.loads(line) if line else None
    return found


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


URLS = [f"https://shop-{number % 8}.example/{number}" for number in range(40)]


def test_two_processes_never_hold_the_same_url(address: str) -> None:
    assert asked(address, "enqueue_urls", URLS) == 40
    assert asked(address, "enqueue_urls", URLS) == 0
    seen: list[str] = []
    with working(address, "host_1_1") as one:
        batches = {one: batch(one)}
        with working(address, "host_2_1") as two:
            batches[two] = batch(two)
            assert all(batches.values()), "both hold some at the same time"
            while batches:
                # All of them show what they hold, and none goes on before it is told to.
                held = [url for found in batches.values() for url in found or ()]
                assert len(held) == len(set(held)) == stats(address)["claimed"]
                seen += held
                for process in batches:
                    go_on(process)
                # Now both end their batches and claim at once.
                answers = {process: batch(process) for process in batches}
                batches = {process: found for process, found in answers.items() if found is not None}
    assert sorted(seen) == sorted(URLS)
    assert stats(address) == {"pending": 0, "claimed": 0, "completed": 40, "failed": 0, "remaining": 0}


def test_the_batch_of_a_killed_process_comes_back(address: str) -> None:
    asked(address, "enqueue_urls", URLS[:10])
    with working(address, "host_1_1", lease=1.0) as victim:
        assert len(batch(victim) or ()) == 7
        victim.kill()
        victim.wait()
    released: list[int] = []

    def came_back() -> bool:
        released.append(asked(address, "release_expired_leases"))
        return sum(released) == 7

    wait_until(came_back, "what the dead one held")
    assert stats(address)["pending"] == 10
    with working(address, "host_2_1") as heir:
        found: list[str] = []
        while (some := batch(heir)) is not None:
            found += some
            go_on(heir)
    assert sorted(found) == sorted(URLS[:10])
    assert stats(address)["completed"] == 10


def test_a_url_that_fails_three_times_is_given_up(address: str) -> None:
    table = recipes()

    async def story() -> None:
        frontier = await open_frontier(address)
        try:
            await table.enqueue_urls(frontier, RUN, URLS[:1])
            for attempt in range(3):
                [lease] = await table.claim_batch(frontier, RUN, "host_1_1")
                assert lease.request.attempt == attempt
                assert await table.fail_url(frontier, lease, "no", again_after=0.0)
                assert not await table.complete_url(frontier, lease, {}), "it is not his any more"
            assert await table.claim_batch(frontier, RUN, "host_1_1") == []
            assert await frontier.items(RUN) == []
        finally:
            await frontier.close()

    asyncio.run(story())
    assert stats(address) == {"pending": 0, "claimed": 0, "completed": 0, "failed": 1, "remaining": 0}


def test_the_example_runs_as_it_is(address: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "work_table.py"), address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    *_, late, counts = done.stdout.splitlines()
    assert late == "too late: True"
    assert json.loads(counts) == {"pending": 0, "claimed": 0, "completed": 45, "failed": 5, "remaining": 0}
