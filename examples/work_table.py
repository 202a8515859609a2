"""A work table without the table: the functions that people write over SQL, on any frontier.

python examples/work_table.py [FRONTIER]

Two workers share a run; a third takes a batch and is never heard of again. See docs/guides/work-table.md.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from shoal import urls
from shoal.frontier.port import Backend
from shoal.model import Added, Dead, Done, Failure, JobSpec, Lease, Request, Retry
from shoal.registry import open_frontier

# No politeness here: your code decides what it fetches and when. With gap=1.0 and width=1 the frontier
# would hand out one URL of each host a second, to all workers together.
SPEC = JobSpec(scraper="mine", gap=0.0, width=10_000, dedicated=True, retries=2, lease=300.0)


async def enqueue_urls(frontier: Backend, run: str, wanted: Iterable[str], priority: int = 5) -> int:
    """INSERT … ON CONFLICT DO NOTHING. Answers how many were new."""
    await frontier.open_job(run, SPEC)
    requests = [Request(urls.canonical(url), run, priority=priority) for url in wanted]
    return (await frontier.add(requests)).count(Added.NEW)


async def claim_batch(
    frontier: Backend, run: str, worker: str, size: int = 10, lease_seconds: float = SPEC.lease
) -> list[Lease]:
    """SELECT … FOR UPDATE SKIP LOCKED, then UPDATE … SET claimed_by. Nobody else gets these. None may be
    free at this moment; that nothing is left is told by the stats."""
    claim = await frontier.claim(size, worker=worker, lease_seconds=lease_seconds, job=run)
    return list(claim.leases)


async def complete_url(frontier: Backend, lease: Lease, result: dict[str, Any]) -> bool:
    """The result and the end of the claim in one transaction. False: it was somebody else's by then,
    and nothing was stored."""
    settled = await frontier.settle([Done(lease, items=[json.dumps(result).encode()])])
    return not settled.lost


async def fail_url(frontier: Backend, lease: Lease, why: str, again_after: float = 60.0) -> bool:
    """Try it again later, or give it up after SPEC.max_attempts failures. False as above."""
    failure = Failure("handler_error", why)
    last = lease.request.attempt + 1 >= SPEC.max_attempts
    settled = await frontier.settle([Dead(lease, failure) if last else Retry(lease, again_after, failure)])
    return not settled.lost


async def release_expired_leases(frontier: Backend, run: str) -> int:
    """UPDATE … WHERE lease_until < now(). Nobody has to call it: every claim does it first. Asking for
    no URL does it and nothing else. Answers how many came back."""
    before = (await frontier.job(run)).counts.leased
    await frontier.claim(0, worker="reaper", lease_seconds=1.0, job=run)
    return before - (await frontier.job(run)).counts.leased


async def get_queue_stats(frontier: Backend, run: str) -> dict[str, int]:
    """SELECT status, count(*) … GROUP BY status. Counted as they change, so asking is cheap."""
    counts = (await frontier.job(run)).counts
    pending, claimed = counts.waiting + counts.delayed, counts.leased
    return {
        "pending": pending,
        "claimed": claimed,
        "completed": counts.done,
        "failed": counts.dead + counts.expired,
        "remaining": pending + claimed,
    }


async def work(frontier: Backend, run: str, worker: str) -> int:
    """A worker: until nothing is left. Your own fetching and parsing goes in the middle."""
    done = 0
    while (await get_queue_stats(frontier, run))["remaining"]:
        batch = await claim_batch(frontier, run, worker, size=5)
        for lease in batch:
            if lease.request.url.endswith("7"):
                await fail_url(frontier, lease, "sevens are hard", again_after=0.0)
            else:
                done += await complete_url(frontier, lease, {"url": lease.request.url})
        if not batch:
            await frontier.wait(1.0)  # or less, when there is news
    return done


async def main(address: str) -> None:
    run = "nightly"
    frontier = await open_frontier(address)
    try:
        wanted = [f"https://shop.example/{number}" for number in range(50)]
        print("new:", await enqueue_urls(frontier, run, wanted))
        print("new, the second time:", await enqueue_urls(frontier, run, wanted))
        lost = await claim_batch(frontier, run, "host_1_1", size=10, lease_seconds=1.0)
        print("taken by one that dies:", len(lost))
        await asyncio.sleep(1.0)  # until its lease has run out
        print("came back:", await release_expired_leases(frontier, run))
        print("completed:", sum(await asyncio.gather(*(work(frontier, run, f"host_{n}_1") for n in (2, 3)))))
        print("too late:", not await complete_url(frontier, lost[0], {"url": "of the dead"}))
        print(json.dumps(await get_queue_stats(frontier, run)))
    finally:
        await frontier.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(f"{folder}/work.db"))
