"""Jobs that leave and arrive: `pack`, `unpack` and `recall` on PostgreSQL, and with them the whole
`Backend`. Arrivals take the lock of the schema alone, one piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

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
from shoal.frontier.postgres.people import People
from shoal.frontier.postgres.rows import Entry, Tx, columns, lane_row, text
from shoal.frontier.rows import LANE, Line, expires_of, spec_bytes
from shoal.frontier.rules import US, credit, microseconds
from shoal.frontier.sqlite.moving import entry_of, key_of, letter_row, packed_lane, packed_request, place
from shoal.model import DeadLetter, Item, Selection

_ENTRY = "t.url, t.depth, t.attempt, t.expires, t.extra"
_COUNTERS = ("known", "refused", "done", "skipped", "dead", "expired", "cancelled", "retried", "stale")
_LANES_AT_ONCE = 2_000
"""Of which keys are asked for in one statement."""


class PostgresFrontier(People):
    """A `Backend` on one schema of a PostgreSQL database. Make it with `open`."""

    async def recall(self, job: str) -> int:
        async def work(tx: Tx) -> int:
            row = await tx.job(job)
            rows = await tx.run(
                "DELETE FROM lease WHERE line IN (SELECT id FROM line WHERE job=$1)"
                " RETURNING line, id, url, depth, attempt, extra",
                row.id,
            )
            lines = await tx.load_lines(found[0] for found in rows)
            await tx.load_lanes(lines[found[0]].lane for found in rows)
            back: list[tuple[Line, Entry]] = []
            for line_id, id, url, depth, attempt, extra in rows:
                line = lines[line_id]
                tx.lanes[line.lane].busy -= 1
                if row.state == "cancelled":
                    row.count("cancelled")
                else:
                    back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))
            await tx.back_in_line(back)
            await tx.settle_places(tx.lanes.values())
            await tx.finish()
            return len(rows)

        return await self._write(work, durable=True, wakes=True)

    # -- leaving ----------------------------------------------------------------------

    async def pack(self, job: str, part: Part, *, after: str = "", limit: int = 1000) -> Parcel:
        match part:
            case "head":
                return await self._read(lambda tx: self._pack_head(tx, job))
            case "spread" | "cursors":
                return await self._read(lambda tx: self._pack_numbers(tx, part, job))
            case "lanes":
                return await self._read(lambda tx: self._pack_lanes(tx, job, int(after or 0), limit))
            case "delayed":
                return await self._read(lambda tx: self._pack_delayed(tx, job, after, limit))
            case "waiting":
                return await self._read(lambda tx: self._pack_waiting(tx, job, after, limit))
            case "letters":
                letters = await self.dead(Selection(job=job), after=int(after or 0), limit=limit)
                following = str(letters[-1].id) if len(letters) == limit else None
                return Letters(letters=letters, now=await self._time(), next=following)
            case "items":
                items = await self.items(job, after=int(after or 0), limit=limit)
                return Items(items=items, next=str(items[-1].seq) if len(items) == limit else None)
            case "keys":
                return await self._read(lambda tx: self._pack_keys(tx, job, after, limit))

    async def _time(self) -> float:
        async def work(tx: Tx) -> float:
            return tx.now / US

        return await self._read(work)

    async def _pack_head(self, tx: Tx, job: str) -> Head:
        view, now = await self._job_view(tx, job), tx.now / US
        return Head(
            spec=view.spec,
            counts=view.counts,
            errors=view.errors,
            age=now - view.created_at,
            ended=None if view.finished_at is None else now - view.finished_at,
            begun=None if view.started_at is None else now - view.started_at,
            last=await tx.value("SELECT last_value FROM request"),
            now=now,
        )

    async def _pack_numbers(self, tx: Tx, part: Literal["spread", "cursors"], job: str) -> Numbers:
        sql = "SELECT lane, added FROM spread" if part == "spread" else "SELECT sink, seq FROM cursor"
        rows = await tx.run(f"{sql} WHERE job=$1", await tx.job_id(job))
        return Numbers(part=part, numbers=dict(rows))

    async def _pack_lanes(self, tx: Tx, job: str, after: int, limit: int) -> Lanes:
        job_id = await tx.job_id(job)
        found = await tx.run(
            f"SELECT l.name, {LANE} FROM lane l WHERE l.id IN (SELECT lane FROM line WHERE job=$1)"
            " AND l.id>$2 ORDER BY l.id LIMIT $3",
            job_id,
            after,
            limit,
        )
        rows = [(name, lane_row(rest)) for name, *rest in found]
        lines: dict[int, list[PackedLine]] = {}
        vts = {row.id: row.vt for _, row in rows}
        for lane, queue, priority, vt in await tx.run(
            "SELECT line.lane, stream.queue, line.priority, line.vt FROM line"
            " JOIN stream ON stream.id=line.stream WHERE line.job=$1 AND line.lane=ANY($2::bigint[])"
            " ORDER BY line.id",
            job_id,
            list(vts),
        ):
            lines.setdefault(lane, []).append(PackedLine(queue, priority, credit(vt - vts[lane], priority)))
        lanes = [packed_lane(name, row, lines[row.id], tx.now) for name, row in rows]
        return Lanes(lanes=lanes, next=str(rows[-1][1].id) if len(rows) == limit else None)

    async def _pack_delayed(self, tx: Tx, job: str, after: str, limit: int) -> Requests:
        rows = await tx.run(
            f"SELECT t.at, t.id, stream.queue, line.priority, {_ENTRY} FROM delayed t"
            " JOIN line ON line.id=t.line JOIN stream ON stream.id=line.stream"
            " WHERE line.job=$1 AND (t.at, t.id)>($2, $3) ORDER BY t.at, t.id LIMIT $4",
            await tx.job_id(job),
            *place(after),
            limit,
        )
        packed = [
            packed_request(job, queue, priority, id, entry, max(0, at - tx.now), tx.now)
            for at, id, queue, priority, *entry in rows
        ]
        return Requests(requests=packed, next=f"{rows[-1][0]} {rows[-1][1]}" if len(rows) == limit else None)

    async def _pack_waiting(self, tx: Tx, job: str, after: str, limit: int) -> Requests:
        line, id = place(after)
        # Line by line, each by its index, until there are enough: sorting would read them all.
        rows = await tx.run(
            "SELECT l.id, t.id, l.queue, l.priority, t.url, t.depth, t.attempt, t.expires, t.extra FROM"
            " (SELECT line.id, stream.queue, line.priority FROM line JOIN stream ON stream.id=line.stream"
            " WHERE line.job=$1 AND line.id>=$2 ORDER BY line.id) l CROSS JOIN LATERAL"
            " (SELECT * FROM waiting w WHERE w.line=l.id AND w.id>CASE l.id WHEN $2 THEN $3 ELSE 0 END"
            " ORDER BY w.id LIMIT $4) t LIMIT $4",
            await tx.job_id(job),
            line,
            id,
            limit,
        )
        packed = [
            packed_request(job, queue, priority, id, entry, 0, tx.now)
            for _, id, queue, priority, *entry in rows
        ]
        return Requests(requests=packed, next=f"{rows[-1][0]} {rows[-1][1]}" if len(rows) == limit else None)

    async def _pack_keys(self, tx: Tx, job: str, after: str, limit: int) -> Keys:
        """Keys begin with their job and lane, so each lane is a range. All lanes are asked: a job that
        was over once has lost its lines, and what it visited must stay known."""
        begin, _, last = after.partition(" ")
        at, low_end = int(begin or 0), bytes.fromhex(last)
        keys: list[bytes] = []
        while len(keys) < limit:
            lanes = await tx.run(
                "SELECT id, name FROM lane WHERE id>=$1 ORDER BY id LIMIT $2", at, _LANES_AT_ONCE
            )
            ranges = [(id, *urls.key_range(job, name)) for id, name in lanes]
            if not at:
                ranges.insert(0, (0, *urls.key_range(job, "")))
            if low_end and ranges[0][0] == at:
                ranges[0] = (at, low_end, ranges[0][2])
            rows = await tx.run(
                "SELECT l.id, t.key FROM unnest($1::bigint[], $2::bytea[], $3::bytea[]) AS l(id, low, high)"
                " CROSS JOIN LATERAL (SELECT key FROM seen WHERE key>l.low AND key<=l.high ORDER BY key"
                " LIMIT $4) t LIMIT $4",
                *columns(ranges, 3),
                limit - len(keys),
            )
            keys += [key for _, key in rows]
            if len(keys) >= limit:
                return Keys(keys=keys, next=f"{rows[-1][0]} {keys[-1].hex()}")
            if len(lanes) < _LANES_AT_ONCE:
                break
            at, low_end = lanes[-1][0] + 1, b""
        return Keys(keys=keys)

    # -- arriving ---------------------------------------------------------------------

    async def unpack(self, job: str, parcel: Parcel) -> int:
        return await self._write(lambda tx: self._unpack(tx, job, parcel), durable=True)

    async def _unpack(self, tx: Tx, job: str, parcel: Parcel) -> int:
        there = await tx.value("SELECT id FROM job WHERE name=$1", job)
        if isinstance(parcel, Head) and there is None:
            await self._head_arrives(tx, job, parcel)
            return 1
        note = await tx.value(
            "SELECT value FROM note WHERE key=$1 AND until>$2", text(arriving_key(job)), tx.now
        )
        if note is None:
            raise not_arriving(job)
        arrival = arrival_of(note)
        match parcel:
            case Head():
                return 0
            case Lanes(lanes=lanes):
                return await self._lanes_arrive(tx, job, lanes)
            case Requests(requests=requests):
                return await self._requests_arrive(tx, job, arrival, requests)
            case Letters(letters=letters):
                age = tx.now - microseconds(parcel.now)
                return await self._letters_arrive(tx, there, arrival, letters, age)
            case Items(items=items):
                return await self._items_arrive(tx, there, items)
            case Numbers(part=part):
                table, rule = "spread", "DO NOTHING"
                if part == "cursors":
                    table, rule = "cursor", "(job, sink) DO UPDATE SET seq=excluded.seq"
                await tx.run(
                    f"INSERT INTO {table} SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[])"
                    f" ON CONFLICT {rule}",
                    *columns([(there, text(name), n) for name, n in parcel.numbers.items()], 3),
                )
                return len(parcel.numbers)
            case Keys(keys=keys):
                return len(await self._new_keys(tx, keys))
            case _:
                raise no_such_parcel(parcel)

    async def _head_arrives(self, tx: Tx, job: str, head: Head) -> None:
        # Alone: nobody takes a number in between.
        base = await tx.value("SELECT nextval('request')")
        await tx.run("SELECT setval('request', $1)", base + head.last)
        await tx.run(
            "INSERT INTO note VALUES($1, $2, $3) ON CONFLICT(key) DO UPDATE"
            " SET until=excluded.until, value=excluded.value",
            text(arriving_key(job)),
            tx.now + microseconds(FOREVER),
            arrival_note(base, head),
        )
        counts = head.counts
        names = ("name", "spec", "state", "created", "started", "finished", "added", *_COUNTERS)
        values = (
            *(job, spec_bytes(head.spec), "paused", tx.now - microseconds(head.age)),
            None if head.begun is None else tx.now - microseconds(head.begun),
            *(None if head.ended is None else tx.now - microseconds(head.ended), counts.added - counts.live),
            *(getattr(counts, name) for name in _COUNTERS),
        )
        marks = ", ".join(f"${n}" for n in range(1, len(names) + 1))
        id = await tx.value(f"INSERT INTO job({', '.join(names)}) VALUES({marks}) RETURNING id", *values)
        await tx.run(
            "INSERT INTO tally SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[])",
            *columns([(id, text(error), n) for error, n in head.errors.items()], 3),
        )

    async def _lanes_arrive(self, tx: Tx, job: str, packed: Sequence[PackedLane]) -> int:
        row = await tx.job(job)
        lanes = await tx.lane_ids(pace.name for pace in packed)
        await tx.load_lanes(lanes.values())
        others = await tx.run(
            "SELECT DISTINCT line.lane FROM line JOIN job ON job.id=line.job WHERE line.job<>$1 AND"
            " job.added>job.done+job.dead+job.expired+job.cancelled AND line.lane=ANY($2::bigint[])",
            row.id,
            list(lanes.values()),
        )
        shared = {id for (id,) in others}
        await tx.load_streams((line.queue, row) for pace in packed for line in pace.lines)
        places: dict[tuple[int, int, int, int], int] = {}
        for pace in packed:
            lane = tx.lanes[lanes[pace.name]]
            take_over(lane, pace, shared=lane.id in shared, now=tx.now)
            for line in pace.lines:
                places[lane.id, tx.stream(line.queue, row), row.id, line.priority] = line.ahead
        last = await tx.value("SELECT max(id) FROM line") or 0
        made = await tx.make_lines(places)
        fresh = [(line.id, places[at]) for at, line in made.items() if line.id > last]
        await tx.run(
            "UPDATE line SET vt=line.vt+a.ahead FROM unnest($1::bigint[], $2::bigint[]) AS a(id, ahead)"
            " WHERE line.id=a.id",
            *columns(fresh, 2),
        )
        await tx.settle_places(tx.lanes.values())
        await tx.finish()
        return len(fresh)

    async def _requests_arrive(self, tx: Tx, job: str, arrival: Arrival, packed: Sequence[Packed]) -> int:
        row = await tx.job(job)
        fresh = await self._new_keys(tx, [key_of(job, one.request) for one in packed])
        new = {key: one for one in packed if (key := key_of(job, one.request)) in fresh}.values()
        if not new:
            return 0
        lanes = await tx.lane_ids(urls.lane_of(one.request.url) for one in new)
        await tx.load_lanes(lanes.values())
        await tx.load_streams((one.request.queue, row) for one in new)
        at = [
            (
                lanes[urls.lane_of(one.request.url)],
                tx.stream(one.request.queue, row),
                row.id,
                one.request.priority,
            )
            for one in new
        ]
        lines = await tx.make_lines(at)
        waiting: list[tuple[Any, ...]] = []
        delayed: list[tuple[Any, ...]] = []
        for where, one in zip(at, new, strict=True):
            id, *entry = entry_of(one, arrival.base, tx.now)
            if one.request.delay > 0:
                due = tx.now + microseconds(one.request.delay)
                delayed.append((due, id, lines[where].id, *entry))
            else:
                waiting.append((lines[where].id, id, *entry))
        await tx.wait_in_line(waiting)
        await tx.delay(delayed)
        await tx.finish()
        # `done`: what came before has expired meanwhile.
        await tx.run(
            "UPDATE job SET added=added+$1, finished=CASE state WHEN 'done' THEN NULL ELSE finished END,"
            " state=CASE state WHEN 'done' THEN 'paused' ELSE state END WHERE id=$2",
            len(new),
            row.id,
        )
        return len(new)

    async def _letters_arrive(
        self, tx: Tx, job_id: int, arrival: Arrival, letters: Sequence[DeadLetter], age: int
    ) -> int:
        fresh = await self._new_keys(tx, [key_of(x.request.job, x.request) for x in letters])
        new = [letter for letter in letters if key_of(letter.request.job, letter.request) in fresh]
        if not new:
            return 0
        rows = [letter_row(letter, arrival.base, job_id, age) for letter in new]
        await tx.bury([[text(v) if isinstance(v, str) else v for v in row] for row in rows])
        late = sum(arrival.late(letter) for letter in new)
        await tx.run("UPDATE job SET added=added+$1, expired=expired+$1 WHERE id=$2", late, job_id)
        return len(new)

    async def _items_arrive(self, tx: Tx, job_id: int, items: Sequence[Item]) -> int:
        have = await tx.value("SELECT items FROM job WHERE id=$1 FOR NO KEY UPDATE", job_id)
        rows = [((job_id << 40) + item.seq, item.body) for item in items if item.seq > have]
        await tx.run("INSERT INTO item SELECT * FROM unnest($1::bigint[], $2::bytea[])", *columns(rows, 2))
        await tx.run("UPDATE job SET items=items+$1 WHERE id=$2", len(rows), job_id)
        return len(rows)

    async def _new_keys(self, tx: Tx, keys: Sequence[bytes]) -> set[bytes]:
        """Make keys known. Answers those that were not."""
        rows = await tx.run(
            "INSERT INTO seen SELECT unnest($1::bytea[]) ON CONFLICT DO NOTHING RETURNING key",
            sorted(set(keys)),
        )
        return {key for (key,) in rows}
