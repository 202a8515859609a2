"""The dispatch inside one process passes the contract of dispatches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence

import pytest

from shoal.dispatch.consumer import Consumer
from shoal.dispatch.port import Dispatch
from shoal.errors import DispatchError
from shoal.events import ignore
from shoal.frontier.memory import MemoryFrontier
from shoal.model import Dead, DeadLetter, Failure, JobSpec, Request
from shoal.testing.dispatch import SHORT, SHORT_TTL, DispatchContract, DispatchHarness
from tests.rig.local_dispatch import Exchange, LocalDispatch


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


class Reluctant(LocalDispatch):
    """A broker that takes its time to hear of failures, and at first does not want to."""

    refusals = 0
    begun: asyncio.Event

    async def report_dead(self, letters: Sequence[DeadLetter]) -> None:
        self.begun.set()
        await asyncio.sleep(0.1)
        if self.refusals:
            self.refusals -= 1
            raise DispatchError("not now")
        await super().report_dead(letters)


@pytest.mark.parametrize("refusals", [0, 1])
async def test_who_closes_tells_each_failure_once(refusals: int) -> None:
    exchange = Exchange()
    dispatch = Reluctant(exchange, ["q"])
    dispatch.refusals, dispatch.begun = refusals, asyncio.Event()
    frontier = MemoryFrontier()
    await frontier.open_job("j", JobSpec(gap=0.0, width=5))
    await frontier.add([Request(f"http://h.test/{n}", "j") for n in range(3)])
    leases = (await frontier.claim(3, worker="w", lease_seconds=30.0)).leases
    async with Consumer(frontier, dispatch, watch=ignore) as consumer:
        await consumer.settle([Dead(lease, Failure("http_404", "")) for lease in leases])
        await dispatch.begun.wait()
    assert sorted(letter.request.url for letter in exchange.letters) == [
        f"http://h.test/{n}" for n in range(3)
    ]
