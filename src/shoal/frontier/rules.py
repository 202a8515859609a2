"""The arithmetic that every backend shares (in SQL and Lua it is written again, the contract
suite keeps it equal). Pure. All times are whole microseconds of the frontier's clock: floats
would drift apart between backends.
"""

from __future__ import annotations

from shoal.model import TRANSIT, Failure, JobState, Pace

US = 1_000_000

STEP = (0, 256, 128, 64, 32, 16, 8, 4, 2, 1)
"""What one visit costs a line, by priority: virtual time it moves on. A step up in priority
halves the cost, so it doubles the share; nobody's share is ever zero."""

WHOLE = 256
WEIGHT = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""What a line weighs, by priority: WHOLE / STEP."""

BONUS = tuple(max(0, priority - 5) * 10 * US for priority in range(10))
"""How much earlier a ready lane counts as ready, by the priority of what waits there. Static,
so a normal lane waits at most 40 s longer than urgent ones that came after it."""

STAGGER = 2 * US
"""What several workers died over comes back one by one, so far apart: with the one request that
kills them all, its innocent neighbours would die as well."""


def microseconds(seconds: float) -> int:
    return round(seconds * US)


def passed(vt: int, weights: int, finish: int) -> int:
    """A lane's virtual time after a visit: what one visit is worth where lines of these weights wait,
    but never further than what it has served. Rounded up, or newcomers would gain on the others."""
    return max(vt, min(vt - -WHOLE // weights, finish))


def allowance(now: int, tat: int, gap: int, burst: int) -> int:
    """How many visits a lane's pace allows at once now (GCRA). Only for gap > 0."""
    return (now + burst * gap - max(tat, now)) // gap + 1


def stopped(state: JobState, taker: str) -> bool:
    """Whether what travels of a job in this state is refused to who would visit it. Who is in transit
    himself only ends it."""
    return state is JobState.CANCELLED or (state is JobState.PAUSED and not taker.startswith(TRANSIT))


class Paced:
    """The pace of a lane as frontiers keep it. Whose row it is, adds the rest."""

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
        """What the pace says; what it does not say stays."""
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


def made_by(failure: Failure, worker: str) -> Failure:
    """The failure as a dead letter keeps it: with who held the lease, if it was on no way to anybody."""
    return Failure(failure.error, failure.message, "" if worker.startswith(TRANSIT) else worker)
