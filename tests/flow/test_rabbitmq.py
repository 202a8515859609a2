"""What only RabbitMQ can do to us: alarms, restarts, deleted queues, foreign settings, wrong passwords."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiormq
import msgspec
import pytest

from shoal.demo.site import LoopbackSite, generated_site
from shoal.dispatch import pump as pumps
from shoal.dispatch import rabbitmq
from shoal.dispatch.consumer import Consumer
from shoal.dispatch.pump import Pump
from shoal.dispatch.rabbitmq import DELIVERIES, RabbitDispatch
from shoal.dispatch.routes import PRIORITY_QUEUE, URL_QUEUE, Routes
from shoal.errors import DispatchError, DispatchRefused, MissingExtra, UsageError
from shoal.events import Event, Notice, Trouble
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.notes import lease_counts
from shoal.model import (
    Claim,
    DeadLetter,
    Done,
    Failure,
    JobSpec,
    JobState,
    Lease,
    Request,
)
from shoal.queues import FAILED_QUEUE, RETURNED_QUEUE
from shoal.registry import open_dispatch, reach_dispatch
from shoal.testing.dispatch import collect, message, tokens
from tests.rig.command import Shell, wait_until
from tests.rig.rabbitmq_server import RabbitServer, available, rabbitmq_server
from tests.rig.wire import Wire

pytestmark = [
    pytest.mark.skipif(not available(), reason="rabbitmq-server is not installed"),
    pytest.mark.timeout(180),
]

PATIENCE = 60.0


@pytest.fixture
def server(shared_rabbit: RabbitServer) -> RabbitServer:
    """Its settings are those of all tests: see `own`."""
    return shared_rabbit


@pytest.fixture(scope="module")
def own() -> Iterator[RabbitServer]:
    """For tests that change how the broker behaves."""
    with rabbitmq_server() as server:
        yield server


@pytest.fixture
def address(rabbit_url: str) -> str:
    """Queues of one test alone."""
    return rabbit_url


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


class Heard:
    """Everything that was told to the watcher."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.noted: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.noted.append(event.what)
        if isinstance(event, Trouble):
            prefix = f"Attempt {event.attempt} failed: " if event.attempt else ""
            self.said.append(prefix + event.what)

    def of(self, word: str) -> bool:
        return any(word in line for line in self.said)


async def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s in vain for {what}"
        await asyncio.sleep(0.01)


