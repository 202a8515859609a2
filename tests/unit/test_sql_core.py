"""What SQLite and PostgreSQL share, without a database."""

from __future__ import annotations

import asyncio

import pytest

from shoal.frontier.sql.statements import same
from shoal.frontier.sql.tx import Memory
from shoal.frontier.sqlite.tx import run_now


def test_a_verb_runs_to_its_end_at_once() -> None:
    async def inner() -> int:
        return 1

    async def verb() -> int:
        return await inner() + 1

    assert run_now(verb()) == 2


def test_a_verb_that_would_wait_is_refused() -> None:
    ended = []

    async def verb() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match="waits for something"):
        run_now(verb())
    assert ended == [True], "nothing of it is left behind"


def test_an_error_of_a_verb_is_raised_unchanged() -> None:
    async def verb() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_now(verb())


@pytest.mark.parametrize(
    ("postgres", "sqlite"),
    [
        ("a=$1 AND b=$2", "a=?1 AND b=?2"),
        ("id=ANY($1::bigint[])", "id IN carray(?1)"),
        ("$1::text IS NULL OR name=$1", "?1 IS NULL OR name=?1"),
        ("greatest(a, b)", "max(a, b)"),
        ("starts_with(worker, '>')", "substr(worker, 1, 1)='>'"),
        ("SELECT 1 FROM lane ORDER BY id FOR NO KEY UPDATE", "SELECT 1 FROM lane ORDER BY id"),
    ],
)
def test_statements_are_translated_for_sqlite(postgres: str, sqlite: str) -> None:
    assert same(postgres) == (sqlite, postgres, ())


def test_another_epoch_forgets_lines_and_specs_but_no_names() -> None:
    memory = Memory()
    memory.check_epoch(1)
    memory.lane_ids["h.example"] = 7
    memory.started.add(3)
    memory.check_epoch(1)
    assert memory.lane_ids == {"h.example": 7}
    memory.check_epoch(2)
    assert (memory.lane_ids, memory.started, memory.lines, memory.specs) == ({"h.example": 7}, {3}, {}, {})
