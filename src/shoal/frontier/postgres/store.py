"""The server: connections, migrations, transactions, notifications between processes, errors."""

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
"""PostgreSQL 13: older versions get no more fixes."""

CONNECTIONS = 4

CONNECT_LIMIT = 10.0
"""Seconds that connecting may take."""

IDLE_LIMIT = 5
"""Seconds after which the server ends a transaction whose worker is silent (stopped or cut off). All other
workers wait for it until then. A worker that was only slow runs its transaction again."""

PATIENCE = 60.0
"""Seconds that one statement may take, including the wait for locks."""

NUDGE_GAP = 0.005
"""Seconds between two notifications of one process, so that several commits share one."""

UNCOMMON = "55S01"
"""The error code of a function in the schema that found its case uncommon and undid its changes."""

_NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, epoch FROM tick"

_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "

_READING = "SET LOCAL enable_seqscan=on; SET LOCAL enable_hashjoin=on; SET LOCAL enable_mergejoin=on"

_COMMIT_LASTING = "SET LOCAL synchronous_commit TO DEFAULT; COMMIT"

_BROKEN = (
    ConnectionError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    # asyncpg raises this for a connection that the server has closed and nobody has read from since.
    asyncpg.InternalClientError,
)
"""Errors of a pooled connection that turned out to be dead: the server was restarted, or closed it."""

