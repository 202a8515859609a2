"""Several processes: real workers in real time, one of which is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec

from shoal.frontier.port import Backend
from shoal.model import JobSpec, JobState
from shoal.testing.chapters.chapter import Chapter, add_all, pages, requests
from shoal.testing.hammer import HOLD, Claimed, Line, Settled, links_of
from shoal.testing.harness import Harness

WIDE, POLITE = "http://wide.example", "http://polite.example"
WIDTH, GAP = 3, 0.15
Worker = subprocess.Popen[bytes]
SLACK = HOLD / 2
"""Seconds of tolerance. A worker logs the end of a visit when it starts to settle, and the frontier may have
read its clock for the next claim while that call was in flight. That is never half a visit early."""


class Processes(Chapter):
    async def test_a_killed_worker_loses_nothing_and_breaks_no_pace(
        self, harness: Harness, tmp_path: Path
    ) -> None:
        from shoal.registry import open_frontier

        frontier = await open_frontier(harness.url)
        try:
            await frontier.open_job("wide", JobSpec(gap=0.0, width=WIDTH))
            await frontier.open_job("polite", JobSpec(gap=GAP, width=1))
            await add_all(frontier, requests(pages(40, host=WIDE), job="wide"))
            await add_all(frontier, requests(pages(6, host=POLITE), job="polite"))
            logs = [tmp_path / f"worker-{number}.log" for number in range(3)]
            with ExitStack() as stack:
                workers = [stack.enter_context(start_worker(harness.url, log)) for log in logs]
                stack.callback(kill_all, workers)
                victim = await kill_one_at_work(workers, logs)
                codes = [await exit_code(worker) for worker in workers]
                assert codes == [-signal.SIGKILL if worker is victim else 0 for worker in workers]
            lines = [line for log in logs for line in read_log(log)]
            await examine(frontier, lines)
        finally:
            await frontier.close()


async def examine(frontier: Backend, lines: list[Line]) -> None:
    for job, start in (("wide", pages(40, host=WIDE)), ("polite", pages(6, host=POLITE))):
        expected = set(start).union(*(links_of(url) for url in start))
        found = await frontier.job(job)
        assert (found.counts.added, found.counts.done, found.state) == (
            len(expected),
            len(expected),
            JobState.DONE,
        )
        bodies = [item.body.decode() for item in await frontier.items(job, limit=10_000)]
        assert Counter(bodies) == Counter(expected), "each page stores its item once"
    assert await frontier.check() == []

    claims = [line for line in lines if isinstance(line, Claimed)]
    settled = {line.token: line for line in lines if isinstance(line, Settled)}
    tokens = [line.token for line in claims]
    assert len(tokens) == len(set(tokens)), "no token is given twice"
    accepted = Counter(line.url for line in claims if line.token in settled and not settled[line.token].lost)
    assert not [url for url, times in accepted.items() if times > 1], "each request is done once"
    assert len(claims) > len(accepted), "the victim must have died with a lease, or nothing was tried"

    by_lane: dict[str, list[Claimed]] = defaultdict(list)
    for line in sorted(claims, key=lambda line: line.token):
        by_lane[line.lane].append(line)
    times = [line.now for line in by_lane["polite.example"]]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert min(gaps) >= GAP - 0.002, "the gap holds between processes, in the order of the tokens"
    last = {line.url: line.token for line in sorted(claims, key=lambda line: line.token)}

    def ended(line: Claimed) -> float:
        if line.token in settled:
            return settled[line.token].at
        # The victim held the request until its lease ended. If no other worker got it afterwards, the victim
        # had settled it, and was killed before it could log that; the time is unknown.
        return line.now if last[line.url] == line.token else line.until

    for lane, width in (("wide.example", WIDTH), ("polite.example", 1)):
        assert most_at_once([(line.now, ended(line)) for line in by_lane[lane]]) <= width


def most_at_once(visits: list[tuple[float, float]]) -> int:
    steps = sorted([(begin, 1) for begin, _ in visits] + [(end - SLACK, -1) for _, end in visits])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def start_worker(url: str, log: Path) -> Worker:
    return subprocess.Popen([sys.executable, "-m", "shoal.testing.hammer", url, str(log)])


def kill_all(workers: list[Worker]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()


async def exit_code(worker: Worker) -> int:
    return await asyncio.wait_for(asyncio.to_thread(worker.wait), 60.0)


async def kill_one_at_work(workers: list[Worker], logs: list[Path]) -> Worker:
    """SIGKILL the first worker that has settled something and holds a lease.

    It may be any of them: on a busy machine one may start after the others have ended. The worker is stopped
    (SIGSTOP) before its log is read, or it could settle between the check and the kill. Real processes have
    no fake clock, so this wait polls.
    """
    async with asyncio.timeout(60.0):
        while True:
            for worker, log in zip(workers, logs, strict=True):
                if len(read_log(log)) < 8:
                    continue
                assert worker.poll() is None, "a worker ended before it could be killed"
                worker.send_signal(signal.SIGSTOP)
                if has_open_lease(read_log(log)):
                    worker.kill()
                    return worker
                worker.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.002)


def has_open_lease(lines: list[Line]) -> bool:
    claimed = {line.token for line in lines if isinstance(line, Claimed)}
    return bool(claimed - {line.token for line in lines if isinstance(line, Settled)})


def read_log(log: Path) -> list[Line]:
    if not log.exists():
        return []
    # A line without its end was cut by the kill: ignore it.
    whole = log.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]
