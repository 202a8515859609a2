"""Errors of a task group leave it as one, on every Python that we support."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest

import shoal
from shoal import errors
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


def test_the_tree_on_top_of_the_errors_shows_each_of_them() -> None:
    shown = dict[str, str]()
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines()[2:]:
        if name := re.match(r"[│├└─ ]*", line):
            word = line[name.end() :].split("(", 1)[0].split(None, 1)[:1]
            if word:
                above = [*above[: name.end() // 4], word[0]]
                shown[word[0]] = above[-2] if len(above) > 1 else "Exception"
    there = {
        name: each.__bases__[0].__name__
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, Exception)
    }
    assert shown == there


def test_every_class_that_a_fetch_can_fail_with_is_in_the_table() -> None:
    named = {
        call.args[0].value
        for path in SOURCES.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "FetchError"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
    assert "robots" in named
    assert named <= errors.CLASSES.keys()
