"""Opens frontiers and brokers by the scheme of their address.

Two tables have the built-in ones, which are imported when they are needed; other schemes are looked up among
installed packages (`plugins`). To add one: docs/guides/extending.md.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, Protocol, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from shoal import plugins
from shoal.addresses import HINT, clear, lower_scheme, shown
from shoal.dispatch.port import Dispatch
from shoal.errors import (
    DispatchError,
    DispatchRefused,
    FrontierUnreachable,
    MissingExtra,
    NoFrontier,
    UsageError,
)
from shoal.events import Watcher, ignore
from shoal.frontier.port import Backend
from shoal.politeness.pacing import backoff

__all__ = [
    "DEFAULT_FRONTIER",
    "FrontierKind",
    "OpenDispatch",
    "OpenFrontier",
    "Reach",
    "broker_place",
    "file_of",
    "in_process",
    "migrate",
    "on_server",
    "open_dispatch",
    "open_frontier",
    "overlooked",
    "place",
    "reach_dispatch",
    "reach_frontier",
    "shown",
]

T = TypeVar("T")

DEFAULT_FRONTIER = "sqlite:///.shoal/shoal.db"

Reach = Literal["process", "machine", "machines"]
"""Which processes can open the same frontier: this one, all on this machine, or all on any machine."""


class OpenFrontier(Protocol):
    async def __call__(self, address: str, *, create: bool) -> Backend:
        """Opens the frontier at an address. Without `create`, raises NoFrontier if it does not exist."""
        ...


class OpenDispatch(Protocol):
    def __call__(
        self, address: str, queues: Collection[str], *, prefetch: int, fast: Collection[str], watch: Watcher
    ) -> Dispatch:
        """Returns the dispatch at an address. It receives from `queues`, at most `prefetch` messages of each
        at a time; messages of `fast` queues are finished on delivery. It connects on first use."""
        ...


@dataclass(frozen=True, slots=True)
class FrontierKind:
    """A kind of frontier, by the scheme of its address."""

    open: OpenFrontier
    reach: Reach = "machines"
    server: str = ""
    """The name of its server, for messages."""
    migrate: Callable[[str], Awaitable[tuple[int, int]]] | None = None
    """Upgrades the store at an address to this release; returns its schema before (0: it did not exist) and
    after. None: opening it is enough."""


VARIABLES = {
    "REDIS_HOST": ("localhost", "the frontier `redis://` or `rediss://`"),
    "REDIS_PORT": ("6379", "the frontier `redis://` or `rediss://`"),
    "REDIS_DB": ("0", "the frontier `redis://` or `rediss://`"),
    "REDIS_PASSWORD": ("", "the frontier `redis://` or `rediss://`"),
    "RABBITMQ_HOST": ("localhost", "the dispatch `amqp://` or `amqps://`"),
    "RABBITMQ_PORT": ("5672; 5671 with TLS", "the dispatch `amqp://` or `amqps://`"),
    "RABBITMQ_USER": ("guest", "the dispatch `amqp://` or `amqps://`"),
    "RABBITMQ_PASSWORD": ("guest", "the dispatch `amqp://` or `amqps://`"),
    "RABBITMQ_VHOST": ("/", "the dispatch `amqp://` or `amqps://`"),
}
"""Variables that complete an address without a host: name, default, and the addresses they apply to."""


async def open_frontier(address: str = "", *, create: bool = True) -> Backend:
    """Opens the frontier at an address: `memory:`, `sqlite:///path` or a plain path to a file,
    `redis://host:port/0?prefix=name` (`rediss://` over TLS), `postgresql://user@host/database?schema=name`,
    or one whose scheme an installed package offers.

    With `create=False` nothing is created, and a store that does not exist raises NoFrontier. Only the
    default file counts as empty as long as it does not exist.
    """
    address, scheme = _read(address)
    return await _kind(scheme, address).open(address, create=create)


def file_of(address: str = "") -> Path | None:
    """Returns the file of a SQLite frontier, whether or not it exists; None for others. Raises UsageError."""
    address, scheme = _read(address)
    return _sqlite_path(address) if scheme == "sqlite" else None


async def reach_frontier(address: str = "", *, attempts: int, tell: Callable[[str], None]) -> Backend:
    """Opens a frontier like `open_frontier`, and retries while its server does not respond: `attempts` times
    in all, with increasing delays. `tell` gets each failed attempt. Errors that waiting does not fix (a wrong
    password, a damaged file) are raised at once."""
    frontier, attempt = await _patiently(lambda: open_frontier(address), FrontierUnreachable, attempts, tell)
    if attempt > 1:
        full, scheme = _read(address)
        where = shown(full).partition("://")[2].partition("/")[0].rpartition("@")[2]
        tell(f"Connected to {_kind(scheme, full).server or scheme} on attempt {attempt} ({where})")
    return frontier


def on_server(address: str) -> bool:
    """Whether workers on other machines can share the frontier. Raises UsageError."""
    return _reach(address) == "machines"


def in_process(address: str) -> bool:
    """Whether no other process can share the frontier. Raises UsageError."""
    return _reach(address) == "process"


def place(address: str) -> str:
    """Returns the address of a frontier for messages: in full, without a password."""
    return shown(_read(address)[0] if _scheme(address) in _SERVERS else address)


def broker_place(address: str) -> str:
    """Returns the address of a broker for messages: in full, without a password."""
    address = lower_scheme(address)
    return shown(_rabbit_address(address) if address.partition(":")[0] in ("amqp", "amqps") else address)


def open_dispatch(
    address: str,
    queues: Collection[str] = (),
    *,
    prefetch: int = 10,
    fast: Collection[str] = (),
    watch: Watcher = ignore,
) -> Dispatch:
    """Returns the dispatch at an address: `amqp://user:password@host:port/vhost?prefix=name` (`amqps://` over
    TLS), or one whose scheme an installed package offers. `amqp://` alone means the broker that the
    RABBITMQ_… variables name. It connects on first use."""
    address = lower_scheme(address)
    scheme = address.partition(":")[0]
    opens = _DISPATCHES.get(scheme) or (plugins.plugin(plugins.DISPATCHES, scheme) if scheme else None)
    if opens is None:
        hint = _ways("amqp://host", plugins.DISPATCHES)
        raise UsageError(f"unsupported broker address {shown(address)!r}", hint=hint)
    made: Dispatch = opens(address, queues, prefetch=prefetch, fast=fast, watch=watch)
    return made


async def reach_dispatch(
    dispatch: Dispatch, queues: Collection[str], *, attempts: int, tell: Callable[[str], None]
) -> None:
    """Waits for a broker that is still starting, as `reach_frontier` does, and checks that it has these
    queues."""
    _, attempt = await _patiently(lambda: dispatch.depths(queues), DispatchError, attempts, tell)
    if attempt > 1:
        tell(f"Connected to {(await dispatch.info()).partition(' ')[0]} on attempt {attempt}")


async def _patiently(
    reach: Callable[[], Awaitable[T]],
    away: type[FrontierUnreachable] | type[DispatchError],
    attempts: int,
    tell: Callable[[str], None],
) -> tuple[T, int]:
    """Returns the result of `reach`, retried while it raises `away`, and the number of the attempt."""
    for attempt in count(1):
        try:
            return await reach(), attempt
        except DispatchRefused:
            raise
        except away as error:
            if attempt >= attempts:
                message = f"{error}, tried {attempt} times" if attempt > 1 else str(error)
                raise away(message, hint=error.hint) from None  # the message names the server
            wait = backoff(attempt, base=0.5, cap=10.0, jitter=random.random())
            tell(f"Attempt {attempt} failed: {error}; again in {wait:.1f} s")
            await asyncio.sleep(wait)
    raise AssertionError("count() does not end")


async def migrate(address: str = "") -> tuple[int, int]:
    """Upgrades the store at an address to this release. Returns its schema number before (0: it did not
    exist) and after. Raises as `open_frontier` does, also if the store is too new."""
    address, scheme = _read(address)
    if scheme == "memory":
        raise UsageError(
            "a memory: frontier has no schema to upgrade", hint="name another one with --frontier"
        )
    kind = _kind(scheme, address)
    if kind.migrate is not None:
        return await kind.migrate(address)
    frontier = await kind.open(address, create=True)
    try:
        schema = (await frontier.info()).schema
    finally:
        await frontier.close()
    return schema, schema


def overlooked(address: str) -> tuple[str, str] | None:
    """Returns a remark and a hint if a variable names a server while the frontier is the default file: users
    of other systems expect that the variable selects it. None otherwise."""
    if address:
        return None
    if not _said("REDIS_HOST"):
        return None
    where = DEFAULT_FRONTIER.removeprefix("sqlite:///")
    return f"REDIS_HOST is set, but the frontier is {where}", "use Redis with --frontier redis://"


def _read(address: str) -> tuple[str, str]:
    """Returns an address in full, and its scheme."""
    address = lower_scheme(address or DEFAULT_FRONTIER)
    scheme = _scheme(address)
    if "://" not in address and scheme not in ("memory", *_SERVERS):
        address, scheme = f"sqlite:///{address}", "sqlite"
    if scheme in _SERVERS:
        if scheme in ("redis", "rediss"):
            address = _redis_address(address)
        _readable(address)
        if "://" not in address:
            raise _no_frontier(address)
    return address, scheme


def _scheme(address: str) -> str:
    return lower_scheme(address).partition(":")[0]


def _kind(scheme: str, address: str) -> FrontierKind:
    """What a scheme stands for. Raises UsageError if nothing here and no installed package knows it."""
    if scheme in _FRONTIERS:
        return _FRONTIERS[scheme]
    found = plugins.plugin(plugins.FRONTIERS, scheme, FrontierKind) if scheme else None
    if found is None:
        raise _no_frontier(address)
    return found if isinstance(found, FrontierKind) else FrontierKind(found)


def _reach(address: str) -> Reach:
    full, scheme = (address, _scheme(address)) if _scheme(address) in _SERVERS else _read(address)
    return _kind(scheme, full).reach


def _ways(built_in: str, group: str) -> str:
    """A hint: what is built in, what installed packages offer, and how to add one."""
    also = plugins.offered(group)
    more = f", or by an installed package {', '.join(also)}" if also else ""
    return f"use {built_in}{more}; a package can add one by the entry point group {group}"


def _readable(address: str) -> None:
    """Raises UsageError if the parts of an address are ambiguous."""
    if not clear(address):
        raise UsageError(f"cannot read the address {shown(address)}", hint=HINT)


def _sqlite_path(address: str) -> Path:
    parts = urlsplit(address)
    path = parts.path[1:]
    # sqlite:////abs is absolute, as everywhere. Most people who write sqlite:///tmp/x mean an absolute path
    # too, and it is read so if only that directory exists.
    if not Path(path).parent.exists() and Path(parts.path).parent.exists():
        path = parts.path
    if not path:
        raise UsageError(f"no file in frontier address {address!r}", hint="sqlite:///path/to/shoal.db")
    return Path(path)


@contextmanager
def _needed(extra: str) -> Iterator[None]:
    """Raises MissingExtra if the import in the body fails because that extra is not installed."""
    library, name = {"redis": ("redis", "Redis"), "postgres": ("asyncpg", "PostgreSQL")}[extra]
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise MissingExtra(f"the {name} frontier", extra) from None


def _no_frontier(address: str) -> UsageError:
    built_in = "sqlite:///path/to/shoal.db, memory:, redis://host or postgresql://host/database"
    hint = _ways(built_in, plugins.FRONTIERS)
    return UsageError(f"unsupported frontier address {shown(address)!r}", hint=hint)


def _redis_address(address: str) -> str:
    """Completes an address without a host from REDIS_HOST, _PORT, _DB and _PASSWORD; what the address has
    wins. An address with a host takes nothing from them: they belong to another server."""
    scheme, _, rest = address.partition(":")
    if rest.strip("/") and not rest.startswith("//"):
        return address
    try:
        parts = urlsplit(f"{scheme}:{rest if rest.strip('/') else '//'}")
    except ValueError:
        return address  # `_readable` reports it
    user, mark, server = parts.netloc.rpartition("@")
    host, _, port = server.partition(":")
    if host or (port and not port.isdecimal()):
        return address
    who = f"{user}{mark}"
    if not mark and (password := _said("REDIS_PASSWORD")):
        who = f":{quote(password, safe='')}@"
    host = _bracketed(_said("REDIS_HOST") or "localhost")
    port, db = port or _number("REDIS_PORT", "6379"), parts.path.strip("/") or _number("REDIS_DB", "0")
    return f"{scheme}://{who}{host}:{port}/{db}{'?' + parts.query if parts.query else ''}"


def _rabbit_address(address: str) -> str:
    """Completes an address that has at most options from RABBITMQ_HOST, _PORT, _USER, _PASSWORD and
    _VHOST."""
    scheme, _, rest = address.partition(":")
    if rest.strip("/") and not rest.startswith("//?"):
        return address
    user, password = _said("RABBITMQ_USER") or "guest", _said("RABBITMQ_PASSWORD") or "guest"
    host, vhost = _bracketed(_said("RABBITMQ_HOST") or "localhost"), _said("RABBITMQ_VHOST") or "/"
    port = _number("RABBITMQ_PORT", "5671" if scheme == "amqps" else "5672")
    who = f"{quote(user, safe='')}:{quote(password, safe='')}"
    options = rest.partition("?")[2]
    return f"{scheme}://{who}@{host}:{port}/{quote(vhost, safe='')}{'?' + options if options else ''}"


def _said(name: str) -> str:
    """Returns the value of another system's variable; an empty one counts as not set."""
    return os.environ.get(name, "")


