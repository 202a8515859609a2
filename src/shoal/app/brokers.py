"""The broker beside a frontier: its state, its consumer and its pump."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shoal import events
from shoal.app.processes import process_gone, process_name
from shoal.app.session import Session
from shoal.dispatch.consumer import Consumer
from shoal.dispatch.port import Dispatch
from shoal.dispatch.pump import Pump
from shoal.dispatch.routes import Routes, broker_queue, frontier_queue
from shoal.errors import DispatchError, ungrouped
from shoal.frontier.port import Frontier
from shoal.queues import FAILED_QUEUE, RESERVED_QUEUES, check_queue
from shoal.registry import broker_place, open_dispatch, reach_dispatch

ANSWER = 2.0
"""Seconds that a broker has to respond to a greeting."""
GREETINGS = {
    "redis": (6379, b"PING\r\n"),
    "rediss": (6379, b""),
    "amqp": (5672, b"AMQP\0\0\x09\x01"),
    "pyamqp": (5672, b"AMQP\0\0\x09\x01"),
    "amqps": (5671, b""),
}
"""The default port of a broker, and bytes that it responds to without a login. With TLS, a connection has to
suffice."""


@asynccontextmanager
async def broker(
    session: Session, queues: Collection[str] = (), *, watch: events.Watcher | None = None
) -> AsyncIterator[Dispatch]:
    """Opens the dispatch that the settings name, receiving from these queues, until the body ends. An object
    that a user gave is used as it is, and stays open."""
    if (given := session.parts.dispatch) is not None:
        if queues:
            given.subscribe(queues)
        yield given
        return
    settings = session.settings
    fast = session.routes.fast if session.routes else ()
    made = open_dispatch(
        settings.dispatch, queues, prefetch=settings.prefetch, fast=fast, watch=watch or session.log
    )
    try:
        yield made
    finally:
        await made.close()


async def broker_queues(session: Session, queues: Collection[str] | None = None) -> list[str]:
    """Returns the broker queues for these frontier queues; without any, for all of them and those of the
    routes. Raises UsageError for reserved names."""
    assert session.routes is not None
    for queue in queues or ():
        check_queue(queue)
    names = session.routes.queues if queues is None else ()
    # An old frontier may have reserved names: dead messages of the broker would be taken for work.
    more = sorted(set(await session.frontier.queues()) - RESERVED_QUEUES) if queues is None else queues
    return list(dict.fromkeys([*names, *map(broker_queue, more)]))


async def broker_state(session: Session) -> dict[str, Any] | None:
    """Returns the state of the broker and its queues; None if no broker is named."""
    if not session.settings.dispatch:
        return None
    state: dict[str, Any] = {"address": broker_place(session.settings.dispatch), "about": "", "queues": {}}
    async with broker(session) as dispatch:
        try:
            depths = await dispatch.depths([*await broker_queues(session), FAILED_QUEUE])
            state["about"] = await dispatch.info()
            state["queues"] = {name: msgspec.to_builtins(depth) for name, depth in depths.items()}
        except DispatchError as error:
            state |= {"error": str(error), "hint": error.hint}
    return state


async def wait_for_broker(
    session: Session, tell: Callable[[str], None], queues: Collection[str] | None = None
) -> None:
    """Waits until the broker responds; returns at once if none is named. Raises DispatchError after as many
    attempts as the settings allow. `tell` gets each attempt, and a note about each queue that another program
    has declared differently."""
    if not session.has_dispatch:
        return

    def watch(event: events.Event) -> None:
        if isinstance(event, events.Notice):
            tell(event.what)

    async with broker(session, watch=watch) as dispatch:
        names = await broker_queues(session, queues)
        await reach_dispatch(dispatch, names, attempts=session.settings.connect_attempts, tell=tell)


async def celery_broker_away(url: str) -> bool:
    """Whether the broker of Celery workers does not respond. Works without Celery. Brokers other than a
    single Redis or RabbitMQ cannot be checked and count as reachable."""
    parts = urlsplit(url)
    default, greeting = GREETINGS.get(parts.scheme, (0, b""))
    if not default or ";" in url:
        return False
    try:
        async with asyncio.timeout(ANSWER):
            host, port = parts.hostname or "localhost", parts.port or default
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(greeting)
                return bool(greeting) and not await reader.read(1)
            finally:
                writer.close()
    except (OSError, ValueError):  # TimeoutError is an OSError
        return True


@asynccontextmanager
async def consumer_frontier(
    session: Session, queues: Collection[str] | None, *, tell: Callable[[str], None]
) -> AsyncIterator[Frontier]:
    """Opens the frontier for a worker: with a broker, a consumer that receives from it; else the frontier
    itself.

    Raises DispatchError if the broker does not respond after as many attempts as the settings allow. `tell`
    is called with each attempt."""
    if not session.has_dispatch:
        yield session.frontier
        return
    names = await broker_queues(session, queues)
    async with broker(session, names) as dispatch:
        await reach_dispatch(dispatch, names, attempts=session.settings.connect_attempts, tell=tell)
        limit = session.settings.prefetch * len(names)
        every = partial(broker_queues, session) if queues is None else None
        async with Consumer(
            session.frontier, dispatch, watch=session.log, limit=limit, queues=every
        ) as consumer:
            yield consumer


@asynccontextmanager
async def running_pump(
    session: Session, *, queues: Collection[str] | None = None, job: str | None = None
) -> AsyncIterator[Pump]:
    """Runs a pump beside the body. It stands by while another pump is active. If it fails, the body is
    cancelled and its error is raised."""
    settings = session.settings
    async with broker(session) as dispatch:
        pump = Pump(
            session.frontier,
            dispatch,
            name=f"{process_name()}_pump",
            routes=session.routes or Routes(settings.rules),
            watch=session.log,
            queues=None if queues is None else [*dict.fromkeys([*queues, *map(frontier_queue, queues)])],
            job=job,
            batch=settings.dispatch_batch,
            prefetch=settings.prefetch,
            is_dead=process_gone,
        )
        with ungrouped():
            async with asyncio.TaskGroup() as group:
                pumping = group.create_task(pump.run())
                yield pump
                pumping.cancel()


@asynccontextmanager
async def delivered(session: Session, job: str) -> AsyncIterator[Frontier]:
    """The frontier as a worker of this process sees it that works on one job to its end: with a dispatch,
    the job's leases go through it."""
    if not session.has_dispatch:
        yield session.frontier
        return

    async with (
        consumer_frontier(session, None, tell=lambda _: None) as frontier,
        running_pump(session, job=job),
    ):
        yield frontier
