"""Why a visit left nothing, for those who ask about each URL: a batch.

A frontier counts such visits and no more. For a job whose items are signed the reason is noted beside
it, before the verdict: when the job has ended, every reason is there.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from shoal.frontier.port import Notes
from shoal.model import Done

SHELF = "skips"

KEPT = 2 * 86400.0
"""Seconds. An answer can be asked for again for a day."""


class Skip(msgspec.Struct, frozen=True, omit_defaults=True):
    """`why` is the word of the verdict; `to` is where a redirect led; `worker` made the visit."""

    why: str
    to: str = ""
    worker: str = ""


async def note_skip(notes: Notes, worker: str, verdict: Done) -> None:
    request = verdict.lease.request
    skip = Skip(verdict.skipped, verdict.found[0].url if verdict.found else "", worker)
    await notes.put(SHELF, _name(request.job, request.url), msgspec.json.encode(skip), KEPT)


async def skip_of(notes: Notes, job: str, url: str) -> Skip | None:
    """Why the visit of a URL left nothing. None when it did not, or nobody noted it."""
    kept = await notes.get(SHELF, _name(job, url))
    return msgspec.json.decode(kept, type=Skip) if kept is not None else None


def _name(job: str, url: str) -> str:
    # Hashed: a URL may be longer than an index takes.
    return f"{job} {blake2b(url.encode(), digest_size=16).hexdigest()}"
