"""Decodes letters, lanes, lines and leases as the scripts store them."""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from shoal.frontier.redis.codec import request_of
from shoal.frontier.rules import US
from shoal.model import DeadLetter, Failure, Lane

_LEASE = struct.Struct("<4sdddBH")

_unpack = msgspec.msgpack.decode


class LetterRow:
    """A dead letter as the scripts store it (`end_entry` in `prelude.lua`)."""

    __slots__ = ("_entry", "at", "failure", "id", "job", "lane", "priority", "state", "stream")

    def __init__(self, id: int, raw: bytes) -> None:
        size = int.from_bytes(raw[:2], "little")
        row = _unpack(raw[2 : 2 + size])
        self.id = id
        self.state: Literal["dead", "expired"] = row[0]
        self.at: int = row[1]
        self.job: int = row[2]
        self.stream: int = row[3]
        self.priority: int = row[4]
        self.lane: str = row[5]
        self.failure = Failure(*row[6:])  # with the worker, if one held the lease
        self._entry = raw[2 + size :]

    def view(self, job: str, queue: str) -> DeadLetter:
        request = request_of(self._entry, job, queue, self.priority)
        if request.ttl is not None:
            # Once revived, it may wait as long as it needs.
            request = msgspec.structs.replace(request, ttl=None)
        return DeadLetter(self.id, request, self.lane, self.failure, self.at / US, self.state)


class LineRow(msgspec.Struct, array_like=True):
    """A line of a lane."""

    id: int
    job: int
    stream: int
    priority: int
    vt: int
    off: bool
    tail: int
    front: int

    @property
    def waiting(self) -> int:
        return self.tail + self.front


class LaneRow:
    """A lane as the scripts store it (`lane_bytes`)."""

    def __init__(self, id: bytes, raw: bytes) -> None:
        row = _unpack(raw)
        self.id = id
        self.name: str = row[0]
        self.gap: int = row[1]
        self.width: int = row[2]
        self.burst: int = row[3]
        self.floor: int = row[4]
        self.tat: int = row[5]
        self.blocked: int = row[6]
        self.busy: int = row[7]
        self.vt: int = row[8]
        self.pinned: bool = row[9]
        self.paused: bool = row[10]
        self.at: int | None = None if row[11] is False else row[11]
        self.lines = [LineRow(*row[place : place + 8]) for place in range(12, len(row), 8)]

    @property
    def pace_gap(self) -> int:
        return self.gap if self.pinned else max(self.gap, self.floor)

    @property
    def ready(self) -> int:
        return max(self.tat - self.burst * self.pace_gap, self.blocked)

    def view(self) -> Lane:
        return Lane(
            self.name,
            self.pace_gap / US,
            self.width,
            self.burst,
            self.floor / US,
            self.pinned,
            self.paused,
            self.busy,
            sum(line.waiting for line in self.lines),
            None if self.at is None else max(self.at, self.ready) / US,
            self.blocked / US,
        )


class Held:
    """A lease as the scripts store it (`lease_parts`)."""

    __slots__ = ("entry", "job", "lane", "line", "priority", "stream", "token", "worker")

    def __init__(self, token: int, blob: bytes) -> None:
        lane, line, stream, job, priority, length = _LEASE.unpack_from(blob)
        end = _LEASE.size + length
        self.token = token
        self.lane: bytes = lane
        self.line = int(line)
        self.stream = int(stream)
        self.job = int(job)
        self.priority: int = priority
        self.worker = blob[_LEASE.size : end].decode()
        self.entry = blob[end:]
