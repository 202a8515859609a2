"""What people ask: `FrontierAdmin` on SQLite, except for `moving.py`."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

import apsw
import msgspec

from shoal import urls
from shoal.errors import (
    NoSuchJob,
)
from shoal.frontier.rows import LANE, JobRow, LaneRow, extra_of, request_of, spec_bytes, spec_of
from shoal.frontier.rules import FORGET, US, microseconds
from shoal.frontier.sqlite.rows import TRAVELS
from shoal.frontier.sqlite.verbs import Verbs
from shoal.model import (
    TRANSIT,
    About,
    Attendance,
    Beat,
    Counts,
    DeadGroup,
    DeadLetter,
    Failure,
    Finding,
    Item,
    Job,
    JobSpec,
    JobState,
    Lane,
    Remark,
    Request,
    Selection,
)

_encode = msgspec.json.Encoder().encode
_beat = msgspec.json.Decoder(Beat).decode

_LANES = f"SELECT l.name, {LANE} FROM lane l"


_ENDED = (
    "e.id, e.state, e.at, job.name, e.lane, e.queue, e.priority, e.url, e.depth, e.attempt, e.extra,"
    " e.error, e.message, e.worker"
)


SWEEP = 10 * US
"""Notes that ended are removed so often: looking through them costs, and a batch notes many."""


class People(Verbs):
    """Everything but moving jobs."""

    _swept = 0

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        def work() -> Job:
            self._run(
                "INSERT INTO job(name, spec, state, created) VALUES(?, ?, 'running', ?)"
                " ON CONFLICT(name) DO NOTHING",
                (job, spec_bytes(spec), self._now()),
            ).fetchall()
            return self._job_view(job)

        # Not synced by itself: the `add` that follows is, and takes this with it.
        return await self._write(work)

    async def job(self, job: str) -> Job:
        return self._read(lambda: self._job_view(job))

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        top = microseconds(before) if before is not None else 1 << 62

        def work() -> list[Job]:
            rows = self._run(
                "SELECT name FROM job WHERE created<? ORDER BY created DESC, id DESC LIMIT ?", (top, limit)
            ).fetchall()
            return [self._job_view(name) for (name,) in rows]

        return self._read(work)

    async def respec_job(self, job: str, spec: JobSpec) -> Job:
        def work() -> Job:
            id = self._job_id(job)
            self._run("UPDATE job SET spec=? WHERE id=?", (spec_bytes(spec), id)).fetchall()
            self._repace(self._job_row(job))
            return self._job_view(job)

        return await self._write(work, durable=True)

    async def pause(self, job: str) -> Job:
        return await self._write(lambda: self._switch(job, off=True), durable=True)

    async def resume(self, job: str) -> Job:
        return await self._write(lambda: self._switch(job, off=False), durable=True)

    async def cancel(self, job: str) -> Job:
        def work() -> Job:
            row = self._job_row(job)
            if row.state in ("cancelled", "done"):
                return self._job_view(job)
            now = self._now()
            self._run("UPDATE job SET state='cancelled', finished=? WHERE id=?", (now, row.id)).fetchall()
            lines = array("q", [id for (id,) in self._run("SELECT id FROM line WHERE job=?", (row.id,))])
            gone = 0
            if lines:
                for table in ("waiting", "delayed"):
                    self._run(
                        f"DELETE FROM {table} WHERE line IN carray(?)", (apsw.carray(lines),)
                    ).fetchall()
                    gone += self._db.changes()
                self._run("UPDATE job SET cancelled=cancelled+? WHERE id=?", (gone, row.id)).fetchall()
                self._replace_lanes_of(row.id, now)
                self._end_travels(f"{TRAVELS} AND line IN (SELECT id FROM line WHERE job=?)", row.id, now)
            return self._job_view(job)

        return await self._write(work, durable=True)

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        def work() -> list[Item]:
            base = self._job_id(job) << 40
            rows = self._run(
                "SELECT seq, body FROM item WHERE seq>? AND seq<? ORDER BY seq LIMIT ?",
                (base + after, base + (1 << 40), limit),
            )
            return [Item(seq - base, body) for seq, body in rows]

        return self._read(work)

    async def cursor(self, job: str, sink: str) -> int:
        def work() -> int:
            rows = self._run("SELECT seq FROM cursor WHERE job=? AND sink=?", (self._job_id(job), sink))
            found = rows.fetchall()
            return int(found[0][0]) if found else 0

        return self._read(work)

    async def save_cursor(self, job: str, sink: str, seq: int) -> None:
        def work() -> None:
            self._run(
                "INSERT INTO cursor VALUES(?, ?, ?) ON CONFLICT DO UPDATE SET seq=excluded.seq",
                (self._job_id(job), sink, seq),
            ).fetchall()

        await self._write(work)

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        def work() -> list[DeadLetter]:
            where, values = self._selected(which)
            # The plus keeps SQLite from walking through all of them by id.
            by = "e.id" if which.since is None else "+e.id"
            rows = self._run(
                f"SELECT {_ENDED} FROM ended e JOIN job ON job.id=e.job WHERE {by}>? AND {where}"
                f" ORDER BY {by} LIMIT ?",
                (after, *values, limit),
            )
            return [_letter(row) for row in rows]

        return self._read(work)

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        def work() -> list[DeadGroup]:
            where, values = self._selected(which)
            rows = self._run(
                "SELECT e.lane, e.error, count(*) AS n, min(e.id), e.url FROM ended e JOIN job ON"
                f" job.id=e.job WHERE {where} GROUP BY e.lane, e.error ORDER BY n DESC, e.lane, e.error",
                tuple(values),
            )
            return [DeadGroup(lane, error, n, url) for lane, error, n, _, url in rows]

        return self._read(work)

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        def work() -> int:
            now = self._now()
            where, values = self._selected(which)
            rows = self._run(
                f"SELECT {_ENDED} FROM ended e JOIN job ON job.id=e.job"
                f" WHERE job.state<>'cancelled' AND {where}",
                tuple(values),
            ).fetchall()
            jobs: dict[str, JobRow] = {}
            lanes: dict[int, LaneRow] = {}
            self._many("DELETE FROM ended WHERE id=?", [found[:1] for found in rows])
            for found in rows:
                letter = _letter(found)
                request = letter.request
                job = self._job_of(request.job, jobs)
                job.count(letter.state, -1)
                row = self._lane_in(self._lane_id(letter.lane), lanes)
                self._count_lane(job, letter.lane, 1)
                self._adopt(row, job)
                line = self._line(row.id, request.queue, job, request.priority, jobs, lanes)
                attempt = 0 if reset_attempts else request.attempt
                entry = (letter.id, request.url, request.depth, attempt, None, extra_of(request))
                self._back_in_line([(line, entry)], lanes)
                self._settle_place(row, now)
            self._write_lanes(lanes)
            self._write_jobs(jobs, now)
            return len(rows)

        return await self._write(work, durable=True)

    async def purge(self, which: Selection) -> int:
        def work() -> int:
            where, values = self._selected(which)
            self._run(
                "DELETE FROM ended WHERE id IN"
                f" (SELECT e.id FROM ended e JOIN job ON job.id=e.job WHERE {where})",
                tuple(values),
            ).fetchall()
            return self._db.changes()

        return await self._write(work, durable=True)

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        def work() -> None:
            now = self._now()
            jobs: dict[str, JobRow] = {}
            job = self._job_of(request.job, jobs)
            key = urls.key(request.job, request.url, request.method, request.body)
            if not self._run(
                "INSERT INTO seen VALUES(?) ON CONFLICT DO NOTHING RETURNING key", (key,)
            ).fetchall():
                return
            id = self._tick(requests=1)[1]
            job.count("added")
            lane = urls.lane_of(request.url) if "://" in request.url else ""
            job.count("dead")
            self._run(
                "INSERT INTO ended VALUES(?, 'dead', ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, '')",
                (
                    *(id, now, job.id, lane, request.queue, request.priority, request.url, request.depth),
                    *(extra_of(request), failure_class, message),
                ),
            ).fetchall()
            self._tally([(job.id, failure_class)])
            self._write_jobs(jobs, now)

        await self._write(work, durable=True)

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        def work() -> list[Lane]:
            if names is not None:
                rows = [row for name in names for row in self._run(f"{_LANES} WHERE l.name=?", (name,))]
            else:
                rows = self._run(
                    f"{_LANES} ORDER BY l.busy DESC, l.streams<>0 DESC, l.id LIMIT ?", (limit,)
                ).fetchall()
            found = [self._lane_view(row) for row in rows]
            return sorted(found, key=lambda lane: (-lane.busy, -lane.waiting, lane.name))[:limit]

        return self._read(work)

    async def find(self, url: str, job: str | None = None) -> list[Finding]:
        def work() -> list[Finding]:
            if job is not None:
                return [self._find(url, job)]
            names = self._run("SELECT name FROM job ORDER BY id").fetchall()
            return [self._find(url, name) for (name,) in names]

        return self._read(work)

    async def queues(self) -> dict[str, dict[str, int]]:
        def work() -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {}
            for table, state in (("waiting", "waiting"), ("delayed", "delayed"), ("lease", "leased")):
                rows = self._run(
                    f"SELECT s.queue, count(*) FROM {table} t JOIN line ON line.id=t.line"
                    " JOIN stream s ON s.id=line.stream GROUP BY s.queue"
                )
                for name, n in rows:
                    found.setdefault(name, {"waiting": 0, "delayed": 0, "leased": 0})[state] = n
            return found

        return self._read(work)

    async def note(self, key: str, value: bytes, ttl: float) -> None:
        def work() -> None:
            now = self._now()
            if not 0 <= now - self._swept < SWEEP:
                self._swept = now
                self._run("DELETE FROM note WHERE until<?", (now,)).fetchall()
            self._run(
                "INSERT INTO note VALUES(?, ?, ?) ON CONFLICT DO UPDATE"
                " SET until=excluded.until, value=excluded.value",
                (key, now + microseconds(ttl), value),
            ).fetchall()

        await self._write(work)

    async def noted(self, key: str) -> bytes | None:
        def work() -> bytes | None:
            rows = self._run("SELECT value FROM note WHERE key=? AND until>?", (key, self._now())).fetchall()
            return rows[0][0] if rows else None

        return self._read(work)

    async def swap(self, key: str, known: bytes | None, value: bytes, ttl: float) -> bool:
        def work() -> bool:
            now = self._now()
            rows = self._run("SELECT value FROM note WHERE key=? AND until>?", (key, now)).fetchall()
            if (rows[0][0] if rows else None) != known:
                return False
            self._run("REPLACE INTO note VALUES(?, ?, ?)", (key, now + microseconds(ttl), value)).fetchall()
            return True

        return await self._write(work, durable=True)

    async def now(self) -> float:
        return self._now() / US

    async def remarks(self) -> list[Remark]:
        if self._level == "full":
            return []
        text = "synchronous=normal: a power cut may undo the last moments, a crash does not"
        return [Remark(text, "leave ?synchronous=normal out of the address")]

    async def about(self) -> About:
        return About()

    async def lock(self, name: str, owner: str, ttl: float) -> str:
        def work() -> str:
            now = self._now()
            self._run(
                "INSERT INTO lock VALUES(?1, ?2, ?3) ON CONFLICT DO UPDATE SET owner=?2, until=?3"
                " WHERE owner=?2 OR until<=?4",
                (name, owner, now + microseconds(ttl), now),
            ).fetchall()
            return str(self._run("SELECT owner FROM lock WHERE name=?", (name,)).fetchall()[0][0])

        return await self._write(work)

    async def unlock(self, name: str, owner: str) -> None:
        def work() -> None:
            self._run("DELETE FROM lock WHERE name=? AND owner=?", (name, owner)).fetchall()

        await self._write(work)

    async def beat(self, beat: Beat) -> None:
        def work() -> None:
            now = self._now()
            self._run("DELETE FROM worker WHERE seen<?", (now - FORGET,)).fetchall()
            self._run(
                "INSERT INTO worker VALUES(?1, ?2, ?2, ?3) ON CONFLICT DO UPDATE SET seen=?2, beat=?3",
                (beat.worker, now, _encode(beat)),
            ).fetchall()

        await self._write(work)

    async def leave(self, worker: str) -> None:
        def work() -> None:
            self._run("DELETE FROM worker WHERE name=?", (worker,)).fetchall()

        await self._write(work)

    async def workers(self) -> list[Attendance]:
        def work() -> list[Attendance]:
            sql = (
                "SELECT beat, since, seen, (SELECT count(*) FROM lease WHERE lease.worker=worker.name)"
                " FROM worker ORDER BY name"
            )
            now = self._now() / US
            return [
                Attendance(_beat(beat), since / US, seen / US, leases, now)
                for beat, since, seen, leases in self._run(sql).fetchall()
            ]

        return self._read(work)

    async def holders(self, job: str | None = None) -> dict[str, int]:
        def work() -> dict[str, int]:
            sql = (
                "SELECT worker, count(*) FROM lease JOIN line ON line.id=lease.line"
                " JOIN job ON job.id=line.job WHERE ?1 IS NULL OR job.name=?1 GROUP BY worker"
            )
            return dict(self._run(sql, (job,)).fetchall())

        return self._read(work)

    async def travelling(self, lane: str) -> dict[str, int]:
        sql = (
            "SELECT s.queue, count(*) FROM lease JOIN line ON line.id=lease.line JOIN stream s ON"
            f" s.id=line.stream WHERE line.lane=(SELECT id FROM lane WHERE name=?) AND {TRAVELS}"
            " GROUP BY s.queue"
        )
        return self._read(lambda: dict(self._run(sql, (lane,)).fetchall()))

    async def visiting(self, job: str) -> str | None:
        def work() -> str | None:
            # The latest leases first, until one fits: there is no index for it, and none is needed.
            sql = (
                "SELECT lease.url FROM lease CROSS JOIN line ON line.id=lease.line"
                " WHERE line.job=(SELECT id FROM job WHERE name=?1)"
                f" AND substr(worker, 1, {len(TRANSIT)})<>'{TRANSIT}' ORDER BY token DESC LIMIT 1"
            )
            rows = self._run(sql, (job,)).fetchall()
            return str(rows[0][0]) if rows else None

        return self._read(work)

    async def evict(self, workers: Collection[str]) -> int:
        if not workers:
            return 0

        def work() -> int:
            now = self._now()
            jobs: dict[str, JobRow] = {}
            lanes: dict[int, LaneRow] = {}
            before = self._run("SELECT count(*) FROM lease").fetchall()[0][0]
            names = apsw.carray(tuple(workers))
            self._back_in_line(self._end_leases("worker IN carray(?)", names, now, jobs, lanes), lanes)
            for row in lanes.values():
                self._settle_place(row, now)
            self._write_lanes(lanes)
            self._write_jobs(jobs, now)
            return int(before - self._run("SELECT count(*) FROM lease").fetchall()[0][0])

        return await self._write(work, durable=True)

    async def check(self) -> list[str]:
        return self._read(self._check)

    def _switch(self, job: str, *, off: bool) -> Job:
        row = self._job_row(job)
        if row.state == ("running" if off else "paused"):
            now = self._now()
            self._run("UPDATE line SET off=? WHERE job=?", (int(off), row.id)).fetchall()
            if not off:
                self._run(
                    "UPDATE line SET vt=max(vt, (SELECT vt FROM lane WHERE lane.id=line.lane)) WHERE job=?"
                    " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)",
                    (row.id,),
                ).fetchall()
            state = "paused" if off else "running"
            self._run(
                "UPDATE job SET state=CASE WHEN ?1='running' AND added>0 AND"
                " added=done+dead+expired+cancelled THEN 'done' ELSE ?1 END WHERE id=?2",
                (state, row.id),
            ).fetchall()
            self._replace_lanes_of(row.id, now)
        return self._job_view(job)

    def _repace(self, job: JobRow) -> None:
        """A job asks for another pace: its lanes take it, shared ones keep the slower."""
        now = self._now()
        ids = [id for (id,) in self._run("SELECT DISTINCT lane FROM line WHERE job=?", (job.id,))]
        shared = {
            id
            for (id,) in self._run(
                "SELECT DISTINCT line.lane FROM line JOIN job ON job.id=line.job WHERE line.job<>?1 AND"
                " job.added>job.done+job.dead+job.expired+job.cancelled AND line.lane IN"
                " (SELECT lane FROM line WHERE job=?1)",
                (job.id,),
            )
        }
        lanes = {row.id: row for row in self._lane_rows(ids) if not row.pinned}
        for row in lanes.values():
            row.gap = max(row.gap, job.gap) if row.id in shared else job.gap
            row.width = min(row.width, job.width) if row.id in shared else job.width
            self._settle_place(row, now)
        self._write_lanes(lanes)

    def _replace_lanes_of(self, job: int, now: int) -> None:
        """Recompute the place of every lane that a job has a line on."""
        ids = [id for (id,) in self._run("SELECT DISTINCT lane FROM line WHERE job=?", (job,))]
        lanes = {row.id: row for row in self._lane_rows(ids)}
        for row in lanes.values():
            self._settle_place(row, now)
        self._write_lanes(lanes)

    def _job_view(self, name: str) -> Job:
        columns = "added, known, refused, done, skipped, dead, expired, cancelled, retried, items, stale"
        rows = self._run(
            f"SELECT id, spec, state, created, finished, started, {columns} FROM job WHERE name=?", (name,)
        )
        found = rows.fetchall()
        if not found:
            raise NoSuchJob(name)
        id, spec, state, created, finished, started, *values = found[0]
        by_job = "WHERE line IN (SELECT id FROM line WHERE job=?)"
        leased = self._run(f"SELECT count(*) FROM lease {by_job}", (id,)).fetchall()[0][0]
        delayed = self._run(f"SELECT count(*) FROM delayed {by_job}", (id,)).fetchall()[0][0]
        counts = Counts(**dict(zip(columns.split(", "), values, strict=True)))
        waiting = counts.live - leased - delayed
        counts = msgspec.structs.replace(counts, waiting=waiting, delayed=delayed, leased=leased)
        errors = dict(self._run("SELECT error, n FROM tally WHERE job=? ORDER BY n DESC", (id,)).fetchall())
        ended = None if finished is None else finished / US
        begun = None if started is None else started / US
        return Job(name, spec_of(spec), JobState(state), counts, errors, created / US, ended, begun)

    def _lane_view(self, row: tuple[Any, ...]) -> Lane:
        name, lane = row[0], LaneRow(row[1:])
        sql = "SELECT count(*) FROM waiting WHERE line IN (SELECT id FROM line WHERE lane=?)"
        waiting = self._run(sql, (lane.id,)).fetchall()[0][0]
        ready = None
        if lane.at is not None:
            ready = max(lane.at, lane.tat - lane.burst * lane.pace_gap, lane.blocked) / US
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

    def _find(self, url: str, name: str) -> Finding:
        job = self._job_row(name)
        state = JobState(job.state)
        known = self._run("SELECT 1 FROM seen WHERE key=?", (urls.key(name, url),)).fetchall()
        if not known:
            return Finding(name, "unknown", job_state=state)
        host = urls.lane_of(url)
        lanes = [self._lane_view(row) for row in self._run(f"{_LANES} WHERE l.name=?", (host,))]
        lane = lanes[0] if lanes else None
        lines = (
            "line IN (SELECT line.id FROM line JOIN lane ON lane.id=line.lane"
            " WHERE lane.name=?2 AND line.job=?3) AND url=?1"
        )
        values = (url, host, job.id)
        for line, id, depth, attempt, extra in self._run(
            f"SELECT line, id, depth, attempt, extra FROM waiting WHERE {lines}", values
        ).fetchall():
            sql = "SELECT count(*) FROM waiting WHERE line=? AND id<?"
            ahead = self._run(sql, (line, id)).fetchall()[0][0]
            request = self._request_of(line, name, url, depth, attempt, extra)
            return Finding(name, "waiting", request, lane, state, ahead, lane.ready_at if lane else None)
        for line, at, depth, attempt, extra in self._run(
            f"SELECT line, at, depth, attempt, extra FROM delayed WHERE {lines}", values
        ).fetchall():
            request = self._request_of(line, name, url, depth, attempt, extra)
            return Finding(name, "delayed", request, lane, state, ready_at=at / US)
        for line, until, worker, depth, attempt, extra in self._run(
            f"SELECT line, until, worker, depth, attempt, extra FROM lease WHERE {lines}", values
        ).fetchall():
            request = self._request_of(line, name, url, depth, attempt, extra)
            return Finding(name, "leased", request, lane, state, worker=worker, until=until / US)
        for row in self._run(
            f"SELECT {_ENDED} FROM ended e JOIN job ON job.id=e.job WHERE e.job=? AND e.url=?", (job.id, url)
        ).fetchall():
            letter = _letter(row)
            return Finding(name, letter.state, letter.request, lane, state, failure=letter.failure)
        return Finding(name, "done", None, lane, state)

    def _request_of(
        self, line_id: int, job: str, url: str, depth: int, attempt: int, extra: bytes | None
    ) -> Request:
        line = self._any_line(line_id)
        return request_of(url, job, self._queue_name(line.stream), line.priority, depth, attempt, extra)

    def _selected(self, which: Selection) -> tuple[str, list[Any]]:
        conditions: list[str] = ["true"]
        values: list[Any] = []
        if which.job is not None:
            # The same plus: few ended since then, many may be of this job.
            of = "e.job" if which.since is None else "+e.job"
            conditions.append(f"{of}=(SELECT id FROM job WHERE name=?)")
            values.append(which.job)
        if which.lane is not None:
            conditions.append("e.lane=?")
            values.append(which.lane)
        if which.error is not None:
            conditions.append("e.error=?")
            values.append(which.error)
        if which.ids is not None:
            conditions.append("e.id IN (" + ", ".join("?" * len(which.ids)) + ")")
            values += which.ids
        if which.since is not None:
            conditions.append("e.at>?")
            values.append(microseconds(which.since))
        return " AND ".join(conditions), values

    def _check(self) -> list[str]:
        wrong = [
            f"SQLite: {row[0]}" for row in self._run("PRAGMA quick_check(5)").fetchall() if row[0] != "ok"
        ]
        now = self._now()
        places = " UNION ALL ".join(f"SELECT id FROM {t}" for t in ("waiting", "delayed", "lease", "ended"))
        for id, n in self._run(f"SELECT id, count(*) AS n FROM ({places}) GROUP BY id HAVING n>1"):
            wrong.append(f"request {id} is in {n} states")
        for name, busy, n in self._run(
            "SELECT l.name, l.busy, (SELECT count(*) FROM lease JOIN line ON line.id=lease.line"
            " WHERE line.lane=l.id) AS n FROM lane l WHERE l.busy<>n"
        ):
            wrong.append(f"lane {name} counts {busy} leases, there are {n}")
        turns: dict[int, set[tuple[int, int]]] = {}
        for stream, at, lane in self._run("SELECT stream, at, lane FROM turn"):
            turns.setdefault(lane, set()).add((stream, at))
        live: dict[int, set[int]] = {}
        for lane, stream in self._run(
            "SELECT DISTINCT lane, stream FROM line WHERE off=0"
            " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
        ):
            live.setdefault(lane, set()).add(stream)
        for row in self._run(f"SELECT l.name, {LANE} FROM lane l").fetchall():
            name, state = row[0], LaneRow(row[1:])
            if set(state.streams) != live.get(state.id, set()):
                wrong.append(f"lane {name} is wrong about the streams that have work there")
            free = state.busy < state.width and not state.paused
            if live.get(state.id) and free and state.at is None:
                wrong.append(f"lane {name} has work and a free slot but is not scheduled")
            planned = set() if state.at is None else {(stream, state.at) for stream in state.streams}
            if planned != turns.pop(state.id, set()):
                wrong.append(f"lane {name} stands elsewhere in the turns than it thinks")
            ready = max(state.tat - state.burst * state.pace_gap, state.blocked)
            if state.at is not None and state.at > max(now, ready):
                wrong.append(f"lane {name} is scheduled later than it is ready")
            lines = self._run("SELECT id FROM line WHERE lane=?", (state.id,)).fetchall()
            if state.sole != (lines[0][0] if len(lines) == 1 else None):
                wrong.append(f"lane {name} is wrong about its only line")
        wrong += [f"turns of lane {lane}, which does not exist" for lane in turns]
        for table in ("waiting", "delayed", "lease"):
            sql = f"SELECT count(*) FROM {table} WHERE line NOT IN (SELECT id FROM line)"
            if stray := self._run(sql).fetchall()[0][0]:
                wrong.append(f"{stray} requests are {table} in lines that do not exist")
        for name, live_count, waits, items, logged in self._run(
            "SELECT j.name, j.added-j.done-j.dead-j.expired-j.cancelled,"
            " (SELECT count(*) FROM waiting JOIN line ON line.id=waiting.line WHERE line.job=j.id)"
            " + (SELECT count(*) FROM delayed JOIN line ON line.id=delayed.line WHERE line.job=j.id)"
            " + (SELECT count(*) FROM lease JOIN line ON line.id=lease.line WHERE line.job=j.id),"
            " j.items, (SELECT count(*) FROM item WHERE seq>j.id<<40 AND seq<(j.id+1)<<40) FROM job j"
        ):
            if live_count != waits:
                wrong.append(f"job {name}: live {live_count}, but {waits} wait, are delayed or leased")
            if items != logged:
                wrong.append(f"job {name} counts {items} items, its log has {logged}")
        return wrong


def _letter(row: tuple[Any, ...]) -> DeadLetter:
    id, state, at, job, lane, queue, priority, url, depth, attempt, extra, *why = row
    request = request_of(url, job, queue, priority, depth, attempt, extra)
    # Brought back it may wait as long as it needs.
    request = msgspec.structs.replace(request, ttl=None) if request.ttl is not None else request
    return DeadLetter(id, request, lane, Failure(*why), at / US, state)
