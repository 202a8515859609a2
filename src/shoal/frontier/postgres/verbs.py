"""The hot path: the verbs of `Frontier`, each one transaction."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from shoal import urls
from shoal.errors import ShoalError, UsageError
from shoal.frontier.postgres.rows import Entry, Memory, Tx, columns, lane_row, text
from shoal.frontier.postgres.store import Store, translated
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
from shoal.model import (
    EXPIRED,
    TRANSIT,
    TTL_OVER,
    Added,
    Claim,
    Dead,
    Done,
    Failure,
    JobSpec,
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

LOOK = 1.0
"""Seconds after which a waiting worker looks by itself, should a notification have been lost."""

HUSH = 0.02
"""Seconds between two looks, however much others commit."""

BUSY = 5_000
"""Microseconds after which to ask again for lanes on which somebody else was working."""

# Streams of jobs long over have no turns: skip from one that has to the next.
_BUSY_STREAMS = (
    "WITH RECURSIVE busy(id) AS (SELECT min(stream) FROM turn UNION ALL"
    " SELECT (SELECT min(stream) FROM turn WHERE stream>id) FROM busy WHERE id IS NOT NULL)"
    " SELECT stream.id, stream.queue FROM busy JOIN stream ON stream.id=busy.id"
)

_CLAIM_COMMON = "SELECT * FROM claim_common($1, $2, $3, $4, $5, $6, $7)"

_SETTLE_COMMON = f"SELECT settle_common({', '.join(f'${n}' for n in range(1, 20))}) AS done"

_USEFUL = (
    "SELECT coalesce($1::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint),"
    " (SELECT min(t.at) FROM stream s CROSS JOIN LATERAL (SELECT at FROM turn WHERE stream=s.id"
    " ORDER BY at LIMIT 1) t WHERE ($2::text[] IS NULL OR s.queue=ANY($2))"
    " AND ($3::text IS NULL OR s.job=(SELECT id FROM job WHERE name=$3))),"
    " EXISTS(SELECT 1 FROM lease)"
)

_FIRST_TURN = (
    "(SELECT min(t.at) FROM unnest($1::bigint[]) AS s CROSS JOIN LATERAL"
    " (SELECT at FROM turn WHERE stream=s ORDER BY at LIMIT 1) t)"
)

_READY = (
    "SELECT t.at, t.lane FROM unnest($1::bigint[]) AS s CROSS JOIN LATERAL (SELECT at, lane FROM turn"
    " WHERE stream=s AND at<=$2 ORDER BY at, lane LIMIT $3) t"
)

_LOCKED = (
    f"SELECT l.name, {LANE} FROM lane l WHERE l.id=ANY($1::bigint[]) ORDER BY l.id"
    " FOR NO KEY UPDATE SKIP LOCKED"
)

_HEADS = (
    "SELECT c.line, w.id, w.url, w.depth, w.attempt, w.extra FROM unnest($1::bigint[], $2::bigint[])"
    " AS c(line, n) CROSS JOIN LATERAL (SELECT id, url, depth, attempt, extra FROM waiting"
    " WHERE waiting.line=c.line ORDER BY id LIMIT c.n) w"
)

# The least of each, not whether one exists: that is one step into an index whatever the planner believes.
_DUE = (
    "SELECT least((SELECT min(at) FROM delayed), (SELECT min(until) FROM lease),"
    " (SELECT min(expires) FROM waiting WHERE expires IS NOT NULL),"
    " (SELECT min(expires) FROM delayed WHERE expires IS NOT NULL))<=$1"
)


class Verbs(Store):
    """`Frontier` on PostgreSQL."""

    _asked: tuple[Collection[str] | None, str | None] = (None, None)
    """What the last claim asked for."""

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        if not requests:
            return []
        for request in requests:
            validate(request)
        coming = [_coming(request) for request in requests]

        async def work(tx: Tx) -> list[Added]:
            answers, new = await self._admit(tx, coming)
            await self._store(tx, new)
            await tx.finish()
            return answers

        return await self._write(work, durable=True, wakes=True, together=True)

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        # Before the transaction looks: what is told from here on must end the next `wait`.
        self._news = False
        self._heard.clear()
        self._asked = (queues, job)
        given = await self._claim_common(limit, text(worker), microseconds(lease), queues, job)
        if given is not None:
            return given
        return await self._write(
            lambda tx: self._claim(tx, limit, text(worker), microseconds(lease), queues, job),
            together=True,
        )

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        if not verdicts:
            return Settlement([], [])
        if await self._settle_common(verdicts):
            self._tell()
            return Settlement([], [])
        return await self._write(
            lambda tx: self._settle(tx, verdicts), durable=True, wakes=True, together=True
        )

    async def take(self, leases: Sequence[Lease], *, worker: str, lease: float) -> Claim:
        freed: list[bool] = []

        async def work(tx: Tx) -> Claim:
            until = tx.now + microseconds(lease)
            tokens = [each.token for each in leases]
            rows = await tx.run(
                "UPDATE lease SET until=$1, worker=$2 WHERE token=ANY($3::bigint[])"
                f" AND (worker=$2 OR starts_with(worker, '{TRANSIT}'))"
                " AND NOT EXISTS(SELECT 1 FROM line JOIN job ON job.id=line.job"
                " WHERE line.id=lease.line AND (job.state='cancelled' OR"
                " (job.state='paused' AND worker<>$2 AND $4))) RETURNING token",
                until,
                text(worker),
                tokens,
                not worker.startswith(TRANSIT),
            )
            ours = {token for (token,) in rows}
            others = [token for token in tokens if token not in ours]
            travelling = f"token=ANY($1::bigint[]) AND starts_with(worker, '{TRANSIT}')"
            if others and await tx.value(f"SELECT count(*) FROM lease WHERE {travelling}", others):
                # Of a job that is paused or cancelled. Its lane is free for others.
                await tx.end_travels(travelling, others)
                freed.append(True)
            tx.lasting = bool(ours)  # or a crash would let a second message take it as well
            now = tx.now / US
            taken = [_replace(each, until=until / US) for each in leases if each.token in ours]
            return Claim(taken, now, now)

        claim = await self._write(work, together=True)
        if freed:
            self._tell()
        return claim

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        if not leases:
            return []

        async def work(tx: Tx) -> list[Lease]:
            rows = await tx.run(
                "UPDATE lease SET until=$1 WHERE token=ANY($2::bigint[]) AND NOT EXISTS(SELECT 1 FROM line"
                " JOIN job ON job.id=line.job WHERE line.id=lease.line AND job.state='cancelled')"
                " RETURNING token",
                tx.now + microseconds(seconds),
                [lease.token for lease in leases],
            )
            kept = {token for (token,) in rows}
            return [lease for lease in leases if lease.token not in kept]

        return await self._write(work, together=True)

    async def pace(self, lane: str, pace: Pace) -> None:
        async def work(tx: Tx) -> None:
            id = (await tx.lane_ids([lane]))[lane]
            await tx.load_lanes([id])
            row = tx.lanes[id]
            row.apply(pace, tx.now)
            await tx.settle_places([row])
            await tx.finish()

        await self._write(work, durable=True, wakes=True)

    async def wait(self, seconds: float) -> None:
        """Listens to other processes; looks by itself once a second, should it hear nothing."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._told():
            left = end - loop.time()
            if left <= 0:
                return
            try:
                async with translated(self.shown):
                    began = await self._listen()
            except ShoalError:
                began = False  # the next verb will say what is wrong
            if not began:
                try:
                    async with asyncio.timeout(min(left, LOOK)):
                        await self._heard.wait()
                except TimeoutError:
                    if left <= LOOK:
                        return
            if self._told():
                return
            self._heard.clear()
            # Others commit all the time; only what a claim could use is worth a claim.
            useful = await self._until_useful()
            end = min(end, loop.time() + useful)
            await asyncio.sleep(min(max(0.0, end - loop.time()), HUSH))

    def _told(self) -> bool:
        return self._news

    async def _until_useful(self) -> float:
        """Seconds until a claim like the last one may succeed, or learn that all is done. One
        statement: it is all that an idle worker costs."""
        queues, job = self._asked
        at = None if self._clock is None else microseconds(self._clock())
        async with translated(self.shown), self._lent() as connection:
            row = await connection.fetchrow(_USEFUL, at, None if queues is None else list(queues), job)
        now, first, held = row
        if first is None:
            return math.inf if held else 0.0
        return float(max(0.0, (first - now) / US))

    async def _claim_common(
        self, limit: int, worker: str, lease: int, queues: Collection[str] | None, job: str | None
    ) -> Claim | None:
        """Claim in one round trip, if this is the common case."""
        memory = self._memory
        job_id: int | None = None
        if job is not None:
            job_id = memory.job_ids.get(job)
            known = None if job_id is None else memory.specs.get(job_id)
            if known is None or not known[1].apart:
                return None
        row = await self._call(
            _CLAIM_COMMON, limit, worker, lease, None if queues is None else list(queues), job_id
        )
        if row is None or not row["common"]:
            return None
        now, until = row["now_"] / US, (row["now_"] + lease) / US
        jobs, queue_names = row["jobs_"], row["streams_"]
        if not all(id in memory.job_names for id in jobs) or not all(
            id in memory.queue_names for id in queue_names
        ):
            await self._read(lambda tx: self._learn_names(tx, jobs, queue_names))
        leases: list[Lease] = []
        entries = zip(
            row["tokens_"], row["urls_"], row["depths_"], row["attempts_"], row["extras_"], strict=True
        )
        for lane, n, stream, job_id, priority in zip(
            row["names_"], row["takes_"], queue_names, jobs, row["priorities_"], strict=True
        ):
            name, queue = memory.job_names[job_id], memory.queue_names[stream]
            for token, url, depth, attempt, extra in islice(entries, n):
                request = request_of(url, name, queue, priority, depth, attempt, extra)
                leases.append(Lease(token, request, lane, until, expires=expires_at(attempt, extra)))
        return Claim(leases, now, now)

    async def _learn_names(self, tx: Tx, jobs: Iterable[int], streams: Iterable[int]) -> None:
        self._memory.job_names.update(await tx.load_job_names(jobs))
        self._memory.queue_names.update(await tx.load_queue_names(streams))

    async def _settle_common(self, verdicts: Sequence[Verdict]) -> bool:
        """Settle in one round trip, if this is the common case. Tells whether it was."""
        gathered = _Batch(self._memory)
        if not all(isinstance(verdict, Done) and gathered.take(verdict) for verdict in verdicts):
            return False
        row = await self._call(_SETTLE_COMMON, *gathered.values(), durable=True)
        return row is not None and bool(row["done"])

    async def _admit(
        self, tx: Tx, coming: Sequence[_Coming], refunds: Sequence[Refund] = ()
    ) -> tuple[list[Added], list[tuple[int, _Coming]]]:
        """Which requests are new, and with which id: `_store` stores those. Page budgets get back
        what ended between two requests, not before: that may decide who is refused."""
        back = deque(refunds)
        if not coming:
            _refund(tx, back, 0)
            return [], []
        await tx.load_jobs(each.request.job for each in coming)
        if not tx.alone:
            await self._survey(tx, coming)
        # Each new key takes a number on the way; they are given out in the order of the requests.
        fresh: set[bytes] = set()
        ids: list[int] = []
        for key, id in await tx.run(
            "INSERT INTO seen SELECT unnest($1::bytea[]) ON CONFLICT DO NOTHING"
            " RETURNING key, nextval('request')",
            sorted({each.key for each in coming}),
        ):
            fresh.add(key)
            ids.append(id)
        ids.sort(reverse=True)
        await tx.load_spread(
            (job, each.lane)
            for each in coming
            if (job := tx.jobs_named[each.request.job]).spec.max_per_host is not None
        )
        answers: list[Added] = []
        new: list[tuple[int, _Coming]] = []
        refused: list[bytes] = []
        for number, each in enumerate(coming):
            if back:
                _refund(tx, back, number)
            key = each.key
            job = tx.jobs_named[each.request.job]
            if job.state == "cancelled":
                job.count("refused")
                answers.append(Added.REFUSED)
                if key in fresh:
                    fresh.discard(key)
                    refused.append(key)
            elif key not in fresh:
                job.count("known")
                answers.append(Added.KNOWN)
            elif not self._room(tx, job, each.lane):
                job.count("refused")
                answers.append(Added.REFUSED)
                # Stays in `fresh`: a second try in this batch must be refused again, not known.
                refused.append(key)
            else:
                fresh.discard(key)
                job.count("added")
                job.used += 1
                answers.append(Added.NEW)
                new.append((ids.pop(), each))
        _refund(tx, back, len(coming))
        if refused:
            await tx.run("DELETE FROM seen WHERE key=ANY($1::bytea[])", refused)
        return answers, new

    async def _survey(self, tx: Tx, coming: Sequence[_Coming]) -> None:
        """See before anything is written whether these can be added side by side with others."""
        jobs = {tx.jobs_named[each.request.job] for each in coming}
        if any(job.spec.max_pages is not None or job.spec.max_per_host is not None for job in jobs):
            tx.need_all()  # two who each see room for one more would both take it
        lanes = await tx.lane_ids(each.lane for each in coming)
        await tx.load_streams((each.request.queue, tx.jobs_named[each.request.job]) for each in coming)
        await tx.make_lines(self._places(tx, coming, lanes))

    def _places(
        self, tx: Tx, coming: Iterable[_Coming], lanes: dict[str, int]
    ) -> list[tuple[int, int, int, int]]:
        """In which line each request waits."""
        places: list[tuple[int, int, int, int]] = []
        for request, _, lane in coming:
            job = tx.jobs_named[request.job]
            places.append((lanes[lane], tx.stream(request.queue, job), job.id, request.priority))
        return places

    def _room(self, tx: Tx, job: JobRow, lane: str) -> bool:
        """Whether the page budgets allow one more; if so it is counted against its host's."""
        spec = job.spec
        if spec.max_pages is not None and job.used >= spec.max_pages:
            return False
        if spec.max_per_host is None:
            return True
        if job.starts_at(lane):
            return True
        if tx.spread(job, lane) >= spec.max_per_host:
            return False
        tx.count_lane(job, lane, 1)
        return True

    async def _store(self, tx: Tx, new: Sequence[tuple[int, _Coming]]) -> None:
        """Let new requests wait. Changes lanes; the caller finishes."""
        if not new:
            return
        lanes = await tx.lane_ids(each.lane for _, each in new)
        await tx.load_lanes(lanes.values())
        await tx.load_streams((each.request.queue, tx.jobs_named[each.request.job]) for _, each in new)
        places = self._places(tx, (each for _, each in new), lanes)
        lines = await tx.make_lines(places)
        comes = {
            lines[p].id: lines[p] for p, (_, each) in zip(places, new, strict=True) if each.request.delay <= 0
        }
        shared = {line.lane for line in comes.values() if tx.lanes[line.lane].sole is None}
        tops = await tx.top_priorities(shared)
        await tx.activate(comes.values())
        rows: list[tuple[Any, ...]] = []
        later: list[tuple[Any, ...]] = []
        woken: set[int] = set()
        for place, (id, (request, _, _)) in zip(places, new, strict=True):
            line = lines[place]
            row = tx.lanes[line.lane]
            job = tx.jobs[line.job]
            tx.adopt(row, job)
            expires = None if request.ttl is None else tx.now + microseconds(request.ttl)
            extra = extra_of(request, expires)
            if request.delay > 0:
                at = tx.now + microseconds(request.delay)
                later.append((at, id, line.id, request.url, request.depth, 0, expires, extra))
                continue
            if line.id not in woken:
                woken.add(line.id)
                _wake(row, line, job, tx.now, max(line.priority, tops.get(row.id, 0)))
            rows.append((line.id, id, request.url, request.depth, 0, expires, extra))
        rows.sort(key=lambda row: row[:2])
        await tx.wait_in_line(rows)
        await tx.delay(later)

    async def _claim(
        self,
        tx: Tx,
        limit: int,
        worker: str,
        lease: int,
        queues: Collection[str] | None,
        job: str | None,
    ) -> Claim:
        now = tx.now
        if await tx.value(_DUE, now):
            tx.need_all()
            await self._upkeep(tx)
        wanted = await self._wanted(tx, queues, job)
        ready, skipped = await self._ready_lanes(tx, wanted, limit)
        left = limit
        taken: list[tuple[Line, str, Entry]] = []
        steps: list[tuple[int, int]] = []
        while ready and left > 0:
            # As many lanes as can fill the claim, if each gives what its pace allows.
            chunk: list[tuple[str, LaneRow, int]] = []
            hoped = 0
            while ready and hoped < left:
                name, row = ready.pop()
                gap = row.pace_gap
                free = min(left, row.width - row.busy)
                if gap:
                    free = min(free, allowance(now, row.tat, gap, row.burst))
                hoped += max(free, 0)
                chunk.append((name, row, free))
            live, heads = await self._heads(tx, chunk, wanted)
            for name, row, most in chunk:
                if left <= 0:
                    break
                free = min(left, most)
                row.at = None
                picked, priority = _share(row, free, live[row.id], heads, steps)
                if picked:
                    left -= len(picked)
                    row.busy += len(picked)
                    row.tat = max(row.tat, now) + len(picked) * row.pace_gap
                    taken += [(line, name, entry) for line, entry in picked]
                row.place(now, priority)
                tx.lanes[row.id] = row
        if taken:
            await tx.run(
                "DELETE FROM waiting w USING unnest($1::bigint[], $2::bigint[]) AS c(line, id)"
                " WHERE w.line=c.line AND w.id=c.id",
                *columns([(line.id, entry[0]) for line, _, entry in taken], 2),
            )
        if steps:
            await tx.run(
                "UPDATE line SET vt=c.vt FROM unnest($1::bigint[], $2::bigint[]) AS c(vt, id)"
                " WHERE line.id=c.id",
                *columns(steps, 2),
            )
        await tx.finish()
        if not taken:
            if skipped:
                return Claim((), (now + BUSY) / US, now / US)
            wake_at = await self._wake_at(tx, wanted, queues, job)
            if wake_at is None:
                tx.need_all()  # "all is done" must be true of one moment, not of several statements
            return Claim((), wake_at, now / US)
        return Claim(await self._hand_out(tx, taken, worker, now + lease), now / US, now / US)

    async def _hand_out(
        self, tx: Tx, taken: list[tuple[Line, str, Entry]], worker: str, until: int
    ) -> list[Lease]:
        jobs = await tx.load_job_names(line.job for line, _, _ in taken)
        queues = tx.memory.queue_names
        rows = [(line.id, *entry) for line, _, entry in taken]
        # A crash of the server must not forget who came: it would hand out the same tokens again, and the
        # same hosts within their gap.
        tx.lasting = True
        new = {line.job for line, _, _ in taken} - tx.memory.started
        if new:
            # As `claim_common` does it: nobody is waited for.
            await tx.run(
                "UPDATE job SET started=$1 WHERE id=ANY(ARRAY(SELECT id FROM job WHERE id=ANY($2::bigint[])"
                " AND started IS NULL FOR NO KEY UPDATE SKIP LOCKED))",
                tx.now,
                sorted(new),
            )
            tx.memory.started |= new
        tokens = dict(
            await tx.run(
                "INSERT INTO lease(token, until, worker, line, id, url, depth, attempt, extra)"
                " SELECT nextval('token'), $1, $2, u.* FROM unnest($3::bigint[], $4::bigint[], $5::text[],"
                " $6::bigint[], $7::bigint[], $8::bytea[]) AS u RETURNING id, token",
                until,
                worker,
                *columns(rows, 6),
            )
        )
        leases: list[Lease] = []
        for line, lane, (id, url, depth, attempt, extra) in taken:
            name, queue = jobs[line.job], queues[line.stream]
            request = request_of(url, name, queue, line.priority, depth, attempt, extra)
            expires = expires_at(attempt, extra)
            leases.append(Lease(tokens[id], request, lane, until / US, expires=expires))
        return leases

    async def _ready_lanes(
        self, tx: Tx, wanted: Sequence[int], limit: int
    ) -> tuple[list[tuple[str, LaneRow]], bool]:
        """Lanes that may be visited now, longest ready last, each once and locked; and whether some
        were left out because somebody else works on them this very moment."""
        turns = await tx.run(_READY, wanted, tx.now, limit) if wanted else []
        order = list(dict.fromkeys(lane for _, lane in sorted((at, lane) for at, lane in turns)))
        if not order:
            return [], False
        # What the turns said may be old by now: a lane is believed when it is locked.
        got = {row[1]: (row[0], lane_row(row[1:])) for row in await tx.run(_LOCKED, order)}
        ready = [got[id] for id in reversed(order) if id in got]
        if not tx.alone:
            asked = set(wanted)
            ready = [
                (name, row)
                for name, row in ready
                if row.at is not None and row.at <= tx.now and not asked.isdisjoint(row.streams)
            ]
        return ready, len(ready) < len(order)

    async def _heads(
        self, tx: Tx, chunk: list[tuple[str, LaneRow, int]], wanted: Sequence[int]
    ) -> tuple[dict[int, list[tuple[Line, int]]], dict[int, list[Entry]]]:
        """The lines with something to claim by lane, with their virtual time, and who is first in
        each: one more than can be taken, to see whether somebody stays."""
        live: dict[int, list[tuple[Line, int]]] = {row.id: [] for _, row, _ in chunk}
        soles = [row.sole for _, row, _ in chunk if row.sole is not None]
        lines = await tx.load_lines(soles)
        for id in soles:
            live[lines[id].lane].append((lines[id], 0))
        shared = [row.id for _, row, _ in chunk if row.sole is None]
        if shared:
            for id, lane, stream, job, priority, vt in await tx.run(
                "SELECT id, lane, stream, job, priority, vt FROM line WHERE lane=ANY($1::bigint[]) AND off=0"
                " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id) ORDER BY id",
                shared,
            ):
                live[lane].append((Line(id, lane, stream, job, priority), vt))
        asked = [
            (line.id, max(free, 0) + 1)
            for _, row, free in chunk
            for line, _ in live[row.id]
            if row.sole is not None or line.stream in wanted
        ]
        heads: dict[int, list[Entry]] = {id: [] for id, _ in asked}
        for row in await tx.run(_HEADS, *columns(asked, 2)):
            heads[row[0]].append(row[1:])
        return live, heads

    async def _wanted(self, tx: Tx, queues: Collection[str] | None, job: str | None) -> Sequence[int]:
        """The streams asked for that have something to claim, or ever had."""
        if job is not None:
            row = await tx.job(job)
            if not row.spec.apart:
                raise UsageError(
                    f"job {job!r} cannot be worked on by itself",
                    hint="`shoal worker --queues` takes its queue",
                )
            rows = await tx.run("SELECT id, queue FROM stream WHERE job=$1", row.id)
        else:
            rows = await tx.run(_BUSY_STREAMS)
        tx.memory.queue_names.update(rows)
        return [id for id, queue in rows if queues is None or queue in queues]

    async def _wake_at(
        self, tx: Tx, wanted: Sequence[int], queues: Collection[str] | None, job: str | None
    ) -> float | None:
        """The next moment at which a claim can succeed; see `Claim`."""
        here = "true"
        values: tuple[Any, ...] = (wanted,)
        if job is not None or queues is not None:
            asked = await tx.streams(queues, job)
            if not asked:
                return None
            here, values = "line IN (SELECT id FROM line WHERE stream=ANY($2::bigint[]))", (wanted, asked)
        first = await tx.value(
            f"SELECT least({_FIRST_TURN}, (SELECT min(at) FROM delayed WHERE {here}),"
            f" (SELECT min(until) FROM lease WHERE {here}),"
            f" (SELECT min(expires) FROM waiting WHERE expires IS NOT NULL AND {here}),"
            f" (SELECT min(expires) FROM delayed WHERE expires IS NOT NULL AND {here}))",
            *values,
        )
        if first is not None:
            return float(first / US)
        # Nothing moves, yet something may wait behind a paused job or a paused lane.
        held = await tx.value(
            "SELECT $1::bigint[] IS NOT NULL AND EXISTS(SELECT 1 FROM line JOIN lane l ON l.id=line.lane"
            " WHERE (line.off<>0 OR l.paused<>0 OR l.busy>=l.width)"
            " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
            f" AND {here.replace('line IN', 'line.id IN')})",
            *values,
        )
        return math.inf if held else None

    async def _upkeep(self, tx: Tx) -> None:
        """End what is too old, take back what dead workers hold, promote what is due.

        Lanes are placed afterwards, all at once: what ended must not lend them its priority.
        """
        named = "line, id, url, depth, attempt, expires, extra"
        late: list[Any] = []
        for table in ("waiting", "delayed"):
            late += await tx.run(f"DELETE FROM {table} WHERE expires<=$1 RETURNING {named}", tx.now)
        lines = await tx.load_lines(row[0] for row in late)
        await tx.load_lanes([lines[row[0]].lane for row in late])
        await tx.end_rows([(lines[row[0]], row[1:], TTL_OVER) for row in late], "expired")
        back, _ = await tx.end_leases("until<=$1", tx.now)
        due = await tx.run(f"DELETE FROM delayed WHERE at<=$1 RETURNING at, {named}", tx.now)
        lines = await tx.load_lines(row[1] for row in due)
        back += [(lines[row[1]], row[2:]) for row in sorted(due, key=lambda row: (row[0], row[2]))]
        await tx.back_in_line(back)
        await tx.settle_places(tx.lanes.values())
        await tx.finish()
        tx.begin_again()

    async def _settle(self, tx: Tx, verdicts: Sequence[Verdict]) -> Settlement:
        rows = await tx.run(
            "DELETE FROM lease WHERE token=ANY($1::bigint[]) RETURNING token, line, id, url, depth, attempt,"
            " extra, worker",
            sorted({verdict.lease.token for verdict in verdicts}),
        )
        ended = {row[0]: row[1:] for row in rows}
        lines = await tx.load_lines(row[1] for row in rows)
        await tx.load_jobs(
            {verdict.lease.request.job for verdict in verdicts}, {lines[row[1]].job for row in rows}
        )
        lost: list[Lease] = []
        found: list[Request] = []
        refunds: list[Refund] = []
        freed: list[Line] = []
        back: list[tuple[Line, Entry]] = []
        later: list[tuple[Any, ...]] = []
        dead: list[tuple[Line, Entry, Failure]] = []
        expired: list[tuple[Line, Entry, Failure]] = []
        for verdict in verdicts:
            lease = verdict.lease
            entry = ended.pop(lease.token, None)
            if entry is None:
                lost.append(lease)
                tx.jobs_named[lease.request.job].count("stale")
                continue
            line_id, id, url, depth, attempt, extra, worker = entry
            line = lines[line_id]
            freed.append(line)
            job = tx.jobs[line.job]
            if job.state == "cancelled":
                job.count("cancelled")
            elif isinstance(verdict, Done):
                job.count("done")
                if verdict.skipped:
                    job.count("skipped")
                    refunds.append((len(found), job, lease.lane))
                if verdict.items:
                    tx.bodies.setdefault(job.id, []).extend(verdict.items)
                found.extend(verdict.found)
            elif isinstance(verdict, Retry):
                job.count("retried")
                at = tx.now + microseconds(verdict.after)
                later.append((at, id, line.id, url, depth, attempt + 1, None, extra))
                tx.tally(job.id, verdict.failure.error)
            elif isinstance(verdict, Dead) and verdict.failure.error == EXPIRED:
                refunds.append((len(found), job, lease.lane))
                expired.append((line, (id, url, depth, attempt % CRASH, None, extra), verdict.failure))
            elif isinstance(verdict, Dead):
                refunds.append((len(found), job, lease.lane))
                why = made_by(verdict.failure, worker)
                dead.append((line, (id, url, depth, attempt % CRASH + 1, None, extra), why))
                tx.tally(job.id, verdict.failure.error)
            else:
                back.append((line, (id, url, depth, attempt, expires_of(attempt, extra), extra)))
        await tx.delay(later)
        await tx.end_rows(dead, "dead", refund=False)
        await tx.end_rows(expired, "expired", refund=False)
        answers, new = await self._admit(tx, [_coming(request) for request in found], refunds)
        # All lanes in one go, so that two who share never wait for each other in a circle.
        grown = await tx.lane_ids(each.lane for _, each in new)
        await tx.load_lanes([*(line.lane for line in freed), *grown.values()])
        for line in freed:
            tx.lanes[line.lane].busy -= 1
        await self._store(tx, new)
        refused: list[str] = []
        if Added.REFUSED in answers:
            refused = [r.url for r, a in zip(found, answers, strict=True) if a is Added.REFUSED]
        await tx.back_in_line(back)
        returned = {line.lane for line, _ in back}
        unsure: list[LaneRow] = []
        soles = await tx.load_lines(sole for line in freed if (sole := tx.lanes[line.lane].sole) is not None)
        for lane in dict.fromkeys(line.lane for line in freed):
            row = tx.lanes[lane]
            if row.sole is not None and row.id not in returned:
                row.place(tx.now, soles[row.sole].priority)
            else:
                unsure.append(row)
        await tx.settle_places(unsure)
        await tx.finish()
        return Settlement(lost, refused)


