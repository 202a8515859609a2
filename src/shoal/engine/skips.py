"""Why a visit left nothing, for those who ask about each URL: a batch.

A frontier counts such visits and no more. For a job whose items are signed the reason is noted beside
it, before the verdict: when the job has ended, every reason is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import blake2b

import msgspec

from shoal.model import Done

KEPT = 2 * 86400.0
"""Seconds. An answer can be asked for again for a day."""

Note = Callable[[str, bytes, float], Awaitable[None]]
Noted = Callable[[str], Awaitable[bytes | None]]


class Skip(msgspec.Struct, frozen=True, omit_defaults=True):
    """`why` is the word of the verdict; `to` is where a redirect led; `worker` made the visit."""

    why: str
    to: str = ""
    worker: str = ""


async def note_skip(note: Note, worker: str, verdict: Done) -> None:
    request = verdict.lease.request
    skip = Skip(verdict.skipped, verdict.found[0].url if verdict.found else "", worker)
    await note(_key(request.job, request.url), msgspec.json.encode(skip), KEPT)


async def skip_of(noted: Noted, job: str, url: str) -> Skip | None:
    """Why the visit of a URL left nothing. None when it did not, or nobody noted it."""
    kept = await noted(_key(job, url))
    return msgspec.json.decode(kept, type=Skip) if kept is not None else None


def _key(job: str, url: str) -> str:
    # Hashed: a URL may be longer than an index takes.
    return f"skipped {job} {blake2b(url.encode(), digest_size=16).hexdigest()}"
