"""Following the item log."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest

from shoal.errors import ExportError, FrontierUnreachable
from shoal.export.follow import BATCH, ItemLog, export_all, follow
from shoal.export.formats import exporter_for
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.notes import Cursor
from shoal.frontier.port import Catalog, Notes
from shoal.model import Item


class Saved(Cursor):
    """A cursor that remembers every position."""

    def __init__(self, notes: Notes, job: str, sink: str) -> None:
        super().__init__(notes, job, sink)
        self.all: list[int] = []

    async def save(self, position: int) -> None:
        self.all.append(position)
        await super().save(position)


class Log:
    """The item log of a frontier."""

    def __init__(self, count: int = 0) -> None:
        self.all: list[Item] = []
        self.cursor = Saved(MemoryFrontier().notes, "j", "s")
        self.grow(count)

    def grow(self, count: int) -> None:
        start = len(self.all) + 1
        self.all += [Item(n, json.dumps({"n": n}).encode()) for n in range(start, start + count)]

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        return [item for item in self.all if item.seq > after][:limit]


class Slow:
    """An exporter in memory whose writes take a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.seen: list[int] = []
        self.calls: list[str] = []
        self.writing = threading.Event()
        self.fail = False

    def open(self, seq: int) -> int:
        self.calls.append(f"open {seq}")
        return seq

    def write(self, items: Sequence[Item]) -> None:
        self.writing.set()
        time.sleep(self.seconds)
        if self.fail:
            raise ExportError("no space")
        self.seen += [item.seq for item in items]
        self.calls.append("written")

    def finish(self) -> bool:
        self.calls.append("finish")
        return True

    def close(self) -> None:
        self.calls.append("close")


async def test_everything_in_batches_and_the_cursor_follows() -> None:
    log, sink = Log(2 * BATCH + 5), Slow()
    assert await export_all(log, "j", sink, log.cursor) == 2 * BATCH + 5
    assert sink.seen == list(range(1, 2 * BATCH + 6))
    assert log.cursor.all == [BATCH, 2 * BATCH, 2 * BATCH + 5]
    assert sink.calls == ["open 0", *["written"] * 3, "finish", "close"]


async def test_items_that_come_while_following_and_just_before_the_end() -> None:
    log, sink, ended = Log(3), Slow(), asyncio.Event()
    following = asyncio.create_task(follow(log, "j", sink, cursor=log.cursor, ended=ended, poll=0.01))
    while len(sink.seen) < 3:
        await asyncio.sleep(0.005)
    log.grow(4)
    while len(sink.seen) < 7:
        await asyncio.sleep(0.005)
    log.grow(2)
    ended.set()
    assert await asyncio.wait_for(following, 5) == 9
    assert sink.seen == list(range(1, 10))
    assert "finish" not in sink.calls


async def test_the_end_is_noticed_without_waiting_for_the_poll() -> None:
    log, ended = Log(1), asyncio.Event()
    following = asyncio.create_task(follow(log, "j", Slow(), cursor=log.cursor, ended=ended, poll=60))
    await asyncio.sleep(0.05)
    ended.set()
    assert await asyncio.wait_for(following, 2) == 1


async def test_a_cancel_waits_for_the_batch_being_written() -> None:
    log, sink = Log(10), Slow(0.2)
    following = asyncio.create_task(follow(log, "j", sink, cursor=log.cursor, ended=asyncio.Event()))
    while not sink.writing.is_set():
        await asyncio.sleep(0.005)
    following.cancel()
    await asyncio.sleep(0.02)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert sink.calls[-1] == "written"
    assert log.cursor.all == []


async def test_a_write_that_fails_under_a_cancel_is_not_reported_as_lost() -> None:
    log, sink = Log(10), Slow(0.05)
    sink.fail = True
    following = asyncio.create_task(follow(log, "j", sink, cursor=log.cursor, ended=asyncio.Event()))
    while not sink.writing.is_set():
        await asyncio.sleep(0.005)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_a_failure_closes_and_does_not_move_the_cursor() -> None:
    log, sink = Log(10), Slow()
    sink.fail = True
    with pytest.raises(ExportError):
        await export_all(log, "j", sink, log.cursor)
    assert log.cursor.all == []
    assert sink.calls == ["open 0", "close"]


async def test_cancelled_follow_then_export_all_gives_each_item_once(tmp_path: Path) -> None:
    log, out = Log(2500), tmp_path / "o.jsonl"
    exporter = exporter_for(str(out), "j")
    following = asyncio.create_task(
        follow(log, "j", exporter, cursor=log.cursor, ended=asyncio.Event(), poll=0.01)
    )
    while not log.cursor.all:
        await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    exporter.close()
    log.grow(100)
    await export_all(log, "j", exporter_for(str(out), "j"), log.cursor)
    assert [json.loads(line)["n"] for line in out.read_bytes().splitlines()] == list(range(1, 2601))
    # Again to the same file: the frontier's cursor says "all done", the missing part says "from 0".
    assert await export_all(log, "j", exporter_for(str(out), "j"), log.cursor) == 2600


async def test_without_a_cursor_everything_is_written_each_time() -> None:
    log = Log(3)
    for _ in range(2):
        sink = Slow()
        assert await export_all(log, "j", sink, None) == 3
        assert sink.seen == [1, 2, 3]


def a_frontier_is_an_item_log(catalog: Catalog) -> ItemLog:
    """For the type checker: whoever has a frontier can follow it."""
    return catalog


class Failing(Log):
    """A log that cannot be read so often, and tells whoever waits for that."""

    def __init__(self, failures: float) -> None:
        super().__init__(3)
        self.failures = failures
        self.asked = 0
        self.often = asyncio.Event()

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        self.asked += 1
        if self.asked >= 20:
            self.often.set()
        if self.asked <= self.failures:
            raise FrontierUnreachable("it does not answer")
        return await super().items(job, after=after, limit=limit)


async def test_a_log_that_fails_is_asked_again_while_the_job_runs() -> None:
    log, sink, ended = Failing(20), Slow(), asyncio.Event()
    following = asyncio.create_task(
        follow(log, "j", sink, cursor=None, ended=ended, poll=0.001, give_up_after=0.0)
    )
    await asyncio.wait_for(log.often.wait(), 5)
    while len(sink.seen) < 3:
        await asyncio.sleep(0.001)
    ended.set()
    assert await asyncio.wait_for(following, 5) == 3


async def test_a_log_that_fails_after_the_job_is_told_of_and_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, ended = Failing(inf), asyncio.Event()
    ended.set()
    with pytest.raises(FrontierUnreachable):
        await follow(log, "j", Slow(), cursor=None, ended=ended, poll=0.001, give_up_after=0.05)
    assert log.asked > 2
    assert [each.getMessage() for each in caplog.records] == [
        "it does not answer; the export retries for 0.05 s"
    ]
