"""Reads stored jobs, lanes, leases, letters and lines, page by page while others work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from shoal.errors import NoSuchJob
from shoal.frontier.redis import codec
from shoal.frontier.redis.client import Client, slices
from shoal.frontier.redis.names import Names
from shoal.frontier.redis.rows import Held, LaneRow, LetterRow, LineRow
from shoal.frontier.rules import microseconds
from shoal.model import DeadLetter, Job, Selection

PAGE = 500
"""Rows that one read fetches."""


class Reads:
    """Reads that several methods of the catalog share."""

    def __init__(self, client: Client, names: Names) -> None:
        self._client = client
        self._names = names

    async def job(self, name: str) -> tuple[int, Job]:
        """Return a job and its number. Raises NoSuchJob."""
        reply = await self._client.call("job", [name])
        if not reply:
            raise NoSuchJob(name)
        number, raw, spec, tally = reply
        self._names.learn(name, number)
        return number, codec.job_of(name, raw, spec, tally)

    async def lanes(self) -> AsyncIterator[LaneRow]:
        async for id, raw in self.scan("lanes"):
            yield LaneRow(id, raw)

    async def lane(self, name: str) -> LaneRow | None:
        client = self._client
        id = await client.command("HGET", client.key("laneids"), name)
        if id is None:
            return None
        return LaneRow(id, await client.command("HGET", client.key("lanes"), id))

    async def held(self) -> AsyncIterator[Held]:
        async for token, blob in self.scan("lease"):
            yield Held(int(token), blob)

    async def newest_held(self, fits: Callable[[Held], bool], limit: int) -> list[Held] | None:
        """Return some of the newest leases that fit: those that end last. None if these are too few, or if
        there are so few leases that reading all of them is as fast."""
        client = self._client
        if await client.command("HLEN", client.key("lease")) <= 2 * PAGE:
            return None
        found: list[Held] = []
        for stream in await client.command("HKEYS", client.key("streams")):
            tokens = await client.command("ZRANGE", client.key("ends", int(stream)), 0, PAGE - 1, "REV")
            if tokens:
                blobs = await client.command("HMGET", client.key("lease"), *tokens)
                here = [Held(int(t), blob) for t, blob in zip(tokens, blobs, strict=True) if blob is not None]
                found += filter(fits, here)
        return sorted(found, key=lambda held: -held.token)[:limit] if len(found) >= limit else None

    async def scan(self, name: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """Yield the fields of a hash, page by page. A field that exists all the time comes exactly once."""
        seen: set[bytes] = set()
        at: Any = 0
        while True:
            at, flat = await self._client.command("HSCAN", self._client.key(name), at, "COUNT", PAGE)
            for place in range(0, len(flat), 2):
                if flat[place] not in seen:
                    seen.add(flat[place])
                    yield flat[place], flat[place + 1]
            if int(at) == 0:
                return

    async def letters(self, which: Selection, after: int = 0) -> AsyncIterator[DeadLetter]:
        """Yield dead letters in the order of their ids, page by page."""
        client = self._client
        ids: Iterable[int] | None = which.ids
        if ids is None and which.since is not None:
            begin = b"(%d" % microseconds(which.since)
            ids = map(int, await client.command("ZRANGE", client.key("deadat"), begin, "+inf", "BYSCORE"))
        if ids is not None:
            chosen = sorted(id for id in set(ids) if id > after)
            for some in slices(chosen, PAGE):
                for letter in await self._letters_of(some):
                    if _matches(letter, which):
                        yield letter
            return
        while True:
            page = await client.command(
                "ZRANGE", client.key("deadids"), b"(%d" % after, "+inf", "BYSCORE", "LIMIT", 0, PAGE
            )
            if not page:
                return
            for letter in await self._letters_of([int(id) for id in page]):
                if _matches(letter, which):
                    yield letter
            after = int(page[-1])

    async def entries(self, line: LineRow) -> AsyncIterator[bytes]:
        """Yield the entries of a line in order, as they are at each read."""
        client = self._client
        front = await client.command("ZRANGE", client.key("front", line.id), 0, -1)
        at = 0
        while some := await client.command("LRANGE", client.key("line", line.id), at, at + PAGE - 1):
            for entry in some:
                while front and codec.id_of(front[0]) < codec.id_of(entry):
                    yield front.pop(0)
                yield entry
            at += PAGE
        for entry in front:
            yield entry

    async def _letters_of(self, ids: Sequence[int]) -> list[DeadLetter]:
        raws = await self._client.command("HMGET", self._client.key("dead"), *ids)
        rows = [LetterRow(id, raw) for id, raw in zip(ids, raws, strict=True) if raw is not None]
        jobs = await self._names.jobs({row.job for row in rows})
        queues = await self._names.queues({row.stream for row in rows})
        return [row.view(jobs[row.job], queues[row.stream]) for row in rows]


def _matches(letter: DeadLetter, which: Selection) -> bool:
    return (
        (which.job is None or letter.request.job == which.job)
        and (which.lane is None or letter.lane == which.lane)
        and (which.error is None or letter.failure.error == which.error)
        and (which.since is None or letter.ended_at > which.since)
    )
