"""Slots: the visits that a worker works on at a time, and those that wait beside them.

A slot stands for memory and processor time. A visit that waits for its host needs neither, so when all slots
are taken, one that waits for much longer than others take is set aside: its slot goes to somebody else. It
needs one again before it holds more bytes than it did, is decoded or scraped. So it is still `size` visits
that hold pages, and those aside hold what `HELD` says, however many hosts stall.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median_low

from shoal.model import LARGE

ASIDE = 16
MOST_ASIDE = 256
"""Visits that may be set aside: so many for each slot, and so many in all. If more hosts than that stall,
they keep their slots until their deadlines."""
HELD = 16 * 1024 * 1024
"""Bytes that those aside may hold in all, beyond the few that nobody counts."""
LONGER = 3.0
"""How many times as long as others a visit may wait before it is set aside,"""
SHORTEST = 0.1
LONGEST = 2.0
"""but not before the one number of seconds, and after the other in any case."""
FIRST = 1.0
"""Seconds that it may wait while nothing is known of others."""
SAMPLE = 32
"""How many answers tell what is usual. The median counts: some that are slow on purpose do not change it."""
STEP = 0.02
"""Seconds between two looks at who waits for too long, at least."""


class Place:
    """One visit's slot, or its place aside. `room` is for the fetcher's thread, all else for the loop."""

    __slots__ = ("_asked", "_granted", "_slots", "aside", "firm", "held", "large", "quiet", "since")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.aside = False
        self.firm = True
        """It works: it is not set aside."""
        self.large = False
        """Its page is large, or may become so."""
        self.held = 0
        """Bytes that there is room for."""
        self.since = self.quiet = 0.0
        """When it left, and from when on it is waited for."""
        self._asked = False
        self._granted: asyncio.Future[None] | None = None

    def wait(self) -> None:
        """The visit leaves for its host: from now on it holds nothing and waits."""
        self.since = self.quiet = time.monotonic()
        self.firm = self._asked = False
        self.held = 0

    def room(self, size: int) -> bool:
        """Whether the visit may hold so many bytes. If not, ask again: a slot is on its way."""
        # Said before it is looked at, and the other way round in `_set_aside`: one of the two sees the other.
        if size > LARGE and not self._slots.grow(self):
            return False
        before, self.held = self.held, max(self.held, size)
        if not self.aside:
            return True
        self.held = before
        if size <= before:
            return True
        if not self._asked:
            self._asked = True
            self._slots.call(self._want)
        return False

    async def back(self) -> None:
        """The page is there. Return with a slot, which the visit then keeps to its end."""
        self.firm = True
        if self.aside:
            self._granted = asyncio.get_running_loop().create_future()
            self._want()
            await self._granted

    def _want(self) -> None:
        self._slots.want(self)

    def grant(self) -> None:
        self.quiet = time.monotonic()
        self.aside = self._asked = False
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)


class Slots:
    def __init__(self, size: int, call: Callable[[Callable[[], None]], None]) -> None:
        """`call` has something called on the loop, from any thread."""
        self.call = call
        self._size = size
        self._taken: set[Place] = set()
        self._aside: set[Place] = set()
        self._wanting: deque[Place] = deque()
        """Those aside that want a slot back."""
        self._large = 0
        """How many have a large page: at most half of the slots, so that they do not stop the others."""
        self._mutex = threading.Lock()
        self._answers: deque[float] = deque((FIRST / LONGER,), SAMPLE)
        """Seconds that the last ones took, from departure to the end."""
        self._patience = FIRST
        self._next_look = 0.0

    def take(self, *, aside: bool) -> Place:
        """A place for a new visit, one that is set aside if its host stalled before."""
        place = Place(self)
        place.aside = aside and self._room_aside
        (self._aside if place.aside else self._taken).add(place)
        return place

    def leave(self, place: Place, *, well: bool) -> None:
        """The visit is over; its host answered if it went `well`."""
        if place.large:
            with self._mutex:
                self._large -= 1
        self._taken.discard(place)
        self._aside.discard(place)
        if self._wanting:
            self._serve()
        if well and place.since:
            # Who took longer than it had to be waited for counts as that long: one burst of slow answers
            # does not make everybody patient, a web that has become slow does.
            self._answers.append(min(time.monotonic() - place.since, self._patience))

    def grow(self, place: Place) -> bool:
        """Whether the page of this place may become large. For the fetcher's thread."""
        with self._mutex:
            if not place.large and self._large < max(2, self._size // 2):
                self._large += 1
                place.large = True
            return place.large

    def want(self, place: Place) -> None:
        if place in self._aside:
            self._wanting.append(place)
            self._serve()

    def free(self) -> int:
        """Slots for new visits. If there is none, those that wait for too long are set aside."""
        if self._full:
            now = time.monotonic()
            if now >= self._next_look:
                self._set_aside(now)
                self._serve()
        return max(0, self._size - len(self._taken))

    def pause(self) -> float:
        """Seconds after which somebody may have to be set aside."""
        if not self._full or not self._room_aside:
            return math.inf
        return max(0.0, self._next_look - time.monotonic())

    @property
    def _full(self) -> bool:
        return len(self._taken) >= self._size

    @property
    def _room_aside(self) -> bool:
        return len(self._aside) < min(ASIDE * self._size, MOST_ASIDE)

    def _set_aside(self, now: float) -> None:
        self._patience = patience = min(max(LONGER * median_low(self._answers), SHORTEST), LONGEST)
        self._next_look = now + patience
        left = HELD - sum(place.held for place in self._aside)
        for place in [place for place in self._taken if not place.firm]:
            if place.quiet + patience > now:
                self._next_look = min(self._next_look, max(place.quiet + patience, now + STEP))
                continue
            if not self._room_aside:
                return
            held = place.held
            if held > left:
                continue
            place.aside = True
            if place.held != held:
                place.aside = False  # more of its page arrives at this very moment
                continue
            left -= held
            self._taken.discard(place)
            self._aside.add(place)

    def _serve(self) -> None:
        while self._wanting and not self._full:
            place = self._wanting.popleft()
            if place in self._aside:
                self._aside.discard(place)
                self._taken.add(place)
                place.grant()
