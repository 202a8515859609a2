"""Honest hosts beside hostile ones: the honest pages come, nearly as soon as without the others.

`make hostile` runs it at full size: 100 honest hosts beside 429 hostile ones of 143 kinds, with default
settings. SHOAL_HOSTILE_RATE sets another pace; SHOAL_HOSTILE_KINDS, a regular expression, picks kinds, to
find out who costs what.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from shoal.model import DeadGroup, Selection
from tests.rig.command import Shell, wait_until

FULL = bool(os.environ.get("SHOAL_HOSTILE"))
HONEST, PAGES = (100, 10) if FULL else (30, 5)
HOSTILE = 429 if FULL else 60
KINDS = os.environ.get("SHOAL_HOSTILE_KINDS", ".*" if FULL else ".*(nothing|never|drop|stall|drip|half).*")
"""All kinds; in a hurry only those that let a visit wait: they need no more than the slots."""
RATE = os.environ.get("SHOAL_HOSTILE_RATE", "1/s" if FULL else "2/s")
AT_LEAST = 75.0 if FULL else 0.0
"""Seconds that the hostile ones get at full size: until every deadline of a first visit has passed."""
MEMORY = 300
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 if FULL else 180)]


class Hosts:
    """The hosts of one role, in a process of their own."""

    def __init__(self, role: str, hosts: int, pages: int = 0) -> None:
        words = [
            sys.executable,
            "-m",
            "tests.rig.hostile_hosts",
            role,
            "--hosts",
            str(hosts),
            "--pages",
            str(pages),
            "--kinds",
            KINDS,
        ]
        self._process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        told = self._line()
        self.start: list[str] = told["start"]
        self.kinds: dict[str, str] = told["kinds"]
        self.pages: list[str] = told["pages"]

    def log(self) -> list[tuple[float, str]]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"log\n")
        self._process.stdin.flush()
        return [(moment, url) for moment, url in self._line()]

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


@dataclass
class Crawled:
    served: list[float]
    """Seconds from the first request to each honest page, in order."""
    memory: int
    """The crawl's peak, in megabytes."""
    pages: Counter[str]
    """How often each honest page is among the items."""
    errors: dict[str, int]
    dead: list[DeadGroup]

    def at(self, share: float) -> float:
        return self.served[min(len(self.served) - 1, int(len(self.served) * share))]


def crawled(shell: Shell, honest: Hosts, hostile: Hosts | None) -> Crawled:
    start = honest.start + (hostile.start if hostile else [])
    random.Random(1).shuffle(start)
    wanted = set(honest.pages)
    since = time.monotonic()
    words = ["--allow-private", "--rate", RATE, "--max-pages", "1000000", "--fields", "url,title"]
    crawl = shell.start("crawl", *start, *words)
    memory = 0

    def served() -> list[float]:
        nonlocal memory
        with suppress(OSError, TypeError):  # it may be over
            memory = max(memory, _peak(crawl.pid))
        return [moment for moment, url in honest.log() if moment >= since and url in wanted]

    def everything() -> bool:
        time.sleep(0.2)
        return crawl.over or (
            len(served()) >= len(wanted) and time.monotonic() - since >= AT_LEAST * bool(hostile)
        )

    wait_until(everything, "the honest pages", 600)
    moments = served()
    for _ in range(2):
        crawl.signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            crawl.process.wait(5)
    ended = crawl.wait()
    assert "Traceback" not in ended.err, ended.err
    begun = min(
        moment for moment, _ in (*honest.log(), *(hostile.log() if hostile else ())) if moment >= since
    )
    [job, *_] = shell.jobs()
    items = Counter(str(item["url"]) for item in shell.items(job.id))
    dead = shell.ask(lambda frontier: frontier.dead_groups(Selection()))
    return Crawled(
        sorted(moment - begun for moment in moments),
        memory,
        Counter({url: count for url, count in items.items() if url in wanted}),
        dict(job.errors),
        dead,
    )


def _peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) // 1024


def test_honest_hosts_beside_hostile_ones(tmp_path: Path) -> None:
    alone, mixed = tmp_path / "alone", tmp_path / "mixed"
    alone.mkdir()
    mixed.mkdir()
    with Hosts("honest", HONEST, PAGES) as honest, Hosts("hostile", HOSTILE) as hostile:
        with Shell(alone) as shell:
            before = crawled(shell, honest, None)
        with Shell(mixed) as shell:
            beside = crawled(shell, honest, hostile)
            assert shell.check() == []
        came = {url.split("/")[2] for _, url in hostile.log()}
        told(before, beside, hostile.kinds, len(came))
        wanted = Counter(honest.pages)
    assert before.pages == wanted
    assert beside.pages == wanted, "an honest page is missing, or there twice"
    assert "internal" not in beside.errors
    assert len(came) >= 0.7 * HOSTILE, "the hostile ones were hardly visited"
    assert beside.at(0.95) <= 2 * before.at(0.95)
    assert beside.memory <= MEMORY


def told(before: Crawled, beside: Crawled, kinds: dict[str, str], came: int) -> None:
    print(
        f"\n{HONEST} honest hosts, {PAGES} pages each, rate {RATE}; {HOSTILE} hostile hosts, {came} visited"
    )
    print("| | alone | beside hostile hosts | ratio |\n|---|---|---|---|")
    for share in (0.5, 0.95, 1.0):
        one, other = before.at(share), beside.at(share)
        print(f"| p{share * 100:.0f} of honest pages | {one:.1f} s | {other:.1f} s | {other / one:.2f} |")
    print(f"| memory | {before.memory} MB | {beside.memory} MB | |")
    print("errors:", ", ".join(f"{name} {count}" for name, count in sorted(beside.errors.items())))
    by_kind: defaultdict[str, set[str]] = defaultdict(set)
    hosts = {url.split("/")[2]: name for url, name in kinds.items()}
    for group in beside.dead:
        by_kind[group.error].add(hosts.get(group.lane, group.lane))
    for error, names in sorted(by_kind.items()):
        print(f"dead by {error}: {', '.join(sorted(names))}")
