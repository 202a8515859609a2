"""The frontier on Redis 7: many machines, one script call per verb, time from the server.

How it stays fast and safe:

- Every verb is a call of `redis.lua`, which Redis runs alone: no locks, no half-done states. A
  large batch is several calls of about a millisecond, so that nobody else waits long: at most 50
  leases in a claim or settle, 100 requests in an add. Each verdict is settled whole.
- Calls of one batch are sent together and answered in order: while the server runs one, the
  client already packs the next.
- A call goes on when its caller is cancelled: a reply must never meet the wrong question. After
  a cut cable nobody knows whether the call happened; tokens and keys make asking again harmless.
- What is acknowledged survives a killed server only with `appendonly yes`, and a power cut only
  up to the last second with `everysec`. `remarks` says what the server is set to.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import accumulate
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import msgspec
import redis.asyncio as aredis
from redis import exceptions as errors

from shoal import clock as clocks
from shoal import urls
from shoal.addresses import listens
from shoal.errors import (
    FrontierError,
    FrontierFull,
    FrontierUnreachable,
    NoSuchJob,
    UsageError,
)
from shoal.frontier.parcel import (
    FOREVER,
    Arrival,
    Head,
    Items,
    Keys,
    Lanes,
    Letters,
    Numbers,
    Packed,
    PackedLane,
    PackedLine,
    Parcel,
    Part,
    Requests,
    arrival_of,
    arriving_key,
    head_note,
    no_such_parcel,
    not_arriving,
)
from shoal.frontier.rules import FORGET, US, credit, microseconds, validate
from shoal.model import (
    EXPIRED,
    LASTING,
    TRANSIT,
    About,
    Added,
    Attendance,
    Beat,
    Claim,
    Counts,
    Dead,
    DeadGroup,
    DeadLetter,
    Done,
    Failure,
    Finding,
    Item,
    Job,
    JobSpec,
    JobState,
    Lane,
    Lease,
    Pace,
    Remark,
    Request,
    Retry,
    Selection,
    Settlement,
    Verdict,
)

LAYOUT = 1
"""Of the keys; see the map in `redis.lua`. Another one is refused."""
RECOUNTS = 4
"""How often a recount that found something is made again."""
LEASES_PER_CALL = 50
ADDS_PER_CALL = 100
FOUND_PER_CALL = 150
"""Links in one settle call; a single page may have more, a verdict is never cut."""
WINDOW = 8
"""Calls that may be on their way at once: the server never waits for the client to pack."""
PAGE = 500
MOST_LOOKED_AT = 10 * PAGE
"""Leases, to find one of a job."""
"""Rows of one read for people."""
POLL = 5.0
"""A sleeper looks so often by itself: a message may be lost with its connection."""
IDLE = 15.0
"""A connection that rested so long is tried before it is trusted."""

_WRONG_PORT = {
    False: "check the port: something else may listen there; a server with TLS is rediss://",
    True: "a server without TLS is redis://; or check the port: something else may listen there",
}
_SCRIPT = files("shoal.frontier").joinpath("redis.lua").read_bytes()
_SHA = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest().encode()
_ADDED = {48: Added.NEW, 49: Added.KNOWN, 50: Added.REFUSED}
_STATES = (JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED, JobState.DONE)
_JOB = (
    *("name", "state", "created", "finished", "gap", "width", "apart", "max_pages", "max_per_host"),
    *("added", "known", "refused", "done", "skipped", "dead", "expired", "cancelled", "retried", "items"),
    *("stale", "leased", "delayed", "started"),
)
_PLAIN, _TTL, _RICH, _TIMED = 0, 1, 2, 4
_HEAD = struct.Struct("<dHBBH")
_TAIL = struct.Struct("<HBBH")
_LEASE = struct.Struct("<4sdddBH")
_SINCE = struct.Struct("<dd")

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.decode
_encode = msgspec.json.Encoder().encode
_beat = msgspec.json.Decoder(Beat).decode
_Rows = tuple[dict[str, Any], list[bytes], list[bytes]]


class RedisFrontier:
    """A `Backend` on a Redis server. Make it with `open`."""

    def __init__(self, url: str, clock: clocks.Clock | None) -> None:
        hint = "redis://:password@host:6379/0?prefix=name"
        try:
            parts = urlsplit(url)
            options = parse_qs(parts.query)
            name = options.pop("prefix", ["default"])[0]
            query = "&".join(f"{key}={value}" for key, values in options.items() for value in values)
            settings: dict[str, Any] = dict(
                aredis.connection.parse_url(urlunsplit(parts._replace(query=query)))
            )
        except ValueError:
            raise UsageError("this Redis address cannot be read", hint=hint) from None
        self.shown = _shown(url)
        """The address without its password."""
        self.place = f"{self.shown.partition('?')[0]}?prefix={name}"
        """The same, spelled so that one place has one name."""
        if not re.fullmatch(r"/?[0-9]*/?", parts.path):
            raise UsageError(f"{self.shown}: a database of Redis is a number", hint=hint)
        if not name or set(name) & set("{}"):
            raise UsageError(f"bad prefix {name!r}", hint="use letters, digits and dashes")
        self._prefix = f"{{shoal:{name}}}:".encode()
        self._clock = clock
        kind: Any = settings.pop("connection_class", aredis.Connection)
        self._endpoint = str(settings.get("host", "localhost")), int(settings.get("port", 6379))
        self._tls = parts.scheme == "rediss"
        self._mute = False
        """Something went wrong before or while anybody answered."""
        settings.setdefault("socket_connect_timeout", 5.0)
        settings.setdefault("socket_timeout", 30.0)
        settings.setdefault("socket_keepalive", True)  # the listener reads for hours
        settings |= {"protocol": 2, "decode_responses": False}
        try:
            kind(**settings)
        except TypeError:
            raise UsageError(f"{self.shown} has an option that does not exist", hint=hint) from None
        self._connect: Callable[[], Any] = lambda: kind(**settings)
        self._welcome = bool(settings.get("password"))
        """We say who we are; otherwise the server may want to know."""
        self._connection: Any = None
        self._used = 0.0
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._job_ids: dict[str, int] = {}
        self._job_names: dict[int, str] = {}
        self._queue_names: dict[int, str] = {}
        self._version = 0
        """How many jobs had ended at the last claim."""
        self._asked: tuple[list[str] | bool, int | bool] = (False, False)
        self._bell = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._closing = False

    @classmethod
    async def open(cls, url: str, *, clock: clocks.Clock | None = None) -> RedisFrontier:
        """Connect. Raises a FrontierError that says what is wrong with the server.

        Time is the server's; only tests give a `clock`, and then to every handle.
        """
        frontier = cls(url, clock)
        try:
            layout, frontier._version, _ = await frontier._call("open", [LAYOUT])
        except FrontierUnreachable as error:
            await frontier.close()
            if frontier._mute and await listens(*frontier._endpoint):
                how = " over TLS" if frontier._tls else ""
                raise FrontierUnreachable(
                    f"{frontier.shown} takes the connection, but does not answer as Redis does{how}",
                    hint=_WRONG_PORT[frontier._tls],
                    server=error.server,
                ) from None
            raise
        except BaseException:
            await frontier.close()
            raise
        if layout != LAYOUT:
            await frontier.close()
            raise FrontierError(
                f"{frontier.shown} has layout {layout}, this release knows {LAYOUT}",
                hint="upgrade shoal, or use another ?prefix=",
            )
        return frontier

    async def close(self) -> None:
        if self._listener is not None:
            listener, self._listener = self._listener, None
            self._closing = True
            # Cancelled while it connects, it would leave a socket behind: give it a moment.
            for _ in range(100):
                if self._listening.is_set() or listener.done():
                    break
                await asyncio.sleep(0.01)
            # The client library may swallow a cancellation: ask until it is over.
            while not listener.done():
                listener.cancel()
                await asyncio.wait([listener], timeout=0.5)
        if self._under_way:
            await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._drop(gently=True)
        await asyncio.sleep(0)  # transports that were dropped before close in the loop's next turn

    async def remarks(self) -> list[Remark]:
        """What the server is set to that may lose work or stop it; empty when all is well."""
        found: list[Remark] = []
        persistence = _info(await self._command("INFO", "persistence"))
        if persistence.get("aof_enabled") != "1":
            text = "appendonly is off: a crash of the server loses what came after its last snapshot"
            found.append(Remark(text, "`redis-cli CONFIG SET appendonly yes`, and the same in redis.conf"))
        elif persistence.get("aof_last_write_status", "ok") != "ok":
            text = "the last write to the append-only file failed: the disk may be full"
            found.append(Remark(text, "free some space on the server's disk"))
        memory = _info(await self._command("INFO", "memory"))
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory", "0") != "0" and policy != "noeviction":
            text = f"maxmemory-policy is {policy}: a full server throws away requests"
            hint = "`redis-cli CONFIG SET maxmemory-policy noeviction`, and the same in redis.conf"
            found.append(Remark(text, hint))
        version = (await self._server())[1]
        if int(version.partition(".")[0]) < 7:
            text = f"Redis {version} is older than 7.0, the oldest that is tried"
            found.append(Remark(text, "upgrade the server"))
        return found

    async def about(self) -> About:
        return About(" ".join(await self._server()), LAYOUT, LAYOUT, await self._lasting())

    async def _server(self) -> tuple[str, str]:
        """Its name and version. Valkey says 7.2 of itself where Redis is asked for, and its own beside it."""
        told = _info(await self._command("INFO", "server"))
        name = told.get("server_name", "redis")
        if name == "redis":
            return "Redis", told.get("redis_version", "0")
        return name.capitalize(), told.get(f"{name}_version", told.get("redis_version", "0"))

    async def _lasting(self) -> Remark:
        """How often the append-only file is flushed decides what a power cut takes. Not everybody may ask."""
        try:
            policy = (await self._command("CONFIG", "GET", "appendfsync"))[1].decode()
        except FrontierUnreachable:
            raise
        except (FrontierError, IndexError):
            return Remark("through crashes of the server")
        if policy == "always":
            return LASTING
        lost = "the last second" if policy == "everysec" else "the last half minute"
        return Remark(
            f"through crashes; a power cut may lose {lost} (appendfsync {policy})",
            "`redis-cli CONFIG SET appendfsync always` keeps it too, and is slower",
        )

    # -- the five verbs ---------------------------------------------------------------

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        for request in requests:
            validate(request)
        if not requests:
            return []
        await self._know({request.job for request in requests})

        def calls() -> Iterable[bytes]:
            for some in _slices(requests, ADDS_PER_CALL):
                rows, keys, tails = self._rows(some)
                yield self._packed("add", [rows], *keys, *tails)

        return [_ADDED[digit] for answer in await self._ask(calls()) for digit in answer]

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        if job is not None:
            await self._know({job})
        names: list[str] | bool = sorted(queues) if queues is not None else False
        number: int | bool = self._job_ids[job] if job is not None else False
        self._asked = (names, number)
        lasting = microseconds(lease)
        leases: list[Lease] = []
        suspects, at_once = 0, 1
        answer: Any = None
        while answer is None or len(leases) < limit:
            sizes = [
                min(LEASES_PER_CALL, limit - len(leases) - sent * LEASES_PER_CALL)
                for sent in range(at_once)
                if limit - len(leases) > sent * LEASES_PER_CALL or sent == 0
            ]
            left = limit - len(leases)
            calls = []
            for size in sizes:
                left -= size
                calls.append(
                    self._packed("claim", [size, lasting, worker, names, number, left > 0, suspects])
                )
            got = 0
            for reply in await self._ask(calls):
                if reply[1] == -4:
                    raise UsageError(
                        f"job {job!r} cannot be worked on by itself",
                        hint="`shoal worker --queues` takes its queue",
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
                continue  # so much came due that it takes several calls
            if got < sum(sizes):
                break
            at_once = WINDOW // 2
        now = answer[0] / US
        if leases:
            return Claim(leases, now, now)
        return Claim((), _moment(answer[1]), now)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        if not verdicts:
            return Settlement([], [])
        found = {request.job for v in verdicts if isinstance(v, Done) for request in v.found}
        await self._know(found)
        await self._know({v.lease.request.job for v in verdicts}, must=False)
        chunks = list(_verdict_chunks(verdicts))
        replies = await self._ask(map(self._settle_call, chunks))
        lost: list[Lease] = []
        refused: list[str] = []
        for chunk, (gone, away) in zip(chunks, replies, strict=True):
            lost += [chunk[place - 1].lease for place in gone]
            if away:
                links = [request for v in chunk if isinstance(v, Done) for request in v.found]
                refused += [links[place - 1].url for place in away]
        return Settlement(lost, refused)

    async def take(self, leases: Sequence[Lease], *, worker: str, lease: float) -> Claim:
        lasting = microseconds(lease)
        chunks = list(_slices(leases, ADDS_PER_CALL))
        calls = [self._packed("take", [lasting, worker, [x.token for x in some]]) for some in chunks]
        taken: list[Lease] = []
        now = 0.0
        for some, (moment, ours) in zip(chunks, await self._ask(calls), strict=True):
            now = moment / US
            until = (moment + lasting) / US
            taken += [msgspec.structs.replace(some[place - 1], until=until) for place in ours]
        return Claim(taken, now, now)

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        chunks = list(_slices(leases, ADDS_PER_CALL))
        calls = [self._packed("extend", [microseconds(seconds), [x.token for x in some]]) for some in chunks]
        lost: list[Lease] = []
        for some, gone in zip(chunks, await self._ask(calls), strict=True):
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
        await self._call("pace", [lane, fields])

    async def wait(self, seconds: float) -> None:
        """Sleeps until a script publishes that something came sooner than we were told."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen())
        while (left := end - loop.time()) > 0:
            bell = self._bell
            # What the script finds was there before we slept, what comes later rings: nothing between.
            now, at, version = await self._call(
                "wait", [*self._asked, microseconds(min(left, 1e6)), self._version]
            )
            if version != self._version or 0 <= at <= now:
                return
            poll = POLL if self._listening.is_set() else 0.02
            useful = (at - now) / US if at >= 0 else math.inf
            try:
                async with asyncio.timeout(min(left, useful, poll)):
                    await bell.wait()
            except TimeoutError:
                if useful <= min(left, poll):
                    return

    # -- people -----------------------------------------------------------------------

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        await self._call("open_job", [job, *_spec_args(spec)])
        return await self.job(job)

    async def job(self, job: str) -> Job:
        return (await self._job(job))[1]

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        top = b"+inf" if before is None else b"(%d" % microseconds(before)
        ids = await self._command(
            "ZRANGE", self._key("created"), top, "-inf", "BYSCORE", "REV", "LIMIT", 0, limit
        )
        await self._know_numbers(int(id) for id in ids)
        return [await self.job(self._job_names[int(id)]) for id in ids]

    async def respec_job(self, job: str, spec: JobSpec) -> Job:
        await self._walk("respec", [await self._job_id(job), *_spec_args(spec)])
        return await self.job(job)

    async def pause(self, job: str) -> Job:
        await self._walk("switch", [await self._job_id(job), True])
        return await self.job(job)

    async def resume(self, job: str) -> Job:
        await self._walk("switch", [await self._job_id(job), False])
        return await self.job(job)

    async def cancel(self, job: str) -> Job:
        number = await self._job_id(job)
        await self._walk("cancel", [number])
        # From here on nobody can take what travels: it ends now, and its lanes are free.
        tokens = [
            held.token
            async for held in self._held()
            if held.job == number and held.worker.startswith(TRANSIT)
        ]
        calls = [self._packed("recall", [number, list(some)]) for some in _slices(tokens, LEASES_PER_CALL)]
        await self._ask(calls)
        return await self.job(job)

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        key = self._key("items", await self._job_id(job))
        bodies = await self._command("LRANGE", key, after, after + limit - 1) if limit > 0 else []
        return [Item(seq, body) for seq, body in enumerate(bodies, after + 1)]

    async def cursor(self, job: str, sink: str) -> int:
        seq = await self._command("HGET", self._key("cursor", await self._job_id(job)), sink)
        return int(seq or 0)

    async def save_cursor(self, job: str, sink: str, seq: int) -> None:
        await self._command("HSET", self._key("cursor", await self._job_id(job)), sink, seq)

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        async for letter in self._letters(which, after):
            if len(found) >= limit:
                break
            found.append(letter)
        return found

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        groups: dict[tuple[str, str], list[Any]] = {}
        async for letter in self._letters(which):
            group = groups.setdefault((letter.lane, letter.failure.error), [0, letter.request.url])
            group[0] += 1
        found = [DeadGroup(lane, error, n, url) for (lane, error), (n, url) in groups.items()]
        return sorted(found, key=lambda group: (-group.count, group.lane, group.error))

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        ids = [letter.id async for letter in self._letters(which)]
        calls = [
            self._packed("revive", [list(some), reset_attempts]) for some in _slices(ids, LEASES_PER_CALL)
        ]
        return sum(await self._ask(calls))

    async def purge(self, which: Selection) -> int:
        ids = [letter.id async for letter in self._letters(which)]
        return sum(await self._ask([self._packed("purge", [list(some)]) for some in _slices(ids, PAGE)]))

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        lane = urls.lane_of(request.url) if "://" in request.url else ""
        job = await self._job_id(request.job)
        key = urls.key(request.job, request.url, request.method, request.body)
        values = [job, lane, request.queue, request.priority, failure_class, _text(message)]
        await self._call("bury", values, key, _tail(request, _PLAIN))

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        rows: list[_LaneRow] = []
        if names is None:
            rows = [row async for row in self._lane_rows()]
        elif names:
            ids = await self._command("HMGET", self._key("laneids"), *names)
            known = [id for id in ids if id is not None]
            if known:
                raws = await self._command("HMGET", self._key("lanes"), *known)
                rows = [_LaneRow(id, raw) for id, raw in zip(known, raws, strict=True)]
        views = [row.view() for row in rows]
        return sorted(views, key=lambda lane: (-lane.busy, -lane.waiting, lane.name))[:limit]

    async def find(self, url: str, job: str | None = None) -> list[Finding]:
        if job is not None:
            return [await self._find(url, job)]
        names = await self._command("HKEYS", self._key("jobids"))
        return [await self._find(url, name.decode()) for name in names]

    async def queues(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        streams = await self._command("HKEYS", self._key("streams"))
        await self._know_streams(int(stream) for stream in streams)
        for raw in streams:
            stream = int(raw)
            waiting = int(await self._command("HGET", self._key("waiting"), stream) or 0)
            delayed = await self._command("ZCARD", self._key("delayed", stream))
            leased = await self._command("ZCARD", self._key("ends", stream))
            row = found.setdefault(self._queue_names[stream], {"waiting": 0, "delayed": 0, "leased": 0})
            row["waiting"] += waiting
            row["delayed"] += delayed
            row["leased"] += leased
        return found

    async def note(self, key: str, value: bytes, ttl: float) -> None:
        await self._call("note", [key, microseconds(ttl)], value)

    async def noted(self, key: str) -> bytes | None:
        value: bytes | None = await self._call("noted", [key])
        return value

    async def swap(self, key: str, known: bytes | None, value: bytes, ttl: float) -> bool:
        first = known is None
        return bool(await self._call("swap", [key, microseconds(ttl), first], value, known or b""))

    async def now(self) -> float:
        moment: int = await self._call("now", [])
        return moment / US

    async def lock(self, name: str, owner: str, ttl: float) -> str:
        holder: bytes = await self._call("lock", [name, owner, microseconds(ttl)])
        return holder.decode()

    async def unlock(self, name: str, owner: str) -> None:
        await self._call("unlock", [name, owner])

    async def beat(self, beat: Beat) -> None:
        await self._call("beat", [beat.worker, FORGET], _encode(beat))

    async def leave(self, worker: str) -> None:
        await self._call("leave", [worker])

    async def workers(self) -> list[Attendance]:
        now, rows = await self._call("workers", [])
        holders = await self.holders()
        found = []
        for name, raw in sorted(zip(rows[::2], rows[1::2], strict=True)):
            since, seen = _SINCE.unpack_from(raw)
            beat = _beat(raw[_SINCE.size :])
            found.append(Attendance(beat, since / US, seen / US, holders.get(name.decode(), 0), now / US))
        return found

    async def holders(self, job: str | None = None) -> dict[str, int]:
        number = None if job is None else await self._job_id(job)
        found: dict[str, int] = {}
        async for held in self._held():
            if number is None or held.job == number:
                found[held.worker] = found.get(held.worker, 0) + 1
        return found

    async def travelling(self, lane: str) -> dict[str, int]:
        place = await self._command("HGET", self._key("laneids"), lane)
        found: Counter[int] = Counter()
        async for held in self._held():
            if held.lane == place and held.worker.startswith(TRANSIT):
                found[held.stream] += 1
        await self._know_streams(found)
        queues: Counter[str] = Counter()
        for stream, number in found.items():
            queues[self._queue_names[stream]] += number
        return dict(queues)

    async def visiting(self, job: str) -> str | None:
        number = await self._job_id(job)
        looked = 0
        async for held in self._held():
            looked += 1
            if held.job == number and not held.worker.startswith(TRANSIT):
                return _request(held.entry, job, "", held.priority).url
            if looked > MOST_LOOKED_AT:
                break  # thousands are leased, and hardly one of this job: that is no answer worth waiting for
        return None

    async def evict(self, workers: Collection[str]) -> int:
        names = list(workers)
        tokens = sorted([held.token async for held in self._held() if held.worker in names])
        taken = suspects = 0
        for some in _slices(tokens, LEASES_PER_CALL):
            got, suspects = await self._call("evict", [names, list(some), suspects])
            taken += got
        return taken

    async def check(self) -> list[str]:
        """The recount takes many reads, and others work meanwhile: what it finds counts only if it
        finds it every time."""
        wrong = await self._check()
        for _ in range(RECOUNTS):
            if not wrong:
                break
            again = set(await self._check())
            wrong = [sentence for sentence in wrong if sentence in again]
        return wrong

    # -- jobs that leave and arrive ---------------------------------------------------

    async def recall(self, job: str) -> int:
        number = await self._job_id(job)
        tokens = sorted([held.token async for held in self._held() if held.job == number])
        calls = [self._packed("recall", [number, list(some)]) for some in _slices(tokens, LEASES_PER_CALL)]
        return sum(await self._ask(calls))

    async def pack(self, job: str, part: Part, *, after: str = "", limit: int = 1000) -> Parcel:
        number = await self._job_id(job)
        match part:
            case "head":
                return await self._pack_head(job)
            case "spread" | "cursors":
                name = "spread" if part == "spread" else "cursor"
                flat = await self._command("HGETALL", self._key(name, number))
                pairs = zip(flat[::2], flat[1::2], strict=True)
                return Numbers(part=part, numbers={key.decode(): int(value) for key, value in pairs})
            case "lanes":
                return await self._pack_lanes(number, after, limit)
            case "delayed":
                return await self._pack_delayed(number, after, limit)
            case "waiting":
                return await self._pack_waiting(number, after, limit)
            case "letters":
                letters = await self.dead(Selection(job=job), after=int(after or 0), limit=limit)
                following = str(letters[-1].id) if len(letters) == limit else None
                return Letters(letters=letters, now=await self._time() / US, next=following)
            case "items":
                items = await self.items(job, after=int(after or 0), limit=limit)
                return Items(items=items, next=str(items[-1].seq) if len(items) == limit else None)
            case "keys":
                # A scan may give a key twice and never misses one that is there all the while.
                at, keys = await self._command("SSCAN", self._key("seen", number), after or 0, "COUNT", limit)
                return Keys(keys=keys, next=at.decode() if int(at) else None)

    async def unpack(self, job: str, parcel: Parcel) -> int:
        if isinstance(parcel, Head) and await self._head_arrives(job, parcel):
            return 1
        note = await self.noted(arriving_key(job))
        if note is None:
            raise not_arriving(job)
        arrival, number = arrival_of(note), await self._job_id(job)
        match parcel:
            case Head():
                return 0
            case Lanes(lanes=lanes):
                rows = [_lane_args(lane) for lane in lanes]
                calls = [
                    self._packed("arrive_lanes", [number, list(some)])
                    for some in _slices(rows, LEASES_PER_CALL)
                ]
            case Requests(requests=requests):
                slices = _slices(requests, ADDS_PER_CALL)
                calls = [self._requests_arrive(number, job, arrival, some) for some in slices]
            case Letters(letters=letters):
                now = microseconds(parcel.now)
                slices = _slices(letters, ADDS_PER_CALL)
                calls = [self._letters_arrive(number, job, arrival, some, now) for some in slices]
            case Items(items=items):
                calls = [
                    self._packed("arrive_items", [number, some[0].seq], *(item.body for item in some))
                    for some in _slices(items, LEASES_PER_CALL)
                ]
            case Numbers(part="spread"):
                key = self._key("spread", number)
                calls = [
                    _command(b"HSETNX", key, lane.encode(), b"%d" % n) for lane, n in parcel.numbers.items()
                ]
            case Numbers():
                key = self._key("cursor", number)
                calls = [
                    _command(b"HSET", key, sink.encode(), b"%d" % n) for sink, n in parcel.numbers.items()
                ]
            case Keys(keys=keys):
                key = self._key("seen", number)
                calls = [_command(b"SADD", key, *some) for some in _slices(keys, PAGE)]
            case _:
                raise no_such_parcel(parcel)
        return sum(await self._ask(calls))

    async def _time(self) -> int:
        now: int = (await self._call("open", [LAYOUT]))[2]
        return now

    async def _pack_head(self, job: str) -> Head:
        _, view = await self._job(job)
        now = await self._time() / US
        return Head(
            spec=view.spec,
            counts=view.counts,
            errors=view.errors,
            age=now - view.created_at,
            ended=None if view.finished_at is None else now - view.finished_at,
            begun=None if view.started_at is None else now - view.started_at,
            last=int(await self._command("HGET", self._key("meta"), "id") or 0),
            now=now,
        )

    async def _lanes_of(self, number: int, begin: bytes, size: int) -> AsyncIterator[list[_LaneRow]]:
        """A job's lanes from `begin` on, in the order in which they were made."""
        ids = sorted(await self._command("SMEMBERS", self._key("joblanes", number)))
        for some in _slices([id for id in ids if id >= begin], size):
            raws = await self._command("HMGET", self._key("lanes"), *some)
            yield [_LaneRow(id, raw) for id, raw in zip(some, raws, strict=True)]

    async def _pack_lanes(self, number: int, after: str, limit: int) -> Lanes:
        now = await self._time()
        begin = bytes.fromhex(after)
        async for rows in self._lanes_of(number, begin, limit + 1):
            await self._know_streams(line.stream for row in rows for line in row.lines)
            lanes = [row.packed(number, self._queue_names, now) for row in rows[:limit]]
            return Lanes(lanes=lanes, next=rows[limit].id.hex() if len(rows) > limit else None)
        return Lanes(lanes=())

    async def _pack_delayed(self, number: int, after: str, limit: int) -> Requests:
        """Stream by stream; a scan may give a member twice and never misses one that stays."""
        now = await self._time()
        at_stream, _, scan = after.partition(" ")
        streams = sorted(int(stream) for stream in await self._command("HKEYS", self._key("streams")))
        packed: list[Packed] = []
        for stream in streams:
            if stream < int(at_stream or 0):
                continue
            key = self._key("delayed", stream)
            at: Any = (scan or 0) if stream == int(at_stream or 0) else 0
            while True:
                at, flat = await self._command("ZSCAN", key, at, "COUNT", limit)
                pairs = zip(flat[::2], flat[1::2], strict=True)
                mine = [(m, float(due)) for m, due in pairs if struct.unpack_from("<d", m, 12)[0] == number]
                packed += await self._packed_delayed(number, stream, mine, now)
                if int(at) == 0:
                    break
                if len(packed) >= limit:
                    return Requests(requests=packed, next=f"{stream} {at.decode()}")
        return Requests(requests=packed)

    async def _packed_delayed(
        self, number: int, stream: int, members: list[tuple[bytes, float]], now: int
    ) -> list[Packed]:
        if not members:
            return []
        ids = sorted({member[:4] for member, _ in members})
        raws = await self._command("HMGET", self._key("lanes"), *ids)
        rows = [_LaneRow(id, raw) for id, raw in zip(ids, raws, strict=True)]
        lines = {line.id: line for row in rows for line in row.lines}
        found: list[tuple[_LineRow, bytes, float]] = []
        for member, due in members:
            line = lines[int(struct.unpack_from("<d", member, 4)[0])]
            found.append((line, member[20:], max(0.0, due - now) / US))
        return await self._packed_entries(number, found, now)

    async def _pack_waiting(self, number: int, after: str, limit: int) -> Requests:
        """Line by line: first what stands in front, by id, then the list, by place. Of a paused job
        nothing is taken, so places do not move."""
        now = await self._time()
        lane, at_line, at_kind, at = (after or " 0 f 0").split(" ")
        begun = (lane, int(at_line), at_kind)
        found: list[tuple[_LineRow, bytes, float]] = []
        async for rows in self._lanes_of(number, bytes.fromhex(lane), PAGE):
            places = [
                (place, line, int(at) if place == begun else 0, size)
                for row in rows
                for line in row.lines
                for kind, size in (("f", line.front), ("l", line.tail))
                if line.job == number and size and (place := (row.id.hex(), line.id, kind)) >= begun
            ]
            while places:
                left = limit - len(found)
                # As many as can fill the piece, in one round trip.
                several = 1 + sum(total < left for total in accumulate(size for *_, size in places[:-1]))
                group, places = places[:several], places[several:]
                commands = [self._entries_command(*place[1:], at, left) for place, _, at, _ in group]
                for (place, line, at_first, _), entries in zip(group, await self._ask(commands), strict=True):
                    some = entries[: limit - len(found)]
                    found += [(line, entry, 0.0) for entry in some]
                    if len(found) >= limit:
                        reached = _id_of(some[-1]) if place[2] == "f" else at_first + len(some)
                        packed = await self._packed_entries(number, found, now)
                        return Requests(requests=packed, next=f"{place[0]} {line.id} {place[2]} {reached}")
        return Requests(requests=await self._packed_entries(number, found, now))

    def _entries_command(self, line: int, kind: str, begin: int, size: int) -> bytes:
        if kind == "l":
            return _command(b"LRANGE", self._key("line", line), b"%d" % begin, b"%d" % (begin + size - 1))
        words = (b"(%d" % begin, b"+inf", b"BYSCORE", b"LIMIT", b"0", b"%d" % size)
        return _command(b"ZRANGE", self._key("front", line), *words)

    async def _packed_entries(
        self, number: int, found: list[tuple[_LineRow, bytes, float]], now: int
    ) -> list[Packed]:
        """Entries as they travel, with what is left of their ttl."""
        await self._know_streams({line.stream for line, _, _ in found})
        with_ttl = [(line.stream, _id_of(entry)) for line, entry, _ in found if entry[11] & _TTL]
        calls = [_command(b"ZSCORE", self._key("expiring", stream), b"%d" % id) for stream, id in with_ttl]
        ends = dict(zip(with_ttl, await self._ask(calls), strict=True))
        job = self._job_names[number]
        packed: list[Packed] = []
        for line, entry, delay in found:
            id, _, crashes, *_ = _HEAD.unpack_from(entry)
            request = _request(entry, job, self._queue_names[line.stream], line.priority)
            end = ends.get((line.stream, int(id)))
            if delay or end is not None:
                ttl = None if end is None else max(0.0, float(end) - now) / US
                request = msgspec.structs.replace(request, delay=delay, ttl=ttl)
            packed.append(Packed(int(id), request, crashes))
        return packed

    async def _head_arrives(self, job: str, head: Head) -> bool:
        names = ("known", "refused", "done", "skipped", "dead", "expired", "cancelled", "retried", "stale")
        counters = {name: getattr(head.counts, name) for name in names}
        counters["added"] = head.counts.added - head.counts.live
        ended: int | bool = False if head.ended is None else microseconds(head.ended)
        values = [
            *(job, *_spec_args(head.spec), counters, head.errors, microseconds(head.age), ended),
            *(head.last, arriving_key(job), microseconds(FOREVER)),
            False if head.begun is None else microseconds(head.begun),
        ]
        return bool(await self._call("arrive", values, head_note(head)))

    def _requests_arrive(self, number: int, job: str, arrival: Arrival, packed: Sequence[Packed]) -> bytes:
        lanes: dict[str, int] = {}
        kinds: dict[tuple[str, int], int] = {}
        lane: list[int] = []
        kind: list[int] = []
        extra: dict[int, tuple[int, int | bool]] = {}
        keys: list[bytes] = []
        entries: list[bytes] = []
        for place, one in enumerate(packed, 1):
            request = one.request
            lane.append(lanes.setdefault(urls.lane_of(request.url), len(lanes) + 1))
            kind.append(kinds.setdefault((request.queue, request.priority), len(kinds) + 1))
            ttl: int | bool = False if request.ttl is None else microseconds(request.ttl)
            if request.delay > 0 or ttl is not False:
                extra[place] = (microseconds(request.delay), ttl)
            keys.append(urls.key(job, request.url, request.method, request.body))
            flags = _PLAIN if ttl is False else _TTL
            entries.append(struct.pack("<d", arrival.base + one.id) + _tail(request, flags, one.crashes))
        values = [number, list(lanes), lane, list(kinds), kind, extra or False]
        return self._packed("arrive_requests", values, *keys, *entries)

    def _letters_arrive(
        self, number: int, job: str, arrival: Arrival, letters: Sequence[DeadLetter], now: int
    ) -> bytes:
        rows: list[Any] = []
        keys: list[bytes] = []
        entries: list[bytes] = []
        for letter in letters:
            request = letter.request
            since = microseconds(letter.ended_at) - now
            why = _failure(letter.failure)
            rows.append(
                [
                    letter.state,
                    since,
                    request.queue,
                    request.priority,
                    letter.lane,
                    *why,
                    _text(letter.failure.worker),
                    arrival.late(letter),
                ]
            )
            keys.append(urls.key(job, request.url, request.method, request.body))
            entries.append(struct.pack("<d", arrival.base + letter.id) + _tail(request, _PLAIN))
        return self._packed("arrive_letters", [number, rows], *keys, *entries)

    # -- calls ------------------------------------------------------------------------

    def _packed(self, verb: str, values: Any, *more: bytes) -> bytes:
        clock = b"" if self._clock is None else b"%d" % microseconds(self._clock())
        return _command(b"EVALSHA", _SHA, b"1", self._prefix, verb.encode(), clock, _pack(values), *more)

    async def _call(self, verb: str, values: Any, *more: bytes) -> Any:
        [reply] = await self._ask([self._packed(verb, values, *more)])
        return reply

    async def _walk(self, verb: str, values: list[Any]) -> None:
        """An order that goes through the lanes of a job, some in each call."""
        cursor = "0"
        while (cursor := (await self._call(verb, [*values, cursor])).decode()) != "0":
            pass

    async def _command(self, *words: bytes | str | int) -> Any:
        """A plain command. Any: what it answers is known to the command, not to the types."""
        [reply] = await self._ask([_command(*map(_word, words))])
        return reply

    async def _ask(self, commands: Iterable[bytes]) -> list[Any]:
        """Send commands, answer their replies in order. Goes on when the caller is cancelled."""
        task = asyncio.create_task(self._exchange(commands))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: then nobody else looks

    async def _exchange(self, commands: Iterable[bytes]) -> list[Any]:
        async with self._lock:
            try:
                connection = await self._connected()
                sent: list[bytes] = []
                replies: list[Any] = []
                for command in commands:
                    if len(sent) - len(replies) >= WINDOW:
                        replies.append(await _reply(connection))
                    await connection.send_packed_command(command, check_health=False)
                    sent.append(command)
                while len(replies) < len(sent):
                    replies.append(await _reply(connection))
                lost = [i for i, reply in enumerate(replies) if isinstance(reply, errors.NoScriptError)]
                if lost:
                    # Somebody flushed the scripts, or a replica took over: nothing of these ran.
                    await self._load(connection)
                    for place in lost:
                        await connection.send_packed_command(sent[place], check_health=False)
                        replies[place] = await _reply(connection)
            except BaseException as error:
                await self._drop()
                if isinstance(error, errors.RedisError | OSError | TimeoutError):
                    self._translate(error)
                raise
            self._used = asyncio.get_running_loop().time()
        for reply in replies:
            if isinstance(reply, errors.ResponseError):
                self._translate(reply)
        return replies

    async def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._connection is not None and loop.time() - self._used > IDLE:
            try:
                await self._connection.send_command("PING", check_health=False)
                await self._connection.read_response()
            except (errors.RedisError, OSError, TimeoutError):
                await self._drop()
        if self._connection is None:
            connection = self._connection = self._connect()
            await connection.connect()
            if not self._welcome:
                # A server that wants a password answers a long script by closing the connection.
                with suppress(errors.NoPermissionError):
                    await connection.send_command("PING", check_health=False)
                    await connection.read_response()
            await self._load(connection)
        return self._connection

    async def _load(self, connection: Any) -> None:
        await connection.send_command("SCRIPT LOAD", _SCRIPT, check_health=False)
        await connection.read_response()

    async def _drop(self, *, gently: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(errors.RedisError):
                await connection.disconnect(nowait=not gently)

    def _translate(self, error: BaseException) -> NoReturn:
        """What Redis says becomes what a person can use. Its own words may hold the address with
        the password only in connection errors; those are told by their kind."""
        text = str(error)
        if not self._welcome and isinstance(error, errors.AuthenticationError):
            raise FrontierError(
                f"Redis at {self.shown} needs a password",
                hint="redis://:password@host:port/0; redis:// alone takes REDIS_HOST and REDIS_PASSWORD",
            ) from None
        if isinstance(error, errors.AuthenticationError | errors.NoPermissionError) or "NOAUTH" in text:
            raise FrontierError(
                f"{self.shown} refuses the user or password",
                hint="redis://user:password@host:port/0; the user needs scripts and keys of its prefix",
            ) from None
        if isinstance(error, errors.OutOfMemoryError) or text.startswith("OOM"):
            raise FrontierFull(
                f"{self.shown} has no memory left",
                hint="raise maxmemory, or let finished jobs be exported and removed: nothing is lost",
            ) from None
        if "MISCONF" in text:
            raise FrontierFull(
                f"{self.shown} cannot write to its disk", hint="free some space on the server's disk"
            ) from None
        if isinstance(error, errors.ReadOnlyError):
            raise FrontierError(
                f"{self.shown} is a replica", hint="give the address of the primary"
            ) from None
        if isinstance(error, errors.BusyLoadingError):
            raise FrontierUnreachable(
                f"{self.shown} is still loading its data",
                hint="wait until it has started",
                server=self.shown,
            ) from None
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise FrontierError(
                f"the certificate of {self.shown} is not trusted",
                hint="name its authority: rediss://host:port/0?ssl_ca_certs=/path/to/ca.pem",
            ) from None
        if isinstance(error, errors.InvalidResponse):
            raise FrontierError(
                f"{self.shown} does not answer as Redis does", hint=_WRONG_PORT[self._tls]
            ) from None
        if isinstance(error, errors.ConnectionError | errors.TimeoutError | OSError | TimeoutError):
            self._mute = True
            raise FrontierUnreachable(
                f"{self.shown} does not answer",
                hint="check that the server runs and the address is right",
                server=self.shown,
            ) from None
        raise FrontierError(f"{self.shown}: {text}", hint="`shoal doctor` looks closer") from error

    async def _listen(self) -> None:
        """Ring the bell for each message, until cancelled. Without a connection sleepers poll."""
        while not self._closing:
            connection = self._connect()
            try:
                await connection.connect()
                await connection.send_command("SUBSCRIBE", self._key("wake"), check_health=False)
                await connection.read_response()
                self._listening.set()
                while not self._closing:
                    self._ring()
                    await connection.read_response(timeout=math.inf)
            except (errors.RedisError, OSError, TimeoutError):
                await asyncio.sleep(1.0)
            finally:
                self._listening.clear()
                await connection.disconnect(nowait=True)

    def _ring(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    def _key(self, name: str, number: int | None = None) -> bytes:
        tail = "" if number is None else f":{number}"
        return self._prefix + f"{name}{tail}".encode()

    # -- names and numbers ------------------------------------------------------------

    async def _know(self, names: Collection[str], *, must: bool = True) -> None:
        """Learn the numbers of jobs; they never change."""
        missing = [name for name in names if name not in self._job_ids]
        if not missing:
            return
        numbers = await self._command("HMGET", self._key("jobids"), *missing)
        for name, number in zip(missing, numbers, strict=True):
            if number is not None:
                self._job_ids[name] = int(number)
                self._job_names[int(number)] = name
            elif must:
                raise NoSuchJob(name)

    async def _job_id(self, job: str) -> int:
        await self._know({job})
        return self._job_ids[job]

    async def _know_numbers(self, numbers: Iterable[int]) -> None:
        missing = [number for number in numbers if number not in self._job_names]
        if not missing:
            return
        for raw, number in zip(
            await self._command("HMGET", self._key("jobs"), *missing), missing, strict=True
        ):
            name = _unpack(raw)[0]
            self._job_ids[name] = number
            self._job_names[number] = name

    async def _know_streams(self, numbers: Iterable[int]) -> None:
        missing = [number for number in numbers if number not in self._queue_names]
        if missing:
            raws = await self._command("HMGET", self._key("streams"), *missing)
            self._queue_names.update(
                (number, _unpack(raw)[0]) for number, raw in zip(missing, raws, strict=True)
            )

    # -- rows -------------------------------------------------------------------------

    def _rows(self, requests: Iterable[Request]) -> _Rows:
        """Requests as the script takes them: places in small tables, and their bytes."""
        lanes: dict[str, int] = {}
        kinds: dict[tuple[int, str, int], int] = {}
        lane: list[int] = []
        kind: list[int] = []
        extra: dict[int, tuple[int, int | bool]] = {}
        keys: list[bytes] = []
        tails: list[bytes] = []
        for request in requests:
            name = urls.lane_of(request.url)
            lane.append(lanes.setdefault(name, len(lanes) + 1))
            sort = (self._job_ids[request.job], request.queue, request.priority)
            kind.append(kinds.setdefault(sort, len(kinds) + 1))
            keys.append(urls.key(request.job, request.url, request.method, request.body))
            ttl: int | bool = False
            if request.ttl is not None:
                ttl = microseconds(request.ttl)
            if request.delay > 0 or ttl is not False:
                extra[len(lane)] = (max(0, microseconds(request.delay)), ttl)
            tails.append(_tail(request, _PLAIN if ttl is False else _TTL))
        rows = {
            "kinds": list(kinds),
            "lanes": list(lanes),
            "lane": lane,
            "kind": kind if len(kinds) > 1 else False,
            "extra": extra or False,
        }
        return rows, keys, tails

    def _settle_call(self, verdicts: Sequence[Verdict]) -> bytes:
        kinds: list[int] = []
        items: list[bytes] = []
        item_counts: list[int] = []
        found: list[Request] = []
        found_counts: list[int] = []
        failures: dict[int, tuple[int, str, str]] = {}
        for place, verdict in enumerate(verdicts, 1):
            some: Sequence[bytes] = ()
            links: Sequence[Request] = ()
            if isinstance(verdict, Done):
                kinds.append(1 if verdict.skipped else 0)
                some, links = verdict.items, verdict.found
            elif isinstance(verdict, Retry):
                kinds.append(2)
                failures[place] = (microseconds(verdict.after), *_failure(verdict.failure))
            elif isinstance(verdict, Dead):
                kinds.append(5 if verdict.failure.error == EXPIRED else 3)
                failures[place] = (0, *_failure(verdict.failure))
            else:
                kinds.append(4)
            item_counts.append(len(some))
            items += some
            found_counts.append(len(links))
            found += links
        rows, keys, tails = self._rows(found)
        jobs = [self._job_ids.get(verdict.lease.request.job, 0) for verdict in verdicts]
        tokens = [verdict.lease.token for verdict in verdicts]
        values = [tokens, kinds, jobs, item_counts, found_counts, failures, rows]
        return self._packed("settle", values, *keys, *tails, *items)

    async def _leases_of(self, reply: Sequence[Any], lasting: int) -> list[Lease]:
        token, until, groups = reply[2], (reply[0] + lasting) / US, reply[5]
        await self._know_numbers({group[1] for group in groups})
        await self._know_streams({group[2] for group in groups})
        leases: list[Lease] = []
        for group in groups:
            lane = group[0].decode()
            job, queue, priority = self._job_names[group[1]], self._queue_names[group[2]], group[3]
            for entry in group[4:]:
                request = _request(entry, job, queue, priority)
                leases.append(Lease(token, request, lane, until, expires=_expires(entry)))
                token += 1
        return leases

    async def _job(self, name: str) -> tuple[int, Job]:
        reply = await self._call("job", [name])
        if not reply:
            raise NoSuchJob(name)
        number, raw, spec, tally = reply
        self._job_ids[name] = number
        self._job_names[number] = name
        row = dict(zip(_JOB, _unpack(raw), strict=False))  # the last came later: it may not be there
        counts = Counts(**{field: row[field] for field in Counts.__struct_fields__ if field != "waiting"})
        waiting = counts.live - counts.leased - counts.delayed
        counts = msgspec.structs.replace(counts, waiting=waiting)
        tallied = sorted(
            ((tally[i].decode(), int(tally[i + 1])) for i in range(0, len(tally), 2)),
            key=lambda pair: (-pair[1], pair[0]),
        )
        finished = row["finished"] / US if row["finished"] is not False else None
        return number, Job(
            name,
            msgspec.json.decode(spec, type=JobSpec),
            _STATES[row["state"]],
            counts,
            dict(tallied),
            row["created"] / US,
            finished,
            row["started"] / US if row.get("started") else None,
        )

    async def _lane_rows(self) -> AsyncIterator[_LaneRow]:
        async for id, raw in self._scan("lanes"):
            yield _LaneRow(id, raw)

    async def _held(self) -> AsyncIterator[_Held]:
        async for token, blob in self._scan("lease"):
            yield _Held(int(token), blob)

    async def _scan(self, name: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """A hash, page by page; what stays all the while is seen once."""
        seen: set[bytes] = set()
        at: Any = 0
        while True:
            at, flat = await self._command("HSCAN", self._key(name), at, "COUNT", PAGE)
            for place in range(0, len(flat), 2):
                if flat[place] not in seen:
                    seen.add(flat[place])
                    yield flat[place], flat[place + 1]
            if int(at) == 0:
                return

    async def _letters(self, which: Selection, after: int = 0) -> AsyncIterator[DeadLetter]:
        """Dead letters in the order of their ids, page by page."""
        ids: Iterable[int] | None = which.ids
        if ids is None and which.since is not None:
            begin = b"(%d" % microseconds(which.since)
            ids = map(int, await self._command("ZRANGE", self._key("deadat"), begin, "+inf", "BYSCORE"))
        if ids is not None:
            chosen = sorted(id for id in set(ids) if id > after)
            for some in _slices(chosen, PAGE):
                for letter in await self._letters_of(list(some)):
                    if _matches(letter, which):
                        yield letter
            return
        while True:
            page = await self._command(
                "ZRANGE", self._key("deadids"), b"(%d" % after, "+inf", "BYSCORE", "LIMIT", 0, PAGE
            )
            if not page:
                return
            for letter in await self._letters_of([int(id) for id in page]):
                if _matches(letter, which):
                    yield letter
            after = int(page[-1])

    async def _letters_of(self, ids: list[int]) -> list[DeadLetter]:
        raws = await self._command("HMGET", self._key("dead"), *ids)
        rows: list[tuple[int, list[Any], bytes]] = []
        for id, raw in zip(ids, raws, strict=True):
            if raw is not None:
                size = int.from_bytes(raw[:2], "little")
                rows.append((id, _unpack(raw[2 : 2 + size]), raw[2 + size :]))
        await self._know_numbers({head[2] for _, head, _ in rows})
        await self._know_streams({head[3] for _, head, _ in rows})
        letters: list[DeadLetter] = []
        for id, (state, at, job, stream, priority, lane, *why), entry in rows:
            request = _request(entry, self._job_names[job], self._queue_names[stream], priority)
            if request.ttl is not None:
                # Brought back it may wait as long as it needs.
                request = msgspec.structs.replace(request, ttl=None)
            letters.append(DeadLetter(id, request, lane, Failure(*why), at / US, state))
        return letters

    async def _entries(self, line: _LineRow) -> AsyncIterator[bytes]:
        """What waits in a line, in order; as it is while being read."""
        front = await self._command("ZRANGE", self._key("front", line.id), 0, -1)
        at = 0
        while some := await self._command("LRANGE", self._key("line", line.id), at, at + PAGE - 1):
            for entry in some:
                while front and _id_of(front[0]) < _id_of(entry):
                    yield front.pop(0)
                yield entry
            at += PAGE
        for entry in front:
            yield entry

    async def _find(self, url: str, name: str) -> Finding:
        number, job = await self._job(name)
        key = urls.key(name, url)
        if not await self._command("SISMEMBER", self._key("seen", number), key):
            return Finding(name, "unknown", job_state=job.state)
        id = await self._command("HGET", self._key("laneids"), urls.lane_of(url))
        row = _LaneRow(id, await self._command("HGET", self._key("lanes"), id)) if id is not None else None
        lane = row.view() if row else None
        lines = [line for line in row.lines if line.job == number] if row else []
        await self._know_streams(line.stream for line in lines)
        for line in lines:
            queue = self._queue_names[line.stream]
            ahead = 0
            async for entry in self._entries(line):
                request = _request(entry, name, queue, line.priority)
                if request.url == url:
                    ready = lane.ready_at if lane else None
                    return Finding(name, "waiting", request, lane, job.state, ahead, ready)
                ahead += 1
            flat = await self._command("ZRANGE", self._key("delayed", line.stream), 0, -1, "WITHSCORES")
            for member, at in zip(flat[::2], flat[1::2], strict=True):
                if struct.unpack_from("<d", member, 4)[0] != line.id:
                    continue
                request = _request(member[20:], name, queue, line.priority)
                if request.url == url:
                    return Finding(name, "delayed", request, lane, job.state, ready_at=float(at) / US)
        async for held in self._held():
            if held.job != number:
                continue
            await self._know_streams([held.stream])
            request = _request(held.entry, name, self._queue_names[held.stream], held.priority)
            if request.url == url:
                until = await self._command("ZSCORE", self._key("ends", held.stream), held.token)
                seconds = float(until) / US if until is not None else None
                return Finding(name, "leased", request, lane, job.state, worker=held.worker, until=seconds)
        async for letter in self._letters(Selection(job=name)):
            if letter.request.url == url:
                failure = letter.failure
                return Finding(name, letter.state, letter.request, lane, job.state, failure=failure)
        return Finding(name, "done", None, lane, job.state)

    # -- recount ----------------------------------------------------------------------

    async def _check(self) -> list[str]:
        wrong: list[str] = []
        _, _, now = await self._call("open", [LAYOUT])
        where: dict[int, str] = {}
        live: dict[int, int] = {}
        waiting: dict[int, int] = {}
        busy: dict[bytes, int] = {}

        def place(entry: bytes, state: str, job: int) -> None:
            id = _id_of(entry)
            if id in where:
                wrong.append(f"request {id} is {where[id]} and {state}")
            where[id] = state
            live[job] = live.get(job, 0) + 1

        ends: dict[int, set[int]] = {}
        async for held in self._held():
            busy[held.lane] = busy.get(held.lane, 0) + 1
            place(held.entry, "leased", held.job)
            ends.setdefault(held.stream, set()).add(held.token)
        rows = [row async for row in self._lane_rows()]
        jobs_of_lines = {line.id: line.job for row in rows for line in row.lines}
        streams = [int(stream) for stream in await self._command("HKEYS", self._key("streams"))]
        turns: dict[bytes, set[tuple[int, int]]] = {}
        for stream in streams:
            tokens = {int(t) for t in await self._command("ZRANGE", self._key("ends", stream), 0, -1)}
            # By name: while others work, others differ every time.
            wrong += [f"lease {token} has no end" for token in sorted(ends.get(stream, set()) - tokens)]
            wrong += [
                f"an end of lease {token}, which is not held"
                for token in sorted(tokens - ends.get(stream, set()))
            ]
            for member in await self._command("ZRANGE", self._key("delayed", stream), 0, -1):
                line = int(struct.unpack_from("<d", member, 4)[0])
                if line in jobs_of_lines:
                    place(member[20:], "delayed", jobs_of_lines[line])
                else:
                    wrong.append(f"a request is delayed in line {line}, which does not exist")
            flat = await self._command("ZRANGE", self._key("turn", stream), 0, -1, "WITHSCORES")
            for lane, at in zip(flat[::2], flat[1::2], strict=True):
                turns.setdefault(lane, set()).add((stream, int(float(at))))
            for kind, name in (("x", "expiring"), ("e", "ends"), ("d", "delayed")):
                head = await self._command("ZRANGE", self._key(name, stream), 0, 0, "WITHSCORES")
                due = await self._command("ZSCORE", self._key("due"), f"{kind}{stream}")
                if head and (due is None or float(due) > float(head[1])):
                    wrong.append(f"nobody will look at {name} of stream {stream} in time")
        for row in rows:
            name = row.name
            if row.busy != busy.get(row.id, 0):
                wrong.append(f"lane {name} counts {row.busy} leases, there are {busy.get(row.id, 0)}")
            for line_row in row.lines:
                tail = await self._command("LLEN", self._key("line", line_row.id))
                front = await self._command("ZCARD", self._key("front", line_row.id))
                if (tail, front) != (line_row.tail, line_row.front):
                    wrong.append(f"lane {name} miscounts a line: {line_row}, there are {tail} and {front}")
                waiting[line_row.stream] = waiting.get(line_row.stream, 0) + tail + front
                async for entry in self._entries(line_row):
                    place(entry, "waiting", line_row.job)
            streams_here = {line.stream for line in row.lines if not line.off and line.waiting}
            if streams_here and row.busy < row.width and not row.paused and row.at is None:
                wrong.append(f"lane {name} has work and a free slot but is not scheduled")
            planned = set() if row.at is None else {(stream, row.at) for stream in streams_here}
            if planned != turns.pop(row.id, set()):
                wrong.append(f"lane {name} stands elsewhere in the turns than it thinks")
            if row.at is not None and row.at > max(now, row.ready):
                wrong.append(f"lane {name} is scheduled later than it is ready")
        wrong += [f"turns of lane {lane.hex()}, which does not exist" for lane in turns]
        flat = await self._command("HGETALL", self._key("waiting"))
        counted = {int(key): int(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}
        if counted != {stream: n for stream, n in waiting.items() if n}:
            wrong.append(f"streams count {counted} waiting, there are {waiting}")
        async for letter in self._letters(Selection()):
            if letter.id in where:
                wrong.append(f"request {letter.id} is {where[letter.id]} and {letter.state}")
        async for raw, record in self._scan("jobs"):
            job = dict(zip(_JOB, _unpack(record), strict=True))
            left = job["added"] - job["done"] - job["dead"] - job["expired"] - job["cancelled"]
            if left != live.get(int(raw), 0):
                wrong.append(f"job {job['name']}: live {left}, there are {live.get(int(raw), 0)}")
            logged = await self._command("LLEN", self._key("items", int(raw)))
            if logged != job["items"]:
                wrong.append(f"job {job['name']} counts {job['items']} items, its log has {logged}")
        return wrong


async def migrate(url: str) -> tuple[int, int]:
    """Mark an empty server as ours, as opening does. Answers the layout of the keys before (0: there
    were none) and after; there has been one layout so far, and another one is refused."""
    frontier = RedisFrontier(url, None)
    try:
        before = await frontier._command("HGET", frontier._key("meta"), "layout")
    finally:
        await frontier.close()
    await (await RedisFrontier.open(url)).close()
    return int(before or 0), LAYOUT


class _LineRow(msgspec.Struct, array_like=True):
    id: int
    job: int
    stream: int
    priority: int
    vt: int
    off: bool
    tail: int
    front: int

    @property
    def waiting(self) -> int:
        return self.tail + self.front


class _LaneRow:
    """A lane as the script stores it (`lane_bytes`)."""

    def __init__(self, id: bytes, raw: bytes) -> None:
        row = _unpack(raw)
        self.id = id
        self.name: str = row[0]
        self.gap: int = row[1]
        self.width: int = row[2]
        self.burst: int = row[3]
        self.floor: int = row[4]
        self.tat: int = row[5]
        self.blocked: int = row[6]
        self.busy: int = row[7]
        self.vt: int = row[8]
        self.pinned: bool = row[9]
        self.paused: bool = row[10]
        self.at: int | None = None if row[11] is False else row[11]
        self.lines = [_LineRow(*row[place : place + 8]) for place in range(12, len(row), 8)]

    @property
    def pace_gap(self) -> int:
        return self.gap if self.pinned else max(self.gap, self.floor)

    @property
    def ready(self) -> int:
        return max(self.tat - self.burst * self.pace_gap, self.blocked)

    def packed(self, job: int, queues: dict[int, str], now: int) -> PackedLane:
        return PackedLane(
            self.name,
            self.gap / US,
            self.width,
            self.burst,
            self.floor / US,
            self.pinned,
            self.paused,
            max(0, self.tat - now) / US,
            max(0, self.blocked - now) / US,
            tuple(
                PackedLine(queues[line.stream], line.priority, credit(line.vt - self.vt, line.priority))
                for line in self.lines
                if line.job == job
            ),
        )

    def view(self) -> Lane:
        return Lane(
            self.name,
            self.pace_gap / US,
            self.width,
            self.burst,
            self.floor / US,
            self.pinned,
            self.paused,
            self.busy,
            sum(line.waiting for line in self.lines),
            None if self.at is None else max(self.at, self.ready) / US,
            self.blocked / US,
        )


class _Held:
    """A lease as the script stores it."""

    __slots__ = ("entry", "job", "lane", "line", "priority", "stream", "token", "worker")

    def __init__(self, token: int, blob: bytes) -> None:
        lane, line, stream, job, priority, length = _LEASE.unpack_from(blob)
        end = _LEASE.size + length
        self.token = token
        self.lane: bytes = lane
        self.line = int(line)
        self.stream = int(stream)
        self.job = int(job)
        self.priority: int = priority
        self.worker = blob[_LEASE.size : end].decode()
        self.entry = blob[end:]


async def _reply(connection: Any) -> Any:
    """One reply. An error that the server answered is a reply too: more may be under way."""
    try:
        return await connection.read_response(disable_decoding=True, disconnect_on_error=False)
    except errors.ResponseError as error:
        return error


def _command(*words: bytes) -> bytes:
    return b"".join([b"*%d\r\n" % len(words), *[b"$%d\r\n%b\r\n" % (len(word), word) for word in words]])


def _word(word: bytes | str | int) -> bytes:
    if isinstance(word, bytes):
        return word
    return word.encode() if isinstance(word, str) else b"%d" % word


def _slices(values: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _verdict_chunks(verdicts: Sequence[Verdict]) -> Iterable[list[Verdict]]:
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


def _lane_args(lane: PackedLane) -> list[Any]:
    return [
        *(lane.name, microseconds(lane.gap), lane.width, lane.burst, microseconds(lane.floor)),
        *(lane.pinned, lane.paused, microseconds(lane.rest), microseconds(lane.blocked)),
        [(line.queue, line.priority, line.ahead) for line in lane.lines],
    ]


def _tail(request: Request, flags: int, crashes: int = 0) -> bytes:
    """A request as an entry without its id: see `redis.lua`."""
    plain = not (
        request.label
        or request.data
        or request.headers
        or request.origin
        or request.hops
        or request.body
        or request.ttl is not None
        or request.method != "GET"
    )
    head = (min(request.attempt, 65535), crashes)
    if plain and request.depth < 65536:
        return _TAIL.pack(*head, flags, request.depth) + request.url.encode("utf-8", "surrogatepass")
    body = _pack(
        (
            *(request.url, request.depth, request.label, request.method, request.headers),
            *(request.body, request.data, request.origin, request.hops, request.ttl),
        )
    )
    return _TAIL.pack(*head, flags | _RICH, 0) + body


def _request(entry: bytes, job: str, queue: str, priority: int) -> Request:
    _, attempt, _, flags, depth = _HEAD.unpack_from(entry)
    if not flags & _RICH:
        url = entry[14:].decode("utf-8", "surrogatepass")
        return Request(url, job, "", queue, priority, depth, attempt)
    packed = entry[14:-8] if flags & _TIMED else entry[14:]
    url, depth, label, method, headers, body, data, origin, hops, *later = _unpack(packed)
    # The last came later: entries of an older release have none.
    ttl = later[0] if later else None
    return Request(
        *(url, job, label, queue, priority, depth, attempt, 0.0, ttl),
        *(method, headers, body, data, origin, hops),
    )


def _expires(entry: bytes) -> float | None:
    """When the ttl of a request that is leased runs out."""
    return float(struct.unpack("<d", entry[-8:])[0] / US) if entry[11] & _TIMED else None


def _id_of(entry: bytes) -> int:
    return int(_HEAD.unpack_from(entry)[0])


def _matches(letter: DeadLetter, which: Selection) -> bool:
    return (
        (which.job is None or letter.request.job == which.job)
        and (which.lane is None or letter.lane == which.lane)
        and (which.error is None or letter.failure.error == which.error)
        and (which.since is None or letter.ended_at > which.since)
    )


def _moment(at: int) -> float | None:
    if at >= 0:
        return at / US
    return None if at == -1 else math.inf


def _spec_args(spec: JobSpec) -> list[Any]:
    """A spec as the script takes it: JSON, what it must understand, the lanes of the start URLs."""
    pages: int | bool = False if spec.max_pages is None else spec.max_pages
    per_host: int | bool = False if spec.max_per_host is None else spec.max_per_host
    pace = [microseconds(spec.gap), spec.width, spec.apart, pages, per_host]
    return [_encode(spec).decode(), pace, sorted({urls.lane_of(url) for url in spec.start})]


def _failure(failure: Failure) -> tuple[str, str]:
    return _text(failure.error), _text(failure.message)


def _text(text: str) -> str:
    """Without lone surrogates, and short enough for the two bytes of a letter's length."""
    return text.encode("utf-8", "replace").decode()[:8000]


def _info(raw: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in raw.decode().splitlines())
    return {key: value for key, mark, value in pairs if mark}


def _shown(url: str) -> str:
    """An address for people: never with its password."""
    parts = urlsplit(url)
    host = unquote(parts.netloc.rpartition("@")[2])
    prefix = parse_qs(parts.query).get("prefix", [""])[0]
    return f"{parts.scheme}://{host}{parts.path}{f'?prefix={prefix}' if prefix else ''}"
