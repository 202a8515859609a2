"""What a backend provides for the contract suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shoal.clock import Clock
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.port import Backend
from shoal.testing.clock import FakeClock


class Harness(Protocol):
    """An empty storage, its clock, and the handles on it.

    Each test (and each example of the state machine) gets a fresh one.
    """

    durable: bool
    """Whether acknowledged work survives `reopen`."""
    url: str
    """The address at which other processes open the same storage (`registry.open_frontier`); empty if they
    cannot. Those processes run on real time, whatever the clock of this harness says."""

    async def open(self) -> Backend:
        """Open another handle on the same storage. The harness closes it."""
        ...

    async def reopen(self) -> Backend:
        """Close every handle, then open the storage again."""
        ...

    async def close(self) -> None:
        """Close every handle. Closing twice is harmless."""
        ...

    def advance(self, seconds: float) -> None:
        """Move the frontier's clock forward. The suite never sleeps."""
        ...

    def now(self) -> float:
        """Return the frontier's time."""
        ...


class MemoryHarness:
    """One memory frontier. `make` creates a variant of it for a test."""

    durable = False
    url = ""

    def __init__(self, make: Callable[[Clock], Backend] = lambda clock: MemoryFrontier(clock=clock)) -> None:
        self.clock = FakeClock()
        self.frontier = make(self.clock)

    async def open(self) -> Backend:
        return self.frontier

    async def reopen(self) -> Backend:
        raise NotImplementedError("a frontier in memory does not survive a restart: use VolatileContract")

    async def close(self) -> None:
        await self.frontier.close()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock()
