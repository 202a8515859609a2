"""`Idempotency-Key`: a request that is sent twice is carried out once.

The job's id is derived from the key, so a crash between opening the job and responding does no harm: opening
the same job and adding the same URLs again changes nothing. The request's digest and the response are kept
for a day; a different request with the same key is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Annotated

import msgspec
from fastapi import Header

from shoal.api.problems import Problem
from shoal.api.tokens import Caller
from shoal.frontier.notes import Lock
from shoal.frontier.port import Notes

SHELF = "once"
KEPT = 86400.0
HELD = 60.0
PATIENCE = 10.0

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description=(
            "Any unique text. A request that is sent again with the same key within a day is not carried out"
            " again: the response is the first one."
        ),
    ),
]


class Kept(msgspec.Struct):
    asked: str
    answer: bytes | None = None


class Once:
    """One request with one key. `job` is the id that its job must have ("" for any)."""

    def __init__(self, notes: Notes, name: str, asked: str, kept: Kept | None) -> None:
        self._notes = notes
        self._name = name
        self._asked = asked
        self.answer = kept.answer if kept is not None else None
        self.job = f"key-{name}" if name else ""

    async def keep(self, answer: bytes) -> None:
        if self._name:
            kept = msgspec.json.encode(Kept(self._asked, answer))
            await self._notes.put(SHELF, self._name, kept, KEPT)


@asynccontextmanager
async def once(notes: Notes, caller: Caller, path: str, key: str | None, body: bytes) -> AsyncIterator[Once]:
    """Raises Problem: 422 if the key was used for a different request, 409 while the first request with this
    key is still running."""
    if key is None:
        yield Once(notes, "", "", None)
        return
    name = _digest(f"{caller.name}\0{path}\0{key}".encode())
    digest = _digest(_normalized(body))
    lock = Lock(notes, f"once {name}", secrets.token_hex(8), HELD)
    await _take(lock)
    try:
        note = await notes.get(SHELF, name)
        kept = msgspec.json.decode(note, type=Kept) if note is not None else None
        if kept is not None and kept.asked != digest:
            raise Problem(422, "this Idempotency-Key was used for a different request", hint="use a new key")
        if kept is None:
            await notes.put(SHELF, name, msgspec.json.encode(Kept(digest)), KEPT)
        yield Once(notes, name, digest, kept)
    finally:
        await lock.release()


async def _take(lock: Lock) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE
    while not await lock.take():
        if asyncio.get_running_loop().time() > end:
            raise Problem(
                409, "a request with this Idempotency-Key is still running", headers={"Retry-After": "5"}
            )
        await asyncio.sleep(0.05)


def _normalized(body: bytes) -> bytes:
    """The body without differences that do not count: white space and the order of keys."""
    try:
        return msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return body


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=12).hexdigest()
