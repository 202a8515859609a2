"""A transaction on PostgreSQL: batches travel as arrays, one round trip whatever their size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import asyncpg

from shoal.frontier.rows import JobRow, LaneRow, pack_streams
from shoal.frontier.sql.statements import Statement
from shoal.frontier.sql.tx import Memory, Turn, Tx

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


_LEARN = (
    "INSERT INTO seen SELECT unnest($1::bytea[]) ON CONFLICT DO NOTHING RETURNING key, nextval('request')"
)
_END = (
    "DELETE FROM lease WHERE token=ANY($1::bigint[])"
    " RETURNING token, line, id, url, depth, attempt, extra, worker"
)


def text(value: str) -> str:
    """What a text column can hold: neither NUL nor half a character."""
    if value.isascii() and "\0" not in value:
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def columns(rows: Collection[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as the arrays that `unnest` takes."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


class PostgresTx(Tx):
    """One transaction on one connection."""

    def __init__(
        self, connection: asyncpg.Connection, memory: Memory, now: int, *, alone: bool, shared: bool
    ) -> None:
        super().__init__(memory, now, alone=alone)
        self.connection = connection
        self._shared = shared
        self._numbers: list[int] = []

    async def run(self, statement: Statement, *values: Any) -> list[Any]:
        return await self.rows(statement.postgres, *map(_storable, values))

    async def rows(self, text: str, *values: Any) -> list[Any]:
        """Run a statement that only PostgreSQL understands."""
        found: list[Any] = await self.connection.fetch(text, *values)
        return found

    async def first(self, text: str, *values: Any) -> Any:
        """The first value that such a statement returns, None without a row."""
        return await self.connection.fetchval(text, *values)

    async def change(self, statement: Statement, *values: Any) -> int:
        status: str = await self.connection.execute(statement.postgres, *map(_storable, values))
        return int(status.rpartition(" ")[2])

    async def many(self, statement: Statement, rows: Collection[Sequence[Any]]) -> list[Any]:
        if not rows:
            return []
        arrays = [list(column) for column in zip(*rows, strict=True)]
        for n in statement.untrusted:
            arrays[n] = [text(value) for value in arrays[n]]
        return await self.rows(statement.postgres, *arrays)

    async def learn_keys(self, keys: list[bytes]) -> set[bytes]:
        # Each new key takes a number on the way; they are given out in the order of the requests.
        numbered = dict(await self.rows(_LEARN, keys))
        self._numbers = sorted(numbered.values())
        return set(numbered)

    async def request_ids(self, count: int) -> Iterable[int]:
        return self._numbers[:count]

    async def end_leases_of(
        self, tokens: list[int], with_entry: list[int]
    ) -> tuple[dict[int, int], dict[int, tuple[Any, ...]]]:
        rows = await self.rows(_END, tokens)
        return {row[0]: row[1] for row in rows}, {row[0]: row[2:] for row in rows}

    async def wait_in_line(self, rows: Collection[Sequence[Any]]) -> None:
        # Behind a pooler nothing is prepared, and asyncpg prepares a statement for COPY.
        if len(rows) >= COPY and not self._shared:
            await self.connection.copy_records_to_table("waiting", records=rows, columns=WAITING)
        else:
            await super().wait_in_line(rows)

    async def write_lanes(self, gone: list[Turn], come: list[Turn], rows: Collection[LaneRow]) -> None:
        updates = [
            (
                *(row.id, row.gap, row.width, row.burst, row.floor, row.pinned, row.paused, row.tat),
                *(row.blocked, row.busy, row.vt, row.at, row.sole, str(pack_streams(row.streams))),
            )
            for row in rows
        ]
        await self.rows(_WRITE_LANES, *columns(gone, 3), *columns(come, 3), *columns(updates, 14))

    async def write_jobs(self, jobs: list[JobRow]) -> dict[int, int]:
        rows: list[tuple[int, ...]] = []
        for job in jobs:
            moved = job.delta.get
            counters = [moved(name, 0) for name in _COUNTERS]
            rows.append((job.id, *counters, len(self.bodies.get(job.id, ())), moved("stale", 0)))
        return dict(await self.rows(_WRITE_JOBS, self.now, *columns(rows, 12)))


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [text(each) for each in value]
    return value
