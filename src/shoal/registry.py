"""Names to things: which frontier an address means. Adapters are imported when asked for."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from shoal.errors import MissingExtra, UsageError
from shoal.frontier.port import Backend

DEFAULT_FRONTIER = "sqlite:///.shoal/shoal.db"


async def open_frontier(address: str = "", *, create: bool = True) -> Backend:
    """Open the frontier at an address: `memory:`, `sqlite:///path`, a plain path to a file, or
    `postgresql://user@host/database?schema=name`.

    Without `create` the default frontier is not made: while it does not exist, it is empty.
    """
    address = address or DEFAULT_FRONTIER
    if "://" not in address and not address.startswith("memory"):
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
