"""Slots: the visits that a worker works on at a time, and the visits that wait beside them.

A slot stands for memory and processor time. A visit that waits for its host needs neither. So when all slots
are taken, a visit that has waited for much longer than others do is set aside, and its slot goes to another.
It needs a slot again before it holds more bytes than it did, is decoded or is scraped. So at most `size`
visits hold pages, and those aside hold at most `HELD` bytes together, however many hosts stall.
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
"""Visits that may be set aside: `ASIDE` for each slot, `MOST_ASIDE` in all. If more hosts than that stall,
their visits keep their slots until their deadlines."""
HELD = 16 * 1024 * 1024
"""Bytes that the visits aside may hold in all, beyond the first few of each, which are not counted."""
LONGER = 3.0
"""How many times as long as others a visit may wait before it is set aside:"""
SHORTEST = 0.1
LONGEST = 2.0
"""never before `SHORTEST` seconds, always after `LONGEST` seconds."""
FIRST = 1.0
"""Seconds that it may wait while nothing is known of others."""
SAMPLE = 32
"""How many answers define what is usual. Their median counts: a few hosts that are slow on purpose do not
change it."""
STEP = 0.02
"""Seconds between two looks for visits that wait too long, at least."""


class Place:
    """The slot of one visit, or its place aside. `has_room` runs on the fetcher's thread, all else on the
    loop."""

    __slots__ = (
        "_asked",
        "_granted",
        "_slots",
        "aside",
        "held",
        "is_working",
        "large",
        "left_at",
        "waits_since",
    )

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.aside = False
        self.is_working = True
        """The visit does not wait for its host, so it is not set aside."""
        self.large = False
        """Its page is large, or may become so."""
        self.held = 0
        """Bytes that it has room for."""
        self.left_at = self.waits_since = 0.0
        """When the visit left for its host, and since when it has waited for it."""
        self._asked = False
        self._granted: asyncio.Future[None] | None = None

    def start_waiting(self) -> None:
        """The visit leaves for its host: from now on it holds nothing and waits."""
        self.left_at = self.waits_since = time.monotonic()
        self.is_working = self._asked = False
        self.held = 0

    def has_room(self, size: int) -> bool:
        """Returns whether the visit may hold this many bytes. If not, it has asked for a slot: call again."""
        # `held` is written before `aside` is read, and `_set_aside` does the reverse: one of the two notices
        # the other.
        if size > LARGE and not self._slots.admit_large(self):
            return False
        before, self.held = self.held, max(self.held, size)
        if not self.aside:
            return True
        self.held = before
        if size <= before:
            return True
        if not self._asked:
            self._asked = True
            self._slots.call_on_loop(self._ask_for_slot)
        return False

    async def wait_for_slot(self) -> None:
        """The page has arrived. Returns when the visit has a slot, which it then keeps to its end."""
        self.is_working = True
        if self.aside:
            self._granted = asyncio.get_running_loop().create_future()
            self._ask_for_slot()
            await self._granted

    def _ask_for_slot(self) -> None:
        self._slots.ask_back(self)

    def grant(self) -> None:
        self.waits_since = time.monotonic()
        self.aside = self._asked = False
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)


class Slots:
    def __init__(self, size: int, call_on_loop: Callable[[Callable[[], None]], None]) -> None:
        """`call_on_loop` schedules a function on the loop, from any thread."""
        self.call_on_loop = call_on_loop
        self._size = size
        self._taken: set[Place] = set()
        self._aside: set[Place] = set()
        self._asking: deque[Place] = deque()
        """Those aside that need a slot again."""
        self._large = 0
        """How many have a large page: at most half of the slots, so that they do not stop the others."""
        self._mutex = threading.Lock()
        self._answers: deque[float] = deque((FIRST / LONGER,), SAMPLE)
        """Seconds that the last visits took, from their departure to their end."""
        self._patience = FIRST
        self._next_look = 0.0

    def take(self, *, aside: bool) -> Place:
        """A place for a new visit: aside if its host stalled before and there is room."""
        place = Place(self)
        place.aside = aside and self._has_room_aside
        (self._aside if place.aside else self._taken).add(place)
        return place

    def leave(self, place: Place, *, answered: bool) -> None:
        """The visit is over; `answered` says whether its host answered."""
        if place.large:
            with self._mutex:
                self._large -= 1
        self._taken.discard(place)
        self._aside.discard(place)
        if self._asking:
            self._grant_slots()
        if answered and place.left_at:
            # A wait that is longer than the patience counts as the patience: one burst of slow answers does
            # not raise the patience, a web that has become slow does.
            self._answers.append(min(time.monotonic() - place.left_at, self._patience))

    def admit_large(self, place: Place) -> bool:
        """Returns whether the page of this place may be large. Called on the fetcher's thread."""
        with self._mutex:
            if not place.large and self._large < max(2, self._size // 2):
                self._large += 1
                place.large = True
            return place.large

    def ask_back(self, place: Place) -> None:
        """Ask for a slot for a visit that is aside."""
        if place in self._aside:
            self._asking.append(place)
            self._grant_slots()

    def free_up(self) -> int:
        """Returns how many new visits have a slot. If none has, visits that waited too long are set aside
        first."""
        if self._is_full:
            now = time.monotonic()
            if now >= self._next_look:
                self._set_aside(now)
                self._grant_slots()
        return max(0, self._size - len(self._taken))

    def pause(self) -> float:
        """Seconds after which a visit may have to be set aside."""
        if not self._is_full or not self._has_room_aside:
            return math.inf
        return max(0.0, self._next_look - time.monotonic())

    @property
    def _is_full(self) -> bool:
        return len(self._taken) >= self._size

    @property
    def _has_room_aside(self) -> bool:
        return len(self._aside) < min(ASIDE * self._size, MOST_ASIDE)

    def _set_aside(self, now: float) -> None:
        self._patience = patience = min(max(LONGER * median_low(self._answers), SHORTEST), LONGEST)
        self._next_look = now + patience
        left = HELD - sum(place.held for place in self._aside)
        for place in [place for place in self._taken if not place.is_working]:
            if place.waits_since + patience > now:
                self._next_look = min(self._next_look, max(place.waits_since + patience, now + STEP))
                continue
            if not self._has_room_aside:
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

    def _grant_slots(self) -> None:
        while self._asking and not self._is_full:
            place = self._asking.popleft()
            if place in self._aside:
                self._aside.discard(place)
                self._taken.add(place)
                place.grant()
