"""The memory frontier keeps the contract, except for what only a disk can keep."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shoal.testing.contract import VolatileContract
from shoal.testing.harness import Harness, MemoryHarness
from shoal.testing.machine import machine_for


class TestMemory(VolatileContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        harness = MemoryHarness()
        yield harness
        await harness.close()


TestMemoryMachine = machine_for(MemoryHarness, lives=15)
