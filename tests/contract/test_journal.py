"""The frontier of the example package keeps the whole contract: yours can, too."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from shoal.errors import FrontierCorrupt, FrontierFull
from shoal.frontier.port import Backend
from shoal.model import Added, Done, JobSpec
from shoal.testing.chapters.chapter import pages, requests
from shoal.testing.clock import FakeClock
from shoal.testing.contract import FrontierContract
from shoal.testing.harness import Harness
from shoal.testing.machine import machine_for
from tests.rig.plugin import EXAMPLE, install, on_path

sys.path.append(str(EXAMPLE))

if TYPE_CHECKING:
    from shoal_files.journal import JournalFrontier


class JournalHarness:
    """A file in a folder of its own."""

    durable = True

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._folder = TemporaryDirectory(prefix="shoal-contract-")
        self.path = Path(self._folder.name) / "shoal.journal"
        self._handles: list[Backend] = []
        self.url = f"journal://{self.path}"

    async def open(self) -> JournalFrontier:
        from shoal_files.journal import JournalFrontier

        handle = JournalFrontier(self.path, clock=self.clock)
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


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the chapter of processes, which open the frontier by its address."""
    with on_path(install(tmp_path_factory.mktemp("site-packages"))):
        yield


class TestJournal(FrontierContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        harness = JournalHarness()
        yield harness
        await harness.close()


TestJournalMachine = machine_for(JournalHarness, lives=10)


@pytest.fixture
async def journal() -> AsyncIterator[JournalHarness]:
    harness = JournalHarness()
    yield harness
    await harness.close()


async def test_half_a_line_never_happened(journal: JournalHarness) -> None:
    """A process that dies while it writes has acknowledged nothing."""
    first = await journal.open()
    await first.open_job("job", JobSpec(gap=0.0, width=9))
    await first.add(requests(pages(1)))
    whole = journal.path.stat().st_size
    await first.add(requests(pages(2)))
    os.truncate(journal.path, journal.path.stat().st_size - 3)
    again = await journal.reopen()
    await again.job("job")
    assert journal.path.stat().st_size == whole
    assert await again.add(requests(pages(2))) == [Added.KNOWN, Added.NEW]


async def test_a_damaged_line_is_noticed(journal: JournalHarness) -> None:
    frontier = await journal.open()
    await frontier.open_job("job", JobSpec())
    await frontier.add(requests(pages(3)))
    body = bytearray(journal.path.read_bytes())
    body[20] ^= 1
    journal.path.write_bytes(body)
    with pytest.raises(FrontierCorrupt, match="damaged at byte 0"):
        await (await journal.reopen()).job("job")


async def test_what_could_not_be_written_did_not_happen(
    journal: JournalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontier = await journal.open()
    await frontier.open_job("job", JobSpec(gap=0.0, width=9))
    await frontier.add(requests(pages(1)))
    [lease] = (await frontier.claim(1, worker="w", lease_seconds=60.0)).leases
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda fd, data, at: 0)
        with pytest.raises(FrontierFull):
            await frontier.settle([Done(lease, items=[b"{}"])])
    assert (await frontier.job("job")).counts.done == 0
    assert (await frontier.settle([Done(lease, items=[b"{}"])])).lost == []
    assert [item.body for item in await frontier.items("job")] == [b"{}"]
