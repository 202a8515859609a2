"""Claiming, waiting and the fast paths on PostgreSQL; the rest is shared."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any, Self

from shoal import urls
from shoal.clock import Clock
from shoal.errors import ShoalError
from shoal.frontier.decisions import Entry, pick
from shoal.frontier.migrate import migrations
from shoal.frontier.postgres.store import SCHEMA, PostgresStore, translate_errors
from shoal.frontier.postgres.tx import PostgresTx, columns, text
from shoal.frontier.rows import LANE, LaneRow, Line, expires_at, extra_of, request_of
from shoal.frontier.rules import US, allowance, microseconds
from shoal.frontier.sql import statements as sql
from shoal.frontier.sql import verbs
from shoal.frontier.sql.catalog import Catalog
from shoal.frontier.sql.notes import SqlNotes
from shoal.frontier.sql.tx import Memory
from shoal.frontier.sql.verbs import Verbs
from shoal.model import Advice, Claim, Done, Info, JobSpec, Lease, Request, Settlement, Verdict

OLD_SNAPSHOT = 60
"""Seconds after which an open transaction of any client is worth a warning."""

_OFF = {
    "fsync": "a power cut can damage the whole database",
    "full_page_writes": "a power cut can damage the whole database",
    "synchronous_commit": "the last moments before a crash of the server can be lost",
}

_SETTINGS_OFF = (
    "SELECT name FROM pg_settings WHERE setting='off' AND name IN ('fsync', 'synchronous_commit',"
    " 'full_page_writes') ORDER BY name"
)

_OLD_SNAPSHOTS = (
    "SELECT extract(epoch FROM clock_timestamp() - xact_start)::float8, pid, application_name"
    " FROM pg_stat_activity WHERE backend_type='client backend' AND backend_xmin IS NOT NULL"
    " AND xact_start < clock_timestamp() - make_interval(secs => $1) ORDER BY xact_start LIMIT 5"
)

LOOK = 1.0
"""Seconds after which a waiting worker asks by itself, in case a notification was lost."""

HUSH = 0.02
"""The least seconds between two checks, however often others commit."""

BUSY = 5_000
"""Microseconds after which to ask again for lanes that other transactions held."""

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

# The minimum of each table instead of EXISTS: that is one step into an index, whatever the planner assumes.
_DUE = (
    "SELECT least((SELECT min(at) FROM delayed), (SELECT min(until) FROM lease),"
    " (SELECT min(expires) FROM waiting WHERE expires IS NOT NULL),"
    " (SELECT min(expires) FROM delayed WHERE expires IS NOT NULL))<=$1"
)


class PostgresFrontier(Verbs, Catalog):
    """A `Backend` on one schema of a PostgreSQL database. Make it with `open`."""

    _store: PostgresStore

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self.notes = SqlNotes(store)
        self._asked: tuple[Collection[str] | None, str | None] = (None, None)
        """The queues and the job of the last claim."""

    @classmethod
    async def open(cls, address: str, *, clock: Clock | None = None, create: bool = True) -> Self:
        """Connect to `postgresql://user@host/database?schema=shoal`, and create the schema if it does not
        exist. Without `create`, a missing schema is refused.

        Raises a FrontierError that names the problem. `clock` is for tests: it replaces the server's time.
        """
        return cls(await PostgresStore.open(address, clock=clock, create=create))

    @property
    def schema(self) -> str:
        return self._store.schema

    @property
    def shown(self) -> str:
        """The address without its password."""
        return self._store.shown

    @property
    def shared(self) -> bool:
        """Whether a pooler such as PgBouncer stands before the server."""
        return self._store.shared

    async def close(self) -> None:
        await self._store.close()

    async def info(self) -> Info:
        async def work(tx: PostgresTx) -> Info:
            version = str(await tx.first("SHOW server_version")).partition(" ")[0]
            schema = await tx.first("SELECT version FROM shoal_version")
            warnings = await self._warnings(tx)
            return Info(warnings, f"PostgreSQL {version}", int(schema), len(migrations(SCHEMA)))

        return await self._store.read(work)

    async def _warnings(self, tx: PostgresTx) -> list[Advice]:
        """Return the settings of the server that weaken the promises of the port."""
        found = [
            Advice(
                f"PostgreSQL runs with {name}=off: {_OFF[name]}",
                f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()",
            )
            for (name,) in await tx.rows(_SETTINGS_OFF)
        ]
        unlogged = await tx.rows(
            "SELECT relname FROM pg_class WHERE relnamespace=to_regnamespace($1) AND relkind='r'"
            " AND relpersistence='u' ORDER BY relname",
            self.schema,
        )
        if unlogged:
            names = ", ".join(name for (name,) in unlogged)
            logged = f"ALTER TABLE {self.schema}.{unlogged[0][0]} SET LOGGED" + (
                ", and so on" if len(unlogged) > 1 else ""
            )
            found.append(Advice(f"unlogged tables ({names}): a crash of the server empties them", logged))
        if await tx.first("SELECT pg_is_in_recovery()"):
            text = "this server is a standby: nothing can be stored here"
            found.append(Advice(text, "give the address of the primary"))
        for seconds, pid, name in await tx.rows(_OLD_SNAPSHOTS, float(OLD_SNAPSHOT)):
            found.append(
                Advice(
                    f"a transaction of {name or 'an unnamed client'} (pid {pid}) has been open for"
                    f" {seconds:.0f} s: old rows cannot be removed, and everything becomes slower",
                    f"end it, or SELECT pg_terminate_backend({pid})",
                )
            )
        return found

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        # Before the transaction starts: any news from here on must end the next `wait`.
        self._store.news = False
        self._store.heard.clear()
        self._asked = (queues, job)
        given = await self._claim_common(limit, text(worker), microseconds(lease_seconds), queues, job)
        if given is not None:
            return given
        return await self._store.write(
            lambda tx: self._claim(tx, limit, text(worker), microseconds(lease_seconds), queues, job),
            together=True,
        )

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        if verdicts and await self._settle_common(verdicts):
            self._store.announce_news()
            return Settlement([], [])
        return await super().settle(verdicts)

    async def wait(self, seconds: float) -> None:
        """Listen to other processes, and check once a second in case a notification was lost."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._has_news():
            left = end - loop.time()
            if left <= 0:
                return
            try:
                async with translate_errors(self.shown):
                    began = await self._store.listen()
            except ShoalError:
                began = False  # the next verb will report the problem
            if not began:
                try:
                    async with asyncio.timeout(min(left, LOOK)):
                        await self._store.heard.wait()
                except TimeoutError:
                    if left <= LOOK:
                        return
            if self._has_news():
                return
            self._store.heard.clear()
            # Others commit all the time: wake up only for work that a claim could get.
            useful = await self._until_useful()
            end = min(end, loop.time() + useful)
            await asyncio.sleep(min(max(0.0, end - loop.time()), HUSH))

    def _has_news(self) -> bool:
        return self._store.news

    async def _until_useful(self) -> float:
        """Return the seconds until a claim like the last one may succeed, or find that all is done. One
        statement, which is all that an idle worker costs."""
        queues, job = self._asked
        at = None if self._store._clock is None else microseconds(self._store._clock())
        async with translate_errors(self.shown), self._store.reading_connection() as connection:
            row = await connection.fetchrow(_USEFUL, at, None if queues is None else list(queues), job)
        now, first, held = row
        if first is None:
            return math.inf if held else 0.0
        return float(max(0.0, (first - now) / US))

    async def _claim_common(
        self, limit: int, worker: str, lease: int, queues: Collection[str] | None, job: str | None
    ) -> Claim | None:
        """Claim in one round trip. Returns None if this is not the common case."""
        memory = self._store.memory
        job_id: int | None = None
        if job is not None:
            job_id = memory.job_ids.get(job)
            known = None if job_id is None else memory.specs.get(job_id)
            if known is None or not known[1].dedicated:
                return None
        row = await self._store.call(
            _CLAIM_COMMON, limit, worker, lease, None if queues is None else list(queues), job_id
        )
        if row is None or not row["common"]:
            return None
        now, until = row["now_"] / US, (row["now_"] + lease) / US
        jobs, queue_names = row["jobs_"], row["streams_"]
        if not all(id in memory.job_names for id in jobs) or not all(
            id in memory.queue_names for id in queue_names
        ):
            await self._store.read(lambda tx: self._learn_names(tx, jobs, queue_names))
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
                leases.append(
                    Lease(token, request, lane, until, request_expires_at=expires_at(attempt, extra))
                )
        return Claim(leases, now, now)

    async def _learn_names(self, tx: PostgresTx, jobs: Iterable[int], streams: Iterable[int]) -> None:
        self._store.memory.job_names.update(await tx.load_job_names(jobs))
        self._store.memory.queue_names.update(await tx.load_queue_names(streams))

    async def _settle_common(self, verdicts: Sequence[Verdict]) -> bool:
        """Settle in one round trip. Returns False, having changed nothing, if this is not the common case."""
        gathered = _Batch(self._store.memory)
        if not all(isinstance(verdict, Done) and gathered.take(verdict) for verdict in verdicts):
            return False
        row = await self._store.call(_SETTLE_COMMON, *gathered.values(), durable=True)
        return row is not None and bool(row["done"])

    async def _claim(
        self,
        tx: PostgresTx,
        limit: int,
        worker: str,
        lease: int,
        queues: Collection[str] | None,
        job: str | None,
    ) -> Claim:
        now = tx.now
        if await tx.first(_DUE, now):
            tx.need_all()
            await verbs.upkeep(tx)
        wanted = await verbs.wanted(tx, queues, job)
        ready, skipped = await self._ready_lanes(tx, wanted, limit)
        left = limit
        taken: list[tuple[Line, str, Entry]] = []
        steps: list[tuple[int, int]] = []
        while ready and left > 0:
            # As many lanes as fill the claim if each gives what its pace allows.
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
                if row.sole is not None:
                    line = live[row.id][0][0]
                    got = heads[line.id]
                    row.streams = (line.stream,) if len(got) > free else ()
                    picked, priority = [(line, entry) for entry in got[: max(free, 0)]], line.priority
                else:
                    picked, priority = pick(row, free, live[row.id], heads, steps)
                if picked:
                    left -= len(picked)
                    row.busy += len(picked)
                    row.tat = max(row.tat, now) + len(picked) * row.pace_gap
                    taken += [(line, name, entry) for line, entry in picked]
                row.place(now, priority)
                tx.lanes[row.id] = row
        if taken:
            await tx.rows(
                "DELETE FROM waiting w USING unnest($1::bigint[], $2::bigint[]) AS c(line, id)"
                " WHERE w.line=c.line AND w.id=c.id",
                *columns([(line.id, entry[0]) for line, _, entry in taken], 2),
            )
        if steps:
            await tx.many(sql.STEP_LINES, steps)
        await tx.finish()
        if not taken:
            if skipped:
                return Claim((), (now + BUSY) / US, now / US)
            wake_at = await self._wake_at(tx, wanted, queues, job)
            if wake_at is None:
                tx.need_all()  # "all is done" must hold at one moment, not across several statements
            return Claim((), wake_at, now / US)
        return Claim(await self._hand_out(tx, taken, worker, now + lease), now / US, now / US)

    async def _hand_out(
        self, tx: PostgresTx, taken: list[tuple[Line, str, Entry]], worker: str, until: int
    ) -> list[Lease]:
        jobs = await tx.load_job_names(line.job for line, _, _ in taken)
        queues = tx.memory.queue_names
        rows = [(line.id, *entry) for line, _, entry in taken]
        # The server must not lose this claim in a crash: it would hand out the same tokens again, and the
        # same hosts within their gap.
        tx.lasting = True
        new = {line.job for line, _, _ in taken} - tx.memory.started
        if new:
            # As in `claim_common`: skip locked rows instead of waiting for them.
            await tx.rows(
                "UPDATE job SET started=$1 WHERE id=ANY(ARRAY(SELECT id FROM job WHERE id=ANY($2::bigint[])"
                " AND started IS NULL FOR NO KEY UPDATE SKIP LOCKED))",
                tx.now,
                sorted(new),
            )
            tx.memory.started |= new
        tokens = dict(
            await tx.rows(
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
            leases.append(Lease(tokens[id], request, lane, until / US, request_expires_at=expires))
        return leases

    async def _ready_lanes(
        self, tx: PostgresTx, wanted: Sequence[int], limit: int
    ) -> tuple[list[tuple[str, LaneRow]], bool]:
        """Lock the lanes that may be visited now. Returns them, each once, longest ready last, and whether
        some were skipped because another transaction holds them."""
        turns = await tx.rows(_READY, wanted, tx.now, limit) if wanted else []
        order = list(dict.fromkeys(lane for _, lane in sorted((at, lane) for at, lane in turns)))
        if not order:
            return [], False
        # The turns may be out of date: only the locked row of a lane counts.
        got = {row[1]: (row[0], LaneRow(row[1:])) for row in await tx.rows(_LOCKED, order)}
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
        self, tx: PostgresTx, chunk: list[tuple[str, LaneRow, int]], wanted: Sequence[int]
    ) -> tuple[dict[int, list[tuple[Line, int]]], dict[int, list[Entry]]]:
        """Return, by lane, the lines with something to claim and their virtual times, and the first entries
        of each line: one more than can be taken, to see whether any remain."""
        live: dict[int, list[tuple[Line, int]]] = {row.id: [] for _, row, _ in chunk}
        soles = [row.sole for _, row, _ in chunk if row.sole is not None]
        lines = await tx.load_lines(soles)
        for id in soles:
            live[lines[id].lane].append((lines[id], 0))
        shared = [row.id for _, row, _ in chunk if row.sole is None]
        if shared:
            for id, lane, stream, job, priority, vt in await tx.rows(
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
        for row in await tx.rows(_HEADS, *columns(asked, 2)):
            heads[row[0]].append(row[1:])
        return live, heads

    async def _wake_at(
        self, tx: PostgresTx, wanted: Sequence[int], queues: Collection[str] | None, job: str | None
    ) -> float | None:
        """Return the next moment at which a claim can succeed; see `Claim`."""
        here = "true"
        values: tuple[Any, ...] = (wanted,)
        if job is not None or queues is not None:
            asked = await tx.streams(queues, job)
            if not asked:
                return None
            here, values = "line IN (SELECT id FROM line WHERE stream=ANY($2::bigint[]))", (wanted, asked)
        first = await tx.first(
            f"SELECT least({_FIRST_TURN}, (SELECT min(at) FROM delayed WHERE {here}),"
            f" (SELECT min(until) FROM lease WHERE {here}),"
            f" (SELECT min(expires) FROM waiting WHERE expires IS NOT NULL AND {here}),"
            f" (SELECT min(expires) FROM delayed WHERE expires IS NOT NULL AND {here}))",
            *values,
        )
        if first is not None:
            return float(first / US)
        # Nothing is scheduled, but requests may wait behind a paused job or on a paused or full lane.
        held = await tx.first(
            "SELECT $1::bigint[] IS NOT NULL AND EXISTS(SELECT 1 FROM line JOIN lane l ON l.id=line.lane"
            " WHERE (line.off<>0 OR l.paused<>0 OR l.busy>=l.width)"
            " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
            f" AND {here.replace('line IN', 'line.id IN')})",
            *values,
        )
        return math.inf if held else None


class _Batch:
    """Visits that are all done, as arguments of `settle_common`. Names are looked up only in memory; a name
    that is not there is not the common case."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._tokens: set[int] = set()
        self._owners: list[int] = []
        self._bodies: list[bytes] = []
        self._found: dict[bytes, tuple[Any, ...]] = {}
        self._jobs: dict[str, _Share] = {}

    def take(self, verdict: Done) -> bool:
        """Add one visit. Returns False if it is not the common case."""
        lease = verdict.lease
        job = self._job(lease.request.job)
        if job is None or lease.token in self._tokens:
            return False
        self._tokens.add(lease.token)
        if verdict.skipped:
            if not job.is_start_lane(lease.lane):
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
        stream = self._memory.stream_ids.get((request.queue, job.id if job.spec.dedicated else 0))
        if lane is None or stream is None or not job.is_start_lane(name):
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
    """The effects of a batch on one job."""

    def __init__(self, id: int, spec: JobSpec) -> None:
        self.id = id
        self.spec = spec
        self.gap = microseconds(spec.gap)
        self.finds = self.knowns = self.skips = 0
        self._start: frozenset[str] | None = None

    def is_start_lane(self, lane: str) -> bool:
        """Return whether no budget per host applies here."""
        if self.spec.max_per_host is None:
            return True
        if self._start is None:
            self._start = frozenset(urls.lane_of(url) for url in self.spec.start)
        return lane in self._start
