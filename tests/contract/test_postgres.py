"""The PostgreSQL frontier keeps the whole contract."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import asyncpg
import pytest

from shoal.errors import FrontierError, FrontierUnreachable, UsageError
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.port import Backend
from shoal.frontier.postgres import PostgresFrontier
from shoal.model import Added, Done, JobSpec, Lease, Request, Selection, Verdict
from shoal.testing.clock import FakeClock
from shoal.testing.contract import FrontierContract
from shoal.testing.harness import Harness
from shoal.testing.machine import machine_for
from tests.rig import shared
from tests.rig.postgres_server import binaries, postgres_server

pytestmark = [
    pytest.mark.skipif(binaries() is None, reason="PostgreSQL's server programs are not installed"),
    pytest.mark.timeout(600),
]

_number = count(1)


def server() -> str:
    """One server for all tests of this process."""
    return shared.postgres().address


_clean: list[str] = []
"""Schemas that were used and emptied: making one takes longer than most tests."""


class PostgresHarness:
    """A schema of its own, empty."""

    durable = True

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.schema = _clean.pop() if _clean else f"contract_{next(_number)}"
        self._handles: list[Backend] = []
        self._closed = False
        self.url = f"{server()}?schema={self.schema}"

    async def open(self) -> Backend:
        handle = await PostgresFrontier.open(self.url, clock=self.clock)
        self._handles.append(handle)
        return handle

    async def reopen(self) -> Backend:
        await self._close_handles()
        return await self.open()

    async def close(self) -> None:
        await self._close_handles()
        if self._closed:
            return
        self._closed = True
        connection = await asyncpg.connect(server())
        try:
            if await connection.fetchval("SELECT to_regclass($1) IS NULL", f"{self.schema}.tick"):
                return  # never opened, or not ours
            rows = await connection.fetch(
                "SELECT tablename FROM pg_tables WHERE schemaname=$1"
                " AND tablename NOT IN ('tick', 'shoal_version')",
                self.schema,
            )
            await connection.execute("".join(f"DELETE FROM {self.schema}.{table};" for (table,) in rows))
            _clean.append(self.schema)
        finally:
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


async def opened(stack: AsyncExitStack, url: str) -> PostgresFrontier:
    frontier = await PostgresFrontier.open(url)
    stack.push_async_callback(frontier.close)
    return frontier


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A schema of its own, on the server's time."""
    harness = PostgresHarness()
    yield harness.url
    await harness.close()


@pytest.mark.parametrize(
    ("jobs", "most"), [("a", None), ("ab", None), ("a", 250)], ids=["one job", "two jobs", "a page budget"]
)
async def test_many_at_once_keep_every_promise(url: str, jobs: str, most: int | None) -> None:
    """Eight clients side by side on a few hosts: each page once, no lane wider than it may be, no page
    more than the budget allows, and a recount finds nothing wrong."""
    hosts, pages, width = 6, 40, 2
    seen: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        clients = [await opened(stack, url) for _ in range(8)]
        for job in jobs:
            await clients[0].open_job(job, JobSpec(gap=0.0, width=width, max_pages=most))
        start = [
            Request(f"https://h{host}.example/{job}/{page}", job)
            for job in jobs
            for host in range(hosts)
            for page in range(pages)
        ]
        await asyncio.gather(*(client.add(start[n::8]) for n, client in enumerate(clients)))

        async def work(client: PostgresFrontier, number: int) -> None:
            while True:
                claim = await client.claim(5, worker=f"w{number}", lease_seconds=60)
                if claim.drained:
                    return
                if not claim.leases:
                    await client.wait(min(claim.retry_in, 0.25))
                    continue
                verdicts: list[Verdict] = []
                for lease in claim.leases:
                    seen[f"{lease.request.job} {lease.request.url}"] += 1
                    busy[lease.lane] += 1
                    assert busy[lease.lane] <= width
                    page = lease.request.url.rpartition("/")[2]
                    # Leads to a page of another host, to which another page leads as well.
                    found: list[Request] = []
                    if page.isdigit():
                        other = (int(page) + 1) % hosts
                        link = f"https://h{other}.example/{lease.request.job}/deep-{int(page) // 2}"
                        found = [Request(link, lease.request.job)]
                    verdicts.append(Done(lease, [page.encode()], found))
                await asyncio.sleep(0.002)
                for lease in claim.leases:
                    busy[lease.lane] -= 1
                assert not (await client.settle(verdicts)).lost

        await asyncio.gather(*(work(client, number) for number, client in enumerate(clients)))
        assert set(seen.values()) == {1}
        for job in jobs:
            counts = (await clients[0].job(job)).counts
            assert counts.done == counts.added == sum(key.startswith(job) for key in seen)
            assert counts.added == most or (most is None and not counts.refused)
            log = await clients[0].items(job, limit=10_000)
            assert [item.seq for item in log] == list(range(1, counts.items + 1))
        assert await clients[0].check() == []


