"""What the routes share: the session, short-lived caches of the frontier's state, and background tasks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from operator import attrgetter
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec
from fastapi import Depends
from starlette.requests import Request

from shoal import model
from shoal.api.metrics import Meters
from shoal.api.models import Progress
from shoal.api.problems import Problem
from shoal.api.tokens import ADMIN, CALLER, Caller
from shoal.api.views import progress_of
from shoal.api.webhooks import Messenger
from shoal.app import Fired, Scheduler, Session, celery_broker_away
from shoal.app.views import status_of
from shoal.dispatch.port import MARK
from shoal.dispatch.routes import Routes, frontier_queue
from shoal.errors import FrontierError, NoSuchJob
from shoal.frontier.notes import Presence
from shoal.frontier.port import Backend
from shoal.model import (
    Advice,
    Counts,
    Heartbeat,
    Job,
    JobState,
    WorkerStatus,
)
from shoal.queues import TASK_QUEUE

QUEUES = ("scraping", "business", "rag")
"""Default queues of the workers of `shoal serve`. The queues of the routing rules are added."""
LOCAL_BATCHES = 8
"""Maximum number of batches that this process visits at a time. Each has a worker, a thread and a
connection."""
LOCAL_QUEUE = "local"
"""Queue of the URLs of such a batch. Workers that name their queues do not take from it."""
RECENT_JOBS = 1000
EMPTY = {"waiting": 0, "delayed": 0, "leased": 0}
"""The counts of a queue without work, which the frontier leaves out."""
ADD_AT_ONCE = 20_000
MOST_TRAVELLING = 200
"""Maximum number of leases that are searched for one that a worker holds."""
WINDOW = 3600.0
PATIENCE = 3.0
"""Seconds that /health and /metrics wait for the frontier: their clients have short time limits too."""
FIRST_WORKER = 15.0
"""Seconds that a batch waits for the first worker, if one is expected."""
STARTING = 60.0
"""Seconds after which an expected worker counts as missing."""

T = TypeVar("T")


class Recent(Generic[T]):
    """A cached query. Concurrent callers share one query, and queries never take more than a tenth of the
    time: counting a million URLs takes a while."""

    def __init__(self, ask: Callable[[], Awaitable[T]], seconds: float) -> None:
        """`ask` is the query; its result is kept for `seconds`. With 0 it is shared only by those who call
        while the query runs."""
        self._ask = ask
        self._seconds = seconds
        self._until = float("-inf")
        self._value: T | None = None
        self._asking: asyncio.Task[T] | None = None

    async def get(self, patience: float | None = None, *, old: bool = False) -> T:
        """Waits `patience` seconds at most. After that returns the previous result if `old` allows it and
        there is one, or raises TimeoutError. The query continues, for the next caller."""
        if self._value is not None and time.monotonic() < self._until:
            return self._value
        asking = self._asking
        if asking is None:
            asking = self._asking = asyncio.create_task(self._refresh())
            asking.add_done_callback(_retrieve_error)
        # Not `timeout`: it would miss a result that arrives late because something else blocked the loop.
        done, _ = await asyncio.wait({asking}, timeout=patience)
        if done:
            return asking.result()
        if old and self._value is not None:
            return self._value
        raise TimeoutError

    async def _refresh(self) -> T:
        started = time.monotonic()
        try:
            self._value = value = await self._ask()
        finally:
            self._asking = None
        now = time.monotonic()
        self._until = now + max(self._seconds, 10 * (now - started)) if self._seconds else now
        return value


def _retrieve_error(asking: asyncio.Task[T]) -> None:
    """Waiting callers see the error. If none is left, asyncio must not log it as never retrieved."""
    if not asking.cancelled():
        asking.exception()


class Totals:
    """Sums over the newest jobs."""

    def __init__(self, jobs: list[Job], now: float) -> None:
        self.newest = jobs
        self.dead: Counter[str] = Counter()
        """By queue of the job."""
        self.completed = self.failed = 0
        """Of jobs that are running or ended within the window: an old failure must not cause an alarm for
        ever."""
        for job in jobs:
            counts: Counts = job.counts
            self.dead[job.spec.queue] += counts.dead + counts.expired
            if job.state is JobState.RUNNING or (job.finished_at or 0.0) > now - WINDOW:
                self.completed += counts.done
                self.failed += counts.dead + counts.expired


class JobStates:
    """Counts all jobs by state.

    Each count reads the newest jobs and all that have not ended. Of the others it reads one page: an ended
    job continues only if its dead letters are retried. So after the first count, which walks through all
    jobs, a million old jobs cost as much as a thousand."""

    def __init__(self, frontier: Backend) -> None:
        self._frontier = frontier
        self._known: dict[str, JobState] = {}
        """As of the last walk through the old ones."""
        self._walked: dict[str, JobState] = {}
        """Seen on the current walk."""
        self._before: float | None = None
        """Position of the current walk."""

    async def count(self, newest: list[Job]) -> Counter[JobState]:
        fresh = {job.id: job.state for job in newest}
        if len(newest) < RECENT_JOBS:
            self._known, self._walked, self._before = {}, {}, None
            return Counter(fresh.values())
        first = not self._known
        while await self._walk(newest[-1].created_at) and first:
            pass
        # Newer jobs will push these out of the newest.
        self._walked |= fresh
        states = self._known | self._walked
        for job, state in states.items():
            if state in (JobState.RUNNING, JobState.PAUSED) and job not in fresh:
                with suppress(NoSuchJob):
                    self._walked[job] = states[job] = (await self._frontier.job(job)).state
        return Counter(states.values())

    async def _walk(self, newest: float) -> bool:
        """Read one page further back. Returns False at the end; the next walk starts anew."""
        page = await self._frontier.jobs(
            limit=RECENT_JOBS, before=self._before if self._before is not None else newest
        )
        self._walked |= {job.id: job.state for job in page}
        if len(page) == RECENT_JOBS:
            self._before = page[-1].created_at
            return True
        self._known, self._walked, self._before = self._walked, {}, None
        return False


class Now(NamedTuple):
    warnings: list[Advice]
    queues: dict[str, dict[str, int]]
    workers: list[WorkerStatus]
    totals: Totals


class Adder:
    """Adds the URLs of concurrent submissions in one call. Each call is synced to disk, so a hundred clients
    that submit at once would wait for a hundred syncs; this way they wait for two or three."""

    def __init__(self, frontier: Backend) -> None:
        self._frontier = frontier
        self._waiting: list[tuple[list[model.Request], asyncio.Future[None]]] = []
        self._lock = asyncio.Lock()

    async def add(self, requests: list[model.Request]) -> None:
        """Returns when they are stored."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((requests, done))
        async with self._lock:
            if not done.done():
                await self._send()
        await done

    async def _send(self) -> None:
        taken, size = 0, 0
        for requests, _ in self._waiting:
            if size and size + len(requests) > ADD_AT_ONCE:
                break
            taken, size = taken + 1, size + len(requests)
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        try:
            await self._frontier.add([request for requests, _ in batch for request in requests])
        except BaseException as error:
            for _, done in batch:
                if not done.done():
                    done.set_exception(error if isinstance(error, Exception) else FrontierError("stopped"))
                    done.exception()  # so that asyncio does not complain if no caller is left
            raise
        for _, done in batch:
            if not done.done():
                done.set_result(None)


