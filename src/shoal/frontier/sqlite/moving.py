"""Jobs that leave and arrive: `pack`, `unpack` and `recall` on SQLite, and with them the whole `Backend`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import apsw
from msgspec.structs import replace

from shoal import urls
from shoal.frontier.parcel import (
    FOREVER,
    Arrival,
    Head,
    Items,
    Keys,
    Lanes,
    Letters,
    Numbers,
    Packed,
    PackedLane,
    PackedLine,
    Parcel,
    Part,
    Requests,
    arrival_note,
    arrival_of,
    arriving_key,
    no_such_parcel,
    not_arriving,
    take_over,
)
from shoal.frontier.rows import CRASH, JobRow, LaneRow, Line, expires_of, extra_of, request_of, spec_bytes
from shoal.frontier.rules import US, credit, microseconds
from shoal.frontier.sqlite.people import People
from shoal.model import DeadLetter, Item, Request, Selection

_ENTRY = "url, depth, attempt, expires, extra"
_COUNTERS = ("known", "refused", "done", "skipped", "dead", "expired", "cancelled", "retried", "stale")


class SqliteFrontier(People):
    """A `Backend` on one SQLite file. Make it with `open`."""

    async def recall(self, job: str) -> int:
        def work() -> int:
            now = self._now()
            jobs: dict[str, JobRow] = {}
            lanes: dict[int, LaneRow] = {}
            row = self._job_of(job, jobs)
            rows = self._run(
                "DELETE FROM lease WHERE line IN (SELECT id FROM line WHERE job=?)"
                " RETURNING line, id, url, depth, attempt, extra",
                (row.id,),
            ).fetchall()
            back: list[tuple[Line, tuple[Any, ...]]] = []
            for line_id, id, url, depth, attempt, extra in rows:
                line = self._any_line(line_id)
                self._lane_in(line.lane, lanes).busy -= 1
                if row.state == "cancelled":
                    row.count("cancelled")
                else:
                    back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))
            self._back_in_line(back, lanes)
            for lane in lanes.values():
                self._settle_place(lane, now)
            self._write_lanes(lanes)
            self._write_jobs(jobs, now)
            return len(rows)

        return await self._write(work, durable=True)

    # -- leaving ----------------------------------------------------------------------

    async def pack(self, job: str, part: Part, *, after: str = "", limit: int = 1000) -> Parcel:
        match part:
            case "head":
                return await self._pack_head(job)
            case "spread" | "cursors":
                return self._read(lambda: self._pack_numbers(part, job))
            case "lanes":
                return self._read(lambda: self._pack_lanes(job, int(after or 0), limit))
            case "delayed":
                return self._read(lambda: self._pack_delayed(job, after, limit))
            case "waiting":
                return self._read(lambda: self._pack_waiting(job, after, limit))
            case "letters":
                letters = await self.dead(Selection(job=job), after=int(after or 0), limit=limit)
                following = str(letters[-1].id) if len(letters) == limit else None
                return Letters(letters=letters, now=self._now() / US, next=following)
            case "items":
                items = await self.items(job, after=int(after or 0), limit=limit)
                return Items(items=items, next=str(items[-1].seq) if len(items) == limit else None)
            case "keys":
                return self._read(lambda: self._pack_keys(job, after, limit))

    async def _pack_head(self, job: str) -> Head:
        view, now = await self.job(job), self._now() / US
        return Head(
            spec=view.spec,
            counts=view.counts,
            errors=view.errors,
            age=now - view.created_at,
            ended=None if view.finished_at is None else now - view.finished_at,
            begun=None if view.started_at is None else now - view.started_at,
            last=self._run("SELECT request FROM tick").fetchall()[0][0],
            now=now,
        )

    def _pack_numbers(self, part: Literal["spread", "cursors"], job: str) -> Numbers:
        sql = "SELECT lane, added FROM spread" if part == "spread" else "SELECT sink, seq FROM cursor"
        return Numbers(part=part, numbers=dict(self._run(f"{sql} WHERE job=?", (self._job_id(job),))))

    def _pack_lanes(self, job: str, after: int, limit: int) -> Lanes:
        job_id, now = self._job_id(job), self._now()
        sql = "SELECT DISTINCT lane FROM line WHERE job=? AND lane>? ORDER BY lane LIMIT ?"
        ids = array("q", [id for (id,) in self._run(sql, (job_id, after, limit))])
        if not ids:
            return Lanes(lanes=())
        names = dict(self._run("SELECT id, name FROM lane WHERE id IN carray(?)", (apsw.carray(ids),)))
        rows = {row.id: row for row in self._lane_rows(ids)}
        lines: dict[int, list[PackedLine]] = {}
        for lane, stream, priority, vt in self._run(
            "SELECT lane, stream, priority, vt FROM line WHERE job=? AND lane IN carray(?) ORDER BY id",
            (job_id, apsw.carray(ids)),
        ).fetchall():
            ahead = credit(vt - rows[lane].vt, priority)
            lines.setdefault(lane, []).append(PackedLine(self._queue_name(stream), priority, ahead))
        lanes = [packed_lane(names[id], rows[id], lines[id], now) for id in ids]
        return Lanes(lanes=lanes, next=str(ids[-1]) if len(ids) == limit else None)

    def _pack_delayed(self, job: str, after: str, limit: int) -> Requests:
        now = self._now()
        rows = self._run(
            f"SELECT at, id, line, {_ENTRY} FROM delayed WHERE (at, id)>(?, ?)"
            " AND line IN (SELECT id FROM line WHERE job=?) ORDER BY at, id LIMIT ?",
            (*place(after), self._job_id(job), limit),
        ).fetchall()
        packed = [self._packed(job, line, id, entry, max(0, at - now), now) for at, id, line, *entry in rows]
        return Requests(requests=packed, next="{} {}".format(*rows[-1]) if len(rows) == limit else None)

    def _pack_waiting(self, job: str, after: str, limit: int) -> Requests:
        now = self._now()
        line, id = place(after)
        packed: list[Packed] = []
        lines = self._run("SELECT id FROM line WHERE job=? AND id>=? ORDER BY id", (self._job_id(job), line))
        for (at,) in lines.fetchall():
            sql = f"SELECT id, {_ENTRY} FROM waiting WHERE line=? AND id>? ORDER BY id LIMIT ?"
            rows = self._run(sql, (at, id if at == line else 0, limit - len(packed))).fetchall()
            packed += [self._packed(job, at, id, entry, 0, now) for id, *entry in rows]
            if len(packed) >= limit:
                return Requests(requests=packed, next=f"{at} {packed[-1].id}")
        return Requests(requests=packed)

    def _packed(self, job: str, line_id: int, id: int, entry: Sequence[Any], delay: int, now: int) -> Packed:
        line = self._any_line(line_id)
        return packed_request(job, self._queue_name(line.stream), line.priority, id, entry, delay, now)

    def _pack_keys(self, job: str, after: str, limit: int) -> Keys:
        """Keys begin with their job and lane, so each lane is a range. All lanes are asked: a job that
        was over once has lost its lines, and what it visited must stay known."""
        begin, _, last = after.partition(" ")
        keys: list[bytes] = []
        lanes = self._run("SELECT id, name FROM lane WHERE id>=? ORDER BY id", (int(begin or 0),))
        for id, name in lanes if int(begin or 0) else chain([(0, "")], lanes):
            low, high = urls.key_range(job, name)
            if last and id == int(begin):
                low = bytes.fromhex(last) + b"\0"
            sql = "SELECT key FROM seen WHERE key BETWEEN ? AND ? ORDER BY key LIMIT ?"
            keys += [key for (key,) in self._run(sql, (low, high, limit - len(keys)))]
            if len(keys) >= limit:
                return Keys(keys=keys, next=f"{id} {keys[-1].hex()}")
        return Keys(keys=keys)

    # -- arriving ---------------------------------------------------------------------

    async def unpack(self, job: str, parcel: Parcel) -> int:
        return await self._write(lambda: self._unpack(job, parcel), durable=True)

    def _unpack(self, job: str, parcel: Parcel) -> int:
        now = self._now()
        if isinstance(parcel, Head) and not self._run("SELECT 1 FROM job WHERE name=?", (job,)).fetchall():
            self._head_arrives(job, parcel, now)
            return 1
        rows = self._run(
            "SELECT value FROM note WHERE key=? AND until>?", (arriving_key(job), now)
        ).fetchall()
        if not rows:
            raise not_arriving(job)
        arrival = arrival_of(rows[0][0])
        match parcel:
            case Head():
                return 0
            case Lanes(lanes=lanes):
                return self._lanes_arrive(job, lanes, now)
            case Requests(requests=requests):
                return self._requests_arrive(job, arrival, requests, now)
            case Letters(letters=letters):
                return self._letters_arrive(job, arrival, letters, now - microseconds(parcel.now))
            case Items(items=items):
                return self._items_arrive(job, items)
            case Numbers(part="spread"):
                self._many(
                    "INSERT INTO spread VALUES(?, ?, ?) ON CONFLICT DO NOTHING",
                    [(self._job_id(job), lane, n) for lane, n in parcel.numbers.items()],
                )
                return len(parcel.numbers)
            case Numbers():
                self._many(
                    "INSERT INTO cursor VALUES(?, ?, ?) ON CONFLICT DO UPDATE SET seq=excluded.seq",
                    [(self._job_id(job), sink, seq) for sink, seq in parcel.numbers.items()],
                )
                return len(parcel.numbers)
            case Keys(keys=keys):
                return len(self._new_keys(keys))
            case _:
                raise no_such_parcel(parcel)

    def _head_arrives(self, job: str, head: Head, now: int) -> None:
        last = self._tick(requests=head.last)[1]
        self._run(
            "INSERT INTO note VALUES(?, ?, ?) ON CONFLICT DO UPDATE"
            " SET until=excluded.until, value=excluded.value",
            (arriving_key(job), now + microseconds(FOREVER), arrival_note(last - head.last, head)),
        ).fetchall()
        counts = head.counts
        names = ("name", "spec", "state", "created", "started", "finished", "added", *_COUNTERS)
        values = (
            *(job, spec_bytes(head.spec), "paused", now - microseconds(head.age)),
            None if head.begun is None else now - microseconds(head.begun),
            *(None if head.ended is None else now - microseconds(head.ended), counts.added - counts.live),
            *(getattr(counts, name) for name in _COUNTERS),
        )
        marks = ", ".join("?" * len(names))
        [(id,)] = self._run(
            f"INSERT INTO job({', '.join(names)}) VALUES({marks}) RETURNING id", values
        ).fetchall()
        self._many("INSERT INTO tally VALUES(?, ?, ?)", [(id, error, n) for error, n in head.errors.items()])

    def _lanes_arrive(self, job: str, packed: Sequence[PackedLane], now: int) -> int:
        jobs: dict[str, JobRow] = {}
        lanes: dict[int, LaneRow] = {}
        row = self._job_of(job, jobs)
        made = 0
        for pace in packed:
            lane = self._lane_in(self._lane_id(pace.name), lanes)
            others = self._run("SELECT DISTINCT job FROM line WHERE lane=? AND job<>?", (lane.id, row.id))
            shared = any(self._job_by_id(id, jobs).live for (id,) in others.fetchall())
            take_over(lane, pace, shared=shared, now=now)
            for line in pace.lines:
                before = self._last_line()
                there = self._line(lane.id, line.queue, row, line.priority, jobs, lanes)
                if there.id > before:
                    made += 1
                    sql = "UPDATE line SET vt=vt+? WHERE id=?"
                    self._run(sql, (line.ahead, there.id)).fetchall()
            self._settle_place(lane, now)
        self._write_lanes(lanes)
        return made

    def _last_line(self) -> int:
        return int(self._run("SELECT line FROM tick").fetchall()[0][0])

    def _requests_arrive(self, job: str, arrival: Arrival, packed: Sequence[Packed], now: int) -> int:
        jobs: dict[str, JobRow] = {}
        lanes: dict[int, LaneRow] = {}
        row = self._job_of(job, jobs)
        fresh = self._new_keys([key_of(job, one.request) for one in packed])
        waiting: list[tuple[Any, ...]] = []
        delayed: list[tuple[Any, ...]] = []
        for one in packed:
            request = one.request
            key = key_of(job, request)
            if key not in fresh:
                continue
            fresh.discard(key)
            lane = self._lane_id(urls.lane_of(request.url))
            line = self._line(lane, request.queue, row, request.priority, jobs, lanes).id
            id, *entry = entry_of(one, arrival.base, now)
            if request.delay > 0:
                delayed.append((now + microseconds(request.delay), id, line, *entry))
            else:
                waiting.append((line, id, *entry))
        self._many("INSERT INTO waiting VALUES(?, ?, ?, ?, ?, ?, ?)", waiting)
        self._many("INSERT INTO delayed VALUES(?, ?, ?, ?, ?, ?, ?, ?)", delayed)
        self._write_lanes(lanes)
        came = len(waiting) + len(delayed)
        if came:
            # `done`: what came before has expired meanwhile.
            self._run(
                "UPDATE job SET added=added+?1, finished=CASE state WHEN 'done' THEN NULL ELSE finished END,"
                " state=CASE state WHEN 'done' THEN 'paused' ELSE state END WHERE id=?2",
                (came, row.id),
            ).fetchall()
        return came

    def _letters_arrive(self, job: str, arrival: Arrival, letters: Sequence[DeadLetter], age: int) -> int:
        job_id = self._job_id(job)
        fresh = self._new_keys([key_of(job, letter.request) for letter in letters])
        rows = [letter for letter in letters if key_of(job, letter.request) in fresh]
        self._many(
            "INSERT INTO ended VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [letter_row(letter, arrival.base, job_id, age) for letter in rows],
        )
        late = sum(arrival.late(letter) for letter in rows)
        if late:
            sql = "UPDATE job SET added=added+?1, expired=expired+?1 WHERE id=?2"
            self._run(sql, (late, job_id)).fetchall()
        return len(rows)

    def _items_arrive(self, job: str, items: Sequence[Item]) -> int:
        [(id, have)] = self._run("SELECT id, items FROM job WHERE name=?", (job,)).fetchall()
        rows = [((id << 40) + item.seq, item.body) for item in items if item.seq > have]
        self._many("INSERT INTO item VALUES(?, ?)", rows)
        self._run("UPDATE job SET items=items+? WHERE id=?", (len(rows), id)).fetchall()
        return len(rows)

    def _new_keys(self, keys: Sequence[bytes]) -> set[bytes]:
        """Make keys known. Answers those that were not."""
        if not keys:
            return set()
        rows = self._run(
            "INSERT INTO seen SELECT value FROM carray(?) WHERE true ON CONFLICT DO NOTHING RETURNING key",
            (apsw.carray(tuple(sorted(set(keys)))),),
        )
        return {key for (key,) in rows}


def key_of(job: str, request: Request) -> bytes:
    return urls.key(job, request.url, request.method, request.body)


def packed_lane(name: str, row: LaneRow, lines: Sequence[PackedLine], now: int) -> PackedLane:
    return PackedLane(
        name,
        row.gap / US,
        row.width,
        row.burst,
        row.floor / US,
        bool(row.pinned),
        bool(row.paused),
        max(0, row.tat - now) / US,
        max(0, row.blocked - now) / US,
        tuple(lines),
    )


def packed_request(
    job: str, queue: str, priority: int, id: int, entry: Sequence[Any], delay: int, now: int
) -> Packed:
    """A row (url, depth, attempt, expires, extra) as it travels."""
    url, depth, attempt, expires, extra = entry
    request = request_of(url, job, queue, priority, depth, attempt, extra)
    if delay or expires is not None:
        ttl = None if expires is None else max(0, expires - now) / US
        request = replace(request, delay=delay / US, ttl=ttl)
    return Packed(id, request, attempt // CRASH)


def entry_of(packed: Packed, base: int, now: int) -> tuple[Any, ...]:
    """What travelled as a row (id, url, depth, attempt, expires, extra)."""
    request = packed.request
    expires = None if request.ttl is None else now + microseconds(request.ttl)
    attempt = request.attempt + packed.crashes * CRASH
    return base + packed.id, request.url, request.depth, attempt, expires, extra_of(request, expires)


def letter_row(letter: DeadLetter, base: int, job: int, age: int) -> tuple[Any, ...]:
    """A dead letter as a row of `ended`; `age` is how far this clock is ahead of the other."""
    request, failure = letter.request, letter.failure
    return (
        *(base + letter.id, letter.state, microseconds(letter.ended_at) + age, job, letter.lane),
        *(request.queue, request.priority, request.url, request.depth, request.attempt),
        *(extra_of(request), failure.error, failure.message, failure.worker),
    )


def place(after: str) -> tuple[int, int]:
    first, _, second = after.partition(" ")
    return int(first or 0), int(second or 0)