class Line:
    """A frontier in this process, a pump and one consumer; the broker is real."""

    def __init__(self, address: str) -> None:
        self.frontier = MemoryFrontier()
        self.heard = Heard()
        self.out = RabbitDispatch(address, watch=self.heard)
        self.back = RabbitDispatch(address, [URL_QUEUE], prefetch=2, watch=self.heard)
        self.done = 0
        self.slow = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Line]:
        await self.frontier.open_job("job", JobSpec(gap=0.0, width=1000))
        pump = Pump(self.frontier, self.out, name="pump", routes=Routes(), watch=self.heard, batch=5)
        tasks = [asyncio.create_task(pump.run()), asyncio.create_task(self._consume())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.out.close()
            await self.back.close()
        assert await self.frontier.check() == []

    async def add(self, count: int, start: int = 0) -> None:
        numbers = range(start, start + count)
        await self.frontier.add([Request(f"http://h{n % 20}.example/{n}", "job") for n in numbers])

    async def _consume(self) -> None:
        async with Consumer(self.frontier, self.back, watch=self.heard) as consumer:
            while True:
                claim: Claim = await consumer.claim(8, worker="w", lease_seconds=30.0)
                if not claim.leases:
                    await consumer.wait(0.1)
                    continue
                await asyncio.sleep(self.slow)
                await consumer.settle([Done(lease, items=[b"1"]) for lease in claim.leases])
                self.done += len(claim.leases)

    async def over(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while (await self.frontier.job("job")).state is not JobState.DONE:
                await asyncio.sleep(0.01)


# -- what there is ----------------------------------------------------------------------------


async def test_the_topology_is_as_documented(server: RabbitServer) -> None:
    server.ctl("add_vhost", "plain")
    server.ctl("set_permissions", "-p", "plain", "guest", ".*", ".*", ".*")
    dispatch = RabbitDispatch(f"{server.url}plain")
    await dispatch.depths([URL_QUEUE, PRIORITY_QUEUE])
    await dispatch.close()
    rows = server.ctl("list_queues", "-p", "plain", "name", "durable", "arguments", "--formatter", "json")
    found = {row["name"]: (row["durable"], dict_of(row["arguments"])) for row in msgspec.json.decode(rows)}
    hours = {name: arguments["x-message-ttl"] / 3_600_000 for name, (_, arguments) in found.items()}
    assert hours == {URL_QUEUE: 1.0, PRIORITY_QUEUE: 0.5, FAILED_QUEUE: 24.0, RETURNED_QUEUE: 24.0}
    assert all(durable for durable, _ in found.values())
    for name in (URL_QUEUE, PRIORITY_QUEUE):
        arguments = found[name][1]
        assert arguments["x-dead-letter-exchange"] == "failed_exchange"
        assert arguments["x-dead-letter-routing-key"] == "failed"
    assert list(found[FAILED_QUEUE][1]) == ["x-message-ttl"], "anybody may declare it to look at it"
    bound = server.ctl("list_bindings", "-p", "plain", "source_name", "routing_key", "destination_name")
    wanted = {("failed_exchange", "failed", FAILED_QUEUE), ("failed_exchange", "failed", RETURNED_QUEUE)}
    assert wanted <= {tuple(line.split("\t")) for line in bound.splitlines()}


def dict_of(arguments: object) -> dict[str, Any]:
    """rabbitmqctl prints a table of arguments as an object, or as a list of triples."""
    if isinstance(arguments, dict):
        return arguments
    assert isinstance(arguments, list)
    return {name: value for name, _, value in arguments}


OURS = {"x-message-ttl": 3_600_000}
"""As far as names are concerned that have no prefix."""
QUEUES = [
    ("no arguments at all", {}, {}),
    ("another ttl", {}, {"x-message-ttl": 120_000}),
    ("a dead-letter exchange that is not there", {}, {**OURS, "x-dead-letter-exchange": "nowhere"}),
    ("the exchange without a name", {}, {**OURS, "x-dead-letter-exchange": ""}),
    ("a limit", {}, {**OURS, "x-max-length": 3}),
    ("a limit that refuses", {}, {"x-max-length": 3, "x-overflow": "reject-publish"}),
    ("priorities", {}, {**OURS, "x-max-priority": 9}),
    ("lazy", {}, {**OURS, "x-queue-mode": "lazy"}),
    ("quorum", {}, {**OURS, "x-queue-type": "quorum"}),
    ("an end when nobody uses it", {}, {"x-expires": 600_000}),
    ("one consumer at a time", {}, {"x-single-active-consumer": True}),
    ("not durable", {"durable": False}, OURS),
    ("deleted with its last consumer", {"auto_delete": True}, OURS),
    (
        "everything at once",
        {"durable": False, "auto_delete": True},
        {"x-max-length": 50, "x-max-priority": 3},
    ),
]


@asynccontextmanager
async def foreign(address: str) -> AsyncIterator[tuple[aiormq.abc.AbstractChannel, str]]:
    """A channel of somebody else, and what stands before the names."""
    connection = await aiormq.connect(address.partition("?")[0])
    try:
        yield await connection.channel(), address.partition("prefix=")[2].partition("&")[0]
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("flags", "arguments"), [case[1:] for case in QUEUES], ids=[case[0] for case in QUEUES]
)
async def test_queues_of_others_are_used_as_they_are(
    address: str, flags: dict[str, bool], arguments: dict[str, Any]
) -> None:
    async with foreign(address) as (channel, prefix):
        for queue in (URL_QUEUE, PRIORITY_QUEUE, FAILED_QUEUE):
            durable, auto_delete = flags.get("durable", True), flags.get("auto_delete", False)
            await channel.queue_declare(
                prefix + queue, durable=durable, auto_delete=auto_delete, arguments=arguments
            )
    async with Line(address).running() as line:
        await line.add(60)
        await line.over()
        counts = (await line.frontier.job("job")).counts
        assert (counts.done, counts.items, counts.dead) == (60, 60, 0), line.heard.said
        assert not line.heard.of("Attempt"), line.heard.said
        [told] = [one for one in line.heard.noted if URL_QUEUE in one]
        for name in (*flags, *(name for name in arguments if name not in OURS), "x-dead-letter-routing-key"):
            assert f"{name} " in told, "each difference is told"


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_whichever_kind_was_asked_for(address: str, queue_type: str) -> None:
    """`x-delivery-limit` goes with a quorum queue only: asking for it must not end us."""
    async with foreign(address) as (channel, prefix):
        for queue in (URL_QUEUE, RETURNED_QUEUE):
            await channel.queue_declare(
                prefix + queue,
                durable=True,
                arguments={"x-queue-type": "classic" if queue_type == "quorum" else "quorum"},
            )
    async with Line(f"{address}&queue_type={queue_type}").running() as line:
        await line.add(20)
        await line.over()
        assert (await line.frontier.job("job")).counts.done == 20
        assert not line.heard.of("Attempt"), line.heard.said


EXCHANGES: list[tuple[str, dict[str, Any]]] = [
    ("topic", {"durable": True}),
    ("fanout", {"durable": True}),
    ("headers", {"durable": True}),
    ("direct", {"durable": False}),
    ("direct", {"durable": True, "auto_delete": True}),
    ("direct", {"durable": True, "internal": True}),
    ("direct", {"durable": True, "arguments": {"alternate-exchange": "spare"}}),
]


@pytest.mark.parametrize(("kind", "how"), EXCHANGES, ids=str)
async def test_the_exchange_of_others_is_used_as_it_is(
    address: str, stack: AsyncExitStack, kind: str, how: dict[str, Any]
) -> None:
    channel, prefix = await stack.enter_async_context(foreign(address))
    await channel.exchange_declare(f"{prefix}failed_exchange", exchange_type=kind, **how)
    heard = Heard()
    dispatch = RabbitDispatch(address, ttls={"q": 0.05}, watch=heard)
    stack.push_async_callback(dispatch.close)
    await dispatch.send([message(7)])
    async with asyncio.timeout(PATIENCE):
        [back] = await dispatch.receive_returned()
    assert (back.message.leases[0].token, back.reason) == (7, "expired")
    await dispatch.finish([back])
    await dispatch.report_dead(
        [DeadLetter(1, Request("http://a.example/", "job"), "a", Failure("dns_failed"), 0.0)]
    )
    bodies = [(await channel.basic_get(f"{prefix}{FAILED_QUEUE}", no_ack=True)).body for _ in range(2)]
    assert any(b"dns_failed" in body for body in bodies), "people see what ended dead"
    [told] = heard.noted
    assert f"{prefix}failed_exchange (" in told and told.count("ours") == 1


async def test_what_waits_too_long_in_a_queue_of_others_comes_back(
    address: str, stack: AsyncExitStack
) -> None:
    """Neither their missing limit nor their own dead-letter exchange changes what is promised."""
    channel, prefix = await stack.enter_async_context(foreign(address))
    await channel.exchange_declare(f"{prefix}theirs", exchange_type="topic", durable=True)
    theirs: dict[str, Any] = {"x-dead-letter-exchange": f"{prefix}theirs"}
    await channel.queue_declare(f"{prefix}q", durable=True, arguments=theirs)
    theirs["x-dead-letter-routing-key"] = "their.key"
    await channel.queue_declare(f"{prefix}other", durable=True, arguments=theirs)
    dispatch = RabbitDispatch(address, ttls={"q": 0.05, "other": 0.05})
    stack.push_async_callback(dispatch.close)
    await dispatch.send([message(7), message(8, queue="other")])
    found: dict[int, str] = {}
    async with asyncio.timeout(PATIENCE):
        while len(found) < 2:
            back = await dispatch.receive_returned()
            found |= {each.message.leases[0].token: each.reason for each in back}
            await dispatch.finish(back)
    assert found == {7: "expired", 8: "expired"}


async def test_a_queue_that_drops_is_filled_only_while_somebody_listens(
    address: str, stack: AsyncExitStack
) -> None:
    """With a short limit and no dead-letter exchange, messages would be gone before a worker came, and
    nobody would know."""
    channel, prefix = await stack.enter_async_context(foreign(address))
    await channel.queue_declare(prefix + URL_QUEUE, durable=True, arguments={"x-message-ttl": 1000})
    frontier, out = MemoryFrontier(), RabbitDispatch(address)
    stack.push_async_callback(out.close)
    await frontier.open_job("job", JobSpec(gap=0.0, width=10))
    pumping = asyncio.create_task(
        Pump(frontier, out, name="pump", routes=Routes(), watch=Heard(), batch=1).run()
    )
    try:
        await frontier.add([Request(f"http://a.example/{n}", "job") for n in range(3)])
        other = Request("http://b.example/", "job", queue="ours")
        await frontier.add([other])
        while not (await out.depths(["ours"]))["ours"].waiting:
            assert not pumping.done()
            await asyncio.sleep(0.05)
        # The pump looked at the other queue before this one.
        assert (await frontier.queues())["scraping"]["waiting"] == 3
        receiver = RabbitDispatch(address, [URL_QUEUE])
        stack.push_async_callback(receiver.close)
        assert len(await collect(receiver, 3)) == 3
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)


