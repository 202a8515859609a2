"""The `Frontier` port: add, claim, settle, take, extend, pace and wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from shoal import clock as clocks
from shoal.errors import UsageError
from shoal.frontier.redis import codec
from shoal.frontier.redis.catalog import Catalog
from shoal.frontier.redis.client import LAYOUT, LEASES_PER_CALL, WINDOW, Client, slices
from shoal.frontier.rules import US, microseconds
from shoal.model import Added, Claim, Done, Lease, Pace, Request, Settlement, Verdict
from shoal.queues import validate

ADDS_PER_CALL = 100
FOUND_PER_CALL = 150
"""Links in one settle call. A single page may have more: a verdict is never split."""


class RedisFrontier(Catalog):
    """A `Backend` on a Redis server. Make it with `open`."""

    def __init__(self, client: Client, version: int) -> None:
        super().__init__(client)
        self._version = version
        """How many jobs had ended at the last claim."""
        self._asked: tuple[list[str] | bool, int | bool] = (False, False)
        """The queues and the job of the last claim, for which `wait` waits."""

    @classmethod
    async def open(cls, url: str, *, clock: clocks.Clock | None = None) -> RedisFrontier:
        """Connect to a server. Raises a FrontierError that names the problem.

        Time is the server's. Only tests give a `clock`, and then the same one to every handle.
        """
        client = Client(url, clock)
        try:
            version = await client.greet()
        except BaseException:
            await client.close()
            raise
        return cls(client, version)

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        for request in requests:
            validate(request)
        if not requests:
            return []
        numbers = await self._names.numbers({request.job for request in requests})

        def calls() -> Iterator[bytes]:
            for some in slices(requests, ADDS_PER_CALL):
                rows, more = codec.add_args(some, numbers)
                yield self._client.pack("add", [rows], *more)

        return [codec.ADDED[digit] for answer in await self._client.ask(calls()) for digit in answer]

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        names: list[str] | bool = sorted(queues) if queues is not None else False
        number: int | bool = await self._names.number(job) if job is not None else False
        self._asked = (names, number)
        lasting = microseconds(lease_seconds)
        leases: list[Lease] = []
        suspects, at_once = 0, 1
        answer: Any = None
        while answer is None or len(leases) < limit:
            left = limit - len(leases)
            sizes = [
                min(LEASES_PER_CALL, left - sent * LEASES_PER_CALL)
                for sent in range(at_once)
                if left > sent * LEASES_PER_CALL or sent == 0
            ]
            calls = []
            for size in sizes:
                left -= size
                values = [size, lasting, worker, names, number, left > 0, suspects]
                calls.append(self._client.pack("claim", values))
            got = 0
            for reply in await self._client.ask(calls):
                if reply[1] == -4:
                    raise UsageError(
                        f"job {job!r} is not dedicated: a worker cannot claim from it alone",
                        hint="serve its queue with `shoal worker --queues`",
                    )
                if reply[1] == -3:
                    suspects = reply[3]
                    got = -1
                    continue
                if answer is None:
                    answer = reply
                    self._version = reply[4]
                some = await self._leases_of(reply, lasting)
                leases += some
                got += len(some)
            if got < 0:
                continue  # so many requests came due that upkeep takes several calls
            if got < sum(sizes):
                break
            at_once = WINDOW // 2
        now = answer[0] / US
        if leases:
            return Claim(leases, now, now)
        return Claim((), codec.moment_of(answer[1]), now)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        if not verdicts:
            return Settlement([], [])
        await self._names.numbers({link.job for v in verdicts if isinstance(v, Done) for link in v.found})
        # A late verdict may name a job that this frontier never had.
        numbers = await self._names.numbers({v.lease.request.job for v in verdicts}, must=False)
        chunks = list(_verdict_chunks(verdicts))

        def calls() -> Iterator[bytes]:
            for chunk in chunks:
                values, more = codec.settle_args(chunk, numbers)
                yield self._client.pack("settle", values, *more)

        lost: list[Lease] = []
        refused: list[str] = []
        for chunk, (gone, away) in zip(chunks, await self._client.ask(calls()), strict=True):
            lost += [chunk[place - 1].lease for place in gone]
            if away:
                links = [request for v in chunk if isinstance(v, Done) for request in v.found]
                refused += [links[place - 1].url for place in away]
        return Settlement(lost, refused)

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        lasting = microseconds(lease_seconds)
        chunks = list(slices(leases, ADDS_PER_CALL))
        calls = [self._client.pack("take", [lasting, worker, _tokens(some)]) for some in chunks]
        taken: list[Lease] = []
        now = 0.0
        for some, (moment, ours) in zip(chunks, await self._client.ask(calls), strict=True):
            now = moment / US
            until = (moment + lasting) / US
            taken += [msgspec.structs.replace(some[place - 1], expires_at=until) for place in ours]
        return Claim(taken, now, now)

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        chunks = list(slices(leases, ADDS_PER_CALL))
        calls = [self._client.pack("extend", [microseconds(seconds), _tokens(some)]) for some in chunks]
        lost: list[Lease] = []
        for some, gone in zip(chunks, await self._client.ask(calls), strict=True):
            lost += [some[place - 1] for place in gone]
        return lost

    async def pace(self, lane: str, pace: Pace) -> None:
        fields: dict[str, int | bool] = {}
        for name in ("gap", "floor", "blocked"):
            if (value := getattr(pace, name)) is not None:
                fields[name] = microseconds(value)
        for name in ("width", "burst", "pinned", "paused"):
            if (value := getattr(pace, name)) is not None:
                fields[name] = value
        await self._client.call("pace", [lane, fields])

    async def wait(self, seconds: float) -> None:
        """Wait until a script publishes that work is due earlier than the last claim reported."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        listener = self._client.listener
        listener.start()
        while (left := end - loop.time()) > 0:
            bell = listener.bell
            # The script finds all work that came before; the bell announces all that comes later. No gap.
            now, at, version = await self._client.call(
                "wait", [*self._asked, microseconds(min(left, 1e6)), self._version]
            )
            if version != self._version or 0 <= at <= now:
                return
            poll = listener.poll
            useful = (at - now) / US if at >= 0 else math.inf
            try:
                async with asyncio.timeout(min(left, useful, poll)):
                    await bell.wait()
            except TimeoutError:
                if useful <= min(left, poll):
                    return

    async def _leases_of(self, reply: Sequence[Any], lasting: int) -> list[Lease]:
        groups = reply[5]
        jobs = await self._names.jobs({group[1] for group in groups})
        queues = await self._names.queues({group[2] for group in groups})
        return codec.leases_of(reply, lasting, jobs, queues)


async def migrate(url: str) -> tuple[int, int]:
    """Mark an empty server as a frontier, as opening does. Returns the key layout before (0: there was none)
    and after. There has been only one layout so far; any other is refused."""
    client = Client(url, None)
    try:
        before = await client.command("HGET", client.key("meta"), "layout")
    finally:
        await client.close()
    await (await RedisFrontier.open(url)).close()
    return int(before or 0), LAYOUT


def _verdict_chunks(verdicts: Sequence[Verdict]) -> Iterator[list[Verdict]]:
    chunk: list[Verdict] = []
    links = 0
    for verdict in verdicts:
        found = len(verdict.found) if isinstance(verdict, Done) else 0
        if chunk and (len(chunk) >= LEASES_PER_CALL or links + found > FOUND_PER_CALL):
            yield chunk
            chunk, links = [], 0
        chunk.append(verdict)
        links += found
    yield chunk


def _tokens(leases: Sequence[Lease]) -> list[int]:
    return [lease.token for lease in leases]
