"""A Celery task that does nothing, and how many of them a second are through."""

import os
import pathlib
import sys
import time

import celery

app = celery.Celery("celery_noop", broker=os.environ["BROKER"])
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    task_serializer="json",
    worker_prefetch_multiplier=50,
    task_default_queue=os.environ["QUEUE"],
)


@app.task
def noop(url: str) -> None:
    pass


def waiting() -> int:
    with app.connection_or_acquire() as connection:
        return connection.default_channel.queue_declare(os.environ["QUEUE"], passive=True).message_count


def cpu(pid: int) -> float:
    """Of a process and everything below it."""
    pids, ticks = [pid], 0
    for each in pids:
        ticks += sum(
            map(int, pathlib.Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:13])
        )
        pids += map(int, pathlib.Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    total, worker = int(sys.argv[1]), int(sys.argv[2])
    noop.delay("warm up")  # the worker must be there before the clock starts
    while waiting():
        time.sleep(0.05)
    before = cpu(worker) + time.process_time()
    began = time.perf_counter()
    for number in range(total):
        noop.delay(f"https://h.example/page-{number:08d}.html")
    while waiting():
        time.sleep(0.01)
    print(total / (time.perf_counter() - began), cpu(worker) + time.process_time() - before)
