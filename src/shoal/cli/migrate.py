"""`shoal migrate`."""

from __future__ import annotations

from shoal.cli.common import OK, run, shared
from shoal.cli.options import Frontier, Json
from shoal.cli.output import emit, say


def migrate(*, frontier: Frontier = None, json: Json = False) -> int:
    """Upgrade the frontier's schema to this release.

    Creates the frontier if it does not exist. Doing it twice changes nothing. A frontier that a newer release
    has upgraded is not touched, and the command fails.
    """
    return run(lambda: _migrate(frontier, json=json))


async def _migrate(frontier: str | None, *, json: bool) -> int:
    from shoal.registry import DEFAULT_FRONTIER, place
    from shoal.registry import migrate as migrate_store

    address = shared(frontier=frontier).frontier
    before, after = await migrate_store(address)
    where = place(address or DEFAULT_FRONTIER)
    if json:
        emit({"frontier": where, "before": before, "after": after, "changed": before != after})
        return OK
    if not after:
        say(f"{where} keeps no number of its schema; it was opened, and is up to date")
    elif before == after:
        say(f"{where} is up to date: schema {after}")
    elif before == 0:
        say(f"{where} was created with schema {after}")
    else:
        say(f"{where} was upgraded from schema {before} to {after}")
    return OK
