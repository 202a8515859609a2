"""What people see while something lasts: a live line on a terminal, a line now and then in a log."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shoal.cli.common import printable, say, talk
from shoal.errors import FrontierError
from shoal.events import Event, Reached, Trouble, Visited
from shoal.frontier.port import FrontierAdmin
from shoal.model import Counts, Job

if TYPE_CHECKING:
    from rich.console import Console

REFRESH = 0.25
LOG_EVERY = 30.0
LEFTOVERS = 2.0
"""Seconds after a server came back in which failures are of attempts that began before."""


class Troubles:
    """Troubles as lines for people: one count of the attempts for each server, however many loops of a
    worker try, and one line when it is there again."""

    def __init__(self) -> None:
        self._attempts: Counter[str] = Counter()
        self._over: dict[str, float] = {}

    def line(self, event: Event) -> str | None:
        """What to say of an event; None for most."""
        if isinstance(event, Reached):
            if not self._attempts.pop(event.server, 0):
                return None
            self._over[event.server] = time.monotonic()
            return f"Connected to {event.server} again"
        if not isinstance(event, Trouble):
            return None
        attempt = event.attempt
        if event.server:
            if time.monotonic() - self._over.get(event.server, -LEFTOVERS) < LEFTOVERS:
                return None
            if not attempt and self._attempts[event.server]:
                return None  # known
            if attempt:
                self._attempts[event.server] += 1
                attempt = self._attempts[event.server]
        again = f"; again in {event.wait:.1f} s" if event.wait is not None else ""
        return f"Attempt {attempt} failed: {event.what}{again}" if attempt else event.what


class Progress:
    """Watches one job. `watch` takes the worker's events; without them the counters are enough, and
    `workers` tells who works on it elsewhere."""

    def __init__(self, admin: FrontierAdmin, job: str, *, quiet: bool = False, workers: bool = False) -> None:
        self._admin = admin
        self._job = job
        self._quiet = quiet
        self._workers = workers
        self._lanes: set[str] = set()
        self._errors: Counter[str] = Counter()
        self._trouble = ""
        self._troubles = Troubles()
        self._last_url = ""
        self._marks: deque[tuple[float, int]] = deque(maxlen=40)
        self._note = ""
        self._screen: Console | None = None

    def watch(self, event: Event) -> None:
        if isinstance(event, Visited):
            self._last_url = event.url
            self._trouble = ""
            if len(self._lanes) < 10_000:
                self._lanes.add(event.lane)
        elif line := self._troubles.line(event):
            self._trouble = line
            if self._quiet or not sys.stderr.isatty():
                say(self._trouble)

    def note(self, text: str) -> None:
        """Something to show below the numbers from now on."""
        self._note = text
        if not self._quiet and not sys.stderr.isatty():
            say(text)

    def say(self, text: str) -> None:
        """Something to be known once; on a terminal it stays above the numbers."""
        if self._quiet:
            return
        if self._screen is None:
            say(text)
        else:
            self._screen.print(printable(text), markup=False)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[Progress]:
        """Show while the body runs."""
        if self._quiet:
            yield self
            return
        task = asyncio.create_task(self._live() if sys.stderr.isatty() else self._log())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _live(self) -> None:
        from rich.live import Live
        from rich.text import Text

        with Live(Text("starting…"), console=talk(), refresh_per_second=8, transient=True) as live:
            while True:
                started = time.perf_counter()
                self._screen = live.console
                live.update(Text(await self._lines()))
                # Counting a huge job takes a while: never spend more than a tenth of the time on it.
                await asyncio.sleep(max(REFRESH, 9 * (time.perf_counter() - started)))

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(LOG_EVERY)
            say((await self._lines()).replace("\n", "; "))

    async def _lines(self) -> str:
        try:
            job = await self._admin.job(self._job)
            working = await self._working(job) if self._workers else ""
        except FrontierError as error:
            return f"waiting for the frontier: {error}"
        counts = job.counts
        rate = self._rate(counts)
        known = counts.added
        head = f"{counts.done:,} of {known:,} pages"
        parts = [head, f"{rate:,.1f}/s", f"{counts.leased} running", f"{counts.waiting:,} waiting"]
        if counts.delayed:
            parts.append(f"{counts.delayed:,} delayed")
        if self._lanes:
            parts.append(f"{len(self._lanes):,} hosts" if len(self._lanes) > 1 else "1 host")
        if rate > 0 and counts.live:
            parts.append(f"about {duration(counts.live / rate)} left")
        lines = ["  ".join(parts)]
        if working:
            lines.append(working)
        if job.errors:
            lines.append("errors: " + ", ".join(f"{name} {n:,}" for name, n in job.errors.items()))
        if self._trouble:
            lines.append(self._trouble)
        elif self._last_url:
            lines.append(printable(self._last_url)[:100])
        if self._note:
            lines.append(self._note)
        return "\n".join(lines)

    async def _working(self, job: Job) -> str:
        """How many workers it has, by state."""
        from shoal.app import serves

        states = Counter(
            worker.state
            for worker in await self._admin.workers()
            if serves(worker.beat, job) and (worker.leases or worker.state != "silent")
        )
        return "workers: " + (", ".join(f"{n:,} {state}" for state, n in sorted(states.items())) or "none")

    def _rate(self, counts: Counts) -> float:
        now = time.monotonic()
        ended = counts.done + counts.dead
        self._marks.append((now, ended))
        since, before = self._marks[0]
        return (ended - before) / (now - since) if now > since else 0.0


def duration(seconds: float) -> str:
    """`90` as `1 min 30 s`; two units are enough for anybody."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def ended_by(job: Job) -> list[str]:
    """Which limits held the job back, and the flag that raises each."""
    spec, counts = job.spec, job.counts
    if not counts.refused:
        return []
    used = counts.added - counts.skipped - counts.dead - counts.expired
    if spec.max_pages is not None and used >= spec.max_pages:
        return [
            f"the page limit ({spec.max_pages:,}): {counts.refused:,} links left out; --max-pages raises it"
        ]
    return [f"the limit per host: {counts.refused:,} links were left out (SHOAL_MAX_PER_HOST raises it)"]
