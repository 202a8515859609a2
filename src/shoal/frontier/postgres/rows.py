"""Rows: lanes, lines and jobs inside one transaction, and what is remembered between two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import asyncpg

from shoal import urls
from shoal.errors import NoSuchJob
from shoal.frontier.rows import CRASH, LANE, JobRow, LaneRow, Line, expires_of, packed, spec_of
from shoal.frontier.rules import STAGGER
from shoal.model import CRASH_LIMIT, TRANSIT, WORKER_CRASHED, Failure, JobSpec

Entry = tuple[Any, ...]
"""A request on its way between tables: id, url, depth, attempt, expires, extra."""

Place = tuple[int, int, int, int]
"""Where a line is: lane, stream, job, priority."""

MANY = 500_000
"""So many lanes or lines are remembered at most."""

COPY = 1000
"""From so many rows on COPY is faster than arrays, which asyncpg examines value by value."""
WAITING = ("line", "id", "url", "depth", "attempt", "expires", "extra")

_COUNTERS = ("added", "known", "refused", "done", "skipped", "dead", "expired", "cancelled", "retried")

_LIVE = "(j.added+d.added)-(j.done+d.done)-(j.dead+d.dead)-(j.expired+d.expired)-(j.cancelled+d.cancelled)"

_WRITE_JOBS = (
    "UPDATE job j SET "
    + ", ".join(f"{name}=j.{name}+d.{name}" for name in (*_COUNTERS, "items", "stale"))
    + f", state=CASE WHEN {_LIVE}=0 AND j.added+d.added>0 AND j.state IN ('running', 'paused') THEN 'done'"
    f" WHEN {_LIVE}<>0 AND j.state='done' THEN 'running' ELSE j.state END"
    f", finished=CASE WHEN {_LIVE}=0 AND j.added+d.added>0 AND j.state IN ('running', 'paused') THEN $1"
    f" WHEN {_LIVE}<>0 AND j.state='done' THEN NULL ELSE j.finished END"
    ", started=CASE WHEN d.done+d.retried>0 THEN coalesce(j.started, $1) ELSE j.started END"
    " FROM unnest("
    + ", ".join(f"${n}::bigint[]" for n in range(2, 14))
    + f") AS d(id, {', '.join(_COUNTERS)}, items, stale) WHERE j.id=d.id RETURNING j.id, j.items"
)

_LANE_COLUMNS = ("gap", "width", "burst", "floor", "pinned", "paused", "tat", "blocked", "busy", "vt", "at")

_WRITE_LANES = (
    "WITH gone AS (DELETE FROM turn t USING unnest($1::bigint[], $2::bigint[], $3::bigint[])"
    " AS o(stream, at, lane) WHERE t.stream=o.stream AND t.at=o.at AND t.lane=o.lane),"
    " come AS (INSERT INTO turn SELECT * FROM unnest($4::bigint[], $5::bigint[], $6::bigint[]))"
    " UPDATE lane l SET "
    + ", ".join(f"{name}=c.{name}" for name in (*_LANE_COLUMNS, "sole", "streams"))
    + " FROM unnest("
    + ", ".join(f"${n}::bigint[]" for n in range(7, 20))
    + f", $20::text[]) AS c(id, {', '.join(_LANE_COLUMNS)}, sole, streams) WHERE l.id=c.id"
)

_LIVE_LINES = (
    "FROM line WHERE lane=ANY($1::bigint[]) AND off=0"
    " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
)


def text(value: str) -> str:
    """What a text column can hold: neither NUL nor half a character."""
    return value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def lane_row(row: Sequence[Any]) -> LaneRow:
    streams: str = row[12]
    return LaneRow((*row[:12], streams if "," in streams else int(streams), row[13]))


def columns(rows: Collection[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as the arrays that `unnest` takes."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


class Memory:
    """What one process remembers of names and numbers that never change."""

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
        """Jobs that have been claimed from, and say so."""
        self.epoch = -1
        self.forget_lines()

    def forget_lines(self) -> None:
        self.lines: dict[int, Line] = {}
        self.line_ids: dict[Place, Line] = {}

    def check_epoch(self, epoch: int) -> None:
        """Lines were dropped or a job was changed by somebody: what is remembered may be wrong."""
        if epoch != self.epoch:
            self.forget_lines()
            self.specs.clear()
            self.epoch = epoch

    def remember(self, line: Line) -> Line:
        self.lines[line.id] = line
        self.line_ids[line.lane, line.stream, line.job, line.priority] = line
        return line


class NeedsAll(Exception):
    """A transaction found that it cannot share: it must be run again, alone."""


class Tx:
    """One transaction: rows read once, changed in memory, written back once by `finish`.

    Alone it may do everything. Together with others it may only move requests between lines that
    exist, each under the lock of its lane; for everything else it calls `need_all` first.
    """

    def __init__(
        self, connection: asyncpg.Connection, memory: Memory, now: int, *, alone: bool, shared: bool
    ) -> None:
        self.connection = connection
        self._shared = shared
        self.memory = memory
        self.now = now
        self.alone = alone
        self.lasting = False
        """Whether its commit must survive a crash of the server although its work is not `durable`."""
        self.begin_again()

    def need_all(self) -> None:
        if not self.alone:
            raise NeedsAll

    def begin_again(self) -> None:
        """Forget the rows: they were written, and are read anew."""
        self.jobs: dict[int, JobRow] = {}
        self.jobs_named: dict[str, JobRow] = {}
        self.lanes: dict[int, LaneRow] = {}
        self.bodies: dict[int, list[bytes]] = {}
        """Items to store, by job."""
        self._tallies: Counter[tuple[int, str]] = Counter()
        self._spread: dict[tuple[int, str], int] = {}
        """What was stored of the budgets per host, and how it moves."""
        self._spread_moves: Counter[tuple[int, str]] = Counter()

    async def run(self, sql: str, *values: Any) -> Any:
        """Rows. Any: the columns of a row are known to the statement, not to the types."""
        return await self.connection.fetch(sql, *values)

    async def value(self, sql: str, *values: Any) -> Any:
        return await self.connection.fetchval(sql, *values)

    # Jobs

    async def load_jobs(self, names: Iterable[str] = (), ids: Iterable[int] = ()) -> None:
        """Have these jobs at hand. Raises NoSuchJob."""
        names = [name for name in dict.fromkeys(names) if name not in self.jobs_named]
        ids = [id for id in dict.fromkeys(ids) if id not in self.jobs]
        if not names and not ids:
            return
        sql = (
            "SELECT id, name, spec, state, added-skipped-dead-expired, added-done-dead-expired-cancelled"
            " FROM job WHERE name=ANY($1::text[]) OR id=ANY($2::bigint[])"
        )
        if not ids:
            sql = sql.replace(" OR id=ANY($2::bigint[])", " AND $2::bigint[] IS NOT NULL")
        elif not names:
            sql = sql.replace("name=ANY($1::text[]) OR ", "$1::text[] IS NOT NULL AND ")
        for id, name, spec, state, used, live in await self.run(sql, names, ids):
            if id in self.jobs:
                continue
            cached = self.memory.specs.get(id)
            if cached is None or cached[0] != spec:
                cached = self.memory.specs[id] = (spec, spec_of(spec))
            self.memory.job_names[id] = name
            self.memory.job_ids[name] = id
            self.jobs[id] = self.jobs_named[name] = JobRow(id, name, cached[1], state, used, live)
        for name in names:
            if name not in self.jobs_named:
                raise NoSuchJob(name)

    async def job(self, name: str) -> JobRow:
        await self.load_jobs([name])
        return self.jobs_named[name]

    async def job_id(self, name: str) -> int:
        id: int | None = await self.value("SELECT id FROM job WHERE name=$1", name)
        if id is None:
            raise NoSuchJob(name)
        return id

    async def load_job_names(self, ids: Iterable[int]) -> dict[int, str]:
        missing = [id for id in dict.fromkeys(ids) if id not in self.memory.job_names]
        if missing:
            rows = await self.run("SELECT id, name FROM job WHERE id=ANY($1::bigint[])", missing)
            self.memory.job_names.update(rows)
        return self.memory.job_names

    # Lanes

    async def lane_ids(self, names: Iterable[str]) -> dict[str, int]:
        """Find or make lanes, older ones first."""
        known = self.memory.lane_ids
        names = list(dict.fromkeys(names))
        if len(known) > MANY:
            known.clear()
        missing = [name for name in names if name not in known]
        if missing:
            sql = "SELECT name, id FROM lane WHERE name=ANY($1::text[])"
            known.update(await self.run(sql, missing))
            missing = [name for name in missing if name not in known]
        if missing:
            self.need_all()
            sql = "INSERT INTO lane(name) SELECT unnest($1::text[]) RETURNING name, id"
            known.update(await self.run(sql, missing))
        return {name: known[name] for name in names}

    async def load_lanes(self, ids: Iterable[int]) -> None:
        missing = sorted({id for id in ids if id not in self.lanes})
        if not missing:
            return
        sql = f"SELECT {LANE} FROM lane l WHERE id=ANY($1::bigint[]) ORDER BY id FOR NO KEY UPDATE"
        for found in await self.run(sql, missing):
            self.lanes[found[0]] = lane_row(found)

    async def settle_places(self, rows: Collection[LaneRow]) -> None:
        """Recompute what waits on lanes and where that puts them."""
        if not rows:
            return
        streams: dict[int, dict[int, int]] = {}
        sql = f"SELECT lane, stream, max(priority) {_LIVE_LINES} GROUP BY lane, stream"
        for lane, stream, priority in await self.run(sql, [row.id for row in rows]):
            streams.setdefault(lane, {})[stream] = priority
        for row in rows:
            live = streams.get(row.id, {})
            row.streams = tuple(sorted(live))
            row.place(self.now, max(live.values(), default=0))

    def adopt(self, row: LaneRow, job: JobRow) -> None:
        """An idle lane takes the job's pace; a shared one keeps the slower."""
        if row.pinned or (row.gap == job.gap and row.width == job.width):
            return
        if row.busy or row.streams:
            row.gap = max(row.gap, job.gap)
            row.width = min(row.width, job.width)
        else:
            row.gap, row.width = job.gap, job.width

    # Streams

    async def load_streams(self, places: Iterable[tuple[str, JobRow]]) -> None:
        """Find or make streams; `stream` knows them afterwards."""
        known = self.memory.stream_ids
        wanted = dict.fromkeys((queue, job.id if job.spec.apart else 0) for queue, job in places)
        for place in wanted:
            if place in known:
                continue
            id = await self.value("SELECT id FROM stream WHERE queue=$1 AND job=$2", *place)
            if id is None:
                self.need_all()
                sql = "INSERT INTO stream(queue, job) VALUES($1, $2) RETURNING id"
                id = await self.value(sql, *place)
            known[place] = id
            self.memory.queue_names[id] = place[0]

    def stream(self, queue: str, job: JobRow) -> int:
        return self.memory.stream_ids[queue, job.id if job.spec.apart else 0]

    async def load_queue_names(self, streams: Iterable[int]) -> dict[int, str]:
        missing = [id for id in dict.fromkeys(streams) if id not in self.memory.queue_names]
        if missing:
            rows = await self.run("SELECT id, queue FROM stream WHERE id=ANY($1::bigint[])", missing)
            self.memory.queue_names.update(rows)
        return self.memory.queue_names

    async def streams(self, queues: Collection[str] | None, job: str | None) -> list[int]:
        """Every stream of these queues or this job, with work or without."""
        job_id = None if job is None else await self.job_id(job)
        rows = await self.run("SELECT id, queue FROM stream WHERE $1::bigint IS NULL OR job=$1", job_id)
        return [id for id, queue in rows if queues is None or queue in queues]

    # Lines

    async def load_lines(self, ids: Iterable[int]) -> dict[int, Line]:
        memory = self.memory
        ids = set(ids)
        missing = [id for id in ids if id not in memory.lines]
        if missing:
            if len(memory.lines) > MANY:
                memory.forget_lines()
                missing = list(ids)
            sql = "SELECT id, lane, stream, job, priority FROM line WHERE id=ANY($1::bigint[])"
            for row in await self.run(sql, missing):
                memory.remember(Line(*row))
        return memory.lines

    async def make_lines(self, wanted: Iterable[Place]) -> dict[Place, Line]:
        """Find or make lines. Making some drops their lanes' lines of jobs that are over.

        The lanes and jobs must have been loaded, and the counters of what comes moved.
        """
        memory = self.memory
        if len(memory.lines) > MANY:
            memory.forget_lines()
        places = list(dict.fromkeys(wanted))
        missing = [place for place in places if place not in memory.line_ids]
        if missing:
            found = await self.run(
                "SELECT l.id, l.lane, l.stream, l.job, l.priority FROM line l JOIN unnest($1::bigint[],"
                " $2::bigint[], $3::bigint[], $4::bigint[]) AS p(lane, stream, job, priority)"
                " ON l.lane=p.lane AND l.stream=p.stream AND l.job=p.job AND l.priority=p.priority",
                *columns(missing, 4),
            )
            for row in found:
                memory.remember(Line(*row))
            missing = [place for place in missing if place not in memory.line_ids]
        if missing:
            kept = {place: memory.line_ids[place] for place in places if place in memory.line_ids}
            await self._insert_lines(missing)
            for line in kept.values():
                memory.remember(line)
        return {place: memory.line_ids[place] for place in places}

    async def _insert_lines(self, missing: list[Place]) -> None:
        self.need_all()
        lanes = {place[0] for place in missing}
        sql = "SELECT lane, job, id FROM line WHERE lane=ANY($1::bigint[])"
        others = await self.run(sql, list(lanes))
        await self.load_jobs(ids=[job for _, job, _ in others])
        coming = {(place[0], place[2]) for place in missing}
        # Forget the lines of jobs that are over, so that a lane's lines stay few.
        over = [id for lane, job, id in others if self.jobs[job].live == 0 and (lane, job) not in coming]
        if over:
            await self.run("DELETE FROM line WHERE id=ANY($1::bigint[])", over)
            self.memory.forget_lines()
            # Other processes must not go on with what they remember of lines.
            self.memory.epoch = await self.value("UPDATE tick SET epoch=epoch+1 RETURNING epoch")
        gone = set(over)
        count = Counter(lane for lane, _, id in others if id not in gone)
        count.update(place[0] for place in missing)
        rows = [
            (*place, self.lanes[place[0]].vt, int(self.jobs[place[2]].state == "paused")) for place in missing
        ]
        made = await self.run(
            "INSERT INTO line(lane, stream, job, priority, vt, off) SELECT * FROM unnest($1::bigint[],"
            " $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])"
            " RETURNING id, lane, stream, job, priority",
            *columns(rows, 6),
        )
        for row in made:
            line = self.memory.remember(Line(*row))
            self.lanes[line.lane].sole = line.id if count[line.lane] == 1 else None

    async def top_priorities(self, lanes: Collection[int]) -> dict[int, int]:
        """The highest priority that waits on each of these lanes."""
        if not lanes:
            return {}
        return dict(await self.run(f"SELECT lane, max(priority) {_LIVE_LINES} GROUP BY lane", list(lanes)))

    async def activate(self, lines: Iterable[Line]) -> None:
        """Lines that were empty start at their lane's virtual time: no credit for absence."""
        rows = [(line.id, self.lanes[line.lane].vt) for line in lines if self.lanes[line.lane].sole is None]
        if rows:
            await self.run(
                "UPDATE line SET vt=a.vt FROM unnest($1::bigint[], $2::bigint[]) AS a(id, vt)"
                " WHERE line.id=a.id AND line.vt<a.vt"
                " AND NOT EXISTS(SELECT 1 FROM waiting WHERE waiting.line=a.id)",
                *columns(rows, 2),
            )

    # Requests

    async def wait_in_line(self, rows: Collection[Sequence[Any]]) -> None:
        """Store rows (line, id, url, depth, attempt, expires, extra)."""
        # Behind a pooler nothing is prepared, and asyncpg prepares a statement for COPY.
        if len(rows) >= COPY and not self._shared:
            await self.connection.copy_records_to_table("waiting", records=rows, columns=WAITING)
        elif rows:
            await self.run(
                "INSERT INTO waiting SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[],"
                " $4::bigint[], $5::bigint[], $6::bigint[], $7::bytea[])",
                *columns(rows, 7),
            )

    async def delay(self, rows: Collection[Sequence[Any]]) -> None:
        """Store rows (at, id, line, url, depth, attempt, expires, extra)."""
        if rows:
            await self.run(
                "INSERT INTO delayed SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[],"
                " $4::text[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bytea[])",
                *columns(rows, 8),
            )

    async def back_in_line(self, back: list[tuple[Line, Entry]]) -> None:
        """Let entries wait, in the order of their ids. The caller places the lanes."""
        if not back:
            return
        lines = {line.id: line for line, _ in back}
        await self.load_lanes(line.lane for line in lines.values())
        await self.activate(lines.values())
        await self.wait_in_line([(line.id, *entry) for line, entry in back])

    async def end_leases(self, which: str, value: Any) -> tuple[list[tuple[Line, Entry]], int]:
        """Their workers are gone: end these leases. Answers the entries that wait again, and how
        many leases it were."""
        self.need_all()
        rows = await self.run(
            f"DELETE FROM lease WHERE {which} RETURNING until, token, line, id, url, depth, attempt, extra,"
            " worker",
            value,
        )
        back: list[tuple[Line, Entry]] = []
        dead: list[tuple[Line, Entry, Failure]] = []
        message = f"{CRASH_LIMIT} workers died or hung while visiting it"
        apart: list[tuple[Any, ...]] = []
        lines = await self.load_lines(row[2] for row in rows)
        await self.load_jobs(ids=[lines[row[2]].job for row in rows])
        await self.load_lanes([lines[row[2]].lane for row in rows])
        for _, _, line_id, id, url, depth, attempt, extra, worker in sorted(rows, key=lambda row: row[:2]):
            line = lines[line_id]
            job = self.jobs[line.job]
            self.lanes[line.lane].busy -= 1
            crashed = attempt + CRASH
            if job.state == "cancelled":
                job.count("cancelled")
            elif worker.startswith(TRANSIT):
                back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))
            elif crashed // CRASH >= CRASH_LIMIT:
                failure = Failure(WORKER_CRASHED, message, worker)
                dead.append((line, (id, url, depth, attempt % CRASH, None, extra), failure))
            elif crashed // CRASH > 1:
                at = self.now + len(apart) * STAGGER
                apart.append((at, id, line.id, url, depth, crashed, None, extra))
            else:
                back.append((line, (id, url, depth, crashed, None, extra)))
        await self.delay(apart)
        for line, _, failure in dead:
            self.tally(line.job, failure.error)
        await self.end_rows(dead, "dead")
        return back, len(rows)

    async def end_travels(self, which: str, value: Any) -> None:
        """These leases are in transit, and nobody is to visit them: what their lanes lent is free."""
        back, _ = await self.end_leases(which, value)
        await self.back_in_line(back)
        await self.settle_places(self.lanes.values())
        await self.finish()

    async def end_rows(
        self, ends: Sequence[tuple[Line, Entry, Failure]], state: str, *, refund: bool = True
    ) -> None:
        """Make dead letters of entries; page budgets get them back, unless the caller sees to that."""
        if not ends:
            return
        await self.load_jobs(ids=[line.job for line, _, _ in ends])
        queues = await self.load_queue_names(line.stream for line, _, _ in ends)
        letters: list[tuple[Any, ...]] = []
        for line, (id, url, depth, attempt, _, extra), failure in ends:
            job = self.jobs[line.job]
            job.count(state)
            if state == "expired":
                self.tally(job.id, failure.error)
            lane = urls.lane_of(url)
            if refund:
                job.used -= 1
                self.count_lane(job, lane, -1)
            letters.append(
                (
                    *(id, state, self.now, line.job, lane, queues[line.stream], line.priority, url, depth),
                    *(attempt % CRASH, extra, text(failure.error), text(failure.message), failure.worker),
                )
            )
        await self.bury(letters)

    async def bury(self, letters: Collection[Sequence[Any]]) -> None:
        """Store rows of `ended`."""
        await self.run(
            "INSERT INTO ended SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[],"
            " $5::text[], $6::text[], $7::bigint[], $8::text[], $9::bigint[], $10::bigint[], $11::bytea[],"
            " $12::text[], $13::text[], $14::text[])",
            *columns(letters, 14),
        )

    # Counters

    def tally(self, job: int, error: str) -> None:
        self._tallies[job, text(error)] += 1

    async def load_spread(self, hosts: Iterable[tuple[JobRow, str]]) -> None:
        """Have the budgets per host at hand, for jobs that have one."""
        pairs = {(job.id, lane) for job, lane in hosts if job.spec.max_per_host is not None}
        pairs -= self._spread.keys()
        if pairs:
            rows = await self.run(
                "SELECT s.job, s.lane, s.added FROM spread s JOIN unnest($1::bigint[], $2::text[])"
                " AS p(job, lane) ON s.job=p.job AND s.lane=p.lane",
                *columns(pairs, 2),
            )
            self._spread.update({(job, lane): added for job, lane, added in rows})

    def spread(self, job: JobRow, lane: str) -> int:
        place = (job.id, lane)
        return self._spread.get(place, 0) + self._spread_moves[place]

    def count_lane(self, job: JobRow, lane: str, by: int) -> None:
        """Move what counts against the budget per host, for jobs that have one."""
        if job.spec.max_per_host is not None and not job.starts_at(lane):
            self._spread_moves[job.id, lane] += by

    # The end

    async def finish(self) -> None:
        """Write back what was changed in memory, always in the same order."""
        await self._write_lanes()
        moves = [(*place, by) for place, by in sorted(self._spread_moves.items()) if by]
        if moves:
            await self.run(
                "INSERT INTO spread AS s SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[])"
                " ON CONFLICT(job, lane) DO UPDATE SET added=s.added+excluded.added",
                *columns(moves, 3),
            )
        tallies = [(*place, n) for place, n in sorted(self._tallies.items())]
        if tallies:
            await self.run(
                "INSERT INTO tally AS t SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[])"
                " ON CONFLICT(job, error) DO UPDATE SET n=t.n+excluded.n",
                *columns(tallies, 3),
            )
        await self._write_jobs()

    async def _write_lanes(self) -> None:
        if not self.lanes:
            return
        old: list[tuple[int, int, int]] = []
        new: list[tuple[int, int, int]] = []
        updates: list[tuple[Any, ...]] = []
        for row in self.lanes.values():
            if row.at != row.old_at or row.streams != row.old_streams:
                before = {(s, row.old_at, row.id) for s in row.old_streams if row.old_at is not None}
                after = {(s, row.at, row.id) for s in row.streams if row.at is not None}
                old += before - after
                new += after - before
            updates.append(
                (
                    *(row.id, row.gap, row.width, row.burst, row.floor, row.pinned, row.paused, row.tat),
                    *(row.blocked, row.busy, row.vt, row.at, row.sole, str(packed(row.streams))),
                )
            )
            row.old_at, row.old_streams = row.at, row.streams
        await self.run(_WRITE_LANES, *columns(old, 3), *columns(new, 3), *columns(updates, 14))

    async def _write_jobs(self) -> None:
        rows: list[tuple[int, ...]] = []
        for job in sorted(self.jobs.values(), key=lambda job: job.id):
            bodies = self.bodies.get(job.id, ())
            if job.delta or bodies:
                moved = job.delta.get
                counters = [moved(name, 0) for name in _COUNTERS]
                rows.append((job.id, *counters, len(bodies), moved("stale", 0)))
        if not rows:
            return
        totals = dict(await self.run(_WRITE_JOBS, self.now, *columns(rows, 12)))
        items: list[tuple[int, bytes]] = []
        for id, bodies in self.bodies.items():
            items += enumerate(bodies, (id << 40) + totals[id] - len(bodies) + 1)
        if items:
            await self.run(
                "INSERT INTO item SELECT * FROM unnest($1::bigint[], $2::bytea[])", *columns(items, 2)
            )
