"""RabbitMQ as a dispatch passes the contract, on a private broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from uuid import uuid4

import aiormq
import msgspec
import pytest

from shoal.dispatch.port import Dispatch
from shoal.dispatch.rabbitmq import CLASSIC, FAILED_EXCHANGE, QUORUM, RabbitDispatch
from shoal.queues import FAILED_QUEUE, RETURNED_QUEUE
from shoal.testing.dispatch import SHORT, SHORT_TTL, DispatchContract, DispatchHarness
from tests.rig import shared
from tests.rig.rabbitmq_server import available
from tests.rig.wire import Wire

pytestmark = pytest.mark.skipif(not available(), reason="rabbitmq-server is not installed")


class RabbitHarness:
    """A prefix of its own on the one broker. Each handle has its own wire, which can be cut."""

    def __init__(self, queue_type: str) -> None:
        self.queue_type = queue_type
        self.prefix = f"{uuid4().hex}."
        self.handles: dict[Dispatch, Wire] = {}

    async def open(
        self, queues: Collection[str] = (), *, prefetch: int = 10, fast: Collection[str] = ()
    ) -> Dispatch:
        wire = await Wire.to("127.0.0.1", shared.rabbitmq().port)
        handle = RabbitDispatch(
            f"amqp://guest:guest@127.0.0.1:{wire.port}/?prefix={self.prefix}&queue_type={self.queue_type}",
            queues,
            prefetch=prefetch,
            fast=fast,
            ttls={SHORT: SHORT_TTL},
        )
        self.handles[handle] = wire
        return handle

    async def cut(self, handle: Dispatch) -> None:
        await self.handles[handle].close()

    async def failed_urls(self) -> list[str]:
        found: list[str] = []
        connection = await aiormq.connect(shared.rabbitmq().url)
        channel = await connection.channel()
        while (message := await channel.basic_get(self.prefix + FAILED_QUEUE, no_ack=True)).body:
            found.append(msgspec.json.decode(message.body)["url"])
        await connection.close()
        return found

    async def rubbish(self, queue: str, body: bytes) -> None:
        connection = await aiormq.connect(shared.rabbitmq().url)
        channel = await connection.channel()
        await channel.basic_publish(body, routing_key=self.prefix + queue)
        await connection.close()

    async def close(self) -> None:
        for handle, wire in self.handles.items():
            await handle.close()
            await wire.close()
        connection = await aiormq.connect(shared.rabbitmq().url)
        channel = await connection.channel()
        for queue in ("q", "other", "new", SHORT, FAILED_QUEUE, RETURNED_QUEUE):
            with suppress(aiormq.exceptions.AMQPError):
                await channel.queue_delete(self.prefix + queue)
        await channel.exchange_delete(self.prefix + FAILED_EXCHANGE)
        await connection.close()


class TestRabbit(DispatchContract):
    queue_type = CLASSIC

    @pytest.fixture
    async def harness(self) -> AsyncIterator[DispatchHarness]:
        harness = RabbitHarness(self.queue_type)
        yield harness
        await harness.close()


class TestRabbitQuorum(TestRabbit):
    """With the queues of a cluster."""

    queue_type = QUORUM
