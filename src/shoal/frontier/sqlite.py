"""The embedded frontier: one SQLite file, several worker processes, nothing lost.

How it stays fast and safe:

- Every verb is one transaction that runs without an await (`_write`), so the event loop is the
  group committer: a writer thread was measured to cost more CPU than it saves.
- Processes take turns by a file lock around the transaction. SQLite's own busy handler is a
  race that starves; the lock is fair. A process stopped (SIGSTOP) while it holds the lock
  holds everybody: that is the price of one file.
- Checkpoints run in a thread (PASSIVE): in line they would stall a settle by 60 to 130 ms.
- `settle` and `add` are durable when they return (`synchronous=FULL`). A claim is not worth an
  fsync of its own: after a power cut the request simply still waits.
- A batch of keys goes to SQLite as one array (carray): ten times cheaper than row by row.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from shoal import clock as clocks
from shoal import urls
from shoal.errors import (
    FrontierCorrupt,
    FrontierError,
    FrontierFull,
    FrontierLocked,
    NoSuchJob,
    UsageError,
)
from shoal.frontier.migrate import pending
from shoal.frontier.rules import BONUS, STAGGER, STEP, US, allowance, microseconds, validate
from shoal.model import (
    CRASH_LIMIT,
    Added,
    Claim,
    Counts,
    Dead,
    DeadGroup,
    DeadLetter,
    Done,
    Failure,
    Finding,
    Item,
    Job,
    JobSpec,
    JobState,
    Lane,
    Lease,
    Pace,
    Request,
    Retry,
    Selection,
    Settlement,
    Verdict,
)

T = TypeVar("T")

APPLICATION_ID = 0x53484F41  # "SHOA"
SAFE_SQLITE = (3, 51, 3)
"""Earlier ones can lose committed pages when two processes write and checkpoint at once."""

CHECKPOINT_PAGES = 4_000
"""16 MB of log: begin to fold it in, in the background."""
RESET_PAGES = 60_000
"""240 MB: the background cannot keep up; fold it in now, everybody waits."""

_CRASH = 1 << 16
"""`attempt` columns hold failed visits in the low 16 bits and crashes above."""

_LANE = (
    "l.id, l.gap, l.width, l.burst, l.floor, l.pinned, l.paused, l.tat, l.blocked, l.busy, l.vt, "
    "l.at, l.streams, l.sole"
)
_TICKS = "UPDATE tick SET token=token+?, request=request+?, line=line+? RETURNING token, request, line"
_TTL_OVER = Failure("expired", "its time to live ran out")

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.decode
_spec_bytes = msgspec.json.Encoder().encode


def _extra(request: Request) -> bytes | None:
    """What a row has no column for; nothing at all for a plain GET."""
    if not (
        request.label
        or request.data
        or request.headers
        or request.origin
        or request.body
        or request.method != "GET"
    ):
        return None
    return _pack(
        (
            request.label,
            request.method,
            request.headers,
            request.body,
            request.data,
            request.origin,
            request.hops,
        )
    )


class _LaneRow:
    """A lane inside one transaction: read once, changed in memory, written back once."""

    __slots__ = (
        "at",
        "blocked",
        "burst",
        "busy",
        "floor",
        "gap",
        "id",
        "old_at",
        "old_streams",
        "paused",
        "pinned",
        "sole",
        "streams",
        "tat",
        "vt",
        "width",
    )

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.id: int = row[0]
        self.gap: int = row[1]
        self.width: int = row[2]
        self.burst: int = row[3]
        self.floor: int = row[4]
        self.pinned: int = row[5]
        self.paused: int = row[6]
        self.tat: int = row[7]
        self.blocked: int = row[8]
        self.busy: int = row[9]
        self.vt: int = row[10]
        self.at: int | None = row[11]
        raw: int | str = row[12]
        self.streams: tuple[int, ...]
        if isinstance(raw, int):
            self.streams = (raw,) if raw else ()
        else:
            self.streams = tuple(map(int, raw.split(",")))
        self.sole: int | None = row[13]
        self.old_at = self.at
        self.old_streams = self.streams

    @property
    def pace_gap(self) -> int:
        return self.gap if self.pinned or self.floor <= self.gap else self.floor

    def place(self, now: int, priority: int) -> None:
        """Decide where the lane stands in the turns, after any change."""
        if not self.streams or self.busy >= self.width or self.paused:
            self.at = None
            return
        at = self.tat - self.burst * self.pace_gap if self.burst else self.tat
        at = max(at, self.blocked)
        if at <= now:
            at = now - BONUS[priority]
            if self.at is not None and self.at < at:
                at = self.at  # it is in line already and keeps its place
        self.at = at


class _JobRow:
    """A job inside one transaction: what was read, and how much its counters move."""

    __slots__ = ("_live", "delta", "gap", "id", "name", "spec", "start", "state", "used", "width")

    def __init__(self, id: int, name: str, spec: JobSpec, state: str, used: int, live: int) -> None:
        self.id = id
        self.name = name
        self.spec = spec
        self.state = state
        self.used = used
        """Requests that count against the page budget."""
        self._live = live
        self.gap = microseconds(spec.gap)
        self.width = spec.width
        self.start: frozenset[str] | None = None
        self.delta: dict[str, int] = {}

    def count(self, name: str, by: int = 1) -> None:
        self.delta[name] = self.delta.get(name, 0) + by

    @property
    def live(self) -> int:
        moved = self.delta.get
        ended = moved("done", 0) + moved("dead", 0) + moved("expired", 0) + moved("cancelled", 0)
        return self._live + moved("added", 0) - ended

    def starts_at(self, lane: str) -> bool:
        if self.start is None:
            self.start = frozenset(urls.lane_of(url) for url in self.spec.start)
        return lane in self.start


class _Line:
    """What never changes about a line; safe to keep between transactions."""

    __slots__ = ("id", "job", "lane", "priority", "stream")

    def __init__(self, id: int, lane: int, stream: int, job: int, priority: int) -> None:
        self.id = id
        self.lane = lane
        self.stream = stream
        self.job = job
        self.priority = priority


class SqliteFrontier:
    """A `Backend` on one SQLite file. Make it with `open`."""

    def __init__(self, path: Path, db: apsw.Connection, lock: int, clock: clocks.Clock, level: str) -> None:
        self.path = path
        self._db = db
        self._clock = clock
        self._level = level
        self._lock_file = lock
        self._mutex = asyncio.Lock()
        self._checkpointer = _Checkpointer(path)
        self._wal_pages = 0
        self._version = 0
        self._news = False
        """Something was added or freed through this very connection since the last claim."""
        self._asked: tuple[Collection[str] | None, str | None] = (None, None)
        self._lease_scan: tuple[int, int] = (0, 0)
        db.set_wal_hook(self._after_commit)
        self._forget()

    @classmethod
    async def open(
        cls, path: Path, *, clock: clocks.Clock = clocks.system, synchronous: str = "full"
    ) -> SqliteFrontier:
        """Open or make the file. Raises a FrontierError that says what is wrong with it."""
        if synchronous not in ("full", "normal"):
            raise UsageError(f"synchronous={synchronous!r} is not full or normal", hint="use full or normal")
        version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
        if version < SAFE_SQLITE:
            raise FrontierError(
                f"SQLite {apsw.sqlite_lib_version()} can lose data with several processes",
                hint="pip install -U apsw (it brings SQLite 3.51.3 or newer)",
            )
        return await asyncio.to_thread(cls._open, path, clock, synchronous)

    @classmethod
    def _open(cls, path: Path, clock: clocks.Clock, level: str) -> SqliteFrontier:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Jobs may hold secret headers: nobody else reads the file. SQLite's own files follow it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise FrontierError(
                f"cannot open {path}: {error.strerror}", hint="give a writable place with --frontier"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            db = _translated(lambda: _connect(path), path)
            _translated(lambda: _migrate(db, path), path)
            db.execute(f"PRAGMA synchronous={level}")
        except BaseException:
            os.close(lock)
            raise
        fcntl.flock(lock, fcntl.LOCK_UN)
        return cls(path, db, lock, clock, level)

    async def close(self) -> None:
        self._checkpointer.stop()
        self._db.close()
        os.close(self._lock_file)

    # -- the five verbs ---------------------------------------------------------------

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        if not requests:
            return []
        for request in requests:
            validate(request)

        def work() -> list[Added]:
            now = self._now()
            jobs: dict[str, _JobRow] = {}
            lanes: dict[int, _LaneRow] = {}
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
            if pace.gap is not None:
                row.gap = microseconds(pace.gap)
            if pace.width is not None:
                row.width = pace.width
            if pace.burst is not None:
                row.burst = pace.burst
            if pace.floor is not None:
                row.floor = microseconds(pace.floor)
            if pace.pinned is not None:
                row.pinned = int(pace.pinned)
            if pace.paused is not None:
                row.paused = int(pace.paused)
            if pace.blocked is not None:
                until = now + microseconds(pace.blocked)
                row.blocked = max(row.blocked, until) if pace.blocked > 0 else 0
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

    # -- people -----------------------------------------------------------------------

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        def work() -> Job:
            self._run(
                "INSERT INTO job(name, spec, state, created) VALUES(?, ?, 'running', ?)"
                " ON CONFLICT(name) DO NOTHING",
                (job, _spec_bytes(spec), self._now()),
            ).fetchall()
            return self._job_view(job)

        return await self._write(work, durable=True)

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
            self._run("UPDATE job SET spec=? WHERE id=?", (_spec_bytes(spec), id)).fetchall()
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
            rows = self._run(
                f"SELECT {_ENDED} FROM ended e JOIN job ON job.id=e.job WHERE e.id>? AND {where}"
                " ORDER BY e.id LIMIT ?",
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
            jobs: dict[str, _JobRow] = {}
            lanes: dict[int, _LaneRow] = {}
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
                entry = (letter.id, request.url, request.depth, attempt, None, _extra(request))
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
            jobs: dict[str, _JobRow] = {}
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
                "INSERT INTO ended VALUES(?, 'dead', ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?)",
                (
                    *(id, now, job.id, lane, request.queue, request.priority, request.url, request.depth),
                    *(_extra(request), failure_class, message),
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

    async def holders(self, job: str | None = None) -> dict[str, int]:
        def work() -> dict[str, int]:
            sql = (
                "SELECT worker, count(*) FROM lease JOIN line ON line.id=lease.line"
                " JOIN job ON job.id=line.job WHERE ?1 IS NULL OR job.name=?1 GROUP BY worker"
            )
            return dict(self._run(sql, (job,)).fetchall())

        return self._read(work)

    async def evict(self, workers: Collection[str]) -> int:
        if not workers:
            return 0

        def work() -> int:
            now = self._now()
            jobs: dict[str, _JobRow] = {}
            lanes: dict[int, _LaneRow] = {}
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

    # -- transactions -----------------------------------------------------------------

    async def _write(self, work: Callable[[], T], *, durable: bool = False) -> T:
        """Run `work` in one transaction. It cannot await, so nobody sees it half done, and a
        cancelled caller either never began or has committed."""
        async with self._mutex:
            await self._take_lock()
            self._news = self._news or durable
            try:
                return _translated(lambda: self._transact(work, durable), self.path)
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _transact(self, work: Callable[[], T], durable: bool) -> T:
        db = self._db
        if not durable and self._level == "full":
            db.execute("PRAGMA synchronous=normal")
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                self._check_epoch(self._run("SELECT epoch FROM tick").fetchall()[0][0])
                result = work()
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                self._forget()
                raise
        finally:
            if not durable and self._level == "full":
                db.execute("PRAGMA synchronous=full")
        if self._wal_pages > CHECKPOINT_PAGES:
            if self._wal_pages > RESET_PAGES:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            else:
                self._checkpointer.nudge()
        return result

    async def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return
        waiting = asyncio.ensure_future(asyncio.to_thread(fcntl.flock, self._lock_file, fcntl.LOCK_EX))
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            # The thread cannot be called back: it will get the lock some time and must give it up.
            await waiting
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
            raise

    def _read(self, work: Callable[[], T]) -> T:
        """Run `work` on one snapshot, without the lock: readers never wait for writers."""

        def snapshot() -> T:
            self._db.execute("BEGIN")
            try:
                return work()
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

        return _translated(snapshot, self.path)

    def _run(self, sql: str, values: tuple[Any, ...] = ()) -> Any:
        """A cursor. Any: the columns of a row are known to the statement, not to the types."""
        return self._db.execute(sql, values)

    def _many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self._db.executemany(sql, rows)

    def _after_commit(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return 0

    def _data_version(self) -> int:
        return int(self._run("PRAGMA data_version").fetchall()[0][0])

    def _now(self) -> int:
        return microseconds(self._clock())

    def _forget(self) -> None:
        """Drop what is remembered between transactions: it may not have been committed."""
        self._job_names: dict[int, str] = {}
        self._specs: dict[int, tuple[bytes | str, JobSpec]] = {}
        self._lane_ids: dict[str, int] = {}
        self._stream_ids: dict[tuple[str, int], int] = {}
        self._queue_names: dict[int, str] = {}
        self._lines: dict[int, _Line] = {}
        self._line_ids: dict[tuple[int, int, int, int], _Line] = {}
        self._epoch = -1

    def _tick(self, *, tokens: int = 0, requests: int = 0, lines: int = 0) -> tuple[int, int, int]:
        token, request, line = self._run(_TICKS, (tokens, requests, lines)).fetchall()[0]
        return token, request, line

    def _check_epoch(self, epoch: int) -> None:
        """Lines were dropped by somebody: what is remembered of lines may be gone."""
        if epoch != self._epoch:
            self._lines.clear()
            self._line_ids.clear()
            self._epoch = epoch

    # -- adding -----------------------------------------------------------------------

    def _add(
        self,
        requests: Sequence[Request],
        now: int,
        jobs: dict[str, _JobRow],
        lanes: dict[int, _LaneRow],
    ) -> list[Added]:
        """Store what is new. Changes `jobs` and `lanes`; the caller writes them."""
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
        for request, key in zip(requests, keys, strict=True):
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
        if refused:
            self._many("DELETE FROM seen WHERE key=?", refused)
        if new:
            self._store(new, now, jobs, lanes)
        return answers

    def _room(self, job: _JobRow, request: Request) -> bool:
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

    def _count_lane(self, job: _JobRow, name: str, by: int) -> None:
        """Move what counts against the budget per host, for jobs that have one."""
        if job.spec.max_per_host is None or job.starts_at(name):
            return
        self._run(
            "INSERT INTO spread VALUES(?, ?, ?) ON CONFLICT DO UPDATE SET added=added+excluded.added",
            (job.id, name, by),
        ).fetchall()

    def _store(
        self, new: list[Request], now: int, jobs: dict[str, _JobRow], lanes: dict[int, _LaneRow]
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
            if request.delay > 0:
                at = now + microseconds(request.delay)
                later.append((at, id, line.id, request.url, request.depth, 0, expires, _extra(request)))
                continue
            if line.id not in woken:
                woken.add(line.id)
                self._wake(row, line, job, now)
            rows.append((line.id, id, request.url, request.depth, 0, expires, _extra(request)))
        if len(rows) > 64:
            rows.sort(key=lambda row: row[:2])
        if rows:
            self._many("INSERT INTO waiting VALUES(?, ?, ?, ?, ?, ?, ?)", rows)
        if later:
            self._many("INSERT INTO delayed VALUES(?, ?, ?, ?, ?, ?, ?, ?)", later)

    def _adopt(self, row: _LaneRow, job: _JobRow) -> None:
        """An idle lane takes the job's pace; a shared one keeps the slower."""
        if row.pinned or (row.gap == job.gap and row.width == job.width):
            return
        if row.busy or row.streams:
            row.gap = max(row.gap, job.gap)
            row.width = min(row.width, job.width)
        else:
            row.gap, row.width = job.gap, job.width

    def _wake(self, row: _LaneRow, line: _Line, job: _JobRow, now: int) -> None:
        """Something comes into this line: the lane must be in the turns of its queue."""
        self._activate(row, line)
        if job.state == "paused":
            return
        if line.stream not in row.streams:
            row.streams = tuple(sorted((*row.streams, line.stream)))
        elif row.at is not None:
            return
        row.place(now, self._priority(row, line))

    def _activate(self, row: _LaneRow, line: _Line) -> None:
        """A line that was empty starts at the lane's virtual time: no credit for absence."""
        if row.sole is not None or self._head(line.id, 1):
            return
        self._run("UPDATE line SET vt=max(vt, ?) WHERE id=?", (row.vt, line.id)).fetchall()

    def _priority(self, row: _LaneRow, line: _Line) -> int:
        """The highest priority that waits on a lane to which `line` belongs."""
        if row.sole is not None:
            return line.priority
        return max(line.priority, *(live[3] for live in self._live_lines(row.id)), 0)

    # -- claiming ---------------------------------------------------------------------

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
        lanes: dict[int, _LaneRow] = {}
        taken: list[tuple[_Line, str, tuple[Any, ...]]] = []
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
        return Claim(self._hand_out(taken, worker, now + lease), now / US, now / US)

    def _hand_out(
        self, taken: list[tuple[_Line, str, tuple[Any, ...]]], worker: str, until: int
    ) -> list[Lease]:
        token = self._tick(tokens=len(taken))[0] - len(taken)
        seconds = until / US
        rows: list[tuple[Any, ...]] = []
        leases: list[Lease] = []
        for line, lane, (id, url, depth, attempt, extra) in taken:
            token += 1
            rows.append((token, until, worker, line.id, id, url, depth, attempt, extra))
            job = self._job_names.get(line.job) or self._job_name(line.job)
            queue = self._queue_names[line.stream]
            request = _request(url, job, queue, line.priority, depth, attempt, extra)
            leases.append(Lease(token, request, lane, seconds))
        self._many("INSERT INTO lease VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        return leases

    def _ready_lanes(self, now: int, wanted: Sequence[int], limit: int) -> Iterable[tuple[str, _LaneRow]]:
        """Lanes that may be visited now, longest ready first, each once."""
        sql = (
            f"SELECT t.at, l.name, {_LANE} FROM turn t CROSS JOIN lane l ON l.id=t.lane"
            " WHERE t.stream=? AND t.at<=? ORDER BY t.at, t.lane LIMIT ?"
        )
        if len(wanted) == 1:
            # Read lazily: a claim mostly needs fewer lanes than its limit.
            for row in self._run(sql, (wanted[0], now, limit)):
                yield row[1], _LaneRow(row[2:])
            return
        merged = sorted(
            (row for stream in wanted for row in self._run(sql, (stream, now, limit))),
            key=lambda row: (row[0], row[2]),
        )
        given: set[int] = set()
        for row in merged:
            if row[2] not in given:
                given.add(row[2])
                yield row[1], _LaneRow(row[2:])

    def _head(self, line: int, limit: int) -> list[tuple[Any, ...]]:
        sql = "SELECT id, url, depth, attempt, extra FROM waiting WHERE line=? ORDER BY id LIMIT ?"
        return list(self._run(sql, (line, limit)))

    def _share(
        self,
        row: _LaneRow,
        free: int,
        wanted: Sequence[int],
        cuts: list[tuple[int, int]],
        steps: list[tuple[int, int]],
    ) -> tuple[list[tuple[_Line, tuple[Any, ...]]], int]:
        """Take from a lane with several lines: whoever is furthest behind goes next."""
        heads: dict[int, list[tuple[Any, ...]]] = {}
        lines: dict[int, _Line] = {}
        vts: dict[int, int] = {}
        for id, stream, job, priority, vt in self._live_lines(row.id):
            lines[id] = _Line(id, row.id, stream, job, priority)
            if stream in wanted:
                vts[id] = vt
                heads[id] = self._head(id, free + 1)
        used = dict.fromkeys(heads, 0)
        picked: list[tuple[_Line, tuple[Any, ...]]] = []
        while len(picked) < free:
            able = [id for id, head in heads.items() if used[id] < len(head)]
            if not able:
                break
            id = min(able, key=lambda id: (vts[id], id))
            picked.append((lines[id], heads[id][used[id]]))
            used[id] += 1
            row.vt = max(row.vt, vts[id])
            vts[id] += STEP[lines[id].priority]
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

    def _live_lines(self, lane: int) -> list[tuple[int, int, int, int, int]]:
        """Lines with something to claim: (id, stream, job, priority, vt)."""
        sql = (
            "SELECT id, stream, job, priority, vt FROM line WHERE lane=? AND off=0"
            " AND EXISTS(SELECT 1 FROM waiting WHERE waiting.line=line.id)"
        )
        return list(self._run(sql, (lane,)))

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

    def _streams(self, queues: Collection[str] | None, job: str | None) -> list[int]:
        """Every stream of these queues or this job, with work or without."""
        job_id = None if job is None else self._job_id(job)
        rows = self._run("SELECT id, queue FROM stream WHERE ?1 IS NULL OR job=?1", (job_id,))
        return [id for id, queue in rows if queues is None or queue in queues]

    def _upkeep(self, now: int) -> None:
        """End what is too old, take back what dead workers hold, promote what is due.

        Lanes are placed afterwards, all at once: what ended must not lend them its priority.
        """
        jobs: dict[str, _JobRow] = {}
        lanes: dict[int, _LaneRow] = {}
        columns = "line, id, url, depth, attempt, expires, extra"
        late: list[tuple[Any, ...]] = []
        for table in ("waiting", "delayed"):
            late += self._run(f"DELETE FROM {table} WHERE expires<=? RETURNING {columns}", (now,))
        if late:
            lines = [self._any_line(row[0]) for row in late]
            self._end_rows(lines, [row[1:] for row in late], [_TTL_OVER] * len(late), "expired", now, jobs)
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
        self, now: int, jobs: dict[str, _JobRow], lanes: dict[int, _LaneRow]
    ) -> list[tuple[_Line, tuple[Any, ...]]]:
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

    def _end_leases(
        self, which: str, value: Any, now: int, jobs: dict[str, _JobRow], lanes: dict[int, _LaneRow]
    ) -> list[tuple[_Line, tuple[Any, ...]]]:
        """Their workers are gone: end these leases. Answers the entries that wait again."""
        rows = self._run(
            f"DELETE FROM lease WHERE {which} RETURNING until, token, line, id, url, depth, attempt, extra",
            (value,),
        ).fetchall()
        back: list[tuple[_Line, tuple[Any, ...]]] = []
        dead: list[tuple[_Line, tuple[Any, ...]]] = []
        apart: list[tuple[Any, ...]] = []
        for _, _, line_id, id, url, depth, attempt, extra in sorted(rows):
            line = self._any_line(line_id)
            job = self._job_by_id(line.job, jobs)
            self._lane_in(line.lane, lanes).busy -= 1
            crashed = attempt + _CRASH
            if job.state == "cancelled":
                job.count("cancelled")
            elif crashed // _CRASH >= CRASH_LIMIT:
                dead.append((line, (id, url, depth, attempt % _CRASH, None, extra)))
            elif crashed // _CRASH > 1:
                at = now + len(apart) * STAGGER
                apart.append((at, id, line.id, url, depth, crashed, None, extra))
            else:
                back.append((line, (id, url, depth, crashed, None, extra)))
        if apart:
            self._many("INSERT INTO delayed VALUES(?, ?, ?, ?, ?, ?, ?, ?)", apart)
        message = f"{CRASH_LIMIT} workers died or hung while visiting it"
        failures = [Failure("worker_crashed", message)] * len(dead)
        self._tally([(line.job, "worker_crashed") for line, _ in dead])
        self._end_rows([line for line, _ in dead], [row for _, row in dead], failures, "dead", now, jobs)
        return back

    def _back_in_line(self, back: list[tuple[_Line, tuple[Any, ...]]], lanes: dict[int, _LaneRow]) -> None:
        """Let entries (id, url, depth, attempt, expires, extra) wait, in the order of their ids.
        The caller places the lanes."""
        for line, entry in back:
            self._activate(self._lane_in(line.lane, lanes), line)
            self._run("INSERT INTO waiting VALUES(?, ?, ?, ?, ?, ?, ?)", (line.id, *entry)).fetchall()

    # -- settling ---------------------------------------------------------------------

    def _settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        now = self._now()
        tokens = array("q", [verdict.lease.token for verdict in verdicts])
        others = array("q", [v.lease.token for v in verdicts if not isinstance(v, Done)])
        entries: dict[int, tuple[Any, ...]] = {}
        if others:
            sql = "SELECT token, id, url, depth, attempt, extra FROM lease WHERE token IN carray(?)"
            entries = {row[0]: row[1:] for row in self._run(sql, (apsw.carray(others),))}
        sql = "DELETE FROM lease WHERE token IN carray(?) RETURNING token, line"
        ended = dict(self._run(sql, (apsw.carray(tokens),)).fetchall())
        jobs: dict[str, _JobRow] = {}
        lanes: dict[int, _LaneRow] = {}
        lines = {id: self._any_line(id) for id in set(ended.values())}
        for row in self._lane_rows({line.lane for line in lines.values()}):
            lanes[row.id] = row
        lost: list[Lease] = []
        found: list[Request] = []
        items: dict[int, list[bytes]] = {}
        freed: dict[int, int] = {}
        back: list[tuple[_Line, tuple[Any, ...]]] = []
        later: list[tuple[Any, ...]] = []
        dead: list[tuple[_Line, tuple[Any, ...], Failure]] = []
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
                    job.used -= 1
                    self._count_lane(job, lease.lane, -1)
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
            elif isinstance(verdict, Dead):
                id, url, depth, attempt, extra = entries[lease.token]
                dead.append((line, (id, url, depth, attempt % _CRASH + 1, None, extra), verdict.failure))
                self._tally([(job.id, verdict.failure.error)])
            else:
                id, url, depth, attempt, extra = entries[lease.token]
                back.append((line, (id, url, depth, attempt, None, extra)))
        for line_id, n in freed.items():
            lanes[lines[line_id].lane].busy -= n
        if later:
            self._many("INSERT INTO delayed VALUES(?, ?, ?, ?, ?, ?, ?, ?)", later)
        if dead:
            who, rows, why = zip(*dead, strict=True)
            self._end_rows(who, rows, why, "dead", now, jobs)
        refused: list[str] = []
        if found:
            answers = self._add(found, now, jobs, lanes)
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

    def _store_items(self, items: dict[int, list[bytes]], jobs: dict[str, _JobRow]) -> None:
        for job_id, bodies in items.items():
            sql = "UPDATE job SET items=items+? WHERE id=? RETURNING items"
            last = self._run(sql, (len(bodies), job_id)).fetchall()[0][0]
            first = (job_id << 40) + last - len(bodies) + 1
            self._many("INSERT INTO item VALUES(?, ?)", enumerate(bodies, first))

    def _end_rows(
        self,
        lines: Sequence[_Line],
        rows: Sequence[tuple[Any, ...]],
        failures: Sequence[Failure],
        state: str,
        now: int,
        jobs: dict[str, _JobRow],
    ) -> None:
        """Make dead letters of entries (id, url, depth, attempt, expires, extra)."""
        letters: list[tuple[Any, ...]] = []
        for line, (id, url, depth, attempt, _, extra), failure in zip(lines, rows, failures, strict=True):
            job = self._job_by_id(line.job, jobs)
            job.count(state)
            job.used -= 1
            self._count_lane(job, urls.lane_of(url), -1)
            letters.append(
                (
                    *(id, state, now, line.job, urls.lane_of(url), self._queue_name(line.stream)),
                    *(line.priority, url, depth, attempt % _CRASH, extra, failure.error, failure.message),
                )
            )
        self._many("INSERT INTO ended VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", letters)

    def _tally(self, failures: Iterable[tuple[int, str]]) -> None:
        self._many(
            "INSERT INTO tally VALUES(?, ?, 1) ON CONFLICT DO UPDATE SET n=n+1",
            failures,
        )

    # -- rows -------------------------------------------------------------------------

    def _lane_rows(self, ids: Collection[int]) -> list[_LaneRow]:
        if not ids:
            return []
        sql = f"SELECT {_LANE} FROM lane l WHERE id IN carray(?)"
        return [_LaneRow(row) for row in self._run(sql, (apsw.carray(array("q", sorted(ids))),))]

    def _lane_in(self, id: int, lanes: dict[int, _LaneRow]) -> _LaneRow:
        row = lanes.get(id)
        if row is None:
            row = lanes[id] = self._lane_rows([id])[0]
        return row

    def _settle_place(self, row: _LaneRow, now: int) -> None:
        """Recompute what waits on a lane and where that puts it."""
        live = self._live_lines(row.id)
        row.streams = tuple(sorted({line[1] for line in live}))
        row.place(now, max((line[3] for line in live), default=0))

    def _write_lanes(self, lanes: dict[int, _LaneRow]) -> None:
        updates: list[tuple[Any, ...]] = []
        removals: list[tuple[int, int, int]] = []
        inserts: list[tuple[int, int, int]] = []
        for row in lanes.values():
            if row.at != row.old_at or row.streams != row.old_streams:
                if row.old_at is not None:
                    removals += [(stream, row.old_at, row.id) for stream in row.old_streams]
                if row.at is not None:
                    inserts += [(stream, row.at, row.id) for stream in row.streams]
            updates.append(
                (
                    *(row.gap, row.width, row.burst, row.floor, row.pinned, row.paused, row.tat),
                    *(row.blocked, row.busy, row.vt, row.at, _packed(row.streams), row.sole, row.id),
                )
            )
        if removals:
            self._many("DELETE FROM turn WHERE stream=? AND at=? AND lane=?", removals)
        if inserts:
            self._many("INSERT INTO turn VALUES(?, ?, ?)", inserts)
        if updates:
            self._many(
                "UPDATE lane SET gap=?, width=?, burst=?, floor=?, pinned=?, paused=?, tat=?, blocked=?,"
                " busy=?, vt=?, at=?, streams=?, sole=? WHERE id=?",
                updates,
            )

    def _write_jobs(self, jobs: dict[str, _JobRow], now: int) -> None:
        for job in jobs.values():
            if not job.delta:
                continue
            sets = ", ".join(f"{name}={name}+?" for name in job.delta)
            live, added = self._run(
                f"UPDATE job SET {sets} WHERE id=? RETURNING added-done-dead-expired-cancelled, added",
                (*job.delta.values(), job.id),
            ).fetchall()[0]
            if live == 0 and added and job.state in ("running", "paused"):
                self._run("UPDATE job SET state='done', finished=? WHERE id=?", (now, job.id)).fetchall()
            elif live and job.state == "done":
                self._run("UPDATE job SET state='running', finished=NULL WHERE id=?", (job.id,)).fetchall()

    def _job_of(self, name: str, jobs: dict[str, _JobRow]) -> _JobRow:
        row = jobs.get(name)
        if row is None:
            row = jobs[name] = self._job_row(name)
        return row

    def _job_by_id(self, id: int, jobs: dict[str, _JobRow]) -> _JobRow:
        return self._job_of(self._job_names.get(id) or self._job_name(id), jobs)

    def _job_row(self, name: str) -> _JobRow:
        sql = (
            "SELECT id, spec, state, added-skipped-dead-expired, added-done-dead-expired-cancelled"
            " FROM job WHERE name=?"
        )
        rows = self._run(sql, (name,)).fetchall()
        if not rows:
            raise NoSuchJob(name)
        id, spec, state, used, live = rows[0]
        cached = self._specs.get(id)
        if cached is None or cached[0] != spec:
            cached = self._specs[id] = (spec, _spec(spec))
        self._job_names[id] = name
        return _JobRow(id, name, cached[1], state, used, live)

    def _job_id(self, name: str) -> int:
        rows = self._run("SELECT id FROM job WHERE name=?", (name,)).fetchall()
        if not rows:
            raise NoSuchJob(name)
        return int(rows[0][0])

    def _job_name(self, id: int) -> str:
        name: str = self._run("SELECT name FROM job WHERE id=?", (id,)).fetchall()[0][0]
        self._job_names[id] = name
        return name

    def _lane_ids_of(self, names: Collection[str]) -> dict[str, int]:
        return {name: self._lane_ids.get(name) or self._lane_id(name) for name in names}

    def _lane_id(self, name: str) -> int:
        id = self._lane_ids.get(name)
        if id is not None:
            return id
        rows = self._run("SELECT id FROM lane WHERE name=?", (name,)).fetchall()
        if not rows:
            rows = self._run("INSERT INTO lane(name) VALUES(?) RETURNING id", (name,)).fetchall()
        if len(self._lane_ids) > 500_000:
            self._lane_ids.clear()
        id = self._lane_ids[name] = int(rows[0][0])
        return id

    def _stream_id(self, queue: str, job: _JobRow) -> int:
        place = (queue, job.id if job.spec.apart else 0)
        id = self._stream_ids.get(place)
        if id is not None:
            return id
        rows = self._run("SELECT id FROM stream WHERE queue=? AND job=?", place).fetchall()
        if not rows:
            sql = "INSERT INTO stream(queue, job) VALUES(?, ?) RETURNING id"
            rows = self._run(sql, place).fetchall()
        id = self._stream_ids[place] = int(rows[0][0])
        self._queue_names[id] = queue
        return id

    def _queue_name(self, stream: int) -> str:
        name = self._queue_names.get(stream)
        if name is None:
            name = self._run("SELECT queue FROM stream WHERE id=?", (stream,)).fetchall()[0][0]
            self._queue_names[stream] = name
        return name

    def _line(
        self,
        lane_id: int,
        queue: str,
        job: _JobRow,
        priority: int,
        jobs: dict[str, _JobRow],
        lanes: dict[int, _LaneRow],
    ) -> _Line:
        """Find or make a line. Making one drops the lane's lines of jobs that are over."""
        place = (lane_id, self._stream_id(queue, job), job.id, priority)
        known = self._line_ids.get(place)
        if known is not None:
            return known
        sql = "SELECT id FROM line WHERE lane=? AND stream=? AND job=? AND priority=?"
        rows = self._run(sql, place).fetchall()
        if rows:
            return self._remember(_Line(rows[0][0], *place))
        row = self._lane_in(lane_id, lanes)
        self._drop_old_lines(lane_id, job, jobs)
        id = self._tick(lines=1)[2]
        others = self._run("SELECT 1 FROM line WHERE lane=? LIMIT 1", (lane_id,)).fetchall()
        row.sole = None if others else id
        off = int(job.state == "paused")
        self._run("INSERT INTO line VALUES(?, ?, ?, ?, ?, ?, ?)", (id, *place, row.vt, off)).fetchall()
        return self._remember(_Line(id, *place))

    def _drop_old_lines(self, lane_id: int, job: _JobRow, jobs: dict[str, _JobRow]) -> None:
        """Forget the lines of jobs that are over, so that a lane's lines stay few."""
        others = self._run("SELECT DISTINCT job FROM line WHERE lane=? AND job<>?", (lane_id, job.id))
        over = [id for (id,) in others.fetchall() if self._job_by_id(id, jobs).live == 0]
        if not over:
            return
        self._many("DELETE FROM line WHERE lane=? AND job=?", [(lane_id, id) for id in over])
        self._lines.clear()
        self._line_ids.clear()
        # Other processes must not go on with what they remember of lines.
        self._epoch = self._run("UPDATE tick SET epoch=epoch+1 RETURNING epoch").fetchall()[0][0]

    def _remember(self, line: _Line) -> _Line:
        if len(self._lines) > 500_000:
            self._lines.clear()
            self._line_ids.clear()
        self._lines[line.id] = line
        self._line_ids[line.lane, line.stream, line.job, line.priority] = line
        return line

    def _any_line(self, id: int) -> _Line:
        return self._lines.get(id) or self._load_line(id)

    def _load_line(self, id: int) -> _Line:
        sql = "SELECT lane, stream, job, priority FROM line WHERE id=?"
        return self._remember(_Line(id, *self._run(sql, (id,)).fetchall()[0]))

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

    def _repace(self, job: _JobRow) -> None:
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

    # -- views ------------------------------------------------------------------------

    def _job_view(self, name: str) -> Job:
        columns = "added, known, refused, done, skipped, dead, expired, cancelled, retried, items, stale"
        rows = self._run(
            f"SELECT id, spec, state, created, finished, {columns} FROM job WHERE name=?", (name,)
        )
        found = rows.fetchall()
        if not found:
            raise NoSuchJob(name)
        id, spec, state, created, finished, *values = found[0]
        by_job = "WHERE line IN (SELECT id FROM line WHERE job=?)"
        leased = self._run(f"SELECT count(*) FROM lease {by_job}", (id,)).fetchall()[0][0]
        delayed = self._run(f"SELECT count(*) FROM delayed {by_job}", (id,)).fetchall()[0][0]
        counts = Counts(**dict(zip(columns.split(", "), values, strict=True)))
        waiting = counts.live - leased - delayed
        counts = msgspec.structs.replace(counts, waiting=waiting, delayed=delayed, leased=leased)
        errors = dict(self._run("SELECT error, n FROM tally WHERE job=? ORDER BY n DESC", (id,)).fetchall())
        ended = None if finished is None else finished / US
        return Job(name, _spec(spec), JobState(state), counts, errors, created / US, ended)

    def _lane_view(self, row: tuple[Any, ...]) -> Lane:
        name, lane = row[0], _LaneRow(row[1:])
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
        return _request(url, job, self._queue_name(line.stream), line.priority, depth, attempt, extra)

    def _selected(self, which: Selection) -> tuple[str, list[Any]]:
        conditions: list[str] = ["true"]
        values: list[Any] = []
        if which.job is not None:
            conditions.append("e.job=(SELECT id FROM job WHERE name=?)")
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
        for row in self._run(f"SELECT l.name, {_LANE} FROM lane l").fetchall():
            name, state = row[0], _LaneRow(row[1:])
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


