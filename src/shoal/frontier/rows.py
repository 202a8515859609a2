"""Rows of the SQL frontiers: lanes, jobs and lines, and requests as columns."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal import urls
from shoal.frontier.rules import BONUS, US, Paced, microseconds
from shoal.model import JobSpec, Request

CRASH = 1 << 16
"""`attempt` columns hold failed visits in the low 16 bits and crashes above them."""


LANE = (
    "l.id, l.gap, l.width, l.burst, l.floor, l.pinned, l.paused, l.tat, l.blocked, l.busy, l.vt, "
    "l.at, l.streams, l.sole"
)


_pack = msgspec.msgpack.Encoder().encode


_unpack = msgspec.msgpack.decode


spec_bytes = msgspec.json.Encoder().encode


def extra_of(request: Request, expires: int | None = None) -> bytes | None:
    """Return the fields of a request that have no column of their own; None for a plain GET.

    `expires`, the end of its ttl, is among them: a lease has no column for it, and returns it with the
    request."""
    if not (
        request.label
        or request.data
        or request.headers
        or request.origin
        or request.body
        or request.ttl is not None
        or request.method != "GET"
        or request.starts
    ):
        return None
    return _pack(
        (
            request.label,
            request.method,
            request.headers,
            request.body,
            request.data,
            request.origin,
            request.hops,
            request.ttl,
            expires,
            request.trail,
            request.starts,
        )
    )


def request_of(
    url: str, job: str, queue: str, priority: int, depth: int, attempt: int, extra: bytes | None
) -> Request:
    attempt %= CRASH
    if extra is None:
        return Request(url, job, "", queue, priority, depth, attempt)
    label, method, headers, body, data, origin, hops, ttl, _, trail, starts = _unpack(extra)
    return Request(
        *(url, job, label, queue, priority, depth, attempt, 0.0, ttl),
        *(method, headers, body, data, origin, hops, trail, tuple(starts)),
    )


def expires_of(attempt: int, extra: bytes | None) -> int | None:
    """Return when the ttl of a request ends that comes back from a lease; None after a failed visit or a
    crash, because only the first attempt has a deadline."""
    if attempt or extra is None:
        return None
    expires: int | None = _unpack(extra)[8]
    return expires


def expires_at(attempt: int, extra: bytes | None) -> float | None:
    """Return the same in seconds, as `Lease.request_expires_at`."""
    expires = expires_of(attempt, extra)
    return None if expires is None else expires / US


def spec_of(raw: bytes | str) -> JobSpec:
    return msgspec.json.decode(raw, type=JobSpec)


def pack_streams(streams: tuple[int, ...]) -> int | str:
    if len(streams) == 1:
        return streams[0]
    return ",".join(map(str, streams)) or 0


class LaneRow(Paced):
    """A lane inside one transaction: read once, changed in memory, written back once."""

    __slots__ = (
        "at",
        "busy",
        "id",
        "old_at",
        "old_streams",
        "sole",
        "streams",
        "vt",
    )

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.id: int = row[0]
        self.gap = row[1]
        self.width = row[2]
        self.burst = row[3]
        self.floor = row[4]
        self.pinned = row[5]
        self.paused = row[6]
        self.tat = row[7]
        self.blocked = row[8]
        self.busy: int = row[9]
        self.vt: int = row[10]
        self.at: int | None = row[11]
        raw: int | str = row[12]
        self.streams: tuple[int, ...]
        if isinstance(raw, int):
            self.streams = (raw,) if raw else ()
        else:  # PostgreSQL stores text
            self.streams = tuple(map(int, raw.split(","))) if raw != "0" else ()
        self.sole: int | None = row[13]
        self.old_at = self.at
        self.old_streams = self.streams

    def place(self, now: int, priority: int) -> None:
        """Compute the lane's place in the turns. Call it after any change."""
        if not self.streams or self.busy >= self.width or self.paused:
            self.at = None
            return
        at = self.tat - self.burst * self.pace_gap if self.burst else self.tat
        at = max(at, self.blocked)
        if at <= now:
            at = now - BONUS[priority]
            if self.at is not None and self.at < at:
                at = self.at  # it has a place already, and keeps it
        self.at = at


class JobRow:
    """A job inside one transaction: its row as read, and the changes of its counters."""

    __slots__ = ("_live", "delta", "gap", "id", "name", "spec", "start", "state", "used", "width")

    def __init__(self, id: int, name: str, spec: JobSpec, state: str, used: int, live: int) -> None:
        self.id = id
        self.name = name
        self.spec = spec
        self.state = state
        self.used = used
        """Requests that count against the page budget."""
        self._live = live
        self.gap = microseconds(spec.gap)
        self.width = spec.width
        self.start: frozenset[str] | None = None
        self.delta: dict[str, int] = {}

    def count(self, name: str, by: int = 1) -> None:
        self.delta[name] = self.delta.get(name, 0) + by

    @property
    def live(self) -> int:
        moved = self.delta.get
        ended = moved("done", 0) + moved("dead", 0) + moved("expired", 0) + moved("cancelled", 0)
        return self._live + moved("added", 0) - ended

    def is_start_lane(self, lane: str) -> bool:
        if self.start is None:
            self.start = frozenset(urls.lane_of(url) for url in self.spec.start)
        return lane in self.start


class Line:
    """The part of a line that never changes; safe to keep between transactions."""

    __slots__ = ("id", "job", "lane", "priority", "stream")

    def __init__(self, id: int, lane: int, stream: int, job: int, priority: int) -> None:
        self.id = id
        self.lane = lane
        self.stream = stream
        self.job = job
        self.priority = priority
