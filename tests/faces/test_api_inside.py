"""Parts of the job service in this process, where waiting can be made short."""

from __future__ import annotations

import asyncio

import pytest

from shoal.api import jobs, webhooks
from shoal.api.service import Service
from shoal.api.webhooks import Messenger
from shoal.app import Session
from shoal.model import Done, JobSpec, JobState, Request, Webhook
from shoal.settings import load
from shoal.testing.site import Call, LoopbackSite, Reply


async def test_it_is_given_up_after_five_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(webhooks.WAITS) == 4
    assert webhooks.WAITS[-1] == 32.0
    monkeypatch.setattr(webhooks, "WAITS", (0.01,) * 4)
    monkeypatch.setattr(webhooks, "POLL", 0.01)
    told: list[str] = []

    def receiver(_: Call) -> Reply:
        return Reply(503)

    with LoopbackSite(receiver) as site:
        async with Session.opened(load(frontier="memory:"), allow=[site.url.split("/")[2]]) as session:
            frontier = session.frontier
            spec = JobSpec(webhook=Webhook(site.url, "a-secret-of-ours"))
            await frontier.open_job("j", spec)
            await frontier.add([Request("http://example.com/", "j")])
            claim = await frontier.claim(1, worker="w", lease=60.0)
            await frontier.settle([Done(claim.leases[0])])
            messenger = Messenger(session, told.append)
            messenger.watch("j")
            running = asyncio.create_task(messenger.run())
            async with asyncio.timeout(30):
                while (await messenger.told(await frontier.job("j")))[0] == "waiting":
                    await asyncio.sleep(0.01)
            # Longer than any wait: nothing more is sent.
            await asyncio.sleep(0.2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            job = await frontier.job("j")
            assert await messenger.told(job) == ("failed", 5)
            assert job.state is JobState.DONE
            assert len(site.log()) == 5
    assert told == ["webhook of j: given up after 5 attempts: the receiver answered 503"]


async def test_a_stream_without_news_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEARTBEAT", 0.05)
    monkeypatch.setattr(jobs, "EVENT_POLL", 0.01)
    async with Session.opened(load(frontier="memory:")) as session:
        job = await session.frontier.open_job("j", JobSpec())
        heard = []
        async for event in jobs._told(Service(session, tell=lambda line: None), job):
            heard.append(event.partition("\n")[0])
            if ": still here" in heard:
                break
        assert heard[0] == "id: 1"
