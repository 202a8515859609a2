"""Locks, cursors and the list of workers: built on notes, once for all backends.

Each kind has a shelf of its own, so its notes cannot collide with any others.
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
"""Seconds without a heartbeat after which a worker is forgotten."""


def _is_never_dead(_: str) -> bool:
    return False


class Lock:
    """A lock that one owner at a time holds, for `ttl` seconds from its last `take`.

    `is_dead` returns whether the owner of this name is known to be dead. The lock of a dead owner can be
    taken before it expires.
    """

    def __init__(
        self,
        notes: Notes,
        name: str,
        owner: str,
        ttl: float,
        *,
        is_dead: Callable[[str], bool] = _is_never_dead,
    ) -> None:
        self._notes = notes
        self._name = name
        self._owner = owner
        self._ttl = ttl
        self._is_dead = is_dead
        self.holder = ""
        """The owner that the last `take` found or made."""

    async def take(self) -> bool:
        """Take the lock, or keep it for another `ttl` seconds. Returns whether it is ours now."""
        while True:
            known = await self._notes.get(LOCKS, self._name)
            self.holder = "" if known is None else _decode_owner(known)
            if known is not None and self.holder != self._owner and not self._is_dead(self.holder):
                return False
            if await self._set(known, _encode_owner(self._owner)):
                self.holder = self._owner
                return True
            # Another process changed the lock in between: read it again.

    async def release(self) -> None:
        """Give the lock back. Does nothing if another owner holds it. If the frontier cannot be reached,
        the lock expires by itself."""
        with suppress(FrontierError):
            await self._set(_encode_owner(self._owner), None)

    @asynccontextmanager
    async def keep(self) -> AsyncIterator[None]:
        """Keep a taken lock while the body runs, and give it back afterwards."""
        keeping = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self.release()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 3)
            with suppress(FrontierError):
                await self.take()

    async def _set(self, known: bytes | None, value: bytes | None) -> bool:
        return await self._notes.compare_and_set(LOCKS, self._name, known, value, self._ttl)


class Cursor:
    """How far a consumer has come in the item log of a job."""

    def __init__(self, notes: Notes, job: str, sink: str) -> None:
        self._notes = notes
        # The length keeps two pairs of job and sink from sharing one name.
        self._name = f"{len(job)} {job} {sink}"

    async def get(self) -> int:
        """Return the position that was saved last; 0 if none was."""
        return int(await self._notes.get(CURSORS, self._name) or 0)

    async def save(self, position: int) -> None:
        await self._notes.put(CURSORS, self._name, b"%d" % position, FOREVER)


class _Present(Struct, frozen=True):
    since: float
    heartbeat: Heartbeat


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Present).decode


class Presence:
    """The list of workers. A worker sends a heartbeat every few seconds and leaves when it ends."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._since: dict[str, float] = {}

    async def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Store a worker's heartbeat. It replaces the previous one."""
        if heartbeat.worker not in self._since:
            known = await self._notes.get(WORKERS, heartbeat.worker)
            self._since[heartbeat.worker] = await self._notes.now() if known is None else _decode(known).since
        value = _encode(_Present(self._since[heartbeat.worker], heartbeat))
        await self._notes.put(WORKERS, heartbeat.worker, value, FORGET)

    async def leave(self, worker: str) -> None:
        """Remove a worker that has ended in order."""
        self._since.pop(worker, None)
        await self._notes.put(WORKERS, worker, None, 0.0)

    async def workers(self, catalog: Catalog | None = None) -> list[WorkerStatus]:
        """Return the workers that have sent a heartbeat and not left, by name. Their leases are counted if
        `catalog` is given; otherwise the count is 0, because counting reads every lease."""
        found = await self._notes.scan(WORKERS)
        leases = lease_counts(await catalog.leases()) if catalog is not None and found else Counter[str]()
        now = await self._notes.now()
        present = [(_decode(note.value), note.at) for note in found]
        return [
            WorkerStatus(each.heartbeat, each.since, at, leases[each.heartbeat.worker], now)
            for each, at in present
        ]


def lease_counts(leases: Iterable[LeaseRow]) -> Counter[str]:
    """Count the leases of each worker. A lease in transit counts for its sender."""
    return Counter(lease.worker for lease in leases)


def _encode_owner(owner: str) -> bytes:
    return owner.encode("utf-8", "surrogatepass")


def _decode_owner(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")
