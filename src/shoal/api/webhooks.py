"""Delivers `job.finished`, once for each job that asks for it.

What was done is in the frontier: a cursor of the job counts attempts and ends at DELIVERED or GAVE_UP, and
a lock sees to it that one process sends at a time. So a crash loses no message, and another process of
the service takes over. Only a crash between the receiver's answer and our note of it sends twice, with
the same delivery id.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec

from shoal.api.views import progress_of
from shoal.app import Session, process_gone, process_name
from shoal.errors import FetchError, FrontierError, NoSuchJob
from shoal.export.webhook import EVENT, deliver
from shoal.frontier.notes import Cursor, Lock
from shoal.model import Job

SINK = "webhook"
ERRORS = "webhooks"
"""The shelf on which the frontier keeps why the last attempt failed, by job."""
WAITS = (1.0, 3.0, 10.0, 32.0)
"""Seconds after the first, second… attempt. Five attempts in all."""
DELIVERED, GAVE_UP = 1_000_000, 2_000_000
"""Added to the number of attempts when it is over."""
POLL = 0.5
RESCAN = 60.0
SETTLED = 2.0
"""Somebody else's job may look ended while it is still being filled: it is left alone for so long."""
LANDED = 5.0
"""A cancelled job's visits end within two seconds. Those of a worker that died do not: they are not waited
for any longer."""
LOCK = 45.0
"""Longer than an attempt can take. What a process of this machine held is free when that is gone."""
PAGE = 100
HORIZON = 7 * 86400.0
"""Jobs that ended longer ago are not looked at again after a restart."""
MESSAGE_LIMIT = 500
AT_ONCE = 32
PER_RECEIVER = 4
"""One host that answers slowly cannot take all places."""

_encode = msgspec.json.Encoder().encode


