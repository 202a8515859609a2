"""The broker beside a frontier: what is in it, workers that receive from it, the pump that fills it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from shoal import events
from shoal.app.processes import process_gone, process_name
from shoal.app.session import Session
from shoal.dispatch.consumer import Consumer
from shoal.dispatch.port import Dispatch
from shoal.dispatch.pump import Pump
from shoal.dispatch.routes import Routes, broker_queue, frontier_queue
from shoal.errors import DispatchError, first_of
from shoal.frontier.port import Frontier
from shoal.frontier.rules import check_queue
from shoal.model import FAILED_QUEUE, RESERVED_QUEUES
from shoal.registry import broker_place, open_dispatch, reach_dispatch


def broker(
    session: Session, queues: Collection[str] = (), *, watch: events.Watcher = events.nobody
) -> Dispatch:
    """A handle on the dispatch that the settings name; it receives from these queues."""
    settings = session.settings
    fast = session.routes.fast if session.routes else ()
    return open_dispatch(settings.dispatch, queues, prefetch=settings.prefetch, fast=fast, watch=watch)


async def broker_queues(session: Session, queues: Collection[str] | None = None) -> list[str]:
    """The broker's queues for these of the frontier; for all of them, and those of the routes.
    Raises UsageError about names that no work has."""
    assert session.routes is not None
    for queue in queues or ():
        check_queue(queue)
    names = session.routes.queues if queues is None else ()
    # An old frontier may hold such names: what is dead in the broker would be taken for work.
    more = sorted(set(await session.frontier.queues()) - RESERVED_QUEUES) if queues is None else queues
    return list(dict.fromkeys([*names, *map(broker_queue, more)]))


async def broker_state(session: Session) -> dict[str, Any] | None:
    """What the broker says of itself and of its queues; None when there is none."""
    if not session.settings.dispatch:
        return None
    state: dict[str, Any] = {"address": broker_place(session.settings.dispatch), "about": "", "queues": {}}
    dispatch = broker(session)
    try:
        depths = await dispatch.depths([*await broker_queues(session), FAILED_QUEUE])
        state["about"] = await dispatch.about()
        state["queues"] = {name: msgspec.to_builtins(depth) for name, depth in depths.items()}
    except DispatchError as error:
        state |= {"error": str(error), "hint": error.hint}
    finally:
        await dispatch.close()
    return state


async def broker_reached(
    session: Session, tell: Callable[[str], None], queues: Collection[str] | None = None
) -> None:
    """Return when the broker answers; at once when there is none. Raises DispatchError after as many
    attempts as the settings allow. `tell` hears of them."""
    if not session.settings.dispatch:
        return
    dispatch = broker(session)
    try:
        names = await broker_queues(session, queues)
        await reach_dispatch(dispatch, names, attempts=session.settings.connect_attempts, tell=tell)
    finally:
        await dispatch.close()


@asynccontextmanager
async def received(
    session: Session,
    queues: Collection[str] | None,
    *,
    watch: events.Watcher,
    tell: Callable[[str], None],
) -> AsyncIterator[Frontier]:
    """The frontier as a worker with a dispatch sees it; without one, the frontier itself.

    Raises DispatchError when the broker does not answer, after as many attempts as the settings
    allow. `tell` hears of them."""
    if not session.settings.dispatch:
        yield session.frontier
        return
    names = await broker_queues(session, queues)
    dispatch = broker(session, names, watch=watch)
    try:
        await reach_dispatch(dispatch, names, attempts=session.settings.connect_attempts, tell=tell)
        limit = session.settings.prefetch * len(names)
        every = partial(broker_queues, session) if queues is None else None
        async with Consumer(session.frontier, dispatch, watch=watch, limit=limit, queues=every) as consumer:
            yield consumer
    finally:
        await dispatch.close()


@asynccontextmanager
async def pumped(
    session: Session,
    *,
    watch: events.Watcher,
    queues: Collection[str] | None = None,
    job: str | None = None,
) -> AsyncIterator[Pump]:
    """A pump beside the body: it pumps, or stands by while another does. If it cannot go on, the
    body ends with its error."""
    settings = session.settings
    dispatch = broker(session, watch=watch)
    pump = Pump(
        session.frontier,
        dispatch,
        name=f"{process_name()}_pump",
        routes=session.routes or Routes(settings.rules),
        watch=watch,
        queues=None if queues is None else [*dict.fromkeys([*queues, *map(frontier_queue, queues)])],
        job=job,
        batch=settings.dispatch_batch,
        prefetch=settings.prefetch,
        gone=process_gone,
    )
    try:
        async with asyncio.TaskGroup() as group:
            pumping = group.create_task(pump.run())
            yield pump
            pumping.cancel()
    except* Exception as several:
        raise first_of(several) from None
    finally:
        await dispatch.close()
