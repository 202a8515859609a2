"""What every contender of `bench.queues` shares: the tasks, and a file in which each is noted when done.

A line is written at once, by whichever process did the task: a task that was lost or done twice shows.
"""

from __future__ import annotations

import json
import os
import sys
import time

LANES = 1000


def arguments() -> tuple[str, int, str]:
    """ADDRESS of the server, COUNT of tasks and LEDGER of the command line."""
    if len(sys.argv) < 4:
        sys.exit(f"usage: {sys.argv[0]} ADDRESS COUNT LEDGER")
    return sys.argv[1], int(sys.argv[2]), sys.argv[3]


def url(number: int) -> str:
    """The one argument of a task."""
    return f"https://host-{number % LANES:06d}.example/catalogue/page-{number:08d}.html"


class Ledger:
    """Tasks that were done, and when."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, task: str) -> None:
        os.write(self._file, f"{time.monotonic_ns()} {task}\n".encode())


def report(enqueue_seconds: float, left: int) -> None:
    """The closing line: `left` is what the queue's own books say is not done."""
    print(json.dumps({"enqueue_seconds": round(enqueue_seconds, 3), "left": left}), flush=True)
