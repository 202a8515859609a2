"""The Redis frontier keeps the whole contract, on a private server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from shoal.frontier.port import Backend
from shoal.frontier.redis import RedisFrontier
from shoal.testing.clock import FakeClock
from shoal.testing.contract import FrontierContract
from shoal.testing.harness import Harness
from shoal.testing.machine import machine_for
from tests.rig import shared
from tests.rig.redis_server import available

pytestmark = pytest.mark.skipif(not available(), reason="redis-server is not installed")


class RedisHarness:
    """A prefix of its own on the one server. The state machine has no fixtures, so it asks for it itself."""

    durable = True

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._handles: list[Backend] = []
        self.url = f"{shared.redis().url}?prefix={uuid4().hex}"

    async def open(self) -> Backend:
        handle = await RedisFrontier.open(self.url, clock=self.clock)
        self._handles.append(handle)
        return handle

    async def reopen(self) -> Backend:
        await self.close()
        return await self.open()

    async def close(self) -> None:
        while self._handles:
            await self._handles.pop().close()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock()


class TestRedis(FrontierContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        harness = RedisHarness()
        yield harness
        await harness.close()


TestRedisMachine = machine_for(RedisHarness, lives=15)
