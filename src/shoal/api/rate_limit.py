"""Rate limit per caller: one number for each, as the frontier keeps one for each lane."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class RateLimiter:
    """`burst` calls at once, then one every `gap` seconds, for each key (GCRA).

    Remembers `keys` keys at most: requests from a million addresses must not fill the memory.
    """

    def __init__(
        self, gap: float, burst: int, *, keys: int = 10_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gap = gap
        self._slack = gap * (burst - 1)
        self._keys = keys
        self._clock = clock
        self._due: dict[str, float] = {}

    def wait(self, key: str) -> float:
        """Seconds until `take` would succeed."""
        due = self._due.get(key)
        return max(0.0, due - self._slack - self._clock()) if due is not None else 0.0

    def take(self, key: str) -> float:
        """Returns 0 if the call is allowed. Otherwise returns the seconds to wait and takes nothing."""
        if self._gap <= 0:
            return 0.0
        now = self._clock()
        due = self._due.pop(key, now)
        wait = due - self._slack - now
        # Inserted at the end: a full table drops the key that was used longest ago.
        self._due[key] = due if wait > 0 else max(due, now) + self._gap
        if len(self._due) > self._keys:
            del self._due[next(iter(self._due))]
        return max(0.0, wait)


def retry_after(seconds: float) -> dict[str, str]:
    """The Retry-After header for a wait of `seconds`."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
