"""shoal's side of `bench.queues`: `python -m bench.noop ADDRESS COUNT LEDGER loop|worker BATCH`.

`loop` claims a batch, does nothing with each request, and settles the batch: what a worker does at the
frontier. `worker` is the whole engine, keeper and all, with a fetcher that answers at once.
"""

from __future__ import annotations

import asyncio
import sys
import time

from bench.peers.ledger import Ledger, arguments, report, url
from shoal import events
from shoal.engine.context import JobContext
from shoal.engine.worker import Worker, WorkerSettings
from shoal.fetch.port import Ask, Limits
from shoal.frontier.port import Backend, Frontier, Notes
from shoal.model import Done, JobSpec, Request, Response
from shoal.politeness.permission import Permission
from shoal.politeness.scope import Scope
from shoal.registry import open_frontier
from shoal.scrape.links import Links
from shoal.scrape.page import Page
from shoal.scrape.router import Scraped

JOB = "noop"
SPEC = JobSpec(gap=0.0, width=8, robots=False, scope="any")


class Nowhere:
    """A fetcher that answers at once, with nothing."""

    async def fetch(self, ask: Ask) -> Response:
        return Response(ask.url, 200, (), b"", 0.0)

    async def close(self) -> None: ...


async def loop(frontier: Backend, count: int, batch: int, ledger: Ledger) -> None:
    """A task is noted when the frontier has acknowledged it, not before."""
    done = 0
    while done < count:
        claim = await frontier.claim(batch, worker="bench", lease_seconds=60)
        verdicts = []
        for lease in claim.leases:
            await nothing(lease.request.url)
            verdicts.append(Done(lease))
        lost = (await frontier.settle(verdicts)).lost
        assert claim.leases and not lost
        for lease in claim.leases:
            ledger.note(lease.request.url)
        done += len(verdicts)


async def nothing(task: str) -> None: ...


async def work(frontier: Backend, address: str, concurrency: int, ledger: Ledger) -> None:
    fetcher = Nowhere()

    async def scrape(page: Page) -> Scraped:
        ledger.note(page.request.url)
        return Scraped([])

    async def context_for(job: str) -> JobContext:
        permission = Permission(fetcher, frontier.notes)
        return JobContext(job, SPEC, Scope(SPEC), scrape, fetcher, permission, Limits(), frozenset(), Links())

    async def again() -> tuple[Frontier, Notes]:
        opened = await open_frontier(address)
        return opened, opened.notes

    worker = Worker(
        frontier,
        frontier.notes,
        context_for,
        WorkerSettings(name="bench", concurrency=concurrency, drain=True),
        watch=events.ignore,
        keeper_frontier=again,
    )
    await worker.run()


async def main() -> None:
    address, count, path = arguments()
    way, batch = sys.argv[4], int(sys.argv[5])
    frontier = await open_frontier(address)
    await frontier.open_job(JOB, SPEC)
    started = time.perf_counter()
    for first in range(0, count, 20_000):
        some = range(first, min(first + 20_000, count))
        await frontier.add([Request(url(number), JOB) for number in some])
    enqueued = time.perf_counter() - started
    ledger = Ledger(path)
    if way == "loop":
        await loop(frontier, count, batch, ledger)
    else:
        await work(frontier, address, batch, ledger)
    counts = (await frontier.job(JOB)).counts
    await frontier.close()
    report(enqueued, count - counts.done + counts.stale)


if __name__ == "__main__":
    asyncio.run(main())
