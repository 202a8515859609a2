"""The contract that every dispatch must pass.

    class TestDuck(DispatchContract):
        @pytest.fixture
        async def harness(self) -> AsyncIterator[DispatchHarness]:
            ...

The first half tests the dispatch alone, the second half a whole line: frontier, pump, broker and consumers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol

import pytest

from shoal import events
from shoal.dispatch.consumer import Consumer
from shoal.dispatch.port import Delivery, Dispatch, Message
from shoal.dispatch.pump import Pump
from shoal.dispatch.routes import Routes, Rule
from shoal.frontier.memory import MemoryFrontier
from shoal.model import (
    Claim,
    Counts,
    Dead,
    DeadLetter,
    Done,
    Failure,
    JobSpec,
    JobState,
    Lease,
    Pace,
    Request,
    Selection,
    Verdict,
)

PATIENCE = 30.0
QUIET = 0.3
"""Seconds in which a message that must not be delivered would have been delivered."""
SHORT = "short"
"""A queue whose messages may wait for `SHORT_TTL` seconds."""
SHORT_TTL = 1.0


class DispatchHarness(Protocol):
    """One empty broker, and the handles on it."""

    async def open(
        self, queues: Collection[str] = (), *, prefetch: int = 10, fast: Collection[str] = ()
    ) -> Dispatch:
        """Open another handle. The queue `short` lets a message wait for SHORT_TTL seconds. The harness
        closes the handle."""
        ...

    async def cut(self, handle: Dispatch) -> None:
        """Simulate the death of the process that holds this handle: its connections vanish without a
        goodbye."""
        ...

    async def failed_urls(self) -> list[str]:
        """Return the URLs of the dead letters that the broker shows, and remove them."""
        ...

    async def rubbish(self, queue: str, body: bytes) -> None:
        """Put bytes into a queue that are not a message of shoal."""
        ...


def message(*numbers: int, queue: str = "q", ttl: float | None = None) -> Message:
    leases = tuple(
        Lease(n, Request(f"http://a.example/{n}", "job", data={"n": n}), "a.example", 99.5, 12.25)
        for n in numbers
    )
    return Message(queue, leases, ttl)


def tokens(deliveries: Sequence[Delivery]) -> list[int]:
    return [lease.token for delivery in deliveries for lease in delivery.message.leases]


async def collect(handle: Dispatch, count: int) -> list[Delivery]:
    """Receive exactly `count` messages, in however many calls."""
    got: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(got) < count:
            got += await handle.receive(count - len(got))
    return got


async def nothing_comes(handle: Dispatch) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(QUIET):
            got = await handle.receive(10)
            raise AssertionError(f"{tokens(got)} came")


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {PATIENCE} s in vain for {what}") from None


class DispatchContract:
    # -- alone --------------------------------------------------------------------------

    async def test_a_message_arrives_whole(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"])
        sent = message(1, 2, 3)
        assert await sender.send([sent]) == []
        [delivery] = await collect(receiver, 1)
        assert (delivery.message, delivery.again) == (sent, False)

    async def test_a_queue_keeps_its_order(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"], prefetch=50)
        assert await sender.send([message(n) for n in range(1, 41)]) == []
        assert tokens(await collect(receiver, 40)) == list(range(1, 41))

    async def test_a_consumer_may_wait_before_anything_is_sent(self, harness: DispatchHarness) -> None:
        receiver = await harness.open(["q"])
        waiting = asyncio.create_task(collect(receiver, 1))
        await asyncio.sleep(0)
        sender = await harness.open()
        await sender.send([message(1)])
        assert tokens(await waiting) == [1]

    async def test_only_requested_queues_are_received(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["other"])
        await sender.send([message(1, queue="q"), message(2, queue="other")])
        assert tokens(await collect(receiver, 1)) == [2]
        await nothing_comes(receiver)

    async def test_a_queue_can_be_subscribed_later(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"])
        await sender.send([message(1, queue="other")])
        await nothing_comes(receiver)
        waiting = asyncio.create_task(collect(receiver, 3))
        await asyncio.sleep(0)
        receiver.subscribe(["other", "q"])
        await sender.send([message(2, queue="q"), message(3, queue="other")])
        assert sorted(tokens(await waiting)) == [1, 2, 3]

    async def test_a_consumer_holds_no_more_than_the_prefetch(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"], prefetch=3)
        await sender.send([message(n) for n in range(1, 6)])
        held = await collect(receiver, 3)
        await nothing_comes(receiver)
        await receiver.finish(held[:1])
        assert tokens(await collect(receiver, 1)) == [4]

    async def test_each_message_goes_to_one_of_several(self, harness: DispatchHarness) -> None:
        sender = await harness.open()
        receivers = [await harness.open(["q"], prefetch=5) for _ in range(2)]
        await sender.send([message(n) for n in range(1, 11)])
        shares = await asyncio.gather(*(collect(receiver, 5) for receiver in receivers))
        assert sorted(tokens([*shares[0], *shares[1]])) == list(range(1, 11))

    async def test_a_finished_message_is_not_delivered_again(self, harness: DispatchHarness) -> None:
        sender, first = await harness.open(), await harness.open(["q"])
        await sender.send([message(1), message(2)])
        one, _two = await collect(first, 2)
        await first.finish([one])
        await first.close()
        second = await harness.open(["q"])
        [delivery] = await collect(second, 1)
        assert (tokens([delivery]), delivery.again) == ([2], True)
        await nothing_comes(second)

    async def test_messages_of_a_dead_consumer_are_delivered_again(self, harness: DispatchHarness) -> None:
        sender, first = await harness.open(), await harness.open(["q"], prefetch=4)
        await sender.send([message(n) for n in range(1, 5)])
        held = await collect(first, 4)
        await first.finish(held[:1])
        # There is room for one more now. Its delivery proves that the first one is finished.
        await sender.send([message(5)])
        await collect(first, 1)
        second = await harness.open(["q"])
        await harness.cut(first)
        assert sorted(tokens(await collect(second, 4))) == [2, 3, 4, 5]

    async def test_a_fast_queue_forgets_delivered_messages(self, harness: DispatchHarness) -> None:
        sender, first = await harness.open(), await harness.open(["q"], prefetch=1, fast=["q"])
        await sender.send([message(1), message(2), message(3)])
        for number in (1, 2, 3):
            assert tokens(await collect(first, 1)) == [number]
        await harness.cut(first)
        second = await harness.open(["q"], fast=["q"])
        await sender.send([message(9)])
        # The last one may have been on its way to the broker's memory.
        came = tokens(await collect(second, 1))
        assert came in ([9], [3]), came

    async def test_finishing_again_or_too_late_is_harmless(self, harness: DispatchHarness) -> None:
        sender, first = await harness.open(), await harness.open(["q"])
        await sender.send([message(1), message(2)])
        one, two = await collect(first, 2)
        await first.finish([one])
        await first.finish([one])
        await first.finish([])
        second = await harness.open(["q"])
        with suppress(Exception):  # a dispatch may refuse or ignore it; it must not harm
            await second.finish([two])
        await sender.send([message(3)])
        assert set(tokens(await collect(first, 1))) <= {3}

    async def test_a_cancelled_receive_loses_nothing(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"], prefetch=100)
        for number in range(1, 21):
            waiting = asyncio.create_task(receiver.receive(1))
            if number % 2:
                await asyncio.sleep(0)
            sending = asyncio.create_task(sender.send([message(number)]))
            await asyncio.sleep(0.001 * (number % 4))
            waiting.cancel()
            await asyncio.gather(waiting, sending, return_exceptions=True)
        await harness.cut(receiver)
        other = await harness.open(["q"], prefetch=100)
        assert set(tokens(await collect(other, 20))) == set(range(1, 21))

    async def test_an_expired_message_is_returned(self, harness: DispatchHarness) -> None:
        """The smaller ttl counts, that of the queue or that of the message."""
        pump = await harness.open()
        await pump.depths([SHORT, "q"])
        began = asyncio.get_running_loop().time()
        await pump.send([message(1, queue=SHORT, ttl=60.0)])
        await pump.send([message(2, queue="q", ttl=0.2)])
        back: dict[int, float] = {}
        async with asyncio.timeout(PATIENCE):
            while len(back) < 2:
                deliveries = await pump.receive_returned()
                for token in tokens(deliveries):
                    back[token] = asyncio.get_running_loop().time() - began
                await pump.finish(deliveries)
        assert 0.2 <= back[2] < back[1]
        assert back[1] >= SHORT_TTL
        receiver = await harness.open([SHORT, "q"])
        await nothing_comes(receiver)

    async def test_depths_count_waiting_messages_and_consumers(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"], prefetch=2)
        assert (await sender.depths(["q", "new"]))["new"].waiting == 0
        await sender.send([message(n) for n in range(1, 6)])
        assert (await sender.depths(["q"]))["q"].waiting == 5
        await collect(receiver, 2)
        depth = (await sender.depths(["q"]))["q"]
        assert (depth.waiting, depth.consumers) == (3, 1)

    async def test_dead_letters_are_reported(self, harness: DispatchHarness) -> None:
        handle = await harness.open()
        letters = [
            DeadLetter(n, Request(f"http://a.example/{n}", "job"), "a.example", Failure("http_404"), 1.0)
            for n in range(3)
        ]
        await handle.report_dead(letters)
        assert sorted(await harness.failed_urls()) == [f"http://a.example/{n}" for n in range(3)]

    async def test_foreign_messages_are_skipped(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"], prefetch=2)
        await sender.depths(["q"])
        for body in (b"", b"\x80\x04\x95pickle", b'{"queue": 1}', b'{"queue":"q","leases":[],"format":99}'):
            await harness.rubbish("q", body)
        await sender.send([message(1)])
        assert tokens(await collect(receiver, 1)) == [1]

    # -- a whole line -------------------------------------------------------------------

    async def test_everything_is_done_once(self, harness: DispatchHarness) -> None:
        async with Line(harness) as line:
            await line.add(200)
            await line.consumer()
            await line.consumer()
            assert (await line.end()).done == 200
            assert max(line.visits.values()) == 1

    async def test_every_request_is_done_although_consumers_die(self, harness: DispatchHarness) -> None:
        async with Line(harness, lease=0.5) as line:
            await line.add(200)
            for dies_after in (10, 30, 50):
                await line.consumer(dies_after=dies_after)
            await line.consumer()
            counts = await line.end()
            assert (counts.done, counts.items, counts.dead) == (200, 200, 0)

    async def test_dead_requests_are_reported_in_frontier_and_broker(self, harness: DispatchHarness) -> None:
        async with Line(harness) as line:
            await line.add(20)
            await line.consumer(fails=lambda number: number % 4 == 0)
            counts = await line.end()
            assert (counts.done, counts.dead) == (15, 5)
            letters = await line.frontier.dead(Selection())
            reported = await line.reported(5)
            assert sorted(reported) == sorted(letter.request.url for letter in letters)

    async def test_requests_that_the_frontier_ends_are_reported_once(self, harness: DispatchHarness) -> None:
        async with Line(harness) as line:
            await line.add(8)
            await line.consumer(fails=lambda number: number % 4 == 0)
            # This host is not visited before its URLs expire.
            await line.frontier.pace("rests.example", Pace(paused=True))
            late = [f"http://rests.example/{n}" for n in range(3)]
            await line.frontier.add([Request(url, "job", queue="q", ttl=0.1) for url in late])
            await line.frontier.bury(Request("http://[", "job", queue="q"), "url_invalid", "what is that")
            elsewhere = Request("http://]", "job", queue="elsewhere")
            await line.frontier.bury(elsewhere, "url_invalid", "waits in a queue without a pump")
            counts = await line.end()
            assert (counts.done, counts.dead, counts.expired) == (6, 4, 3)
            failed = [f"http://h{n}.example/{n}" for n in (0, 4)]
            assert sorted(await line.reported(6)) == sorted([*failed, *late, "http://["])
            await line.kill_pump()
            # The next pump reports only what ends from now on.
            await line.frontier.bury(Request("http://^", "job", queue="q"), "url_invalid", "nor this")
            await line.pump("second")
            assert await line.reported(1) == ["http://^"]

    async def test_a_second_pump_takes_over(self, harness: DispatchHarness) -> None:
        async with Line(harness, lease=0.5, batch=1, prefetch=4) as line:
            await line.add(60)
            await line.consumer(dies_after=5)
            await until(lambda: sum(line.visits.values()) >= 5, "five visits")
            await line.kill_pump()
            await line.pump("second")
            await line.consumer()
            counts = await line.end()
            assert (counts.done, counts.dead) == (60, 0)

    async def test_expired_messages_end_as_expired(self, harness: DispatchHarness) -> None:
        async with Line(harness, rules=(Rule("*", "q", ttl=0.2),)) as line:
            await line.add(30)
            counts = await line.end()
            assert (counts.expired, counts.done, counts.dead) == (30, 0, 0)
            await line.frontier.revive(Selection())
            await line.consumer()
            await until(lambda: sum(line.visits.values()) > 0, "visits of what was brought back")


class Line:
    """Frontier, pump, broker and consumers in one process; only the broker is foreign."""

    def __init__(
        self,
        harness: DispatchHarness,
        *,
        lease: float = 30.0,
        batch: int = 5,
        prefetch: int = 2,
        rules: Sequence[Rule] = (),
    ) -> None:
        self.harness = harness
        self.frontier = MemoryFrontier()
        self.visits: Counter[str] = Counter()
        self._lease = lease
        self._batch = batch
        self._prefetch = prefetch
        self._routes = Routes(rules)
        self._tasks: list[asyncio.Task[None]] = []
        self._pump: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Line:
        await self.frontier.open_job("job", JobSpec(gap=0.0, width=1000, queue="q"))
        await self.pump("first")
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in [*self._tasks, *([self._pump] if self._pump else [])]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._stack.aclose()
        assert await self.frontier.check() == []

    async def add(self, count: int) -> None:
        await self.frontier.add(
            [Request(f"http://h{n % 20}.example/{n}", "job", queue="q") for n in range(count)]
        )

    async def pump(self, name: str) -> None:
        pump = Pump(
            self.frontier,
            await self.harness.open(),
            name=name,
            routes=self._routes,
            watch=events.ignore,
            queues=["q"],
            batch=self._batch,
            prefetch=self._prefetch,
            ttls={"q": 60.0},
        )
        self._pump = asyncio.create_task(pump.run())

    async def kill_pump(self) -> None:
        """End the pump as if its process had died: its lock and its leases stay."""
        assert self._pump is not None
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def consumer(self, *, dies_after: int = 0, fails: Callable[[int], bool] = lambda _: False) -> None:
        handle = await self.harness.open(["q"], prefetch=self._prefetch)
        name = f"consumer{len(self._tasks)}"
        self._tasks.append(asyncio.create_task(self._consume(name, handle, dies_after, fails)))

    async def _consume(
        self, name: str, handle: Dispatch, dies_after: int, fails: Callable[[int], bool]
    ) -> None:
        done = 0
        async with _consumer(self.frontier, handle) as consumer:
            while True:
                claim: Claim = await consumer.claim(8, worker=name, lease_seconds=self._lease)
                if not claim.leases:
                    await consumer.wait(0.1)
                    continue
                for lease in claim.leases:
                    self.visits[lease.request.url] += 1
                done += len(claim.leases)
                if dies_after and done >= dies_after:
                    break
                await consumer.settle([_verdict(lease, fails) for lease in claim.leases])
        await self.harness.cut(handle)

    async def reported(self, count: int) -> list[str]:
        """Wait for `count` URLs of dead letters in the broker. They appear a little after the frontier has
        them."""
        urls: list[str] = []
        async with asyncio.timeout(PATIENCE):
            while len(urls) < count:
                urls += await self.harness.failed_urls()
                await asyncio.sleep(0.01)
        return urls

    async def end(self) -> Counts:
        """Return the counters when the job is done."""
        async with asyncio.timeout(PATIENCE):
            while True:
                job = await self.frontier.job("job")
                if job.state is JobState.DONE:
                    return job.counts
                await asyncio.sleep(0.01)


@asynccontextmanager
async def _consumer(frontier: MemoryFrontier, handle: Dispatch) -> AsyncIterator[Consumer]:
    async with Consumer(frontier, handle, watch=events.ignore) as consumer:
        yield consumer


def _verdict(lease: Lease, fails: Callable[[int], bool]) -> Verdict:
    number = int(lease.request.url.rpartition("/")[2])
    if fails(number):
        return Dead(lease, Failure("http_404", "gone"))
    return Done(lease, items=[str(number).encode()])
