"""Says once of each host that a job goes slower there than it was asked to."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from shoal.events import Event, Visited
from shoal.frontier.port import Backend

EVERY = 5.0
FEW = 20
"""Hosts of a job, and jobs, that are looked at each time."""


class HeldBack:
    """Looks at the hosts where a job starts, and at those that were visited last. `watch` takes the
    worker's events."""

    def __init__(self, frontier: Backend, tell: Callable[[str], None], job: str | None = None) -> None:
        self._frontier = frontier
        self._tell = tell
        self._job = job
        self._seen: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._told: set[tuple[str, str]] = set()

    def watch(self, event: Event) -> None:
        if isinstance(event, Visited):
            lanes = self._seen[event.job]
            lanes[event.lane] = None
            if len(lanes) > FEW:
                del lanes[next(iter(lanes))]

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Look now and then while the body runs."""
        task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look(self) -> None:
        from shoal.errors import FrontierError, NoSuchJob

        rest = EVERY / 16  # soon at first: what is slow is slow from the start
        while True:
            started = time.perf_counter()
            # What a frontier in trouble says is told by those who work on it.
            with suppress(FrontierError, NoSuchJob):
                await self._once()
            # Counting a huge job takes a while: never spend more than a tenth of the time on it.
            rest = min(EVERY, 2 * rest)
            await asyncio.sleep(max(rest, 9 * (time.perf_counter() - started)))

    async def _once(self) -> None:
        from shoal.app import held_back, note_held

        jobs = [self._job] if self._job is not None else list(self._seen)[:FEW]
        for name in jobs:
            lanes = list(self._seen.pop(name, ()))
            job = await self._frontier.job(name)
            found = await held_back(self._frontier, job, lanes)
            if found:
                await note_held(self._frontier, name, found)
            for held in found:
                if (name, held.host) not in self._told and len(self._told) < 1000:
                    self._told.add((name, held.host))
                    which = "" if self._job else f"job {name}: "
                    self._tell(f"{which}{held}")