async def test_a_policy_that_shortens_a_queue_makes_nobody_a_suspect(
    server: RabbitServer, address: str
) -> None:
    """Nobody can see a policy. What it drops is sent again, however often."""
    prefix = address.partition("prefix=")[2]
    server.ctl("set_policy", prefix, f"^{prefix}{URL_QUEUE}$", '{"max-length": 1}', "--apply-to", "queues")
    try:
        async with Line(address).running() as line:
            line.slow = 0.02
            await line.add(200)
            await line.over()
            counts = (await line.frontier.job("job")).counts
            assert (counts.done, counts.dead) == (200, 0)
    finally:
        server.ctl("clear_policy", prefix)


async def test_a_full_queue_of_failures_holds_nobody_up(address: str, stack: AsyncExitStack) -> None:
    channel, prefix = await stack.enter_async_context(foreign(address))
    full: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await channel.queue_declare(prefix + FAILED_QUEUE, durable=True, arguments=full)
    heard = Heard()
    dispatch = RabbitDispatch(address, watch=heard)
    stack.push_async_callback(dispatch.close)
    letter = DeadLetter(1, Request("http://a.example/", "job"), "a.example", Failure("dns_failed"), 0.0)
    for _ in range(3):
        await dispatch.report_dead([letter, letter])
    assert len([told for told in heard.noted if "takes no more" in told and "shoal dead list" in told]) == 1


