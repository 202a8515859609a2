"""Delivers `job.finished`, once for each job that has a webhook.

The state is in the frontier: a cursor of the job counts attempts and ends at DELIVERED or GAVE_UP, and a lock
ensures that one process sends at a time. So a crash loses no event, and another process of the service takes
over. Only a crash between the receiver's response and our note of it sends an event twice, with the same
delivery id.
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
"""Shelf of the frontier's notes with the error of the last attempt, by job."""
WAITS = (1.0, 3.0, 10.0, 32.0)
"""Seconds after the first, second… attempt. Five attempts in all."""
DELIVERED, GAVE_UP = 1_000_000, 2_000_000
"""Added to the number of attempts when the delivery is over."""
POLL = 0.5
RESCAN = 60.0
SETTLED = 2.0
"""Seconds for which a job of another process is ignored: it may look ended while it is still being filled."""
LANDED = 5.0
"""Maximum wait for the visits of a cancelled job. They end within two seconds, except those of a worker that
died."""
LOCK = 45.0
"""Longer than an attempt can take. The lock of a process of this machine is free as soon as that is gone."""
PAGE = 100
HORIZON = 7 * 86400.0
"""Jobs that ended longer ago are ignored after a restart."""
MESSAGE_LIMIT = 500
AT_ONCE = 32
PER_RECEIVER = 4
"""A host that responds slowly cannot occupy all slots."""

_encode = msgspec.json.Encoder().encode


class Messenger:
    def __init__(self, session: Session, tell: Callable[[str], None]) -> None:
        self._session = session
        self._tell = tell
        self._watched: dict[str, float] = {}
        """Jobs with an event to deliver, and when (monotonic) to look at each next."""
        self._owner = f"{process_name()}_{secrets.token_hex(4)}"
        self._cancelled: dict[str, float] = {}
        """Cancelled jobs with visits in flight, and when (monotonic) that was seen first."""
        self._sending: set[str] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._receivers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By host. Each lives as long as a delivery waits for it."""
        self._error: FrontierError | None = None
        """Of a delivery, for the main loop to report."""

    def watch(self, job: str) -> None:
        self._watched[job] = 0.0

    async def run(self) -> None:
        """Runs until cancelled. An unreachable frontier is tried again later."""
        rescan = 0.0
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    if time.monotonic() >= rescan:
                        await self._find_jobs()
                        rescan = time.monotonic() + RESCAN
                    now = time.monotonic()
                    due = [job for job, at in self._watched.items() if at <= now and job not in self._sending]
                    receivers = await asyncio.gather(*map(self._receiver, due), return_exceptions=True)
                    for job, receiver in zip(due, receivers, strict=True):
                        if isinstance(receiver, BaseException):
                            raise receiver
                        if receiver is not None:
                            # A task of its own: a slow receiver must not delay the others.
                            self._sending.add(job)
                            group.create_task(self._deliver(job, receiver))
                    if self._error is not None:
                        raise self._error
                except FrontierError as error:
                    self._error = None
                    self._tell(f"webhooks are waiting for the frontier: {error}")
                await asyncio.sleep(POLL)

    async def _find_jobs(self) -> None:
        """Watch the jobs that another process submitted or that a crash left over."""
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
            await asyncio.sleep(0)  # there may be many jobs: let requests run in between

    async def _receiver(self, name: str) -> str | None:
        """Returns the host that is to receive the job's event now; None while the job has not ended."""
        try:
            job = await self._session.frontier.job(name)
        except NoSuchJob:
            self._watched.pop(name, None)
            return None
        now = time.monotonic()
        if not job.state.ended:
            # One job is looked at twice a second, a thousand jobs every ten seconds.
            self._watched[name] = now + len(self._watched) / 100
            return None
        if job.counts.leased and now < self._cancelled.setdefault(name, now) + LANDED:
            return None
        self._cancelled.pop(name, None)
        return host_of(job)

    async def _deliver(self, name: str, receiver: str) -> None:
        """Send the event when there is a slot. The receiver's own limit comes first: deliveries that wait for
        it occupy no slot that others could use."""
        own = self._receivers.setdefault(receiver, asyncio.Semaphore(PER_RECEIVER))
        try:
            async with own, self._slots:
                # Read again: it may have waited, and the event has the current state.
                job = await self._session.frontier.job(name)
                if job.state.ended:
                    await self._send(job)
        except NoSuchJob:
            self._watched.pop(name, None)
        except FrontierError as error:
            self._error = error
        finally:
            self._sending.discard(name)

    async def _send(self, job: Job) -> None:
        notes = self._session.frontier.notes
        lock = Lock(notes, f"webhook {job.id}", self._owner, LOCK, is_dead=process_gone)
        if not await lock.take():
            self._watched[job.id] = time.monotonic() + LOCK / 6
            return
        try:
            # Read under the lock: its previous holder has written down what it did.
            attempts = await self._state(job.id)
            if attempts >= DELIVERED:
                self._watched.pop(job.id, None)
                return
            # Counted before the attempt: a receiver that crashes this process is not tried for ever.
            await Cursor(notes, job.id, SINK).save(attempts + 1)
            state = await self._attempt(job, attempts + 1)
            if state is not None:
                await Cursor(notes, job.id, SINK).save(state + attempts + 1)
                self._watched.pop(job.id, None)
        finally:
            await lock.release()

    async def _attempt(self, job: Job, number: int) -> int | None:
        """Returns DELIVERED or GAVE_UP; None if it is to be tried again."""
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
                self._tell(f"webhook of {job.id} failed after {number} attempts: {error}")
                return GAVE_UP
            wait = WAITS[number - 1] * (1.0 + 0.2 * random.random())
            self._watched[job.id] = time.monotonic() + wait
            return None
        return DELIVERED

    async def _state(self, job: str) -> int:
        return await Cursor(self._session.frontier.notes, job, SINK).get()

    async def delivery(self, job: Job) -> tuple[Literal["waiting", "delivered", "failed"], int, str | None]:
        """Returns the state of the delivery, the number of attempts and the error of the last one."""
        state = await self._state(job.id)
        if GAVE_UP > state >= DELIVERED:
            return "delivered", state - DELIVERED, None
        note = await self._session.frontier.notes.get(ERRORS, job.id) if state else None
        error = note.decode() if note is not None else None
        return ("failed", state - GAVE_UP, error) if state >= GAVE_UP else ("waiting", state, error)


def host_of(job: Job) -> str:
    assert job.spec.webhook is not None
    return urlsplit(job.spec.webhook.url).netloc


def message(job: Job) -> bytes:
    """Returns the event: the job's progress as `GET /scrape/{job_id}/progress` returns it."""
    progress = progress_of(job, time.time()).model_dump(mode="json")
    return _encode({"event": EVENT, "job_id": job.id, "status": progress["status"], "progress": progress})
