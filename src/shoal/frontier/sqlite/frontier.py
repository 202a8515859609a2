"""Claiming and waiting on SQLite; the rest is shared."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from shoal import clock as clocks
from shoal.frontier.decisions import Entry, pick
from shoal.frontier.rows import LANE, LaneRow, Line, expires_at, request_of
from shoal.frontier.rules import US, allowance, microseconds
from shoal.frontier.sql import statements as sql
from shoal.frontier.sql import verbs
from shoal.frontier.sql.catalog import Catalog
from shoal.frontier.sql.notes import SqlNotes
from shoal.frontier.sqlite.store import SqliteStore
from shoal.frontier.sqlite.tx import SqliteTx, array_of
from shoal.model import Advice, Claim, Info, Lease

_READY = (
    f"SELECT t.at, l.name, {LANE} FROM turn t CROSS JOIN lane l ON l.id=t.lane"
    " WHERE t.stream=? AND t.at<=? ORDER BY t.at, t.lane LIMIT ?"
)
_HEAD = "SELECT id, url, depth, attempt, extra FROM waiting WHERE line=? ORDER BY id LIMIT ?"
_LIVE = (
    "SELECT id, stream, job, priority, vt FROM line WHERE lane=? AND off=0"
    " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
)
_DUE = (
    "SELECT EXISTS(SELECT 1 FROM delayed WHERE at<=?1) OR EXISTS(SELECT 1 FROM waiting WHERE expires<=?1)"
    " OR EXISTS(SELECT 1 FROM delayed WHERE expires<=?1)"
)
_FIRST_TURN = "SELECT at FROM turn WHERE stream=? ORDER BY at LIMIT 1"

Taken = list[tuple[Line, str, Entry]]
"""Requests with their lines and the names of their lanes."""


class SqliteFrontier(verbs.Verbs, Catalog):
    """A `Backend` on one SQLite file. Make it with `open`."""

    _store: SqliteStore

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.notes = SqlNotes(store)
        self._version = 0
        """The file's version at the last claim."""
        self._asked: tuple[Collection[str] | None, str | None] = (None, None)
        """The queues and the job of the last claim."""
        self._leases_seen = (0, 0)
        """When the leases were last scanned, and how many there were."""

    @classmethod
    async def open(
        cls, path: Path, *, clock: clocks.Clock = clocks.system, synchronous: str = "full"
    ) -> Self:
        """Open the file, or create it. Raises a FrontierError that names the problem."""
        return cls(await SqliteStore.open(path, clock=clock, synchronous=synchronous))

    @property
    def path(self) -> Path:
        return self._store.path

    async def close(self) -> None:
        await self._store.close()

    async def info(self) -> Info:
        if self._store.level == "full":
            return Info()
        text = "synchronous=normal: a power cut may undo the last moments, a crash does not"
        return Info([Advice(text, "remove ?synchronous=normal from the address")])

    async def check(self) -> list[str]:
        damage = self._store.damage()
        return [*(f"SQLite: {text}" for text in damage), *await super().check()]

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        async def work(tx: SqliteTx) -> Claim:
            self._store.news = False
            self._version = self._store.version()
            self._asked = (queues, job)
            if self._is_due(tx):
                await verbs.upkeep(tx)
            asked = await verbs.wanted(tx, queues, job)
            taken = await self._pick(tx, limit, asked)
            if not taken:
                return Claim((), await self._wake_at(tx, asked, queues, job), tx.now / US)
            leases = await self._hand_out(tx, taken, worker, tx.now + microseconds(lease_seconds))
            return Claim(leases, tx.now / US, tx.now / US)

        return await self._store.write(work)

    async def wait(self, seconds: float) -> None:
        """Check every 20 ms whether another process has committed: one read of shared memory."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._store.news:
            # Compared with the last claim, so that no commit since then is missed.
            if (version := self._store.version()) != self._version:
                self._version = version
                # Others commit all the time: wake up only for work that a claim could get.
                end = min(end, loop.time() + await self._store.read(self._until_useful))
            left = end - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(min(left, 0.02))

    async def _until_useful(self, tx: SqliteTx) -> float:
        """Return the seconds until a claim like the last one may succeed, or find that all is done."""
        moments = [
            row[0] for stream in await tx.streams(*self._asked) for row in tx.rows(_FIRST_TURN, (stream,))
        ]
        if not moments:
            return math.inf if tx.rows("SELECT 1 FROM lease LIMIT 1").fetchall() else 0.0
        first: int = min(moments)
        return max(0.0, (first - tx.now) / US)

    def _is_due(self, tx: SqliteTx) -> bool:
        """Return whether upkeep has work."""
        if tx.rows(_DUE, (tx.now,)).fetchall()[0][0]:
            return True
        looked, size = self._leases_seen
        # With thousands of leases a scan costs a millisecond: then once a second is enough.
        if size > 1000 and 0 <= tx.now - looked < US:
            return False
        found: Any = tx.rows("SELECT count(*), min(until) FROM lease").fetchall()[0]
        self._leases_seen = (tx.now, found[0])
        return found[1] is not None and found[1] <= tx.now

    async def _pick(self, tx: SqliteTx, limit: int, asked: Sequence[int]) -> Taken:
        """Take up to `limit` requests from lanes that may be visited now."""
        now, left = tx.now, limit
        taken: Taken = []
        cuts: list[tuple[int, int]] = []
        steps: list[tuple[int, int]] = []
        for name, row in _ready_lanes(tx, asked, limit):
            if left <= 0:
                break
            row.at = None
            gap = row.pace_gap
            free = min(left, row.width - row.busy)
            if gap:
                free = min(free, allowance(now, row.tat, gap, row.burst))
            if row.sole is not None:
                line = tx.memory.lines.get(row.sole) or (await tx.load_lines([row.sole]))[row.sole]
                got: list[Any] = tx.rows(_HEAD, (line.id, free + 1)).fetchall()
                row.streams = (line.stream,) if len(got) > free else ()
                del got[free:]
                priority = line.priority
                count = len(got)
                if count:
                    cuts.append((line.id, got[-1][0]))
                    taken += [(line, name, entry) for entry in got]
            else:
                picked, priority = _share(tx, row, free, asked, steps)
                # The first entries of each line were taken: delete up to the last of them.
                cuts += {line.id: entry[0] for line, entry in picked}.items()
                taken += [(line, name, entry) for line, entry in picked]
                count = len(picked)
            if count:
                left -= count
                row.busy += count
                row.tat = max(row.tat, now) + count * gap
            row.place(now, priority)
            tx.lanes[row.id] = row
        if cuts:
            tx.db.executemany("DELETE FROM waiting WHERE line=? AND id<=?", cuts)
        if steps:
            await tx.many(sql.STEP_LINES, steps)
        await tx.finish()
        return taken

    async def _hand_out(self, tx: SqliteTx, taken: Taken, worker: str, until: int) -> list[Lease]:
        jobs = await tx.load_job_names(line.job for line, _, _ in taken)
        queues = tx.memory.queue_names
        if new := {line.job for line, _, _ in taken} - tx.memory.started:
            began = "UPDATE job SET started=? WHERE id=? AND started IS NULL"
            tx.db.executemany(began, [(tx.now, job) for job in new])
            tx.memory.started |= new
        rows: list[tuple[Any, ...]] = []
        leases: list[Lease] = []
        tokens = tx.tokens(len(taken))
        for token, (line, lane, (id, url, depth, attempt, extra)) in zip(tokens, taken, strict=True):
            rows.append((token, until, worker, line.id, id, url, depth, attempt, extra))
            request = request_of(
                url, jobs[line.job], queues[line.stream], line.priority, depth, attempt, extra
            )
            leases.append(
                Lease(token, request, lane, until / US, request_expires_at=expires_at(attempt, extra))
            )
        tx.db.executemany("INSERT INTO lease VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        return leases

    async def _wake_at(
        self, tx: SqliteTx, asked: Sequence[int], queues: Collection[str] | None, job: str | None
    ) -> float | None:
        """Return the next moment at which a claim can succeed; see `Claim`."""
        moments = [row[0] for stream in asked for row in tx.rows(_FIRST_TURN, (stream,))]
        here = "true"
        values: tuple[Any, ...] = ()
        if job is not None or queues is not None:
            streams = await tx.streams(queues, job)
            if not streams:
                return None
            here, values = "line IN (SELECT id FROM line WHERE stream IN carray(?1))", (array_of(streams),)
        for statement in (
            f"SELECT min(at) FROM delayed WHERE {here}",
            f"SELECT min(until) FROM lease WHERE {here}",
            f"SELECT min(expires) FROM waiting WHERE expires IS NOT NULL AND {here}",
            f"SELECT min(expires) FROM delayed WHERE expires IS NOT NULL AND {here}",
        ):
            moments += tx.rows(statement, values).fetchall()[0]
        known: list[int] = [moment for moment in moments if moment is not None]
        if known:
            return min(known) / US
        # Nothing is scheduled, but requests may wait behind a paused job or on a paused or full lane.
        held = tx.rows(
            "SELECT 1 FROM line WHERE (off OR (SELECT paused OR busy>=width FROM lane WHERE"
            " lane.id=line.lane)) AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
            f" AND {here.replace('line IN', 'id IN')} LIMIT 1",
            values,
        ).fetchall()
        return math.inf if held else None


def _ready_lanes(tx: SqliteTx, asked: Sequence[int], limit: int) -> Iterable[tuple[str, LaneRow]]:
    """Yield lanes that may be visited now, longest ready first, each once."""
    if len(asked) == 1:
        # Read lazily: most claims need fewer lanes than their limit. An async generator would leave its
        # cursor open after a `break`, and an open cursor blocks checkpoints.
        for row in tx.rows(_READY, (asked[0], tx.now, limit)):
            yield row[1], LaneRow(row[2:])
        return
    merged = sorted(
        (row for stream in asked for row in tx.rows(_READY, (stream, tx.now, limit))),
        key=lambda row: (row[0], row[2]),
    )
    given: set[int] = set()
    for row in merged:
        if row[2] not in given:
            given.add(row[2])
            yield row[1], LaneRow(row[2:])


def _share(
    tx: SqliteTx, row: LaneRow, free: int, asked: Sequence[int], steps: list[tuple[int, int]]
) -> tuple[list[tuple[Line, Entry]], int]:
    """Take requests from a lane with several lines."""
    live: list[tuple[Line, int]] = []
    heads: dict[int, list[Entry]] = {}
    for id, stream, job, priority, vt in tx.rows(_LIVE, (row.id,)).fetchall():
        live.append((Line(id, row.id, stream, job, priority), vt))
        if stream in asked:
            heads[id] = tx.rows(_HEAD, (id, free + 1)).fetchall()
    return pick(row, free, live, heads, steps)
