"""A worker: claims leases, visits them side by side, settles the verdicts.

One loop drives it: settle what is finished, claim for the free slots, start the visits, sleep until a visit
finishes or the frontier has news. It claims no more than can start at once, because a claim starts the host's
delay. A visit that waits for its host for long does not keep its slot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from shoal import clock as clocks
from shoal.engine.claim_clock import ClaimClock
from shoal.engine.context import JobContext
from shoal.engine.departure import Departure
from shoal.engine.keeper import Keeper, OpenFrontier
from shoal.engine.retry_reporter import RetryReporter
from shoal.engine.settler import Settler
from shoal.engine.slots import Place, Slots
from shoal.engine.stats import WorkerStats
from shoal.engine.visit import Outcome, visit
from shoal.errors import FrontierCorrupt, FrontierError, class_of
from shoal.events import Begun, Trouble, Visited, Watcher
from shoal.frontier.port import Frontier, Notes
from shoal.model import (
    LEASE_SECONDS,
    Claim,
    Dead,
    Done,
    Failure,
    Heartbeat,
    Lease,
    Pace,
    Release,
    Retry,
    Verdict,
)

MAX_LATE = 3
"""A URL that was handed back this often makes room for itself: on a machine that is always late it must not
starve."""
LOAD_AGAIN = 60.0
"""Seconds after which a job that could not be loaded here is tried again: it may have been repaired."""
SHORT_REST = 0.25
LONG_REST = 5.0
"""A worker that gets nothing but URLs of jobs it cannot load rests before it claims again, first for
`SHORT_REST` seconds, then longer, up to `LONG_REST`: those URLs, and the turns of their hosts, are for
others."""

ContextFor = Callable[[str], Awaitable[JobContext]]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    name: str
    concurrency: int = 16
    """Slots: how many visits run at a time. Visits that are set aside because their host is slow do not
    count."""
    lease: float = LEASE_SECONDS
    queues: Collection[str] | None = None
    job: str | None = None
    drain: bool = False
    """Stop when nothing waits and nothing is leased; otherwise work until stopped."""
    group: float = 0.004
    """Seconds for which finished visits are gathered into one settle."""
    poll: float = 1.0
    """The longest sleep in seconds: what a lost wake-up costs."""
    grace: float = 30.0
    """Seconds that running visits get after `stop`."""
    patience: float = inf
    """Seconds to wait for the next turn of any host; with `drain`, a longer wait ends the work."""
    stay: float = 0.0
    """Seconds that a visit may wait for its host's next turn before it hands the URL back: where visits may
    seldom begin, giving up one that has begun costs too much."""
    give_up_after: float = inf
    """Seconds for which the frontier may fail before the worker ends with its error."""
    version: str = ""
    """Shown in the list of workers."""


class Worker:
    """Runs until drained or stopped. The first `stop` ends it gently, the second at once; either way every
    lease is settled or handed back."""

    def __init__(
        self,
        frontier: Frontier,
        notes: Notes,
        context_for: ContextFor,
        settings: WorkerSettings,
        *,
        watch: Watcher,
        keeper_frontier: OpenFrontier | None,
        clock: clocks.Clock = clocks.system,
    ) -> None:
        self._frontier = frontier
        self._context_for = context_for
        self._settings = settings
        self._watch = watch
        self._clock = clock
        self._contexts: dict[str, JobContext] = {}
        self._loading = asyncio.Lock()
        """Held while a job is loaded: a scraper that takes long to load is not loaded for each of its
        URLs."""
        self._unloadable: dict[str, float] = {}
        """Jobs that cannot be loaded here, and when (monotonic) to try again."""
        self._rest = 0.0
        self._rest_end = 0.0
        self._load_error: Exception | None = None
        """Why this worker cannot load the one job that it is for."""
        self._visits: dict[int, asyncio.Task[None]] = {}
        self._late: dict[str, int] = {}
        """How often a URL was handed back because its turn had passed."""
        self._slow: set[str] = set()
        """Hosts to which the last connection took nearly a gap, or more."""
        self._stalled: set[str] = set()
        """Hosts whose last visit ended in a timeout."""
        self._slots = Slots(settings.concurrency, self._call_on_loop)
        self._claim_clock = ClaimClock()
        self._finished = asyncio.Event()
        self._stopping = 0
        self._stopped = asyncio.Event()
        self._stats = WorkerStats()
        self._reporter = RetryReporter(watch, give_up_after=settings.give_up_after)
        """Shared by claims and settles, which use the same frontier."""
        self._settler = Settler(
            frontier,
            watch=watch,
            reporter=self._reporter,
            context=self._contexts.get,
            on_settled=self._forget,
        )
        self._keeper = Keeper(
            frontier,
            notes,
            lease=settings.lease,
            on_lost=self._cancel_visit,
            watch=watch,
            heartbeat=self._heartbeat,
            open_frontier=keeper_frontier,
        )

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def lost(self) -> int:
        """Settles of this worker that came too late."""
        return self._settler.lost

    @property
    def running(self) -> int:
        """Visits in flight, those that are set aside included."""
        return len(self._visits)

    @property
    def stopped(self) -> bool:
        return self._stopping > 0

    def stop(self) -> None:
        """Finish the visits in flight and end. Called again: hand their URLs back and end now."""
        self._stopping += 1
        self._stopped.set()
        self._finished.set()
        if self._stopping > 1:
            self._settler.hurry()
            for task in self._visits.values():
                task.cancel()

    async def run(self) -> None:
        """Work until drained or stopped.

        Lesser troubles are reported to the watcher and survived. Raises FrontierCorrupt. Raises FrontierError
        if the frontier fails for longer than `give_up_after`, or if the worker was told to end at once and
        the frontier cannot store the last verdicts. A worker for one job that it cannot load raises the error
        that loading raised.
        """
        self._loop = asyncio.get_running_loop()
        self._keeper.start()
        try:
            await self._work()
        except FrontierError:
            self._keeper.end()  # or it would report its next attempt after we gave up
            raise
        finally:
            for task in self._visits.values():
                task.cancel()
            await asyncio.gather(*self._visits.values(), return_exceptions=True)
            # Even when cancelled, finished visits are stored, and the other URLs go back in line.
            self._settler.hurry()
            try:
                await asyncio.shield(self._settler.flush())
            finally:
                await self._keeper.stop()

    async def _work(self) -> None:
        settings = self._settings
        claim: Claim | None = None
        grace_end = 0.0
        while True:
            await self._settler.flush()
            if self._load_error is not None:
                raise self._load_error
            free = self._slots.free_up()
            if self._stopping:
                grace_end = grace_end or time.monotonic() + settings.grace
                if not self._visits or self._stopping > 1 or time.monotonic() >= grace_end:
                    return
                await self._sleep(grace_end - time.monotonic(), fill=False)
                continue
            rest = self._rest_end - time.monotonic()
            if rest > 0:
                await self._sleep(rest, fill=False)
                continue
            if free > 0:
                claim = await self._claim(free)
                if claim is not None and claim.leases:
                    if len(claim.leases) < free:
                        continue  # claim again at once: only an empty claim says when to come back
                elif claim is not None and not self._visits and settings.drain and self._is_over(claim):
                    return
            await self._sleep(self._pause(claim), fill=free > 0)

    def _is_over(self, claim: Claim) -> bool:
        """Whether an empty claim means that there is nothing left to stay for."""
        # An infinite wait means that it is not known: the host is busy with another worker's visit, or
        # paused.
        return claim.wake_at is None or self._settings.patience < claim.retry_in < inf

    def _pause(self, claim: Claim | None) -> float:
        poll = self._settings.poll
        if claim is None or claim.leases or claim.wake_at is None:
            return poll
        return min(claim.retry_in + 0.0005, poll)

    async def _sleep(self, seconds: float, *, fill: bool) -> None:
        """Sleep until a visit finishes, the time is over or, with `fill`, the frontier has news. Then gather
        for a moment, so that visits that finish together are settled together."""
        seconds = min(seconds, self._slots.pause())
        if not self._finished.is_set():
            finished = asyncio.ensure_future(self._finished.wait())
            waits: list[asyncio.Future[Any]] = [finished]
            if fill:
                waits.append(asyncio.ensure_future(self._frontier.wait(seconds)))
            try:
                await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
        if self._finished.is_set() and self._visits and not self._stopping:
            await asyncio.sleep(self._settings.group)
        self._finished.clear()

    async def _claim(self, free: int) -> Claim | None:
        """Claim, and start a visit for each lease. Returns None if the worker was stopped before it could."""
        settings = self._settings
        while not self._stopping:
            since = time.monotonic()
            try:
                claim = await self._frontier.claim(
                    free,
                    worker=settings.name,
                    lease_seconds=settings.lease,
                    queues=settings.queues,
                    job=settings.job,
                )
            except FrontierCorrupt:
                raise
            except FrontierError as error:
                wait = self._reporter.failed(error)
                await self._settler.flush()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._stopped.wait()
                continue
            self._reporter.succeeded()
            self._keeper.hold(list(claim.leases), since)
            began = since
            if claim.leases:
                began = self._claim_clock.turn_start(claim.now, since, time.monotonic())
            for lease in claim.leases:
                # A lease that came through a broker was claimed earlier, and its host's turn began then.
                ago = max(0.0, claim.now - lease.claimed_at) if lease.claimed_at else 0.0
                place = self._slots.take(aside=lease.lane in self._stalled)
                visit = self._visit(lease, began - ago, place)
                self._visits[lease.token] = asyncio.create_task(visit)
                self._stats.count_start(lease.request)
            self._rest_if_unloadable(claim)
            return claim
        return None

    def _rest_if_unloadable(self, claim: Claim) -> None:
        if not claim.leases:
            return
        if all(lease.request.job in self._unloadable for lease in claim.leases):
            self._rest = min(max(2 * self._rest, SHORT_REST), LONG_REST)
            self._rest_end = time.monotonic() + self._rest
        else:
            self._rest = 0.0

    async def _visit(self, lease: Lease, claimed: float, place: Place) -> None:
        started = time.perf_counter()
        outcome = Outcome(Release(lease))
        request = lease.request
        try:
            self._watch(Begun(request.job, request.url, lease.lane, request.attempt + 1))
            context = self._contexts.get(request.job) or await self._context(lease)
            if context is not None:
                departure = self._departure(lease, context, claimed, place)
                outcome = await visit(lease, context, self._pace, departure, now=self._clock)
                self._remember(lease, departure)
        except FrontierError as error:
            self._watch(Trouble(str(error), server=error.server, part="frontier"))
        finally:
            del self._visits[lease.token]
            self._slots.leave(place, answered=outcome.failure is None)
            self._settler.put(outcome.verdict)
            self._finished.set()
            self._report(lease, outcome, time.perf_counter() - started)

    async def _context(self, lease: Lease) -> JobContext | None:
        """Returns None if this worker cannot load what the job needs. The job's URLs are not to blame:
        another worker may be able to load it, so they go back in line."""
        job = lease.request.job
        async with self._loading:
            if job in self._contexts:
                return self._contexts[job]
            if time.monotonic() < self._unloadable.get(job, 0.0):
                return None
            try:
                context = self._contexts[job] = await self._context_for(job)
            except FrontierError:
                raise
            except Exception as error:  # the user's own code may fail in any way at import
                if job == self._settings.job:
                    self._load_error = error
                elif job not in self._unloadable:
                    hint = getattr(error, "hint", "")
                    message = f"{error} ({hint})" if hint else str(error)
                    self._watch(Trouble(f"{message}; its URLs are left to other workers"))
                self._unloadable[job] = time.monotonic() + LOAD_AGAIN
                return None
            self._unloadable.pop(job, None)
            return context

    def _departure(self, lease: Lease, context: JobContext, claimed: float, place: Place) -> Departure:
        return Departure(
            claimed,
            context.spec.gap,
            patient=self._late.get(lease.request.url, 0) < MAX_LATE,
            holds=partial(self._keeper.holds, lease),
            postpone=partial(self._postpone, lease.lane),
            seconds_early=partial(self._claim_clock.seconds_early, claimed),
            slow=lease.lane in self._slow,
            # Even if other jobs allow more: the most careful job sets the pace of a host that several share.
            alone=context.spec.width == 1,
            stay=self._settings.stay,
            place=place,
        )

    async def _postpone(self, lane: str, gap: float) -> None:
        await self._frontier.pace(lane, Pace(blocked=gap))

    def _remember(self, lease: Lease, departure: Departure) -> None:
        """Keep what the next visit of this URL, or of its host, must know."""
        url = lease.request.url
        if departure.missed:
            self._late[url] = self._late.get(url, 0) + 1
        else:
            self._late.pop(url, None)
        if departure.slow:
            self._slow.add(lease.lane)
        else:
            self._slow.discard(lease.lane)

    async def _pace(self, lane: str, pace: Pace) -> None:
        try:
            await self._frontier.pace(lane, pace)
        except FrontierError as error:
            self._watch(Trouble(str(error), server=error.server, part="frontier"))

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the worker with it
            self._loop.call_soon_threadsafe(call)

    def _forget(self, lease: Lease) -> None:
        self._keeper.drop(lease)

    def _cancel_visit(self, lease: Lease) -> None:
        """The lease went to another worker, or its job was cancelled: stop the visit, which also gives its
        place on the host back."""
        task = self._visits.get(lease.token)
        if task is not None:
            task.cancel()

    def _heartbeat(self) -> Heartbeat:
        """Called on the keeper's thread."""
        settings = self._settings
        queues = tuple(settings.queues) if settings.queues is not None else None
        return self._stats.heartbeat(
            settings.name,
            queues,
            settings.job,
            slots=settings.concurrency,
            running=len(self._visits),
            version=settings.version,
        )

    def _report(self, lease: Lease, outcome: Outcome, seconds: float) -> None:
        verdict = outcome.verdict
        if not isinstance(verdict, Release):
            self._stats.count_end(seconds, failed=outcome.failure is not None)
        if outcome.failure is not None and class_of(outcome.failure.error).group == "timeout":
            self._stalled.add(lease.lane)
        elif not isinstance(verdict, Release):
            self._stalled.discard(lease.lane)
        request = lease.request
        failure = outcome.failure or Failure("")
        context = self._contexts.get(request.job)
        items, found = (len(verdict.items), len(verdict.found)) if isinstance(verdict, Done) else (0, 0)
        self._watch(
            Visited(
                request.job,
                request.url,
                lease.lane,
                _word(verdict),
                outcome.status,
                failure.error,
                failure.message,
                seconds,
                outcome.size,
                items,
                found,
                request.attempt + 1,
                context.max_attempts(request) if context is not None else 0,
                verdict.after if isinstance(verdict, Retry) else 0.0,
                verdict.skipped if isinstance(verdict, Done) else "",
            )
        )


def _word(verdict: Verdict) -> str:
    if isinstance(verdict, Done):
        return "skipped" if verdict.skipped else "done"
    if isinstance(verdict, Retry):
        return "retry"
    return "dead" if isinstance(verdict, Dead) else "release"
