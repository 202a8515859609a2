"""Move a job from one frontier to another, where it goes on. Knows ports only.

Whatever dies when, the job can run in one place only:

1. The source job is paused, and a note there says where it goes and whether to resume it.
2. Nothing of it may be leased: visits under way end, or are taken back.
3. Everything is packed and unpacked; the target job stays paused. A piece that comes again changes
   nothing, so a copy that died is run again from the start.
4. The target is compared with the source. Only then the source job is cancelled, and after that the
   target job resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryFile
from typing import IO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal import urls
from shoal.errors import FrontierError, NoSuchJob, UsageError
from shoal.frontier.parcel import FOREVER, PARTS, Arrival, Head, Keys, Parcel, Part, arrival_of, arriving_key
from shoal.frontier.port import Backend
from shoal.model import Counts, Job, JobState

ROWS = 5_000
"""Requests in one piece: a transaction of a tenth of a second."""
ITEMS = 200
"""Items may be large: 100 kB each make 20 MB."""
KEYS = 20_000
LOCK_SECONDS = 30.0
PASSES = 5
"""How often URLs may be added to the job while it is being moved."""
_SAME = ("done", "skipped", "dead", "cancelled", "retried", "items")
"""Counters that a paused job with nothing leased does not change by itself."""

_encode = msgspec.json.Encoder().encode


class Moving(Struct, frozen=True):
    """What a frontier notes of a job that leaves, under `moving_key`."""

    to: str
    """The target as people may see it."""
    resume: bool
    """It ran before: it shall run there."""
    complete: bool = False
    """Everything has arrived and was compared."""


class Step(Struct, frozen=True):
    """How far a move is."""

    job: str
    part: Part | None
    """None: waiting for visits under way."""
    rows: int
    total: int
    held: int = 0
    """Visits under way."""


Watch = Callable[[Step], None]


class Moved(Struct, frozen=True):
    """A job that has arrived."""

    job: str
    state: JobState
    urls: int
    """Requests that wait or are delayed."""
    items: int
    known: int
    rows: int
    """Rows that this run brought; fewer than there are when an earlier run began it."""


def moving_key(job: str) -> str:
    return f"moving {job}"


async def moving(frontier: Backend, job: str) -> Moving | None:
    """Whether a job has left this frontier, or is about to."""
    note = await frontier.noted(moving_key(job))
    return None if not note else msgspec.json.decode(note, type=Moving)


async def movable(source: Backend, target: Backend, *, finished: bool = False) -> list[str]:
    """The jobs of a frontier that are not finished, oldest first, and those whose move was
    interrupted just before its end. `finished`: also those that are done."""
    found: list[str] = []
    before: float | None = None
    while page := await source.jobs(limit=500, before=before):
        for job in page:
            told = await moving(source, job.id)
            halfway = told is not None and await target.noted(arriving_key(job.id)) is not None
            left = told is not None and told.complete
            wanted = job.state is JobState.DONE if finished else False
            wanted = wanted or job.state in (JobState.RUNNING, JobState.PAUSED)
            if halfway or (wanted and not left):
                found.append(job.id)
        before = page[-1].created_at
    return found[::-1]


async def move(
    source: Backend,
    target: Backend,
    job: str,
    *,
    to: str,
    owner: str,
    gone: Callable[[str], bool] = lambda _holder: False,
    now: bool = False,
    watch: Watch = lambda _step: None,
) -> Moved:
    """Move a job. `to` names the target for people; `owner` is who moves, `gone` tells whether another
    owner is known to be dead. `now` takes back what is leased instead of waiting for it."""
    async with _alone(source, job, owner, gone):
        return await _Move(source, target, job, to, owner, watch).run(now)


class _Move:
    def __init__(self, source: Backend, target: Backend, job: str, to: str, owner: str, watch: Watch) -> None:
        self._source = source
        self._target = target
        self._job = job
        self._to = to
        self._owner = owner
        self._watch = watch
        self._rows = 0
        self._passed = self._total = 0

    async def run(self, now: bool) -> Moved:
        source, job = self._source, self._job
        view = await source.job(job)
        told = await moving(source, job)
        over = view.state in (JobState.CANCELLED, JobState.DONE)
        if not (told and told.complete and told.to == self._to and over):
            if view.state is JobState.CANCELLED:
                left = f"it has moved to {told.to}" if told and told.complete else "it is cancelled"
                raise UsageError(f"job {job!r} cannot be moved: {left}", hint="`shoal jobs` lists the others")
            resume = told.resume if told else view.state is not JobState.PAUSED
            told = Moving(self._to, resume)
            await source.note(moving_key(job), _encode(told), FOREVER)
            await source.pause(job)
            await self._empty_hands(now)
            await self._transfer()
            told = replace(told, complete=True)
            await source.note(moving_key(job), _encode(told), FOREVER)
            await source.cancel(job)
        return await self._set_off(told)

    async def _empty_hands(self, now: bool) -> None:
        """Wait until nothing is leased. A claim for nothing takes back what has run out."""
        while True:
            if now:
                await self._source.recall(self._job)
            await self._source.claim(0, worker=self._owner, lease=1.0)
            held = (await self._source.job(self._job)).counts.leased
            if not held:
                return
            self._watch(Step(self._job, None, 0, 0, held))
            await self._keep_lock()
            await asyncio.sleep(0.2)

    async def _transfer(self) -> None:
        for _ in range(PASSES):
            head = await self._source.pack(self._job, "head")
            assert isinstance(head, Head)
            await self._refuse_strangers(head)
            self._passed, self._total = 0, _total(head.counts)
            with TemporaryFile() as spool:
                await self._set_keys_aside(spool)
                for part in PARTS[:-1]:
                    await self._carry(part)
                await self._bring_keys(spool)
            if await self._complete():
                return
        raise FrontierError(
            f"job {self._job!r} keeps changing while it is moved", hint="stop whoever adds to it, then again"
        )

    async def _refuse_strangers(self, head: Head) -> None:
        """The target must not have another job of this name, nor an older state of this one."""
        arrival = await self._arrival()
        if arrival is None:
            with suppress(NoSuchJob):
                await self._target.job(self._job)
                raise UsageError(
                    f"there is a job {self._job!r} at {self._to} already",
                    hint="move it to another file, ?schema= or ?prefix=",
                )
            return
        if not _same(arrival.head.counts, head.counts):
            raise UsageError(
                f"job {self._job!r} went on here after a part of it was copied to {self._to}",
                hint=f"`shoal cancel {self._job}` there, and move it to another file, ?schema= or ?prefix=",
            )

    async def _set_keys_aside(self, spool: IO[bytes]) -> None:
        """Read the keys first, on disk: 16 MB for a million. The key of a URL that is added later, while
        the requests are read, must not arrive without its request: it would never be visited."""
        after: str | None = ""
        while after is not None:
            parcel = await self._source.pack(self._job, "keys", after=after, limit=KEYS)
            assert isinstance(parcel, Keys)
            spool.write(b"".join(parcel.keys))
            after = parcel.next
            await self._keep_lock()

    async def _bring_keys(self, spool: IO[bytes]) -> None:
        spool.seek(0)
        while raw := spool.read(KEYS * urls.KEY_SIZE):
            keys = [raw[at : at + urls.KEY_SIZE] for at in range(0, len(raw), urls.KEY_SIZE)]
            await self._arrived("keys", Keys(keys=keys))

    async def _carry(self, part: Part) -> None:
        after: str | None = ""
        limit = ITEMS if part == "items" else ROWS
        while after is not None:
            parcel = await self._source.pack(self._job, part, after=after, limit=limit)
            after = parcel.next
            await self._arrived(part, parcel)

    async def _arrived(self, part: Part, parcel: Parcel) -> None:
        fresh = await self._target.unpack(self._job, parcel)
        if part not in ("head", "lanes"):
            self._rows += fresh
            self._passed += _size(parcel)
        self._watch(Step(self._job, part, self._passed, self._total))
        await self._keep_lock()

    async def _complete(self) -> bool:
        """Whether all is there. False: URLs were added meanwhile, go once more."""
        here, there = await self._source.job(self._job), await self._target.job(self._job)
        arrival = await self._arrival()
        assert arrival is not None
        if here.state is JobState.RUNNING or not _same(arrival.head.counts, here.counts):
            raise UsageError(
                f"job {self._job!r} went on while it was moved",
                hint="let nobody resume it, or change its dead letters, until it has arrived",
            )
        if there.state not in (JobState.PAUSED, JobState.DONE):
            raise UsageError(
                f"somebody made job {self._job!r} {there.state.value} at {self._to} while it arrived",
                hint="move it to another file, ?schema= or ?prefix=",
            )
        if not _same(here.counts, there.counts) or there.counts.added > here.counts.added:
            raise FrontierError(
                f"job {self._job!r} did not arrive whole at {self._to}; here it is paused and intact",
                hint="`shoal doctor` at both ends, then again",
            )
        return here.counts.added == there.counts.added

    async def _set_off(self, told: Moving) -> Moved:
        job, target = self._job, self._target
        if await self._arrival() is None:
            raise UsageError(f"job {job!r} has moved to {told.to}", hint="it is worked on there")
        view = await target.job(job)
        if told.resume or not view.counts.live:
            view = await target.resume(job)
        await target.note(arriving_key(job), b"", 0.0)
        return _moved(view, self._rows)

    async def _arrival(self) -> Arrival | None:
        note = await self._target.noted(arriving_key(self._job))
        return arrival_of(note) if note else None

    async def _keep_lock(self) -> None:
        holder = await self._source.lock(_lock(self._job), self._owner, LOCK_SECONDS)
        if holder != self._owner:
            raise UsageError(f"job {self._job!r} is being moved by {holder}", hint="wait for it")


@asynccontextmanager
async def _alone(frontier: Backend, job: str, owner: str, gone: Callable[[str], bool]) -> AsyncIterator[None]:
    """Two must not move one job to two places."""
    name = _lock(job)
    holder = await frontier.lock(name, owner, LOCK_SECONDS)
    if holder != owner and gone(holder):
        await frontier.unlock(name, holder)
        holder = await frontier.lock(name, owner, LOCK_SECONDS)
    if holder != owner:
        raise UsageError(
            f"job {job!r} is being moved by {holder}",
            hint=f"wait for it; {LOCK_SECONDS:.0f} s after it died it can be run again",
        )
    try:
        yield
    finally:
        with suppress(FrontierError):
            await frontier.unlock(name, owner)


def _lock(job: str) -> str:
    return f"move {job}"


def _same(one: Counts, other: Counts) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _SAME)


def _total(counts: Counts) -> int:
    return counts.live + counts.dead + counts.expired + counts.items + counts.added


def _size(parcel: Parcel) -> int:
    return sum(
        len(rows)
        for name in ("requests", "letters", "items", "keys")
        if (rows := getattr(parcel, name, None)) is not None
    )


def _moved(job: Job, rows: int) -> Moved:
    counts = job.counts
    return Moved(job.id, job.state, counts.waiting + counts.delayed, counts.items, counts.added, rows)