def _number(name: str, default: str) -> str:
    value = _said(name) or default
    if not value.isdecimal():
        raise UsageError(f"{name}={value!r} is not a number", hint=f"write {name}={default}")
    return value


def _bracketed(host: str) -> str:
    """Returns an IPv6 address with brackets; other hosts as they are."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


# -- what is built in --------------------------------------------------------------------------


async def _open_memory(address: str, *, create: bool) -> Backend:
    from shoal.frontier.memory import MemoryFrontier

    return MemoryFrontier()


async def _open_sqlite(address: str, *, create: bool) -> Backend:
    from shoal.frontier.sqlite import SqliteFrontier

    path, options = _sqlite_path(address), parse_qs(urlsplit(address).query)
    if not create and not path.exists():
        if address == DEFAULT_FRONTIER:
            return await open_frontier("memory:")  # nothing was stored here yet: an empty frontier
        raise NoFrontier(path)
    return await SqliteFrontier.open(path, synchronous=options.get("synchronous", ["full"])[0])


async def _migrate_sqlite(address: str) -> tuple[int, int]:
    from shoal.frontier.sqlite import migrate

    return await migrate(_sqlite_path(address))


async def _open_redis(address: str, *, create: bool) -> Backend:
    with _needed("redis"):
        from shoal.frontier.redis import RedisFrontier
    return await RedisFrontier.open(address)


async def _migrate_redis(address: str) -> tuple[int, int]:
    with _needed("redis"):
        from shoal.frontier.redis import migrate
    return await migrate(address)


async def _open_postgres(address: str, *, create: bool) -> Backend:
    with _needed("postgres"):
        from shoal.frontier.postgres import PostgresFrontier
    return await PostgresFrontier.open(address, create=create)


async def _migrate_postgres(address: str) -> tuple[int, int]:
    with _needed("postgres"):
        from shoal.frontier.postgres import migrate
    return await migrate(address)


def _open_rabbitmq(
    address: str, queues: Collection[str], *, prefetch: int, fast: Collection[str], watch: Watcher
) -> Dispatch:
    try:
        from shoal.dispatch.rabbitmq import RabbitDispatch
    except ModuleNotFoundError as error:
        if error.name not in ("aiormq", "pamqp"):
            raise
        raise MissingExtra("dispatch by RabbitMQ", "rabbitmq") from None
    where = _rabbit_address(address)
    _readable(where)
    return RabbitDispatch(where, queues, prefetch=prefetch, fast=fast, watch=watch)


_REDIS = FrontierKind(_open_redis, server="Redis", migrate=_migrate_redis)
_POSTGRES = FrontierKind(_open_postgres, server="PostgreSQL", migrate=_migrate_postgres)
_FRONTIERS: dict[str, FrontierKind] = {
    "memory": FrontierKind(_open_memory, "process"),
    "sqlite": FrontierKind(_open_sqlite, "machine", migrate=_migrate_sqlite),
    "redis": _REDIS,
    "rediss": _REDIS,
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
}
_SERVERS = frozenset(scheme for scheme, kind in _FRONTIERS.items() if kind.server)
"""Schemes of the built-in frontiers that are servers."""
_DISPATCHES: dict[str, OpenDispatch] = {"amqp": _open_rabbitmq, "amqps": _open_rabbitmq}
