"""The decisions of the SQL frontiers: rows in, rows out, no SQL, no clock.

SQLite and PostgreSQL read rows in their own way, call these functions, and write the results back.
`memory.py` and `redis/*.lua` make the same decisions on their own; the contract compares them with these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shoal import urls
from shoal.frontier.rows import CRASH, JobRow, LaneRow, Line, expires_of, request_of
from shoal.frontier.rules import STAGGER, STEP, US, WEIGHT, advance, microseconds, with_worker
from shoal.model import (
    CRASH_LIMIT,
    EXPIRED,
    TRANSIT,
    WORKER_CRASHED,
    Added,
    Dead,
    DeadLetter,
    Done,
    Failure,
    Lane,
    Lease,
    Request,
    Retry,
    Verdict,
)

Entry = tuple[Any, ...]
"""A request between two tables: id, url, depth, attempt, expires, extra. Claimed and leased requests have
no `expires`."""

Ending = tuple[Line, Entry, Failure]
"""A request that becomes a dead letter."""

Refund = tuple[int, JobRow, str]
"""A request that no longer counts against the page budgets: how many requests had been found when it
ended, its job, its lane."""

_CRASH_MESSAGE = f"{CRASH_LIMIT} workers died or hung while visiting it"


# -- adding ---------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A request that may be new, with its key and lane, so that they are computed once."""

    request: Request
    key: bytes
    lane: str


def candidate(request: Request) -> Candidate:
    lane = urls.lane_of(request.url)
    return Candidate(
        request, urls.key(request.job, request.url, request.method, request.body, lane=lane), lane
    )


class Admitted(NamedTuple):
    answers: list[Added]
    new: list[Candidate]
    refused: list[bytes]
    """Keys that must be forgotten again."""


def admit(
    requests: Sequence[Candidate],
    fresh: set[bytes],
    named: Mapping[str, JobRow],
    refunds: Iterable[Refund],
    spread: Callable[[JobRow, str], int],
    count_lane: Callable[[JobRow, str, int], None],
) -> Admitted:
    """Decide which requests are accepted. `fresh` has the keys that were not known before; the keys of
    accepted requests are removed from it. The counters of the jobs are updated.

    `spread` returns how much of a host's budget is used, `count_lane` changes it. A visit that ended
    between two requests gives its page back between them, not earlier: that may decide which request is
    refused.
    """
    back = deque(refunds)
    answers: list[Added] = []
    new: list[Candidate] = []
    refused: list[bytes] = []
    for number, each in enumerate(requests):
        if back:
            _refund(back, number, count_lane)
        request, key, lane = each
        job = named[request.job]
        if job.state == "cancelled":
            job.count("refused")
            answers.append(Added.REFUSED)
            if key in fresh:
                fresh.discard(key)
                refused.append(key)
        elif key not in fresh:
            job.count("known")
            answers.append(Added.KNOWN)
        elif not _has_room(job, lane, spread, count_lane):
            job.count("refused")
            answers.append(Added.REFUSED)
            # The key stays in `fresh`: its double in this batch must be refused again, not known.
            refused.append(key)
        else:
            fresh.discard(key)
            job.count("added")
            job.used += 1
            answers.append(Added.NEW)
            new.append(each)
    _refund(back, len(requests), count_lane)
    return Admitted(answers, new, refused)


def _refund(back: deque[Refund], found: int, count_lane: Callable[[JobRow, str, int], None]) -> None:
    while back and back[0][0] <= found:
        _, job, lane = back.popleft()
        job.used -= 1
        count_lane(job, lane, -1)


def _has_room(
    job: JobRow,
    lane: str,
    spread: Callable[[JobRow, str], int],
    count_lane: Callable[[JobRow, str, int], None],
) -> bool:
    """Return whether the page budgets allow one more request; if so, count it against its host's budget."""
    spec = job.spec
    if spec.max_pages is not None and job.used >= spec.max_pages:
        return False
    if spec.max_per_host is None or job.is_start_lane(lane):
        return True
    if spread(job, lane) >= spec.max_per_host:
        return False
    count_lane(job, lane, 1)
    return True


def has_host_budget(job: JobRow, lane: str) -> bool:
    """Return whether this job has a page budget on this lane."""
    return job.spec.max_per_host is not None and not job.is_start_lane(lane)


def refused_urls(requests: Sequence[Request], answers: Sequence[Added]) -> list[str]:
    if Added.REFUSED not in answers:
        return []
    return [r.url for r, answer in zip(requests, answers, strict=True) if answer is Added.REFUSED]


def adopt(row: LaneRow, job: JobRow) -> None:
    """Give a lane the pace of a job that comes to it. An idle lane takes the job's pace; a lane with other
    work keeps the slower of the two."""
    if row.pinned or (row.gap == job.gap and row.width == job.width):
        return
    if row.busy or row.streams:
        row.gap = max(row.gap, job.gap)
        row.width = min(row.width, job.width)
    else:
        row.gap, row.width = job.gap, job.width


