"""The dispatch inside one process passes the contract of dispatches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import pytest

from shoal.dispatch.port import Dispatch
from shoal.testing.dispatch import SHORT, SHORT_TTL, DispatchContract, DispatchHarness
from shoal.testing.local_dispatch import Exchange, LocalDispatch


class LocalHarness:
    def __init__(self) -> None:
        self.exchange = Exchange(ttls={SHORT: SHORT_TTL})

    async def open(
        self, queues: Collection[str] = (), *, prefetch: int = 10, fast: Collection[str] = ()
    ) -> Dispatch:
        return LocalDispatch(self.exchange, queues, prefetch=prefetch, fast=fast)

    async def cut(self, handle: Dispatch) -> None:
        await handle.close()

    async def failed_urls(self) -> list[str]:
        letters, self.exchange.letters = self.exchange.letters, []
        return [letter.request.url for letter in letters]

    async def rubbish(self, queue: str, body: bytes) -> None:
        pytest.skip("what is in this process is never rubbish")


class TestLocal(DispatchContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[DispatchHarness]:
        harness = LocalHarness()
        yield harness
        for handle in list(harness.exchange.handles):
            await handle.close()
