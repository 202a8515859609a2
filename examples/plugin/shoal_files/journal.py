"""A frontier of your own: a journal in one file, replayed into the memory frontier.

Every verb that changes something becomes one line of the file: when, which verb, which arguments. A process
that opens the file replays its lines. The memory frontier decides nothing by chance and has the time from its
clock alone, so all who replay the same lines hold the same state: several processes agree on tokens,
turns and results without sending each other anything else.

What that costs: the file only grows, opening it reads all of it, every process holds all of it in memory, and
one lock lets one process at a time do anything. That suits some 10,000 pages. It is here to show how little a
frontier needs; for work, use `sqlite:///`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, get_type_hints
from zlib import crc32

import msgspec
from msgspec import Raw, Struct

from shoal import clock as clocks
from shoal.errors import FrontierCorrupt, FrontierError, FrontierFull, NoFrontier, ShoalError
from shoal.frontier import port
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.port import Backend
from shoal.model import (
    Added,
    Claim,
    Dead,
    DeadGroup,
    DeadLetter,
    Done,
    Info,
    Item,
    Job,
    JobSpec,
    JobState,
    Lane,
    Lease,
    LeaseRow,
    Note,
    Pace,
    Release,
    Request,
    RequestStatus,
    Retry,
    Selection,
    Settlement,
    Verdict,
)
from shoal.registry import FrontierKind

T = TypeVar("T")

TICK = 0.02
"""Seconds between two looks at the file while there is nothing to do."""
WAKES = {"add", "settle", "pace", "update_job", "revive", "evict", "take"}
"""Verbs after which there may be something to claim."""
VERDICTS = {kind.__name__: kind for kind in (Done, Retry, Dead, Release)}


class Line(Struct, array_like=True):
    at: float
    verb: str
    given: Raw


def form_of(owner: type, verb: str) -> type:
    """The arguments of a verb as a type, so that what was written can be read: from the port's own hints."""
    hints = {name: kind for name, kind in get_type_hints(getattr(owner, verb)).items() if name != "return"}
    if verb == "settle":
        hints["verdicts"] = list[tuple[str, Raw]]
    return msgspec.defstruct(verb, list(hints.items()))


FORMS = {
    verb: form_of(owner, verb)
    for owner, verbs in (
        (port.Frontier, ("add", "claim", "settle", "take", "extend", "pace")),
        (port.Catalog, ("open_job", "update_job", "revive", "purge", "bury", "evict")),
        (port.Notes, ("put", "compare_and_set")),
    )
    for verb in verbs
}
NOTES = ("put", "compare_and_set")


async def open_journal(address: str, *, create: bool) -> Backend:
    """What `--frontier journal://path` opens."""
    path = Path(address.partition("://")[2])
    if not create and not os.path.exists(path):  # noqa: ASYNC240, PTH110 - the whole frontier blocks
        raise NoFrontier(path)
    return JournalFrontier(path)


JOURNAL = FrontierKind(open_journal, reach="machine")
"""Locks on files hold between the processes of one machine."""


