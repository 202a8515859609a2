"""When a turn began, by our clock, and whether it came too early.

A host's delay starts at the moment that the frontier calls `now` in a claim. The answer may reach us much
later: the server was held up, its disk was slow, its lock was taken. A way to the frontier that is always
long does not matter, because every visit is as late as the one before it.
"""

from __future__ import annotations

from math import inf

FORGET = 1.1
"""How much longer the usual claim may become from one to the next: a way that has changed is learned."""
DRIFT = 0.01
"""Seconds that the frontier's clock may seem to leap, and for each second between two claims a thousandth
more: clocks drift, and are corrected slowly."""


class ClaimClock:
    """Learns from every claim that brought something."""

    __slots__ = ("_answered", "_asked", "_leap", "_leapt", "_now", "_usual")

    def __init__(self) -> None:
        self._usual = inf
        self._now, self._asked, self._answered = inf, -inf, inf
        self._leapt, self._leap = -inf, 0.0

    def began(self, now: float, asked: float, answered: float) -> float:
        """The moment (monotonic) from which the visits of a claim are late. It was asked and answered then,
        the frontier's clock said `now`, and it should have been answered as quickly as others. Nothing is
        known of the first one, so its turn may have begun with the question."""
        passed, most, least = now - self._now, answered - self._asked, asked - self._answered
        if passed - most > DRIFT + most / 1000:
            self._leapt, self._leap = answered, passed - least
        self._now, self._asked, self._answered = now, asked, answered
        took, usual = answered - asked, self._usual
        self._usual = min(took, usual * FORGET)
        return asked if usual == inf else asked + self._usual

    def early(self, claimed: float, gap: float) -> float:
        """Seconds by which a turn that began then may have come too early: the frontier's clock was set
        forward, and every host's next turn after that counts from a time before it. After one gap none
        does any more."""
        return self._leap if claimed - self._leapt < gap else 0.0
