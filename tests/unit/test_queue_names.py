"""Names that no queue of work may have, and what happens to old frontiers that hold one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pydantic
import pytest

from shoal.api.models import ScrapeRequest
from shoal.app import Session, broker_queues
from shoal.cli import app
from shoal.dispatch.pump import Pump
from shoal.dispatch.routes import URL_QUEUE, Routes, Rule
from shoal.errors import FetchError, UsageError
from shoal.events import Event, Trouble
from shoal.frontier import memory
from shoal.frontier.memory import MemoryFrontier
from shoal.model import Claim, JobSpec, Request
from shoal.queues import BROKER_QUEUES, FAILED_QUEUE, RESERVED_QUEUES, TASK_QUEUE
from shoal.scrape.router import Scraper, checked_request
from shoal.settings import load
from tests.rig.local_dispatch import Exchange, LocalDispatch

URL = "http://h.example/"

GIVEN: dict[str, Callable[[str], object]] = {
    "a rule": lambda name: Routes([Rule("*", name)]),
    "a setting": lambda name: load(routes=[{"pattern": "*", "queue": name}]),
    "a scraper": lambda name: Scraper("shop", lambda page: page, queue=name),
}


@pytest.mark.parametrize("name", sorted(RESERVED_QUEUES))
@pytest.mark.parametrize("given", GIVEN)
def test_reserved_names_are_refused_where_queues_are_named(given: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"queue '{name}' is reserved for") as refused:
        GIVEN[given](name)
    assert "another name" in refused.value.hint


@pytest.mark.parametrize("name", sorted(RESERVED_QUEUES))
def test_the_api_refuses_reserved_names(name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="this queue is reserved"):
        ScrapeRequest(url=URL, queue=name)


@pytest.mark.parametrize("name", sorted(RESERVED_QUEUES))
def test_enqueue_refuses_reserved_names_and_makes_no_job(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_FRONTIER", "memory:")
    with pytest.raises(UsageError, match=f"queue '{name}' is reserved for"):
        app(["enqueue", "z1", URL, "--queue", name], result_action="return_value")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", sorted(BROKER_QUEUES))
async def test_no_frontier_takes_names_of_the_broker(name: str) -> None:
    frontier = MemoryFrontier()
    await frontier.open_job("job", JobSpec())
    with pytest.raises(UsageError, match="is reserved for the broker"):
        await frontier.add([Request(URL, "job", queue=name)])
    with pytest.raises(FetchError, match="is reserved for the broker"):
        checked_request(Request(URL, "job", queue=name), "job")
    async with Session.opened(load(frontier="memory:")) as session:
        with pytest.raises(UsageError, match="is reserved for the broker"):
            await session.open_job(JobSpec(queue=name), "job")
        job = await session.open_job(JobSpec(), "job")
        with pytest.raises(UsageError, match="is reserved for the broker"):
            await session.submit(job.id, [URL], queue=name)


async def old_frontier(monkeypatch: pytest.MonkeyPatch) -> MemoryFrontier:
    """One from before these names were refused."""
    frontier = MemoryFrontier()
    monkeypatch.setattr(memory, "validate", lambda request: None)
    await frontier.open_job("job", JobSpec(gap=0.0, width=100))
    await frontier.add(
        [Request(f"{URL}{queue}", "job", queue=queue) for queue in (*sorted(RESERVED_QUEUES), "shops")]
    )
    return frontier


async def test_nobody_consumes_reserved_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier = await old_frontier(monkeypatch)
    session = Session(load(frontier="memory:", dispatch="amqp://", routes=[]), None, frontier)
    assert not RESERVED_QUEUES.intersection(await broker_queues(session))
    assert "shops" in await broker_queues(session)
    with pytest.raises(UsageError, match="is reserved for the broker"):
        await broker_queues(session, [FAILED_QUEUE])


async def test_no_pump_sends_what_waits_in_reserved_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier = await old_frontier(monkeypatch)
    dispatch = LocalDispatch(Exchange(), [URL_QUEUE, "shops"])
    questions: list[Claim] = []
    asked_twice = asyncio.Event()
    claim = frontier.claim

    async def counted(limit: int, **more: object) -> Claim:
        answer = await claim(limit, **more)  # type: ignore[arg-type]
        if not limit:
            questions.append(answer)
            asked_twice.set()
        return answer

    monkeypatch.setattr(frontier, "claim", counted)
    heard: list[Event] = []
    pump = Pump(frontier, dispatch, name="pump", routes=Routes(()), watch=heard.append)
    pumping = asyncio.create_task(pump.run())
    try:
        async with asyncio.timeout(30):
            [delivery] = await dispatch.receive(1)
            await asked_twice.wait()
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        await dispatch.close()
    assert [lease.request.queue for lease in delivery.message.leases] == ["shops"]
    waiting = {name: row["waiting"] for name, row in (await frontier.queues()).items()}
    assert {name: waiting[name] for name in RESERVED_QUEUES} == dict.fromkeys(RESERVED_QUEUES, 1)
    told = [event.what for event in heard if isinstance(event, Trouble)]
    assert sorted(line.split()[1] for line in told) == sorted(BROKER_QUEUES), (
        "once each, tasks are no trouble"
    )
    assert TASK_QUEUE not in " ".join(told)
    # It would ask without end otherwise: something waits there, and nobody claims it.
    assert all(answer.wake_at is None or answer.retry_in > 0 for answer in questions)
