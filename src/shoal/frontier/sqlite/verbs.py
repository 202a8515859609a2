"""The hot path: the verbs of `Frontier`, each one transaction."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import apsw
import msgspec

from shoal import urls
from shoal.errors import (
    UsageError,
)
from shoal.frontier.rows import (
    CRASH,
    LANE,
    JobRow,
    LaneRow,
    Line,
    expires_at,
    expires_of,
    extra_of,
    request_of,
)
from shoal.frontier.rules import STEP, US, WEIGHT, allowance, made_by, microseconds, passed, validate
from shoal.frontier.sqlite.rows import TRAVELS, Rows
from shoal.model import (
    EXPIRED,
    TRANSIT,
    TTL_OVER,
    Added,
    Claim,
    Dead,
    Done,
    Failure,
    Lease,
    Pace,
    Request,
    Retry,
    Settlement,
    Verdict,
)

_replace = msgspec.structs.replace
Refund = tuple[int, JobRow, str]
"""A request that no longer counts against the page budgets: how many requests had been found before
it ended, its job, its lane."""


class Verbs(Rows):
    """`Frontier` on SQLite."""

    _version = 0
    """What the file's version was at the last claim, and what that claim asked for."""
    _asked: tuple[Collection[str] | None, str | None] = (None, None)
    _lease_scan: tuple[int, int] = (0, 0)
    """When the leases were last looked through, and how many there were."""

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        if not requests:
            return []
        for request in requests:
            validate(request)

        def work() -> list[Added]:
            now = self._now()
            jobs: dict[str, JobRow] = {}
            lanes: dict[int, LaneRow] = {}
            answers = self._add(requests, now, jobs, lanes)
            self._write_lanes(lanes)
            self._write_jobs(jobs, now)
            return answers

        return await self._write(work, durable=True)

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        return await self._write(lambda: self._claim(limit, worker, microseconds(lease), queues, job))

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        if not verdicts:
            return Settlement([], [])
        return await self._write(lambda: self._settle(verdicts), durable=True)

    async def take(self, leases: Sequence[Lease], *, worker: str, lease: float) -> Claim:
        def work() -> Claim:
            now = self._now()
            until = now + microseconds(lease)
            tokens = array("q", [each.token for each in leases])
            ours = {
                token
                for (token,) in self._run(
                    "UPDATE lease SET until=?1, worker=?2 WHERE token IN carray(?3)"
                    f" AND (worker=?2 OR {TRAVELS}) AND NOT EXISTS(SELECT 1 FROM line JOIN job ON"
                    " job.id=line.job WHERE line.id=lease.line AND (job.state='cancelled' OR"
                    " (job.state='paused' AND worker<>?2 AND ?4))) RETURNING token",
                    (until, worker, apsw.carray(tokens), not worker.startswith(TRANSIT)),
                )
            }
            if len(ours) < len(tokens):
                self._refuse_to_give(array("q", [token for token in tokens if token not in ours]), now)
            taken = [_replace(each, until=until / US) for each in leases if each.token in ours]
            return Claim(taken, now / US, now / US)

        return await self._write(work)

    def _refuse_to_give(self, tokens: array[int], now: int) -> None:
        """Of these, what still travels belongs to a job that is paused or cancelled."""
        rows = self._run(
            f"SELECT token FROM lease WHERE token IN carray(?) AND {TRAVELS}", (apsw.carray(tokens),)
        )
        travelling = array("q", [token for (token,) in rows])
        if travelling:
            self._end_travels("token IN carray(?)", apsw.carray(travelling), now)

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        if not leases:
            return []

        def work() -> list[Lease]:
            until = self._now() + microseconds(seconds)
            tokens = apsw.carray(array("q", [lease.token for lease in leases]))
            kept = {
                token
                for (token,) in self._run(
                    "UPDATE lease SET until=? WHERE token IN carray(?) AND NOT EXISTS(SELECT 1 FROM line"
                    " JOIN job ON job.id=line.job WHERE line.id=lease.line AND job.state='cancelled')"
                    " RETURNING token",
                    (until, tokens),
                )
            }
            return [lease for lease in leases if lease.token not in kept]

        return await self._write(work)

    async def pace(self, lane: str, pace: Pace) -> None:
        def work() -> None:
            now = self._now()
            row = self._lane_rows([self._lane_id(lane)])[0]
            row.apply(pace, now)
            self._settle_place(row, now)
            self._write_lanes({row.id: row})

        await self._write(work, durable=True)

    async def wait(self, seconds: float) -> None:
        """Looks every 20 ms whether another process committed: one read of shared memory."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._news:
            # Compared with the last claim, so that what came in between is not missed.
            if (version := self._data_version()) != self._version:
                self._version = version
                # Others commit all the time; only what a claim could use is worth a claim.
                end = min(end, loop.time() + self._read(self._until_useful))
            left = end - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(min(left, 0.02))

    def _until_useful(self) -> float:
        """Seconds until a claim like the last one may succeed, or learn that all is done."""
        moments = [
            row[0]
            for stream in self._streams(*self._asked)
            for row in self._run("SELECT at FROM turn WHERE stream=? ORDER BY at LIMIT 1", (stream,))
        ]
        if not moments:
            return math.inf if self._run("SELECT 1 FROM lease LIMIT 1").fetchall() else 0.0
        first: int = min(moments)
        return max(0.0, (first - self._now()) / US)

    def _add(
        self,
        requests: Sequence[Request],
        now: int,
        jobs: dict[str, JobRow],
        lanes: dict[int, LaneRow],
        refunds: Sequence[Refund] = (),
    ) -> list[Added]:
        """Store what is new. Changes `jobs` and `lanes`; the caller writes them. Page budgets get
        back what ended between two requests, not before: that may decide who is refused."""
        back = deque(refunds)
        if not requests:
            self._refund(back, 0)
            return []
        keys = [urls.key(request.job, request.url, request.method, request.body) for request in requests]
        distinct = sorted(set(keys))
        fresh = {
            key
            for (key,) in self._run(
                "INSERT INTO seen SELECT value FROM carray(?) WHERE true"
                " ON CONFLICT DO NOTHING RETURNING key",
                (apsw.carray(tuple(distinct)),),
            )
        }
        answers: list[Added] = []
        new: list[Request] = []
        refused: list[tuple[bytes]] = []
        for number, (request, key) in enumerate(zip(requests, keys, strict=True)):
            if back:
                self._refund(back, number)
            job = jobs.get(request.job) or self._job_of(request.job, jobs)
            if job.state == "cancelled":
                job.count("refused")
                answers.append(Added.REFUSED)
                if key in fresh:
                    fresh.discard(key)
                    refused.append((key,))
            elif key not in fresh:
                job.count("known")
                answers.append(Added.KNOWN)
            elif not self._room(job, request):
                job.count("refused")
                answers.append(Added.REFUSED)
                # Stays in `fresh`: a second try in this batch must be refused again, not known.
                refused.append((key,))
            else:
                fresh.discard(key)
                job.count("added")
                job.used += 1
                answers.append(Added.NEW)
                new.append(request)
        self._refund(back, len(requests))
        if refused:
            self._many("DELETE FROM seen WHERE key=?", refused)
        if new:
            self._store(new, now, jobs, lanes)
        return answers

    def _refund(self, back: deque[Refund], found: int) -> None:
        while back and back[0][0] <= found:
            _, job, lane = back.popleft()
            job.used -= 1
            self._count_lane(job, lane, -1)

    def _room(self, job: JobRow, request: Request) -> bool:
        """Whether the page budgets allow one more; if so it is counted against its host's."""
        spec = job.spec
        if spec.max_pages is not None and job.used >= spec.max_pages:
            return False
        if spec.max_per_host is None:
            return True
        name = urls.lane_of(request.url)
        if job.starts_at(name):
            return True
        sql = "SELECT added FROM spread WHERE job=? AND lane=?"
        stored = self._run(sql, (job.id, name)).fetchall()
        if stored and stored[0][0] >= spec.max_per_host:
            return False
        self._count_lane(job, name, 1)
        return True

    def _store(
        self, new: list[Request], now: int, jobs: dict[str, JobRow], lanes: dict[int, LaneRow]
    ) -> None:
        id = self._tick(requests=len(new))[1] - len(new)
        rows: list[tuple[Any, ...]] = []
        later: list[tuple[Any, ...]] = []
        lane_ids = self._lane_ids_of(dict.fromkeys(urls.lane_of(request.url) for request in new))
        missing = [lane_id for lane_id in lane_ids.values() if lane_id not in lanes]
        for row in self._lane_rows(missing):
            lanes[row.id] = row
        woken: set[int] = set()
        for request in new:
            id += 1
            job = jobs[request.job]
            lane_id = lane_ids[urls.lane_of(request.url)]
            row = lanes[lane_id]
            self._adopt(row, job)
            stream = self._stream_id(request.queue, job)
            line = self._line_ids.get((lane_id, stream, job.id, request.priority)) or self._line(
                lane_id, request.queue, job, request.priority, jobs, lanes
            )
            expires = None if request.ttl is None else now + microseconds(request.ttl)
            extra = extra_of(request, expires)
            if request.delay > 0:
                at = now + microseconds(request.delay)
                later.append(
                    (at, id, line.id, request.url, request.depth, 0, expires, extra_of(request, expires))
                )
                continue
            if line.id not in woken:
                woken.add(line.id)
                self._wake(row, line, job, now)
            rows.append((line.id, id, request.url, request.depth, 0, expires, extra))
        if len(rows) > 64:
            rows.sort(key=lambda row: row[:2])
        if rows:
            self._many("INSERT INTO waiting VALUES(?, ?, ?, ?, ?, ?, ?)", rows)
        if later:
            self._many("INSERT INTO delayed VALUES(?, ?, ?, ?, ?, ?, ?, ?)", later)

    def _wake(self, row: LaneRow, line: Line, job: JobRow, now: int) -> None:
        """Something comes into this line: the lane must be in the turns of its queue."""
        self._activate(row, line)
        if job.state == "paused":
            return
        if line.stream not in row.streams:
            row.streams = tuple(sorted((*row.streams, line.stream)))
        elif row.at is not None:
            return
        row.place(now, self._priority(row, line))

    def _priority(self, row: LaneRow, line: Line) -> int:
        """The highest priority that waits on a lane to which `line` belongs."""
        if row.sole is not None:
            return line.priority
        return max(line.priority, *(live[3] for live in self._live_lines(row.id)), 0)

    def _claim(
        self, limit: int, worker: str, lease: int, queues: Collection[str] | None, job: str | None
    ) -> Claim:
        now = self._now()
        self._news = False
        self._version = self._data_version()
        self._asked = (queues, job)
        self._upkeep(now)
        wanted = self._wanted(queues, job)
        left = limit
        lanes: dict[int, LaneRow] = {}
        taken: list[tuple[Line, str, tuple[Any, ...]]] = []
        cuts: list[tuple[int, int]] = []
        steps: list[tuple[int, int]] = []
        for name, row in self._ready_lanes(now, wanted, limit):
            if left <= 0:
                break
            row.at = None
            gap = row.pace_gap
            free = min(left, row.width - row.busy)
            if gap:
                free = min(free, allowance(now, row.tat, gap, row.burst))
            if row.sole is not None:
                line = self._lines.get(row.sole) or self._load_line(row.sole)
                got = self._head(line.id, free + 1)
                row.streams = (line.stream,) if len(got) > free else ()
                del got[free:]
                priority = line.priority
                count = len(got)
                if count:
                    cuts.append((line.id, got[-1][0]))
                    taken += [(line, name, entry) for entry in got]
            else:
                picked, priority = self._share(row, free, wanted, cuts, steps)
                taken += [(line, name, entry) for line, entry in picked]
                count = len(picked)
            if count:
                left -= count
                row.busy += count
                row.tat = max(row.tat, now) + count * gap
            row.place(now, priority)
            lanes[row.id] = row
        if cuts:
            self._many("DELETE FROM waiting WHERE line=? AND id<=?", cuts)
        if steps:
            self._many("UPDATE line SET vt=? WHERE id=?", steps)
        self._write_lanes(lanes)
        if not taken:
            return Claim((), self._wake_at(wanted, queues, job), now / US)
        return Claim(self._hand_out(taken, worker, now, now + lease), now / US, now / US)

    def _hand_out(
        self, taken: list[tuple[Line, str, tuple[Any, ...]]], worker: str, now: int, until: int
    ) -> list[Lease]:
        new = {line.job for line, _, _ in taken} - self._started
        if new:
            self._many("UPDATE job SET started=? WHERE id=? AND started IS NULL", [(now, job) for job in new])
            self._started |= new
        token = self._tick(tokens=len(taken))[0] - len(taken)
        seconds = until / US
        rows: list[tuple[Any, ...]] = []
        leases: list[Lease] = []
        for line, lane, (id, url, depth, attempt, extra) in taken:
            token += 1
            rows.append((token, until, worker, line.id, id, url, depth, attempt, extra))
            job = self._job_names.get(line.job) or self._job_name(line.job)
            queue = self._queue_names[line.stream]
            request = request_of(url, job, queue, line.priority, depth, attempt, extra)
            leases.append(Lease(token, request, lane, seconds, expires=expires_at(attempt, extra)))
        self._many("INSERT INTO lease VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        return leases

    def _ready_lanes(self, now: int, wanted: Sequence[int], limit: int) -> Iterable[tuple[str, LaneRow]]:
        """Lanes that may be visited now, longest ready first, each once."""
        sql = (
            f"SELECT t.at, l.name, {LANE} FROM turn t CROSS JOIN lane l ON l.id=t.lane"
            " WHERE t.stream=? AND t.at<=? ORDER BY t.at, t.lane LIMIT ?"
        )
        if len(wanted) == 1:
            # Read lazily: a claim mostly needs fewer lanes than its limit.
            for row in self._run(sql, (wanted[0], now, limit)):
                yield row[1], LaneRow(row[2:])
            return
        merged = sorted(
            (row for stream in wanted for row in self._run(sql, (stream, now, limit))),
            key=lambda row: (row[0], row[2]),
        )
        given: set[int] = set()
        for row in merged:
            if row[2] not in given:
                given.add(row[2])
                yield row[1], LaneRow(row[2:])

    def _share(
        self,
        row: LaneRow,
        free: int,
        wanted: Sequence[int],
        cuts: list[tuple[int, int]],
        steps: list[tuple[int, int]],
    ) -> tuple[list[tuple[Line, tuple[Any, ...]]], int]:
        """Take from a lane with several lines: whoever would be through first goes next."""
        heads: dict[int, list[tuple[Any, ...]]] = {}
        lines: dict[int, Line] = {}
        vts: dict[int, int] = {}
        for id, stream, job, priority, vt in self._live_lines(row.id):
            lines[id] = Line(id, row.id, stream, job, priority)
            if stream in wanted:
                vts[id] = vt
                heads[id] = self._head(id, free + 1)
        used = dict.fromkeys(heads, 0)
        picked: list[tuple[Line, tuple[Any, ...]]] = []
        while len(picked) < free:
            able = [id for id, head in heads.items() if used[id] < len(head)]
            if not able:
                break
            id = min(able, key=lambda id: (vts[id] + STEP[lines[id].priority], id))
            picked.append((lines[id], heads[id][used[id]]))
            used[id] += 1
            vts[id] += STEP[lines[id].priority]
            row.vt = passed(row.vt, sum(WEIGHT[lines[x].priority] for x in able), vts[id])
        priority = 0
        streams: set[int] = set()
        for id, line in lines.items():
            if used.get(id):
                cuts.append((id, heads[id][used[id] - 1][0]))
                steps.append((vts[id], id))
            if id not in heads or used[id] < len(heads[id]):
                streams.add(line.stream)
                priority = max(priority, line.priority)
        row.streams = tuple(sorted(streams))
        return picked, priority

    def _wanted(self, queues: Collection[str] | None, job: str | None) -> Sequence[int]:
        """The streams asked for that have something to claim, or ever had."""
        if job is not None:
            row = self._job_row(job)
            if not row.spec.apart:
                raise UsageError(
                    f"job {job!r} cannot be worked on by itself",
                    hint="`shoal worker --queues` takes its queue",
                )
            rows = self._run("SELECT id, queue FROM stream WHERE job=?", (row.id,)).fetchall()
        else:
            # Streams of jobs long over have no turns: skip from one that has to the next.
            rows = self._run(
                "WITH RECURSIVE some(id) AS (SELECT min(stream) FROM turn UNION ALL"
                " SELECT (SELECT min(stream) FROM turn WHERE stream>id) FROM some WHERE id IS NOT NULL)"
                " SELECT stream.id, stream.queue FROM some JOIN stream ON stream.id=some.id"
            ).fetchall()
        self._queue_names.update(rows)
        return [id for id, queue in rows if queues is None or queue in queues]

    def _wake_at(
        self, wanted: Sequence[int], queues: Collection[str] | None, job: str | None
    ) -> float | None:
        """The next moment at which a claim can succeed; see `Claim`."""
        moments = [
            row[0]
            for stream in wanted
            for row in self._run("SELECT at FROM turn WHERE stream=? ORDER BY at LIMIT 1", (stream,))
        ]
        here = ""
        values: tuple[Any, ...] = ()
        if job is not None or queues is not None:
            asked = array("q", self._streams(queues, job))
            if not asked:
                return None
            here, values = "line IN (SELECT id FROM line WHERE stream IN carray(?1))", (apsw.carray(asked),)
        where = f"WHERE {here}" if here else ""
        also = f"AND {here}" if here else ""
        for sql in (
            f"SELECT min(at) FROM delayed {where}",
            f"SELECT min(until) FROM lease {where}",
            f"SELECT min(expires) FROM waiting WHERE expires IS NOT NULL {also}",
            f"SELECT min(expires) FROM delayed WHERE expires IS NOT NULL {also}",
        ):
            moments += self._run(sql, values).fetchall()[0]
        known: list[int] = [moment for moment in moments if moment is not None]
        if known:
            return min(known) / US
        # Nothing moves, yet something may wait behind a paused job or a paused lane.
        held = self._run(
            "SELECT 1 FROM line WHERE (off OR (SELECT paused OR busy>=width FROM lane WHERE"
            " lane.id=line.lane)) AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
            f" {also.replace('line IN', 'id IN')} LIMIT 1",
            values,
        ).fetchall()
        return math.inf if held else None

    def _upkeep(self, now: int) -> None:
        """End what is too old, take back what dead workers hold, promote what is due.

        Lanes are placed afterwards, all at once: what ended must not lend them its priority.
        """
        jobs: dict[str, JobRow] = {}
        lanes: dict[int, LaneRow] = {}
        columns = "line, id, url, depth, attempt, expires, extra"
        late: list[tuple[Any, ...]] = []
        for table in ("waiting", "delayed"):
            late += self._run(f"DELETE FROM {table} WHERE expires<=? RETURNING {columns}", (now,))
        if late:
            lines = [self._any_line(row[0]) for row in late]
            self._end_rows(lines, [row[1:] for row in late], [TTL_OVER] * len(late), "expired", now, jobs)
            for line in lines:
                self._lane_in(line.lane, lanes)
        back = self._take_back(now, jobs, lanes)
        due = self._run(f"DELETE FROM delayed WHERE at<=? RETURNING at, {columns}", (now,)).fetchall()
        back += [(self._any_line(row[1]), row[2:]) for row in sorted(due)]
        self._back_in_line(back, lanes)
        for row in lanes.values():
            self._settle_place(row, now)
        self._write_lanes(lanes)
        self._write_jobs(jobs, now)

    def _take_back(
        self, now: int, jobs: dict[str, JobRow], lanes: dict[int, LaneRow]
    ) -> list[tuple[Line, tuple[Any, ...]]]:
        """End the leases that ran out. Answers the entries that wait again."""
        scanned, size = self._lease_scan
        # With thousands of leases a scan costs a millisecond; then once a second is enough.
        if size > 1000 and 0 <= now - scanned < US:
            return []
        size, first = self._run("SELECT count(*), min(until) FROM lease").fetchall()[0]
        self._lease_scan = (now, size)
        if first is None or first > now:
            return []
        return self._end_leases("until<=?", now, now, jobs, lanes)

    def _settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        now = self._now()
        tokens = array("q", [verdict.lease.token for verdict in verdicts])
        others = array("q", [v.lease.token for v in verdicts if not isinstance(v, Done)])
        entries: dict[int, tuple[Any, ...]] = {}
        holders: dict[int, str] = {}
        if others:
            sql = "SELECT token, id, url, depth, attempt, extra, worker FROM lease WHERE token IN carray(?)"
            for token, *entry, worker in self._run(sql, (apsw.carray(others),)):
                entries[token], holders[token] = tuple(entry), worker
        sql = "DELETE FROM lease WHERE token IN carray(?) RETURNING token, line"
        ended = dict(self._run(sql, (apsw.carray(tokens),)).fetchall())
        jobs: dict[str, JobRow] = {}
        lanes: dict[int, LaneRow] = {}
        lines = {id: self._any_line(id) for id in set(ended.values())}
        for row in self._lane_rows({line.lane for line in lines.values()}):
            lanes[row.id] = row
        lost: list[Lease] = []
        found: list[Request] = []
        refunds: list[Refund] = []
        items: dict[int, list[bytes]] = {}
        freed: dict[int, int] = {}
        back: list[tuple[Line, tuple[Any, ...]]] = []
        later: list[tuple[Any, ...]] = []
        dead: list[tuple[Line, tuple[Any, ...], Failure]] = []
        expired: list[tuple[Line, tuple[Any, ...], Failure]] = []
        for verdict in verdicts:
            lease = verdict.lease
            line_id = ended.pop(lease.token, None)
            if line_id is None:
                lost.append(lease)
                self._job_of(lease.request.job, jobs).count("stale")
                continue
            line = lines[line_id]
            freed[line.id] = freed.get(line.id, 0) + 1
            job = self._job_by_id(line.job, jobs)
            if job.state == "cancelled":
                job.count("cancelled")
            elif isinstance(verdict, Done):
                job.count("done")
                if verdict.skipped:
                    job.count("skipped")
                    refunds.append((len(found), job, lease.lane))
                if verdict.items:
                    items.setdefault(job.id, []).extend(verdict.items)
                if verdict.found:
                    found.extend(verdict.found)
            elif isinstance(verdict, Retry):
                id, url, depth, attempt, extra = entries[lease.token]
                job.count("retried")
                at = now + microseconds(verdict.after)
                later.append((at, id, line.id, url, depth, attempt + 1, None, extra))
                self._tally([(job.id, verdict.failure.error)])
            elif isinstance(verdict, Dead) and verdict.failure.error == EXPIRED:
                id, url, depth, attempt, extra = entries[lease.token]
                refunds.append((len(found), job, lease.lane))
                expired.append((line, (id, url, depth, attempt % CRASH, None, extra), verdict.failure))
            elif isinstance(verdict, Dead):
                id, url, depth, attempt, extra = entries[lease.token]
                refunds.append((len(found), job, lease.lane))
                why = made_by(verdict.failure, holders[lease.token])
                dead.append((line, (id, url, depth, attempt % CRASH + 1, None, extra), why))
                self._tally([(job.id, verdict.failure.error)])
            else:
                id, url, depth, attempt, extra = entries[lease.token]
                back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))
        for line_id, n in freed.items():
            lanes[lines[line_id].lane].busy -= n
        if later:
            self._many("INSERT INTO delayed VALUES(?, ?, ?, ?, ?, ?, ?, ?)", later)
        for state, ends in (("dead", dead), ("expired", expired)):
            if ends:
                where, rows, failures = zip(*ends, strict=True)
                self._end_rows(where, rows, failures, state, now, jobs, refund=False)
        refused: list[str] = []
        if found or refunds:
            answers = self._add(found, now, jobs, lanes, refunds)
            if Added.REFUSED in answers:
                refused = [r.url for r, a in zip(found, answers, strict=True) if a is Added.REFUSED]
        if back:
            self._back_in_line(back, lanes)
        returned = {line.lane for line, _ in back}
        for line_id in freed:
            line = lines[line_id]
            row = lanes[line.lane]
            if row.sole is not None and row.id not in returned:
                row.place(now, self._any_line(row.sole).priority)
            else:
                self._settle_place(row, now)
        self._store_items(items, jobs)
        self._write_lanes(lanes)
        self._write_jobs(jobs, now)
        return Settlement(lost, refused)

    def _store_items(self, items: dict[int, list[bytes]], jobs: dict[str, JobRow]) -> None:
        for job_id, bodies in items.items():
            sql = "UPDATE job SET items=items+? WHERE id=? RETURNING items"
            last = self._run(sql, (len(bodies), job_id)).fetchall()[0][0]
            first = (job_id << 40) + last - len(bodies) + 1
            self._many("INSERT INTO item VALUES(?, ?)", enumerate(bodies, first))
