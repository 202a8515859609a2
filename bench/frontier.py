"""The frontier alone: claim + settle with a 500-byte item, adding, and claim latency as it grows.

    python -m bench.frontier [memory] [sqlite-full] [sqlite-normal] [redis] [postgres] [postgres-fast]
                             [--part cycle|pair|enqueue|growth|wide] [--batch 1,10,200] [--millions 5]
                             [--quick]

Batches of 200 (the part cycle: those of `--batch`), 1,000 lanes of width 8. "found 5" settles five links
a page, all on the page's own host, of which one is new. `pair` is one client process against two at
once. Servers are private: see `bench/servers.py`. A figure counts only if the job's counters say that
each request was done once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench import servers
from shoal.frontier.port import Backend
from shoal.model import Done, JobSpec, JobState, Lease, Release, Request
from shoal.registry import open_frontier

BATCH = 200
LANES = 1000
SMALL = 10_000
ITEM = b'{"url":"https://example.org/","text":"' + b"x" * 460 + b'"}'
PARTS = ("enqueue", "cycle", "pair", "growth", "wide")


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


def links(lease: Lease, found: int) -> list[Request]:
    """What a page links to: `found` URLs of its own host, of which the last is new."""
    if not found:
        return []
    request = lease.request
    head = request.url.rpartition("/")[0]
    new = Request(f"{head}/new-{lease.token}.html", request.job)
    return [Request(request.url, request.job)] * (found - 1) + [new]


async def cycle(frontier: Backend, total: int, found: int, batch: int = BATCH) -> dict[str, float]:
    """Claims and settles `total` requests; `per_second` is without the time to make the links."""
    claims: list[float] = []
    settles: list[float] = []
    done = 0
    cpu = 0.0
    began = time.perf_counter()
    while done < total:
        started, cpu0 = time.perf_counter(), time.process_time()
        claim = await frontier.claim(min(batch, total - done), worker="bench", lease_seconds=60, queues=None)
        claims.append(time.perf_counter() - started)
        cpu += time.process_time() - cpu0
        if not claim.leases:
            if claim.drained:
                raise SystemExit(f"ran dry after {done} of {total}")
            await frontier.wait(0.01)  # the other client holds the rest, or some of its lanes
            continue
        verdicts = [Done(lease, (ITEM,), links(lease, found)) for lease in claim.leases]
        started, cpu0 = time.perf_counter(), time.process_time()
        lost = (await frontier.settle(verdicts)).lost
        settles.append(time.perf_counter() - started)
        cpu += time.process_time() - cpu0
        assert not lost
        done += len(verdicts)
    spent = sum(claims) + sum(settles)
    return {
        "began": began,
        "ended": time.perf_counter(),
        "per_second": done / spent,
        "cpu_us": cpu / done * 1e6,
        "claim_p50_ms": median(claims) * 1e3,
        "settle_p50_ms": median(settles) * 1e3,
    }


async def prove(frontier: Backend, job: str, total: int, found: int) -> None:
    """Ends the run unless `total` requests were done, each once, and everything found is there."""
    counts = (await frontier.job(job)).counts
    new = total if found else 0
    told = (counts.done, counts.items, counts.added, counts.known, counts.leased, counts.stale)
    if told != (total, total, total + new, new * (found - 1), 0, 0):
        raise SystemExit(f"the counters of {job} are wrong: {counts}")


async def spread(frontier: Backend, waiting: int, lanes: int) -> None:
    """So many URLs on so many lanes, of which 99 % are not ready for an hour."""
    await frontier.open_job("growth", JobSpec(gap=3600.0, width=1))
    await fill(frontier, "growth", lanes, waiting)
    busy = lanes - lanes // 100
    while busy:
        claim = await frontier.claim(min(500, busy), worker="bench", lease_seconds=86_400)
        busy -= len(claim.leases)
        await frontier.settle([Release(lease) for lease in claim.leases])


async def claim_ten(frontier: Backend) -> float:
    """Seconds of one claim(10)."""
    started = time.perf_counter()
    claim = await frontier.claim(10, worker="bench", lease_seconds=86_400)
    seconds = time.perf_counter() - started
    assert len(claim.leases) == 10
    return seconds


async def measure_cycle(
    address: str, total: int, rounds: int, batches: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Medians of the rounds, for each size of batch. Small batches get fewer requests: a transaction each
    costs time."""
    told: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        for batch in batches:
            some = total if batch >= 100 else total // 4 if batch >= 10 else total // 10
            frontier = await open_frontier(servers.fresh(address, f"cycle-{batch}-{number}"))
            for found in (0, 5):
                name = f"found_{found}" if batch == BATCH else f"found_{found}_batch_{batch}"
                job = f"cycle-{found}"
                await frontier.open_job(job, JobSpec(gap=0.0, width=8))
                await fill(frontier, job, LANES, some)
                told.setdefault(name, []).append(await cycle(frontier, some, found, batch))
                await prove(frontier, job, some, found)
                await frontier.update_job(job, state=JobState.CANCELLED)
            await frontier.close()
    figures = ("per_second", "cpu_us", "claim_p50_ms", "settle_p50_ms")
    return {
        name: {figure: median(one[figure] for one in each) for figure in figures}
        for name, each in told.items()
    }


def measure_pair(address: str, total: int, rounds: int) -> dict[str, Any]:
    """One client process, then two at once, with the same requests to do between them; medians."""
    result = {}
    for found in (0, 5):
        ones: list[float] = []
        twos: list[float] = []
        for number in range(rounds):
            for clients, rates in ((1, ones), (2, twos)):
                place = servers.fresh(address, f"pair-{found}-{number}-{clients}")
                rates.append(together(place, total, found, clients))
        ratios = [two / one for one, two in zip(ones, twos, strict=True)]
        result[f"found_{found}"] = {"one": median(ones), "two": median(twos), "ratio": median(ratios)}
    return result


