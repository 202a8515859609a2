"""Parts of the job service in this process, where waiting can be made short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shoal.api import batch, jobs, operate, service, webhooks
from shoal.api.service import Recent, Service
from shoal.api.views import moment
from shoal.api.webhooks import Messenger
from shoal.app import Session
from shoal.export.webhook import LIMITS
from shoal.model import TASK_QUEUE, Beat, Done, JobSpec, JobState, Release, Request, Webhook
from shoal.settings import load
from shoal.testing.site import Call, LoopbackSite, Reply


@asynccontextmanager
async def finished_job(receiver: Callable[[Call], Reply]) -> AsyncIterator[tuple[Session, LoopbackSite]]:
    """A job that has ended, with a webhook to the receiver."""
    with LoopbackSite(receiver) as site:
        async with Session.opened(load(frontier="memory:"), allow=[site.url.split("/")[2]]) as session:
            frontier = session.frontier
            await frontier.open_job("j", JobSpec(webhook=Webhook(site.url, "a-secret-of-ours")))
            await frontier.add([Request("http://example.com/", "j")])
            claim = await frontier.claim(1, worker="w", lease=60.0)
            await frontier.settle([Done(claim.leases[0])])
            yield session, site


@asynccontextmanager
async def running(*messengers: Messenger) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(messenger.run()) for messenger in messengers]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def over(messenger: Messenger, session: Session) -> tuple[str, int]:
    async with asyncio.timeout(30):
        while (state := await messenger.told(await session.frontier.job("j")))[0] == "waiting":
            await asyncio.sleep(0.01)
    # Much longer than any wait here: nothing more is sent.
    await asyncio.sleep(0.3)
    return state


async def test_it_is_given_up_after_five_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert webhooks.WAITS == (1.0, 3.0, 10.0, 32.0)
    monkeypatch.setattr(webhooks, "WAITS", (0.01,) * 4)
    monkeypatch.setattr(webhooks, "POLL", 0.01)
    said: list[str] = []
    async with finished_job(lambda _: Reply(503)) as (session, site):
        messenger = Messenger(session, said.append)
        messenger.watch("j")
        async with running(messenger):
            assert await over(messenger, session) == ("failed", 5)
        assert (await session.frontier.job("j")).state is JobState.DONE
        assert len(site.log()) == 5
    assert said == ["webhook of j: given up after 5 attempts: the receiver answered 503"]


async def test_a_slow_receiver_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "POLL", 0.01)
    held: list[Call] = []

    def slow(call: Call) -> Reply:
        held.append(call)
        return Reply(200, delay=60.0)

    with LoopbackSite(slow) as stuck:
        async with finished_job(lambda _: Reply(200)) as (session, site):
            frontier = session.frontier
            messenger = Messenger(session, lambda line: None)
            many = [f"s{n}" for n in range(webhooks.AT_ONCE + 8)]
            for name in many:
                hook = Webhook(stuck.url, "a-secret-of-ours")
                await frontier.open_job(name, JobSpec(webhook=hook, allow_private=True))
                await frontier.cancel(name)
                messenger.watch(name)
            async with running(messenger):
                async with asyncio.timeout(30):
                    while len(held) < webhooks.PER_RECEIVER:
                        await asyncio.sleep(0.01)
                messenger.watch("j")
                assert await over(messenger, session) == ("delivered", 1)
                assert len(held) == webhooks.PER_RECEIVER
            assert len(site.log()) == 1


def test_a_receiver_has_thirty_seconds() -> None:
    assert (LIMITS.first_byte, LIMITS.idle, LIMITS.total) == (30.0, 30.0, 30.0)
    assert LIMITS.total + LIMITS.connect < webhooks.LOCK, "nobody else sends meanwhile"


@pytest.mark.parametrize(("patience", "active"), [(60.0, 0), (0.0, 1)])
async def test_the_end_of_a_cancelled_job_is_told_when_nothing_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, patience: float, active: int
) -> None:
    monkeypatch.setattr(webhooks, "POLL", 0.01)
    monkeypatch.setattr(webhooks, "LANDED", patience)
    told: list[Call] = []

    def receiver(call: Call) -> Reply:
        told.append(call)
        return Reply(200)

    async with finished_job(receiver) as (session, site):
        frontier = session.frontier
        hook = Webhook(site.url, "a-secret-of-ours")
        await frontier.open_job("c", JobSpec(webhook=hook, gap=0.0, allow_private=True))
        await frontier.add([Request(f"http://example.org/{n}", "c") for n in range(4)])
        first = await frontier.claim(1, worker="w", lease=600.0)
        await frontier.settle([Done(first.leases[0])])
        claim = await frontier.claim(1, worker="w", lease=600.0)
        await frontier.cancel("c")
        messenger = Messenger(session, lambda line: None)
        messenger.watch("c")
        async with running(messenger), asyncio.timeout(30):
            if patience:
                while "c" not in messenger._cancelled:
                    await asyncio.sleep(0.01)
                assert told == []
                await frontier.settle([Release(claim.leases[0])])
            while not told:
                await asyncio.sleep(0.01)
    (call,) = told
    progress = json.loads(call.body)["progress"]
    assert (progress["status"], progress["active"], progress["progress"]) == ("REVOKED", active, 25.0)


@pytest.mark.parametrize("delay", [0.0, 0.2])
async def test_several_who_know_of_it_send_it_once(monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    monkeypatch.setattr(webhooks, "POLL", 0.01)
    monkeypatch.setattr(webhooks, "LOCK", 0.6)
    async with finished_job(lambda _: Reply(200, delay=delay)) as (session, site):
        messengers = [Messenger(session, lambda line: None) for _ in range(4)]
        for messenger in messengers:
            messenger.watch("j")
        async with running(*messengers):
            assert await over(messengers[0], session) == ("delivered", 1)
        assert len(site.log()) == 1


async def test_a_stream_without_news_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEARTBEAT", 0.05)
    monkeypatch.setattr(jobs, "EVENT_POLL", 0.01)
    async with Session.opened(load(frontier="memory:")) as session:
        job = await session.frontier.open_job("j", JobSpec())
        heard = []
        async for event in jobs._events(Service(session, tell=lambda line: None), job):
            heard.append(event.partition("\n")[0])
            if ": still here" in heard:
                break
        assert heard[0] == "id: 1"


async def test_a_job_has_started_when_somebody_took_a_url() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        frontier = session.frontier
        here = Service(session, tell=lambda line: None)
        await frontier.open_job("j", JobSpec())
        await frontier.add([Request("http://example.com/", "j")])
        told = await jobs.progress("j", here)
        assert (told.status, told.started_at) == ("PENDING", None)
        claim = await frontier.claim(1, worker="w", lease=60.0)
        told = await jobs.progress("j", here)
        assert (told.status, told.started_at) == ("PROGRESS", moment(claim.now))
        await frontier.settle([Release(claim.leases[0])])
        told = await jobs.progress("j", here)
        assert (told.status, told.started_at) == ("PENDING", None), "it was handed back untouched"


async def test_what_celery_tasks_visit_themselves_is_no_queue_of_work() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        await session.frontier.open_job("j", JobSpec())
        queues = ("scraping", TASK_QUEUE)
        await session.frontier.add(
            [Request(f"http://{queue[0]}.test/", "j", queue=queue) for queue in queues]
        )
        await session.frontier.open_job("task", JobSpec(queue=TASK_QUEUE, apart=True))
        await session.frontier.bury(Request("nonsense", "task", queue=TASK_QUEUE), "bad_url", "no URL")
        await session.frontier.beat(Beat("w", queues=("scraping",)))
        here = Service(session, tell=lambda line: None)
        found = await operate.queue_status(here)
        assert list(found.queues) == ["scraping"]
        assert (found.waiting, found.dead) == (2, 1), "it waits all the same"
        told = bytes((await operate.metrics(here)).body).decode()
        assert 'shoal_queue_requests{queue="scraping",state="waiting"} 1.0' in told
        assert TASK_QUEUE not in told
        assert "no worker takes" not in " ".join((await operate._health(here)).reasons)


async def test_health_names_a_queue_that_nobody_takes_from() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        frontier = session.frontier
        await frontier.open_job("j", JobSpec())
        await frontier.add([Request("http://example.com/", "j")])
        await frontier.add([Request(f"http://example.com/{n}", "j", queue="urgent") for n in range(2)])
        await frontier.beat(Beat("w", queues=("url_queue_ttl",)))

        async def health() -> tuple[bool, list[str]]:
            told = await operate._health(Service(session, tell=lambda line: None))
            assert told.healthy is all(part.healthy for part in told.parts)
            return told.healthy, told.reasons

        assert await health() == (False, ["no worker takes from the queue urgent, and 2 URLs wait in it"])
        # Somebody works on another job: that helps nobody here.
        await frontier.open_job("other", JobSpec(queue="local"))
        await frontier.beat(Beat("x", job="other"))
        assert not (await health())[0]
        await frontier.beat(Beat("y", queues=("urgent",)))
        assert await health() == (True, [])


async def test_a_worker_that_is_about_to_come_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        frontier = session.frontier
        nobody = Service(session, tell=lambda line: None)
        assert await nobody.staffed("scraping", 60.0) == [], "and nobody is waited for"
        told = await operate._health(nobody)
        assert (told.status, told.healthy, told.parts[1].detail) == ("healthy", True, "0 alive")
        here = Service(session, tell=lambda line: None, staff=("scraping",))
        assert await here.staffed("rag", 60.0) == [], "ours take from another queue"
        told = await operate._health(here)
        assert (told.status, told.healthy, told.parts[1].detail) == ("starting", False, "starting")
        assert told.reasons == ["the workers are starting"]
        beside = Service(session, tell=lambda line: None, staff=("*",))
        waiting = asyncio.create_task(beside.staffed("rag", 60.0))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done(), "those of `shoal up` take from every queue"
        waiting.cancel()
        waiting = asyncio.create_task(here.staffed("scraping", 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await frontier.beat(Beat("w", queues=("scraping",)))
        async with asyncio.timeout(30):
            assert [worker.beat.worker for worker in await waiting] == ["w"]
        here.workers = Recent(frontier.workers, 0.0)
        told = await operate._health(here)
        assert (told.status, told.healthy, told.parts[1].detail) == ("healthy", True, "1 alive")
        await frontier.leave("w")
        monkeypatch.setattr(service, "STARTING", 0.0)
        told = await operate._health(here)
        assert (told.status, told.reasons) == ("unhealthy", ["no worker is alive"])
        assert await here.staffed("scraping", 0.05) == [], "not for ever"


async def test_the_current_url_is_in_somebodys_hands_or_was_the_last() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        frontier = session.frontier
        here = Service(session, tell=lambda line: None)
        here.workers = Recent(frontier.workers, 0.0)

        async def current() -> str | None:
            return (await jobs.progress("j", here)).current_url

        await frontier.open_job("j", JobSpec(gap=0.0, width=3))
        await frontier.add([Request(f"http://example.com/{n}", "j") for n in range(3)])
        assert await current() is None
        claim = await frontier.claim(1, worker="w", lease=60.0)
        assert await current() == "http://example.com/0"
        await frontier.settle([Done(claim.leases[0], [b'{"url": "http://example.com/0"}'])])
        assert await current() == "http://example.com/0", "no worker has told of it, but the item does"
        await frontier.beat(Beat("w", current={"j": "http://example.com/1"}))
        assert await current() == "http://example.com/1"
        claim = await frontier.claim(2, worker="w", lease=60.0)
        await frontier.settle([Done(lease) for lease in claim.leases])
        assert await current() is None, "it has ended"


async def test_an_answer_that_is_full_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MOST_BYTES", 100)
    page = {"status": "success", "content": "x" * 60, "size": 60}
    lost = {"status": "failed", "error": "http_404"}
    async with Session.opened(load(frontier="memory:")) as session:
        here = Service(session, tell=lambda line: None)
        ends = batch._Ends(here, "j", {"a": page}, {"b": lost}, ended=True)
        given = ["a", "A", "b"]
        found = await batch._results(given, {"a": "a", "A": "a", "b": "b"}, {}, ends)
    assert [(one.truncated, bool(one.content)) for one in found] == [
        (False, True),
        (True, False),
        (False, False),
    ]


async def test_a_dead_letter_is_counted_soon() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        here = Service(session, tell=lambda line: None)
        await session.frontier.open_job("j", JobSpec())
        assert (await operate.queue_status(here)).dead == 0
        await session.frontier.bury(Request("nonsense", "j"), "bad_url", "no URL")
        async with asyncio.timeout(3):
            while (await operate.queue_status(here)).dead == 0:
                await asyncio.sleep(0.01)
