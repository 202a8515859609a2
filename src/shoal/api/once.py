"""`Idempotency-Key`: the same request sent twice is done once.

The key decides the job's id, so that even a crash between making the job and answering leaves nothing to
do twice: opening a job and adding URLs change nothing the second time. What was asked and answered is noted
for a day; another request under the same key is refused.
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
from shoal.frontier.port import Backend

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
        description="Sent again with the same request within a day, the first answer is given again.",
    ),
]


class Note(msgspec.Struct):
    asked: str
    answer: bytes | None = None


class Once:
    """One request under one key. `job` is the id its job must have ("" for any)."""

    def __init__(self, frontier: Backend, name: str, asked: str, noted: Note | None) -> None:
        self._frontier = frontier
        self._name = name
        self._asked = asked
        self.answer = noted.answer if noted is not None else None
        self.job = f"key-{name}" if name else ""

    async def keep(self, answer: bytes) -> None:
        if self._name:
            note = msgspec.json.encode(Note(self._asked, answer))
            await self._frontier.note(f"once:{self._name}", note, KEPT)


@asynccontextmanager
async def once(
    frontier: Backend, caller: Caller, path: str, key: str | None, asked: bytes
) -> AsyncIterator[Once]:
    """Raises Problem: 422 when the key was used for another request, 409 while that one is running."""
    if key is None:
        yield Once(frontier, "", "", None)
        return
    name = _digest(f"{caller.name}\0{path}\0{key}".encode())
    digest = _digest(_plain(asked))
    lock, owner = f"once {name}", secrets.token_hex(8)
    await _take(frontier, lock, owner)
    try:
        kept = await frontier.noted(f"once:{name}")
        noted = msgspec.json.decode(kept, type=Note) if kept is not None else None
        if noted is not None and noted.asked != digest:
            raise Problem(422, "this Idempotency-Key was used for another request", hint="use a new key")
        if noted is None:
            await frontier.note(f"once:{name}", msgspec.json.encode(Note(digest)), KEPT)
        yield Once(frontier, name, digest, noted)
    finally:
        await frontier.unlock(lock, owner)


async def _take(frontier: Backend, lock: str, owner: str) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE
    while await frontier.lock(lock, owner, HELD) != owner:
        if asyncio.get_running_loop().time() > end:
            raise Problem(
                409, "a request with this Idempotency-Key is being worked on", headers={"Retry-After": "5"}
            )
        await asyncio.sleep(0.05)


def _plain(asked: bytes) -> bytes:
    """The request as it was understood: neither blanks nor the order of keys make it another."""
    try:
        return msgspec.json.encode(msgspec.json.decode(asked), order="sorted")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return asked


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=12).hexdigest()