def wake(row: LaneRow, line: Line, job: JobRow) -> bool:
    """Note that a request joins this line, so its lane must have a turn in its stream. Returns whether
    the lane must be placed again."""
    if job.state == "paused":
        return False
    if line.stream in row.streams:
        return row.at is None
    row.streams = tuple(sorted((*row.streams, line.stream)))
    return True


def recount(row: LaneRow, live: Mapping[int, int], now: int) -> None:
    """Place a lane by its counted work: the highest priority in each stream with work."""
    row.streams = tuple(sorted(live))
    row.place(now, max(live.values(), default=0))


# -- claiming -------------------------------------------------------------------------------


def pick(
    row: LaneRow,
    free: int,
    live: Sequence[tuple[Line, int]],
    heads: Mapping[int, Sequence[Entry]],
    steps: list[tuple[int, int]],
) -> tuple[list[tuple[Line, Entry]], int]:
    """Take up to `free` entries from a lane with several lines. The line whose next visit ends first in
    virtual time is served next.

    `live` are the lines with work and their virtual times. `heads` has the first entries of the requested
    lines, one more than can be taken. New virtual times are appended to `steps`. Returns the entries that
    were taken and the highest priority that remains.
    """
    lines = {line.id: line for line, _ in live}
    vts = {line.id: vt for line, vt in live if line.id in heads}
    used = dict.fromkeys(vts, 0)
    taken: list[tuple[Line, Entry]] = []
    while len(taken) < free:
        able = [id for id in vts if used[id] < len(heads[id])]
        if not able:
            break
        id = min(able, key=lambda id: (vts[id] + STEP[lines[id].priority], id))
        taken.append((lines[id], heads[id][used[id]]))
        used[id] += 1
        vts[id] += STEP[lines[id].priority]
        row.vt = advance(row.vt, sum(WEIGHT[lines[x].priority] for x in able), vts[id])
    priority = 0
    streams: set[int] = set()
    for id, line in lines.items():
        if used.get(id):
            steps.append((vts[id], id))
        if id not in vts or used[id] < len(heads[id]):
            streams.add(line.stream)
            priority = max(priority, line.priority)
    row.streams = tuple(sorted(streams))
    return taken, priority


# -- ending ---------------------------------------------------------------------------------


class Settled:
    """The effects of a batch of verdicts."""

    __slots__ = (
        "back",
        "dead",
        "delayed",
        "expired",
        "found",
        "freed",
        "items",
        "lost",
        "refunds",
        "tallies",
    )

    def __init__(self) -> None:
        self.lost: list[Lease] = []
        self.freed: dict[int, int] = {}
        """How many leases ended, by lane."""
        self.found: list[Request] = []
        self.refunds: list[Refund] = []
        self.items: dict[int, list[bytes]] = {}
        """By job."""
        self.delayed: list[tuple[Any, ...]] = []
        """Rows of `delayed`: at, id, line, url, depth, attempt, expires, extra."""
        self.back: list[tuple[Line, Entry]] = []
        self.dead: list[Ending] = []
        self.expired: list[Ending] = []
        self.tallies: list[tuple[int, str]] = []


def settle(
    verdicts: Sequence[Verdict],
    lines: dict[int, Line],
    entries: Mapping[int, tuple[Any, ...]],
    jobs: Mapping[int, JobRow],
    named: Mapping[str, JobRow],
    now: int,
) -> Settled:
    """Decide what happens to the requests of leases that end with these verdicts.

    `lines` has the line of each lease that existed, by token. Each verdict removes its line from it, so a
    second verdict on one lease is lost. `entries` has (id, url, depth, attempt, extra, worker) of leases
    whose verdict is not `Done`. The counters of the jobs are updated.
    """
    result = Settled()
    for verdict in verdicts:
        lease = verdict.lease
        line = lines.pop(lease.token, None)
        if line is None:
            result.lost.append(lease)
            named[lease.request.job].count("stale")
            continue
        result.freed[line.lane] = result.freed.get(line.lane, 0) + 1
        job = jobs[line.job]
        if job.state == "cancelled":
            job.count("cancelled")
        elif isinstance(verdict, Done):
            job.count("done")
            if verdict.skipped:
                job.count("skipped")
                result.refunds.append((len(result.found), job, lease.lane))
            if verdict.items:
                result.items.setdefault(job.id, []).extend(verdict.items)
            if verdict.found:
                result.found.extend(verdict.found)
        else:
            _settle_failed(result, verdict, line, entries[lease.token], job, now)
    return result


