"""Names to things: which frontier an address means. Adapters are imported when asked for."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from shoal.errors import MissingExtra, UsageError
from shoal.frontier.port import Backend

DEFAULT_FRONTIER = "sqlite:///.shoal/shoal.db"


async def open_frontier(address: str = "", *, create: bool = True) -> Backend:
    """Open the frontier at an address: `memory:`, `sqlite:///path` or a plain path to a file,
    `redis://host:port/0?prefix=name` (`rediss://` over TLS), or
    `postgresql://user@host/database?schema=name`.

    Without `create` the default frontier is not made: while it does not exist, it is empty.
    """
    address = address or DEFAULT_FRONTIER
    if "://" not in address and address.partition(":")[0] not in ("memory", "redis"):
        address = f"sqlite:///{address}"
    scheme = address.partition(":")[0]
    if scheme == "memory":
        from shoal.frontier.memory import MemoryFrontier

        return MemoryFrontier()
    if scheme == "sqlite":
        from shoal.frontier.sqlite import SqliteFrontier

        parts = urlsplit(address)
        options = parse_qs(parts.query)
        path = parts.path[1:]
        # sqlite:////abs is absolute as everywhere; sqlite:///tmp/x is meant absolute by most
        # people who write it, and is taken so when only that folder exists.
        if not Path(path).parent.exists() and Path(parts.path).parent.exists():
            path = parts.path
        if not path:
            raise UsageError(f"no file in frontier address {address!r}", hint="sqlite:///path/to/shoal.db")
        if not create and address == DEFAULT_FRONTIER and not _exists(path):
            return await open_frontier("memory:")  # nothing was ever done here: an empty one
        return await SqliteFrontier.open(Path(path), synchronous=options.get("synchronous", ["full"])[0])
    if scheme in ("redis", "rediss"):
        if address.rstrip("/") in ("redis:", "redis"):
            address = _redis_address()
        try:
            from shoal.frontier.redis import RedisFrontier
        except ModuleNotFoundError:
            raise MissingExtra("the Redis frontier", "redis") from None
        return await RedisFrontier.open(address)
    if scheme in ("postgresql", "postgres"):
        try:
            from shoal.frontier.postgres import PostgresFrontier
        except ModuleNotFoundError as error:
            if error.name != "asyncpg":
                raise
            raise MissingExtra("the PostgreSQL frontier", "postgres") from None
        return await PostgresFrontier.open(address)
    raise UsageError(f"no frontier for address {address!r}", hint="use sqlite:///path/to/shoal.db or memory:")


def _exists(path: str) -> bool:
    return Path(path).exists()


def _redis_address() -> str:
    """`redis://` alone: the server that REDIS_HOST, _PORT, _DB and _PASSWORD name."""
    said = os.environ.get
    password = f":{quote(said('REDIS_PASSWORD', ''), safe='')}@" if said("REDIS_PASSWORD") else ""
    host, port, db = said("REDIS_HOST", "localhost"), said("REDIS_PORT", "6379"), said("REDIS_DB", "0")
    return f"redis://{password}{host}:{port}/{db}"


def shown(address: str) -> str:
    """An address as people may see it: without its password."""
    parts = urlsplit(address)
    if parts.password is None:
        return address
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")).geturl()
