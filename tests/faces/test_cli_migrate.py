"""`shoal migrate` brings a store up to this release, says so, and does it once."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from shoal.frontier import migrate, sqlite
from shoal.frontier.migrate import migrations
from shoal.frontier.sqlite.store import APPLICATION_ID
from tests.rig import postgres_server, redis_server
from tests.rig.command import Shell

NEWEST = len(migrations("sqlite/schema.sql"))


def at_schema(path: Path, number: int) -> None:
    """A file as the release made it that knew so many migrations."""
    path.parent.mkdir(exist_ok=True)
    db = apsw.Connection(str(path))
    for _, sql in migrations("sqlite/schema.sql")[:number]:
        db.execute(sql)
    db.execute(f"PRAGMA user_version={number}")
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.close()


def test_a_store_is_made_once(shell: Shell) -> None:
    first = shell.run("migrate", "--json").json()
    assert (first["before"], first["after"], first["changed"]) == (0, NEWEST, True)
    second = shell.run("migrate", "--json").json()
    assert (second["before"], second["after"], second["changed"]) == (NEWEST, NEWEST, False)
    assert "is up to date" in shell.run("migrate").err


async def test_an_older_store_is_brought_up(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    at_schema(shell.db, NEWEST)
    more = f"\n-- migration {NEWEST + 1}: to come\nCREATE TABLE to_come(id INT);\n"
    newer = migrate.source("sqlite/schema.sql") + more
    monkeypatch.setattr(migrate, "source", lambda file: newer)
    assert await sqlite.migrate(shell.db) == (NEWEST, NEWEST + 1)
    assert await sqlite.migrate(shell.db) == (NEWEST + 1, NEWEST + 1)


def test_a_newer_store_is_left_alone(shell: Shell) -> None:
    at_schema(shell.db, NEWEST)
    db = apsw.Connection(str(shell.db))
    db.execute(f"PRAGMA user_version={NEWEST + 1}")
    db.close()
    ran = shell.run("migrate")
    assert ran.code == 4
    assert "this release knows" in ran.err and "upgrade shoal" in ran.err and "begin anew" in ran.err


def test_memory_has_nothing_to_migrate(shell: Shell) -> None:
    assert shell.run("migrate", "--frontier", "memory:").code == 2


@pytest.mark.skipif(not redis_server.available(), reason="redis-server is not installed")
def test_redis(shell: Shell) -> None:
    with redis_server.redis_server() as server:
        words = ("migrate", "--json", "--frontier", server.url)
        assert [shell.run(*words).json()["before"] for _ in range(2)] == [0, 1]


@pytest.mark.skipif(postgres_server.binaries() is None, reason="PostgreSQL is not installed")
def test_postgres(shell: Shell) -> None:
    with postgres_server.postgres_server() as address:
        words = ("migrate", "--json", "--frontier", address)
        newest = len(migrations("postgres/schema.sql"))
        assert [shell.run(*words).json()["before"] for _ in range(2)] == [0, newest]
