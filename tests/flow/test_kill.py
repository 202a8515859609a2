"""`kill -9` at any moment: the crawl goes on with --resume and ends as if nothing had happened."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.model import JobState
from tests.rig.command import PATIENCE, Running, Shell, read_lines

LEASE = "2"
"""Short, so that what a killed worker held comes back soon."""
KILLS = 2
"""The third crash on one URL would rightly end it as `worker_crashed`."""


Essence = tuple[str, str, tuple[str, ...]]


def small_site() -> LoopbackSite:
    return LoopbackSite(generated_site(pages=150, links=6, seed=7, latency=0.02))


def essences(items: Iterable[dict[str, Any]]) -> Counter[Essence]:
    """What two crawls of one site must agree on, wherever it was served."""
    return Counter(
        (path_of(item["url"]), item["title"], tuple(map(path_of, item["links"]))) for item in items
    )


def path_of(url: str) -> str:
    return url.split("/", 3)[3]


def command(url: str, workers: int) -> list[str]:
    words = ["crawl", url, "--allow-private", "--rate", "none", "--per-host", "8", "--out", "out.jsonl"]
    return [*words, "--workers", str(workers), "--json"]


def moment(dice: random.Random, site: LoopbackSite, round: int) -> Callable[[], bool]:
    """When to kill: somewhere in the start-up, or a little after so many pages."""
    if dice.random() < 0.3:
        at = time.monotonic() + dice.uniform(0.0, 0.8)
        return lambda: time.monotonic() >= at
    pages = len(site.log()) + dice.randrange(150 // (round + 1))
    reached: list[float] = []
    extra = dice.uniform(0.0, 0.05)

    def now() -> bool:
        if not reached and len(site.log()) >= pages:
            reached.append(time.monotonic() + extra)
        return bool(reached) and time.monotonic() >= reached[0]

    return now


def kill_at(running: Running, now: Callable[[], bool]) -> bool:
    """Kill it when the moment comes. False if it ended before."""
    end = time.monotonic() + PATIENCE
    while not now():
        if running.over:
            return False
        assert time.monotonic() < end, running.err
        time.sleep(0.001)
    running.kill()
    return True


def survives(root: Path, seed: int, workers: int, whole: Counter[Essence]) -> None:
    """One run, killed once or twice at random, ends with the items of an uninterrupted one."""
    root.mkdir()
    dice = random.Random(seed)
    with small_site() as site, Shell(root, SHOAL_LEASE=LEASE) as shell:
        words = command(site.url, workers)
        killed = 0
        for round in range(dice.randint(1, KILLS)):
            running = shell.start(*words, *(["--resume"] if round else []))
            killed += kill_at(running, moment(dice, site, round))
        last = shell.run(*words, "--resume")
        told = f"seed {seed}, {workers} workers, killed {killed} times: {last.err}"
        assert last.code == 0, told
        [job] = shell.jobs()  # the one that was killed, not another beside it
        assert job.state is JobState.DONE, told
        stored = shell.items(job.id)
        assert Counter(item["url"] for item in stored) == Counter(site.expected_urls()), told
        assert essences(stored) == whole, told
        assert essences(read_lines(root / "out.jsonl")) == whole, told
        assert shell.check() == [], told
        assert last.json()["items"] == len(stored), told
        assert [path.name for path in root.glob("out.jsonl*")] == ["out.jsonl"], told


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Counter[Essence]:
    """The items of one uninterrupted run."""
    root = tmp_path_factory.mktemp("whole")
    with small_site() as site, Shell(root) as shell:
        ended = shell.run(*command(site.url, 1))
        assert ended.code == 0, ended.err
        return essences(read_lines(root / "out.jsonl"))


def side_by_side(root: Path, runs: Iterable[tuple[int, int]], whole: Counter[Essence]) -> None:
    """Most of a run is waiting for leases to end, so several fit beside each other."""
    with ThreadPoolExecutor(5) as pool:
        ends = [pool.submit(survives, root / f"{seed}", seed, workers, whole) for seed, workers in runs]
        for end in ends:
            end.result()


def test_four_runs_survive_kills(tmp_path: Path, whole: Counter[Essence]) -> None:
    side_by_side(tmp_path, [(101, 1), (102, 1), (103, 1), (104, 3)], whole)


@pytest.mark.slow
def test_twenty_runs_survive_kills(tmp_path: Path, whole: Counter[Essence]) -> None:
    side_by_side(tmp_path, [(seed, 3 if seed % 4 == 3 else 1) for seed in range(20)], whole)
