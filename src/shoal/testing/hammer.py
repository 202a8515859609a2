"""A minimal worker for the chapter with several processes: it claims, waits, settles, and logs what it did.

    python -m shoal.testing.hammer sqlite:///path/to/frontier.db worker.log

It ends when the frontier is drained. The log is evidence that is independent of the frontier. Each JSON line
is written before the step after it, so the log of a killed worker is complete.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from shoal.frontier.port import Frontier
from shoal.model import Claim, Done, Lease, Request

HOLD = 0.04
"""Seconds that a visit takes: long enough for the logs to show two at once."""
LEASE = 2.0


class Claimed(msgspec.Struct, frozen=True, tag=True):
    token: int
    lane: str
    url: str
    now: float
    """When it was claimed, by the frontier's clock."""
    until: float


class Settled(msgspec.Struct, frozen=True, tag=True):
    token: int
    at: float
    """When the worker started to settle."""
    lost: bool


Line = Claimed | Settled


def links_of(url: str) -> list[str]:
    """Return the links of a page of an imaginary site. A start page links to two pages, which other start
    pages link to as well; these have no links."""
    host, _, name = url.rpartition("/")
    return [f"{host}/deep-{int(name) // 2}", f"{host}/deep-{int(name) // 2 + 1}"] if name.isdigit() else []


async def hammer(frontier: Frontier, worker: str, log: BinaryIO) -> None:
    while True:
        claim: Claim = await frontier.claim(4, worker=worker, lease_seconds=LEASE)
        if claim.drained:
            return
        for lease in claim.leases:
            note(log, Claimed(lease.token, lease.lane, lease.request.url, claim.now, lease.expires_at))
        if claim.leases:
            await visit(frontier, claim.leases, log)
        else:
            # Other workers may settle before the announced time; a quarter of a second is soon enough here.
            await frontier.wait(min(claim.retry_in, 0.25))


async def visit(frontier: Frontier, leases: Sequence[Lease], log: BinaryIO) -> None:
    await asyncio.sleep(HOLD)
    at = time.time()
    done = [Done(lease, items=[lease.request.url.encode()], found=found_by(lease)) for lease in leases]
    lost = {lease.token for lease in (await frontier.settle(done)).lost}
    for lease in leases:
        note(log, Settled(lease.token, at, lease.token in lost))


def found_by(lease: Lease) -> list[Request]:
    return [Request(url=url, job=lease.request.job) for url in links_of(lease.request.url)]


def note(log: BinaryIO, line: Line) -> None:
    log.write(msgspec.json.encode(line) + b"\n")


async def main(url: str, log: str) -> None:
    from shoal.registry import open_frontier

    frontier = await open_frontier(url)
    # Unbuffered: a line reaches the kernel in one piece, and SIGKILL cannot undo that.
    with Path(log).open("ab", buffering=0) as file:  # noqa: ASYNC230
        await hammer(frontier, f"hammer-{os.getpid()}", file)
    await frontier.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
