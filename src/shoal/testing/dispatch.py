"""The contract that a dispatch must pass, for anybody's broker.

    class TestDuck(DispatchContract):
        @pytest.fixture
        async def harness(self) -> AsyncIterator[DispatchHarness]:
            ...

The first half examines the dispatch alone, the second a whole line: frontier, pump, broker, consumers.
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
"""Seconds in which a message that must not come would have come."""
SHORT = "short"
"""A queue whose messages may wait for `SHORT_TTL` seconds."""
SHORT_TTL = 1.0


class DispatchHarness(Protocol):
    """One empty broker and the ways to reach it."""

    async def open(
        self, queues: Collection[str] = (), *, prefetch: int = 10, fast: Collection[str] = ()
    ) -> Dispatch:
        """Another handle. The queue `short` lets a message wait for SHORT_TTL seconds. The
        harness closes it."""
        ...

    async def cut(self, handle: Dispatch) -> None:
        """Whoever holds it died: its connections are gone, without a word."""
        ...

    async def failed_urls(self) -> list[str]:
        """What people see where failures are told, by URL. Looking takes it away."""
        ...

    async def rubbish(self, queue: str, body: bytes) -> None:
        """Put something into a queue that is no message of ours."""
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
    """So many messages, however they are served."""
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

    async def test_who_receives_first_may_wait_for_the_sender(self, harness: DispatchHarness) -> None:
        receiver = await harness.open(["q"])
        waiting = asyncio.create_task(collect(receiver, 1))
        await asyncio.sleep(0)
        sender = await harness.open()
        await sender.send([message(1)])
        assert tokens(await waiting) == [1]

    async def test_only_asked_for_queues_are_received(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["other"])
        await sender.send([message(1, queue="q"), message(2, queue="other")])
        assert tokens(await collect(receiver, 1)) == [2]
        await nothing_comes(receiver)

    async def test_a_queue_may_come_later(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"])
        await sender.send([message(1, queue="other")])
        await nothing_comes(receiver)
        waiting = asyncio.create_task(collect(receiver, 3))
        await asyncio.sleep(0)
        receiver.subscribe(["other", "q"])
        await sender.send([message(2, queue="q"), message(3, queue="other")])
        assert sorted(tokens(await waiting)) == [1, 2, 3]

    async def test_not_more_than_the_prefetch_is_held(self, harness: DispatchHarness) -> None:
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

    async def test_what_is_finished_does_not_come_again(self, harness: DispatchHarness) -> None:
        sender, first = await harness.open(), await harness.open(["q"])
        await sender.send([message(1), message(2)])
        one, _two = await collect(first, 2)
        await first.finish([one])
        await first.close()
        second = await harness.open(["q"])
        [delivery] = await collect(second, 1)
        assert (tokens([delivery]), delivery.again) == ([2], True)
        await nothing_comes(second)

    async def test_what_a_dead_consumer_held_comes_again(self, harness: DispatchHarness) -> None:
        sender, first = await harness.open(), await harness.open(["q"], prefetch=4)
        await sender.send([message(n) for n in range(1, 5)])
        held = await collect(first, 4)
        await first.finish(held[:1])
        # It has room for one more now. That one comes proves that the first is finished.
        await sender.send([message(5)])
        await collect(first, 1)
        second = await harness.open(["q"])
        await harness.cut(first)
        assert sorted(tokens(await collect(second, 4))) == [2, 3, 4, 5]

    async def test_a_fast_queue_forgets_what_it_handed_out(self, harness: DispatchHarness) -> None:
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

    async def test_what_waits_too_long_is_returned(self, harness: DispatchHarness) -> None:
        """The smaller of the two times counts, the queue's or the message's."""
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

    async def test_depths_tell_what_waits_and_who_listens(self, harness: DispatchHarness) -> None:
        sender, receiver = await harness.open(), await harness.open(["q"], prefetch=2)
        assert (await sender.depths(["q", "new"]))["new"].waiting == 0
        await sender.send([message(n) for n in range(1, 6)])
        assert (await sender.depths(["q"]))["q"].waiting == 5
        await collect(receiver, 2)
        depth = (await sender.depths(["q"]))["q"]
        assert (depth.waiting, depth.consumers) == (3, 1)

    async def test_failures_are_told(self, harness: DispatchHarness) -> None:
        handle = await harness.open()
        letters = [
            DeadLetter(n, Request(f"http://a.example/{n}", "job"), "a.example", Failure("http_404"), 1.0)
            for n in range(3)
        ]
        await handle.report_dead(letters)
        assert sorted(await harness.failed_urls()) == [f"http://a.example/{n}" for n in range(3)]

    async def test_rubbish_is_passed_over(self, harness: DispatchHarness) -> None:
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

    async def test_consumers_may_die(self, harness: DispatchHarness) -> None:
        async with Line(harness, lease=0.5) as line:
            await line.add(200)
            for dies_after in (10, 30, 50):
                await line.consumer(dies_after=dies_after)
            await line.consumer()
            counts = await line.end()
            assert (counts.done, counts.items, counts.dead) == (200, 200, 0)

    async def test_what_dies_is_told_in_both_places(self, harness: DispatchHarness) -> None:
        async with Line(harness) as line:
            await line.add(20)
            await line.consumer(fails=lambda number: number % 4 == 0)
            counts = await line.end()
            assert (counts.done, counts.dead) == (15, 5)
            letters = await line.frontier.dead(Selection())
            told = await line.told(5)
            assert sorted(told) == sorted(letter.request.url for letter in letters)

    async def test_what_the_frontier_ends_is_told_once(self, harness: DispatchHarness) -> None:
        async with Line(harness) as line:
            await line.add(8)
            await line.consumer(fails=lambda number: number % 4 == 0)
            # Nobody gets to this host before its URLs are too old.
            await line.frontier.pace("rests.example", Pace(paused=True))
            late = [f"http://rests.example/{n}" for n in range(3)]
            await line.frontier.add([Request(url, "job", queue="q", ttl=0.1) for url in late])
            await line.frontier.bury(Request("http://[", "job", queue="q"), "url_invalid", "what is that")
            elsewhere = Request("http://]", "job", queue="elsewhere")
            await line.frontier.bury(elsewhere, "url_invalid", "waits where nobody pumps")
            counts = await line.end()
            assert (counts.done, counts.dead, counts.expired) == (6, 4, 3)
            failed = [f"http://h{n}.example/{n}" for n in (0, 4)]
            assert sorted(await line.told(6)) == sorted([*failed, *late, "http://["])
            await line.kill_pump()
            # Another one finds that everything was told but what ends now.
            await line.frontier.bury(Request("http://^", "job", queue="q"), "url_invalid", "nor this")
            await line.pump("second")
            assert await line.told(1) == ["http://^"]

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
        """As if its process had died: nothing is unlocked, nothing is given back."""
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

    async def told(self, count: int) -> list[str]:
        """So many URLs where failures are told. That happens a little after the frontier knows."""
        urls: list[str] = []
        async with asyncio.timeout(PATIENCE):
            while len(urls) < count:
                urls += await self.harness.failed_urls()
                await asyncio.sleep(0.01)
        return urls

    async def end(self) -> Counts:
        """The counters when the job is over."""
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
