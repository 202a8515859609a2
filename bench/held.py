"""What a transaction that stays open costs the PostgreSQL frontier: `python -m bench.held [--quick]`.

While any transaction of the database is open, rows that were deleted since cannot be cleaned away, and
whoever reads past them reads them. So one client claims and settles all the time (a 500-byte item and one
new link a page: as many wait at the end as at the beginning) while another connection opens a snapshot,
holds it for a minute and goes away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import ExitStack
from typing import Any

import asyncpg

from bench import servers
from bench.frontier import BATCH, ITEM, LANES, fill, links
from shoal.frontier.port import Backend
from shoal.model import Done, JobSpec
from shoal.registry import open_frontier

STOCK = 20_000
PHASES = {"before": 20.0, "held": 60.0, "after": 60.0}
QUICK = {"before": 3.0, "held": 6.0, "after": 3.0}
SLICES = 3
"""Each phase is told in thirds: what counts is where it is going. The server looks for rows to clean once a
minute, so the end of the hold shows in the last third."""


async def work(frontier: Backend, seconds: float) -> tuple[float, int]:
    """Claims and settles for so long; requests a second, and how many."""
    started, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds:
        claim = await frontier.claim(BATCH, worker="bench", lease_seconds=60)
        lost = (await frontier.settle([Done(lease, (ITEM,), links(lease, 1)) for lease in claim.leases])).lost
        assert claim.leases and not lost
        done += len(claim.leases)
    return done / spent, done


async def measure(address: str, phases: dict[str, float]) -> dict[str, Any]:
    """Rates of each third of each phase, and the dead rows at the end of each phase."""
    frontier = await open_frontier(servers.fresh(f"{address}?schema=FILE", "held"))
    other = await asyncpg.connect(address)
    await frontier.open_job("held", JobSpec(gap=0.0, width=8))
    await fill(frontier, "held", LANES, STOCK)
    result: dict[str, Any] = {}
    total = 0
    for phase, seconds in phases.items():
        if phase == "held":
            await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
        rates = []
        for _ in range(SLICES):
            rate, done = await work(frontier, seconds / SLICES)
            rates.append(rate)
            total += done
        if phase == "held":
            await other.execute("COMMIT")
        dead = await other.fetchval("SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables")
        result[phase] = {"seconds": seconds, "rates": rates, "dead_rows": dead}
        print(f"{phase}: {', '.join(f'{rate:,.0f}' for rate in rates)} a second", file=sys.stderr, flush=True)
    counts = (await frontier.job("held")).counts
    if (counts.done, counts.items, counts.waiting, counts.stale) != (total, total, STOCK, 0):
        raise SystemExit(f"{total} were done, and the counters say {counts}")
    await other.close()
    await frontier.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.held", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    options = parser.parse_args()
    with ExitStack() as stack:
        address = servers.start("postgres", stack)
        print(json.dumps(asyncio.run(measure(address, QUICK if options.quick else PHASES))))


if __name__ == "__main__":
    main()
