"""Errors of a task group leave it as one, on every Python that we support."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import shoal
from shoal.errors import ExportError, ungrouped

SOURCES = Path(shoal.__file__).parent


async def failing(*errors: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    with ungrouped():
        async with asyncio.TaskGroup() as group:
            for error in errors:
                group.create_task(fail(error))


async def test_one_error_comes_out_bare() -> None:
    with pytest.raises(ExportError, match="no space") as caught:
        await failing(ExportError("no space"))
    assert caught.value.__suppress_context__


async def test_ours_counts_more_than_what_it_dragged_along() -> None:
    with pytest.raises(ExportError):
        await failing(RuntimeError("torn down"), ExportError("no space"))


async def test_groups_in_groups_are_opened() -> None:
    with pytest.raises(KeyError):
        await failing(ExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("a")])]))


async def test_cancellation_passes() -> None:
    async def endless() -> None:
        with ungrouped():
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.Event().wait())

    task = asyncio.create_task(endless())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_nothing_is_raised_out_of_except_star() -> None:
    """Python 3.11.2 (Debian 12) wraps it in a group again, and `except ShoalError` misses it."""
    raising = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        for block in ast.walk(ast.parse(path.read_text()))
        if isinstance(block, ast.TryStar)
        for node in ast.walk(block)
        if isinstance(node, ast.Raise)
    ]
    assert not raising, "use errors.ungrouped"
