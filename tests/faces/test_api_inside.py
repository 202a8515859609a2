"""Parts of the job service in this process, where waiting can be made short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.api import batch, connection, jobs, operations, service, webhooks
from shoal.api.serve import Server, listen
from shoal.api.service import Recent, Service
from shoal.api.webhooks import Messenger
from shoal.app import Session
from shoal.demo.site import Call, LoopbackSite, Reply
from shoal.export.webhook import LIMITS
from shoal.frontier.notes import Presence
from shoal.model import (
    Dead,
    Done,
    Failure,
    Heartbeat,
    Job,
    JobSpec,
    JobState,
    Release,
    Request,
    Webhook,
)
from shoal.queues import TASK_QUEUE
from shoal.settings import load


@asynccontextmanager
async def finished_job(receiver: Callable[[Call], Reply]) -> AsyncIterator[tuple[Session, LoopbackSite]]:
    """A job that has ended, with a webhook to the receiver."""
    with LoopbackSite(receiver) as site:
        async with Session.opened(load(frontier="memory:")) as session:
            frontier = session.frontier
            spec = JobSpec(
                webhook=Webhook(site.url, "a-secret-of-ours"), allow_private=(site.url.split("/")[2],)
            )
            await frontier.open_job("j", spec)
            await frontier.add([Request("http://example.com/", "j")])
            claim = await frontier.claim(1, worker="w", lease_seconds=60.0)
            await frontier.settle([Done(claim.leases[0])])
            yield session, site


@asynccontextmanager
async def running(*messengers: Messenger) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(messenger.run()) for messenger in messengers]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def over(messenger: Messenger, session: Session) -> tuple[str, int, str | None]:
    async with asyncio.timeout(30):
        while (state := await messenger.delivery(await session.frontier.job("j")))[0] == "waiting":
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
            assert await over(messenger, session) == ("failed", 5, "the receiver returned 503")
        assert (await session.frontier.job("j")).state is JobState.DONE
        assert len(site.log()) == 5
    assert said == ["webhook of j failed after 5 attempts: the receiver returned 503"]


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
                await frontier.update_job(name, state=JobState.CANCELLED)
                messenger.watch(name)
            async with running(messenger):
                async with asyncio.timeout(30):
                    while len(held) < webhooks.PER_RECEIVER:
                        await asyncio.sleep(0.01)
                messenger.watch("j")
                assert await over(messenger, session) == ("delivered", 1, None)
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
        first = await frontier.claim(1, worker="w", lease_seconds=600.0)
        await frontier.settle([Done(first.leases[0])])
        claim = await frontier.claim(1, worker="w", lease_seconds=600.0)
        await frontier.update_job("c", state=JobState.CANCELLED)
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
            assert await over(messengers[0], session) == ("delivered", 1, None)
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
        claim = await frontier.claim(1, worker="w", lease_seconds=60.0)
        told = await jobs.progress("j", here)
        assert (told.status, told.started_at) == ("PROGRESS", datetime.fromtimestamp(claim.now, UTC))
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
        await session.frontier.open_job("task", JobSpec(queue=TASK_QUEUE, dedicated=True))
        await session.frontier.bury(Request("nonsense", "task", queue=TASK_QUEUE), "bad_url", "no URL")
        await Presence(session.frontier.notes).heartbeat(Heartbeat("w", queues=("scraping",)))
        here = Service(session, tell=lambda line: None)
        found = await operations.queue_status(here)
        assert list(found.queues) == ["scraping"]
        assert (found.waiting, found.dead) == (2, 1), "it waits all the same"
        told = bytes((await operations.metrics(here)).body).decode()
        assert 'shoal_queue_requests{queue="scraping",state="waiting"} 1.0' in told
        assert TASK_QUEUE not in told
        assert "no worker takes" not in " ".join((await operations._health(here)).reasons)


async def test_health_names_a_queue_that_nobody_takes_from() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        frontier = session.frontier
        await frontier.open_job("j", JobSpec())
        await frontier.add([Request("http://example.com/", "j")])
        await frontier.add([Request(f"http://example.com/{n}", "j", queue="urgent") for n in range(2)])
        await Presence(frontier.notes).heartbeat(Heartbeat("w", queues=("url_queue_ttl",)))

        async def health() -> tuple[bool, list[str]]:
            told = await operations._health(Service(session, tell=lambda line: None))
            assert told.healthy is all(part.healthy for part in told.parts)
            return told.healthy, told.reasons

        reason = "no worker takes from the queue urgent, and 2 URLs are waiting in it"
        assert await health() == (False, [reason])
        # Somebody works on another job: that helps nobody here.
        await frontier.open_job("other", JobSpec(queue="local"))
        await Presence(frontier.notes).heartbeat(Heartbeat("x", job="other"))
        assert not (await health())[0]
        await Presence(frontier.notes).heartbeat(Heartbeat("y", queues=("urgent",)))
        assert await health() == (True, [])


async def test_a_worker_that_is_about_to_come_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        frontier = session.frontier
        unstaffed = Service(session, tell=lambda line: None)
        assert await unstaffed.wait_for_worker("scraping", 60.0) == [], "and nobody is waited for"
        told = await operations._health(unstaffed)
        assert (told.status, told.healthy, told.parts[1].detail) == ("healthy", True, "0 alive")
        here = Service(session, tell=lambda line: None, staff=("scraping",))
        assert await here.wait_for_worker("rag", 60.0) == [], "ours take from another queue"
        told = await operations._health(here)
        assert (told.status, told.healthy, told.parts[1].detail) == ("starting", False, "starting")
        assert told.reasons == ["the workers are starting"]
        beside = Service(session, tell=lambda line: None, staff=("*",))
        waiting = asyncio.create_task(beside.wait_for_worker("rag", 60.0))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done(), "those of `shoal up` take from every queue"
        waiting.cancel()
        waiting = asyncio.create_task(here.wait_for_worker("scraping", 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await Presence(frontier.notes).heartbeat(Heartbeat("w", queues=("scraping",)))
        async with asyncio.timeout(30):
            assert [worker.heartbeat.worker for worker in await waiting] == ["w"]
        here.workers = Recent(Presence(frontier.notes).workers, 0.0)
        told = await operations._health(here)
        assert (told.status, told.healthy, told.parts[1].detail) == ("healthy", True, "1 alive")
        await Presence(frontier.notes).leave("w")
        monkeypatch.setattr(service, "STARTING", 0.0)
        told = await operations._health(here)
        assert (told.status, told.reasons) == ("unhealthy", ["no worker is alive"])
        assert await here.wait_for_worker("scraping", 0.05) == [], "not for ever"


async def test_the_current_url_is_in_somebodys_hands_or_was_the_last() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        frontier = session.frontier
        here = Service(session, tell=lambda line: None)
        here.workers = Recent(Presence(frontier.notes).workers, 0.0)

        async def current() -> str | None:
            return (await jobs.progress("j", here)).current_url

        await frontier.open_job("j", JobSpec(gap=0.0, width=3))
        await frontier.add([Request(f"http://example.com/{n}", "j") for n in range(3)])
        assert await current() is None
        claim = await frontier.claim(1, worker="w", lease_seconds=60.0)
        assert await current() == "http://example.com/0"
        await frontier.settle([Done(claim.leases[0], [b'{"url": "http://example.com/0"}'])])
        assert await current() == "http://example.com/0", "no worker has told of it, but the item does"
        await Presence(frontier.notes).heartbeat(Heartbeat("w", current={"j": "http://example.com/1"}))
        assert await current() == "http://example.com/1"
        claim = await frontier.claim(2, worker="w", lease_seconds=60.0)
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
        assert (await operations.queue_status(here)).dead == 0
        await session.frontier.bury(Request("nonsense", "j"), "bad_url", "no URL")
        async with asyncio.timeout(3):
            while (await operations.queue_status(here)).dead == 0:
                await asyncio.sleep(0.01)


# -- what people watch --------------------------------------------------------------------------


async def ended(session: Session, done: int, dead: int) -> None:
    """A job with so many URLs that were visited, and that ended dead."""
    await session.frontier.open_job("j", JobSpec(gap=0.0, width=1000))
    await session.frontier.add([Request(f"http://example.com/{n}", "j") for n in range(done + dead)])
    leases = (await session.frontier.claim(done + dead, worker="w", lease_seconds=60.0)).leases
    assert len(leases) == done + dead
    failure = Failure("dns_failed")
    await session.frontier.settle([Done(lease) for lease in leases[:done]])
    await session.frontier.settle([Dead(lease, failure) for lease in leases[done:]])


@pytest.mark.parametrize(
    ("done", "dead", "bad"), [(5, 4, False), (0, 99, False), (60, 40, True), (91, 9, False), (90, 10, True)]
)
async def test_few_failures_say_nothing(done: int, dead: int, bad: bool) -> None:
    """More than 10 % of the completed ones, and not before a hundred have ended."""
    async with Session.opened(load(frontier="memory:")) as session:
        await ended(session, done, dead)
        told = await operations._health(Service(session, tell=lambda line: None))
    assert (told.completed, told.failed) == (done, dead)
    assert any("failed" in reason for reason in told.reasons) is bad


def figure(text: str, name: str, **labels: str) -> float:
    [value] = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return value


async def metrics(here: Service) -> str:
    for recent in (here.queues, here.totals, here.states):
        recent._until = float("-inf")
    return bytes((await operations.metrics(here)).body).decode()


async def test_a_queue_that_is_empty_stays_in_the_figures() -> None:
    async with Session.opened(load(frontier="memory:")) as session:
        here = Service(session, tell=lambda line: None)
        assert figure(await metrics(here), "shoal_queue_requests", queue="scraping", state="waiting") == 0
        await session.frontier.open_job("j", JobSpec(queue="own"))
        await session.frontier.add([Request("http://example.com/", "j", queue="own")])
        assert figure(await metrics(here), "shoal_queue_requests", queue="own", state="waiting") == 1
        await session.frontier.update_job("j", state=JobState.CANCELLED)
        text = await metrics(here)
        for state in ("waiting", "delayed", "leased"):
            assert figure(text, "shoal_queue_requests", queue="own", state=state) == 0


async def test_all_jobs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those beyond the newest, and each page of them is read again only now and then."""
    monkeypatch.setattr(service, "RECENT_JOBS", 10)
    async with Session.opened(load(frontier="memory:")) as session:
        here, frontier = Service(session, tell=lambda line: None), session.frontier
        asked = 0
        really = frontier.jobs

        async def counted(*, limit: int = 100, before: float | None = None) -> list[Job]:
            nonlocal asked
            asked += 1
            return await really(limit=limit, before=before)

        monkeypatch.setattr(frontier, "jobs", counted)

        async def states() -> dict[str, float]:
            text = await metrics(here)
            return {each.value: figure(text, "shoal_jobs", state=each.value) for each in JobState}

        async def open_jobs(first: int, last: int) -> None:
            for number in range(first, last):
                await frontier.open_job(f"j{number}", JobSpec())
                await frontier.add([Request("http://example.com/", f"j{number}")])

        await open_jobs(0, 55)
        assert await states() == {"running": 55, "paused": 0, "cancelled": 0, "done": 0}
        await frontier.update_job("j3", state=JobState.CANCELLED)
        await frontier.update_job("j54", state=JobState.PAUSED)
        asked = 0
        assert await states() == {"running": 53, "paused": 1, "cancelled": 1, "done": 0}
        assert asked == 2, "the newest, and one page of the others"
        for number in range(55, 80, 5):
            await open_jobs(number, number + 5)
            assert sum((await states()).values()) == number + 5
        for _ in range(10):
            assert await states() == {"running": 78, "paused": 1, "cancelled": 1, "done": 0}


