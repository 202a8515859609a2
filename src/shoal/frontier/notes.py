"""What is made of notes, once for all backends: locks, cursors, and the list of workers.

Each kind has a shelf of its own, so that nothing here can meet the notes of others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import msgspec
from msgspec import Struct

from shoal.errors import FrontierError
from shoal.frontier.port import Catalog, Notes
from shoal.model import FOREVER, Heartbeat, LeaseRow, WorkerStatus

LOCKS = "locks"
CURSORS = "cursors"
WORKERS = "workers"

FORGET = 24 * 3600.0
"""Seconds after which a worker that has not been heard of is forgotten."""


def _nobody_is_gone(_: str) -> bool:
    return False


class Lock:
    """Something that one owner at a time holds, for `ttl` seconds from its last `take`.

    `gone` tells of an owner's name whether it is known to be dead: what it holds need not run out then.
    """

    def __init__(
        self,
        notes: Notes,
        name: str,
        owner: str,
        ttl: float,
        *,
        gone: Callable[[str], bool] = _nobody_is_gone,
    ) -> None:
        self._notes = notes
        self._name = name
        self._owner = owner
        self._ttl = ttl
        self._gone = gone
        self.holder = ""
        """The owner that the last `take` found or made."""

    async def take(self) -> bool:
        """Take the lock, or keep it for another `ttl` seconds. Returns whether it is ours now."""
        while True:
            known = await self._notes.get(LOCKS, self._name)
            self.holder = "" if known is None else _shown(known)
            if known is not None and self.holder != self._owner and not self._gone(self.holder):
                return False
            if await self._set(known, _stored(self._owner)):
                self.holder = self._owner
                return True
            # Somebody was faster: look again who it was.

    async def release(self) -> None:
        """Give it back; nothing happens if somebody else holds it. When the frontier is away the lock
        runs out by itself."""
        with suppress(FrontierError):
            await self._set(_stored(self._owner), None)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Keep a lock that was taken while the body runs, and give it back afterwards."""
        keeping = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self.release()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 3)
            with suppress(FrontierError):
                await self.take()

    async def _set(self, known: bytes | None, value: bytes | None) -> bool:
        return await self._notes.compare_and_set(LOCKS, self._name, known, value, self._ttl)


class Cursor:
    """How far somebody came with the items of a job."""

    def __init__(self, notes: Notes, job: str, sink: str) -> None:
        self._notes = notes
        # With its length, so that no job and sink can be taken for others.
        self._name = f"{len(job)} {job} {sink}"

    async def get(self) -> int:
        """The position that was saved last; 0 at first."""
        return int(await self._notes.get(CURSORS, self._name) or 0)

    async def save(self, position: int) -> None:
        await self._notes.put(CURSORS, self._name, b"%d" % position, FOREVER)


class _Present(Struct, frozen=True):
    since: float
    heartbeat: Heartbeat


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Present).decode


class Presence:
    """Which workers there are. A worker beats every few seconds while it lives and leaves when it ends."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._since: dict[str, float] = {}

    async def heartbeat(self, heartbeat: Heartbeat) -> None:
        """A worker lives, and this is what it does. Replaces what it said before."""
        if heartbeat.worker not in self._since:
            known = await self._notes.get(WORKERS, heartbeat.worker)
            self._since[heartbeat.worker] = await self._notes.now() if known is None else _decode(known).since
        value = _encode(_Present(self._since[heartbeat.worker], heartbeat))
        await self._notes.put(WORKERS, heartbeat.worker, value, FORGET)

    async def leave(self, worker: str) -> None:
        """A worker ended as it should: nobody needs to look for it."""
        self._since.pop(worker, None)
        await self._notes.put(WORKERS, worker, None, 0.0)

    async def workers(self, catalog: Catalog | None = None) -> list[WorkerStatus]:
        """The workers that have beaten and not left, by name. With `catalog` each is told with the number
        of its leases, otherwise with none: counting them costs a look at each lease."""
        found = await self._notes.scan(WORKERS)
        leases = by_worker(await catalog.leases()) if catalog is not None and found else Counter[str]()
        now = await self._notes.now()
        attending = [(_decode(note.value), note.at) for note in found]
        return [
            WorkerStatus(present.heartbeat, present.since, at, leases[present.heartbeat.worker], now)
            for present, at in attending
        ]


def by_worker(leases: Iterable[LeaseRow]) -> Counter[str]:
    """How many leases each worker holds; what is in transit is held by whoever sent it."""
    return Counter(lease.worker for lease in leases)


def _stored(owner: str) -> bytes:
    return owner.encode("utf-8", "surrogatepass")


def _shown(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")
