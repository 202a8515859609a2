"""The `Catalog` port: jobs, items, letters, lanes, leases, and the settings of the server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shoal import urls
from shoal.errors import FrontierError, FrontierUnreachable
from shoal.frontier.redis import codec
from shoal.frontier.redis.client import LAYOUT, LEASES_PER_CALL, Client, slices
from shoal.frontier.redis.names import Names
from shoal.frontier.redis.notes import RedisNotes
from shoal.frontier.redis.reads import PAGE, Reads
from shoal.frontier.redis.recount import recount
from shoal.frontier.redis.rows import Held, LaneRow
from shoal.frontier.rules import US, microseconds
from shoal.model import (
    LASTING,
    TRANSIT,
    Advice,
    DeadGroup,
    DeadLetter,
    Info,
    Item,
    Job,
    JobSpec,
    JobState,
    Lane,
    LeaseRow,
    Request,
    RequestStatus,
    Selection,
)

RECOUNTS = 4
"""How often a recount that found differences is repeated."""


class Catalog:
    """The part of the frontier that workers never use."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._names = Names(client)
        self._reads = Reads(client, self._names)
        self.notes = RedisNotes(client)

    async def close(self) -> None:
        await self._client.close()

    # -- jobs -------------------------------------------------------------------------

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        await self._client.call("open_job", [job, *codec.spec_args(spec)])
        return await self.job(job)

    async def job(self, job: str) -> Job:
        return (await self._reads.job(job))[1]

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        top = b"+inf" if before is None else b"(%d" % microseconds(before)
        client = self._client
        ids = await client.command(
            "ZRANGE", client.key("created"), top, "-inf", "BYSCORE", "REV", "LIMIT", 0, limit
        )
        names = await self._names.jobs(int(id) for id in ids)
        return [await self.job(names[int(id)]) for id in ids]

    async def update_job(
        self, job: str, *, spec: JobSpec | None = None, state: JobState | None = None
    ) -> Job:
        number = await self._names.number(job)
        if spec is not None:
            await self._client.walk("respec", [number, *codec.spec_args(spec)])
        if state in (JobState.RUNNING, JobState.PAUSED):
            await self._client.walk("switch", [number, state is JobState.PAUSED])
        elif state is JobState.CANCELLED:
            await self._cancel(number)
        return await self.job(job)

    async def _cancel(self, number: int) -> None:
        await self._client.walk("cancel", [number])
        # From here on no worker can take leases in transit: end them, and free their lanes.
        tokens = [
            held.token
            async for held in self._reads.held()
            if held.job == number and held.worker.startswith(TRANSIT)
        ]
        await self._client.ask(
            [self._client.pack("cancel_leases", [number, some]) for some in slices(tokens, LEASES_PER_CALL)]
        )

    # -- items ------------------------------------------------------------------------

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        key = self._client.key("items", await self._names.number(job))
        bodies = await self._client.command("LRANGE", key, after, after + limit - 1) if limit > 0 else []
        return [Item(seq, body) for seq, body in enumerate(bodies, after + 1)]

    # -- dead letters -----------------------------------------------------------------

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        async for letter in self._reads.letters(which, after):
            if len(found) >= limit:
                break
            found.append(letter)
        return found

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        groups: dict[tuple[str, str], list[Any]] = {}
        async for letter in self._reads.letters(which):
            group = groups.setdefault((letter.lane, letter.failure.error), [0, letter.request.url])
            group[0] += 1
        found = [DeadGroup(lane, error, n, url) for (lane, error), (n, url) in groups.items()]
        return sorted(found, key=lambda group: (-group.count, group.lane, group.error))

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        ids = [letter.id async for letter in self._reads.letters(which)]
        calls = [self._client.pack("revive", [some, reset_attempts]) for some in slices(ids, LEASES_PER_CALL)]
        return sum(await self._client.ask(calls))

    async def purge(self, which: Selection) -> int:
        ids = [letter.id async for letter in self._reads.letters(which)]
        return sum(await self._client.ask([self._client.pack("purge", [some]) for some in slices(ids, PAGE)]))

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        job = await self._names.number(request.job)
        values, key, entry = codec.bury_args(job, request, failure_class, message)
        await self._client.call("bury", values, key, entry)

    # -- lanes and queues -------------------------------------------------------------

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        client = self._client
        rows: list[LaneRow] = []
        if names is None:
            rows = [row async for row in self._reads.lanes()]
        elif names:
            ids = await client.command("HMGET", client.key("laneids"), *names)
            known = [id for id in ids if id is not None]
            if known:
                raws = await client.command("HMGET", client.key("lanes"), *known)
                rows = [LaneRow(id, raw) for id, raw in zip(known, raws, strict=True)]
        views = [row.view() for row in rows]
        return sorted(views, key=lambda lane: (-lane.busy, -lane.waiting, lane.name))[:limit]

    async def queues(self) -> dict[str, dict[str, int]]:
        client = self._client
        found: dict[str, dict[str, int]] = {}
        streams = [int(stream) for stream in await client.command("HKEYS", client.key("streams"))]
        names = await self._names.queues(streams)
        for stream in streams:
            row = found.setdefault(names[stream], {"waiting": 0, "delayed": 0, "leased": 0})
            row["waiting"] += int(await client.command("HGET", client.key("waiting"), stream) or 0)
            row["delayed"] += await client.command("ZCARD", client.key("delayed", stream))
            row["leased"] += await client.command("ZCARD", client.key("ends", stream))
        return found

    async def find(self, url: str, job: str | None = None) -> list[RequestStatus]:
        if job is not None:
            return [await self._find(url, job)]
        names = await self._client.command("HKEYS", self._client.key("jobids"))
        return [await self._find(url, name.decode()) for name in names]

    async def _find(self, url: str, name: str) -> RequestStatus:
        client = self._client
        number, job = await self._reads.job(name)
        key = urls.key(name, url)
        if not await client.command("SISMEMBER", client.key("seen", number), key):
            return RequestStatus(name, "unknown", job_state=job.state)
        row = await self._reads.lane(urls.lane_of(url))
        lane = row.view() if row else None
        lines = [line for line in row.lines if line.job == number] if row else []
        queues = await self._names.queues(line.stream for line in lines)
        for line in lines:
            queue = queues[line.stream]
            ahead = 0
            async for entry in self._reads.entries(line):
                request = codec.request_of(entry, name, queue, line.priority)
                if request.url == url:
                    ready = lane.ready_at if lane else None
                    return RequestStatus(name, "waiting", request, lane, job.state, ahead, ready)
                ahead += 1
            flat = await client.command("ZRANGE", client.key("delayed", line.stream), 0, -1, "WITHSCORES")
            for member, at in zip(flat[::2], flat[1::2], strict=True):
                if codec.delayed_line(member) != line.id:
                    continue
                request = codec.request_of(member[codec.DELAYED_HEAD :], name, queue, line.priority)
                if request.url == url:
                    return RequestStatus(name, "delayed", request, lane, job.state, ready_at=float(at) / US)
        async for held in self._reads.held():
            if held.job != number:
                continue
            queues = await self._names.queues([held.stream])
            request = codec.request_of(held.entry, name, queues[held.stream], held.priority)
            if request.url == url:
                until = await client.command("ZSCORE", client.key("ends", held.stream), held.token)
                seconds = float(until) / US if until is not None else None
                return RequestStatus(
                    name, "leased", request, lane, job.state, worker=held.worker, until=seconds
                )
        async for letter in self._reads.letters(Selection(job=name)):
            if letter.request.url == url:
                failure = letter.failure
                return RequestStatus(name, letter.state, letter.request, lane, job.state, failure=failure)
        return RequestStatus(name, "done", None, lane, job.state)

    # -- leases -----------------------------------------------------------------------

    async def leases(
        self, *, job: str | None = None, lane: str | None = None, limit: int | None = None
    ) -> list[LeaseRow]:
        number = place = None
        if job is not None:
            number = (await self._names.numbers({job}, must=False)).get(job)
        if lane is not None:
            place = await self._client.command("HGET", self._client.key("laneids"), lane)
        if (job is not None and number is None) or (lane is not None and place is None):
            return []

        def fits(held: Held) -> bool:
            return number in (None, held.job) and place in (None, held.lane)

        found = None if limit is None else await self._reads.newest_held(fits, limit)
        if found is None:
            every = [held async for held in self._reads.held() if fits(held)]
            found = sorted(every, key=lambda held: -held.token)[:limit]
        return await self._lease_rows(found)

    async def _lease_rows(self, leases: list[Held]) -> list[LeaseRow]:
        if not leases:
            return []
        jobs = await self._names.jobs({held.job for held in leases})
        queues = await self._names.queues({held.stream for held in leases})
        ids = list({held.lane for held in leases})
        raws = await self._client.command("HMGET", self._client.key("lanes"), *ids)
        lanes = {id: LaneRow(id, raw).name for id, raw in zip(ids, raws, strict=True)}
        rows: list[LeaseRow] = []
        for held in leases:
            job, queue = jobs[held.job], queues[held.stream]
            url = codec.request_of(held.entry, job, queue, held.priority).url
            rows.append(LeaseRow(held.worker, queue, url, job, lanes[held.lane]))
        return rows

    async def evict(self, workers: Collection[str]) -> int:
        names = list(workers)
        tokens = sorted([held.token async for held in self._reads.held() if held.worker in names])
        taken = suspects = 0
        for some in slices(tokens, LEASES_PER_CALL):
            got, suspects = await self._client.call("evict", [names, some, suspects])
            taken += got
        return taken

    # -- the server -------------------------------------------------------------------

    async def check(self) -> list[str]:
        """Recount everything. That takes many reads while others work, so only a difference that every
        recount finds is reported."""
        wrong = await recount(self._client, self._reads)
        for _ in range(RECOUNTS):
            if not wrong:
                break
            again = set(await recount(self._client, self._reads))
            wrong = [sentence for sentence in wrong if sentence in again]
        return wrong

    async def info(self) -> Info:
        name, version = await self._server()
        return Info(
            await self._warnings(version), f"{name} {version}", LAYOUT, LAYOUT, await self._durability()
        )

    async def _warnings(self, version: str) -> list[Advice]:
        """Return the settings of the server that may lose work or stop it."""
        found: list[Advice] = []
        persistence = await self._info("persistence")
        if persistence.get("aof_enabled") != "1":
            text = "appendonly is off: a crash of the server loses all work since its last snapshot"
            found.append(Advice(text, "`redis-cli CONFIG SET appendonly yes`, and the same in redis.conf"))
        elif persistence.get("aof_last_write_status", "ok") != "ok":
            text = "the last write to the append-only file failed: the disk may be full"
            found.append(Advice(text, "free some space on the server's disk"))
        memory = await self._info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory", "0") != "0" and policy != "noeviction":
            text = f"maxmemory-policy is {policy}: a full server deletes requests"
            hint = "`redis-cli CONFIG SET maxmemory-policy noeviction`, and the same in redis.conf"
            found.append(Advice(text, hint))
        if int(version.partition(".")[0]) < 7:
            text = f"Redis {version} is older than 7.0, the oldest version that is tested"
            found.append(Advice(text, "upgrade the server"))
        return found

    async def _server(self) -> tuple[str, str]:
        """Return the server's name and version. Valkey reports its own version beside 7.2 as its Redis
        version."""
        info = await self._info("server")
        name = info.get("server_name", "redis")
        if name == "redis":
            return "Redis", info.get("redis_version", "0")
        return name.capitalize(), info.get(f"{name}_version", info.get("redis_version", "0"))

    async def _durability(self) -> Advice:
        """Return what survives crashes and power cuts: that depends on how often the append-only file is
        flushed. Some users may not read this setting."""
        try:
            policy = (await self._client.command("CONFIG", "GET", "appendfsync"))[1].decode()
        except FrontierUnreachable:
            raise
        except (FrontierError, IndexError):
            return Advice("through crashes of the server")
        if policy == "always":
            return LASTING
        lost = "the last second" if policy == "everysec" else "the last half minute"
        return Advice(
            f"through crashes; a power cut may lose {lost} (appendfsync {policy})",
            "`redis-cli CONFIG SET appendfsync always` prevents that, and is slower",
        )

    async def _info(self, section: str) -> dict[str, str]:
        raw: bytes = await self._client.command("INFO", section)
        pairs = (line.partition(":") for line in raw.decode().splitlines())
        return {key: value for key, mark, value in pairs if mark}