@pytest.mark.parametrize("seed", range(6))
async def test_the_fast_path_and_the_step_by_step_path_agree(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims and settles in one round trip against the memory frontier, step by step. The machine lives
    with several jobs on a host, where the long way is the rule."""
    chance = random.Random(seed)
    harness = PostgresHarness()
    real, model = await harness.open(), MemoryFrontier(clock=harness.now)
    short: Counter[bool] = Counter()
    assert isinstance(real, PostgresFrontier)
    call = real._store.call

    async def counted(*args: Any, **options: Any) -> Any:
        row = await call(*args, **options)
        short[row is not None and bool(row[0])] += 1
        return row

    monkeypatch.setattr(real._store, "call", counted)
    hosts = [f"https://h{n}.example" for n in range(4)]
    gap = chance.choice([0.0, 0.0, 0.5])
    spec = JobSpec(
        start=(f"{hosts[0]}/",),
        gap=gap,
        width=chance.choice([1, 2, 5]),
        max_pages=chance.choice([None, 60]),
        max_per_host=chance.choice([None, None, 25]),
    )

    def some(most: int) -> list[Request]:
        return [
            Request(f"{chance.choice(hosts)}/{chance.randrange(200)}", "a", priority=chance.choice([5, 5, 5]))
            for _ in range(chance.randrange(most))
        ]

    both: tuple[Backend, Backend] = (real, model)
    held: list[tuple[Lease, Lease]] = []
    try:
        for frontier in (real, model):
            await frontier.open_job("a", spec)
        start = [Request(f"{host}/", "a") for host in hosts]
        assert await real.add(start) == await model.add(start)
        for _ in range(80):
            harness.advance(chance.choice([0.0, 0.25, 1.0]))
            limit = chance.choice([1, 3, 50])
            mine = await real.claim(limit, worker="w", lease_seconds=3600)
            theirs = await model.claim(limit, worker="w", lease_seconds=3600)
            assert [lease.request for lease in mine.leases] == [lease.request for lease in theirs.leases]
            assert (mine.wake_at, mine.now) == (theirs.wake_at, theirs.now)
            held += zip(mine.leases, theirs.leases, strict=True)
            chance.shuffle(held)
            ending = [held.pop() for _ in range(chance.randrange(len(held) + 1))]
            ends = [(pair, some(5), chance.choice(["", "", "robots"])) for pair in ending]
            settled = [
                await frontier.settle(
                    [Done(pair[n], [pair[n].request.url.encode()], found, why) for pair, found, why in ends]
                )
                for n, frontier in enumerate(both)
            ]
            assert list(settled[0].refused) == list(settled[1].refused)
            assert await real.job("a") == await model.job("a")
            assert await real.items("a", limit=9999) == await model.items("a", limit=9999)
            assert await real.lanes() == await model.lanes()
            assert await real.check() == []
        assert short[True] > 40, f"the short way was hardly ever taken: {short}"
    finally:
        await harness.close()


async def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(FrontierUnreachable) as caught:
        await PostgresFrontier.open("postgresql://me:secret@127.0.0.1:1/none")
    assert "127.0.0.1:1/none" in str(caught.value) and "secret" not in str(caught.value)
    assert caught.value.hint


async def test_a_missing_database_is_reported() -> None:
    with pytest.raises(FrontierError, match="no such database"):
        await PostgresFrontier.open(server().removesuffix("postgres") + "nothing")


async def test_a_schema_of_another_program_is_left_alone() -> None:
    connection = await asyncpg.connect(server())
    await connection.execute("CREATE SCHEMA elses; CREATE TABLE elses.job(id INT)")
    try:
        with pytest.raises(FrontierError, match="something else"):
            await PostgresFrontier.open(f"{server()}?schema=elses")
    finally:
        await connection.execute("DROP SCHEMA elses CASCADE")
        await connection.close()


async def test_a_bad_schema_name_is_refused() -> None:
    with pytest.raises(UsageError):
        await PostgresFrontier.open("postgresql://127.0.0.1/x?schema=a;b")


async def test_a_lost_connection_is_replaced(url: str) -> None:
    frontier = await PostgresFrontier.open(url)
    await frontier.open_job("a", JobSpec())
    connection = await asyncpg.connect(server())
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name='shoal'"
    )
    await connection.close()
    assert await frontier.add([Request("https://h.example/", "a")]) == [Added.NEW]
    await frontier.close()


async def test_a_server_that_goes_away_is_reported() -> None:
    with postgres_server() as address:
        frontier = await PostgresFrontier.open(address)
        await frontier.open_job("a", JobSpec())
    with pytest.raises(FrontierUnreachable):
        await frontier.add([Request("https://h.example/", "a")])
    with pytest.raises(FrontierUnreachable):
        await frontier.job("a")
    await frontier.close()


async def test_a_cancelled_claim_holds_nothing(url: str) -> None:
    async with AsyncExitStack() as stack:
        mine, other = await opened(stack, url), await opened(stack, url)
        await mine.open_job("a", JobSpec())
        await mine.add([Request("https://h.example/", "a")])
        connection = await asyncpg.connect(f"{server()}?application_name=test")
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {url.rpartition('=')[2]}.lease")
            claiming = asyncio.create_task(mine.claim(1, worker="w", lease_seconds=60))
            await asyncio.sleep(0.1)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
        await connection.close()
        assert len((await other.claim(1, worker="w", lease_seconds=60)).leases) == 1


async def test_a_notification_of_another_process_ends_a_wait(url: str) -> None:
    async with AsyncExitStack() as stack:
        mine, other = await opened(stack, url), await opened(stack, url)
        await mine.open_job("a", JobSpec())
        assert not (await mine.claim(1, worker="w", lease_seconds=9)).leases
        waiting = asyncio.create_task(mine.wait(30))
        await mine.add([Request("https://h.example/1", "a", delay=3600)])
        await waiting
        assert not (await mine.claim(1, worker="w", lease_seconds=9)).leases
        waiting = asyncio.create_task(mine.wait(30))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        await other.add([Request("https://h.example/2", "a")])
        await waiting
        assert time.monotonic() - started < 0.9, "it looked by itself instead of listening"


async def test_any_text_can_be_buried(url: str) -> None:
    async with AsyncExitStack() as stack:
        frontier = await opened(stack, url)
        await frontier.open_job("a", JobSpec())
        await frontier.bury(Request("h\0ttp:\n", "a"), "url_invalid", "NUL \0 inside")
        assert [letter.failure.message for letter in await frontier.dead(Selection())] == ["NUL � inside"]


async def test_info_warns_of_settings_that_are_not_durable(url: str) -> None:
    async with AsyncExitStack() as stack:
        info = await (await opened(stack, url)).info()
        assert any("fsync=off" in warning.text and "fsync = on" in warning.hint for warning in info.warnings)


async def test_info_names_server_and_schema(url: str) -> None:
    async with AsyncExitStack() as stack:
        info = await (await opened(stack, url)).info()
        assert info.server.startswith("PostgreSQL ") and info.server[-1].isdecimal()
        assert info.schema == info.newest > 0


async def test_an_option_that_does_not_exist(url: str) -> None:
    mark = "&" if "?" in url else "?"
    with pytest.raises(UsageError, match="nonsense") as told:
        await PostgresFrontier.open(f"{url}{mark}nonsense=1")
    assert told.value.exit_code == 2


TestPostgresMachine = machine_for(PostgresHarness, lives=15)
