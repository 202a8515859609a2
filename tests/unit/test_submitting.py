"""URLs on their way into a job: one batch is stored while the next is made, and never two at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from shoal.app import Session, session
from shoal.errors import FrontierUnreachable
from shoal.frontier.memory import MemoryFrontier
from shoal.model import Added, Request
from shoal.settings import load


class Slow(MemoryFrontier):
    """Takes batches one at a time, each only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[list[str]] = []
        self.inside = 0
        self.may = asyncio.Event()
        self.breaks_at = -1

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        self.inside += 1
        assert self.inside == 1, "two batches at once"
        try:
            await self.may.wait()
            if len(self.taken) == self.breaks_at:
                raise FrontierUnreachable("gone")
            self.taken.append([request.url for request in requests])
            return await super().add(requests)
        finally:
            self.inside -= 1


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Session, Slow]]:
    monkeypatch.setattr(session, "ADD_CHUNK", 10)
    monkeypatch.setattr(session, "BREATH", 2)
    async with Session.opened(load(frontier="memory:")) as opened:
        slow = Slow()
        opened.frontier = slow
        yield opened, slow


def numbered(count: int, asked: list[int]) -> Iterator[str]:
    for number in range(count):
        asked.append(number)
        yield f"http://h.example/{number}" if number % 7 else f"no url {number}"


async def test_the_next_batch_is_made_meanwhile(here: tuple[Session, Slow]) -> None:
    opened, slow = here
    job = await opened.open_job(opened.spec("site", ("http://h.example/",)))
    asked: list[int] = []
    told: list[int] = []
    submitting = asyncio.create_task(opened.submit(job.id, numbered(70, asked), on_progress=told.append))
    while not slow.inside or len(asked) < 20:
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert slow.taken == []
    assert len(asked) < 30, "two batches in memory, not all"
    slow.may.set()
    assert await submitting == {"new": 60, "known": 0, "refused": 0, "bad": 10}
    assert [url for batch in slow.taken for url in batch] == [
        f"http://h.example/{number}" for number in range(70) if number % 7
    ]
    assert told == sorted(told)
    assert told[-1] == 70


async def test_what_goes_wrong_is_raised_as_it_is(here: tuple[Session, Slow]) -> None:
    opened, slow = here
    job = await opened.open_job(opened.spec("site", ("http://h.example/",)))
    slow.breaks_at = 2
    slow.may.set()
    asked: list[int] = []
    with pytest.raises(FrontierUnreachable, match="gone"):
        await opened.submit(job.id, numbered(1000, asked))
    assert (len(slow.taken), slow.inside) == (2, 0)
    assert len(asked) < 60


async def test_calling_it_off_leaves_nothing_under_way(here: tuple[Session, Slow]) -> None:
    opened, slow = here
    job = await opened.open_job(opened.spec("site", ("http://h.example/",)))
    submitting = asyncio.create_task(opened.submit(job.id, numbered(1000, [])))
    while not slow.inside:
        await asyncio.sleep(0)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert (slow.inside, slow.taken) == (0, [])
