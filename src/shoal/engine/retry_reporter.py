"""Trying again, and telling about it."""

from __future__ import annotations

from shoal.errors import ShoalError
from shoal.events import Reconnected, Trouble, Watcher
from shoal.politeness.pacing import backoff


class RetryReporter:
    """What one loop tries until it succeeds. Every failure is told; so is the success after failures."""

    __slots__ = ("_attempt", "_cap", "_server", "_watch")

    def __init__(self, watch: Watcher, *, cap: float = 2.0) -> None:
        self._watch = watch
        self._cap = cap
        self._attempt = 0
        self._server = ""

    def failed(self, error: ShoalError, wait: float | None = None) -> float:
        """Answers how many seconds to wait before the next attempt: `wait`, or ever longer."""
        self._attempt += 1
        if wait is None:
            wait = backoff(self._attempt, base=0.2, cap=self._cap, jitter=0.5)
        self._server = error.server or self._server
        self._watch(Trouble(str(error), self._attempt, error.server, wait))
        return wait

    def succeeded(self) -> None:
        if self._attempt and self._server:
            self._watch(Reconnected(self._server))
        self._attempt, self._server = 0, ""
