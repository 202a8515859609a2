"""When a turn began, by our clock.

A host's delay starts at the moment that the frontier calls `now` in a claim. The answer may reach us much
later: the server was held up, its disk was slow, its lock was taken. A worker cannot compare that moment
with its own clock, because the two clocks differ by an unknown amount. But the amount is the same from claim
to claim, and every claim narrows it down: `now` was after the question and before the answer.
"""

from __future__ import annotations

from math import inf

WINDOW = 30.0
"""Seconds for which an answer counts: clocks drift, and may be set."""
DRIFT = 0.01
"""Seconds by which clocks may drift apart in that time."""


class Turns:
    """Learns from every claim, empty ones too."""

    __slots__ = ("_least", "_most", "_old_least", "_old_most", "_set_at", "_set_by", "_since")

    def __init__(self) -> None:
        # What our clock is ahead of the frontier's, at least and at most, by this window and the one before.
        self._least = self._old_least = -inf
        self._most = self._old_most = inf
        self._since = 0.0
        self._set_at = -inf
        self._set_by = 0.0

    def began(self, now: float, asked: float, answered: float) -> tuple[float, float]:
        """The moment (monotonic) of the frontier's `now`, at the earliest and at the latest, for a claim that
        was asked and answered then.

        Who takes a turn for older than it is comes close to the visit before, who takes it for younger to
        the one after. The first answer teaches nothing about how long it took: anything between question
        and answer may be true. Later ones are as good as the quickest of them.
        """
        if answered - self._since > WINDOW:
            self._old_least, self._old_most, self._since = self._least, self._most, answered
            self._least, self._most = -inf, inf
        least = max(self._least, self._old_least)
        most = min(self._most, self._old_most)
        first = least == -inf
        if least > answered - now or most < asked - now:
            # It cannot be: one of the clocks was set, or they drifted. What was learned is void.
            if least - (answered - now) > DRIFT:
                self._set_at, self._set_by = answered, most - (asked - now)
            self._old_least, self._old_most = -inf, inf
            self._least, self._most = asked - now, answered - now
            first = True
        self._least = max(self._least, asked - now)
        self._most = min(self._most, answered - now)
        if first:
            return asked, answered
        # The middle, as between any two clocks: a long way to the frontier is no delay.
        ahead = (max(self._least, self._old_least) + min(self._most, self._old_most)) / 2
        moment = max(asked, min(answered, now + ahead))
        return moment, moment

    def early(self, claimed: float, gap: float) -> float:
        """Seconds by which a turn that began then may have come too early: the frontier's clock was set
        forward, and every host's next turn after that counts from a time before it. After one gap none
        does any more."""
        return self._set_by if claimed - self._set_at < gap else 0.0
