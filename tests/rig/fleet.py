"""Celery workers in processes of their own, with or without Flower, for tests.

with Fleet(tmp_path, server.url, CELERY_WORKER_CONCURRENCY="2") as fleet:
    fleet.worker("w1")
    fleet.worker("w2", "-P", "threads")
    fleet.wait_for(3)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pycurl

from shoal.app import Session
from shoal.dispatch.port import MARK
from shoal.frontier.notes import Presence
from shoal.frontier.port import Backend
from shoal.model import Job, JobSpec, JobState
from shoal.settings import load
from tests.rig.command import PATIENCE, Running, Shell
from tests.rig.ports import free_port

T = TypeVar("T")


class Fleet(Shell):
    """Celery commands in one directory, on one broker and one frontier."""

    def __init__(self, root: Path, broker: str, frontier: str = "", **env: str) -> None:
        """The frontier is a Redis broker's own, unless it is said where it is."""
        self.frontier = frontier or broker
        super().__init__(
            root,
            **{
                "CELERY_BROKER_URL": broker,
                "CELERY_TASK_RATE_LIMIT": "none",
                "SHOAL_FRONTIER": frontier,
                "SHOAL_ALLOW_PRIVATE": "1",
                "SHOAL_RATE": "none",
                **env,
            },
        )
        self.workers: dict[str, Running] = {}

    def celery(self, *words: str, **env: str) -> Running:
        """`celery -A shoal.celery` with these words."""
        return self.start("-A", "shoal.celery", *words, program=(sys.executable, "-m", "celery"), env=env)

    def worker(self, name: str, *words: str) -> Running:
        self.workers[name] = self.celery("worker", "-n", f"{name}@%h", "-l", "info", *words)
        return self.workers[name]

    def wait_for(self, processes: int) -> None:
        """Until so many processes that run tasks have told the frontier that they live."""

        async def there(frontier: Backend) -> bool:
            alive = [
                each
                for each in await Presence(frontier.notes).workers()
                if each.heartbeat.worker.endswith(MARK)
            ]
            return len(alive) >= processes

        self.until(there, f"{processes} processes of Celery workers")

    def until(self, holds: Callable[[Backend], Awaitable[bool]], what: str, within: float = PATIENCE) -> None:
        """Ask the frontier until it is so."""

        async def wait(frontier: Backend) -> None:
            async with asyncio.timeout(within):
                while not await holds(frontier):
                    await asyncio.sleep(0.02)

        try:
            self.asked(wait)
        except TimeoutError:
            raise AssertionError(f"waited {within} s in vain for {what}\n{self.said()}") from None

    def said(self, last: int | None = 2000) -> str:
        """The last characters that each worker logged; None: all."""
        begin = None if last is None else -last
        return "\n".join(f"{name}: {running.err[begin:]}" for name, running in self.workers.items())

    def flower(self) -> Flower:
        port = free_port()
        running = self.celery(
            "flower", f"--port={port}", "--address=127.0.0.1", FLOWER_UNAUTHENTICATED_API="true"
        )
        return Flower(running, f"http://127.0.0.1:{port}")

    def asked(self, question: Callable[[Backend], Awaitable[T]]) -> T:
        """What the frontier answers."""
        return self.within(lambda session: question(session.frontier))

    def within(self, work: Callable[[Session], Awaitable[T]]) -> T:
        async def answer() -> T:
            settings = load(frontier=self.frontier, allow_private=True, rate="none", robots=False)
            async with Session.opened(settings) as session:
                return await work(session)

        return asyncio.run(answer())

    def submit(self, urls: Sequence[str], **more: Any) -> str:
        """A job of exactly these pages."""

        async def add(session: Session) -> str:
            wishes: dict[str, Any] = {"scope": "page", "max_pages": None, "width": 8, **more}
            spec: JobSpec = session.spec("site", tuple(urls), **wishes)
            job = await session.open_job(spec)
            await session.submit(job.id, urls)
            return job.id

        return self.within(add)

    def view(self, job: str) -> Job:
        return self.asked(lambda frontier: frontier.job(job))

    def ended(self, job: str) -> Job:
        async def over(frontier: Backend) -> bool:
            return (await frontier.job(job)).state is JobState.DONE

        self.until(over, f"the end of {job}")
        return self.view(job)


class Flower:
    def __init__(self, running: Running, url: str) -> None:
        self.running = running
        self.url = url

    def get(self, path: str) -> Any:
        """What its API answers; None while it does not."""
        curl = pycurl.Curl()
        curl.setopt(pycurl.URL, f"{self.url}{path}")
        curl.setopt(pycurl.TIMEOUT, 10)
        try:
            body = curl.perform_rb()
            return msgspec.json.decode(body) if curl.getinfo(pycurl.RESPONSE_CODE) == 200 else None
        except pycurl.error:
            assert not self.running.over, self.running.err
            return None
        finally:
            curl.close()
