"""What only a Redis frontier can get wrong: its server, its connection, its messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
import redis

from shoal.errors import FrontierError, FrontierFull, FrontierUnreachable, MissingExtra, UsageError
from shoal.frontier.redis import RedisFrontier
from shoal.model import (
    LASTING,
    Added,
    Advice,
    Claim,
    Dead,
    Done,
    Failure,
    JobSpec,
    JobState,
    Request,
    Retry,
    Selection,
)
from shoal.registry import open_frontier
from tests.rig.redis_server import RedisServer, available, redis_server

pytestmark = pytest.mark.skipif(not available(), reason="redis-server is not installed")

FREE = JobSpec(gap=0.0, width=1000)


def pages(count: int, *, start: int = 0, host: str = "a.example") -> list[Request]:
    return [Request(f"http://{host}/{number}", "job") for number in range(start, start + count)]


@pytest.fixture
async def frontier(redis_url: str) -> AsyncIterator[RedisFrontier]:
    frontier = await RedisFrontier.open(redis_url)
    await frontier.open_job("job", FREE)
    yield frontier
    assert await frontier.check() == []
    await frontier.close()


async def claim(frontier: RedisFrontier, limit: int = 10) -> Claim:
    return await frontier.claim(limit, worker="w", lease_seconds=60.0)


class TestBatches:
    async def test_a_batch_of_many_calls_keeps_its_order(self, frontier: RedisFrontier) -> None:
        wanted = pages(730)
        assert await frontier.add(wanted) == [Added.NEW] * 730
        leases = (await claim(frontier, 1000)).leases
        assert [lease.request.url for lease in leases] == [request.url for request in wanted]
        tokens = [lease.token for lease in leases]
        assert tokens == sorted(set(tokens))
        done = [Done(lease, [b"%d" % n], pages(3, start=n)) for n, lease in enumerate(leases)]
        answer = await frontier.settle([*done, done[0]])
        assert list(answer.lost) == [leases[0]]
        bodies = [item.body for item in await frontier.items("job", limit=1000)]
        assert bodies == [b"%d" % n for n in range(730)]

    async def test_a_page_with_thousands_of_links_is_one_verdict(self, frontier: RedisFrontier) -> None:
        await frontier.add(pages(1))
        [lease] = (await claim(frontier)).leases
        links = [Request(f"http://host-{number}.example/", "job") for number in range(9000)]
        await frontier.settle([Done(lease, [b"x"] * 5000, links)])
        counts = (await frontier.job("job")).counts
        assert (counts.added, counts.waiting, counts.items) == (9001, 9000, 5000)
        assert (await frontier.update_job("job", state=JobState.CANCELLED)).counts.cancelled == 9000

    async def test_hundreds_of_requests_come_due_at_once(self, frontier: RedisFrontier) -> None:
        soon = [Request(f"http://a.example/d{n}", "job", delay=0.01) for n in range(450)]
        short = [Request(f"http://a.example/t{n}", "job", ttl=0.01) for n in range(450)]
        await frontier.add(soon + short)
        await asyncio.sleep(0.05)
        assert len((await claim(frontier, 1000)).leases) == 450
        assert (await frontier.job("job")).counts.expired == 450


class TestWaiting:
    async def test_an_add_ends_the_wait_of_another_process_soon(
        self, frontier: RedisFrontier, redis_url: str
    ) -> None:
        other = await RedisFrontier.open(redis_url)
        delays = []
        for number in range(5):
            assert (await claim(other)).leases == ()
            waiter = asyncio.create_task(other.wait(30.0))
            await asyncio.sleep(0.1)
            assert not waiter.done(), "there was nothing to wake up for"
            began = time.perf_counter()
            await frontier.add(pages(1, start=number))
            await asyncio.wait_for(waiter, 5.0)
            delays.append(time.perf_counter() - began)
            leases = (await claim(other)).leases
            await other.settle([Done(lease) for lease in leases])
        await other.close()
        assert sorted(delays)[2] < 0.05

    async def test_work_that_comes_between_claim_and_wait_ends_the_wait(
        self, frontier: RedisFrontier, redis_url: str
    ) -> None:
        other = await RedisFrontier.open(redis_url)
        assert (await claim(other)).drained
        await frontier.add(pages(1))
        await asyncio.wait_for(other.wait(30.0), 1.0)
        await other.close()

    async def test_the_end_of_the_last_visit_ends_the_wait(
        self, frontier: RedisFrontier, redis_url: str
    ) -> None:
        other = await RedisFrontier.open(redis_url)
        await frontier.add(pages(1))
        [lease] = (await claim(frontier)).leases
        assert (await claim(other)).wake_at is not None
        waiter = asyncio.create_task(other.wait(30.0))
        await asyncio.sleep(0.1)
        await frontier.settle([Done(lease)])
        await asyncio.wait_for(waiter, 1.0)
        assert (await claim(other)).drained
        await other.close()

    async def test_a_retry_that_is_due_earlier_shortens_the_wait(
        self, frontier: RedisFrontier, redis_url: str
    ) -> None:
        other = await RedisFrontier.open(redis_url)
        await frontier.add(pages(1))
        [lease] = (await claim(frontier)).leases
        assert (await claim(other)).leases == ()
        waiter = asyncio.create_task(other.wait(30.0))
        await asyncio.sleep(0.1)
        await frontier.settle([Retry(lease, 0.2, Failure("reset"))])
        await asyncio.wait_for(waiter, 1.0)
        assert len((await claim(other)).leases) == 1
        await other.close()

    async def test_unrelated_work_wakes_no_worker(self, frontier: RedisFrontier, redis_url: str) -> None:
        other = await RedisFrontier.open(redis_url)
        await frontier.open_job("slow", JobSpec(gap=3600.0))
        await frontier.add(
            [Request("http://slow.example/1", "slow"), Request("http://slow.example/2", "slow")]
        )
        [lease] = (await claim(frontier)).leases
        assert (await claim(other)).leases == ()
        waiter = asyncio.create_task(other.wait(30.0))
        await asyncio.sleep(0.05)
        await frontier.settle([Done(lease)])  # its lane is ready in an hour: nothing for anybody
        await asyncio.sleep(0.2)
        assert not waiter.done()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await other.close()


class TestConnection:
    async def test_cancelled_calls_never_mix_up_replies(self, frontier: RedisFrontier) -> None:
        await frontier.notes.put("shelf", "right", b"right", 60.0)
        for number in range(60):
            calls = [
                asyncio.create_task(frontier.add(pages(3, start=number * 3))),
                asyncio.create_task(frontier.job("job")),
                asyncio.create_task(frontier.wait(5.0)),
            ]
            for _ in range(number % 7):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert await frontier.notes.get("shelf", "right") == b"right"
        await frontier.add(pages(180))
        assert (await frontier.job("job")).counts.added == 180

    async def test_flushed_scripts_are_loaded_again(
        self, frontier: RedisFrontier, shared_redis: RedisServer
    ) -> None:
        with redis.Redis(port=shared_redis.port) as client:
            client.script_flush()
            assert await frontier.add(pages(950)) == [Added.NEW] * 950
            client.script_flush()
            assert (await frontier.job("job")).counts.waiting == 950  # of the other script

    async def test_prefixes_are_separate(self, frontier: RedisFrontier, shared_redis: RedisServer) -> None:
        await frontier.add(pages(2))
        other = await open_frontier(f"{shared_redis.url}?prefix={uuid4().hex}")
        assert await other.jobs() == []
        assert (await other.claim(5, worker="w", lease_seconds=5.0)).drained
        await other.close()

    async def test_a_killed_server_loses_nothing_and_is_reconnected(self) -> None:
        # With `everysec` it forgets its last moments while a slow disk syncs.
        with redis_server("--appendfsync", "always") as server:
            frontier = await RedisFrontier.open(server.url)
            await frontier.open_job("job", FREE)
            await frontier.add(pages(300))
            leases = (await claim(frontier, 100)).leases
            await frontier.settle([Done(lease, [b"x"]) for lease in leases[:50]])
            before = await frontier.job("job")
            server.kill()
            with pytest.raises(FrontierUnreachable):
                await frontier.job("job")
            server.start()
            assert await frontier.job("job") == before
            assert (await frontier.settle([Done(lease) for lease in leases[50:]])).lost == []
            again = (await claim(frontier, 1000)).leases
            assert len(again) == 200
            assert again[0].token > leases[-1].token
            assert await frontier.check() == []
            await frontier.close()

    async def test_a_password_is_used_and_never_shown(self) -> None:
        with redis_server("--requirepass", "s3cret") as server:
            good = server.url.replace("redis://", "redis://:s3cret@")
            frontier = await RedisFrontier.open(good)
            await frontier.open_job("job", FREE)
            assert "s3cret" not in frontier._client.shown
            for bad in (server.url, server.url.replace("redis://", "redis://:wr0ng@")):
                with pytest.raises(FrontierError) as refused:
                    await RedisFrontier.open(bad)
                assert "wr0ng" not in str(refused.value) + refused.value.hint
            with pytest.raises(FrontierError, match="needs a password") as refused:
                await RedisFrontier.open(server.url)
            assert "REDIS_PASSWORD" in refused.value.hint
            server.kill()
            with pytest.raises(FrontierUnreachable) as gone:
                await frontier.job("job")
            assert "s3cret" not in str(gone.value) + repr(gone.value.__cause__)
            await frontier.close()

    async def test_a_full_server_is_reported_and_stores_nothing_partially(self) -> None:
        with redis_server() as server, redis.Redis(port=server.port) as client:
            frontier = await RedisFrontier.open(server.url)
            await frontier.open_job("job", FREE)
            await frontier.add(pages(10))
            client.config_set("maxmemory", 1)
            with pytest.raises(FrontierFull):
                await frontier.add(pages(10, start=10))
            client.config_set("maxmemory", 0)
            assert (await frontier.job("job")).counts.added == 10
            assert await frontier.check() == []
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(FrontierError, match="replica"):
                await frontier.add(pages(10, start=10))
            await frontier.close()

    async def test_info_warns_of_settings_that_may_lose_work(self) -> None:
        with redis_server() as server, redis.Redis(port=server.port) as client:
            frontier = await RedisFrontier.open(server.url)
            assert (await frontier.info()).warnings == []
            client.config_set("appendonly", "no")
            client.config_set("maxmemory", 1 << 30)
            client.config_set("maxmemory-policy", "allkeys-lru")
            warnings = (await frontier.info()).warnings
            assert ["appendonly" in warnings[0].text, "allkeys-lru" in warnings[1].text] == [True, True]
            assert "appendonly yes" in warnings[0].hint and "noeviction" in warnings[1].hint
            await frontier.close()

    async def test_the_loss_in_a_power_cut_depends_on_appendfsync(self) -> None:
        with redis_server() as server, redis.Redis(port=server.port) as client:
            frontier = await RedisFrontier.open(server.url)
            about = await frontier.info()
            assert about.server == f"Redis {client.info()['redis_version']}"
            assert (about.schema, about.newest) == (1, 1)
            assert "the last second" in about.durable.text and "appendfsync always" in about.durable.hint
            client.config_set("appendfsync", "always")
            assert (await frontier.info()).durable == LASTING
            # Servers that others run do not let everybody look.
            client.execute_command("ACL", "SETUSER", "default", "-config")
            assert (await frontier.info()).durable == Advice("through crashes of the server")
            assert (await frontier.info()).warnings == []
            await frontier.close()

    async def test_another_layout_is_refused(self, shared_redis: RedisServer) -> None:
        name = uuid4().hex
        with redis.Redis(port=shared_redis.port) as client:
            client.hset(f"{{shoal:{name}}}:meta", "layout", 99)
        with pytest.raises(FrontierError, match="layout 99"):
            await RedisFrontier.open(f"{shared_redis.url}?prefix={name}")

    async def test_invalid_addresses_are_refused(self, shared_redis: RedisServer) -> None:
        with pytest.raises(FrontierUnreachable):
            await open_frontier("redis://127.0.0.1:1/0")
        for address in (
            f"{shared_redis.url}?prefix=a{{b",
            "redis://host:port/0",
            "redis://[::1",
            f"{shared_redis.url}?nonsense=1",
        ):
            with pytest.raises(UsageError) as bad:
                await open_frontier(address)
            assert not isinstance(bad.value, MissingExtra)


async def test_letters_keep_odd_messages(frontier: RedisFrontier) -> None:
    await frontier.add(pages(1))
    [lease] = (await claim(frontier)).leases
    await frontier.settle([Dead(lease, Failure("reset", "\udcff" + "ü" * 70_000))])
    [letter] = await frontier.dead(Selection())
    assert letter.failure.message.startswith("?ü")


@pytest.mark.parametrize("order", ["cancel", "switch"])
async def test_a_change_of_state_holds_even_if_its_process_dies_half_way(
    frontier: RedisFrontier, order: str
) -> None:
    await frontier.add([Request(f"http://host-{number}.example/", "job") for number in range(900)])
    values: list[object] = [1, "0"] if order == "cancel" else [1, True, "0"]
    await frontier._client.call(order, values)  # the first of several calls
    assert (await claim(frontier, 1000)).leases == ()
    if order == "switch":
        await frontier.update_job("job", state=JobState.PAUSED)
        await frontier.update_job("job", state=JobState.RUNNING)
        assert len((await claim(frontier, 1000)).leases) == 900
    else:
        assert (await frontier.update_job("job", state=JobState.CANCELLED)).counts.cancelled == 900
        assert (await claim(frontier)).drained