def _settle_failed(
    result: Settled, verdict: Verdict, line: Line, entry: tuple[Any, ...], job: JobRow, now: int
) -> None:
    id, url, depth, attempt, extra, worker = entry
    if isinstance(verdict, Retry):
        job.count("retried")
        at = now + microseconds(verdict.after)
        result.delayed.append((at, id, line.id, url, depth, attempt + 1, None, extra))
        result.tallies.append((job.id, verdict.failure.error))
    elif isinstance(verdict, Dead):
        result.refunds.append((len(result.found), job, verdict.lease.lane))
        if verdict.failure.error == EXPIRED:
            # No visit was made, so the number of failures stays.
            result.expired.append((line, (id, url, depth, attempt % CRASH, None, extra), verdict.failure))
        else:
            why = with_worker(verdict.failure, worker)
            result.dead.append((line, (id, url, depth, attempt % CRASH + 1, None, extra), why))
            result.tallies.append((job.id, verdict.failure.error))
    else:
        result.back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))


class TakenBack(NamedTuple):
    """What happens to the requests of leases whose worker is gone."""

    back: list[tuple[Line, Entry]]
    """They wait in line again."""
    staggered: list[tuple[Any, ...]]
    """Rows of `delayed`: several workers died over these requests, so they come back one by one."""
    dead: list[Ending]


def take_back(
    rows: Iterable[tuple[Any, ...]],
    lines: Mapping[int, Line],
    jobs: Mapping[int, JobRow],
    lanes: Mapping[int, LaneRow],
    now: int,
) -> TakenBack:
    """Decide what happens to leases (until, token, line, id, url, depth, attempt, extra, worker) whose
    workers are gone. Their lanes get the slots back; the counters of cancelled jobs are updated. A lease in
    transit does not count as a crash."""
    result = TakenBack([], [], [])
    for _, _, line_id, id, url, depth, attempt, extra, worker in sorted(rows, key=lambda row: row[:2]):
        line = lines[line_id]
        job = jobs[line.job]
        lanes[line.lane].busy -= 1
        crashed = attempt + CRASH
        if job.state == "cancelled":
            job.count("cancelled")
        elif worker.startswith(TRANSIT):
            result.back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))
        elif crashed // CRASH >= CRASH_LIMIT:
            failure = Failure(WORKER_CRASHED, _CRASH_MESSAGE, worker)
            result.dead.append((line, (id, url, depth, attempt % CRASH, None, extra), failure))
        elif crashed // CRASH > 1:
            at = now + len(result.staggered) * STAGGER
            result.staggered.append((at, id, line.id, url, depth, crashed, None, extra))
        else:
            result.back.append((line, (id, url, depth, crashed, None, extra)))
    return result


def letter_row(ending: Ending, state: str, queue: str, now: int) -> tuple[Any, ...]:
    """Return a row of `ended`."""
    line, (id, url, depth, attempt, _, extra), failure = ending
    return (
        *(id, state, now, line.job, urls.lane_of(url), queue, line.priority, url, depth, attempt % CRASH),
        *(extra, failure.error, failure.message, failure.worker),
    )


# -- what people see ------------------------------------------------------------------------


def letter_of(row: Sequence[Any]) -> DeadLetter:
    """Return a row of `ended` (with the job's name) as a dead letter."""
    id, state, at, job, lane, queue, priority, url, depth, attempt, extra, *why = row
    request = request_of(url, job, queue, priority, depth, attempt, extra)
    # Once revived, it may wait as long as it needs.
    request = msgspec.structs.replace(request, ttl=None) if request.ttl is not None else request
    return DeadLetter(id, request, lane, Failure(*why), at / US, state)


def lane_view(name: str, lane: LaneRow, waiting: int) -> Lane:
    ready = None if lane.at is None else max(lane.at, _ready(lane)) / US
    return Lane(
        name=name,
        gap=lane.pace_gap / US,
        width=lane.width,
        burst=lane.burst,
        floor=lane.floor / US,
        pinned=bool(lane.pinned),
        paused=bool(lane.paused),
        busy=lane.busy,
        waiting=waiting,
        ready_at=ready,
        blocked_until=lane.blocked / US,
    )


def _ready(lane: LaneRow) -> int:
    return max(lane.tat - lane.burst * lane.pace_gap, lane.blocked)


def check_lane(
    name: str,
    lane: LaneRow,
    leases: int,
    live: set[int],
    turns: set[tuple[int, int]],
    sole: int | None,
    now: int,
) -> list[str]:
    """Compare a lane's row with what was counted: leases, streams with work, turns (stream, moment), its
    only line. Returns a sentence for each difference."""
    wrong: list[str] = []
    if lane.busy != leases:
        wrong.append(f"lane {name} counts {lane.busy} leases, there are {leases}")
    if set(lane.streams) != live:
        wrong.append(f"lane {name} lists the wrong streams with work")
    if live and lane.busy < lane.width and not lane.paused and lane.at is None:
        wrong.append(f"lane {name} has work and a free slot but is not scheduled")
    planned = set() if lane.at is None else {(stream, lane.at) for stream in lane.streams}
    if planned != turns:
        wrong.append(f"lane {name} has other turns than its row says")
    if lane.at is not None and lane.at > max(now, _ready(lane)):
        wrong.append(f"lane {name} is scheduled later than it is ready")
    if lane.sole != sole:
        wrong.append(f"lane {name} names the wrong line as its only one")
    return wrong
