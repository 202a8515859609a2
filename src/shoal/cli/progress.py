"""Progress of long commands: a live line on a terminal, a line now and then in a log."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from shoal.cli.output import duration, is_live, say, talk
from shoal.errors import FrontierError
from shoal.events import Event, Visited
from shoal.frontier.port import Backend
from shoal.model import Counts, Job
from shoal.printing import printable

REFRESH = 0.25
LOG_EVERY = 30.0
FEW = 6
"""Error classes that a worker shows."""


class Progress:
    """Shows the progress of one job. `watch` takes the worker's events; without them, the job's counters are
    shown. `workers` also shows how many workers the job has."""

    def __init__(self, frontier: Backend, job: str, *, quiet: bool = False, workers: bool = False) -> None:
        self._frontier = frontier
        self._job = job
        self._quiet = quiet
        self._workers = workers
        self._lanes: set[str] = set()
        self._errors: Counter[str] = Counter()
        self._last_url = ""
        self._rate = Rate()
        self._note = ""

    def watch(self, event: Event) -> None:
        if isinstance(event, Visited):
            self._last_url = event.url
            if len(self._lanes) < 10_000:
                self._lanes.add(event.lane)

    def note(self, text: str) -> None:
        """Shows a text below the numbers from now on."""
        self._note = text
        if not self._quiet and not is_live():
            say(text)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[Progress]:
        """Shows the progress while the body runs."""
        if self._quiet:
            yield self
            return
        task = asyncio.create_task(show_live(self._lines) if is_live() else self._log())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(LOG_EVERY)
            say((await self._lines()).replace("\n", "; "))

    async def _lines(self) -> str:
        try:
            job = await self._frontier.job(self._job)
            working = await self._working(job) if self._workers else ""
        except FrontierError as error:
            return f"waiting for the frontier: {error}"
        counts = job.counts
        rate = self._rate.now(counts.done + counts.dead)
        head = pages_of(counts)
        parts = [f"{head} pages", f"{rate:,.1f}/s", f"{counts.leased} running", f"{counts.waiting:,} waiting"]
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
        if self._last_url:
            lines.append(printable(self._last_url)[:100])
        if self._note:
            lines.append(self._note)
        return "\n".join(lines)

    async def _working(self, job: Job) -> str:
        """Returns how many workers the job has, by state."""
        from shoal.app import is_serving
        from shoal.frontier.notes import Presence

        states = Counter(
            worker.state
            for worker in await Presence(self._frontier.notes).workers(self._frontier)
            if is_serving(worker.heartbeat, job) and (worker.leases or worker.state != "silent")
        )
        return "workers: " + (", ".join(f"{n:,} {state}" for state, n in sorted(states.items())) or "none")


class Doing:
    """Shows what a worker does, on its terminal. `watch` takes its events."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """Visits by outcome."""
        self._errors: Counter[str] = Counter()
        self._rate = Rate()
        self._last_url = ""

    def watch(self, event: Event) -> None:
        if isinstance(event, Visited):
            self.ended[event.outcome] += 1
            self._last_url = event.url
            if event.error:
                self._errors[event.error] += 1

    @asynccontextmanager
    async def shown(self, running: Callable[[], int]) -> AsyncIterator[None]:
        """Shows it while the body runs, on a terminal. `running` returns the number of visits in progress."""
        if not is_live():
            yield
            return

        async def lines() -> str:
            return self._lines(running())

        task = asyncio.create_task(show_live(lines))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _lines(self, running: int) -> str:
        done = self.ended["done"] + self.ended["skipped"]
        rate = self._rate.now(done + self.ended["retry"] + self.ended["dead"])
        lines = [f"{done:,} done  {rate:,.1f}/s  {running:,} running"]
        if self._errors:
            errors = ", ".join(f"{name} {n:,}" for name, n in self._errors.most_common(FEW))
            lines.append("errors: " + errors)
        lines.append(printable(self._last_url)[:100] if self._last_url else "waiting for work")
        return "\n".join(lines)


class Rate:
    """The growth of a number per second, over the last few seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=40)

    def now(self, number: int) -> float:
        now = time.monotonic()
        self._marks.append((now, number))
        since, before = self._marks[0]
        return (number - before) / (now - since) if now > since else 0.0


async def show_live(lines: Callable[[], Awaitable[str]], every: float = REFRESH) -> None:
    """Shows live lines on a terminal until cancelled. What this process prints meanwhile appears above
    them."""
    from rich.live import Live
    from rich.text import Text

    with Live(Text("starting…"), console=talk(), refresh_per_second=8, transient=True) as live:
        while True:
            started = time.perf_counter()
            live.update(Text(await lines()))
            # Counting a huge job is slow: spend at most a tenth of the time on it.
            await asyncio.sleep(max(every, 9 * (time.perf_counter() - started)))


def pages_of(counts: Counts, between: str = " of ") -> str:
    """Returns pages fetched and pages known. A skipped URL turned out not to be a page."""
    return f"{counts.done - counts.skipped:,}{between}{counts.added - counts.skipped:,}"


def ended_by(job: Job) -> list[str]:
    """Returns the limits that the job has reached, and how to raise each."""
    spec, counts = job.spec, job.counts
    if not counts.refused:
        return []
    used = counts.added - counts.skipped - counts.dead - counts.expired
    if spec.max_pages is not None and used >= spec.max_pages:
        limit = f"the page limit ({spec.max_pages:,})"
        return [f"{limit}: {counts.refused:,} links were left out; --max-pages raises it"]
    return [f"the limit per host: {counts.refused:,} links were left out; SHOAL_MAX_PER_HOST raises it"]
