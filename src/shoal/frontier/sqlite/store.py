"""The file: opening it, transactions, the lock between processes, checkpoints, errors."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import apsw

from shoal import clock as clocks
from shoal.errors import (
    FrontierCorrupt,
    FrontierError,
    FrontierFull,
    FrontierLocked,
    UsageError,
)
from shoal.frontier.migrate import pending
from shoal.frontier.rules import microseconds
from shoal.frontier.sql.tx import Memory
from shoal.frontier.sqlite.tx import SqliteTx, run_now

T = TypeVar("T")

APPLICATION_ID = 0x53484F41  # "SHOA"


SAFE_SQLITE = (3, 51, 3)
"""Earlier versions can lose committed pages when two processes write and checkpoint at once."""


CHECKPOINT_PAGES = 4_000
"""16 MB of log: start a checkpoint in the background."""


RESET_PAGES = 60_000
"""240 MB: the background cannot keep up. Run a checkpoint now, while all processes wait."""


class SqliteStore:
    """One SQLite file, on which processes take turns."""

    def __init__(self, path: Path, db: apsw.Connection, lock: int, clock: clocks.Clock, level: str) -> None:
        self.path = path
        self.level = level
        self.news = False
        """Whether this connection has added or freed something since the last claim."""
        self._db = db
        self._clock = clock
        self._lock_file = lock
        self._mutex = asyncio.Lock()
        self._checkpointer = _Checkpointer(path)
        self._wal_pages = 0
        self._memory = Memory()
        db.set_wal_hook(self._after_commit)

    @classmethod
    async def open(
        cls, path: Path, *, clock: clocks.Clock = clocks.system, synchronous: str = "full"
    ) -> Self:
        """Open the file, or create it. Raises a FrontierError that names the problem."""
        if synchronous not in ("full", "normal"):
            raise UsageError(f"synchronous={synchronous!r} is not full or normal", hint="use full or normal")
        version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
        if version < SAFE_SQLITE:
            raise FrontierError(
                f"SQLite {apsw.sqlite_lib_version()} can lose data with several processes",
                hint="install a newer apsw (pip install -U apsw): it contains SQLite 3.51.3 or newer",
            )
        return await asyncio.to_thread(cls._open, path, clock, synchronous)

    @classmethod
    def _open(cls, path: Path, clock: clocks.Clock, level: str) -> Self:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Jobs may contain secret headers, so only the owner may read the file. SQLite gives its other
            # files the same mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise FrontierError(
                f"cannot open {path}: {error.strerror}", hint="name a writable path with --frontier"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            db = _translate_errors(lambda: _connect(path), path)
            _translate_errors(lambda: _migrate(db, path), path)
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

    async def write(
        self,
        work: Callable[[SqliteTx], Awaitable[T]],
        *,
        durable: bool = False,
        wakes: bool = False,
        together: bool = False,
    ) -> T:
        """Run `work` in one transaction. It never suspends, so no other task sees it half done, and a
        cancelled caller has either not begun or committed. Every transaction is alone: `together` changes
        nothing."""
        async with self._mutex:
            await self._take_lock()
            try:
                return _translate_errors(lambda: self._transact(work, durable, wakes), self.path)
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _transact(self, work: Callable[[SqliteTx], Awaitable[T]], durable: bool, wakes: bool) -> T:
        db = self._db
        if not durable and self.level == "full":
            db.execute("PRAGMA synchronous=normal")
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                epoch: Any = db.execute("SELECT epoch FROM tick").fetchall()[0][0]
                self._memory.check_epoch(epoch)
                tx = SqliteTx(db, self._memory, self.now())
                result = run_now(work(tx))
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                self._memory.forget()  # it may hold rows that were not committed
                raise
        finally:
            if not durable and self.level == "full":
                db.execute("PRAGMA synchronous=full")
        self.news = self.news or wakes or tx.wakes
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
            # The thread cannot be cancelled: wait until it gets the lock, then release it.
            await waiting
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
            raise

    async def read(self, work: Callable[[SqliteTx], Awaitable[T]]) -> T:
        """Run `work` on one snapshot, without the lock: readers never wait for writers."""

        def snapshot() -> T:
            self._db.execute("BEGIN")
            try:
                return run_now(work(SqliteTx(self._db, Memory(), self.now())))
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

        return _translate_errors(snapshot, self.path)

    def now(self) -> int:
        return microseconds(self._clock())

    def version(self) -> int:
        """Return a number that changes when another process commits."""
        rows: Any = self._db.execute("PRAGMA data_version").fetchall()
        return int(rows[0][0])

    def damage(self) -> list[str]:
        """Return the damage that SQLite itself finds in the file."""
        rows: Any = _translate_errors(lambda: self._db.execute("PRAGMA quick_check(5)").fetchall(), self.path)
        return [text for (text,) in rows if text != "ok"]

    def _after_commit(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return 0


class _Checkpointer:
    """Runs checkpoints in a thread with a connection of its own."""

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
                continue  # busy, or the disk is full: the writers will report that themselves
        db.close()


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
            f"{path} is a database of another program", hint="name another file with --frontier"
        )
    version: Any = db.execute("PRAGMA user_version").fetchall()[0][0]
    for number, sql in pending("sqlite/schema.sql", version, str(path)):
        with db:
            db.execute(sql)
            db.execute(f"PRAGMA user_version={number}")
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")


def schema_of(path: Path) -> int:
    """Return the schema number of a file; 0 if it does not exist or is empty."""
    if not path.is_file() or not path.stat().st_size:
        return 0

    def read() -> int:
        db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return int(db.pragma("user_version"))
        finally:
            db.close()

    return _translate_errors(read, path)


def _translate_errors(work: Callable[[], T], path: Path) -> T:
    """Run `work`, and turn errors of SQLite into sentences with a way out."""
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
            hint="restore a backup, or move the file away and start with a new one",
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
