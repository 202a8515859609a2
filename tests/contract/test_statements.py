"""The statements that SQLite and PostgreSQL share: both understand each, and the hot ones have an index."""

from __future__ import annotations

import re
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from shoal.frontier.postgres import PostgresFrontier
from shoal.frontier.sql import statements
from shoal.frontier.sql.statements import Statement
from shoal.frontier.sqlite import SqliteFrontier
from tests.rig.postgres_server import PostgresServer

HOT = [
    "JOB",
    "JOBS_BY_NAME",
    "JOBS_BY_ID",
    "JOB_NAMES",
    "LANE_IDS",
    "LANES",
    "LIVE_STREAMS",
    "TOP_PRIORITIES",
    "STREAM",
    "LINES",
    "LINES_AT",
    "LINES_ON",
    "ACTIVATE",
    "STEP_LINES",
    "FORGET_KEYS",
    "EXPIRE_WAITING",
    "EXPIRE_DELAYED",
    "PROMOTE",
    "EXTEND",
    "TAKE",
    "TRAVELLING",
    "SPREAD",
    "NOTE",
    "CHANGE_NOTE",
    "ITEM_LOG",
]
"""Run by verbs or by every visit: their cost must not grow with what is stored."""


def every_statement() -> Iterator[tuple[str, Statement]]:
    for name, value in vars(statements).items():
        if isinstance(value, Statement):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}[{k}]", each) for k, each in value.items() if isinstance(each, Statement))


EVERY = dict(every_statement())


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[apsw.Connection]:
    frontier = await SqliteFrontier.open(tmp_path / "a.db")
    yield frontier._store._db
    await frontier.close()


@pytest.mark.parametrize("name", EVERY)
async def test_sqlite_accepts_every_statement(name: str, file: apsw.Connection) -> None:
    assert plan(file, EVERY[name])


@pytest.mark.parametrize("name", HOT)
async def test_sqlite_has_an_index_for_every_statement(name: str, file: apsw.Connection) -> None:
    steps = plan(file, EVERY[name])
    # An array of parameters is read whole, of course.
    assert not [step for step in steps if step.startswith("SCAN") and "VIRTUAL TABLE" not in step], steps


def plan(db: apsw.Connection, statement: Statement) -> list[str]:
    text = statement.sqlite
    most = max(map(int, re.findall(r"\?(\d+)", text)), default=0)
    many = apsw.carray(array("q", [1]))
    values: list[Any] = [many if f"carray(?{number})" in text else 1 for number in range(1, most + 1)]
    return [str(row[3]) for row in db.execute(f"EXPLAIN QUERY PLAN {text}", values)] or ["no step"]


async def test_postgres_accepts_every_statement_and_has_an_index(shared_postgres: PostgresServer) -> None:
    import asyncpg

    url = shared_postgres.address
    frontier = await PostgresFrontier.open(f"{url}?schema=plans")
    await frontier.close()
    connection = await asyncpg.connect(url, server_settings={"search_path": "plans", "enable_seqscan": "off"})
    try:
        for name, statement in EVERY.items():
            prepared = await connection.prepare(statement.postgres)
            if name not in HOT:
                continue
            kinds = [parameter.name for parameter in prepared.get_parameters()]
            explained = await prepared.explain(*map(example, kinds))
            assert "Seq Scan" not in str(explained), (name, explained)
    finally:
        await connection.close()


def example(kind: str) -> Any:
    one: Any = {"text": "a", "bytea": b"a", "bool": True}.get(kind.removesuffix("[]"), 1)
    return [one] if kind.endswith("[]") else one
