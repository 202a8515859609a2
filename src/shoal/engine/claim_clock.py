"""When a turn began, by the worker's clock, and whether it came too early.

A host's delay starts at the moment that the frontier calls `now` in a claim. The answer may reach the worker
much later: the server was held up, its disk was slow, its lock was taken. Constant latency does not matter,
because every visit is as late as the one before it.
"""

from __future__ import annotations

from math import inf

FORGET = 1.1
"""The factor by which the usual claim may take longer than before: so a change of latency is learned."""
DRIFT = 0.01
"""Seconds that the frontier's clock may seem to leap, plus a thousandth of the time between two claims:
clocks drift, and are corrected slowly."""


class ClaimClock:
    """Learns from every claim that brought leases."""

    __slots__ = ("_answered", "_asked", "_leap", "_leapt_at", "_now", "_usual")

    def __init__(self) -> None:
        self._usual = inf
        self._now, self._asked, self._answered = inf, -inf, inf
        self._leapt_at, self._leap = -inf, 0.0

    def turn_start(self, now: float, asked: float, answered: float) -> float:
        """Returns the moment (monotonic) from which the visits of a claim count as late.

        The claim was sent at `asked` and answered at `answered`, with the frontier's clock at `now`. It is
        taken to have run as fast as claims usually do. For the first claim nothing is usual yet: its turn may
        have begun as soon as it was sent.
        """
        passed, most, least = now - self._now, answered - self._asked, asked - self._answered
        if passed - most > DRIFT + most / 1000:
            self._leapt_at, self._leap = answered, passed - least
        self._now, self._asked, self._answered = now, asked, answered
        took, usual = answered - asked, self._usual
        self._usual = min(took, usual * FORGET)
        return asked if usual == inf else asked + self._usual

    def seconds_early(self, claimed: float, gap: float) -> float:
        """Returns by how much a turn that began at `claimed` may have come too early.

        If the frontier's clock was set forward, every host's next turn counts from a moment before that.
        After one gap no turn does any more.
        """
        return self._leap if claimed - self._leapt_at < gap else 0.0
