"""Reports dead letters to the broker that no worker reported, because the frontier itself ended them.

These are URLs whose ttl ended while they waited, whose workers died too often, or that could not be
accepted: no worker held a lease that it could report. So the pump reads the letters since its last report.
It notes its position in the frontier after the broker has accepted the letters. If a pump dies in between,
the next one reports them again, and none is left out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from shoal.dispatch.port import Dispatch
from shoal.frontier.port import Catalog, Notes
from shoal.model import EXPIRED, TTL_OVER, WORKER_CRASHED, DeadLetter, Selection

SHELF = "letters"
DAY = 86400.0
"""Seconds for which `failed_urls` keeps a letter. Older letters are not reported."""
LATE = 1.0
"""Seconds before a letter is reported: one that ended a little earlier may be stored a little later."""
PAGE = 5000
BATCH = 100
"""Letters in one call to the broker."""


class DeadLetterReporter:
    """Reports each letter once, and again if it is revived and ends again."""

    def __init__(
        self,
        catalog: Catalog,
        notes: Notes,
        dispatch: Dispatch,
        *,
        name: str,
        job: str | None,
        ours: Callable[[str], bool],
    ) -> None:
        """`name` is that of the note; `ours` returns whether the letters of a queue belong to this broker."""
        self._catalog = catalog
        self._notes = notes
        self._dispatch = dispatch
        self._name = name
        self._job = job
        self._ours = ours
        self._sent: set[tuple[int, float]] = set()
        """The letters that an interrupted pass has reported."""
        self.busy = asyncio.Lock()

    async def report(self, now: float, *, late: float = LATE) -> None:
        """Report letters that ended until `late` seconds before `now` (frontier time)."""
        async with self.busy:
            noted = await self._notes.get(SHELF, self._name)
            # A clock that was set back must not hide letters until it reaches the old time again.
            since = now - DAY if noted is None else min(float(noted), now)
            which, until, reached, after = Selection(job=self._job, since=since), now - late, since, 0
            while some := await self._catalog.dead(which, after=after, limit=PAGE):
                after = some[-1].id
                ended = [letter for letter in some if letter.ended_at <= until]
                await self._send([letter for letter in ended if self._is_unsent(letter)])
                reached = max([reached, *(letter.ended_at for letter in ended)])
            if reached > since:
                await self._notes.put(SHELF, self._name, repr(reached).encode(), DAY)
            self._sent.clear()

    async def report_all(self, now: float) -> None:
        """Report also the letters of this moment: the last call before the pump ends."""
        await self.report(now, late=-math.inf)

    async def _send(self, letters: list[DeadLetter]) -> None:
        for start in range(0, len(letters), BATCH):
            some = letters[start : start + BATCH]
            await self._dispatch.report_dead(some)
            self._sent.update((letter.id, letter.ended_at) for letter in some)

    def _is_unsent(self, letter: DeadLetter) -> bool:
        if (letter.id, letter.ended_at) in self._sent or not self._ours(letter.request.queue):
            return False
        failure = letter.failure
        if failure.error == EXPIRED:
            return failure == TTL_OVER  # otherwise it expired in the broker, which has the message
        # A worker that fails a visit reports the letter itself and counts an attempt. URLs that were never
        # accepted have no attempts.
        return failure.error == WORKER_CRASHED or not letter.request.attempt