async def test_what_may_not_be_declared_may_be_used(server: RabbitServer, stack: AsyncExitStack) -> None:
    """A broker whose queues are made by those who run it, for users who may only write and read."""
    server.ctl("add_vhost", "theirs")
    server.ctl("set_permissions", "-p", "theirs", "guest", ".*", ".*", ".*")
    server.ctl("add_user", "plain", "word")
    address = f"{server.url}theirs"
    maker = RabbitDispatch(address)
    stack.push_async_callback(maker.close)
    place = f"amqp://plain:word@127.0.0.1:{server.port}/theirs"
    server.ctl("set_permissions", "-p", "theirs", "plain", "^$", ".*", ".*")
    dispatch = RabbitDispatch(place, [URL_QUEUE])
    stack.push_async_callback(dispatch.close)
    with pytest.raises(DispatchRefused, match="ACCESS_REFUSED") as caught:
        await dispatch.depths([URL_QUEUE])
    assert "the permissions to configure" in caught.value.hint
    await maker.depths([URL_QUEUE])
    await dispatch.send([message(3, queue=URL_QUEUE)])
    assert tokens(await collect(dispatch, 1)) == [3]


async def test_what_cannot_be_used_is_told_with_the_way_out(address: str, stack: AsyncExitStack) -> None:
    channel, prefix = await stack.enter_async_context(foreign(address))
    stream: dict[str, Any] = {"x-queue-type": "stream"}
    await channel.queue_declare(f"{prefix}{URL_QUEUE}", durable=True, arguments=stream)
    await channel.queue_declare(f"{prefix}{PRIORITY_QUEUE}", exclusive=True)
    dispatch = RabbitDispatch(address, [URL_QUEUE])
    stack.push_async_callback(dispatch.close)
    for queue, difference in (
        (URL_QUEUE, "x-queue-type: theirs stream, ours classic"),
        (PRIORITY_QUEUE, "exclusive: theirs true, ours false"),
    ):
        for ask in (dispatch.depths([queue]), dispatch.send([message(1, queue=queue)])):
            with pytest.raises(DispatchRefused) as caught:
                await ask
            assert f"the queue {prefix}{queue} " in str(caught.value) and difference in str(caught.value)
            assert "?prefix=" in caught.value.hint
    with pytest.raises(DispatchRefused):
        await dispatch.receive(1)


