"""What people ask: `FrontierAdmin` on PostgreSQL, except for `moving.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from shoal import urls
from shoal.errors import NoSuchJob
from shoal.frontier.postgres.rows import Entry, Tx, lane_row, text
from shoal.frontier.postgres.verbs import Verbs
from shoal.frontier.rows import LANE, JobRow, LaneRow, Line, extra_of, request_of, spec_bytes, spec_of
from shoal.frontier.rules import FORGET, US, microseconds
from shoal.model import (
    TRANSIT,
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
    Request,
    Selection,
)

_encode = msgspec.json.Encoder().encode
_beat = msgspec.json.Decoder(Beat).decode

_COUNTS = "added, known, refused, done, skipped, dead, expired, cancelled, retried, items, stale"

_LANES = (
    "SELECT l.name, (SELECT count(*) FROM waiting JOIN line ON line.id=waiting.line WHERE line.lane=l.id),"
    f" {LANE} FROM lane l"
)

_ENDED = (
    "e.id, e.state, e.at, job.name, e.lane, e.queue, e.priority, e.url, e.depth, e.attempt, e.extra,"
    " e.error, e.message, e.worker"
)


SWEEP = 10 * US
"""Notes that ended are removed so often: looking through them costs, and pages are noted all the time."""


class People(Verbs):
    """Everything but moving jobs."""

    _swept = 0

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        async def work(tx: Tx) -> Job:
            await tx.run(
                "INSERT INTO job(name, spec, state, created) VALUES($1, $2, 'running', $3)"
                " ON CONFLICT(name) DO NOTHING",
                job,
                spec_bytes(spec),
                tx.now,
            )
            return await self._job_view(tx, job)

        return await self._write(work, durable=True)

    async def job(self, job: str) -> Job:
        return await self._read(lambda tx: self._job_view(tx, job))

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        top = microseconds(before) if before is not None else 1 << 62

        async def work(tx: Tx) -> list[Job]:
            rows = await tx.run(
                "SELECT name FROM job WHERE created<$1 ORDER BY created DESC, id DESC LIMIT $2", top, limit
            )
            return await self._job_views(tx, [name for (name,) in rows])

        return await self._read(work)

    async def respec_job(self, job: str, spec: JobSpec) -> Job:
        async def work(tx: Tx) -> Job:
            id = await tx.job_id(job)
            await tx.run("UPDATE job SET spec=$1 WHERE id=$2", spec_bytes(spec), id)
            await tx.run("UPDATE tick SET epoch=epoch+1")  # nobody may go on with the old one
            await self._repace(tx, await tx.job(job))
            return await self._job_view(tx, job)

        return await self._write(work, durable=True, wakes=True)

    async def pause(self, job: str) -> Job:
        return await self._write(lambda tx: self._switch(tx, job, off=True), durable=True)

    async def resume(self, job: str) -> Job:
        return await self._write(lambda tx: self._switch(tx, job, off=False), durable=True, wakes=True)

    async def cancel(self, job: str) -> Job:
        async def work(tx: Tx) -> Job:
            row = await tx.job(job)
            if row.state in ("cancelled", "done"):
                return await self._job_view(tx, job)
            gone = 0
            for table in ("waiting", "delayed"):
                gone += await tx.value(
                    f"WITH gone AS (DELETE FROM {table} WHERE line IN (SELECT id FROM line WHERE job=$1)"
                    " RETURNING 1) SELECT count(*) FROM gone",
                    row.id,
                )
            await tx.run(
                "UPDATE job SET state='cancelled', finished=$1, cancelled=cancelled+$2 WHERE id=$3",
                tx.now,
                gone,
                row.id,
            )
            await self._replace_lanes_of(tx, row.id)
            tx.begin_again()  # the state of the job has changed
            await tx.end_travels(
                f"starts_with(worker, '{TRANSIT}') AND line IN (SELECT id FROM line WHERE job=$1)", row.id
            )
            return await self._job_view(tx, job)

        return await self._write(work, durable=True, wakes=True)

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        async def work(tx: Tx) -> list[Item]:
            base = await tx.job_id(job) << 40
            rows = await tx.run(
                "SELECT seq, body FROM item WHERE seq>$1 AND seq<$2 ORDER BY seq LIMIT $3",
                base + after,
                base + (1 << 40),
                limit,
            )
            return [Item(seq - base, body) for seq, body in rows]

        return await self._read(work)

    async def cursor(self, job: str, sink: str) -> int:
        async def work(tx: Tx) -> int:
            sql = "SELECT seq FROM cursor WHERE job=$1 AND sink=$2"
            return await tx.value(sql, await tx.job_id(job), text(sink)) or 0

        return await self._read(work)

    async def save_cursor(self, job: str, sink: str, seq: int) -> None:
        async def work(tx: Tx) -> None:
            await tx.run(
                "INSERT INTO cursor VALUES($1, $2, $3) ON CONFLICT(job, sink) DO UPDATE SET seq=excluded.seq",
                await tx.job_id(job),
                text(sink),
                seq,
            )

        await self._write(work, together=True)

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        async def work(tx: Tx) -> list[DeadLetter]:
            where, values = _selected(which)
            n = len(values)
            # A sum keeps the planner from walking through all of them by id.
            by = "e.id" if which.since is None else "(e.id + 0)"
            rows = await tx.run(
                f"SELECT {_ENDED} FROM ended e JOIN job ON job.id=e.job WHERE {where} AND {by}>${n + 1}"
                f" ORDER BY {by} LIMIT ${n + 2}",
                *values,
                after,
                limit,
            )
            return [_letter(row) for row in rows]

        return await self._read(work)

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        async def work(tx: Tx) -> list[DeadGroup]:
            where, values = _selected(which)
            rows = await tx.run(
                "SELECT g.lane, g.error, g.n, e.url FROM (SELECT e.lane, e.error, count(*) AS n,"
                f" min(e.id) AS first FROM ended e JOIN job ON job.id=e.job WHERE {where}"
                " GROUP BY e.lane, e.error) g JOIN ended e ON e.id=g.first"
                " ORDER BY g.n DESC, g.lane, g.error",
                *values,
            )
            return [DeadGroup(*row) for row in rows]

        return await self._read(work)

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        async def work(tx: Tx) -> int:
            where, values = _selected(which)
            rows = await tx.run(
                f"SELECT {_ENDED} FROM ended e JOIN job ON job.id=e.job"
                f" WHERE job.state<>'cancelled' AND {where} ORDER BY e.id",
                *values,
            )
            if not rows:
                return 0
            await tx.run("DELETE FROM ended WHERE id=ANY($1::bigint[])", [row[0] for row in rows])
            await self._revive(tx, [_letter(row) for row in rows], reset_attempts)
            await tx.finish()
            return len(rows)

        return await self._write(work, durable=True, wakes=True)

    async def purge(self, which: Selection) -> int:
        async def work(tx: Tx) -> int:
            where, values = _selected(which)
            gone: int = await tx.value(
                "WITH gone AS (DELETE FROM ended WHERE id IN (SELECT e.id FROM ended e JOIN job ON"
                f" job.id=e.job WHERE {where}) RETURNING 1) SELECT count(*) FROM gone",
                *values,
            )
            return gone

        return await self._write(work, durable=True)

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        async def work(tx: Tx) -> None:
            job = await tx.job(request.job)
            key = urls.key(request.job, request.url, request.method, request.body)
            id = await tx.value(
                "INSERT INTO seen VALUES($1) ON CONFLICT DO NOTHING RETURNING nextval('request')", key
            )
            if id is None:
                return
            job.count("added")
            job.count("dead")
            lane = urls.lane_of(request.url) if "://" in request.url else ""
            row = (
                *(id, "dead", tx.now, job.id, text(lane), text(request.queue), request.priority),
                *(
                    text(request.url),
                    request.depth,
                    0,
                    extra_of(request),
                    text(failure_class),
                    text(message),
                    "",
                ),
            )
            await tx.bury([row])
            tx.tally(job.id, failure_class)
            await tx.finish()

        await self._write(work, durable=True)

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        async def work(tx: Tx) -> list[Lane]:
            if names is not None:
                rows = await tx.run(f"{_LANES} WHERE l.name=ANY($1::text[])", list(names))
            else:
                rows = await tx.run(
                    f"{_LANES} ORDER BY l.busy DESC, l.streams<>'0' DESC, l.id LIMIT $1", limit
                )
            found = [_lane_view(row) for row in rows]
            return sorted(found, key=lambda lane: (-lane.busy, -lane.waiting, lane.name))[:limit]

        return await self._read(work)

    async def find(self, url: str, job: str | None = None) -> list[Finding]:
        async def work(tx: Tx) -> list[Finding]:
            if job is not None:
                return [await self._find(tx, url, job)]
            names = [name for (name,) in await tx.run("SELECT name FROM job ORDER BY id")]
            keys = [urls.key(name, url) for name in names]
            rows = await tx.run("SELECT key FROM seen WHERE key=ANY($1::bytea[])", keys)
            known = {key for (key,) in rows}
            await tx.load_jobs(names)
            return [
                await self._find(tx, url, name)
                if key in known
                else Finding(name, "unknown", job_state=JobState(tx.jobs_named[name].state))
                for name, key in zip(names, keys, strict=True)
            ]

        return await self._read(work)

    async def queues(self) -> dict[str, dict[str, int]]:
        async def work(tx: Tx) -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {}
            for table, state in (("waiting", "waiting"), ("delayed", "delayed"), ("lease", "leased")):
                rows = await tx.run(
                    f"SELECT s.queue, count(*) FROM {table} t JOIN line ON line.id=t.line"
                    " JOIN stream s ON s.id=line.stream GROUP BY s.queue"
                )
                for name, n in rows:
                    found.setdefault(name, {"waiting": 0, "delayed": 0, "leased": 0})[state] = n
            return found

        return await self._read(work)

    async def note(self, key: str, value: bytes, ttl: float) -> None:
        async def work(tx: Tx) -> None:
            if not 0 <= tx.now - self._swept < SWEEP:
                self._swept = tx.now
                await tx.run("DELETE FROM note WHERE until<$1", tx.now)
            await tx.run(
                "INSERT INTO note VALUES($1, $2, $3) ON CONFLICT(key) DO UPDATE"
                " SET until=excluded.until, value=excluded.value",
                text(key),
                tx.now + microseconds(ttl),
                value,
            )

        await self._write(work, together=True)

    async def lock(self, name: str, owner: str, ttl: float) -> str:
        async def work(tx: Tx) -> str:
            await tx.run(
                "INSERT INTO lock VALUES($1, $2, $3) ON CONFLICT(name) DO UPDATE SET owner=$2, until=$3"
                " WHERE lock.owner=$2 OR lock.until<=$4",
                text(name),
                text(owner),
                tx.now + microseconds(ttl),
                tx.now,
            )
            holder: str = await tx.value("SELECT owner FROM lock WHERE name=$1", text(name))
            return holder

        return await self._write(work, together=True)

    async def unlock(self, name: str, owner: str) -> None:
        async def work(tx: Tx) -> None:
            await tx.run("DELETE FROM lock WHERE name=$1 AND owner=$2", text(name), text(owner))

        await self._write(work, together=True)

    async def noted(self, key: str) -> bytes | None:
        async def work(tx: Tx) -> bytes | None:
            sql = "SELECT value FROM note WHERE key=$1 AND until>$2"
            value: bytes | None = await tx.value(sql, text(key), tx.now)
            return value

        return await self._read(work)

    async def swap(self, key: str, known: bytes | None, value: bytes, ttl: float) -> bool:
        # One statement each: whoever waits for the other's row sees what became of it.
        fresh = (
            "INSERT INTO note VALUES($1, $2, $3) ON CONFLICT(key) DO UPDATE"
            " SET until=excluded.until, value=excluded.value WHERE note.until<=$4 RETURNING 1"
        )
        again = "UPDATE note SET until=$2, value=$3 WHERE key=$1 AND until>$4 AND value=$5 RETURNING 1"

        async def work(tx: Tx) -> bool:
            values = [text(key), tx.now + microseconds(ttl), value, tx.now]
            if known is None:
                return await tx.value(fresh, *values) is not None
            return await tx.value(again, *values, known) is not None

        return await self._write(work, durable=True)

    async def now(self) -> float:
        async def work(tx: Tx) -> float:
            return tx.now / US

        return await self._read(work)

    async def beat(self, beat: Beat) -> None:
        async def work(tx: Tx) -> None:
            await tx.run("DELETE FROM worker WHERE seen<$1", tx.now - FORGET)
            await tx.run(
                "INSERT INTO worker VALUES($1, $2, $2, $3) ON CONFLICT(name) DO UPDATE SET seen=$2, beat=$3",
                text(beat.worker),
                tx.now,
                _encode(beat),
            )

        await self._write(work, together=True)

    async def leave(self, worker: str) -> None:
        async def work(tx: Tx) -> None:
            await tx.run("DELETE FROM worker WHERE name=$1", text(worker))

        await self._write(work, together=True)

    async def workers(self) -> list[Attendance]:
        async def work(tx: Tx) -> list[Attendance]:
            sql = (
                "SELECT beat, since, seen, (SELECT count(*) FROM lease WHERE lease.worker=worker.name)"
                " FROM worker ORDER BY name"
            )
            now = tx.now / US
            return [
                Attendance(_beat(beat), since / US, seen / US, leases, now)
                for beat, since, seen, leases in await tx.run(sql)
            ]

        return await self._read(work)

    async def holders(self, job: str | None = None) -> dict[str, int]:
        async def work(tx: Tx) -> dict[str, int]:
            sql = (
                "SELECT worker, count(*) FROM lease JOIN line ON line.id=lease.line"
                " JOIN job ON job.id=line.job WHERE $1::text IS NULL OR job.name=$1 GROUP BY worker"
            )
            return dict(await tx.run(sql, job))

        return await self._read(work)

    async def travelling(self, lane: str) -> dict[str, int]:
        sql = (
            "SELECT s.queue, count(*) FROM lease JOIN line ON line.id=lease.line JOIN stream s ON"
            " s.id=line.stream WHERE line.lane=(SELECT id FROM lane WHERE name=$1)"
            f" AND starts_with(worker, '{TRANSIT}') GROUP BY s.queue"
        )

        async def work(tx: Tx) -> dict[str, int]:
            return dict(await tx.run(sql, text(lane)))

        return await self._read(work)

    async def visiting(self, job: str) -> str | None:
        async def work(tx: Tx) -> str | None:
            sql = (
                "SELECT lease.url FROM lease JOIN line ON line.id=lease.line JOIN job ON job.id=line.job"
                f" WHERE job.name=$1 AND NOT starts_with(worker, '{TRANSIT}') ORDER BY token DESC LIMIT 1"
            )
            url: str | None = await tx.value(sql, text(job))
            return url

        return await self._read(work)

    async def evict(self, workers: Collection[str]) -> int:
        if not workers:
            return 0

        async def work(tx: Tx) -> int:
            names = [text(worker) for worker in workers]
            back, count = await tx.end_leases("worker=ANY($1::text[])", names)
            await tx.back_in_line(back)
            await tx.settle_places(tx.lanes.values())
            await tx.finish()
            return count

        return await self._write(work, durable=True, wakes=True)

    async def check(self) -> list[str]:
        return await self._read(self._check)

    async def _revive(self, tx: Tx, letters: Sequence[DeadLetter], reset_attempts: bool) -> None:
        await tx.load_jobs(letter.request.job for letter in letters)
        lanes = await tx.lane_ids(letter.lane for letter in letters)
        await tx.load_lanes(lanes.values())
        await tx.load_streams((letter.request.queue, tx.jobs_named[letter.request.job]) for letter in letters)
        places: list[tuple[int, int, int, int]] = []
        for letter in letters:
            request = letter.request
            job = tx.jobs_named[request.job]
            lane = lanes[letter.lane]
            job.count(letter.state, -1)
            tx.count_lane(job, letter.lane, 1)
            tx.adopt(tx.lanes[lane], job)
            places.append((lane, tx.stream(request.queue, job), job.id, request.priority))
        lines = await tx.make_lines(places)
        back: list[tuple[Line, Entry]] = []
        for place, letter in zip(places, letters, strict=True):
            request = letter.request
            attempt = 0 if reset_attempts else request.attempt
            entry = (letter.id, request.url, request.depth, attempt, None, extra_of(request))
            back.append((lines[place], entry))
        await tx.back_in_line(back)
        await tx.settle_places([tx.lanes[lane] for lane in set(lanes.values())])

    async def _switch(self, tx: Tx, job: str, *, off: bool) -> Job:
        row = await tx.job(job)
        if row.state == ("running" if off else "paused"):
            await tx.run("UPDATE line SET off=$1 WHERE job=$2", int(off), row.id)
            if not off:
                await tx.run(
                    "UPDATE line SET vt=greatest(line.vt, lane.vt) FROM lane WHERE lane.id=line.lane"
                    " AND line.job=$1 AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)",
                    row.id,
                )
            await tx.run(
                "UPDATE job SET state=CASE WHEN $1='running' AND added>0 AND"
                " added=done+dead+expired+cancelled THEN 'done' ELSE $1 END WHERE id=$2",
                "paused" if off else "running",
                row.id,
            )
            await self._replace_lanes_of(tx, row.id)
        return await self._job_view(tx, job)

    async def _repace(self, tx: Tx, job: JobRow) -> None:
        """A job asks for another pace: its lanes take it, shared ones keep the slower."""
        rows = await tx.run("SELECT DISTINCT lane FROM line WHERE job=$1", job.id)
        shared = {
            id
            for (id,) in await tx.run(
                "SELECT DISTINCT line.lane FROM line JOIN job ON job.id=line.job WHERE line.job<>$1 AND"
                " job.added>job.done+job.dead+job.expired+job.cancelled AND line.lane IN"
                " (SELECT lane FROM line WHERE job=$1)",
                job.id,
            )
        }
        await tx.load_lanes(id for (id,) in rows)
        changed = [row for row in tx.lanes.values() if not row.pinned]
        for row in changed:
            row.gap = max(row.gap, job.gap) if row.id in shared else job.gap
            row.width = min(row.width, job.width) if row.id in shared else job.width
        await tx.settle_places(changed)
        await tx.finish()

    async def _replace_lanes_of(self, tx: Tx, job: int) -> None:
        """Recompute the place of every lane that a job has a line on."""
        rows = await tx.run("SELECT DISTINCT lane FROM line WHERE job=$1", job)
        await tx.load_lanes(id for (id,) in rows)
        await tx.settle_places(tx.lanes.values())
        await tx.finish()

    async def _job_view(self, tx: Tx, name: str) -> Job:
        views = await self._job_views(tx, [name])
        if not views:
            raise NoSuchJob(name)
        return views[0]

    async def _job_views(self, tx: Tx, names: Sequence[str]) -> list[Job]:
        rows = await tx.run(
            f"SELECT id, name, spec, state, created, finished, started, {_COUNTS} FROM job"
            " WHERE name=ANY($1::text[])",
            names,
        )
        ids = [row[0] for row in rows]
        held: dict[str, dict[int, int]] = {}
        for table in ("lease", "delayed"):
            held[table] = dict(
                await tx.run(
                    f"SELECT line.job, count(*) FROM {table} t JOIN line ON line.id=t.line"
                    " WHERE line.job=ANY($1::bigint[]) GROUP BY line.job",
                    ids,
                )
            )
        errors: dict[int, dict[str, int]] = {}
        for job, error, n in await tx.run(
            "SELECT job, error, n FROM tally WHERE job=ANY($1::bigint[]) ORDER BY n DESC, error", ids
        ):
            errors.setdefault(job, {})[error] = n
        views: dict[str, Job] = {}
        for id, name, spec, state, created, finished, started, *values in rows:
            leased, delayed = held["lease"].get(id, 0), held["delayed"].get(id, 0)
            counts = Counts(**dict(zip(_COUNTS.split(", "), values, strict=True)))
            waiting = counts.live - leased - delayed
            counts = msgspec.structs.replace(counts, waiting=waiting, delayed=delayed, leased=leased)
            ended = None if finished is None else finished / US
            begun = None if started is None else started / US
            views[name] = Job(
                name, spec_of(spec), JobState(state), counts, errors.get(id, {}), created / US, ended, begun
            )
        return [views[name] for name in names if name in views]

    async def _find(self, tx: Tx, url: str, name: str) -> Finding:
        job = await tx.job(name)
        state = JobState(job.state)
        if not await tx.value("SELECT EXISTS(SELECT 1 FROM seen WHERE key=$1)", urls.key(name, url)):
            return Finding(name, "unknown", job_state=state)
        host = urls.lane_of(url)
        lanes = [_lane_view(row) for row in await tx.run(f"{_LANES} WHERE l.name=$1", text(host))]
        lane = lanes[0] if lanes else None
        where = (
            "JOIN line ON line.id=t.line JOIN lane ON lane.id=line.lane JOIN stream ON stream.id=line.stream"
            " WHERE lane.name=$2 AND line.job=$3 AND t.url=$1 LIMIT 1"
        )
        common = "stream.queue, line.priority, t.depth, t.attempt, t.extra"
        values = (text(url), text(host), job.id)
        for line, id, queue, *rest in await tx.run(
            f"SELECT t.line, t.id, {common} FROM waiting t {where}", *values
        ):
            ahead = await tx.value("SELECT count(*) FROM waiting WHERE line=$1 AND id<$2", line, id)
            request = request_of(url, name, queue, *rest)
            return Finding(name, "waiting", request, lane, state, ahead, lane.ready_at if lane else None)
        for at, queue, *rest in await tx.run(f"SELECT t.at, {common} FROM delayed t {where}", *values):
            return Finding(
                name, "delayed", request_of(url, name, queue, *rest), lane, state, ready_at=at / US
            )
        for until, worker, queue, *rest in await tx.run(
            f"SELECT t.until, t.worker, {common} FROM lease t {where}", *values
        ):
            request = request_of(url, name, queue, *rest)
            return Finding(name, "leased", request, lane, state, worker=worker, until=until / US)
        for row in await tx.run(
            f"SELECT {_ENDED} FROM ended e JOIN job ON job.id=e.job WHERE e.job=$1 AND e.url=$2 LIMIT 1",
            job.id,
            text(url),
        ):
            letter = _letter(row)
            return Finding(name, letter.state, letter.request, lane, state, failure=letter.failure)
        return Finding(name, "done", None, lane, state)

    async def _check(self, tx: Tx) -> list[str]:
        places = " UNION ALL ".join(f"SELECT id FROM {t}" for t in ("waiting", "delayed", "lease", "ended"))
        wrong = [
            f"request {id} is in {n} states"
            for id, n in await tx.run(
                f"SELECT id, count(*) FROM ({places}) p GROUP BY id HAVING count(*)>1 ORDER BY id"
            )
        ]
        held = dict(
            await tx.run("SELECT line.lane, count(*) FROM lease JOIN line ON line.id=lease.line GROUP BY 1")
        )
        turns: dict[int, set[tuple[int, int]]] = {}
        for stream, at, lane in await tx.run("SELECT stream, at, lane FROM turn"):
            turns.setdefault(lane, set()).add((stream, at))
        live: dict[int, set[int]] = {}
        for lane, stream in await tx.run(
            "SELECT DISTINCT lane, stream FROM line WHERE off=0"
            " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
        ):
            live.setdefault(lane, set()).add(stream)
        lines: dict[int, list[int]] = {}
        for id, lane in await tx.run("SELECT id, lane FROM line"):
            lines.setdefault(lane, []).append(id)
        for row in await tx.run(f"SELECT l.name, {LANE} FROM lane l ORDER BY l.id"):
            state = lane_row(row[1:])
            own = lines.get(state.id, [])
            wrong += _check_lane(
                *(row[0], state, held.get(state.id, 0), live.get(state.id, set())),
                *(turns.pop(state.id, set()), own[0] if len(own) == 1 else None, tx.now),
            )
        wrong += [f"turns of lane {lane}, which does not exist" for lane in turns]
        for table in ("waiting", "delayed", "lease"):
            stray = await tx.value(
                f"SELECT count(*) FROM {table} t WHERE NOT EXISTS(SELECT 1 FROM line WHERE line.id=t.line)"
            )
            if stray:
                wrong.append(f"{stray} requests are {table} in lines that do not exist")
        for name, live_count, waits, items, logged in await tx.run(
            "SELECT j.name, j.added-j.done-j.dead-j.expired-j.cancelled,"
            " (SELECT count(*) FROM waiting JOIN line ON line.id=waiting.line WHERE line.job=j.id)"
            " + (SELECT count(*) FROM delayed JOIN line ON line.id=delayed.line WHERE line.job=j.id)"
            " + (SELECT count(*) FROM lease JOIN line ON line.id=lease.line WHERE line.job=j.id),"
            " j.items, (SELECT count(*) FROM item WHERE seq>j.id<<40 AND seq<(j.id+1)<<40) FROM job j"
            " ORDER BY j.id"
        ):
            if live_count != waits:
                wrong.append(f"job {name}: live {live_count}, but {waits} wait, are delayed or leased")
            if items != logged:
                wrong.append(f"job {name} counts {items} items, its log has {logged}")
        return wrong


def _check_lane(
    name: str,
    lane: LaneRow,
    leases: int,
    live: set[int],
    turns: set[tuple[int, int]],
    sole: int | None,
    now: int,
) -> list[str]:
    """What a lane says of itself against what was counted."""
    wrong: list[str] = []
    if lane.busy != leases:
        wrong.append(f"lane {name} counts {lane.busy} leases, there are {leases}")
    if set(lane.streams) != live:
        wrong.append(f"lane {name} is wrong about the streams that have work there")
    if live and lane.busy < lane.width and not lane.paused and lane.at is None:
        wrong.append(f"lane {name} has work and a free slot but is not scheduled")
    planned = set() if lane.at is None else {(stream, lane.at) for stream in lane.streams}
    if planned != turns:
        wrong.append(f"lane {name} stands elsewhere in the turns than it thinks")
    ready = max(lane.tat - lane.burst * lane.pace_gap, lane.blocked)
    if lane.at is not None and lane.at > max(now, ready):
        wrong.append(f"lane {name} is scheduled later than it is ready")
    if lane.sole != sole:
        wrong.append(f"lane {name} is wrong about its only line")
    return wrong


def _lane_view(row: Sequence[Any]) -> Lane:
    name, waiting, lane = row[0], row[1], lane_row(row[2:])
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


def _selected(which: Selection) -> tuple[str, list[Any]]:
    """The condition on `ended e`, with its values from $1 on."""
    conditions = ["true"]
    values: list[Any] = []
    for value, condition in (
        (which.job, "e.job=(SELECT id FROM job WHERE name=${})"),
        (which.lane, "e.lane=${}"),
        (which.error, "e.error=${}"),
        (None if which.ids is None else list(which.ids), "e.id=ANY(${}::bigint[])"),
        (None if which.since is None else microseconds(which.since), "e.at>${}"),
    ):
        if value is not None:
            values.append(text(value) if isinstance(value, str) else value)
            conditions.append(condition.format(len(values)))
    return " AND ".join(conditions), values


def _letter(row: Sequence[Any]) -> DeadLetter:
    id, state, at, job, lane, queue, priority, url, depth, attempt, extra, *why = row
    request = request_of(url, job, queue, priority, depth, attempt, extra)
    # Brought back it may wait as long as it needs.
    request = msgspec.structs.replace(request, ttl=None) if request.ttl is not None else request
    return DeadLetter(id, request, lane, Failure(*why), at / US, state)
