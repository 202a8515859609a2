"""Celery on Redis: prefork with two processes, as many as there are cores.

Its optimising guide for many short tasks: results ignored, a prefetch multiplier of 64, acknowledged when
received (the default: a task whose process dies is lost).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import redis
from celery import Celery
from ledger import Ledger, arguments, report, url

app = Celery("queue_celery", broker=os.environ.get("BENCH_BROKER"))
app.conf.update(
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
)
ledger = Ledger(os.environ.get("BENCH_LEDGER", os.devnull))


@app.task
def nothing(task: str) -> None:
    ledger.note(task)


def main() -> None:
    address, count, path = arguments()
    app.conf.broker_url = address
    started = time.perf_counter()
    with app.producer_pool.acquire() as producer:
        for number in range(count):
            nothing.apply_async((url(number),), producer=producer)
    enqueued = time.perf_counter() - started

    celery = Path(sys.executable).with_name("celery")
    command = [celery, "-A", "queue_celery", "worker", "--pool", "prefork", "--concurrency", "2"]
    worker = subprocess.Popen(
        [*command, "--loglevel", "WARNING"],
        cwd=Path(__file__).parent,
        env=os.environ | {"BENCH_BROKER": address, "BENCH_LEDGER": path},
        stdout=sys.stderr,
    )
    server = redis.Redis.from_url(address)
    try:
        while worker.poll() is None and server.llen("celery") + server.hlen("unacked"):
            time.sleep(0.2)
    finally:
        worker.terminate()  # it finishes what it has, then ends
        worker.wait(60)
    report(enqueued, server.llen("celery") + server.hlen("unacked"))


if __name__ == "__main__":
    main()
