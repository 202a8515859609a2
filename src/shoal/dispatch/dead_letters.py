"""Dead letters that no worker told the broker of: the frontier itself ended them.

A URL whose ttl ran out while it waited, one whose workers died too often, one that could not even be
accepted: nobody held a lease then who could tell. So the pump reads what ended since it last looked. How
far it came is noted in the frontier after the broker took the letters: a pump that dies in between makes
the next one tell them again, and none is left out.
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
"""Seconds for which `failed_urls` keeps a letter. What ended earlier is not told any more."""
LATE = 1.0
"""Seconds that a letter is left alone: one that ended a little earlier may be stored a little later."""
PAGE = 5000
BATCH = 100
"""Letters that the broker is given at once."""


class DeadLetterReporter:
    """Tells of each letter once, and again if it comes back and ends again."""

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
        """`name` is that of the note; `ours` tells of a queue whether its letters belong in this broker."""
        self._catalog = catalog
        self._notes = notes
        self._dispatch = dispatch
        self._name = name
        self._job = job
        self._ours = ours
        self._told: set[tuple[int, float]] = set()
        """What was told in a pass that did not come to its end."""
        self.busy = asyncio.Lock()

    async def tell(self, now: float, *, late: float = LATE) -> None:
        """What ended until `late` seconds before `now` (frontier time)."""
        async with self.busy:
            noted = await self._notes.get(SHELF, self._name)
            # A clock that was set back must not hide what ends until it is there again.
            since = now - DAY if noted is None else min(float(noted), now)
            which, until, reached, after = Selection(job=self._job, since=since), now - late, since, 0
            while some := await self._catalog.dead(which, after=after, limit=PAGE):
                after = some[-1].id
                ended = [letter for letter in some if letter.ended_at <= until]
                await self._tell([letter for letter in ended if self._untold(letter)])
                reached = max([reached, *(letter.ended_at for letter in ended)])
            if reached > since:
                await self._notes.put(SHELF, self._name, repr(reached).encode(), DAY)
            self._told.clear()

    async def tell_all(self, now: float) -> None:
        """Nobody will look again soon: also what ended just now."""
        await self.tell(now, late=-math.inf)

    async def _tell(self, letters: list[DeadLetter]) -> None:
        for start in range(0, len(letters), BATCH):
            some = letters[start : start + BATCH]
            await self._dispatch.failed(some)
            self._told.update((letter.id, letter.ended_at) for letter in some)

    def _untold(self, letter: DeadLetter) -> bool:
        if (letter.id, letter.ended_at) in self._told or not self._ours(letter.request.queue):
            return False
        failure = letter.failure
        if failure.error == EXPIRED:
            return failure == TTL_OVER  # otherwise it expired in the broker, which told by itself
        # Who fails a visit tells of it and counts it; what was never accepted has no visit.
        return failure.error == WORKER_CRASHED or not letter.request.attempt
