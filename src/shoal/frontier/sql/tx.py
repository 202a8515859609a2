"""One transaction: rows are read once, changed in memory and written back once.

`Tx` knows lanes, streams, lines, jobs and requests, but no database. Each database adds how statements run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shoal import urls
from shoal.errors import NoSuchJob
from shoal.frontier.decisions import Ending, Entry, has_host_budget, letter_row, recount, take_back
from shoal.frontier.rows import JobRow, LaneRow, Line, spec_of
from shoal.frontier.sql import statements as sql
from shoal.frontier.sql.statements import Statement
from shoal.model import JobSpec

T = TypeVar("T")

Place = tuple[int, int, int, int]
"""The place of a line: lane, stream, job, priority."""

Turn = tuple[int, int, int]
"""A row of `turn`: stream, moment, lane."""

MANY = 500_000
"""The number of lanes, and of lines, that are remembered at most."""


class Store(Protocol):
    """How a database begins and commits a transaction."""

    async def write(
        self,
        work: Callable[[Any], Awaitable[T]],
        *,
        durable: bool = False,
        wakes: bool = False,
        together: bool = False,
    ) -> T:
        """Run `work` in one transaction and commit it.

        `durable`: once this returns, the work survives a crash of the machine; cancelling the caller does
        not undo it. `wakes`: afterwards something may be claimable that was not before. `together`: it may
        run beside other transactions; if it calls `Tx.need_all`, it is run again, alone.
        """
        ...

    async def read(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run `work` on one snapshot. Readers never wait for writers."""
        ...