class _Checkpointer:
    """Folds the log into the file, in a thread with a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._work = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    def nudge(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shoal-checkpoint", daemon=True)
            self._thread.start()
        self._work.set()

    def stop(self) -> None:
        self._ending = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        db = apsw.Connection(str(self._path))
        db.set_busy_timeout(5000)
        while self._work.wait() and not self._ending:
            self._work.clear()
            try:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except apsw.Error:
                continue  # busy, or the disk is full: the writers will say so themselves
        db.close()


_LANES = f"SELECT l.name, {_LANE} FROM lane l"
_ENDED = (
    "e.id, e.state, e.at, job.name, e.lane, e.queue, e.priority, e.url, e.depth, e.attempt, e.extra,"
    " e.error, e.message"
)


def _letter(row: tuple[Any, ...]) -> DeadLetter:
    id, state, at, job, lane, queue, priority, url, depth, attempt, extra, error, message = row
    request = _request(url, job, queue, priority, depth, attempt, extra)
    return DeadLetter(id, request, lane, Failure(error, message), at / US, state)


def _request(
    url: str, job: str, queue: str, priority: int, depth: int, attempt: int, extra: bytes | None
) -> Request:
    attempt %= _CRASH
    if extra is None:
        return Request(url, job, "", queue, priority, depth, attempt)
    label, method, headers, body, data, origin, hops = _unpack(extra)
    return Request(
        *(url, job, label, queue, priority, depth, attempt, 0.0, None),
        *(method, headers, body, data, origin, hops),
    )


def _spec(raw: bytes | str) -> JobSpec:
    return msgspec.json.decode(raw, type=JobSpec)


def _packed(streams: tuple[int, ...]) -> int | str:
    if len(streams) == 1:
        return streams[0]
    return ",".join(map(str, streams)) or 0


def _connect(path: Path) -> apsw.Connection:
    db = apsw.Connection(str(path), statementcachesize=200)
    db.set_busy_timeout(5000)
    db.execute("PRAGMA journal_mode=WAL").fetchall()
    db.execute("PRAGMA wal_autocheckpoint=0").fetchall()
    db.execute("PRAGMA cache_size=-65536")
    db.execute("PRAGMA temp_store=2")
    return db


def _migrate(db: apsw.Connection, path: Path) -> None:
    kind = db.execute("PRAGMA application_id").fetchall()[0][0]
    tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchall()[0][0]
    if kind != APPLICATION_ID and tables:
        raise FrontierError(
            f"{path} is a database of something else", hint="give another file with --frontier"
        )
    version: Any = db.execute("PRAGMA user_version").fetchall()[0][0]
    for number, sql in pending("sqlite.sql", version, str(path)):
        with db:
            db.execute(sql)
            db.execute(f"PRAGMA user_version={number}")
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")


def _translated(work: Callable[[], T], path: Path) -> T:
    """Run `work`; what SQLite says becomes what a person can use."""
    try:
        return work()
    except apsw.FullError:
        raise FrontierFull(
            f"no space left for {path}", hint="free some space and run again with --resume: nothing is lost"
        ) from None
    except apsw.BusyError:
        raise FrontierLocked(
            f"{path} is locked by another program", hint="end the program that holds it, then try again"
        ) from None
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise FrontierCorrupt(
            f"{path} is damaged or not a database: {error}",
            hint="restore a copy, or move the file away to begin anew",
        ) from None
    except (apsw.IOError, apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError) as error:
        if isinstance(error, apsw.IOError) and "disk" in str(error) and _is_full(path):
            raise FrontierFull(f"no space left for {path}", hint="free some space and run again") from None
        raise FrontierError(
            f"cannot use {path}: {error}", hint="check the disk and the file's permissions"
        ) from None


def _is_full(path: Path) -> bool:
    stat = os.statvfs(path.parent)
    return stat.f_bavail * stat.f_frsize < 1 << 20
