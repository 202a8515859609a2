"""PgQueuer as its own benchmark drains a queue: asyncpg, uvloop, several managers in one process, each with a
connection of its own; durable tables, and the vacuum settings that it recommends."""

from __future__ import annotations

import asyncio
import sys
import time

import asyncpg
import uvloop
from ledger import Ledger, arguments, report, url
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode


async def consume(address: str, batch: int, ledger: Ledger) -> None:
    connection = await asyncpg.connect(address)
    manager = PgQueuer(AsyncpgDriver(connection))

    @manager.entrypoint("nothing")
    async def nothing(job: Job) -> None:
        ledger.note(job.payload.decode())

    await manager.run(batch_size=batch, mode=QueueExecutionMode.drain)
    await connection.close()


async def main() -> None:
    address, count, path = arguments()
    managers, batch = (int(word) for word in sys.argv[4:6])
    connection = await asyncpg.connect(address)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    started = time.perf_counter()
    for first in range(0, count, 1000):
        some = range(first, min(first + 1000, count))
        payloads = [url(number).encode() for number in some]
        await queries.enqueue(["nothing"] * len(some), payloads, [0] * len(some))
    enqueued = time.perf_counter() - started
    ledger = Ledger(path)
    await asyncio.gather(*(consume(address, batch, ledger) for _ in range(managers)))
    left = await connection.fetchval("SELECT count(*) FROM pgqueuer")
    done = await connection.fetchval("SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'")
    await connection.close()
    report(enqueued, max(left, count - done))


if __name__ == "__main__":
    uvloop.run(main())
