"""Dispatch by RabbitMQ beside Celery on the same broker, and a crawl over it beside a direct one.

    python -m bench.dispatch [--total 40000] [--rounds 3] [--no-crawl] [--no-celery]

No-op visits: a pump and two consumers in a process each, over a private Redis (appendonly everysec) and
a private RabbitMQ; publishes are confirmed, settles store a 500-byte item each, and a message is
acknowledged after its settle. Celery: the producer in one process, `worker -c 2` with prefork, late
acks, no result backend, no confirms, a task that does nothing. Both begin with an empty broker and
produce while they consume. Celery's end is when nothing is ready any more, which is in its favour.

The crawl: the documentation site, two worker processes, Redis as the frontier, with and without
the broker between. Ratios of one run are what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from uuid import uuid4

from shoal import events
from shoal.dispatch.consumer import Consumer
from shoal.dispatch.pump import Pump
from shoal.dispatch.rabbitmq import RabbitDispatch
from shoal.dispatch.routes import URL_QUEUE, Routes
from shoal.model import Done, JobSpec, Request
from shoal.registry import open_frontier
from tests.rig.rabbitmq_server import rabbitmq_server
from tests.rig.redis_server import redis_server

HERE = Path(__file__).parent
PEERS = HERE / ".work" / "peers-venv" / "bin"
ITEM = b'{"url":"https://example.org/","text":"' + b"x" * 460 + b'"}'
PREFETCH = {20: 50, 1: 300}
CONSUMERS = 2
PAGES = 15_000
"""Enough that the start of the workers hardly counts."""
LANES = 1000


class Measured(NamedTuple):
    rate: float
    cpu_us: float
    """Processor time of clients and servers for one URL."""


def say(event: events.Event) -> None:
    """A measurement with troubles in it is none."""
    print(event, file=sys.stderr, flush=True)


async def fill(frontier_url: str, total: int) -> None:
    frontier = await open_frontier(frontier_url)
    await frontier.open_job("bench", JobSpec(gap=0.0, width=1000))
    requests = [Request(f"https://h{n % LANES}.example/page-{n:08d}.html", "bench") for n in range(total)]
    for start in range(0, total, 20_000):
        await frontier.add(requests[start : start + 20_000])
    await frontier.close()


async def pump(frontier_url: str, broker: str, batch: int) -> None:
    """Until it is told to end; then it tells what it took."""
    frontier = await open_frontier(frontier_url)
    cpu = time.process_time()
    pump = Pump(
        *(frontier, RabbitDispatch(broker)),
        name="bench",
        routes=Routes(()),
        watch=say,
        queues=["scraping"],
        batch=batch,
        prefetch=PREFETCH[batch],
    )
    pumping = asyncio.create_task(pump.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, pumping.cancel)
    await asyncio.gather(pumping, return_exceptions=True)
    print(time.process_time() - cpu)


async def consume(frontier_url: str, broker: str, batch: int) -> None:
    """Until nothing is left; tells when it began, when it ended and how much it did."""
    frontier = await open_frontier(frontier_url)
    dispatch = RabbitDispatch(broker, [URL_QUEUE], prefetch=PREFETCH[batch])
    done = 0
    began = ended = cpu = 0.0
    name = f"bench{os.getpid()}"

    async def work(consumer: Consumer) -> None:
        nonlocal done, began, ended, cpu
        while True:
            claim = await consumer.claim(200, worker=name, lease_seconds=60.0)
            if not claim.leases:
                if claim.wake_at is None:
                    return
                await consumer.wait(0.05)
                continue
            if not began:
                began, cpu = time.time(), time.process_time()
            await consumer.settle([Done(lease, (ITEM,)) for lease in claim.leases])
            done += len(claim.leases)
            ended = time.time()

    async with Consumer(frontier, dispatch, watch=say, limit=PREFETCH[batch]) as consumer:
        # Like a worker, which takes the next while the last are being settled.
        await asyncio.gather(work(consumer), work(consumer))
    print(json.dumps({"began": began, "ended": ended, "done": done, "cpu": time.process_time() - cpu}))
    await dispatch.close()
    await frontier.close()


def cpu_of(pids: Sequence[int]) -> float:
    """Seconds of processor that these processes have used, all their threads."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def ours(redis_url: str, server: str, batch: int, total: int, servers: Sequence[int] = ()) -> Measured:
    """A pump and the consumers. `servers` are the processes whose work is counted beside theirs."""
    name = uuid4().hex
    frontier, broker = f"{redis_url}?prefix={name}", f"{server}?prefix={name}."
    asyncio.run(fill(frontier, total))
    base = [sys.executable, "-m", "bench.dispatch", "--frontier", frontier, "--broker", broker]
    base += ["--batch", str(batch)]
    before = cpu_of(servers)
    pipe = subprocess.PIPE
    sending = subprocess.Popen([*base, "--part", "pump"], cwd=HERE.parent, stdout=pipe)
    try:
        receiving = [
            subprocess.Popen([*base, "--part", "consume"], cwd=HERE.parent, stdout=pipe)
            for _ in range(CONSUMERS)
        ]
        rows = [json.loads(process.communicate()[0]) for process in receiving]
    finally:
        sending.terminate()
        told = sending.communicate()[0]
    if sum(row["done"] for row in rows) != total:
        raise SystemExit(f"not everything was done once: {rows}")
    busy = [row for row in rows if row["done"]]
    seconds = max(row["ended"] for row in busy) - min(row["began"] for row in busy)
    cpu = sum(row["cpu"] for row in busy) + float(told) + cpu_of(servers) - before
    return Measured(total / seconds, cpu / total * 1e6)


