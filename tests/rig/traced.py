"""A worker that writes down when each of its requests left, for storms.

    python -P tests/rig/traced.py worker --job storm …

The visited site's log tells that two visits came too close to each other. This tells why: when each was
claimed, and when it was let out. One line for each request in `trace-PID.jsonl` in the working directory;
a line is there before the request is.
"""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from shoal.engine import worker
from shoal.engine.context import JobContext
from shoal.engine.departure import Departure
from shoal.engine.slots import Place
from shoal.model import Lease


class Sent(Struct, frozen=True):
    """One request that was let out or held back. Times are CLOCK_MONOTONIC, the same for all processes."""

    agent: str
    """The user agent under which the worker visits."""
    address: str
    url: str
    token: int
    attempt: int
    claimed: float
    """When its turn began, at the earliest."""
    turn: float
    """The same, or when the next turn was put off."""
    at: float
    """When it was let out, or not."""
    went: bool

    def told(self) -> str:
        late = f", its turn moved by {self.turn - self.claimed:.3f}" if self.turn != self.claimed else ""
        return f"claimed {self.claimed:.3f}{late}, sent {self.at:.3f}, lease {self.token}"


class Traced(Departure):
    __slots__ = ("claimed", "file", "lease")

    file: int
    lease: Lease
    claimed: float

    def may_connect(self) -> bool:
        return super().may_connect() or self._write(went=False)

    def may_send(self) -> bool:
        return self._write(went=super().may_send())

    def _write(self, *, went: bool) -> bool:
        request = self.lease.request
        line = Sent(
            os.environ.get("SHOAL_USER_AGENT", ""),
            self.lease.lane.partition(":")[0],
            request.url,
            self.lease.token,
            request.attempt,
            self.claimed,
            self._turn_at,
            time.monotonic(),
            went,
        )
        os.write(self.file, msgspec.json.encode(line) + b"\n")
        return went


def trace() -> None:
    """From now on every worker of this process is traced."""
    file = os.open(f"trace-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    plain = worker.Worker._departure

    def departure(
        self: worker.Worker, lease: Lease, context: JobContext, claimed: float, place: Place
    ) -> Departure:
        made = plain(self, lease, context, claimed, place)
        assert isinstance(made, Traced)
        made.file, made.lease, made.claimed = file, lease, claimed
        return made

    setattr(worker, "Departure", Traced)  # noqa: B010  (for mypy they are constants)
    setattr(worker.Worker, "_departure", departure)  # noqa: B010


def traces(folder: Path) -> list[Sent]:
    """What all workers in a folder wrote; a line that a kill cut is left out."""
    return sorted(_lines(folder.glob("trace-*.jsonl")), key=lambda sent: sent.at)


def _lines(files: Iterable[Path]) -> Iterator[Sent]:
    for file in files:
        for line in file.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line, type=Sent)


if __name__ == "__main__":
    trace()
    runpy.run_module("shoal", run_name="__main__")
