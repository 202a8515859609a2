"""`shoal migrate` brings a store up to this release, says so, and does it once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from shoal.frontier import migrate, sqlite
from shoal.frontier.migrate import migrations
from shoal.frontier.sqlite.store import APPLICATION_ID
from tests.rig.command import Ran

Shoal = Callable[..., Ran]
NEWEST = len(migrations("sqlite/schema.sql"))
DB = ".shoal/shoal.db"


def at_schema(path: Path, number: int) -> None:
    """A file as the release made it that knew so many migrations."""
    path.parent.mkdir(exist_ok=True)
    db = apsw.Connection(str(path))
    for _, sql in migrations("sqlite/schema.sql")[:number]:
        db.execute(sql)
    db.execute(f"PRAGMA user_version={number}")
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.close()


def test_a_store_is_made_once(shoal: Shoal) -> None:
    first = shoal("migrate", "--json").json
    assert (first["before"], first["after"], first["changed"]) == (0, NEWEST, True)
    second = shoal("migrate", "--json").json
    assert (second["before"], second["after"], second["changed"]) == (NEWEST, NEWEST, False)
    assert "is up to date" in shoal("migrate").err


async def test_an_older_store_is_brought_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_schema(place / DB, NEWEST)
    more = f"\n-- migration {NEWEST + 1}: to come\nCREATE TABLE to_come(id INT);\n"
    newer = migrate.source("sqlite/schema.sql") + more
    monkeypatch.setattr(migrate, "source", lambda file: newer)
    assert await sqlite.migrate(place / DB) == (NEWEST, NEWEST + 1)
    assert await sqlite.migrate(place / DB) == (NEWEST + 1, NEWEST + 1)


def test_a_newer_store_is_left_alone(shoal: Shoal, place: Path) -> None:
    at_schema(place / DB, NEWEST)
    db = apsw.Connection(str(place / DB))
    db.execute(f"PRAGMA user_version={NEWEST + 1}")
    db.close()
    ran = shoal("migrate")
    assert ran.code == 4
    assert (
        "this release only knows schemas up to" in ran.err
        and "upgrade shoal" in ran.err
        and "start with a new --frontier" in ran.err
    )


def test_memory_has_nothing_to_migrate(shoal: Shoal) -> None:
    assert shoal("migrate", "--frontier", "memory:").code == 2


def test_redis(shoal: Shoal, redis_url: str) -> None:
    words = ("migrate", "--json", "--frontier", redis_url)
    assert [shoal(*words).json["before"] for _ in range(2)] == [0, 1]


def test_postgres(shoal: Shoal, postgres_url: str) -> None:
    words = ("migrate", "--json", "--frontier", postgres_url)
    newest = len(migrations("postgres/schema.sql"))
    assert [shoal(*words).json["before"] for _ in range(2)] == [0, newest]
