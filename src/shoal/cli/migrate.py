"""`shoal migrate`."""

from __future__ import annotations

from shoal.cli.common import OK, run, shared
from shoal.cli.options import Frontier, Json
from shoal.cli.output import emit, say


def migrate(*, frontier: Frontier = None, json: Json = False) -> int:
    """Bring the frontier's store up to this release, and say what was done.

    Makes the store if there is none. Doing it twice changes nothing. A store of a newer release is
    left alone and refused.
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
        say(f"{where} was made: schema {after}")
    else:
        say(f"{where} was brought from schema {before} to {after}")
    return OK
