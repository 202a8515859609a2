"""What a backend gives to the contract suite so that it can be examined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shoal.clock import Clock
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.port import Backend
from shoal.testing.clock import FakeClock


class Harness(Protocol):
    """One empty storage, its clock, and the ways to open it.

    Each test (and each example of the state machine) gets a fresh one.
    """

    durable: bool
    """What was acknowledged survives `reopen`."""
    url: str
    """Where other processes find the same storage (`registry.open_frontier`); empty if they
    cannot. They run on real time, whatever this harness's clock says."""

    async def open(self) -> Backend:
        """Another handle onto the same storage. The harness closes it."""
        ...

    async def reopen(self) -> Backend:
        """Close every handle, then open the storage again."""
        ...

    async def close(self) -> None:
        """Close every handle. Closing twice is harmless."""
        ...

    def advance(self, seconds: float) -> None:
        """Move the frontier's clock. Nothing in the suite sleeps."""
        ...

    def now(self) -> float:
        """The frontier's time."""
        ...


class MemoryHarness:
    """One memory frontier. `make` lets a test examine a variant of it."""

    durable = False
    url = ""

    def __init__(self, make: Callable[[Clock], Backend] = lambda clock: MemoryFrontier(clock=clock)) -> None:
        self.clock = FakeClock()
        self.frontier = make(self.clock)

    async def open(self) -> Backend:
        return self.frontier

    async def reopen(self) -> Backend:
        raise NotImplementedError("what lives in memory does not survive; leave the restart chapter out")

    async def close(self) -> None:
        await self.frontier.close()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock()
