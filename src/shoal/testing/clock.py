"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """A `shoal.clock.Clock` for tests. It starts at a whole second, so that sums of quarter
    seconds stay exact and times can be compared with `==`."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward. It never goes back: no frontier promises anything for that case."""
        if seconds < 0:
            raise ValueError(f"a clock cannot be advanced by {seconds} s")
        self._now += seconds