class JournalFrontier:
    """A `Backend` in one file."""

    def __init__(self, path: Path, *, clock: clocks.Clock = clocks.system) -> None:
        self._path = path
        self._clock = clock
        self._now = 0.0
        self._forget()
        self._has_news = False
        self.notes = JournalNotes(self)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FrontierError(f"cannot open {path}: {error.strerror}", hint="name another file") from error

    # -- what changes something ---------------------------------------------------------------

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        answer: list[Added] = self.change("add", requests=requests)
        return answer

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        claim: Claim = self.change(
            "claim", limit=limit, worker=worker, lease_seconds=lease_seconds, queues=queues, job=job
        )
        self._has_news = False
        return claim

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        answer: Settlement = self.change("settle", verdicts=verdicts)
        return answer

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        answer: Claim = self.change("take", leases=leases, worker=worker, lease_seconds=lease_seconds)
        return answer

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        answer: list[Lease] = self.change("extend", leases=leases, seconds=seconds)
        return answer

    async def pace(self, lane: str, pace: Pace) -> None:
        self.change("pace", lane=lane, pace=pace)

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        answer: Job = self.change("open_job", job=job, spec=spec)
        return answer

    async def update_job(
        self, job: str, *, spec: JobSpec | None = None, state: JobState | None = None
    ) -> Job:
        answer: Job = self.change("update_job", job=job, spec=spec, state=state)
        return answer

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        answer: int = self.change("revive", which=which, reset_attempts=reset_attempts)
        return answer

    async def purge(self, which: Selection) -> int:
        answer: int = self.change("purge", which=which)
        return answer

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        request = msgspec.structs.replace(request, url=plain(request.url))
        self.change("bury", request=request, failure_class=failure_class, message=plain(message))

    async def evict(self, workers: Collection[str]) -> int:
        answer: int = self.change("evict", workers=list(workers))
        return answer

    # -- what only looks ----------------------------------------------------------------------

    async def job(self, job: str) -> Job:
        return self.look(lambda state: state.job(job))

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        return self.look(lambda state: state.jobs(limit=limit, before=before))

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        return self.look(lambda state: state.items(job, after=after, limit=limit))

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        return self.look(lambda state: state.dead(which, after=after, limit=limit))

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        return self.look(lambda state: state.dead_groups(which))

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        return self.look(lambda state: state.lanes(names=names, limit=limit))

    async def find(self, url: str, job: str | None = None) -> list[RequestStatus]:
        return self.look(lambda state: state.find(plain(url), job))

    async def queues(self) -> dict[str, dict[str, int]]:
        return self.look(lambda state: state.queues())

    async def leases(
        self, *, job: str | None = None, lane: str | None = None, limit: int | None = None
    ) -> list[LeaseRow]:
        return self.look(lambda state: state.leases(job=job, lane=lane, limit=limit))

    async def check(self) -> list[str]:
        return self.look(lambda state: state.check())

    async def info(self) -> Info:
        return Info()

    async def wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._has_news and (left := end - loop.time()) > 0:
            if os.fstat(self._fd).st_size != self._position:
                with self._locked():
                    pass
            else:
                await asyncio.sleep(min(TICK, left))

    async def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- inside -------------------------------------------------------------------------------

    def change(self, verb: str, **given: Any) -> Any:
        """Do it here, then write it down. What cannot be written did not happen."""
        written = given
        if verb == "settle":
            written = {"verdicts": [(type(one).__name__, one) for one in given["verdicts"]]}
        with self._locked():
            body = msgspec.json.encode((self._now, verb, written)) + b"\n"
            try:
                answer = self._done(verb, given)
            except ShoalError:
                self._append(body)  # a claim that is refused has still ended what was too old
                raise
            except BaseException:
                self._forget()
                raise
            self._append(body)
            return answer

    def look(self, ask: Callable[[MemoryFrontier], Coroutine[Any, Any, T]]) -> T:
        """The answer, when all is known that others wrote."""
        with self._locked():
            return at_once(ask(self._state))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone with the file, and up to date with it. Blocks for as long as another process has it, which
        is milliseconds."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._catch_up()
                self._now = max(self._now, self._clock())
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            self._forget()  # what was done here and could not be written
            kind = FrontierFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else FrontierError
            raise kind(f"cannot use {self._path}: {error.strerror}", hint="is the disk full?") from error

    def _forget(self) -> None:
        """Begin with nothing; the next look replays the file."""
        self._state = MemoryFrontier(clock=lambda: self._now)
        self._position = 0
        self._now = 0.0

    def _catch_up(self) -> None:
        """Replay what others wrote since we looked."""
        size = os.fstat(self._fd).st_size
        if size == self._position:
            return
        for line in os.pread(self._fd, size - self._position, self._position).splitlines(keepends=True):
            if not is_whole(line):
                if self._position + len(line) < size:
                    raise FrontierCorrupt(f"{self._path} is damaged at byte {self._position:,}")
                os.ftruncate(self._fd, self._position)  # a process died while it wrote this
                return
            entry = msgspec.json.decode(line[9:], type=Line)
            given = msgspec.structs.asdict(msgspec.json.decode(entry.given, type=FORMS[entry.verb]))
            if entry.verb == "settle":
                given["verdicts"] = [
                    msgspec.json.decode(raw, type=VERDICTS[name]) for name, raw in given["verdicts"]
                ]
            self._now = entry.at
            with suppress(ShoalError):  # it was refused when it was written, too
                self._done(entry.verb, given)
            self._position += len(line)

    def _done(self, verb: str, given: dict[str, Any]) -> Any:
        self._has_news = self._has_news or verb in WAKES
        owner = self._state.notes if verb in NOTES else self._state
        return at_once(getattr(owner, verb)(**given))

    def _append(self, body: bytes) -> None:
        line = b"%08x %b" % (crc32(body), body)
        if os.pwrite(self._fd, line, self._position) < len(line):
            os.ftruncate(self._fd, self._position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(self._fd)
        self._position += len(line)


class JournalNotes:
    """Its `Notes`."""

    def __init__(self, journal: JournalFrontier) -> None:
        self._journal = journal

    async def get(self, shelf: str, name: str) -> bytes | None:
        return self._journal.look(lambda state: state.notes.get(plain(shelf), plain(name)))

    async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None:
        self._journal.change("put", shelf=plain(shelf), name=plain(name), value=value, ttl=ttl)

    async def compare_and_set(
        self, shelf: str, name: str, known: bytes | None, value: bytes | None, ttl: float
    ) -> bool:
        given = {"shelf": plain(shelf), "name": plain(name), "known": known, "value": value, "ttl": ttl}
        return bool(self._journal.change("compare_and_set", **given))

    async def scan(self, shelf: str) -> list[Note]:
        return self._journal.look(lambda state: state.notes.scan(plain(shelf)))

    async def now(self) -> float:
        return self._journal.look(lambda state: state.notes.now())


def is_whole(line: bytes) -> bool:
    """Whether all of a line was written, and nothing else."""
    return line.endswith(b"\n") and line[8:9] == b" " and line[:8] == b"%08x" % crc32(line[9:])


def plain(text: str) -> str:
    """Text as JSON can hold it: a half character, from a URL that is none, becomes `?`."""
    return text.encode("utf-8", "replace").decode()


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, as those of the memory frontier."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the memory frontier waited for something")
