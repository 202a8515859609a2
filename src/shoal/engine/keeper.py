"""Keeps the leases of running visits alive, from a thread of its own.

Parsers and handlers can block the event loop for seconds, and a lease that runs out meanwhile goes to another
worker. So the keeper has its own thread, loop and frontier connection. It extends leases often (once a
second), because the same answer also brings cancellation: a lease of a cancelled job comes back as lost, and
its visit is stopped. And since a blocked loop does not stop it, it also writes the worker's heartbeat.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from shoal.engine.retry_reporter import RetryReporter
from shoal.errors import FrontierError
from shoal.events import Watcher
from shoal.frontier.notes import Presence
from shoal.frontier.port import Frontier, Notes
from shoal.model import Heartbeat, Lease

INTERVAL = 1.0
BEAT = 5.0
"""Seconds between two heartbeats; see `model.HEARTBEAT_TIMEOUT`."""

OpenFrontier = Callable[[], Awaitable[tuple[Frontier, Notes]]]
"""Opens the worker's frontier once more, on the loop of the caller."""


class Keeper:
    """Holds leases. `open_frontier` opens a connection for the keeper's thread. None means that the frontier
    exists in this process only: then it, and its notes, are used on the worker's loop."""

    def __init__(
        self,
        frontier: Frontier,
        notes: Notes,
        *,
        lease: float,
        on_lost: Callable[[Lease], None],
        watch: Watcher,
        heartbeat: Callable[[], Heartbeat],
        open_frontier: OpenFrontier | None,
    ) -> None:
        self._frontier = frontier
        self._presence = Presence(notes)
        self._open = open_frontier
        self._lease = lease
        self._on_lost = on_lost
        self._heartbeat = heartbeat
        self._held: dict[int, tuple[Lease, float]] = {}
        """By token: the lease, and the moment (monotonic) from which it is certainly lost."""
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._reporter = RetryReporter(lambda event: self._call_worker(partial(watch, event)))
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._open is None:
            self._task = self._loop.create_task(self._keep(self._frontier, self._presence, self._loop_pause))
            return
        self._thread = threading.Thread(target=self._run, name="shoal-keeper", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Extend no more leases and report no more failures. `stop` still waits for the thread."""
        self._stop.set()

    async def stop(self) -> None:
        self.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._presence.leave(self._heartbeat().worker)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def hold(self, leases: list[Lease], since: float) -> None:
        """Keep these leases, which were claimed no earlier than `since` (monotonic)."""
        with self._mutex:
            for lease in leases:
                self._held[lease.token] = (lease, since + self._lease)

    def drop(self, lease: Lease) -> None:
        with self._mutex:
            self._held.pop(lease.token, None)

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is certainly still ours. Called immediately before a request is sent: a worker
        that was suspended for a minute must not visit with a lease that has ended."""
        entry = self._held.get(lease.token)
        return entry is not None and time.monotonic() < entry[1]

    def _run(self) -> None:
        asyncio.run(self._keep_on_thread())

    async def _keep_on_thread(self) -> None:
        assert self._open is not None
        while not self._stop.is_set():
            try:
                frontier, notes = await self._open()
                break
            except FrontierError as error:
                self._reporter.failed(error, self._interval)
                await self._thread_pause()
        else:
            return
        self._reporter.succeeded()
        presence = Presence(notes)
        try:
            await self._keep(frontier, presence, self._thread_pause)
            with suppress(FrontierError):
                await presence.leave(self._heartbeat().worker)
        finally:
            await frontier.close()

    async def _thread_pause(self) -> None:
        # Blocks this thread's loop on purpose: it has nothing else to do, and stop() ends it.
        self._stop.wait(self._interval)

    async def _loop_pause(self) -> None:
        await asyncio.sleep(self._interval)

    @property
    def _interval(self) -> float:
        return min(INTERVAL, self._lease / 4)

    async def _keep(
        self, frontier: Frontier, presence: Presence, pause: Callable[[], Awaitable[None]]
    ) -> None:
        beat_at = 0.0
        while not self._stop.is_set():
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT
                with suppress(
                    FrontierError
                ):  # extending the leases fails too, or the next claim, and reports it
                    await presence.heartbeat(self._heartbeat())
            await pause()
            with self._mutex:
                leases = [lease for lease, _ in self._held.values()]
            if not leases:
                continue
            since = time.monotonic()
            try:
                lost = await frontier.extend(leases, self._lease)
                self._reporter.succeeded()
            except FrontierError as error:
                self._reporter.failed(error, self._interval)
                lost = self._expired(since)
                leases = []
            gone = {lease.token for lease in lost}
            with self._mutex:
                for lease in leases:
                    # Only leases that are still held: a visit may have ended in the meantime.
                    if lease.token in self._held and lease.token not in gone:
                        self._held[lease.token] = (lease, since + self._lease)
                for lease in lost:
                    self._held.pop(lease.token, None)
            for lease in lost:
                self._call_worker(partial(self._on_lost, lease))

    def _expired(self, now: float) -> list[Lease]:
        with self._mutex:
            return [lease for lease, end in self._held.values() if now >= end]

    def _call_worker(self, call: Callable[[], None]) -> None:
        if self._stop.is_set():
            return
        if self._open is None:
            call()
            return
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            self._stop.set()  # the worker's loop is closed, and the worker with it