async def test_commands_use_what_is_there_and_say_so_once(tmp_path: Path, address: str) -> None:
    async with foreign(address) as (channel, prefix):
        await channel.exchange_declare(f"{prefix}failed_exchange", exchange_type="topic")
        await channel.queue_declare(prefix + URL_QUEUE, durable=True, arguments={"x-message-ttl": 7000})
    with LoopbackSite(generated_site(6)) as site, Shell(tmp_path, SHOAL_DISPATCH=address) as shell:
        crawled = await asyncio.to_thread(
            shell.run, "crawl", site.url, "--rate", "none", "--allow-private", "--workers", "2", "--json"
        )
        assert crawled.code == 0, crawled.err
        lines = [line for line in crawled.err.splitlines() if "used as others declared it" in line]
        assert len(lines) == 1, crawled.err
        for told in (
            "type topic, ours direct",
            "x-message-ttl 7000, ours 3600000",
            "durable false, ours true",
        ):
            assert told in lines[0]
        assert "guest:guest" not in crawled.err
        worked = await asyncio.to_thread(shell.run, "worker", "--drain")
        assert (worked.code, worked.err.count("used as others declared it")) == (0, 1), worked.err


async def test_who_may_not_enter_is_told_at_once(server: RabbitServer) -> None:
    place = f"127.0.0.1:{server.port}"
    for address, hint in (
        (f"amqp://guest:secret-word@{place}/", "RABBITMQ_PASSWORD"),
        (f"amqp://guest:guest@{place}/nowhere", "list_vhosts"),
    ):
        dispatch = RabbitDispatch(address)
        told: list[str] = []
        with pytest.raises(DispatchRefused) as caught:
            await reach_dispatch(dispatch, ["q"], attempts=9, tell=told.append)
        assert hint in caught.value.hint and told == []
        assert "secret-word" not in str(caught.value) + caught.value.hint
        await dispatch.close()


async def test_addresses(monkeypatch: pytest.MonkeyPatch, server: RabbitServer) -> None:
    monkeypatch.setenv("RABBITMQ_HOST", "127.0.0.1")
    monkeypatch.setenv("RABBITMQ_PORT", str(server.port))
    dispatch = open_dispatch("amqp://")
    assert (await dispatch.info()).startswith("RabbitMQ 3.")
    await dispatch.close()
    monkeypatch.setenv("RABBITMQ_PASSWORD", "wr@ng/word")
    dispatch = open_dispatch("amqp://")
    with pytest.raises(DispatchRefused) as caught:
        await dispatch.info()
    assert "wr@ng" not in str(caught.value)
    await dispatch.close()
    for bad in ("http://x", "amqp://host:notaport/", "amqp://:5672"):
        with pytest.raises((UsageError, DispatchRefused)):
            open_dispatch(bad)


def test_without_the_extra_the_hint_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "aiormq", None)
    monkeypatch.delitem(__import__("sys").modules, "shoal.dispatch.rabbitmq", raising=False)
    with pytest.raises(MissingExtra) as caught:
        open_dispatch("amqp://localhost")
    assert "pip install" in caught.value.hint and "[rabbitmq]" in caught.value.hint


# -- what happens to a line under way ------------------------------------------------------------


async def test_a_memory_alarm_holds_nobody_up_and_loses_nothing(own: RabbitServer) -> None:
    async with Line(f"{own.url}?prefix={uuid4().hex}.").running() as line:
        await line.add(50)
        await line.over()
        own.ctl("set_vm_memory_high_watermark", "0.0001")
        try:
            await line.add(100, start=50)
            await until(lambda: line.heard.of("takes no messages"), "the alarm to be told")

            def given_back() -> bool:
                return not any(name.startswith("transit:") for name in holders)

            holders: dict[str, int] = {"transit:": 1}
            end = time.monotonic() + PATIENCE
            while not given_back():
                assert time.monotonic() < end, holders
                holders = lease_counts(await line.frontier.leases())
                await asyncio.sleep(0.05)
            began = time.monotonic()
            with pytest.raises(DispatchError, match="low on memory"):
                await line.out.send([message(1)])
            assert time.monotonic() - began < 1.0, "it is known to be blocked: no need to wait"
        finally:
            own.ctl("set_vm_memory_high_watermark", "0.8")
        await line.over()
        counts = (await line.frontier.job("job")).counts
        assert (counts.done, counts.items) == (150, 150)
        await until(lambda: line.heard.of("takes messages again"), "the end of the alarm to be told")


async def test_connections_that_are_closed_are_made_again(server: RabbitServer, address: str) -> None:
    async with Line(address).running() as line:
        line.slow = 0.01
        await line.add(300)
        for round in (1, 2):
            await until(lambda: line.done >= 60 * round, "visits")  # noqa: B023
            server.ctl("close_all_connections", "enough")
        await line.over()
        counts = (await line.frontier.job("job")).counts
        assert (counts.done, counts.items, counts.dead) == (300, 300, 0)
        assert line.heard.of("Attempt 1 failed: RabbitMQ at 127.0.0.1")
        assert line.heard.of("Connected to RabbitMQ on attempt 2")


