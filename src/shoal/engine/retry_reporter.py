"""Retries, and reports about them."""

from __future__ import annotations

import time
from math import inf

from shoal.errors import ShoalError
from shoal.events import Reconnected, Trouble, Watcher
from shoal.politeness.pacing import backoff


class RetryReporter:
    """Counts the failures of one loop that retries, until it has failed for `give_up_after` seconds. Reports
    each failure, and the success after failures."""

    __slots__ = ("_attempt", "_cap", "_give_up_after", "_server", "_since", "_watch")

    def __init__(self, watch: Watcher, *, cap: float = 2.0, give_up_after: float = inf) -> None:
        self._watch = watch
        self._cap = cap
        self._give_up_after = give_up_after
        self._attempt = 0
        self._since = 0.0
        self._server = ""

    def failed(self, error: ShoalError, wait: float | None = None) -> float:
        """Returns the seconds to wait before the next attempt: `wait`, or longer each time. Raises the error
        when the time is up."""
        now = time.monotonic()
        if not self._attempt:
            self._since = now
        self._attempt += 1
        left = self._since + self._give_up_after - now
        if left <= 0:
            message = f"{error}; given up after {self._give_up_after:g} s"
            self._watch(Trouble(message, self._attempt, error.server, part="frontier"))
            raise error
        if wait is None:
            wait = backoff(self._attempt, base=0.2, cap=self._cap, jitter=0.5)
        wait = min(wait, left)
        self._server = error.server or self._server
        self._watch(Trouble(str(error), self._attempt, error.server, wait, "frontier"))
        return wait

    def succeeded(self) -> None:
        if self._attempt and self._server:
            self._watch(Reconnected(self._server))
        self._attempt, self._server = 0, ""