class _Coming(NamedTuple):
    """A request that may be new, with what a transaction that is made twice need not find out twice."""

    request: Request
    key: bytes
    lane: str


def _coming(request: Request) -> _Coming:
    lane = urls.lane_of(request.url)
    key = urls.key(request.job, request.url, request.method, request.body, lane=lane)
    return _Coming(request, key, lane)


def _refund(tx: Tx, back: deque[Refund], found: int) -> None:
    while back and back[0][0] <= found:
        _, job, lane = back.popleft()
        job.used -= 1
        tx.count_lane(job, lane, -1)


class _Batch:
    """Visits that are all done, as `settle_common` takes them. Names are looked up only in what is
    remembered; what is not there is not the common case."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._tokens: set[int] = set()
        self._owners: list[int] = []
        self._bodies: list[bytes] = []
        self._found: dict[bytes, tuple[Any, ...]] = {}
        self._jobs: dict[str, _Share] = {}

    def take(self, verdict: Done) -> bool:
        """Take one visit in; False if it does not fit."""
        lease = verdict.lease
        job = self._job(lease.request.job)
        if job is None or lease.token in self._tokens:
            return False
        self._tokens.add(lease.token)
        if verdict.skipped:
            if not job.starts_at(lease.lane):
                return False
            job.skips += 1
        if verdict.items:
            self._bodies += verdict.items
            self._owners += [job.id] * len(verdict.items)
        return all(self._find(request) for request in verdict.found)

    def _find(self, request: Request) -> bool:
        job = self._job(request.job)
        if job is None or request.delay > 0 or request.ttl is not None:
            return False
        name = urls.lane_of(request.url)
        key = urls.key(request.job, request.url, request.method, request.body, lane=name)
        if key in self._found:
            job.knowns += 1
            return True
        lane = self._memory.lane_ids.get(name)
        stream = self._memory.stream_ids.get((request.queue, job.id if job.spec.apart else 0))
        if lane is None or stream is None or not job.starts_at(name):
            return False
        line = self._memory.line_ids.get((lane, stream, job.id, request.priority))
        if line is None:
            return False
        job.finds += 1
        self._found[key] = (*(key, len(self._found), line.id, request.url, request.depth, extra_of(request)),)
        return True

    def _job(self, name: str) -> _Share | None:
        share = self._jobs.get(name)
        if share is None:
            id = self._memory.job_ids.get(name, 0)
            known = self._memory.specs.get(id)
            if known is None:
                return None
            share = self._jobs[name] = _Share(id, known[1])
        return share

    def values(self) -> tuple[Any, ...]:
        jobs = self._jobs.values()
        return (
            *(self._memory.epoch, sorted(self._tokens), self._owners, self._bodies),
            *columns(sorted(self._found.values()), 6),
            *([job.id for job in jobs], [job.gap for job in jobs], [job.spec.width for job in jobs]),
            *([job.spec.max_pages for job in jobs], [job.finds for job in jobs]),
            *([job.knowns for job in jobs], [job.skips for job in jobs]),
        )


class _Share:
    """What a batch does to one job."""

    def __init__(self, id: int, spec: JobSpec) -> None:
        self.id = id
        self.spec = spec
        self.gap = microseconds(spec.gap)
        self.finds = self.knowns = self.skips = 0
        self._start: frozenset[str] | None = None

    def starts_at(self, lane: str) -> bool:
        """Whether no budget per host counts here."""
        if self.spec.max_per_host is None:
            return True
        if self._start is None:
            self._start = frozenset(urls.lane_of(url) for url in self.spec.start)
        return lane in self._start


def _wake(row: LaneRow, line: Line, job: JobRow, now: int, priority: int) -> None:
    """Something comes into this line: the lane must be in the turns of its queue."""
    if job.state == "paused":
        return
    if line.stream not in row.streams:
        row.streams = tuple(sorted((*row.streams, line.stream)))
    elif row.at is not None:
        return
    row.place(now, priority)


def _share(
    row: LaneRow,
    free: int,
    live: list[tuple[Line, int]],
    heads: dict[int, list[Entry]],
    steps: list[tuple[int, int]],
) -> tuple[list[tuple[Line, Entry]], int]:
    """Take from a lane: whoever would be through first goes next. `heads` has the lines asked for.
    Answers what was taken and the highest priority of what stays."""
    if row.sole is not None:
        line = live[0][0]
        got = heads[line.id]
        row.streams = (line.stream,) if len(got) > free else ()
        return [(line, entry) for entry in got[: max(free, 0)]], line.priority
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
        row.vt = passed(row.vt, sum(WEIGHT[lines[x].priority] for x in able), vts[id])
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