class Messenger:
    def __init__(self, session: Session, tell: Callable[[str], None]) -> None:
        self._session = session
        self._tell = tell
        self._watched: dict[str, float] = {}
        """Jobs whose end is to be delivery, and when (monotonic) to look next."""
        self._owner = f"{process_name()}_{secrets.token_hex(4)}"
        self._cancelled: dict[str, float] = {}
        """Cancelled jobs with visits in flight, and when (monotonic) that was seen first."""
        self._sending: set[str] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._receivers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By host. Each lives as long as somebody waits for it."""
        self._trouble: FrontierError | None = None

    def watch(self, job: str) -> None:
        self._watched[job] = 0.0

    async def run(self) -> None:
        """Until cancelled. A frontier that is away for a while is asked again later."""
        rescan = 0.0
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    if time.monotonic() >= rescan:
                        await self._find()
                        rescan = time.monotonic() + RESCAN
                    now = time.monotonic()
                    due = [job for job, at in self._watched.items() if at <= now and job not in self._sending]
                    looks = await asyncio.gather(*map(self._look, due), return_exceptions=True)
                    for job, receiver in zip(due, looks, strict=True):
                        if isinstance(receiver, BaseException):
                            raise receiver
                        if receiver is not None:
                            # A task of its own: nobody waits for somebody else's slow receiver.
                            self._sending.add(job)
                            group.create_task(self._turn(job, receiver))
                    if self._trouble is not None:
                        raise self._trouble
                except FrontierError as error:
                    self._trouble = None
                    self._tell(f"webhooks wait: {error}")
                await asyncio.sleep(POLL)

    async def _find(self) -> None:
        """Jobs that somebody else submitted, or that were left over by a crash."""
        before: float | None = None
        now = time.time()
        while True:
            jobs = await self._session.frontier.jobs(limit=PAGE, before=before)
            for job in jobs:
                if job.spec.webhook is None or job.id in self._watched:
                    continue
                if await self._state(job.id) < DELIVERED:
                    self._watched[job.id] = time.monotonic() + SETTLED
            if len(jobs) < PAGE or (jobs[-1].created_at < now - HORIZON):
                return
            before = jobs[-1].created_at
            await asyncio.sleep(0)  # requests come first: there may be many jobs

    async def _look(self, name: str) -> str | None:
        """Where the end of a job is to be delivery now; None while there is nothing to tell."""
        try:
            job = await self._session.frontier.job(name)
        except NoSuchJob:
            self._watched.pop(name, None)
            return None
        now = time.monotonic()
        if not job.state.ended:
            # A thousand jobs are asked about every ten seconds, one twice a second.
            self._watched[name] = now + len(self._watched) / 100
            return None
        if job.counts.leased and now < self._cancelled.setdefault(name, now) + LANDED:
            return None
        self._cancelled.pop(name, None)
        return host_of(job)

    async def _turn(self, name: str, receiver: str) -> None:
        """Send it when it is its turn. A receiver's own queue comes first: those who wait in it hold
        no place that others could use."""
        mine = self._receivers.setdefault(receiver, asyncio.Semaphore(PER_RECEIVER))
        try:
            async with mine, self._slots:
                # Again: it may have waited, and the message tells how things are.
                job = await self._session.frontier.job(name)
                if job.state.ended:
                    await self._send(job)
        except NoSuchJob:
            self._watched.pop(name, None)
        except FrontierError as error:
            self._trouble = error
        finally:
            self._sending.discard(name)

    async def _send(self, job: Job) -> None:
        notes = self._session.frontier.notes
        lock = Lock(notes, f"webhook {job.id}", self._owner, LOCK, is_dead=process_gone)
        if not await lock.take():
            self._watched[job.id] = time.monotonic() + LOCK / 6
            return
        try:
            # Read under the lock: whoever held it before us has written down what it did.
            attempts = await self._state(job.id)
            if attempts >= DELIVERED:
                self._watched.pop(job.id, None)
                return
            # Counted before it is tried: a receiver that crashes us is not asked for ever.
            await Cursor(notes, job.id, SINK).save(attempts + 1)
            state = await self._attempt(job, attempts + 1)
            if state is not None:
                await Cursor(notes, job.id, SINK).save(state + attempts + 1)
                self._watched.pop(job.id, None)
        finally:
            await lock.release()

    async def _attempt(self, job: Job, number: int) -> int | None:
        """How it ended for good; None when it is to be tried again."""
        webhook = job.spec.webhook
        assert webhook is not None
        try:
            await deliver(
                self._session.http,
                webhook.url,
                webhook.secret,
                message(job),
                delivery=job.id,
                now=time.time(),
                allow_private=job.spec.allow_private,
            )
        except FetchError as error:
            why = str(error)[:MESSAGE_LIMIT].encode()
            await self._session.frontier.notes.put(ERRORS, job.id, why, HORIZON)
            if number > len(WAITS):
                self._tell(f"webhook of {job.id}: given up after {number} attempts: {error}")
                return GAVE_UP
            wait = WAITS[number - 1] * (1.0 + 0.2 * random.random())
            self._watched[job.id] = time.monotonic() + wait
            return None
        return DELIVERED

    async def _state(self, job: str) -> int:
        return await Cursor(self._session.frontier.notes, job, SINK).get()

    async def delivery(self, job: Job) -> tuple[Literal["waiting", "delivered", "failed"], int, str | None]:
        """How the delivery stands, after how many attempts, and what went wrong with the last one."""
        state = await self._state(job.id)
        if GAVE_UP > state >= DELIVERED:
            return "delivered", state - DELIVERED, None
        noted = await self._session.frontier.notes.get(ERRORS, job.id) if state else None
        error = noted.decode() if noted is not None else None
        return ("failed", state - GAVE_UP, error) if state >= GAVE_UP else ("waiting", state, error)


def host_of(job: Job) -> str:
    assert job.spec.webhook is not None
    return urlsplit(job.spec.webhook.url).netloc


def message(job: Job) -> bytes:
    """The event: the job's progress as `GET /scrape/{job_id}/progress` tells it."""
    progress = progress_of(job, time.time()).model_dump(mode="json")
    return _encode({"event": EVENT, "job_id": job.id, "status": progress["status"], "progress": progress})