class Memory:
    """What a process remembers between transactions: names and numbers that never change."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.job_names: dict[int, str] = {}
        self.job_ids: dict[str, int] = {}
        self.specs: dict[int, tuple[bytes, JobSpec]] = {}
        self.lane_ids: dict[str, int] = {}
        self.stream_ids: dict[tuple[str, int], int] = {}
        self.queue_names: dict[int, str] = {}
        self.started: set[int] = set()
        """Jobs whose row records that they have started."""
        self.epoch = -1
        self.forget_lines()

    def forget_lines(self) -> None:
        self.lines: dict[int, Line] = {}
        self.line_ids: dict[Place, Line] = {}

    def check_epoch(self, epoch: int) -> None:
        """Forget lines and specs if another process has dropped a line or changed a job since."""
        if epoch != self.epoch:
            self.forget_lines()
            self.specs.clear()
            self.epoch = epoch

    def remember(self, line: Line) -> Line:
        self.lines[line.id] = line
        self.line_ids[line.lane, line.stream, line.job, line.priority] = line
        return line


class NeedsAll(Exception):
    """A transaction cannot run beside others. It must be run again, alone."""


class Tx(ABC):
    """One transaction.

    Alone it may do everything. Beside others it may only move requests between existing lines, each under
    the lock of its lane; before it does anything else, it calls `need_all`.
    """

    def __init__(self, memory: Memory, now: int, *, alone: bool) -> None:
        self.memory = memory
        self.now = now
        self.alone = alone
        self.lasting = False
        """Whether the commit must survive a crash of the server although the work is not `durable`."""
        self.wakes = False
        """Whether something became claimable that the caller of `write` did not expect."""
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the rows: they have been written, and will be read again."""
        self.jobs: dict[int, JobRow] = {}
        self.jobs_named: dict[str, JobRow] = {}
        self.lanes: dict[int, LaneRow] = {}
        self.bodies: Mapping[int, list[bytes]] = {}
        """Items to store, by job."""
        self._tallies: dict[tuple[int, str], int] = {}
        self._spread: dict[tuple[int, str], int] = {}
        """The stored budgets per host; their changes are in `_spread_moves`."""
        self._spread_moves: dict[tuple[int, str], int] = {}

    def need_all(self) -> None:
        """Raises NeedsAll unless this transaction is alone."""
        if not self.alone:
            raise NeedsAll

    # Implemented by each database

    @abstractmethod
    async def run(self, statement: Statement, *values: Any) -> list[Any]:
        """Returns the rows. A list among the values is an array."""

    @abstractmethod
    async def change(self, statement: Statement, *values: Any) -> int:
        """Returns how many rows were changed."""

    @abstractmethod
    async def many(self, statement: Statement, rows: Collection[Sequence[Any]]) -> list[Any]:
        """Run a statement for each of these rows. Returns the rows that come back."""

    @abstractmethod
    async def learn_keys(self, keys: list[bytes]) -> set[bytes]:
        """Store keys. Returns those that were not known."""

    @abstractmethod
    async def request_ids(self, count: int) -> Iterable[int]:
        """Numbers for as many new requests, growing. At most as many as keys were learned."""

    @abstractmethod
    async def end_leases_of(
        self, tokens: list[int], with_entry: list[int]
    ) -> tuple[dict[int, int], dict[int, tuple[Any, ...]]]:
        """End leases. Returns the line of each that was there, by token, and (id, url, depth, attempt, extra,
        worker) at least of those `with_entry`."""

    @abstractmethod
    async def write_lanes(self, gone: list[Turn], come: list[Turn], rows: Collection[LaneRow]) -> None:
        """Write back lanes and their turns."""

    @abstractmethod
    async def write_jobs(self, jobs: list[JobRow]) -> dict[int, int]:
        """Move the counters of jobs and their number of items; a job without live requests is done. Returns
        how many items each job has now."""

    async def value(self, statement: Statement, *values: Any) -> Any:
        """Returns the first column of the first row, None without one."""
        rows = await self.run(statement, *values)
        return rows[0][0] if rows else None

    # Jobs

    async def load_jobs(self, names: Iterable[str] = (), ids: Iterable[int] = ()) -> None:
        """Load these jobs. Raises NoSuchJob."""
        # Usually it is one job, and an array costs more.
        missing = [name for name in dict.fromkeys(names) if name not in self.jobs_named]
        if len(missing) == 1:
            self._know_jobs(await self.run(sql.JOB, *missing))
        elif missing:
            self._know_jobs(await self.run(sql.JOBS_BY_NAME, missing))
        for name in missing:
            if name not in self.jobs_named:
                raise NoSuchJob(name)
        absent = [id for id in dict.fromkeys(ids) if id not in self.jobs]
        if len(absent) == 1:
            self._know_jobs(await self.run(sql.JOB_BY_ID, *absent))
        elif absent:
            self._know_jobs(await self.run(sql.JOBS_BY_ID, absent))

    def _know_jobs(self, rows: Iterable[Sequence[Any]]) -> None:
        memory = self.memory
        for id, name, spec, state, used, live in rows:
            if id in self.jobs:
                continue
            cached = memory.specs.get(id)
            if cached is None or cached[0] != spec:
                cached = memory.specs[id] = (spec, spec_of(spec))
            memory.job_names[id] = name
            memory.job_ids[name] = id
            self.jobs[id] = self.jobs_named[name] = JobRow(id, name, cached[1], state, used, live)

    async def job(self, name: str) -> JobRow:
        """Raises NoSuchJob."""
        await self.load_jobs([name])
        return self.jobs_named[name]

    async def job_id(self, name: str) -> int:
        """Raises NoSuchJob."""
        id: int | None = await self.value(sql.JOB_ID, name)
        if id is None:
            raise NoSuchJob(name)
        return id

    async def load_job_names(self, ids: Iterable[int]) -> dict[int, str]:
        missing = [id for id in dict.fromkeys(ids) if id not in self.memory.job_names]
        if missing:
            self.memory.job_names.update(await self.run(sql.JOB_NAMES, missing))
        return self.memory.job_names

    # Lanes

    async def lane_ids(self, names: Iterable[str]) -> Mapping[str, int]:
        """Find or make lanes, older ones first. Returns all lanes that are remembered, these among them."""
        known = self.memory.lane_ids
        names = list(dict.fromkeys(names))
        if len(known) > MANY:
            known.clear()
        missing = [name for name in names if name not in known]
        if missing:
            known.update(await self.run(sql.LANE_IDS, missing))
            missing = [name for name in missing if name not in known]
        if missing:
            self.need_all()
            known.update(await self.run(sql.NEW_LANES, missing))
        return known

    async def load_lanes(self, ids: Iterable[int]) -> None:
        """Load these lanes and lock them."""
        missing = sorted({id for id in ids if id not in self.lanes})
        if missing:
            for found in await self.run(sql.LANES, missing):
                self.lanes[found[0]] = LaneRow(found)

    async def place_anew(self, rows: Collection[LaneRow]) -> None:
        """Count the streams with work on these lanes, and place the lanes accordingly."""
        if not rows:
            return
        streams: dict[int, dict[int, int]] = {}
        for lane, stream, priority in await self.run(sql.LIVE_STREAMS, [row.id for row in rows]):
            streams.setdefault(lane, {})[stream] = priority
        for row in rows:
            recount(row, streams.get(row.id, {}), self.now)

    # Streams

    async def load_streams(self, places: Iterable[tuple[str, JobRow]]) -> None:
        """Find or make streams; `stream` knows them afterwards."""
        known = self.memory.stream_ids
        for place in dict.fromkeys((queue, job.id if job.spec.dedicated else 0) for queue, job in places):
            if place in known:
                continue
            id = await self.value(sql.STREAM, *place)
            if id is None:
                self.need_all()
                id = await self.value(sql.NEW_STREAM, *place)
            known[place] = id
            self.memory.queue_names[id] = place[0]

    def stream(self, queue: str, job: JobRow) -> int:
        return self.memory.stream_ids[queue, job.id if job.spec.dedicated else 0]

    async def load_queue_names(self, streams: Iterable[int]) -> dict[int, str]:
        missing = [id for id in dict.fromkeys(streams) if id not in self.memory.queue_names]
        if missing:
            self.memory.queue_names.update(await self.run(sql.QUEUE_NAMES, missing))
        return self.memory.queue_names

    async def streams(self, queues: Collection[str] | None, job: str | None) -> list[int]:
        """Every stream of these queues or this job, with work or without."""
        job_id = None if job is None else await self.job_id(job)
        rows = await self.run(sql.STREAMS, job_id)
        return [id for id, queue in rows if queues is None or queue in queues]

    # Lines

    async def load_lines(self, ids: Iterable[int]) -> dict[int, Line]:
        """Returns all lines that are remembered, these among them."""
        memory = self.memory
        ids = set(ids)
        missing = [id for id in ids if id not in memory.lines]
        if missing:
            if len(memory.lines) > MANY:
                memory.forget_lines()
                missing = list(ids)
            for row in await self.run(sql.LINES, missing):
                memory.remember(Line(*row))
        return memory.lines

    async def make_lines(self, wanted: Iterable[Place]) -> Mapping[Place, Line]:
        """Find or make lines. Making some drops their lanes' lines of jobs that are over. Returns all lines
        that are remembered, these among them.

        The lanes and jobs must have been loaded, and the counters of the new requests moved.
        """
        memory = self.memory
        if len(memory.lines) > MANY:
            memory.forget_lines()
        places = list(dict.fromkeys(wanted))
        missing = [place for place in places if place not in memory.line_ids]
        if missing:
            for row in await self.many(sql.LINES_AT, missing):
                memory.remember(Line(*row))
            missing = [place for place in missing if place not in memory.line_ids]
        if missing:
            # Dropping old lines forgets all of them.
            kept = [memory.line_ids[place] for place in places if place in memory.line_ids]
            await self._insert_lines(missing)
            for line in kept:
                memory.remember(line)
        return memory.line_ids

    async def _insert_lines(self, missing: list[Place]) -> None:
        self.need_all()
        others = await self.run(sql.LINES_ON, list({place[0] for place in missing}))
        await self.load_jobs(ids=[job for _, job, _ in others])
        coming = {(place[0], place[2]) for place in missing}
        # Forget the lines of jobs that are over, so that a lane's lines stay few.
        over = [id for lane, job, id in others if self.jobs[job].live == 0 and (lane, job) not in coming]
        if over:
            await self.run(sql.DROP_LINES, over)
            self.memory.forget_lines()
            # Other processes must forget the lines that they remember.
            self.memory.epoch = await self.value(sql.NEXT_EPOCH)
        gone = set(over)
        count = Counter(lane for lane, _, id in others if id not in gone)
        count.update(place[0] for place in missing)
        rows = [
            (*place, self.lanes[place[0]].vt, int(self.jobs[place[2]].state == "paused")) for place in missing
        ]
        for row in await self.many(sql.NEW_LINES, rows):
            line = self.memory.remember(Line(*row))
            self.lanes[line.lane].sole = line.id if count[line.lane] == 1 else None

    async def top_priorities(self, lanes: Collection[int]) -> dict[int, int]:
        """The highest priority that waits on each of these lanes."""
        return dict(await self.run(sql.TOP_PRIORITIES, list(lanes))) if lanes else {}

    async def activate(self, lines: Iterable[Line]) -> None:
        """Start lines that were empty at their lane's virtual time: absence earns no credit."""
        rows = [(line.id, self.lanes[line.lane].vt) for line in lines if self.lanes[line.lane].sole is None]
        if rows:
            await self.many(sql.ACTIVATE, rows)

    # Requests

    async def wait_in_line(self, rows: Collection[Sequence[Any]]) -> None:
        """Store rows (line, id, url, depth, attempt, expires, extra)."""
        if rows:
            await self.many(sql.WAIT, rows)

    async def delay(self, rows: Collection[Sequence[Any]]) -> None:
        """Store rows (at, id, line, url, depth, attempt, expires, extra)."""
        if rows:
            await self.many(sql.DELAY, rows)

    async def back_in_line(self, back: list[tuple[Line, Entry]]) -> None:
        """Let entries wait, in the order of their ids. The caller places the lanes."""
        if not back:
            return
        lines = {line.id: line for line, _ in back}
        await self.load_lanes(line.lane for line in lines.values())
        await self.activate(lines.values())
        await self.wait_in_line([(line.id, *entry) for line, entry in back])

    async def end_leases(self, which: Statement, value: Any) -> tuple[list[tuple[Line, Entry]], int]:
        """End leases whose workers are gone. Returns the entries that wait again, and how many leases."""
        self.need_all()
        rows = await self.run(which, value)
        if not rows:
            return [], 0
        lines = await self.load_lines(row[2] for row in rows)
        await self.load_jobs(ids=[lines[row[2]].job for row in rows])
        await self.load_lanes(lines[row[2]].lane for row in rows)
        ended = take_back(rows, lines, self.jobs, self.lanes, self.now)
        await self.delay(ended.staggered)
        for line, _, failure in ended.dead:
            self.tally(line.job, failure.error)
        await self.end_rows(ended.dead, "dead")
        return ended.back, len(rows)

    async def recall(self, which: Statement, value: Any) -> int:
        """End leases, put their requests back in line, and write everything back. Returns how many leases."""
        back, count = await self.end_leases(which, value)
        await self.back_in_line(back)
        await self.place_anew(self.lanes.values())
        await self.finish()
        return count

    async def end_rows(self, ends: Sequence[Ending], state: str, *, refund: bool = True) -> None:
        """Turn entries into dead letters. With `refund`, their pages return to the budgets."""
        if not ends:
            return
        await self.load_jobs(ids=[line.job for line, _, _ in ends])
        queues = await self.load_queue_names(line.stream for line, _, _ in ends)
        for line, entry, failure in ends:
            job = self.jobs[line.job]
            job.count(state)
            if state == "expired":
                self.tally(job.id, failure.error)
            if refund:
                job.used -= 1
                self.count_lane(job, urls.lane_of(entry[1]), -1)
        letters = [letter_row(ending, state, queues[ending[0].stream], self.now) for ending in ends]
        await self.many(sql.BURY, letters)

    # Counters

    def tally(self, job: int, error: str) -> None:
        """Count a failed visit."""
        self._tallies[job, error] = self._tallies.get((job, error), 0) + 1

    async def load_spread(self, hosts: Iterable[tuple[JobRow, str]]) -> None:
        """Load the budgets per host of jobs that have one."""
        pairs = {(job.id, lane) for job, lane in hosts if job.spec.max_per_host is not None}
        pairs -= self._spread.keys()
        if pairs:
            rows = await self.many(sql.SPREAD, pairs)
            self._spread.update({(job, lane): added for job, lane, added in rows})

    def spread(self, job: JobRow, lane: str) -> int:
        """Return how much of a host's budget is used."""
        place = (job.id, lane)
        return self._spread.get(place, 0) + self._spread_moves.get(place, 0)

    def count_lane(self, job: JobRow, lane: str, by: int) -> None:
        """Change what counts against the budget per host, for jobs that have one."""
        if has_host_budget(job, lane):
            place = (job.id, lane)
            self._spread_moves[place] = self._spread_moves.get(place, 0) + by

    # The end

    async def finish(self) -> None:
        """Write back everything that was changed in memory, always in the same order."""
        if self.lanes:
            await self._finish_lanes()
        if self._spread_moves:
            moves = [(*place, by) for place, by in sorted(self._spread_moves.items()) if by]
            await self.many(sql.MOVE_SPREAD, moves)
        if self._tallies:
            await self.many(sql.TALLY, [(*place, n) for place, n in sorted(self._tallies.items())])
        jobs = [job for job in self.jobs.values() if job.delta or job.id in self.bodies]
        if jobs:
            totals = await self.write_jobs(sorted(jobs, key=lambda job: job.id))
            await self._store_items(totals)

    async def _finish_lanes(self) -> None:
        gone: list[Turn] = []
        come: list[Turn] = []
        for row in self.lanes.values():
            at, was, streams, had = row.at, row.old_at, row.streams, row.old_streams
            if at == was and streams == had:
                continue
            same = frozenset(had).intersection(streams) if at == was else ()
            if was is not None:
                gone += [(stream, was, row.id) for stream in had if stream not in same]
            if at is not None:
                come += [(stream, at, row.id) for stream in streams if stream not in same]
            row.old_at, row.old_streams = at, streams
        await self.write_lanes(gone, come, self.lanes.values())

    async def _store_items(self, totals: dict[int, int]) -> None:
        items: list[tuple[int, bytes]] = []
        for id, bodies in self.bodies.items():
            items += enumerate(bodies, (id << 40) + totals[id] - len(bodies) + 1)
        if items:
            await self.many(sql.ITEMS, items)