async def test_a_deleted_queue_is_made_again(server: RabbitServer, address: str) -> None:
    prefix = address.partition("prefix=")[2]
    async with Line(address).running() as line:
        await line.add(20)
        await line.over()
        server.ctl("delete_queue", prefix + URL_QUEUE)
        await line.add(20, start=20)
        await line.over()
        assert (await line.frontier.job("job")).counts.done == 40


async def test_who_holds_a_message_too_long_gets_it_again(own: RabbitServer) -> None:
    """The consumer timeout of RabbitMQ: it closes the channel of whoever does not acknowledge."""
    own.ctl(
        "eval",
        "application:set_env(rabbit, consumer_timeout, 1000),"
        " application:set_env(rabbit, channel_tick_interval, 300).",
    )
    try:
        async with Line(f"{own.url}?prefix={uuid4().hex}.").running() as line:
            line.slow = 3.0
            await line.add(8)
            await until(lambda: line.heard.of("Attempt 1 failed"), "the channel to be closed")
            line.slow = 0.0
            await line.over()
            counts = (await line.frontier.job("job")).counts
            assert (counts.done, counts.items, counts.dead) == (8, 8, 0), "each was visited once"
    finally:
        own.ctl(
            "eval",
            "application:set_env(rabbit, consumer_timeout, 1800000),"
            " application:set_env(rabbit, channel_tick_interval, 60000).",
        )


async def test_what_nobody_survives_leaves_its_queue(
    server: RabbitServer, address: str, stack: AsyncExitStack
) -> None:
    """A message that kills whoever receives it is not delivered for ever, where queues count."""
    address += "&queue_type=quorum"
    sender = RabbitDispatch(address)
    stack.push_async_callback(sender.close)
    await sender.send([message(7)])
    deliveries = 0
    while (await sender.depths([FAILED_QUEUE]))[FAILED_QUEUE].waiting == 0:
        wire = await Wire.to("127.0.0.1", server.port)
        handle = RabbitDispatch(address.replace(f":{server.port}/", f":{wire.port}/"), ["q"])
        try:
            async with asyncio.timeout(1.0):
                assert tokens(await collect(handle, 1)) == [7]
                deliveries += 1
        except TimeoutError:
            pass
        finally:
            await wire.close()
            await handle.close()
        assert deliveries <= DELIVERIES + 1
    assert deliveries == DELIVERIES + 1
    pump = RabbitDispatch(address)
    stack.push_async_callback(pump.close)
    async with asyncio.timeout(PATIENCE):
        [back] = await pump.receive_returned()
    assert (back.message.leases[0].token, back.reason) == (7, "delivery_limit")


async def test_suspects_of_a_crash_wait_again_and_end_dead(address: str, stack: AsyncExitStack) -> None:
    """What came back because nobody survived it counts as a crash: three of them are the end."""
    frontier = MemoryFrontier()
    await frontier.open_job("job", JobSpec(gap=0.0, width=10))
    await frontier.add([Request("http://a.example/1", "job")])
    dispatch = RabbitDispatch(address, [URL_QUEUE], prefetch=1)
    out = RabbitDispatch(address)
    stack.push_async_callback(dispatch.close)
    stack.push_async_callback(out.close)
    pump = Pump(frontier, out, name="pump", routes=Routes(), watch=Heard())
    pumping = asyncio.create_task(pump.run())
    seen: list[Lease] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while (await frontier.job("job")).state is not JobState.DONE:
                try:
                    async with asyncio.timeout(0.5):
                        deliveries = await dispatch.receive(1)
                except TimeoutError:
                    continue
                for delivery in deliveries:
                    seen += delivery.message.leases
                    channel = await dispatch._in.channel()
                    await channel.basic_reject(delivery.tag.number, requeue=False)
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    counts = (await frontier.job("job")).counts
    assert (len(seen), counts.dead, counts.done) == (3, 1, 0)


async def test_a_timed_out_send_is_given_back_and_may_still_arrive(
    server: RabbitServer, address: str, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq, "CONFIRM", 0.5)
    sender = RabbitDispatch(address)
    stack.push_async_callback(sender.close)
    await sender.depths(["q"])
    server.freeze()
    try:
        began = time.monotonic()
        sent = [message(1), message(2)]
        assert await sender.send(sent) == sent
        assert time.monotonic() - began < 5.0
    finally:
        server.thaw()
    receiver = RabbitDispatch(address, ["q"])
    stack.push_async_callback(receiver.close)
    assert tokens(await collect(receiver, 2)) == [1, 2]


