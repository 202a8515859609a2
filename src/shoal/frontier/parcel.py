"""Parcels: a job on its way from one frontier to another, in pieces of bounded size.

`pack` makes them and `unpack` takes them, on any two backends. Durations travel, instants do not:
two frontiers have two clocks. Ids travel as they are and are shifted on arrival by a number that
was set aside for the job, so what stood before something else still does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shoal.errors import UsageError
from shoal.frontier.rules import microseconds
from shoal.model import Counts, DeadLetter, Item, JobSpec, Request

Part = Literal["head", "spread", "lanes", "delayed", "waiting", "letters", "items", "cursors", "keys"]

PARTS: tuple[Part, ...] = (
    "head",
    "spread",
    "lanes",
    # Before `waiting`: what comes due meanwhile moves there and is seen in one of both, or twice.
    "delayed",
    "waiting",
    # After what waits: what expires meanwhile moves here.
    "letters",
    "items",
    "cursors",
    # Last: a request whose key is known is not taken, that is how nothing arrives twice. But packed
    # first: the key of a URL that is added meanwhile must not arrive before its request.
    "keys",
)
"""The order in which a job must be unpacked."""

FOREVER = 10 * 365 * 24 * 3600.0
"""Seconds that a note lives which somebody will remove."""

_encode = msgspec.json.Encoder().encode


class Parcel(Struct, frozen=True, kw_only=True):
    """A piece of one part."""

    next: str | None = None
    """Where the following piece begins (opaque, of the backend that packed it); None: the end."""


class Head(Parcel, frozen=True, kw_only=True):
    """The job itself. Nothing of it may be leased."""

    spec: JobSpec
    counts: Counts
    errors: dict[str, int]
    age: float
    """Seconds since it was made."""
    ended: float | None
    """Seconds since it ended."""
    begun: float | None = None
    """Seconds since its first claim."""
    last: int
    """No id that travels is greater."""
    now: float
    """The packing frontier's time."""


class PackedLine(Struct, frozen=True):
    queue: str
    priority: int
    ahead: int
    """How far its virtual time is ahead of the lane's; below 0: what it has waited for its next turn."""


class PackedLane(Struct, frozen=True):
    """A host's pace as the frontier keeps it, and the job's lines there in their order."""

    name: str
    gap: float
    width: int
    burst: int
    floor: float
    pinned: bool
    paused: bool
    rest: float
    """Seconds until the visits that were made are paid for."""
    blocked: float
    lines: tuple[PackedLine, ...]


class Lanes(Parcel, frozen=True, kw_only=True):
    lanes: Sequence[PackedLane]


class Packed(Struct, frozen=True):
    """A request on its way; its `delay` and `ttl` are what is left of them."""

    id: int
    request: Request
    crashes: int = 0


class Requests(Parcel, frozen=True, kw_only=True):
    """`delayed` and `waiting`, in any order: their ids tell who stands before whom."""

    requests: Sequence[Packed]


class Letters(Parcel, frozen=True, kw_only=True):
    letters: Sequence[DeadLetter]
    now: float


class Items(Parcel, frozen=True, kw_only=True):
    items: Sequence[Item]


class Numbers(Parcel, frozen=True, kw_only=True):
    """`spread` (lane to requests that count against its budget) and `cursors` (sink to seq)."""

    part: Literal["spread", "cursors"]
    numbers: dict[str, int]


class Keys(Parcel, frozen=True, kw_only=True):
    keys: Sequence[bytes]


class Arrival(Struct, frozen=True):
    """What a frontier notes of a job that is arriving, under `arriving_key`."""

    base: int
    """Added to each id that arrives."""
    head: Head

    def late(self, letter: DeadLetter) -> bool:
        """Whether the letter ended after the head was packed, so that the head does not count it.
        Nothing but the end of a ttl can happen to a paused job."""
        return letter.state == "expired" and letter.ended_at > self.head.now


def arriving_key(job: str) -> str:
    return f"arriving {job}"


def arrival_note(base: int, head: Head) -> bytes:
    return struct.pack("<d", base) + head_note(head)


def head_note(head: Head) -> bytes:
    return _encode(head)


def arrival_of(note: bytes) -> Arrival:
    return Arrival(int(struct.unpack_from("<d", note)[0]), msgspec.json.decode(note[8:], type=Head))


def take_over(lane: Any, packed: PackedLane, *, shared: bool, now: int) -> None:
    """Give a lane the pace that it had elsewhere. What a person pinned here stays; where other jobs
    work, the slower of both holds. Doing it twice changes nothing.

    Any: lanes of several backends, which have the same fields.
    """
    if not lane.pinned:
        gap = microseconds(packed.gap)
        lane.gap = max(lane.gap, gap) if shared else gap
        lane.width = min(lane.width, packed.width) if shared else packed.width
        if not shared:
            lane.burst = packed.burst
            lane.pinned = type(lane.pinned)(packed.pinned)
    lane.floor = max(lane.floor, microseconds(packed.floor))
    lane.tat = max(lane.tat, now + microseconds(packed.rest)) if packed.rest > 0 else lane.tat
    if packed.blocked > 0:
        lane.blocked = max(lane.blocked, now + microseconds(packed.blocked))
    if packed.paused:
        lane.paused = type(lane.paused)(True)


def not_arriving(job: str) -> UsageError:
    return UsageError(
        f"there is a job {job!r} already, and it is not arriving from elsewhere",
        hint="move it to another frontier: another file, ?schema= or ?prefix=",
    )


def no_such_parcel(parcel: Parcel) -> UsageError:
    return UsageError(f"nobody knows what to do with a {type(parcel).__name__}", hint="upgrade shoal")
