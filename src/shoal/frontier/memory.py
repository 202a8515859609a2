"""The frontier in memory: the model for the others, and the fastest if nothing must outlive the process.

Structures, from the outside in: a heap of *turns* per stream orders lanes by the moment they may be
visited; a lane has *lines*, one for each (queue, job, priority); a line has requests in order. Heaps are
lazy: an entry is valid only while its lane still has the same moment.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from heapq import heappop, heappush, merge
from itertools import islice

import msgspec

from shoal import clock as clocks
from shoal import urls
from shoal.errors import NoSuchJob, UsageError
from shoal.frontier.rules import (
    BONUS,
    STAGGER,
    STEP,
    US,
    WEIGHT,
    Paced,
    advance,
    allowance,
    is_stopped,
    microseconds,
    with_worker,
)
from shoal.model import (
    CRASH_LIMIT,
    EXPIRED,
    TRANSIT,
    TTL_OVER,
    WORKER_CRASHED,
    Added,
    Advice,
    Claim,
    Counts,
    Dead,
    DeadGroup,
    DeadLetter,
    Done,
    Failure,
    Info,
    Item,
    Job,
    JobSpec,
    JobState,
    Lane,
    Lease,
    LeaseRow,
    Note,
    Pace,
    Request,
    RequestStatus,
    Retry,
    Selection,
    Settlement,
    Verdict,
)
from shoal.queues import validate

Stream = tuple[str, str]
"""What a claim can ask for: a queue, and the job if that job is dedicated."""

_replace = msgspec.structs.replace


def _by_order(line: _Line) -> tuple[int, int]:
    return line.vt + STEP[line.priority], line.id


class _Entry:
    """A stored request. It moves between line, delayed heap and lease."""

    __slots__ = ("crashes", "deadline", "expires", "id", "in_expiring", "line", "request")

    def __init__(self, id: int, request: Request, line: _Line, deadline: int | None) -> None:
        self.id = id
        self.request = request
        self.line = line
        self.crashes = 0
        self.deadline = deadline
        """The end of its ttl."""
        self.expires = deadline
        """The same while it waits; None while it is leased, and after its first visit."""
        self.in_expiring = False
        """Whether it is in the heap of requests that expire."""

    def __lt__(self, other: _Entry) -> bool:
        return self.id < other.id


class _Line:
    """The requests of one job, queue and priority on one lane."""

    __slots__ = ("front", "id", "job", "lane", "off", "priority", "queue", "stream", "tail", "vt")

    def __init__(self, id: int, lane: _Lane, queue: str, job: _Job, priority: int) -> None:
        self.id = id
        self.lane = lane
        self.queue = queue
        self.stream: Stream = (queue, job.id if job.spec.dedicated else "")
        self.job = job
        self.priority = priority
        self.vt = lane.vt
        self.off = job.state is JobState.PAUSED
        self.tail: deque[_Entry] = deque()
        self.front: list[_Entry] = []
        """A heap of entries that came back or came due. The smaller id of both is served first."""

    @property
    def live(self) -> bool:
        return not self.off and bool(self.front or self.tail)

    def pop(self) -> _Entry | None:
        if self.front and (not self.tail or self.front[0].id < self.tail[0].id):
            return heappop(self.front)
        return self.tail.popleft() if self.tail else None

    def entries(self) -> Iterable[_Entry]:
        return merge(sorted(self.front), self.tail)


class _Lane(Paced):
    __slots__ = (
        "at",
        "busy",
        "id",
        "lines",
        "name",
        "streams",
        "vt",
    )

    def __init__(self, id: int, name: str) -> None:
        self.id = id
        self.name = name
        self.gap = 0
        self.width = 1
        self.burst = 0
        self.floor = 0
        self.tat = 0
        self.blocked = 0
        self.busy = 0
        self.vt = 0
        self.pinned = 0
        self.paused = 0
        self.at: int | None = None
        self.streams: frozenset[Stream] = frozenset()
        """Streams with something to claim here."""
        self.lines: list[_Line] = []

    def ready(self) -> int:
        return max(self.tat - self.burst * self.pace_gap, self.blocked)


class _Job:
    __slots__ = (
        "added",
        "cancelled",
        "created",
        "dead",
        "done",
        "errors",
        "expired",
        "finished",
        "gap",
        "id",
        "items",
        "known",
        "lines",
        "per_lane",
        "refused",
        "retried",
        "skipped",
        "spec",
        "stale",
        "start_lanes",
        "started",
        "state",
    )

    def __init__(self, id: str, spec: JobSpec, now: int) -> None:
        self.id = id
        self.state = JobState.RUNNING
        self.created = now
        self.finished: int | None = None
        self.started: int | None = None
        self.added = self.known = self.refused = self.done = self.skipped = 0
        self.dead = self.expired = self.cancelled = self.retried = self.stale = 0
        self.errors: dict[str, int] = {}
        self.items: list[bytes] = []
        self.lines: list[_Line] = []
        self.per_lane: dict[str, int] = {}
        self.respec(spec)

    def respec(self, spec: JobSpec) -> None:
        self.spec = spec
        self.gap = microseconds(spec.gap)
        self.start_lanes = frozenset(urls.lane_of(url) for url in spec.start)

    @property
    def live(self) -> int:
        return self.added - self.done - self.dead - self.expired - self.cancelled

    @property
    def over(self) -> bool:
        """Whether it has no live requests, so that its lines can be dropped."""
        return self.live == 0

    def has_room(self, lane: str) -> bool:
        """Return whether the page budgets allow one more request."""
        spec = self.spec
        if (
            spec.max_pages is not None
            and self.added - self.skipped - self.dead - self.expired >= spec.max_pages
        ):
            return False
        if spec.max_per_host is None or lane in self.start_lanes:
            return True
        return self.per_lane.get(lane, 0) < spec.max_per_host

    def count_lane(self, lane: str, by: int) -> None:
        """Change what counts against the budget per host."""
        if self.spec.max_per_host is not None and lane not in self.start_lanes:
            self.per_lane[lane] = self.per_lane.get(lane, 0) + by

    def note(self, error: str) -> None:
        self.errors[error] = self.errors.get(error, 0) + 1


class _Held:
    """A lease as the frontier sees it."""

    __slots__ = ("entry", "lease", "until", "worker")

    def __init__(self, entry: _Entry, lease: Lease, until: int, worker: str) -> None:
        self.entry = entry
        self.lease = lease
        self.until = until
        self.worker = worker


class _Notes:
    """`Notes` in a dictionary."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._shelves: dict[str, dict[str, tuple[int, int, bytes]]] = {}
        """By shelf and name: when the note was written, when it ends, and its value."""

    async def get(self, shelf: str, name: str) -> bytes | None:
        _, until, value = self._shelves.get(shelf, {}).get(name, (0, 0, b""))
        return value if until > self._now() else None

    async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None:
        now = self._now()
        notes = self._shelves.setdefault(shelf, {})
        notes.pop(name, None)
        if value is not None:
            notes[name] = (now, now + microseconds(ttl), value)

    async def compare_and_set(
        self, shelf: str, name: str, known: bytes | None, value: bytes | None, ttl: float
    ) -> bool:
        if await self.get(shelf, name) != known:
            return False
        await self.put(shelf, name, value, ttl)
        return True

    async def scan(self, shelf: str) -> list[Note]:
        now = self._now()
        notes = sorted(self._shelves.get(shelf, {}).items())
        return [Note(name, value, at / US) for name, (at, until, value) in notes if until > now]

    async def now(self) -> float:
        return self._now() / US


