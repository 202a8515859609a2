"""The arithmetic that every backend shares. SQL and Lua repeat it; the contract suite compares them.

Pure functions. All times are whole microseconds of the frontier's clock: floats
would differ between backends.
"""

from __future__ import annotations

from shoal.model import TRANSIT, Failure, JobState, Pace

US = 1_000_000

STEP = (0, 256, 128, 64, 32, 16, 8, 4, 2, 1)
"""What one visit costs a line in virtual time, by priority. One step up in priority halves the cost, so
it doubles the share. No share is ever zero."""

WHOLE = 256
WEIGHT = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The weight of a line, by priority: WHOLE / STEP."""

BONUS = tuple(max(0, priority - 5) * 10 * US for priority in range(10))
"""How much earlier a ready lane counts as ready, by the highest priority that waits there. A constant,
so a normal lane waits at most 40 s longer than urgent lanes that became ready after it."""

STAGGER = 2 * US
"""Requests that several workers died over come back one by one, at this distance. Otherwise the one
request that kills workers would take its innocent neighbours with it each time."""


def microseconds(seconds: float) -> int:
    return round(seconds * US)


def advance(vt: int, weights: int, finish: int) -> int:
    """Return a lane's virtual time after a visit: it advances by the worth of one visit among lines of
    these weights, but never beyond the line that was served. Rounded up, or newcomers would gain on the
    others."""
    return max(vt, min(vt - -WHOLE // weights, finish))


def allowance(now: int, tat: int, gap: int, burst: int) -> int:
    """Return how many visits a lane's pace allows at once now (GCRA). Only for gap > 0."""
    return (now + burst * gap - max(tat, now)) // gap + 1


def is_stopped(state: JobState, taker: str) -> bool:
    """Return whether `taker` may not take a lease in transit, because the state of its job forbids visits.

    A taker that is itself in transit does not visit: it only ends the lease, also for a paused job."""
    return state is JobState.CANCELLED or (state is JobState.PAUSED and not taker.startswith(TRANSIT))


class Paced:
    """The pace of a lane as frontiers store it. Subclasses add the rest of their row."""

    __slots__ = ("blocked", "burst", "floor", "gap", "paused", "pinned", "tat", "width")

    gap: int
    width: int
    burst: int
    floor: int
    pinned: int
    paused: int
    tat: int
    blocked: int

    @property
    def pace_gap(self) -> int:
        return self.gap if self.pinned or self.floor <= self.gap else self.floor

    def apply(self, pace: Pace, now: int) -> None:
        """Change the values that the pace gives; keep the others."""
        if pace.gap is not None:
            self.gap = microseconds(pace.gap)
        if pace.width is not None:
            self.width = pace.width
        if pace.burst is not None:
            self.burst = pace.burst
        if pace.floor is not None:
            self.floor = microseconds(pace.floor)
        if pace.pinned is not None:
            self.pinned = int(pace.pinned)
        if pace.paused is not None:
            self.paused = int(pace.paused)
        if pace.blocked is not None:
            until = now + microseconds(pace.blocked)
            self.blocked = max(self.blocked, until) if pace.blocked > 0 else 0


def with_worker(failure: Failure, worker: str) -> Failure:
    """Return the failure as a dead letter stores it: with the worker, unless the lease was in transit."""
    return Failure(failure.error, failure.message, "" if worker.startswith(TRANSIT) else worker)