async def test_a_fast_queue_that_lost_its_worker_gives_all_back(
    server: RabbitServer, address: str, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast loses messages, never URLs. What a dead worker had in hand waits again when nothing has
    moved for a while, or at the end of its lease."""
    monkeypatch.setattr(pumps, "MISSING", 1.0)
    batch, prefetch, total = 5, 3, 200
    frontier = MemoryFrontier()
    await frontier.open_job("job", JobSpec(gap=0.0, width=1000))
    await frontier.add([Request(f"http://h{n % 20}.example/{n}", "job") for n in range(total)])
    out = RabbitDispatch(address)
    stack.push_async_callback(out.close)
    pump = Pump(frontier, out, name="p", routes=Routes(), watch=Heard(), batch=batch, prefetch=prefetch)
    pumping = asyncio.create_task(pump.run())
    wire = await Wire.to("127.0.0.1", server.port)
    dying = RabbitDispatch(
        address.replace(f":{server.port}/", f":{wire.port}/"),
        [URL_QUEUE],
        prefetch=prefetch,
        fast=[URL_QUEUE],
    )
    try:
        async with Consumer(frontier, dying, watch=Heard(), limit=prefetch) as consumer:
            await until(lambda: consumer._held >= prefetch, "a full hand")
            held = len(consumer._waiting)
            await wire.close()
        await dying.close()
        assert 0 < held <= batch * prefetch, "what can be lost is bounded"
        done = 0
        other = RabbitDispatch(address, [URL_QUEUE], prefetch=prefetch, fast=[URL_QUEUE])
        stack.push_async_callback(other.close)
        async with Consumer(frontier, other, watch=Heard(), limit=prefetch) as consumer:
            async with asyncio.timeout(PATIENCE):
                while (await frontier.job("job")).state is not JobState.DONE:
                    claim = await consumer.claim(50, worker="other", lease_seconds=30.0)
                    await consumer.settle([Done(lease) for lease in claim.leases])
                    done += len(claim.leases)
                    if not claim.leases:
                        await consumer.wait(0.05)
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    counts = (await frontier.job("job")).counts
    assert (done, counts.done, counts.dead, counts.expired) == (total, total, 0, 0)


# -- starting -----------------------------------------------------------------------------------


async def test_a_worker_waits_for_its_broker(server: RabbitServer, tmp_path: Path, address: str) -> None:
    """Whoever is started first: attempts are told, and the connection that is made at last."""
    wire = await Wire.to("127.0.0.1", server.port)
    port = wire.port
    await wire.close()
    behind = address.replace(f":{server.port}/", f":{port}/")
    with Shell(tmp_path, SHOAL_DISPATCH=behind) as shell:
        running = [shell.start("worker"), shell.start("pump")]

        async def all_say(words: str) -> None:
            await until(lambda: all(words in command.err for command in running), words)

        await all_say("Attempt 2 failed: ")
        wire = await Wire.to("127.0.0.1", server.port, port=port)
        await all_say("Connected to RabbitMQ on attempt ")
        assert not any("guest:guest" in command.err for command in running)
    await wire.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_how_a_stopped_pump_exits(tmp_path: Path, address: str, number: int, code: int) -> None:
    with Shell(tmp_path, SHOAL_DISPATCH=address) as shell:
        pump = shell.start("pump")
        await until(lambda: "pumping from" in pump.err, "the pump")
        pump.signal(number)
        ended = pump.wait()
    assert ended.code == code, ended
    assert "URLs sent" in ended.err and "Traceback" not in ended.err


def test_a_broker_that_never_comes_is_given_up(tmp_path: Path) -> None:
    env = {"SHOAL_DISPATCH": "amqp://guest:secret-word@127.0.0.1:9/", "SHOAL_CONNECT_ATTEMPTS": "2"}
    with Shell(tmp_path, **env) as shell:
        ended = shell.run("worker")
    assert ended.code == 4
    assert "Attempt 1 failed: " in ended.err and "tried 2 times" in ended.err and "hint:" in ended.err
    assert "secret-word" not in ended.err


# -- a whole line of processes --------------------------------------------------------------------


def test_what_waits_too_long_ends_as_expired_everywhere(
    server: RabbitServer, tmp_path: Path, address: str
) -> None:
    """Rules give queues, the smaller of the limits counts, and people see the end in both places."""
    with Shell(tmp_path, SHOAL_DISPATCH=address) as shell:
        words = ["--allow-private", "--rate", "none", "--per-host", "9"]
        urls = [f"http://127.0.0.1:9/{kind}/{n}" for kind in ("news", "page") for n in range(5)]
        pump = shell.start("pump")
        wait_until(lambda: "pumping" in pump.err, "the pump")
        assert shell.run("enqueue", "late", *urls, *words, "--ttl", "8").code == 0

        def told() -> dict[str, Any]:
            answer = shell.run("status", "late", "--json")
            facts: dict[str, Any] = answer.json()
            return facts

        seen: set[str] = set()
        while not {URL_QUEUE, PRIORITY_QUEUE} <= seen:
            facts = told()
            seen |= {name for name, depth in facts["broker"]["queues"].items() if depth["waiting"]}
            assert facts["state"] == "running", "no message was ever seen waiting"
        wait_until(lambda: shell.job("late").state is JobState.DONE, "the end of the job")
        counts = shell.job("late").counts
        assert (counts.expired, counts.done, counts.dead) == (10, 0, 0)
        facts = told()
        assert facts["broker"]["queues"][FAILED_QUEUE]["waiting"] >= 2, "one message of each queue"
        pump.signal(15)
        assert pump.wait().code == 0


def test_a_pump_that_is_killed_is_followed_by_another(tmp_path: Path, address: str) -> None:
    with (
        LoopbackSite(generated_site(pages=40, links=4, latency=0.01)) as site,
        Shell(tmp_path, SHOAL_DISPATCH=address) as shell,
    ):
        first, second = shell.start("pump"), shell.start("worker")
        urls = sorted(site.expected_urls())
        words = ["--allow-private", "--no-robots", "--rate", "20/s", "--per-host", "2"]
        assert shell.run("enqueue", "both", *urls, *words).code == 0
        wait_until(lambda: len(site.log()) > 5, "some pages")
        first.kill()
        wait_until(lambda: shell.job("both").state is JobState.DONE, "the end of the job")
        counts = shell.job("both").counts
        assert (counts.done, counts.items) == (len(urls), len(urls))
        assert shell.check() == []
        assert "Traceback" not in first.err + second.err


@pytest.mark.parametrize("verb", ["cancel", "pause"])
def test_a_stopped_job_leaves_its_hosts_to_others(tmp_path: Path, address: str, verb: str) -> None:
    """What lies in a queue that nobody consumes holds its host; `explain` says so. Cancelled, it ends at
    once; paused, it waits again as soon as somebody gets it."""
    urls = [f"http://a.test/{n}" for n in range(2)]
    with Shell(tmp_path, SHOAL_DISPATCH=address) as shell:
        assert shell.run("enqueue", "one", urls[0], "--queue", "slow").code == 0
        pump = shell.start("pump")
        wait_until(lambda: shell.job("one").counts.leased == 1, "a message in the broker")
        assert shell.run("enqueue", "two", urls[1]).code == 0
        [told] = shell.run("explain", urls[1], "--job", "two", "--json").json()["jobs"]
        assert told["broker_holds"] == [{"queue": "slow", "urls": 1, "consumers": 0}], told
        assert "queue slow (no consumers)" in told["why"]
        assert shell.run(verb, "one").code == 0
        if verb == "pause":
            shell.start("worker", "--queues", "slow", "--no-pump")
        wait_until(lambda: shell.job("two").counts.leased == 1, "the other job's turn", 30)
        counts = shell.job("one").counts
        assert (counts.leased, counts.waiting, counts.cancelled) == (0, verb == "pause", verb == "cancel")
        assert shell.run("status", "one", "--json").json()["in_broker"] == 0
        assert not pump.over
        assert shell.check() == []


def test_a_queue_that_is_younger_than_its_workers_is_served(tmp_path: Path, address: str) -> None:
    with (
        LoopbackSite(generated_site(pages=5)) as site,
        Shell(tmp_path, SHOAL_DISPATCH=address) as shell,
    ):
        worker = shell.start("worker")
        wait_until(lambda: "worker " in worker.err, "the worker to have begun")
        words = ["--allow-private", "--no-robots", "--rate", "none", "--queue", "business"]
        urls = sorted(site.expected_urls())
        assert shell.run("enqueue", "shops", *urls, *words).code == 0
        wait_until(lambda: shell.job("shops").state is JobState.DONE, "the end of the job")
        assert shell.job("shops").counts.items == len(urls)
        assert "Traceback" not in worker.err
