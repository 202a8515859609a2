"""When a visit may leave: by the turn that its claim gave, and by what happened since.

The host's next turn counts from the claim. A visit that is held up after it (a stalled machine, a slow disk,
a name that takes long to resolve, a connection that does) would come close to the next one. So it is looked
at three times: on the loop before anything is done, on the fetcher's thread before a connection is made, and
there once more as the bytes leave. After that nobody can call it back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from shoal.engine.slots import Place
from shoal.errors import FrontierError

LATE = 0.08
LEAST_LATE = 0.04
"""The share of a gap that a visit may leave after its turn, or so many seconds, whichever is more. Two visits
may seem so much closer than the gap to their host. A tenth and 50 ms are said: the rest is for the way."""
TAKEN = 0.8
"""The share of a gap after which others may be about to get the next turn."""
SHORT_GAP = 0.05
"""Hosts with a shorter gap than this are visited as claimed: milliseconds cannot be promised."""


class Departure:
    """One visit on its way out. `due` belongs to the loop, `begin` and `send` to the fetcher's thread.

    The turn counts from `claimed` (monotonic), see `Turns`. `holds` tells whether the lease is still
    ours, `put_off` lets the host's next turn come so much later than now. One that is not `patient` makes
    room for itself and goes all the same: on a machine that is always late a URL must not starve. `early`
    says by how much a turn may have come too early at such a gap, because the frontier's clock was set;
    `slow` that the last connection to the host took long. One that is `alone` is the only visit that its
    host gets at a time: nobody else is given a turn while it holds its lease, however late it is. `stay`
    is how many seconds it may wait here for another turn when this one is used up. `place` is what the
    visit has among the slots of its worker.
    """

    __slots__ = (
        "_alone",
        "_early",
        "_gap",
        "_holds",
        "_left",
        "_loop",
        "_patient",
        "_place",
        "_put_off",
        "_sent",
        "_stay",
        "_task",
        "_turn",
        "missed",
        "slow",
    )

    def __init__(
        self,
        claimed: float,
        gap: float,
        *,
        patient: bool,
        holds: Callable[[], bool],
        put_off: Callable[[float], Awaitable[None]],
        early: Callable[[float], float] = lambda _gap: 0.0,
        slow: bool = False,
        alone: bool = False,
        stay: float = 0.0,
        place: Place | None = None,
    ) -> None:
        self._turn = self._left = claimed
        self._gap = gap if gap >= SHORT_GAP else 0.0
        self._patient = patient
        self._holds = holds
        self._put_off = put_off
        self._early = early
        self._alone = alone
        self._stay = stay
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._sent = False
        self._task: asyncio.Task[None] | None = None
        self.missed = False
        """It was held up for so long that it does not go on this turn."""
        self.slow = slow

    def widen(self, gap: float) -> None:
        """The host itself wants at least this gap."""
        if gap >= SHORT_GAP:
            self._gap = max(self._gap, gap)

    async def due(self) -> bool:
        """Whether this visit may still begin on the turn it was given.

        One that is late puts the next turn off, or is handed back if others may already have been given it.
        Raises FrontierError: then nobody can tell.
        """
        if not await self._on_time():
            return False
        if self._place is not None:
            self._place.wait()
        return self._holds()

    async def _on_time(self) -> bool:
        if not self._gap:
            return True
        early = min(self._early(self._gap), self._gap)
        if self._patient and early >= self._gap * TAKEN:
            return self._miss()
        wait = self._turn + early - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        if self._late(time.monotonic()) and not await self._make_room():
            return self._miss()
        return True

    async def again(self, gap: float) -> bool:
        """This turn is used up, and the host wants at least this gap: wait here for the next turn. False
        where the URL is handed back instead. Raises FrontierError as `due` does."""
        self.widen(gap)
        if not self._alone or not 0 < self._gap <= self._stay:
            return False
        await asyncio.sleep(max(0.0, self._left + self._gap - time.monotonic()))
        self._sent = False
        return await self._make_room()

    async def _make_room(self) -> bool:
        """Let the host's next turn count from now. False if others may have been given it before."""
        asked = time.monotonic()
        if not self._taken(asked):
            await self._put_off(self._gap)
            answered = time.monotonic()
            # The answer tells that it is done, not when: it must have been done before the next turn came.
            if self._alone or (answered - asked < self._gap / 4 and not self._taken(answered)):
                self._turn = asked
                return True
        if self._patient:
            return False
        # One more hand-back would starve it. So nobody gets a turn until whoever may have got the next one
        # has left, and then, a gap before the others, it goes. Two gaps more are for slow answers.
        await self._put_off(4 * self._gap)
        await asyncio.sleep(2 * self._gap)
        self._turn = time.monotonic()
        return True

    def begin(self) -> bool:
        """Asked before a connection is made or taken: whether there is still time for it."""
        if self._gap and self._patient and self._taken(time.monotonic()):
            return self._miss()
        return self._holds()

    def room(self, size: int) -> bool:
        """Asked before so much is kept: whether this visit has a slot of its worker, or has it again."""
        return self._place is None or self._place.room(size)

    async def arrived(self) -> None:
        """The page is there: return when it may be worked on."""
        if self._place is not None:
            await self._place.back()

    def send(self) -> bool:
        """Asked as the request is about to leave, each time: who loses a connection may send it again."""
        if self._gap and self._sent and self._patient:
            return self._miss()  # the host may have seen it, and this turn was for one visit
        if not self._holds():
            return False
        now = time.monotonic()
        if self._gap:
            before, self.slow = self.slow, self._taken(now)
            if self.slow and self._patient and not before:
                return self._miss()
            # Where connecting always takes so long it goes: to connect again would take as long.
            if self._late(now):
                with suppress(RuntimeError):  # the loop is gone, and the worker with it
                    self._loop.call_soon_threadsafe(self._put_off_soon)
        self._sent, self._left = True, now
        return True

    def _put_off_soon(self) -> None:
        self._task = self._loop.create_task(self._put_off_quietly())

    async def _put_off_quietly(self) -> None:
        with suppress(FrontierError):  # whoever asks the frontier next hears of it
            await self._put_off(self._gap)

    def _late(self, now: float) -> bool:
        return now - self._turn > max(LEAST_LATE, LATE * self._gap)

    def _taken(self, now: float) -> bool:
        return not self._alone and now - self._turn >= self._gap * TAKEN

    def _miss(self) -> bool:
        self.missed = True
        return False