def together(address: str, total: int, found: int, clients: int) -> float:
    """Requests a second of so many client processes, from the first to begin to the last to end."""
    context = multiprocessing.get_context("spawn")
    asyncio.run(_prepare(address, total))
    start = context.Barrier(clients)
    answers = context.SimpleQueue()
    ends = (address, total // clients, found, start, answers)
    processes = [context.Process(target=_client, args=ends) for _ in range(clients)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a client failed")
    each: list[dict[str, float]] = [answers.get() for _ in processes]
    asyncio.run(_finish(address, total, found))
    return total / (max(one["ended"] for one in each) - min(one["began"] for one in each))


async def _prepare(address: str, total: int) -> None:
    frontier = await open_frontier(address)
    await frontier.open_job("pair", JobSpec(gap=0.0, width=8))
    await fill(frontier, "pair", LANES, total)
    await frontier.close()


async def _finish(address: str, total: int, found: int) -> None:
    frontier = await open_frontier(address)
    await prove(frontier, "pair", total, found)
    await frontier.close()


def _client(address: str, share: int, found: int, start: Any, answers: Any) -> None:
    async def work() -> dict[str, float]:
        frontier = await open_frontier(address)
        await asyncio.to_thread(start.wait, 60)
        result = await cycle(frontier, share, found)
        await frontier.close()
        return result

    answers.put(asyncio.run(work()))


async def measure_growth(address: str, big: int, lanes: int) -> dict[str, float]:
    """Claims where few URLs wait against claims where many do, in turn: the machine's speed moves.

    One percent of the few lanes is good for ten claims, so there are several such frontiers.
    """
    many = await open_frontier(servers.fresh(address, "growth-many"))
    await spread(many, big, lanes)
    few_lanes = min(SMALL, lanes)
    turns = few_lanes // 1000
    small, large = [], []
    for number in range(min(6, lanes // 1000 // turns)):
        few = await open_frontier(servers.fresh(address, f"growth-few-{number}"))
        await spread(few, SMALL, few_lanes)
        for _ in range(turns):
            small.append(await claim_ten(few))
            large.append(await claim_ten(many))
        await few.close()
    await many.close()
    low, high = median(small) * 1e3, median(large) * 1e3
    return {"big": big, "lanes": lanes, "small_ms": low, "large_ms": high, "ratio": high / low}


async def measure_wide(address: str, lanes: int) -> dict[str, float]:
    """Claims of ten where a hundred lanes are ready against claims where very many are, in turn."""
    frontiers = []
    for name, count in (("few", 100), ("many", lanes)):
        frontier = await open_frontier(servers.fresh(address, f"wide-{name}"))
        await frontier.open_job("wide", JobSpec(gap=0.0, width=100))
        await fill(frontier, "wide", count, max(count, 1000))
        frontiers.append(frontier)
    spent: list[list[float]] = [[], []]
    for _ in range(60):
        for frontier, times in zip(frontiers, spent, strict=True):
            times.append(await claim_ten(frontier))
    for frontier in frontiers:
        await frontier.close()
    low, high = (median(times) * 1e3 for times in spent)
    return {"lanes": lanes, "small_ms": low, "large_ms": high, "ratio": high / low}


async def measure_enqueue(address: str, total: int) -> dict[str, float]:
    frontier = await open_frontier(address)
    await frontier.open_job("bulk", JobSpec(gap=0.0, width=8))
    seconds = await fill(frontier, "bulk", LANES, total)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counts = (await frontier.job("bulk")).counts
    if counts.waiting != total:
        raise SystemExit(f"{total} were added, and these are there: {counts}")
    await frontier.close()
    return {"urls": total, "seconds": seconds, "rss_peak_mb": peak}


def measure(
    address: str, part: str, *, quick: bool, millions: float, batches: Sequence[int] = (BATCH,)
) -> dict[str, Any]:
    """One part on one frontier."""
    if part == "enqueue":
        total = 200_000 if quick else 1_000_000
        return asyncio.run(measure_enqueue(servers.fresh(address, "enqueue"), total))
    if part == "growth":
        big, lanes = (200_000, 40_000) if quick else (round(millions * 1_000_000), 100_000)
        return asyncio.run(measure_growth(address, big, lanes))
    if part == "wide":
        return asyncio.run(measure_wide(address, 10_000 if quick else 100_000))
    if part == "pair":
        return measure_pair(address, *((20_000, 1) if quick else (40_000, 3)))
    return asyncio.run(measure_cycle(address, *((40_000, 1) if quick else (60_000, 3)), batches))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.frontier", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=["memory", "sqlite-full", "sqlite-normal"])
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--batch", default=str(BATCH), help="sizes of batches of the part cycle: 1,10,200")
    parser.add_argument("--millions", type=float, default=1.0, help="waiting URLs of the part growth")
    parser.add_argument("--quick", action="store_true", help="small sizes: for trying, not for the record")
    options = parser.parse_args()
    batches = [int(size) for size in options.batch.split(",")]
    for name in options.names:
        result: dict[str, Any] = {"frontier": name}
        for part in options.part or PARTS:
            # In one process nothing can come in pairs, and SQLite has one writer.
            if part == "pair" and name not in servers.SERVED:
                continue
            with ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-"))
                address = servers.frontier(name, stack, folder)
                quick, millions = options.quick, options.millions
                result[part] = measure(address, part, quick=quick, millions=millions, batches=batches)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