_GONE = (
    *_BROKEN,
    OSError,
    TimeoutError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """Transactions leave no session state behind, so returning a connection costs no round trip."""

    def get_reset_query(self) -> str:
        return ""


class PostgresStore:
    """One schema of one database, on which processes take turns."""

    def __init__(
        self, dsn: str, schema: str, shown: str, pool: asyncpg.Pool, clock: Clock | None, *, shared: bool
    ) -> None:
        self.shown = shown
        """The address without its password."""
        self.schema = schema
        self._dsn = dsn
        self._pool = pool
        self.shared = shared
        """Whether a pooler such as PgBouncer stands before the server."""
        self._local = _local(schema, shared=shared)
        self._clock = clock
        self._mutex = asyncio.Lock()
        self.memory = Memory()
        self._number = _number(schema)
        self._alone = f"SELECT pg_advisory_xact_lock({self._number})"
        self._together = f"SELECT pg_advisory_xact_lock_shared({self._number})"
        self._channel = f"shoal_{self._number & 0xFFFFFFFFFFFFFFFF:x}"
        self._name = os.urandom(8).hex()
        self._listener: asyncpg.Connection | None = None
        self._nudger: asyncio.Task[None] | None = None
        self._announced = asyncio.Event()
        self._news_unsent = False
        self.heard = asyncio.Event()
        """Set when this process or another one announces that work may have become claimable."""
        self.news = False
        """Whether this frontier has added or freed something since the last claim."""
        self._closed = False

    @classmethod
    async def open(cls, address: str, *, clock: Clock | None = None, create: bool = True) -> Self:
        """Connect to `postgresql://user@host/database?schema=shoal`, and create the schema if it does not
        exist. Without `create`, a missing schema is refused.

        Raises a FrontierError that names the problem. `clock` is for tests: it replaces the server's time.
        """
        dsn, schema, shown = _parse_address(address)
        async with translate_errors(shown):
            pool, shared, _ = await _connect(dsn, schema, shown, create=create)
        return cls(dsn, schema, shown, pool, clock, shared=shared)

    async def close(self) -> None:
        """Close all connections. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._nudger is not None:
            # It ends by itself after the last notification; cancelled, it could leave a connection open.
            self._announced.set()
            await asyncio.wait([self._nudger], timeout=5)
            self._nudger.cancel()
        if self._listener is not None:
            with contextlib.suppress(*_GONE, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._listener.close(timeout=5)
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
        """Run `work` in one transaction. If the caller is cancelled, `durable` work has either not begun or
        is committed; other work is undone if that is still possible.

        `together`: run beside other transactions as long as `work` can, and again, alone, when it cannot.
        `wakes`: afterwards something may be claimable that was not; other processes are notified.
        """
        task = asyncio.ensure_future(self._in_turn(work, durable, together))
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not durable:
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None and wakes:
                self.announce_news()
            raise
        if wakes:
            self.announce_news()
        return result

    async def _in_turn(self, work: Callable[[PostgresTx], Awaitable[T]], durable: bool, together: bool) -> T:
        async with self._mutex, translate_errors(self.shown):
            if together:
                try:
                    return await self._transact(work, durable, alone=False)
                except (NeedsAll, asyncpg.DeadlockDetectedError):
                    pass
            return await self._transact(work, durable, alone=True)

    async def _transact(self, work: Callable[[PostgresTx], Awaitable[T]], durable: bool, *, alone: bool) -> T:
        begin = "BEGIN; " if durable else "BEGIN; SET LOCAL synchronous_commit=off; "
        begin += self._local
        async with self._open_transaction(begin + (self._alone if alone else self._together)) as connection:
            tx = await self._make_tx(connection, self.memory, alone=alone)
            try:
                result = await work(tx)
                await connection.execute(_COMMIT_LASTING if tx.lasting else "COMMIT")
                if tx.wakes:
                    self.announce_news()
            except NeedsAll:
                raise  # a shared transaction creates nothing that could be remembered wrongly
            except BaseException:
                # The memory may hold rows that were not committed.
                self.memory.forget()
                raise
            return result

    async def call(self, sql: str, *values: Any, durable: bool = False) -> Any:
        """Call a function of the schema in one round trip. Returns its row, or None if it undid its changes.

        If the caller is cancelled, a `durable` call has changed either nothing or everything.
        """
        task = asyncio.ensure_future(self._call_once(sql, values))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not durable:
                task.cancel()
            await asyncio.wait([task])
            raise

    async def _call_once(self, sql: str, values: tuple[Any, ...]) -> Any:
        async with self._mutex, translate_errors(self.shown):
            at = self.test_time()
            if self.shared:
                async with self._open_transaction("BEGIN; " + self._local.removesuffix("; ")) as connection:
                    row = await _row(connection, sql, self._number, at, *values)
                    await connection.execute("COMMIT" if row is not None else "ROLLBACK")
                    return row
            connection = await self._pool.acquire()
            try:
                with _map_closed_connection():
                    return await _row(connection, sql, self._number, at, *values)
            except _BROKEN:
                # The server was restarted. If it had committed, the step-by-step path will find that.
                _drop(connection)
                return None
            finally:
                await self._pool.release(connection)

    async def read(self, work: Callable[[PostgresTx], Awaitable[T]]) -> T:
        """Run `work` on one snapshot, without a lock: readers never wait for writers."""
        async with translate_errors(self.shown):
            try:
                return await self._read_once(work)
            except _BROKEN:
                await self._pool.expire_connections()
                return await self._read_once(work)  # a read changes nothing: try again

    async def _read_once(self, work: Callable[[PostgresTx], Awaitable[T]]) -> T:
        async with self._open_transaction(_BEGIN_READ + self._local + _READING) as connection:
            result = await work(await self._make_tx(connection, Memory(), alone=False))
            await connection.execute("COMMIT")
            return result

    @contextlib.asynccontextmanager
    async def reading_connection(self) -> AsyncIterator[asyncpg.Connection]:
        """Provide a connection for one statement that only reads."""
        if self.shared:
            async with self._open_transaction(_BEGIN_READ + self._local.removesuffix("; ")) as connection:
                yield connection
                await connection.execute("COMMIT")
        else:
            async with self._pool.acquire() as connection:
                with _map_closed_connection():
                    yield connection

    @contextlib.asynccontextmanager
    async def _open_transaction(self, begin: str) -> AsyncIterator[asyncpg.Connection]:
        """Provide a connection inside a transaction, which is rolled back unless it was committed."""
        connection = await self._begin(begin)
        try:
            with _map_closed_connection():
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
                with _map_closed_connection():
                    await connection.execute(begin)
            except _BROKEN:
                _drop(connection)
                await self._pool.release(connection)
                if not again:
                    raise
                # The server was restarted: nothing has begun, so try a new connection. The others of the
                # pool are most likely dead as well.
                await self._pool.expire_connections()
                again = False
            except BaseException:
                # If BEGIN itself was cancelled, the transaction may have begun.
                await _undo(connection)
                await self._pool.release(connection)
                raise
            else:
                return connection

    async def _make_tx(self, connection: asyncpg.Connection, memory: Memory, *, alone: bool) -> PostgresTx:
        # A separate statement, so that its snapshot is newer than the lock.
        now, epoch = await connection.fetchrow(_NOW)
        if self._clock is not None:
            now = microseconds(self._clock())
        memory.check_epoch(epoch)
        return PostgresTx(connection, memory, now, alone=alone, shared=self.shared)

    def test_time(self) -> int | None:
        """Return the time of a test in microseconds, None for the server's time."""
        return None if self._clock is None else microseconds(self._clock())

    def announce_news(self) -> None:
        """Announce that work may have become claimable: here at once, to all other processes soon.

        This happens outside the transaction: the server serializes commits that notify over the whole
        cluster. If this process dies in between, the others check by themselves every second.
        """
        self.news = True
        self.heard.set()
        self._news_unsent = True
        self._announced.set()
        if self._nudger is None or self._nudger.done():
            self._nudger = asyncio.create_task(self._nudge())

    async def _nudge(self) -> None:
        while await self._announced.wait():
            self._announced.clear()
            if self._news_unsent:
                self._news_unsent = False
                try:
                    await self._pool.execute(f"NOTIFY {self._channel}, '{self._name}'")
                except (*_GONE, asyncpg.PostgresError, asyncpg.InterfaceError):
                    return  # the verbs will report the problem
            if self._closed:
                return
            await asyncio.sleep(NUDGE_GAP)

    async def listen(self) -> bool:
        """Listen to other processes. Returns whether listening has begun only now."""
        if self.shared or (self._listener is not None and not self._listener.is_closed()):
            return False  # behind a pooler there are no notifications, so workers check by themselves
        self._listener = await asyncpg.connect(self._dsn, **_options(self.schema, shared=False))
        await self._listener.add_listener(self._channel, self._hear)
        return True

    def _hear(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        if payload != self._name:
            self.heard.set()


async def _row(connection: asyncpg.Connection, sql: str, *values: Any) -> Any:
    """Return the row of a function, or None if it undid its changes."""
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
def _map_closed_connection() -> Iterator[None]:
    """Raise ConnectionResetError for a lost connection that asyncpg reports as wrong use: the pool takes a
    connection back by itself when it learns that it was closed, and then refuses every call on it."""
    try:
        yield
    except asyncpg.InterfaceError as error:
        if not str(error).endswith(("released back to the pool", "connection is closed")):
            raise
        raise ConnectionResetError("the connection was closed") from None


def _session(schema: str) -> dict[str, str]:
    """Return the session settings of a connection."""
    return {
        "search_path": schema,
        "jit": "off",
        "idle_in_transaction_session_timeout": f"{IDLE_LIMIT}s",
        "client_min_messages": "warning",
        # The statistics of a queue are wrong as soon as they are collected: it was empty, or full.
        # Every statement of a verb has an index it can use.
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "plan_cache_mode": "force_generic_plan",
    }


def _options(schema: str, *, shared: bool) -> dict[str, Any]:
    """Return the arguments of a new connection. `shared`: a pooler gives each transaction another session,
    so nothing can be set or prepared beforehand."""
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
    """Return the settings that each transaction must begin with if sessions are `shared`."""
    if not shared:
        return ""
    return "".join(f"SET LOCAL {name}='{value}'; " for name, value in _session(schema).items())


def _number(schema: str) -> int:
    """Return the number of a schema's advisory lock."""
    digest = hashlib.blake2b(f"shoal:{schema}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _parse_address(address: str) -> tuple[str, str, str]:
    """Return the address for asyncpg, the schema, and the address without its password."""
    parts = urlsplit(address)
    options = parse_qsl(parts.query)
    schema = dict(options).get("schema", "shoal")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema) or schema.startswith("pg_"):
        raise UsageError(f"bad schema name {schema!r}", hint="use small letters, digits and underscores")
    rest = urlencode([(name, value) for name, value in options if name != "schema"])
    dsn = urlunsplit((parts.scheme, parts.netloc, parts.path, rest, ""))
    return dsn, schema, shown_address(address)


async def migrate(address: str) -> tuple[int, int]:
    """Migrate the schema at `address` to this release. Returns its version before and after; 0 means that
    there was none. Several processes may do this at once."""
    dsn, schema, shown = _parse_address(address)
    async with translate_errors(shown):
        pool, _, versions = await _connect(dsn, schema, shown)
        await pool.close()
    return versions


async def _connect(
    dsn: str, schema: str, shown: str, *, create: bool = True
) -> tuple[asyncpg.Pool, bool, tuple[int, int]]:
    """Open a pool and migrate the schema. Returns the pool, whether it goes through a pooler, and the
    schema's version before and after."""
    for shared in (False, True):
        pool = asyncpg.create_pool(
            dsn,
            # Not even one: the pool would replace a lost connection by itself, even while it is being closed.
            min_size=0,
            max_size=CONNECTIONS,
            connection_class=_Connection,
            **_options(schema, shared=shared),
        )
        try:
            await pool
            await _greet(pool, dsn, shown)
            local = _local(schema, shared=shared)
            return pool, shared, await _migrate(pool, schema, shown, local, create=create)
        except asyncpg.PostgresError as error:
            pool.terminate()
            strange = "startup parameter" in str(error)
            if (shared and strange) or "unrecognized configuration parameter" in str(error):
                hint = (
                    "allowed after ?: schema=, the options of libpq (sslmode=…), and settings of the server"
                )
                raise UsageError(f"{shown} has an option that does not exist: {error}", hint=hint) from None
            # PgBouncer refuses startup parameters that it does not know: try again without them.
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


async def _greet(pool: asyncpg.Pool, dsn: str, shown: str) -> None:
    """Open the first connection, which stays in the pool. If another service answers at that port, the error
    says so."""
    try:
        async with pool.acquire():
            return
    except (OSError, asyncpg.ConnectionDoesNotExistError, asyncpg.InternalClientError) as error:
        parts = urlsplit(dsn)
        # A server that refuses TLS has said so itself. With several hosts, any of them may be the wrong one.
        if "SSL" in str(error) or "," in parts.netloc or not parts.hostname:
            raise
        if not await listens(parts.hostname, parts.port or 5432):
            raise
        raise FrontierUnreachable(
            f"{shown} accepts the connection, but does not answer as PostgreSQL does",
            hint="check the port: another service may be listening there",
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
            # Usually there is nothing to do, and finding that out needs no lock.
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
    """Return the version of the schema; None if there is none. Refuses one that is too new."""
    tables = await connection.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace=to_regnamespace($1) AND relkind IN ('r', 'p', 'v')",
        schema,
    )
    names = {row[0] for row in tables}
    if not names:
        return None
    if "shoal_version" not in names:
        raise FrontierError(
            f"schema {schema} of {shown} belongs to something else",
            hint="choose another schema with ?schema=name",
        )
    row = await connection.fetchrow(f"SELECT version, oldest FROM {schema}.shoal_version")
    version, oldest = row
    pending(SCHEMA, version, f"{shown} (schema {schema})", oldest=oldest)
    return int(version)


@contextlib.asynccontextmanager
async def translate_errors(shown: str) -> AsyncIterator[None]:
    """Turn errors of PostgreSQL into sentences with a way out. Passwords are never shown."""
    try:
        yield
    except asyncpg.DiskFullError:
        raise FrontierFull(
            f"no space left on the server of {shown}",
            hint="free some space and run again with --resume: nothing is lost",
        ) from None
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        raise FrontierError(
            f"{shown} refused the login: {error}", hint="check the user and password in the address"
        ) from None
    except asyncpg.InvalidCatalogNameError:
        raise FrontierError(
            f"{shown}: there is no such database", hint="create it with `createdb`, or check the address"
        ) from None
    except asyncpg.InsufficientPrivilegeError as error:
        raise FrontierError(
            f"{shown}: {error}",
            hint="run `shoal migrate` as a role that may create tables, or grant the missing privilege",
        ) from None
    except (asyncpg.ReadOnlySQLTransactionError, asyncpg.InvalidSchemaNameError) as error:
        raise FrontierError(
            f"{shown}: {error}", hint="check that the address names the primary server and its database"
        ) from None
    except asyncpg.TooManyConnectionsError as error:
        raise FrontierUnreachable(
            f"{shown} has no connections left: {error}",
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
            f"{shown}: {type(error).__name__}: {error}", hint="see the server's log for details"
        ) from error
    except asyncpg.InterfaceError as error:
        if isinstance(error, ValueError):
            raise  # no column can hold a value that we sent: a bug here, not a problem of the server
        raise FrontierUnreachable(
            f"{shown} cannot be reached: {error}", hint="check that the server runs", server=shown
        ) from None