class _News:
    """An event that belongs to no event loop: one frontier may serve crawls with a loop each."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        self._is_set = True
        for each in self._waiting:
            if not each.done():
                each.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if self._is_set:
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.add(mine)
        try:
            await mine
        finally:
            self._waiting.discard(mine)


class MemoryFrontier:
    """A `Backend` that forgets everything when the process ends."""

    def __init__(self, *, clock: clocks.Clock = clocks.system) -> None:
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._lanes: dict[str, _Lane] = {}
        self._lines: dict[tuple[str, str, str, int], _Line] = {}
        self._seen: set[bytes] = set()
        self._turns: dict[Stream, list[tuple[int, int, _Lane]]] = {}
        self._delayed: list[tuple[int, int, _Entry]] = []
        self._expiring: list[tuple[int, int, _Entry]] = []
        self._leases: dict[int, _Held] = {}
        self._ends: list[tuple[int, int]] = []
        self._letters: dict[int, DeadLetter] = {}
        self.notes = _Notes(self._now)
        self._token = self._last_id = self._last_line = 0
        self._woken = _News()

    # -- the verbs of the worker ------------------------------------------------------

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        for request in requests:
            validate(request)
            if request.job not in self._jobs:
                raise NoSuchJob(request.job)
        return self._add(requests, self._now())

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        now = self._now()
        self._woken.clear()
        self._upkeep(now)
        streams = self._wanted(queues, job)
        until = now + microseconds(lease_seconds)
        until_seconds = until / US
        leases: list[Lease] = []
        for lane in self._ready_lanes(now, streams):
            free = lane.width - lane.busy
            gap = lane.pace_gap
            if gap:
                free = min(free, allowance(now, lane.tat, gap, lane.burst))
            taken = 0
            while taken < free and len(leases) < limit:
                entry = self._next_entry(lane, streams)
                if entry is None:
                    break
                if entry.line.job.started is None:
                    entry.line.job.started = now
                self._token += 1
                expires = None if entry.deadline is None else entry.deadline / US
                handed = Lease(
                    self._token, entry.request, lane.name, until_seconds, request_expires_at=expires
                )
                self._leases[self._token] = _Held(entry, handed, until, worker)
                heappush(self._ends, (until, self._token))
                leases.append(handed)
                taken += 1
            if taken:
                lane.busy += taken
                lane.tat = max(lane.tat, now) + taken * gap
            self._reschedule(lane, now)
            if len(leases) >= limit:
                break
        if leases:
            return Claim(leases, now / US, now / US)
        return Claim((), self._wake_at(streams), now / US)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        now = self._now()
        lost: list[Lease] = []
        refused: list[str] = []
        touched: dict[_Lane, None] = {}
        jobs: set[_Job] = set()
        for verdict in verdicts:
            lease = verdict.lease
            held = self._leases.pop(lease.token, None)
            if held is None:
                lost.append(lease)
                late = self._jobs.get(lease.request.job)
                if late is not None:
                    late.stale += 1
                continue
            entry = held.entry
            line = entry.line
            job = line.job
            lane = line.lane
            lane.busy -= 1
            touched[lane] = None
            jobs.add(job)
            if job.state is JobState.CANCELLED:
                job.cancelled += 1
            elif isinstance(verdict, Done):
                job.done += 1
                if verdict.skipped:
                    job.skipped += 1
                    job.count_lane(lane.name, -1)
                job.items.extend(verdict.items)
                if verdict.found:
                    answers = self._add(verdict.found, now)
                    refused += _refused_urls(verdict.found, answers)
            elif isinstance(verdict, Retry):
                entry.deadline = None
                job.retried += 1
                job.note(verdict.failure.error)
                entry.request = _replace(entry.request, attempt=entry.request.attempt + 1)
                heappush(self._delayed, (now + microseconds(verdict.after), entry.id, entry))
            elif isinstance(verdict, Dead) and verdict.failure.error == EXPIRED:
                self._end(entry, verdict.failure, now, "expired")
            elif isinstance(verdict, Dead):
                job.note(verdict.failure.error)
                entry.request = _replace(entry.request, attempt=entry.request.attempt + 1)
                self._end(entry, with_worker(verdict.failure, held.worker), now, "dead")
            else:
                self._back_in_line(entry)
        for lane in touched:
            self._reschedule(lane, now)
        for job in jobs:
            self._maybe_finish(job, now)
        self._woken.set()
        return Settlement(lost, refused)

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        now = self._now()
        until = now + microseconds(lease_seconds)
        taken: list[Lease] = []
        refused: dict[int, None] = {}
        for each in leases:
            held = self._leases.get(each.token)
            if held is None:
                continue
            in_transit = held.worker.startswith(TRANSIT)
            if held.worker != worker and not in_transit:
                continue
            if in_transit and is_stopped(held.entry.line.job.state, worker):  # no worker may visit it
                refused[each.token] = None
                continue
            if held.entry.line.job.state is JobState.CANCELLED:
                continue
            held.worker = worker
            held.until = until
            heappush(self._ends, (until, each.token))
            taken.append(_replace(each, expires_at=until / US))
        self._end_in_transit(refused, now)
        return Claim(taken, now / US, now / US)

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        until = self._now() + microseconds(seconds)
        lost: list[Lease] = []
        for lease in leases:
            held = self._leases.get(lease.token)
            if held is None or held.entry.line.job.state is JobState.CANCELLED:
                lost.append(lease)
                continue
            held.until = until
            heappush(self._ends, (until, lease.token))
        return lost

    async def pace(self, lane: str, pace: Pace) -> None:
        now = self._now()
        row = self._lane(lane)
        row.apply(pace, now)
        self._reschedule(row, now)
        self._woken.set()

    async def wait(self, seconds: float) -> None:
        # The last claim cleared the event: anything since then ends the wait at once.
        with suppress(TimeoutError):
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the result.
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    # -- the catalog ------------------------------------------------------------------

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        if job not in self._jobs:
            self._jobs[job] = _Job(job, spec, self._now())
        return self._view(self._jobs[job])

    async def job(self, job: str) -> Job:
        return self._view(self._find_job(job))

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        newest = sorted(self._jobs.values(), key=lambda job: job.created, reverse=True)
        if before is not None:
            newest = [job for job in newest if job.created < microseconds(before)]
        return [self._view(job) for job in newest[:limit]]

    async def update_job(
        self, job: str, *, spec: JobSpec | None = None, state: JobState | None = None
    ) -> Job:
        row = self._find_job(job)
        if spec is not None:
            self._respec(row, spec)
        if state is JobState.PAUSED and row.state is JobState.RUNNING:
            row.state = JobState.PAUSED
            self._switch_lines(row, off=True)
        elif state is JobState.RUNNING and row.state is JobState.PAUSED:
            row.state = JobState.DONE if row.added and row.over else JobState.RUNNING
            self._switch_lines(row, off=False)
        elif state is JobState.CANCELLED and not row.state.ended:
            self._cancel(row)
        return self._view(row)

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        log = self._find_job(job).items
        return [Item(seq, body) for seq, body in enumerate(log[after : after + limit], after + 1)]

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        return list(islice((letter for letter in self._matching(which) if letter.id > after), limit))

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        groups: dict[tuple[str, str], list[str]] = {}
        for letter in self._matching(which):
            groups.setdefault((letter.lane, letter.failure.error), []).append(letter.request.url)
        found = [DeadGroup(lane, error, len(some), some[0]) for (lane, error), some in groups.items()]
        return sorted(found, key=lambda group: (-group.count, group.lane, group.error))

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        now = self._now()
        revived = 0
        for letter in list(self._matching(which)):
            job = self._jobs[letter.request.job]
            if job.state is JobState.CANCELLED:
                continue
            del self._letters[letter.id]
            request = _replace(letter.request, attempt=0) if reset_attempts else letter.request
            if letter.state == "expired":
                job.expired -= 1
            else:
                job.dead -= 1
            entry = _Entry(letter.id, request, self._line(request, job, now), None)
            job.count_lane(letter.lane, 1)
            if job.state is JobState.DONE:
                job.state = JobState.RUNNING
            job.finished = None
            self._back_in_line(entry)
            self._reschedule(entry.line.lane, now)
            revived += 1
        return revived

    async def purge(self, which: Selection) -> int:
        gone = [letter.id for letter in self._matching(which)]
        for id in gone:
            del self._letters[id]
        return len(gone)

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        job = self._find_job(request.job)
        key = urls.key(request.job, request.url, request.method, request.body)
        if key in self._seen:
            return
        self._seen.add(key)
        self._last_id += 1
        now = self._now()
        job.added += 1
        job.dead += 1
        job.note(failure_class)
        self._letters[self._last_id] = DeadLetter(
            self._last_id, request, _lane_or_empty(request.url), Failure(failure_class, message), now / US
        )
        self._maybe_finish(job, now)

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        wanted = [lane for lane in self._lanes.values() if names is None or lane.name in names]
        views = [self._lane_view(lane) for lane in wanted]
        return sorted(views, key=lambda lane: (-lane.busy, -lane.waiting, lane.name))[:limit]

    async def find(self, url: str, job: str | None = None) -> list[RequestStatus]:
        names = [job] if job is not None else list(self._jobs)
        return [self._find(url, self._find_job(name)) for name in names]

    async def queues(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}

        def count(queue: str, state: str, by: int) -> None:
            row = found.setdefault(queue, {"waiting": 0, "delayed": 0, "leased": 0})
            row[state] += by

        for line in self._lines.values():
            count(line.queue, "waiting", len(line.front) + len(line.tail))
        for _, _, entry in self._delayed:
            count(entry.line.queue, "delayed", 1)
        for held in self._leases.values():
            count(held.entry.line.queue, "leased", 1)
        return found

    async def leases(
        self, *, job: str | None = None, lane: str | None = None, limit: int | None = None
    ) -> list[LeaseRow]:
        found: list[LeaseRow] = []
        for held in reversed(self._leases.values()):
            line = held.entry.line
            if job in (None, line.job.id) and lane in (None, line.lane.name):
                url = held.entry.request.url
                found.append(LeaseRow(held.worker, line.queue, url, line.job.id, line.lane.name))
        return found[:limit]

    async def evict(self, workers: Collection[str]) -> int:
        now = self._now()
        taken = [token for token, held in self._leases.items() if held.worker in workers]
        lanes: dict[_Lane, None] = {}
        suspects = 0
        for token in taken:
            held = self._leases.pop(token)
            entry = held.entry
            suspects += self._take_back(held, now, suspects)
            lanes[entry.line.lane] = None
        for lane in lanes:
            self._reschedule(lane, now)
        self._woken.set()
        return len(taken)

    async def check(self) -> list[str]:
        wrong: list[str] = []
        now = self._now()
        busy: dict[_Lane, int] = {}
        where: dict[int, str] = {}

        def place(entry: _Entry, state: str) -> None:
            if entry.id in where:
                wrong.append(f"{entry.request.url} is {where[entry.id]} and {state}")
            where[entry.id] = state

        for held in self._leases.values():
            busy[held.entry.line.lane] = busy.get(held.entry.line.lane, 0) + 1
            place(held.entry, "leased")
        for _, _, entry in self._delayed:
            place(entry, "delayed")
        for line in self._lines.values():
            for entry in line.entries():
                place(entry, "waiting")
        for lane in self._lanes.values():
            if lane.busy != busy.get(lane, 0):
                wrong.append(f"lane {lane.name} counts {lane.busy} leases, there are {busy.get(lane, 0)}")
            runnable = any(line.live for line in lane.lines)
            free = lane.busy < lane.width and not lane.paused
            if runnable and free and lane.at is None:
                wrong.append(f"lane {lane.name} has work and a free slot but is not scheduled")
            if lane.at is not None and lane.at > max(now, lane.ready()):
                wrong.append(f"lane {lane.name} is scheduled later than it is ready")
        for job in self._jobs.values():
            view = self._view(job).counts
            if view.live != view.waiting + view.delayed + view.leased:
                wrong.append(f"job {job.id}: live {view.live} is not waiting + delayed + leased")
        return wrong

    async def info(self) -> Info:
        return Info([Advice("it is lost when the process ends", "use sqlite:///path/to/shoal.db to keep it")])

    async def close(self) -> None:
        """Does nothing: there are no connections or files."""

    # -- inside -----------------------------------------------------------------------

    def _now(self) -> int:
        return microseconds(self._clock())

    def _find_job(self, job: str) -> _Job:
        row = self._jobs.get(job)
        if row is None:
            raise NoSuchJob(job)
        return row

    def _lane(self, name: str) -> _Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(len(self._lanes) + 1, name)
        return lane

    def _line(self, request: Request, job: _Job, now: int) -> _Line:
        """Return the line of a request. Its lane adopts the job's pace."""
        name = urls.lane_of(request.url)
        place = (name, request.queue, job.id, request.priority)
        line = self._lines.get(place)
        lane = line.lane if line is not None else self._lane(name)
        if not lane.pinned and (lane.gap != job.gap or lane.width != job.spec.width):
            if lane.busy or lane.streams:
                lane.gap = max(lane.gap, job.gap)
                lane.width = min(lane.width, job.spec.width)
            else:
                lane.gap, lane.width = job.gap, job.spec.width
        return line or self._make_line(lane, request.queue, job, request.priority)

    def _make_line(self, lane: _Lane, queue: str, job: _Job, priority: int) -> _Line:
        for old in [old for old in lane.lines if old.job.over and old.job is not job]:
            lane.lines.remove(old)
            old.job.lines.remove(old)
            del self._lines[lane.name, old.queue, old.job.id, old.priority]
        self._last_line += 1
        line = _Line(self._last_line, lane, queue, job, priority)
        self._lines[lane.name, queue, job.id, priority] = line
        lane.lines.append(line)
        job.lines.append(line)
        return line

    def _add(self, requests: Sequence[Request], now: int) -> list[Added]:
        answers: list[Added] = []
        seen = self._seen
        for request in requests:
            job = self._jobs[request.job]
            if job.state is JobState.CANCELLED:
                job.refused += 1
                answers.append(Added.REFUSED)
                continue
            key = urls.key(request.job, request.url, request.method, request.body)
            if key in seen:
                job.known += 1
                answers.append(Added.KNOWN)
                continue
            name = urls.lane_of(request.url)
            if not job.has_room(name):
                job.refused += 1
                answers.append(Added.REFUSED)
                continue
            seen.add(key)
            answers.append(Added.NEW)
            job.added += 1
            job.count_lane(name, 1)
            if job.state is JobState.DONE:
                job.state = JobState.RUNNING
            job.finished = None
            line = self._line(request, job, now)
            self._last_id += 1
            expires = None if request.ttl is None else now + microseconds(request.ttl)
            entry = _Entry(self._last_id, request, line, expires)
            self._watch_deadline(entry)
            if request.delay > 0:
                heappush(self._delayed, (now + microseconds(request.delay), entry.id, entry))
                continue
            self._activate(line)
            line.tail.append(entry)
            if line.lane.at is None or line.stream not in line.lane.streams:
                self._reschedule(line.lane, now)
                self._woken.set()
        return answers

    def _activate(self, line: _Line) -> None:
        """Start a line that was empty at its lane's virtual time: absence earns no credit."""
        if not line.front and not line.tail:
            line.vt = max(line.vt, line.lane.vt)

    def _back_in_line(self, entry: _Entry) -> None:
        self._activate(entry.line)
        entry.expires = entry.deadline
        self._watch_deadline(entry)
        heappush(entry.line.front, entry)

    def _watch_deadline(self, entry: _Entry) -> None:
        if entry.deadline is not None and not entry.in_expiring:
            entry.in_expiring = True
            heappush(self._expiring, (entry.deadline, entry.id, entry))

    def _wanted(self, queues: Collection[str] | None, job: str | None) -> Collection[Stream] | None:
        """Return the streams that a claim asks for; None means all."""
        if job is not None:
            if not self._find_job(job).spec.dedicated:
                raise UsageError(
                    f"job {job!r} is not dedicated: a worker cannot claim from it alone",
                    hint="serve its queue with `shoal worker --queues`",
                )
            names = queues if queues is not None else {line.queue for line in self._jobs[job].lines}
            return [(name, job) for name in names]
        if queues is None:
            return None
        wanted = [(name, "") for name in queues]
        return wanted + [stream for stream in self._turns if stream[1] and stream[0] in queues]

    def _next_entry(self, lane: _Lane, streams: Collection[Stream] | None) -> _Entry | None:
        """Take the request that is next on this lane."""
        if len(lane.lines) == 1:
            line = lane.lines[0]
            if not line.live or (streams is not None and line.stream not in streams):
                return None
        else:
            able = [x for x in lane.lines if x.live and (streams is None or x.stream in streams)]
            if not able:
                return None
            line = min(able, key=_by_order)
            line.vt += STEP[line.priority]
            lane.vt = advance(lane.vt, sum(WEIGHT[x.priority] for x in able), line.vt)
        entry = line.pop()
        if entry is not None:
            entry.expires = None  # the deadline no longer counts, unless the lease is released
        return entry

    def _reschedule(self, lane: _Lane, now: int) -> None:
        """Compute the lane's place in the turns of its streams. Call it after any change."""
        live = [line for line in lane.lines if line.live]
        streams = frozenset([line.stream for line in live])
        at: int | None = None
        if streams and lane.busy < lane.width and not lane.paused:
            at = lane.ready()
            if at <= now:
                at = now - BONUS[max(line.priority for line in live)]
                if lane.at is not None and lane.at < at:
                    at = lane.at  # it has a place already, and keeps it
        if at == lane.at and streams == lane.streams:
            return
        lane.at = at
        lane.streams = streams
        if at is None:
            return
        for stream in streams:
            heappush(self._turns.setdefault(stream, []), (at, lane.id, lane))

    def _first(self, stream: Stream) -> tuple[int, int, _Lane] | None:
        """Return the head of a stream's turns, after dropping entries that are no longer valid."""
        heap = self._turns.get(stream)
        while heap and (heap[0][2].at != heap[0][0] or stream not in heap[0][2].streams):
            heappop(heap)
        return heap[0] if heap else None

    def _ready_lanes(self, now: int, streams: Collection[Stream] | None) -> Iterable[_Lane]:
        """Yield lanes that may be visited now, each once, longest ready first. The caller must reschedule
        every lane that it gets."""
        asked = list(self._turns) if streams is None else streams
        given: set[int] = set()
        while True:
            heads = [(head, stream) for stream in asked if (head := self._first(stream)) is not None]
            if not heads:
                return
            (at, id, lane), stream = min(heads, key=lambda entry: entry[0][:2])
            if at > now:
                return
            heappop(self._turns[stream])
            if id in given:
                continue
            given.add(id)
            # Forget the place, so that rescheduling creates a new one even at the same moment.
            lane.at = None
            yield lane

    def _upkeep(self, now: int) -> None:
        """End expired requests, take back expired leases, promote requests that are due.

        Lanes are placed afterwards, all at once: a request that ended must not lend its lane its priority.
        """
        touched: dict[_Lane, None] = {}
        while self._expiring and self._expiring[0][0] <= now:
            _, _, entry = heappop(self._expiring)
            entry.in_expiring = False
            if entry.expires is None:
                continue
            self._drop_waiting(entry)
            self._end(entry, TTL_OVER, now, "expired")
            self._maybe_finish(entry.line.job, now)
            touched[entry.line.lane] = None
        suspects = 0
        while self._ends and self._ends[0][0] <= now:
            until, token = heappop(self._ends)
            held = self._leases.get(token)
            if held is None or held.until != until:
                continue
            del self._leases[token]
            suspects += self._take_back(held, now, suspects)
            touched[held.entry.line.lane] = None
        while self._delayed and self._delayed[0][0] <= now:
            _, _, entry = heappop(self._delayed)
            self._back_in_line(entry)
            touched[entry.line.lane] = None
        for lane in touched:
            self._reschedule(lane, now)

    def _drop_waiting(self, entry: _Entry) -> None:
        line = entry.line
        if entry in line.front:
            line.front.remove(entry)
            line.front.sort()
        elif entry in line.tail:
            line.tail.remove(entry)
        else:
            self._delayed = sorted(waiting for waiting in self._delayed if waiting[2] is not entry)

    def _take_back(self, held: _Held, now: int, suspects: int) -> bool:
        """Take back the lease of a worker that is gone. Returns whether its request is a suspect, to be
        visited alone; `suspects` of them came before it."""
        entry = held.entry
        line = entry.line
        job = line.job
        line.lane.busy -= 1
        in_transit = held.worker.startswith(TRANSIT)
        if not in_transit:
            entry.crashes += 1
            entry.deadline = None
        if job.state is JobState.CANCELLED:
            job.cancelled += 1
        elif in_transit:
            self._back_in_line(entry)
        elif entry.crashes >= CRASH_LIMIT:
            job.note(WORKER_CRASHED)
            message = f"{entry.crashes} workers died or hung while visiting it"
            self._end(entry, Failure(WORKER_CRASHED, message, held.worker), now, "dead")
            self._maybe_finish(job, now)
        elif entry.crashes > 1:
            heappush(self._delayed, (now + suspects * STAGGER, entry.id, entry))
            return True
        else:
            self._back_in_line(entry)
        return False

    def _end_in_transit(self, tokens: Collection[int], now: int) -> None:
        """End leases in transit that no worker may visit, and give their slots back to the lanes."""
        if not tokens:
            return
        lanes: dict[_Lane, None] = {}
        for token in tokens:
            held = self._leases.pop(token)
            self._take_back(held, now, 0)
            lanes[held.entry.line.lane] = None
        for lane in lanes:
            self._reschedule(lane, now)
        self._woken.set()

    def _end(self, entry: _Entry, failure: Failure, now: int, state: str) -> None:
        job = entry.line.job
        entry.expires = None
        job.count_lane(entry.line.lane.name, -1)
        if state == "expired":
            job.note(failure.error)
            job.expired += 1
        else:
            job.dead += 1
        self._letters[entry.id] = DeadLetter(
            entry.id,
            _replace(entry.request, delay=0.0, ttl=None),
            entry.line.lane.name,
            failure,
            now / US,
            "expired" if state == "expired" else "dead",
        )

    def _maybe_finish(self, job: _Job, now: int) -> None:
        if job.over and job.added and job.state in (JobState.RUNNING, JobState.PAUSED):
            job.state = JobState.DONE
            job.finished = now

    def _respec(self, job: _Job, spec: JobSpec) -> None:
        job.respec(spec)
        now = self._now()
        for lane in {line.lane: None for line in job.lines}:
            if lane.pinned:
                continue
            shared = any(not line.job.over for line in lane.lines if line.job is not job)
            lane.gap = max(lane.gap, job.gap) if shared else job.gap
            lane.width = min(lane.width, spec.width) if shared else spec.width
            self._reschedule(lane, now)

    def _cancel(self, job: _Job) -> None:
        now = self._now()
        job.state = JobState.CANCELLED
        job.finished = now
        for line in job.lines:
            for entry in line.entries():
                entry.expires = None
            job.cancelled += len(line.front) + len(line.tail)
            line.front.clear()
            line.tail.clear()
            self._reschedule(line.lane, now)
        kept = [waiting for waiting in self._delayed if waiting[2].line.job is not job]
        job.cancelled += len(self._delayed) - len(kept)
        for _, _, entry in self._delayed:
            if entry.line.job is job:
                entry.expires = None
        self._delayed = sorted(kept)
        travelling = [
            token
            for token, held in self._leases.items()
            if held.entry.line.job is job and held.worker.startswith(TRANSIT)
        ]
        self._end_in_transit(travelling, now)

    def _switch_lines(self, job: _Job, *, off: bool) -> None:
        now = self._now()
        for line in job.lines:
            line.off = off
            if not off and (line.front or line.tail):
                line.vt = max(line.vt, line.lane.vt)
            self._reschedule(line.lane, now)
        if not off:
            self._woken.set()

    def _wake_at(self, streams: Collection[Stream] | None) -> float | None:
        def asked(entry: _Entry) -> bool:
            return streams is None or entry.line.stream in streams

        heads = [self._first(stream) for stream in (self._turns if streams is None else streams)]
        moments = [head[0] for head in heads if head is not None]
        moments += [at for at, _, entry in self._delayed if asked(entry)]
        moments += [held.until for held in self._leases.values() if asked(held.entry)]
        moments += [at for at, _, entry in self._expiring if entry.expires is not None and asked(entry)]
        if moments:
            return min(moments) / US
        for line in self._lines.values():
            if (line.front or line.tail) and (streams is None or line.stream in streams):
                return math.inf
        return None

    def _matching(self, which: Selection) -> Iterable[DeadLetter]:
        for id in sorted(self._letters):
            letter = self._letters[id]
            if which.job is not None and letter.request.job != which.job:
                continue
            if which.lane is not None and letter.lane != which.lane:
                continue
            if which.error is not None and letter.failure.error != which.error:
                continue
            if which.ids is not None and id not in which.ids:
                continue
            if which.since is not None and letter.ended_at <= which.since:
                continue
            yield letter

    def _find(self, url: str, job: _Job) -> RequestStatus:
        if urls.key(job.id, url) not in self._seen:
            return RequestStatus(job.id, "unknown", job_state=job.state)
        name = urls.lane_of(url)
        lane = self._lanes.get(name)
        view = self._lane_view(lane) if lane is not None else None
        for line in job.lines:
            for ahead, entry in enumerate(line.entries()):
                if entry.request.url == url:
                    ready = view.ready_at if view else None
                    return RequestStatus(job.id, "waiting", entry.request, view, job.state, ahead, ready)
        for at, _, entry in self._delayed:
            if entry.request.url == url and entry.line.job is job:
                return RequestStatus(job.id, "delayed", entry.request, view, job.state, ready_at=at / US)
        for held in self._leases.values():
            if held.entry.request.url == url and held.entry.line.job is job:
                request, until = held.entry.request, held.until / US
                return RequestStatus(
                    job.id, "leased", request, view, job.state, worker=held.worker, until=until
                )
        for letter in self._letters.values():
            if letter.request.url == url and letter.request.job == job.id:
                return RequestStatus(
                    job.id, letter.state, letter.request, view, job.state, failure=letter.failure
                )
        return RequestStatus(job.id, "done", None, view, job.state)

    def _lane_view(self, lane: _Lane) -> Lane:
        return Lane(
            lane.name,
            lane.pace_gap / US,
            lane.width,
            lane.burst,
            lane.floor / US,
            bool(lane.pinned),
            bool(lane.paused),
            lane.busy,
            sum(len(line.front) + len(line.tail) for line in lane.lines),
            None if lane.at is None else max(lane.at, lane.ready()) / US,
            lane.blocked / US,
        )

    def _view(self, job: _Job) -> Job:
        leased = sum(1 for held in self._leases.values() if held.entry.line.job is job)
        delayed = sum(1 for _, _, entry in self._delayed if entry.line.job is job)
        waiting = sum(len(line.front) + len(line.tail) for line in job.lines)
        counts = Counts(
            added=job.added,
            known=job.known,
            refused=job.refused,
            waiting=waiting,
            delayed=delayed,
            leased=leased,
            done=job.done,
            skipped=job.skipped,
            dead=job.dead,
            expired=job.expired,
            cancelled=job.cancelled,
            retried=job.retried,
            items=len(job.items),
            stale=job.stale,
        )
        finished = None if job.finished is None else job.finished / US
        started = None if job.started is None else job.started / US
        return Job(job.id, job.spec, job.state, counts, dict(job.errors), job.created / US, finished, started)


def _refused_urls(requests: Sequence[Request], answers: Sequence[Added]) -> list[str]:
    if Added.REFUSED not in answers:
        return []
    return [r.url for r, answer in zip(requests, answers, strict=True) if answer is Added.REFUSED]


def _lane_or_empty(url: str) -> str:
    return urls.lane_of(url) if "://" in url else ""
