"""A worker's figures, for its heartbeat. Counted as visits begin and end.

The worker's loop writes them and the keeper's thread reads them. No lock is needed: whatever both touch is
touched by one operation of a builtin container.
"""

from __future__ import annotations

import time
from collections import deque

from shoal.model import Heartbeat, Request

WINDOW = 60.0
SAMPLES = 2000
"""Visits that are remembered for the last minute's figures."""
JOBS = 20
"""Jobs whose current URL is reported; between two visits of a job, its last one."""


class WorkerStats:
    def __init__(self) -> None:
        self._started = self._moved = time.monotonic()
        self._visits = self._failed = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        """When a visit ended, and how long it took."""
        self._current: dict[str, str] = {}

    def count_start(self, request: Request) -> None:
        # Removed first: the order of the dict is the order in which jobs were last visited.
        self._current.pop(request.job, None)
        self._current[request.job] = request.url
        if len(self._current) > JOBS:
            del self._current[next(iter(self._current))]

    def count_end(self, seconds: float, *, failed: bool) -> None:
        self._visits += 1
        self._failed += failed
        self._moved = time.monotonic()
        self._recent.append((self._moved, seconds))

    def heartbeat(
        self,
        worker: str,
        queues: tuple[str, ...] | None,
        job: str | None,
        *,
        slots: int,
        running: int,
        version: str = "",
    ) -> Heartbeat:
        now = time.monotonic()
        if not running:
            self._moved = now
        recent = [entry for entry in self._recent.copy() if entry[0] >= now - WINDOW]
        took = sorted(seconds for _, seconds in recent)
        # The rate is over the time that the samples cover: a full deque may cover less than a minute.
        since = recent[0][0] if len(recent) == SAMPLES else max(self._started, now - WINDOW)
        return Heartbeat(
            worker,
            queues=queues,
            job=job,
            slots=slots,
            running=running,
            visits=self._visits,
            failed=self._failed,
            stalled_for=round(now - self._moved, 3),
            rate=round(len(recent) / max(now - since, 1.0), 3),
            mean=round(sum(took) / len(took), 4) if took else 0.0,
            p95=round(took[min(len(took) - 1, len(took) * 95 // 100)], 4) if took else 0.0,
            current=self._current.copy(),
            version=version,
        )
