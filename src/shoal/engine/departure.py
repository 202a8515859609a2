"""Decides whether a visit may still leave on the turn that its claim gave it.

The host's next turn counts from the claim. A visit that is held up after the claim (a stalled machine, a slow
disk, slow DNS, a slow connection) would come too close to the visit that gets the next turn. So each visit is
checked three times: on the loop before anything is done, on the fetcher's thread before it connects, and
there once more as the bytes leave. After that it cannot be called back.
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
"""How long after its turn a visit may leave: this share of the gap, or this many seconds, whichever is more.
To the host, two visits may seem closer than the gap by as much. The promise is a tenth of the gap, at least
50 ms: the difference is left for the network."""
TAKEN = 0.8
"""The share of a gap after which the next turn may already be going to another visit."""
SHORT_GAP = 0.05
"""Gaps shorter than this are not checked: milliseconds cannot be promised."""


class Departure:
    """One visit on its way out, and the gate of its request. `may_connect`, `may_send` and `has_room` run on
    the fetcher's thread, all other methods on the loop.

    - `claimed`: when the turn began (monotonic), see `ClaimClock`.
    - `patient`: the visit may be handed back because it is late. An impatient one makes room for itself and
      leaves: on a machine that is always late its URL must not starve.
    - `holds`: returns whether the lease is still ours.
    - `postpone`: lets the host's next turn begin this many seconds from now.
    - `seconds_early`: returns by how much a turn may have come too early at a gap, because the frontier's
      clock was set.
    - `slow`: the last connection to the host took nearly a gap, or more.
    - `alone`: the host gets one visit at a time. No other visit is given a turn while this one holds its
      lease, however late it is.
    - `stay`: how many seconds the visit may wait here for another turn when this one is used up.
    - `place`: what the visit has among the slots of its worker.
    """

    __slots__ = (
        "_alone",
        "_gap",
        "_holds",
        "_loop",
        "_patient",
        "_place",
        "_postpone",
        "_seconds_early",
        "_sent",
        "_sent_at",
        "_stay",
        "_task",
        "_turn_at",
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
        postpone: Callable[[float], Awaitable[None]],
        seconds_early: Callable[[float], float] = lambda _gap: 0.0,
        slow: bool = False,
        alone: bool = False,
        stay: float = 0.0,
        place: Place | None = None,
    ) -> None:
        self._turn_at = self._sent_at = claimed
        self._gap = gap if gap >= SHORT_GAP else 0.0
        self._patient = patient
        self._holds = holds
        self._postpone = postpone
        self._seconds_early = seconds_early
        self._alone = alone
        self._stay = stay
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._sent = False
        self._task: asyncio.Task[None] | None = None
        self.missed = False
        """The visit was held up for so long that it does not use this turn."""
        self.slow = slow

    def raise_gap(self, gap: float) -> None:
        """Keep at least this gap: the host itself asks for it."""
        if gap >= SHORT_GAP:
            self._gap = max(self._gap, gap)

    async def wait_for_turn(self) -> bool:
        """Wait until the turn has come. Returns whether the visit may begin on it.

        A late visit postpones the host's next turn. If that turn may already have been given away, the
        visit is handed back. Raises FrontierError: then it cannot be known.
        """
        if not await self._catch_turn():
            return False
        if self._place is not None:
            self._place.start_waiting()
        return self._holds()

    async def _catch_turn(self) -> bool:
        if not self._gap:
            return True
        early = min(self._seconds_early(self._gap), self._gap)
        if self._patient and early >= self._gap * TAKEN:
            return self._miss()
        wait = self._turn_at + early - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        if self._is_late(time.monotonic()) and not await self._move_turn_to_now():
            return self._miss()
        return True

    async def wait_for_next_turn(self, gap: float) -> bool:
        """This turn is used up, and the host asks for at least this gap: wait here for the next turn.

        Returns False if the URL is handed back instead. Raises FrontierError as `wait_for_turn` does.
        """
        self.raise_gap(gap)
        if not self._alone or not 0 < self._gap <= self._stay:
            return False
        await asyncio.sleep(max(0.0, self._sent_at + self._gap - time.monotonic()))
        self._sent = False
        return await self._move_turn_to_now()

    async def _move_turn_to_now(self) -> bool:
        """Let the host's next turn count from now. Returns False if it may already have been given away."""
        asked = time.monotonic()
        if not self._is_next_taken(asked):
            await self._postpone(self._gap)
            answered = time.monotonic()
            # The answer says that it happened, not when: it must have happened before the next turn came.
            if self._alone or (answered - asked < self._gap / 4 and not self._is_next_taken(answered)):
                self._turn_at = asked
                return True
        if self._patient:
            return False
        # Handed back once more, the URL would starve. So the host gives no turn until the visit that may
        # have got the next one has left. Then, a gap before all others, this one leaves. The other two gaps
        # are for slow answers.
        await self._postpone(4 * self._gap)
        await asyncio.sleep(2 * self._gap)
        self._turn_at = time.monotonic()
        return True

    def may_connect(self) -> bool:
        """Called before a connection is made or reused. Returns whether there is still time for it."""
        if self._gap and self._patient and self._is_next_taken(time.monotonic()):
            return self._miss()
        return self._holds()

    def has_room(self, size: int) -> bool:
        """Called before this many bytes are kept. Returns whether the visit has a slot of its worker for
        them; if not, it has asked for one."""
        return self._place is None or self._place.has_room(size)

    async def wait_for_slot(self) -> None:
        """The page has arrived: wait until the visit has a slot in which to work on it."""
        if self._place is not None:
            await self._place.wait_for_slot()

    def may_send(self) -> bool:
        """Called each time the request is about to leave: after a lost connection it may leave again."""
        if self._gap and self._sent and self._patient:
            return self._miss()  # the host may have seen it, and this turn was for one visit
        if not self._holds():
            return False
        now = time.monotonic()
        if self._gap:
            before, self.slow = self.slow, self._is_next_taken(now)
            if self.slow and self._patient and not before:
                return self._miss()
            # Where connecting always takes this long, the request leaves: connecting again would take as
            # long.
            if self._is_late(now):
                with suppress(RuntimeError):  # the loop is closed, and the worker with it
                    self._loop.call_soon_threadsafe(self._postpone_soon)
        self._sent, self._sent_at = True, now
        return True

    def _postpone_soon(self) -> None:
        self._task = self._loop.create_task(self._postpone_quietly())

    async def _postpone_quietly(self) -> None:
        with suppress(FrontierError):  # the next call to the frontier reports it
            await self._postpone(self._gap)

    def _is_late(self, now: float) -> bool:
        return now - self._turn_at > max(LEAST_LATE, LATE * self._gap)

    def _is_next_taken(self, now: float) -> bool:
        return not self._alone and now - self._turn_at >= self._gap * TAKEN

    def _miss(self) -> bool:
        self.missed = True
        return False
