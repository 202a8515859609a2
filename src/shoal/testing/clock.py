"""A clock that stands still until somebody moves it."""

from __future__ import annotations


class FakeClock:
    """A `shoal.clock.Clock` for tests. It starts at a whole second, so that sums of quarter
    seconds stay exact and `==` on times means what it says."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on. Time never goes back: the frontier does not promise anything for that."""
        if seconds < 0:
            raise ValueError(f"a clock cannot be advanced by {seconds} s")
        self._now += seconds
