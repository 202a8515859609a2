"""The SQLite frontier keeps the whole contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shoal.frontier.port import Backend
from shoal.frontier.sqlite import SqliteFrontier
from shoal.testing.clock import FakeClock
from shoal.testing.contract import FrontierContract
from shoal.testing.harness import Harness
from shoal.testing.machine import machine_for


class SqliteHarness:
    """A file in a folder of its own. `synchronous=normal`: a test does not cut the power."""

    durable = True

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._folder = TemporaryDirectory(prefix="shoal-contract-")
        self._path = Path(self._folder.name) / "shoal.db"
        self._handles: list[Backend] = []
        self.url = f"sqlite:///{self._path}?synchronous=normal"

    async def open(self) -> Backend:
        handle = await SqliteFrontier.open(self._path, clock=self.clock, synchronous="normal")
        self._handles.append(handle)
        return handle

    async def reopen(self) -> Backend:
        await self._close_handles()
        return await self.open()

    async def close(self) -> None:
        await self._close_handles()
        self._folder.cleanup()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock()

    async def _close_handles(self) -> None:
        while self._handles:
            await self._handles.pop().close()


class TestSqlite(FrontierContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        harness = SqliteHarness()
        yield harness
        await harness.close()


TestSqliteMachine = machine_for(SqliteHarness, lives=15)
