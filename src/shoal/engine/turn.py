"""When a turn began, by our clock.

A host's delay starts at the moment that the frontier calls `now` in a claim. The answer may reach us much
later: the server was held up, its disk was slow, its lock was taken. A worker cannot compare that moment
with its own clock, because the two clocks differ by an unknown amount. But the amount is the same from claim
to claim, and the quickest answer shows it: whatever an answer took beyond that was delay.
"""

from __future__ import annotations

from math import inf

WINDOW = 30.0
"""Seconds for which a quick answer counts: clocks drift, and may be set."""


class Turns:
    """Learns from every claim, empty ones too."""

    __slots__ = ("_old", "_since", "_young")

    def __init__(self) -> None:
        self._young = inf
        self._old = inf
        self._since = 0.0

    def began(self, now: float, asked: float, answered: float) -> float:
        """The moment (monotonic) of the frontier's `now`, for a claim that was asked and answered then.

        Never before it was asked, whatever the frontier's clock does.
        """
        if answered - self._since > WINDOW:
            self._old, self._young, self._since = self._young, inf, answered
        self._young = min(self._young, answered - now)
        return max(asked, min(answered, now + min(self._young, self._old)))
