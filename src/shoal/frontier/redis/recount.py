"""Recounts everything that the scripts count, from the stored requests."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.frontier.redis import codec
from shoal.frontier.redis.client import Client
from shoal.frontier.redis.codec import DELAYED_HEAD
from shoal.frontier.redis.reads import Reads
from shoal.frontier.redis.rows import LaneRow
from shoal.model import Selection


async def recount(client: Client, reads: Reads) -> list[str]:
    """Return a sentence for each broken invariant. Others work meanwhile, so a single finding may only be a
    request that moved between two reads."""
    return await _Recount(client, reads).result()


class _Recount:
    """One recount: leases, then streams, then lanes, and at last the counters of jobs."""

    def __init__(self, client: Client, reads: Reads) -> None:
        self._client = client
        self._reads = reads
        self._wrong: list[str] = []
        self._where: dict[int, str] = {}
        """The state of each request that was read."""
        self._live: dict[int, int] = {}
        """The number of live requests, by job."""
        self._ends: dict[int, set[int]] = {}
        """The tokens of leases, by stream."""
        self._busy: dict[bytes, int] = {}
        """The number of leases, by lane."""
        self._turns: dict[bytes, set[tuple[int, int]]] = {}
        """The turns of each lane: stream and moment."""
        self._waiting: dict[int, int] = {}
        """The number of waiting requests, by stream."""

    async def result(self) -> list[str]:
        now: int = await self._client.call("now", [])
        async for held in self._reads.held():
            self._busy[held.lane] = self._busy.get(held.lane, 0) + 1
            self._place(held.entry, "leased", held.job)
            self._ends.setdefault(held.stream, set()).add(held.token)
        rows = [row async for row in self._reads.lanes()]
        jobs_of_lines = {line.id: line.job for row in rows for line in row.lines}
        for stream in await self._client.command("HKEYS", self._client.key("streams")):
            await self._check_stream(int(stream), jobs_of_lines)
        for row in rows:
            await self._check_lane(row, now)
        self._wrong += [f"turns of lane {lane.hex()}, which does not exist" for lane in self._turns]
        await self._check_sums()
        return self._wrong

    def _place(self, entry: bytes, state: str, job: int) -> None:
        id = codec.id_of(entry)
        if id in self._where:
            self._wrong.append(f"request {id} is {self._where[id]} and {state}")
        self._where[id] = state
        self._live[job] = self._live.get(job, 0) + 1

    async def _check_stream(self, stream: int, jobs_of_lines: dict[int, int]) -> None:
        client = self._client
        held = self._ends.get(stream, set())
        tokens = {int(t) for t in await client.command("ZRANGE", client.key("ends", stream), 0, -1)}
        # With their tokens: then findings caused by work in between differ from recount to recount.
        self._wrong += [f"lease {token} has no end" for token in sorted(held - tokens)]
        self._wrong += [f"an end of lease {token}, which is not held" for token in sorted(tokens - held)]
        for member in await client.command("ZRANGE", client.key("delayed", stream), 0, -1):
            line = codec.delayed_line(member)
            if line in jobs_of_lines:
                self._place(member[DELAYED_HEAD:], "delayed", jobs_of_lines[line])
            else:
                self._wrong.append(f"a request is delayed in line {line}, which does not exist")
        flat = await client.command("ZRANGE", client.key("turn", stream), 0, -1, "WITHSCORES")
        for lane, at in _pairs(flat):
            self._turns.setdefault(lane, set()).add((stream, int(float(at))))
        for kind, name in (("x", "expiring"), ("e", "ends"), ("d", "delayed")):
            head = await client.command("ZRANGE", client.key(name, stream), 0, 0, "WITHSCORES")
            due = await client.command("ZSCORE", client.key("due"), f"{kind}{stream}")
            if head and (due is None or float(due) > float(head[1])):
                self._wrong.append(f"{name} of stream {stream} would be found too late")

    async def _check_lane(self, row: LaneRow, now: int) -> None:
        client, name, busy = self._client, row.name, self._busy.get(row.id, 0)
        if row.busy != busy:
            self._wrong.append(f"lane {name} counts {row.busy} leases, there are {busy}")
        for line in row.lines:
            tail = await client.command("LLEN", client.key("line", line.id))
            front = await client.command("ZCARD", client.key("front", line.id))
            if (tail, front) != (line.tail, line.front):
                self._wrong.append(f"lane {name} miscounts a line: {line}, there are {tail} and {front}")
            self._waiting[line.stream] = self._waiting.get(line.stream, 0) + tail + front
            async for entry in self._reads.entries(line):
                self._place(entry, "waiting", line.job)
        streams = {line.stream for line in row.lines if not line.off and line.waiting}
        if streams and row.busy < row.width and not row.paused and row.at is None:
            self._wrong.append(f"lane {name} has work and a free slot but is not scheduled")
        planned = set() if row.at is None else {(stream, row.at) for stream in streams}
        if planned != self._turns.pop(row.id, set()):
            self._wrong.append(f"lane {name} has other turns than its row says")
        if row.at is not None and row.at > max(now, row.ready):
            self._wrong.append(f"lane {name} is scheduled later than it is ready")

    async def _check_sums(self) -> None:
        """Compare the counters of streams and jobs with what was read."""
        client = self._client
        flat = await client.command("HGETALL", client.key("waiting"))
        counted = {int(stream): int(number) for stream, number in _pairs(flat)}
        if counted != {stream: number for stream, number in self._waiting.items() if number}:
            self._wrong.append(f"streams count {counted} waiting, there are {self._waiting}")
        async for letter in self._reads.letters(Selection()):
            if letter.id in self._where:
                self._wrong.append(f"request {letter.id} is {self._where[letter.id]} and {letter.state}")
        async for raw, record in self._reads.scan("jobs"):
            number, job = int(raw), codec.job_row(record)
            left = job["added"] - job["done"] - job["dead"] - job["expired"] - job["cancelled"]
            live = self._live.get(number, 0)
            if left != live:
                self._wrong.append(f"job {job['name']}: live {left}, there are {live}")
            logged = await client.command("LLEN", client.key("items", number))
            if logged != job["items"]:
                self._wrong.append(f"job {job['name']} counts {job['items']} items, its log has {logged}")


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Pair up a flat reply of Redis: member and score, or field and value."""
    return zip(flat[::2], flat[1::2], strict=True)
