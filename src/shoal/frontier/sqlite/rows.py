"""Rows: lanes, lines and jobs inside one transaction, and what is remembered between two."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import apsw

from shoal import urls
from shoal.errors import NoSuchJob
from shoal.frontier.rows import CRASH, LANE, JobRow, LaneRow, Line, expires_of, packed, spec_of
from shoal.frontier.rules import STAGGER
from shoal.frontier.sqlite.store import Store
from shoal.model import CRASH_LIMIT, TRANSIT, WORKER_CRASHED, Failure, JobSpec

_TICKS = "UPDATE tick SET token=token+?, request=request+?, line=line+? RETURNING token, request, line"


TRAVELS = f"substr(worker, 1, {len(TRANSIT)})='{TRANSIT}'"
"""Whether a lease is in transit."""


class Rows(Store):
    """Everything that the verbs share about rows."""

    def _begun(self) -> None:
        self._check_epoch(self._run("SELECT epoch FROM tick").fetchall()[0][0])

    def _forget(self) -> None:
        """Drop what is remembered between transactions: it may not have been committed."""
        self._job_names: dict[int, str] = {}
        self._specs: dict[int, tuple[bytes | str, JobSpec]] = {}
        self._lane_ids: dict[str, int] = {}
        self._stream_ids: dict[tuple[str, int], int] = {}
        self._queue_names: dict[int, str] = {}
        self._lines: dict[int, Line] = {}
        self._line_ids: dict[tuple[int, int, int, int], Line] = {}
        self._started: set[int] = set()
        """Jobs that have been claimed from, and say so."""
        self._epoch = -1

    def _tick(self, *, tokens: int = 0, requests: int = 0, lines: int = 0) -> tuple[int, int, int]:
        token, request, line = self._run(_TICKS, (tokens, requests, lines)).fetchall()[0]
        return token, request, line

    def _check_epoch(self, epoch: int) -> None:
        """Lines were dropped by somebody: what is remembered of lines may be gone."""
        if epoch != self._epoch:
            self._lines.clear()
            self._line_ids.clear()
            self._epoch = epoch

    def _lane_rows(self, ids: Collection[int]) -> list[LaneRow]:
        if not ids:
            return []
        sql = f"SELECT {LANE} FROM lane l WHERE id IN carray(?)"
        return [LaneRow(row) for row in self._run(sql, (apsw.carray(array("q", sorted(ids))),))]

    def _lane_in(self, id: int, lanes: dict[int, LaneRow]) -> LaneRow:
        row = lanes.get(id)
        if row is None:
            row = lanes[id] = self._lane_rows([id])[0]
        return row

    def _settle_place(self, row: LaneRow, now: int) -> None:
        """Recompute what waits on a lane and where that puts it."""
        live = self._live_lines(row.id)
        row.streams = tuple(sorted({line[1] for line in live}))
        row.place(now, max((line[3] for line in live), default=0))

    def _write_lanes(self, lanes: dict[int, LaneRow]) -> None:
        updates: list[tuple[Any, ...]] = []
        removals: list[tuple[int, int, int]] = []
        inserts: list[tuple[int, int, int]] = []
        for row in lanes.values():
            if row.at != row.old_at or row.streams != row.old_streams:
                if row.old_at is not None:
                    removals += [(stream, row.old_at, row.id) for stream in row.old_streams]
                if row.at is not None:
                    inserts += [(stream, row.at, row.id) for stream in row.streams]
            updates.append(
                (
                    *(row.gap, row.width, row.burst, row.floor, row.pinned, row.paused, row.tat),
                    *(row.blocked, row.busy, row.vt, row.at, packed(row.streams), row.sole, row.id),
                )
            )
        if removals:
            self._many("DELETE FROM turn WHERE stream=? AND at=? AND lane=?", removals)
        if inserts:
            self._many("INSERT INTO turn VALUES(?, ?, ?)", inserts)
        if updates:
            self._many(
                "UPDATE lane SET gap=?, width=?, burst=?, floor=?, pinned=?, paused=?, tat=?, blocked=?,"
                " busy=?, vt=?, at=?, streams=?, sole=? WHERE id=?",
                updates,
            )

    def _write_jobs(self, jobs: dict[str, JobRow], now: int) -> None:
        for job in jobs.values():
            if not job.delta:
                continue
            sets = ", ".join(f"{name}={name}+?" for name in job.delta)
            live, added = self._run(
                f"UPDATE job SET {sets} WHERE id=? RETURNING added-done-dead-expired-cancelled, added",
                (*job.delta.values(), job.id),
            ).fetchall()[0]
            if live == 0 and added and job.state in ("running", "paused"):
                self._run("UPDATE job SET state='done', finished=? WHERE id=?", (now, job.id)).fetchall()
            elif live and job.state == "done":
                self._run("UPDATE job SET state='running', finished=NULL WHERE id=?", (job.id,)).fetchall()

    def _job_of(self, name: str, jobs: dict[str, JobRow]) -> JobRow:
        row = jobs.get(name)
        if row is None:
            row = jobs[name] = self._job_row(name)
        return row

    def _job_by_id(self, id: int, jobs: dict[str, JobRow]) -> JobRow:
        return self._job_of(self._job_names.get(id) or self._job_name(id), jobs)

    def _job_row(self, name: str) -> JobRow:
        sql = (
            "SELECT id, spec, state, added-skipped-dead-expired, added-done-dead-expired-cancelled"
            " FROM job WHERE name=?"
        )
        rows = self._run(sql, (name,)).fetchall()
        if not rows:
            raise NoSuchJob(name)
        id, spec, state, used, live = rows[0]
        cached = self._specs.get(id)
        if cached is None or cached[0] != spec:
            cached = self._specs[id] = (spec, spec_of(spec))
        self._job_names[id] = name
        return JobRow(id, name, cached[1], state, used, live)

    def _job_id(self, name: str) -> int:
        rows = self._run("SELECT id FROM job WHERE name=?", (name,)).fetchall()
        if not rows:
            raise NoSuchJob(name)
        return int(rows[0][0])

    def _job_name(self, id: int) -> str:
        name: str = self._run("SELECT name FROM job WHERE id=?", (id,)).fetchall()[0][0]
        self._job_names[id] = name
        return name

    def _lane_ids_of(self, names: Collection[str]) -> dict[str, int]:
        return {name: self._lane_ids.get(name) or self._lane_id(name) for name in names}

    def _lane_id(self, name: str) -> int:
        id = self._lane_ids.get(name)
        if id is not None:
            return id
        rows = self._run("SELECT id FROM lane WHERE name=?", (name,)).fetchall()
        if not rows:
            rows = self._run("INSERT INTO lane(name) VALUES(?) RETURNING id", (name,)).fetchall()
        if len(self._lane_ids) > 500_000:
            self._lane_ids.clear()
        id = self._lane_ids[name] = int(rows[0][0])
        return id

    def _stream_id(self, queue: str, job: JobRow) -> int:
        place = (queue, job.id if job.spec.apart else 0)
        id = self._stream_ids.get(place)
        if id is not None:
            return id
        rows = self._run("SELECT id FROM stream WHERE queue=? AND job=?", place).fetchall()
        if not rows:
            sql = "INSERT INTO stream(queue, job) VALUES(?, ?) RETURNING id"
            rows = self._run(sql, place).fetchall()
        id = self._stream_ids[place] = int(rows[0][0])
        self._queue_names[id] = queue
        return id

    def _queue_name(self, stream: int) -> str:
        name = self._queue_names.get(stream)
        if name is None:
            name = self._run("SELECT queue FROM stream WHERE id=?", (stream,)).fetchall()[0][0]
            self._queue_names[stream] = name
        return name

    def _streams(self, queues: Collection[str] | None, job: str | None) -> list[int]:
        """Every stream of these queues or this job, with work or without."""
        job_id = None if job is None else self._job_id(job)
        rows = self._run("SELECT id, queue FROM stream WHERE ?1 IS NULL OR job=?1", (job_id,))
        return [id for id, queue in rows if queues is None or queue in queues]

    def _line(
        self,
        lane_id: int,
        queue: str,
        job: JobRow,
        priority: int,
        jobs: dict[str, JobRow],
        lanes: dict[int, LaneRow],
    ) -> Line:
        """Find or make a line. Making one drops the lane's lines of jobs that are over."""
        place = (lane_id, self._stream_id(queue, job), job.id, priority)
        known = self._line_ids.get(place)
        if known is not None:
            return known
        sql = "SELECT id FROM line WHERE lane=? AND stream=? AND job=? AND priority=?"
        rows = self._run(sql, place).fetchall()
        if rows:
            return self._remember(Line(rows[0][0], *place))
        row = self._lane_in(lane_id, lanes)
        self._drop_old_lines(lane_id, job, jobs)
        id = self._tick(lines=1)[2]
        others = self._run("SELECT 1 FROM line WHERE lane=? LIMIT 1", (lane_id,)).fetchall()
        row.sole = None if others else id
        off = int(job.state == "paused")
        self._run("INSERT INTO line VALUES(?, ?, ?, ?, ?, ?, ?)", (id, *place, row.vt, off)).fetchall()
        return self._remember(Line(id, *place))

    def _drop_old_lines(self, lane_id: int, job: JobRow, jobs: dict[str, JobRow]) -> None:
        """Forget the lines of jobs that are over, so that a lane's lines stay few."""
        others = self._run("SELECT DISTINCT job FROM line WHERE lane=? AND job<>?", (lane_id, job.id))
        over = [id for (id,) in others.fetchall() if self._job_by_id(id, jobs).live == 0]
        if not over:
            return
        self._many("DELETE FROM line WHERE lane=? AND job=?", [(lane_id, id) for id in over])
        self._lines.clear()
        self._line_ids.clear()
        # Other processes must not go on with what they remember of lines.
        self._epoch = self._run("UPDATE tick SET epoch=epoch+1 RETURNING epoch").fetchall()[0][0]

    def _remember(self, line: Line) -> Line:
        if len(self._lines) > 500_000:
            self._lines.clear()
            self._line_ids.clear()
        self._lines[line.id] = line
        self._line_ids[line.lane, line.stream, line.job, line.priority] = line
        return line

    def _any_line(self, id: int) -> Line:
        return self._lines.get(id) or self._load_line(id)

    def _load_line(self, id: int) -> Line:
        sql = "SELECT lane, stream, job, priority FROM line WHERE id=?"
        return self._remember(Line(id, *self._run(sql, (id,)).fetchall()[0]))

    def _live_lines(self, lane: int) -> list[tuple[int, int, int, int, int]]:
        """Lines with something to claim: (id, stream, job, priority, vt)."""
        sql = (
            "SELECT id, stream, job, priority, vt FROM line WHERE lane=? AND off=0"
            " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
        )
        return list(self._run(sql, (lane,)))

    def _head(self, line: int, limit: int) -> list[tuple[Any, ...]]:
        sql = "SELECT id, url, depth, attempt, extra FROM waiting WHERE line=? ORDER BY id LIMIT ?"
        return list(self._run(sql, (line, limit)))

    def _activate(self, row: LaneRow, line: Line) -> None:
        """A line that was empty starts at the lane's virtual time: no credit for absence."""
        if row.sole is not None or self._head(line.id, 1):
            return
        self._run("UPDATE line SET vt=max(vt, ?) WHERE id=?", (row.vt, line.id)).fetchall()

    def _back_in_line(self, back: list[tuple[Line, tuple[Any, ...]]], lanes: dict[int, LaneRow]) -> None:
        """Let entries (id, url, depth, attempt, expires, extra) wait, in the order of their ids.
        The caller places the lanes."""
        for line, entry in back:
            self._activate(self._lane_in(line.lane, lanes), line)
            self._run("INSERT INTO waiting VALUES(?, ?, ?, ?, ?, ?, ?)", (line.id, *entry)).fetchall()

    def _end_leases(
        self, which: str, value: Any, now: int, jobs: dict[str, JobRow], lanes: dict[int, LaneRow]
    ) -> list[tuple[Line, tuple[Any, ...]]]:
        """Their workers are gone: end these leases. Answers the entries that wait again."""
        rows = self._run(
            f"DELETE FROM lease WHERE {which} RETURNING until, token, line, id, url, depth, attempt, extra,"
            " worker",
            (value,),
        ).fetchall()
        back: list[tuple[Line, tuple[Any, ...]]] = []
        dead: list[tuple[Line, tuple[Any, ...]]] = []
        failures: list[Failure] = []
        message = f"{CRASH_LIMIT} workers died or hung while visiting it"
        apart: list[tuple[Any, ...]] = []
        for _, _, line_id, id, url, depth, attempt, extra, worker in sorted(rows):
            line = self._any_line(line_id)
            job = self._job_by_id(line.job, jobs)
            self._lane_in(line.lane, lanes).busy -= 1
            crashed = attempt + CRASH
            if job.state == "cancelled":
                job.count("cancelled")
            elif worker.startswith(TRANSIT):
                back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))
            elif crashed // CRASH >= CRASH_LIMIT:
                dead.append((line, (id, url, depth, attempt % CRASH, None, extra)))
                failures.append(Failure(WORKER_CRASHED, message, worker))
            elif crashed // CRASH > 1:
                at = now + len(apart) * STAGGER
                apart.append((at, id, line.id, url, depth, crashed, None, extra))
            else:
                back.append((line, (id, url, depth, crashed, None, extra)))
        if apart:
            self._many("INSERT INTO delayed VALUES(?, ?, ?, ?, ?, ?, ?, ?)", apart)
        self._tally([(line.job, WORKER_CRASHED) for line, _ in dead])
        self._end_rows([line for line, _ in dead], [row for _, row in dead], failures, "dead", now, jobs)
        return back

    def _end_travels(self, which: str, value: Any, now: int) -> None:
        """These leases are in transit, and nobody is to visit them: what their lanes lent is free."""
        jobs: dict[str, JobRow] = {}
        lanes: dict[int, LaneRow] = {}
        self._back_in_line(self._end_leases(which, value, now, jobs, lanes), lanes)
        for row in lanes.values():
            self._settle_place(row, now)
        self._write_lanes(lanes)
        self._write_jobs(jobs, now)
        self._news = True

    def _end_rows(
        self,
        lines: Sequence[Line],
        rows: Sequence[tuple[Any, ...]],
        failures: Sequence[Failure],
        state: str,
        now: int,
        jobs: dict[str, JobRow],
        *,
        refund: bool = True,
    ) -> None:
        """Make dead letters of entries (id, url, depth, attempt, expires, extra). `refund`: they no
        longer count against the page budgets from now on."""
        letters: list[tuple[Any, ...]] = []
        if state == "expired":
            self._tally([(line.job, failure.error) for line, failure in zip(lines, failures, strict=True)])
        for line, (id, url, depth, attempt, _, extra), failure in zip(lines, rows, failures, strict=True):
            job = self._job_by_id(line.job, jobs)
            job.count(state)
            if refund:
                job.used -= 1
                self._count_lane(job, urls.lane_of(url), -1)
            letters.append(
                (
                    *(id, state, now, line.job, urls.lane_of(url), self._queue_name(line.stream)),
                    *(line.priority, url, depth, attempt % CRASH, extra, failure.error, failure.message),
                    failure.worker,
                )
            )
        self._many("INSERT INTO ended VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", letters)

    def _tally(self, failures: Iterable[tuple[int, str]]) -> None:
        self._many(
            "INSERT INTO tally VALUES(?, ?, 1) ON CONFLICT DO UPDATE SET n=n+1",
            failures,
        )

    def _count_lane(self, job: JobRow, name: str, by: int) -> None:
        """Move what counts against the budget per host, for jobs that have one."""
        if job.spec.max_per_host is None or job.starts_at(name):
            return
        self._run(
            "INSERT INTO spread VALUES(?, ?, ?) ON CONFLICT DO UPDATE SET added=added+excluded.added",
            (job.id, name, by),
        ).fetchall()

    def _adopt(self, row: LaneRow, job: JobRow) -> None:
        """An idle lane takes the job's pace; a shared one keeps the slower."""
        if row.pinned or (row.gap == job.gap and row.width == job.width):
            return
        if row.busy or row.streams:
            row.gap = max(row.gap, job.gap)
            row.width = min(row.width, job.width)
        else:
            row.gap, row.width = job.gap, job.width
