"""Notes on why a visit left nothing, for a batch, which reports about each URL.

A frontier only counts such visits. For a job that records its workers, the reason is noted before the verdict
is settled: when the job has ended, every reason is there.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from shoal.frontier.port import Notes
from shoal.model import Done

SHELF = "skips"

KEPT = 2 * 86400.0
"""Seconds. A batch can be read again for a day."""


class Skip(msgspec.Struct, frozen=True, omit_defaults=True):
    """`why` is the verdict's reason, `to` the target of a redirect, `worker` the worker that made the
    visit."""

    why: str
    to: str = ""
    worker: str = ""


async def note_skip(notes: Notes, worker: str, verdict: Done) -> None:
    request = verdict.lease.request
    skip = Skip(verdict.skipped, verdict.found[0].url if verdict.found else "", worker)
    await notes.put(SHELF, _name(request.job, request.url), msgspec.json.encode(skip), KEPT)


async def skip_of(notes: Notes, job: str, url: str) -> Skip | None:
    """Returns why the visit of a URL left nothing; None if it left something, or there is no note."""
    kept = await notes.get(SHELF, _name(job, url))
    return msgspec.json.decode(kept, type=Skip) if kept is not None else None


def _name(job: str, url: str) -> str:
    # Hashed: a URL may be longer than an index takes.
    return f"{job} {blake2b(url.encode(), digest_size=16).hexdigest()}"
