"""Procrastinate: its asynchronous worker, forty jobs at a time on a pool of twenty connections."""

from __future__ import annotations

import asyncio
import time

from ledger import Ledger, arguments, report, url
from procrastinate import App, PsycopgConnector

CONCURRENCY = 40
CONNECTIONS = 20


async def main() -> None:
    address, count, path = arguments()
    app = App(connector=PsycopgConnector(conninfo=address, min_size=CONNECTIONS, max_size=CONNECTIONS))
    ledger = Ledger(path)

    @app.task(name="nothing")
    async def nothing(task: str) -> None:
        ledger.note(task)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        started = time.perf_counter()
        for first in range(0, count, 1000):
            some = range(first, min(first + 1000, count))
            await nothing.batch_defer_async(*({"task": url(number)} for number in some))
        enqueued = time.perf_counter() - started
        await app.run_worker_async(concurrency=CONCURRENCY, wait=False, install_signal_handlers=False)
        jobs = await app.job_manager.list_jobs_async()
        report(enqueued, count - sum(job.status == "succeeded" for job in jobs))


if __name__ == "__main__":
    asyncio.run(main())