def celery(server: str, total: int, servers: Sequence[int] = ()) -> Measured:
    """A task that does nothing."""
    queue = f"celery-{uuid4().hex}"
    env = {**os.environ, "BROKER": server, "QUEUE": queue, "PYTHONPATH": str(HERE / "peers")}
    words = ["-A", "celery_noop", "worker", "-c", "2", "-Q", queue, "--loglevel", "WARNING"]
    words += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    quiet = subprocess.DEVNULL
    before = cpu_of(servers)
    worker = subprocess.Popen([str(PEERS / "celery"), *words], env=env, stdout=quiet, stderr=quiet)
    try:
        script = [str(PEERS / "python"), str(HERE / "peers" / "celery_noop.py"), str(total), str(worker.pid)]
        out = subprocess.run(script, env=env, capture_output=True, check=True, text=True)
    finally:
        worker.terminate()
        worker.wait()
    rate, cpu = map(float, out.stdout.split())
    return Measured(rate, (cpu + cpu_of(servers) - before) / total * 1e6)


def crawl(url: str, frontier: str, broker: str, pages: int) -> float:
    folder = HERE / ".work" / "runs" / f"dispatch-{uuid4().hex}"
    folder.mkdir(parents=True)
    port = url.rstrip("/").rpartition(":")[2]
    starts = [f"http://127.0.0.{n}:{port}/" for n in range(1, 17)]
    flags = (
        "--allow-private --rate none --per-host 16 --concurrency 64 --no-robots --json --quiet --workers 2"
    )
    command = [sys.executable, "-m", "shoal", "crawl", *starts, *flags.split()]
    command += ["--fields", "title,links", "--max-pages", str(pages), "--out", "pages.jsonl"]
    env = {**os.environ, "SHOAL_FRONTIER": frontier, "SHOAL_DISPATCH": broker}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
    closing = json.loads(done.stdout.strip().splitlines()[-1])
    if closing["status"] != "done":
        raise SystemExit(f"a run went wrong: {closing}\n{done.stderr}")
    shutil.rmtree(folder)
    return float(closing["pages_per_second"])


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(total: int, rounds: int, *, with_celery: bool, with_crawl: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with rabbitmq_server() as server, redis_server() as redis:
        assert redis._process is not None
        servers = (server.pid, redis._process.pid)
        rows: dict[str, list[Measured]] = {"20": [], "1": [], "celery": []}
        for number in range(rounds):
            rows["20"].append(ours(redis.url, server.url, 20, total, servers))
            rows["1"].append(ours(redis.url, server.url, 1, total // 5, servers))
            if with_celery:
                rows["celery"].append(celery(server.url, total // 20, servers))
            told = (
                f"{name} {row[-1].rate:,.0f}/s {row[-1].cpu_us:.0f} µs" for name, row in rows.items() if row
            )
            tell(f"round {number + 1}: " + ", ".join(told))
        for name, row in rows.items():
            if row:
                results[name] = {
                    "rate": round(median(each.rate for each in row)),
                    "cpu_us": round(median(each.cpu_us for each in row), 1),
                }
        if with_celery:
            for name in ("20", "1"):
                pairs = list(zip(rows[name], rows["celery"], strict=True))
                results[f"{name} to celery"] = {
                    "rate": round(median(mine.rate / theirs.rate for mine, theirs in pairs), 1),
                    "cpu": round(median(theirs.cpu_us / mine.cpu_us for mine, theirs in pairs), 1),
                }
        if with_crawl:
            results["crawl to direct"] = crawls(redis.url, server.url, rounds)
    return results


def crawls(redis_url: str, broker: str, rounds: int) -> float:
    """Pages a second over RabbitMQ to those of workers that claim, the median of the rounds."""
    from bench import site

    ratios = []
    with site.serve(core=0, hosts=16) as url:
        for number in range(rounds):
            direct = crawl(url, f"{redis_url}?prefix={uuid4().hex}", "", PAGES)
            # The same queues each time: a fleet makes them once.
            over = crawl(url, f"{redis_url}?prefix={uuid4().hex}", f"{broker}?prefix=crawl.", PAGES)
            tell(f"round {number + 1}: direct {direct:,.0f}, over RabbitMQ {over:,.0f} pages/s")
            ratios.append(over / direct)
    return round(median(ratios), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-crawl", action="store_true")
    parser.add_argument("--only-crawl", action="store_true")
    parser.add_argument("--no-celery", action="store_true")
    parser.add_argument("--part", choices=["pump", "consume"], help=argparse.SUPPRESS)
    parser.add_argument("--frontier", help=argparse.SUPPRESS)
    parser.add_argument("--broker", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=20, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "pump":
        asyncio.run(pump(options.frontier, options.broker, options.batch))
        return
    if options.part == "consume":
        asyncio.run(consume(options.frontier, options.broker, options.batch))
        return
    if options.only_crawl:
        with rabbitmq_server() as server, redis_server() as redis:
            print(json.dumps({"crawl to direct": crawls(redis.url, server.url, options.rounds)}))
        return
    found = measure(
        options.total, options.rounds, with_celery=not options.no_celery, with_crawl=not options.no_crawl
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
