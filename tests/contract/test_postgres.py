"""The PostgreSQL frontier keeps the whole contract."""

from __future__ import annotations

import atexit
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import cache
from itertools import count

import asyncpg
import pytest

from shoal.frontier.port import Backend
from shoal.frontier.postgres import PostgresFrontier
from shoal.testing.clock import FakeClock
from shoal.testing.contract import FrontierContract
from shoal.testing.harness import Harness
from shoal.testing.machine import machine_for
from shoal.testing.postgres_server import binaries, postgres_server

pytestmark = pytest.mark.skipif(binaries() is None, reason="PostgreSQL's server programs are not installed")

_number = count(1)


@cache
def server() -> str:
    """One server for all tests of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(postgres_server())


class PostgresHarness:
    """A schema of its own."""

    durable = True

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._schema = f"contract_{next(_number)}"
        self._handles: list[Backend] = []
        self.url = f"{server()}?schema={self._schema}"

    async def open(self) -> Backend:
        handle = await PostgresFrontier.open(self.url, clock=self.clock)
        self._handles.append(handle)
        return handle

    async def reopen(self) -> Backend:
        await self._close_handles()
        return await self.open()

    async def close(self) -> None:
        await self._close_handles()
        connection = await asyncpg.connect(server())
        await connection.execute(f"DROP SCHEMA IF EXISTS {self._schema} CASCADE")
        await connection.close()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock()

    async def _close_handles(self) -> None:
        while self._handles:
            await self._handles.pop().close()


class TestPostgres(FrontierContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        harness = PostgresHarness()
        yield harness
        await harness.close()


TestPostgresMachine = machine_for(PostgresHarness)