# -- connections ----------------------------------------------------------------------------------


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, head_seconds: float) -> AsyncIterator[int]:
    """The port of a service of this process."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", head_seconds)
    with listen("127.0.0.1", 0) as listening:
        async with Session.opened(load(frontier="memory:")) as session:
            server = Server(session, listening, workers=0, queues=(), tell=lambda line: None)
            serving = asyncio.create_task(server.run())
            yield listening.getsockname()[1]
            server.stop()
            await serving


ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_who_does_not_ask_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    async with served(monkeypatch, 0.3) as port, asyncio.timeout(20):
        calls = [await asyncio.open_connection("127.0.0.1", port) for _ in range(53)]
        (part, slow, early), silent = calls[:3], calls[3:]
        part[1].write(ASK[:-2])
        slow[1].write(ASK)
        assert (await slow[0].readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        # A body that nobody waits for: it is refused before it is there.
        early[1].write(
            b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
            b"Content-Length: 100000\r\n\r\n"
        )

        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """A byte now and then, for as long as somebody listens."""
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.01)
            with suppress(ConnectionError):
                await reading

        dripping = asyncio.gather(drip(*slow), drip(*early))
        for reader, _ in silent:
            assert await reader.read() == b""
        answer = await part[0].read()
        assert answer.startswith(b"HTTP/1.1 408 ") and b"application/problem+json" in answer
        await dripping
        for _, writer in calls:
            writer.close()


async def test_who_asks_in_time_is_served_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The deadline is for the head alone: neither a stream nor the next request on it ends early."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "HEARTBEAT", 0.2)
    async with served(monkeypatch, 0.3) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(ASK)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        body = b'{"url": "http://example.com/"}'
        length = str(len(body)).encode()
        writer.write(
            b"POST /scrape HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
            + length
            + b"\r\n\r\n"
        )
        await asyncio.sleep(0.5)  # longer than a head may take: bodies have their own limit
        writer.write(body)
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 202 ")
        job = json.loads(answer.partition(b"\r\n\r\n")[2])["job_id"]
        writer.write(f"GET /scrape/{job}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        for _ in range(3):
            await reader.readuntil(b": still here")
        writer.close()