class Service:
    def __init__(
        self, session: Session, *, tell: Callable[[str], None], staff: Collection[str] | None = None
    ) -> None:
        """`staff` are the queues of this service's own workers, `*` for all; None if it has none."""
        self.session = session
        self.staff = staff
        self._began = time.monotonic()
        self.tell = tell
        self.meters = Meters()
        self.closing = asyncio.Event()
        self.workers = Recent(self._workers, 1.0)
        self._broker_away = Recent(self._ask_broker, 1.0)
        self.queues = Recent(self._queues, 0.5)
        self.totals = Recent(self._totals, 0.5)
        self.states = Recent(self._states, 0.5)
        self._job_states = JobStates(session.frontier)
        self._queues_seen: set[str] = set()
        self.warnings = Recent(self._warnings, 0.0)
        self.messenger = Messenger(session, tell)
        self.scheduler = Scheduler(session, tell=tell, fired=self._on_fired)
        self.adder = Adder(session.frontier)
        self._local = asyncio.Semaphore(LOCAL_BATCHES)

    @property
    def frontier(self) -> Backend:
        return self.session.frontier

    def _on_fired(self, firing: Fired) -> None:
        if firing.job and firing.webhook:
            self.messenger.watch(firing.job)
        elif firing.error:
            self.tell(f"schedule {firing.schedule} could not submit its job: {firing.error}")

    async def _workers(self) -> list[WorkerStatus]:
        return await Presence(self.frontier.notes).workers(self.frontier)

    async def _queues(self) -> dict[str, dict[str, int]]:
        return await self.frontier.queues()

    async def _totals(self) -> Totals:
        return Totals(await self.frontier.jobs(limit=RECENT_JOBS), time.time())

    async def _states(self) -> Counter[JobState]:
        return await self._job_states.count((await self.totals.get()).newest)

    async def _warnings(self) -> list[Advice]:
        return list((await self.frontier.info()).warnings)

    async def now(self) -> Now:
        """Returns the frontier's figures for monitoring. Does not wait long: raises TimeoutError if the
        frontier does not respond. If only counting takes long, the previous count is returned."""
        warnings, queues, workers, totals = await asyncio.gather(
            self.warnings.get(PATIENCE),
            self.queues.get(PATIENCE, old=True),
            self.workers.get(PATIENCE, old=True),
            self.totals.get(PATIENCE, old=True),
        )
        return Now(warnings, queues, workers, totals)

    def with_empty(self, queues: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Adds queues without work, which the frontier leaves out: a queue that was once there stays, so that
        graphs have no gaps."""
        self._queues_seen |= {*queues, *usual_queues(self.session.routes)}
        return {name: queues.get(name, EMPTY) for name in self._queues_seen}

    async def taking(self, queue: str, patience: float | None = None) -> list[WorkerStatus]:
        """Returns the live workers that take from this queue. If a broker of Celery workers is configured,
        those of this service do not count. Raises TimeoutError as `Recent.get` does."""
        return [
            worker
            for worker in await self.workers.get(patience)
            if takes(worker, queue)
            and (not self.by_celery or self.staff is None or worker.heartbeat.worker.endswith(MARK))
        ]

    async def broker_away(self) -> bool:
        """Whether a broker of Celery workers is configured and does not respond."""
        return self.by_celery and await self._broker_away.get()

    async def _ask_broker(self) -> bool:
        return await celery_broker_away(self.session.settings.celery_broker_url)

    @property
    def by_celery(self) -> bool:
        """Whether a broker of Celery workers is configured, so that they make the visits."""
        return self.session.settings.celery_named

    @property
    def worker_command(self) -> str:
        """The command that starts a worker."""
        return "celery -A shoal.celery worker" if self.by_celery else "shoal worker"

    async def wait_for_worker(self, queue: str, within: float) -> list[WorkerStatus]:
        """The same, but waits for the first worker if one is expected."""
        end = time.monotonic() + min(within, FIRST_WORKER)
        while not (found := await self.taking(queue)):
            left = end - time.monotonic()
            if left <= 0 or self.closing.is_set() or not await self._is_expected(queue):
                return []
            await asyncio.sleep(min(0.1, left))
        return found

    async def _is_expected(self, queue: str) -> bool:
        """Whether a worker of this queue should appear soon. Own workers start with the service and are
        restarted after a crash; others are expected if one has fallen silent recently."""
        own = None if self.by_celery else self.staff
        if own is not None and ("*" in own or _is_in(queue, own)):
            return True
        return any(
            worker.state == "silent"
            and worker.now - worker.seen < STARTING
            and _serves(worker.heartbeat, queue)
            for worker in await self.workers.get()
        )

    @property
    def starting(self) -> bool:
        """Whether the service's own workers may still be starting."""
        return self.staff is not None and time.monotonic() - self._began < STARTING

    async def progress(self, job: Job) -> Progress:
        """Returns the job's progress."""
        visited = job.state is JobState.RUNNING and status_of(job) == "PROGRESS"
        return progress_of(job, time.time(), await self._current_url(job) if visited else None)

    async def _current_url(self, job: Job) -> str | None:
        """Returns a URL of the job that is being visited, or the last one visited."""
        if job.counts.leased:
            leases = await self.frontier.leases(job=job.id, limit=1)
            if leases and leases[0].in_transit:  # on its way through a broker, where few are at a time
                leases = await self.frontier.leases(job=job.id, limit=MOST_TRAVELLING)
            visited = [lease.url for lease in leases if not lease.in_transit]
            if visited:
                return visited[0]
        # Between two visits. A worker's heartbeat has its URL every few seconds; before the first one the
        # last item has it.
        reporting = [worker for worker in await self.workers.get() if job.id in worker.heartbeat.current]
        if reporting:
            return max(reporting, key=attrgetter("seen")).heartbeat.current[job.id]
        if not job.counts.items:
            return None  # most requests come before the first item: save a query
        for item in await self.frontier.items(job.id, after=job.counts.items - 1, limit=1):
            fields = msgspec.json.decode(item.body)
            url = fields.get("final_url") or fields.get("url") if isinstance(fields, dict) else None
            return url if isinstance(url, str) else None
        return None

    @asynccontextmanager
    async def local_slot(self) -> AsyncIterator[None]:
        if self._local.locked():
            raise Problem(
                503,
                f"this server is already visiting {LOCAL_BATCHES} batches",
                hint="try again later, or use workers: distributed=true",
                headers={"Retry-After": "5"},
            )
        async with self._local:
            yield


def usual_queues(routes: Routes | None) -> tuple[str, ...]:
    """Returns the queues into which jobs of this service may put URLs, including those of routing rules."""
    routed = () if routes is None else map(frontier_queue, routes.queues)
    return tuple(dict.fromkeys([*QUEUES, *routed]))


def of_work(queues: Mapping[str, T]) -> dict[str, T]:
    """Leaves out the queue of Celery's tasks, which visit their URLs themselves: workers cannot take them."""
    return {name: value for name, value in queues.items() if name != TASK_QUEUE}


def takes(worker: WorkerStatus, queue: str) -> bool:
    return worker.state != "silent" and _serves(worker.heartbeat, queue)


def _serves(heartbeat: Heartbeat, queue: str) -> bool:
    return heartbeat.job is None and (heartbeat.queues is None or _is_in(queue, heartbeat.queues))


def _is_in(queue: str, queues: Collection[str]) -> bool:
    # A worker with a broker may name the broker's queues.
    return queue in queues or queue in map(frontier_queue, queues)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


ServiceDependency = Annotated[Service, Depends(_service)]
CallerDependency = Annotated[Caller, Depends(_caller)]


async def _admin(caller: CallerDependency) -> None:
    require_admin(caller, "do this")


Admin = Depends(_admin)


def require_admin(caller: Caller, what: str) -> None:
    if ADMIN not in caller.scopes:
        raise Problem(403, f"this token may not {what}", hint="it needs the scope 'admin'")
