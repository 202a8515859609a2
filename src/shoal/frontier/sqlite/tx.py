"""A transaction on SQLite. It never suspends, so `run_now` runs a verb to its end in one step."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

import apsw

from shoal.frontier.rows import JobRow, LaneRow, pack_streams
from shoal.frontier.sql.statements import Statement
from shoal.frontier.sql.tx import Memory, Turn, Tx

T = TypeVar("T")

_LEARN = "INSERT INTO seen SELECT value FROM carray(?1) WHERE true ON CONFLICT DO NOTHING RETURNING key"
_LANE = (
    "UPDATE lane SET gap=?, width=?, burst=?, floor=?, pinned=?, paused=?, tat=?, blocked=?, busy=?, vt=?,"
    " at=?, streams=?, sole=? WHERE id=?"
)

_NOTHING = array("q", [-(1 << 62)])
"""An id that no row has: SQLite accepts no empty array."""


def run_now(work: Awaitable[T]) -> T:
    """Run a verb to its end. It must not suspend: other tasks could see it half done."""
    coroutine = cast("Coroutine[Any, Any, T]", work)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    coroutine.close()
    raise RuntimeError("a transaction on SQLite waits for something")


class SqliteTx(Tx):
    """One transaction on one connection."""

    def __init__(self, db: apsw.Connection, memory: Memory, now: int) -> None:
        super().__init__(memory, now, alone=True)
        self.db = db

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """Returns a cursor. Any: the columns of a row are known to the statement, not to the types."""
        return self.db.execute(sql, values)

    async def run(self, statement: Statement, *values: Any) -> list[Any]:
        bound = [array_of(value) if type(value) is list else value for value in values]
        try:
            return self.db.execute(statement.sqlite, bound).fetchall()
        except UnicodeEncodeError:  # nothing has run yet
            return self.db.execute(
                statement.sqlite, [_without_surrogates(value) for value in bound]
            ).fetchall()

    async def change(self, statement: Statement, *values: Any) -> int:
        await self.run(statement, *values)
        return self.db.changes()

    async def many(self, statement: Statement, rows: Collection[Sequence[Any]]) -> list[Any]:
        if statement.untrusted:
            rows = [[_without_surrogates(value) for value in row] for row in rows]
        return self.db.executemany(statement.sqlite, rows).fetchall()

    async def learn_keys(self, keys: list[bytes]) -> set[bytes]:
        return {key for (key,) in self.db.execute(_LEARN, (apsw.carray(tuple(keys)),))}

    async def request_ids(self, count: int) -> Iterable[int]:
        sql = "UPDATE tick SET request=request+? RETURNING request"
        last: Any = self.db.execute(sql, (count,)).fetchall()[0][0]
        return range(last - count + 1, last + 1)

    def tokens(self, count: int) -> range:
        """Return fencing tokens for this many leases, in growing order."""
        sql = "UPDATE tick SET token=token+? RETURNING token"
        last: Any = self.db.execute(sql, (count,)).fetchall()[0][0]
        return range(last - count + 1, last + 1)

    async def end_leases_of(
        self, tokens: list[int], with_entry: list[int]
    ) -> tuple[dict[int, int], dict[int, tuple[Any, ...]]]:
        entries: dict[int, tuple[Any, ...]] = {}
        if with_entry:
            # Rows are read only where they are needed: not for visits that are done, which are most.
            sql = "SELECT token, id, url, depth, attempt, extra, worker FROM lease WHERE token IN carray(?)"
            entries = {row[0]: row[1:] for row in self.db.execute(sql, (array_of(with_entry),))}
        sql = "DELETE FROM lease WHERE token IN carray(?) RETURNING token, line"
        ended: Any = self.db.execute(sql, (array_of(tokens),)).fetchall()
        return dict(ended), entries

    async def write_lanes(self, gone: list[Turn], come: list[Turn], rows: Collection[LaneRow]) -> None:
        db = self.db
        if gone:
            db.executemany("DELETE FROM turn WHERE stream=? AND at=? AND lane=?", gone)
        if come:
            db.executemany("INSERT INTO turn VALUES(?, ?, ?)", come)
        updates = [
            (
                *(row.gap, row.width, row.burst, row.floor, row.pinned, row.paused, row.tat, row.blocked),
                *(row.busy, row.vt, row.at, pack_streams(row.streams), row.sole, row.id),
            )
            for row in rows
        ]
        db.executemany(_LANE, updates)

    async def write_jobs(self, jobs: list[JobRow]) -> dict[int, int]:
        totals: dict[int, int] = {}
        for job in jobs:
            moved = job.delta
            if bodies := self.bodies.get(job.id):
                moved = {**moved, "items": len(bodies)}
            sets = ", ".join(f"{name}={name}+?" for name in moved)
            row: Any = self.db.execute(
                f"UPDATE job SET {sets} WHERE id=? RETURNING added-done-dead-expired-cancelled, added, items",
                (*moved.values(), job.id),
            ).fetchall()[0]
            live, added, totals[job.id] = row
            if live == 0 and added and job.state in ("running", "paused"):
                self.db.execute("UPDATE job SET state='done', finished=? WHERE id=?", (self.now, job.id))
            elif live and job.state == "done":
                self.db.execute("UPDATE job SET state='running', finished=NULL WHERE id=?", (job.id,))
        return totals


def _without_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which no text column can store."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def array_of(values: list[Any]) -> Any:
    """Return a list as one array for SQLite: ten times cheaper than row by row."""
    if not values:
        return apsw.carray(_NOTHING)
    if type(values[0]) is int:
        return apsw.carray(array("q", values))
    # An array cannot hold NUL characters; a name with one matches nothing.
    return apsw.carray(
        tuple(_without_surrogates(v).replace("\0", "\ufffd") if type(v) is str else v for v in values)
    )
