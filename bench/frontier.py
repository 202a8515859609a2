"""The frontier alone: claim + settle with a 500-byte item, adding, and claim latency as it grows.

    python bench/frontier.py [memory] [sqlite-full] [sqlite-normal] [redis] [--quick]

One client process, batches of 200, 1,000 lanes of width 8. "found 5" settles five links a page,
all on the page's own host, of which one is new. Redis is a private server with appendonly everysec.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from shoal.frontier.port import Backend
from shoal.model import Done, JobSpec, Release, Request
from shoal.registry import open_frontier
from shoal.testing.redis_server import redis_server

BATCH = 200
ITEM = b'{"url":"https://example.org/","text":"' + b"x" * 460 + b'"}'


def url(lane: int, page: int) -> str:
    return f"https://host-{lane:06d}.example/catalogue/section-{page % 97}/page-{page:08d}.html"


async def fill(frontier: Backend, job: str, lanes: int, total: int, *, chunk: int = 20_000) -> float:
    """Adds `total` URLs spread over `lanes` hosts, as a sorted URL file would; seconds taken."""
    started = time.perf_counter()
    per_lane = max(1, total // lanes)
    batch: list[Request] = []
    for number in range(total):
        batch.append(Request(url(number // per_lane, number % per_lane), job))
        if len(batch) == chunk:
            await frontier.add(batch)
            batch = []
    if batch:
        await frontier.add(batch)
    return time.perf_counter() - started


async def cycle(frontier: Backend, job: str, total: int, found: int) -> dict[str, float]:
    """Claims and settles `total` requests; rate without the time to make the links."""
    claims: list[float] = []
    settles: list[float] = []
    done = fresh = 0
    cpu = 0.0
    while done < total:
        started, cpu0 = time.perf_counter(), time.process_time()
        claim = await frontier.claim(BATCH, worker="bench", lease=60, queues=None)
        claims.append(time.perf_counter() - started)
        cpu += time.process_time() - cpu0
        if not claim.leases:
            raise SystemExit(f"ran dry after {done}")
        verdicts = []
        for lease in claim.leases:
            links: list[Request] = []
            if found:
                head = lease.request.url.rpartition("/")[0]
                fresh += 1
                known = lease.request.url
                links = [Request(known, job)] * (found - 1) + [Request(f"{head}/new-{fresh:09d}.html", job)]
            verdicts.append(Done(lease, (ITEM,), links))
        started, cpu0 = time.perf_counter(), time.process_time()
        lost = (await frontier.settle(verdicts)).lost
        settles.append(time.perf_counter() - started)
        cpu += time.process_time() - cpu0
        assert not lost
        done += len(verdicts)
    spent = sum(claims) + sum(settles)
    return {
        "per_second": done / spent,
        "cpu_us": cpu / done * 1e6,
        "claim_p50_ms": median(claims) * 1e3,
        "settle_p50_ms": median(settles) * 1e3,
    }


async def latency(frontier: Backend, waiting: int, lanes: int) -> float:
    """Median claim(10) in ms with 99 % of the lanes not ready."""
    job = f"latency-{waiting}"
    await frontier.open_job(job, JobSpec(gap=3600.0, width=1))
    await fill(frontier, job, lanes, waiting)
    ready = lanes // 100
    taken = 0
    while taken < lanes - ready:
        claim = await frontier.claim(min(500, lanes - ready - taken), worker="bench", lease=86_400)
        taken += len(claim.leases)
        await frontier.settle([Release(lease) for lease in claim.leases])
    spent = []
    for _ in range(min(60, ready // 10)):
        started = time.perf_counter()
        claim = await frontier.claim(10, worker="bench", lease=86_400)
        spent.append(time.perf_counter() - started)
        assert len(claim.leases) == 10
    return median(spent) * 1e3


async def measure(name: str, address: str, quick: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"frontier": name}
    total = 60_000 if quick else 200_000
    frontier = await open_frontier(address)
    for found in (0, 5):
        job = f"cycle-{found}"
        await frontier.open_job(job, JobSpec(gap=0.0, width=8))
        await fill(frontier, job, 1000, total)
        result[f"found_{found}"] = await cycle(frontier, job, total, found)
        await frontier.cancel(job)
    await frontier.close()
    return result


async def measure_growth(address: str, quick: bool, stem: str) -> dict[str, Any]:
    small, big = 10_000, 200_000 if quick else 1_000_000
    lanes = 10_000 if quick else 100_000
    result: dict[str, Any] = {}
    for waiting in (small, big):
        frontier = await open_frontier(address.replace("FILE", f"{stem}-{waiting}"))
        result[str(waiting)] = await latency(frontier, waiting, min(lanes, waiting))
        await frontier.close()
    result["ratio"] = result[str(big)] / result[str(small)]
    return result


async def measure_enqueue(address: str, quick: bool) -> dict[str, float]:
    total = 200_000 if quick else 1_000_000
    frontier = await open_frontier(address)
    await frontier.open_job("bulk", JobSpec(gap=0.0, width=8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = await fill(frontier, "bulk", 1000, total)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    await frontier.close()
    return {"urls": total, "seconds": seconds, "rss_before_mb": before, "rss_peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["memory", "sqlite-full", "sqlite-normal"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=["cycle", "growth", "enqueue"], action="append")
    options = parser.parse_args()
    parts = options.part or ["enqueue", "cycle", "growth"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-"))
        for name in options.names:
            level = name.partition("-")[2]
            address = "memory:" if name == "memory" else f"sqlite:///{folder}/FILE.db?synchronous={level}"
            if name == "redis":
                address = f"{stack.enter_context(redis_server()).url}?prefix=FILE"
            result: dict[str, Any] = {"frontier": name}
            if "enqueue" in parts:
                result["enqueue"] = asyncio.run(
                    measure_enqueue(address.replace("FILE", name + "e"), options.quick)
                )
            if "cycle" in parts:
                result |= asyncio.run(measure(name, address.replace("FILE", name + "c"), options.quick))
            if "growth" in parts and name != "sqlite-normal":
                result["growth"] = asyncio.run(measure_growth(address, options.quick, name))
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
