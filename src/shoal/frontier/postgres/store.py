"""The server: connecting, migrating, transactions, news between processes, errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from shoal.addresses import HINT, listens
from shoal.addresses import shown as shown_address
from shoal.clock import Clock
from shoal.errors import FrontierError, FrontierFull, FrontierUnreachable, NoFrontier, UsageError
from shoal.frontier.migrate import migrations, oldest_after, pending
from shoal.frontier.postgres.tx import PostgresTx
from shoal.frontier.rules import microseconds
from shoal.frontier.sql.tx import Memory, NeedsAll

T = TypeVar("T")

SCHEMA = "postgres/schema.sql"

OLDEST = 130000
"""PostgreSQL 13: older ones get no more repairs."""

CONNECTIONS = 4

CONNECT_LIMIT = 10.0
"""Seconds that making a connection may take."""

IDLE_LIMIT = 5
"""Seconds after which the server ends a transaction whose worker says nothing (stopped, cut off): until
then everybody else waits for it. Who only was slow begins again."""

PATIENCE = 60.0
"""Seconds that one statement may take, waiting for its turn included."""

NUDGE_GAP = 0.005
"""Seconds between two notifications of one process: several commits share one."""

UNCOMMON = "55S01"
"""A function of the schema noticed that its case is not the common one, and undid what it did."""

_NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, epoch FROM tick"

_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "

_READING = "SET LOCAL enable_seqscan=on; SET LOCAL enable_hashjoin=on; SET LOCAL enable_mergejoin=on"

_COMMIT_LASTING = "SET LOCAL synchronous_commit TO DEFAULT; COMMIT"

_BROKEN = (
    ConnectionError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    # What asyncpg says of a connection whose end has arrived but was not yet noticed.
    asyncpg.InternalClientError,
)
"""A connection from the pool turned out to be dead: the server was restarted, or ended it."""

_GONE = (
    *_BROKEN,
    OSError,
    TimeoutError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """Our transactions leave nothing behind, so giving a connection back costs no round trip."""

    def get_reset_query(self) -> str:
        return ""


class PostgresStore:
    """One schema of one database, and the turns that processes take on it."""

    def __init__(
        self, dsn: str, schema: str, shown: str, pool: asyncpg.Pool, clock: Clock | None, *, shared: bool
    ) -> None:
        self.shown = shown
        """The address without its password."""
        self.schema = schema
        self._dsn = dsn
        self._pool = pool
        self.shared = shared
        """A pooler such as PgBouncer is between us and the server."""
        self._local = _local(schema, shared=shared)
        self._clock = clock
        self._mutex = asyncio.Lock()
        self.memory = Memory()
        self._number = _number(schema)
        self._alone = f"SELECT pg_advisory_xact_lock({self._number})"
        self._together = f"SELECT pg_advisory_xact_lock_shared({self._number})"
        self._channel = f"shoal_{self._number & 0xFFFFFFFFFFFFFFFF:x}"
        self._name = os.urandom(8).hex()
        self._ear: asyncpg.Connection | None = None
        self._nudger: asyncio.Task[None] | None = None
        self._said = asyncio.Event()
        self._untold = False
        self.heard = asyncio.Event()
        """Set when another process said, or this one did, that work may have become claimable."""
        self.news = False
        """Something was added or freed through this very frontier since the last claim."""
        self._closed = False

    @classmethod
    async def open(cls, address: str, *, clock: Clock | None = None, create: bool = True) -> Self:
        """Connect to `postgresql://user@host/database?schema=shoal`; make the schema if need be. Without
        `create`, one that does not exist is refused.

        Raises a FrontierError that says what is wrong. `clock` is for tests: its time instead of
        the server's.
        """
        dsn, schema, shown = _parts(address)
        async with translated(shown):
            pool, shared, _ = await _connected(dsn, schema, shown, create=create)
        return cls(dsn, schema, shown, pool, clock, shared=shared)

    async def close(self) -> None:
        """Give back every connection. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._nudger is not None:
            # It ends by itself, having told the last news; cancelled, it could leave a connection open.
            self._said.set()
            await asyncio.wait([self._nudger], timeout=5)
            self._nudger.cancel()
        if self._ear is not None:
            with contextlib.suppress(*_GONE, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._ear.close(timeout=5)
        try:
            await asyncio.wait_for(self._pool.close(), 10)
        except (*_GONE, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._pool.terminate()

    async def write(
        self,
        work: Callable[[PostgresTx], Awaitable[T]],
        *,
        durable: bool = False,
        wakes: bool = False,
        together: bool = False,
    ) -> T:
        """Run `work` in one transaction. A cancelled caller either never began or, where the work is
        `durable`, has committed; other work of his is undone if it still can be.

        `together`: side by side with others as long as `work` can; it is run again, alone, when it
        cannot. `wakes`: afterwards something may be claimable that was not; other processes hear
        of it.
        """
        task = asyncio.ensure_future(self._in_turn(work, durable, together))
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not durable:
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None and wakes:
                self.tell()
            raise
        if wakes:
            self.tell()
        return result

    async def _in_turn(self, work: Callable[[PostgresTx], Awaitable[T]], durable: bool, together: bool) -> T:
        async with self._mutex, translated(self.shown):
            if together:
                try:
                    return await self._transact(work, durable, alone=False)
                except (NeedsAll, asyncpg.DeadlockDetectedError):
                    pass
            return await self._transact(work, durable, alone=True)

    async def _transact(self, work: Callable[[PostgresTx], Awaitable[T]], durable: bool, *, alone: bool) -> T:
        begin = "BEGIN; " if durable else "BEGIN; SET LOCAL synchronous_commit=off; "
        begin += self._local
        async with self._begun(begin + (self._alone if alone else self._together)) as connection:
            tx = await self._transaction(connection, self.memory, alone=alone)
            try:
                result = await work(tx)
                await connection.execute(_COMMIT_LASTING if tx.lasting else "COMMIT")
                if tx.wakes:
                    self.tell()
            except NeedsAll:
                raise  # whoever shares makes nothing that could be remembered wrongly
            except BaseException:
                # What is remembered may come from what was not committed.
                self.memory.forget()
                raise
            return result

    async def call(self, sql: str, *values: Any, durable: bool = False) -> Any:
        """One function of the schema in one round trip: a row, or None when it took everything back.

        A cancelled caller has either changed nothing or, where it is `durable`, everything.
        """
        task = asyncio.ensure_future(self._called(sql, values))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not durable:
                task.cancel()
            await asyncio.wait([task])
            raise

    async def _called(self, sql: str, values: tuple[Any, ...]) -> Any:
        async with self._mutex, translated(self.shown):
            at = self.test_time()
            if self.shared:
                async with self._begun("BEGIN; " + self._local.removesuffix("; ")) as connection:
                    row = await _row(connection, sql, self._number, at, *values)
                    await connection.execute("COMMIT" if row is not None else "ROLLBACK")
                    return row
            connection = await self._pool.acquire()
            try:
                with _noticed():
                    return await _row(connection, sql, self._number, at, *values)
            except _BROKEN:
                # The server was restarted since. Should it have committed, the long way will see that.
                _drop(connection)
                return None
            finally:
                await self._pool.release(connection)

    async def read(self, work: Callable[[PostgresTx], Awaitable[T]]) -> T:
        """Run `work` on one snapshot, without a lock: readers never wait for writers."""
        async with translated(self.shown):
            try:
                return await self._read_once(work)
            except _BROKEN:
                await self._pool.expire_connections()
                return await self._read_once(work)  # nothing has changed: ask again

    async def _read_once(self, work: Callable[[PostgresTx], Awaitable[T]]) -> T:
        async with self._begun(_BEGIN_READ + self._local + _READING) as connection:
            result = await work(await self._transaction(connection, Memory(), alone=False))
            await connection.execute("COMMIT")
            return result

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[asyncpg.Connection]:
        """A connection for one statement that only reads."""
        if self.shared:
            async with self._begun(_BEGIN_READ + self._local.removesuffix("; ")) as connection:
                yield connection
                await connection.execute("COMMIT")
        else:
            async with self._pool.acquire() as connection:
                with _noticed():
                    yield connection

    @contextlib.asynccontextmanager
    async def _begun(self, begin: str) -> AsyncIterator[asyncpg.Connection]:
        """A connection inside a transaction, rolled back unless it was committed."""
        connection = await self._begin(begin)
        try:
            with _noticed():
                yield connection
        except BaseException:
            await _undo(connection)
            raise
        finally:
            await self._pool.release(connection)

    async def _begin(self, begin: str) -> asyncpg.Connection:
        again = True
        while True:
            connection = await self._pool.acquire()
            try:
                with _noticed():
                    await connection.execute(begin)
            except _BROKEN:
                _drop(connection)
                await self._pool.release(connection)
                if not again:
                    raise
                # The server was restarted since: nothing has begun, so a new connection may try. The
                # others of the pool are most likely dead as well.
                await self._pool.expire_connections()
                again = False
            except BaseException:
                # Whether it began is not known when BEGIN itself was cancelled.
                await _undo(connection)
                await self._pool.release(connection)
                raise
            else:
                return connection

    async def _transaction(
        self, connection: asyncpg.Connection, memory: Memory, *, alone: bool
    ) -> PostgresTx:
        # A statement of its own: its snapshot is newer than the lock.
        now, epoch = await connection.fetchrow(_NOW)
        if self._clock is not None:
            now = microseconds(self._clock())
        memory.check_epoch(epoch)
        return PostgresTx(connection, memory, now, alone=alone, shared=self.shared)

    def test_time(self) -> int | None:
        """The time of tests in microseconds, None for the server's."""
        return None if self._clock is None else microseconds(self._clock())

    def tell(self) -> None:
        """Work may have become claimable: tell whoever waits here, and soon all other processes.

        Not inside the transaction: commits that notify are serialized by the server over the whole
        cluster. Should this process die in between, others look by themselves every second.
        """
        self.news = True
        self.heard.set()
        self._untold = True
        self._said.set()
        if self._nudger is None or self._nudger.done():
            self._nudger = asyncio.create_task(self._nudge())

    async def _nudge(self) -> None:
        while await self._said.wait():
            self._said.clear()
            if self._untold:
                self._untold = False
                try:
                    await self._pool.execute(f"NOTIFY {self._channel}, '{self._name}'")
                except (*_GONE, asyncpg.PostgresError, asyncpg.InterfaceError):
                    return  # the verbs themselves will say what is wrong
            if self._closed:
                return
            await asyncio.sleep(NUDGE_GAP)

    async def listen(self) -> bool:
        """Hear what other processes say. Tells whether that began only now."""
        if self.shared or (self._ear is not None and not self._ear.is_closed()):
            return False  # behind a pooler nothing can be heard: there it looks by itself
        self._ear = await asyncpg.connect(self._dsn, **_options(self.schema, shared=False))
        await self._ear.add_listener(self._channel, self._hear)
        return True

    def _hear(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        if payload != self._name:
            self.heard.set()


async def _row(connection: asyncpg.Connection, sql: str, *values: Any) -> Any:
    """A row, or None when the function took everything back."""
    try:
        return await connection.fetchrow(sql, *values)
    except asyncpg.PostgresError as error:
        if error.sqlstate in (UNCOMMON, asyncpg.DeadlockDetectedError.sqlstate):
            return None
        raise


async def _undo(connection: asyncpg.Connection) -> None:
    try:
        if not connection.is_closed():
            await connection.execute("ROLLBACK")
    except (*_GONE, asyncpg.PostgresError, asyncpg.InterfaceError):
        _drop(connection)


def _drop(connection: asyncpg.Connection) -> None:
    with contextlib.suppress(asyncpg.InterfaceError):
        connection.terminate()


@contextlib.contextmanager
def _noticed() -> Iterator[None]:
    """The pool takes a connection back by itself when it hears of its end, and then lets nobody touch
    it: what asyncpg calls a wrong use is a lost connection."""
    try:
        yield
    except asyncpg.InterfaceError as error:
        if not str(error).endswith(("released back to the pool", "connection is closed")):
            raise
        raise ConnectionResetError("the connection was closed") from None


def _session(schema: str) -> dict[str, str]:
    """How our connections are set up."""
    return {
        "search_path": schema,
        "jit": "off",
        "idle_in_transaction_session_timeout": f"{IDLE_LIMIT}s",
        "client_min_messages": "warning",
        # The statistics of a queue are wrong as soon as they are made: it was empty, or full.
        # Every statement of a verb has an index to go by.
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "plan_cache_mode": "force_generic_plan",
    }


def _options(schema: str, *, shared: bool) -> dict[str, Any]:
    """What a connection is made with. `shared`: behind a pooler, which gives another session to each
    transaction; there nothing can be set up or prepared beforehand."""
    options: dict[str, Any] = {"timeout": CONNECT_LIMIT, "command_timeout": PATIENCE}
    if shared:
        return options | {"statement_cache_size": 0, "server_settings": {"application_name": "shoal"}}
    session = {**_session(schema), "application_name": "shoal"}
    return options | {
        "statement_cache_size": 200,
        "max_cached_statement_lifetime": 0,
        "server_settings": session,
    }


def _local(schema: str, *, shared: bool) -> str:
    """What a transaction must say first where a session remembers nothing."""
    if not shared:
        return ""
    return "".join(f"SET LOCAL {name}='{value}'; " for name, value in _session(schema).items())


def _number(schema: str) -> int:
    """The advisory lock of a schema."""
    digest = hashlib.blake2b(f"shoal:{schema}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _parts(address: str) -> tuple[str, str, str]:
    """What asyncpg gets, the schema, and what people may see."""
    parts = urlsplit(address)
    options = parse_qsl(parts.query)
    schema = dict(options).get("schema", "shoal")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema) or schema.startswith("pg_"):
        raise UsageError(f"bad schema name {schema!r}", hint="use small letters, digits and underscores")
    rest = urlencode([(name, value) for name, value in options if name != "schema"])
    dsn = urlunsplit((parts.scheme, parts.netloc, parts.path, rest, ""))
    return dsn, schema, shown_address(address)


async def migrate(address: str) -> tuple[int, int]:
    """Bring the schema at `address` up to this release. Answers its version before and after;
    0 is nothing at all. Several may try at once."""
    dsn, schema, shown = _parts(address)
    async with translated(shown):
        pool, _, versions = await _connected(dsn, schema, shown)
        await pool.close()
    return versions


async def _connected(
    dsn: str, schema: str, shown: str, *, create: bool = True
) -> tuple[asyncpg.Pool, bool, tuple[int, int]]:
    """A pool on a schema that is up to date, whether it goes through a pooler, and the schema's
    version before and after."""
    for shared in (False, True):
        pool = asyncpg.create_pool(
            dsn,
            # Not even one: the pool would make a lost one again by itself, also while it is closed.
            min_size=0,
            max_size=CONNECTIONS,
            connection_class=_Connection,
            **_options(schema, shared=shared),
        )
        try:
            await pool
            await _greeted(pool, dsn, shown)
            local = _local(schema, shared=shared)
            return pool, shared, await _migrate(pool, schema, shown, local, create=create)
        except asyncpg.PostgresError as error:
            pool.terminate()
            strange = "startup parameter" in str(error)
            if (shared and strange) or "unrecognized configuration parameter" in str(error):
                hint = "after ? come schema=, what libpq knows (sslmode=…), and settings of the server"
                raise UsageError(f"{shown} has an option that does not exist: {error}", hint=hint) from None
            # PgBouncer does not know our settings and says so.
            if not strange:
                raise
        except (ValueError, OverflowError) as error:
            # asyncpg reads the address when it first connects. Only its own words are safe to repeat.
            pool.terminate()
            why = f": {error}" if isinstance(error, asyncpg.ClientConfigurationError) else ""
            raise UsageError(f"cannot read the address {shown}{why}", hint=HINT) from None
        except BaseException:
            pool.terminate()
            raise
    raise AssertionError("unreachable")


async def _greeted(pool: asyncpg.Pool, dsn: str, shown: str) -> None:
    """Make the first connection; it stays in the pool. Something else at that port is told as such."""
    try:
        async with pool.acquire():
            return
    except (OSError, asyncpg.ConnectionDoesNotExistError, asyncpg.InternalClientError) as error:
        parts = urlsplit(dsn)
        # One that refuses TLS has said so itself. Of several hosts any may be wrong.
        if "SSL" in str(error) or "," in parts.netloc or not parts.hostname:
            raise
        if not await listens(parts.hostname, parts.port or 5432):
            raise
        raise FrontierUnreachable(
            f"{shown} takes the connection, but does not answer as PostgreSQL does",
            hint="check the port: something else may listen there",
            server=shown,
        ) from None


async def _migrate(
    pool: asyncpg.Pool, schema: str, shown: str, local: str, *, create: bool
) -> tuple[int, int]:
    latest = len(migrations(SCHEMA))
    async with pool.acquire() as connection:
        async with connection.transaction():
            if local:
                await connection.execute(local)
            number = await connection.fetchval("SELECT current_setting('server_version_num')::int")
            if number < OLDEST:
                raise FrontierError(
                    f"{shown} runs PostgreSQL {number // 10000}", hint=f"use {OLDEST // 10000} or newer"
                )
            # In the common case nothing is to do, and no lock is worth asking that.
            version = await _version(connection, schema, shown)
            if version is not None and version >= latest:
                return version, version
            if version is None and not create:
                raise NoFrontier(f"{shown} (schema {schema})")
        async with connection.transaction():
            await connection.execute(f"{local}SELECT pg_advisory_xact_lock({_number(schema)})")
            version = await _version(connection, schema, shown)
            if version is None:
                if not await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema):
                    await connection.execute(f"CREATE SCHEMA {schema}")
                await connection.execute(
                    f"CREATE TABLE {schema}.shoal_version(version BIGINT NOT NULL, oldest BIGINT NOT NULL)"
                )
                await connection.execute(f"INSERT INTO {schema}.shoal_version VALUES(0, 0)")
            for step, sql in pending(SCHEMA, version or 0, shown):
                await connection.execute(sql)
                oldest = oldest_after(SCHEMA, step)
                await connection.execute(f"UPDATE {schema}.shoal_version SET version={step}, oldest={oldest}")
            return version or 0, latest


async def _version(connection: asyncpg.Connection, schema: str, shown: str) -> int | None:
    """The version of what is there; None when nothing is. Refuses what is too new for us."""
    tables = await connection.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace=to_regnamespace($1) AND relkind IN ('r', 'p', 'v')",
        schema,
    )
    names = {row[0] for row in tables}
    if not names:
        return None
    if "shoal_version" not in names:
        raise FrontierError(
            f"schema {schema} of {shown} holds something else", hint="choose another one with ?schema=name"
        )
    row = await connection.fetchrow(f"SELECT version, oldest FROM {schema}.shoal_version")
    version, oldest = row
    pending(SCHEMA, version, f"{shown} (schema {schema})", oldest=oldest)
    return int(version)


@contextlib.asynccontextmanager
async def translated(shown: str) -> AsyncIterator[None]:
    """What PostgreSQL says becomes what a person can use. Passwords are never shown."""
    try:
        yield
    except asyncpg.DiskFullError:
        raise FrontierFull(
            f"no space left on the server of {shown}",
            hint="free some space and run again with --resume: nothing is lost",
        ) from None
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        raise FrontierError(
            f"{shown} does not let us in: {error}", hint="check user and password in the address"
        ) from None
    except asyncpg.InvalidCatalogNameError:
        raise FrontierError(
            f"{shown}: there is no such database", hint="create it with `createdb`, or check the address"
        ) from None
    except asyncpg.InsufficientPrivilegeError as error:
        raise FrontierError(
            f"{shown}: {error}",
            hint="`shoal migrate` as a role that may create tables, or grant what is missing",
        ) from None
    except (asyncpg.ReadOnlySQLTransactionError, asyncpg.InvalidSchemaNameError) as error:
        raise FrontierError(
            f"{shown}: {error}", hint="check that the address names the primary server and its database"
        ) from None
    except asyncpg.TooManyConnectionsError as error:
        raise FrontierUnreachable(
            f"{shown} has no connection left: {error}",
            hint="raise max_connections, run fewer workers, or put PgBouncer in between",
            server=shown,
        ) from None
    except (TimeoutError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError) as error:
        raise FrontierUnreachable(
            f"{shown} did not answer in time{f': {error}' if str(error) else ''}",
            hint="look for locks and long transactions in pg_stat_activity, and at statement_timeout",
            server=shown,
        ) from None
    except _GONE as error:
        why = str(error) or type(error).__name__
        raise FrontierUnreachable(
            f"{shown} cannot be reached: {why}",
            hint="check that the server runs and that the address is right",
            server=shown,
        ) from None
    except asyncpg.PostgresError as error:
        raise FrontierError(
            f"{shown}: {type(error).__name__}: {error}", hint="the server's log tells more"
        ) from error
    except asyncpg.InterfaceError as error:
        if isinstance(error, ValueError):
            raise  # a value of ours that no column can hold: our mistake, not the server's
        raise FrontierUnreachable(
            f"{shown} cannot be reached: {error}", hint="check that the server runs", server=shown
        ) from None
