"""The frontier: where requests wait and where the truth about them lives.

Three ports. A worker uses `Frontier` for its work and `Notes` for what it shares with others: that it
lives, the rules of hosts, pages. Command line, API and dashboard use `Catalog` beside them. A backend has
all three, a row in the table of `registry.py` or an entry point of a package of its own, and passes
`shoal.testing.contract`. Locks, cursors and the list of workers are made of notes, once for all backends: see
`notes.py`.

What every backend promises:

- A request is in exactly one state: waiting, delayed, leased, done, dead, expired, cancelled.
- Leases of a lane never exceed its width, and claims of a lane respect its gap, however many
  workers ask at once and whoever crashes when. Pace survives restarts.
- A lane with a runnable request and a free slot is scheduled (no lost wake-up).
- Tokens grow. Whatever ends or extends a lease compares the token; a stale one changes
  nothing and is counted.
- `settle` is one transaction: items, found requests, the end of the lease and the counters
  happen together or not at all.
- What `add` and `settle` acknowledged survives `kill -9` of anybody.
- Between jobs and priorities on one lane service is shared by weight (doubling per priority
  step), so nobody waits for ever: see docs/decisions/0002-fair-lines.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from shoal.model import (
    Added,
    Claim,
    DeadGroup,
    DeadLetter,
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
    Request,
    RequestStatus,
    Selection,
    Settlement,
    Verdict,
)


class Frontier(Protocol):
    """The hot path: eight verbs, in the plural where they can be."""

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        """Store requests whose key is new. Answers one word per request, in order.

        A job must have been opened. A request is KNOWN even if its first visit is long over.
        """
        ...

    async def claim(
        self,
        limit: int,
        *,
        worker: str,
        lease_seconds: float,
        queues: Collection[str] | None = None,
        job: str | None = None,
    ) -> Claim:
        """Up to `limit` requests whose lanes may be visited *now*; starts those lanes' delay.

        `queues` None means all, `job` None means of any job; a single job can be asked for only
        if it was opened with `apart`. Requests whose worker died are offered again here, expired ones
        end here, delayed ones come due here; nothing else needs to run in the background.
        """
        ...

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        """End leases with their verdicts. Tells which were lost already: for them nothing was
        stored. A verdict on a cancelled job ends its request as cancelled."""
        ...

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        """Become the holder of leases that were claimed in transit, and hold them for `lease`
        seconds. Answers those that are ours now. Who else has taken one keeps it: of a message
        that is delivered twice, one visit is made. Of a paused job nothing is given: it waits in
        line again, as if it had never left. Of a cancelled one it ends."""
        ...

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        """Keep leases for `seconds` from now. Returns those that are lost: expired and taken
        back, settled, or of a cancelled job. Stop working on them."""
        ...

    async def pace(self, lane: str, pace: Pace) -> None:
        """Change a lane's pace from now on, for everybody. Creates the lane if need be."""
        ...

    async def wait(self, seconds: float) -> None:
        """Return after `seconds`, or sooner when new work may have become claimable."""
        ...

    async def close(self) -> None:
        """Give back connections and files. Nothing else can be asked afterwards."""
        ...


class Catalog(Protocol):
    """What people ask. Never used by the worker."""

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        """Make the job, or answer the one that has this id (its spec stays)."""
        ...

    async def job(self, job: str) -> Job:
        """Raises NoSuchJob."""
        ...

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        """Newest first."""
        ...

    async def update_job(
        self, job: str, *, spec: JobSpec | None = None, state: JobState | None = None
    ) -> Job:
        """Change what a job is asked to do, its state, or both. None leaves it as it is.

        A new `spec` leaves requests and counters alone. PAUSED holds a running job, RUNNING lets a paused
        one go on. CANCELLED is for good: nothing of the job starts any more, and what is in flight is
        lost at its next `extend`. A state that does not apply (a job that ended cannot be paused, DONE
        cannot be asked for) changes nothing.
        """
        ...

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        """The job's item log after a position, in order, never skipping a late commit."""
        ...

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        """Dead letters in the order of their ids."""
        ...

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        """Dead letters by lane and error class, largest first."""
        ...

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        """Let dead letters wait again. Returns how many. Those of cancelled jobs stay."""
        ...

    async def purge(self, which: Selection) -> int:
        """Forget dead letters. They stay known and stay counted as dead."""
        ...

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        """Record a URL that could not even be accepted (bad in a bulk file) as a dead letter."""
        ...

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        """Lanes with work or a pace of their own, busiest first."""
        ...

    async def find(self, url: str, job: str | None = None) -> list[RequestStatus]:
        """What is known of a canonical URL, per job (all jobs when None)."""
        ...

    async def queues(self) -> dict[str, dict[str, int]]:
        """Per queue: waiting, delayed, leased."""
        ...

    async def leases(
        self, *, job: str | None = None, lane: str | None = None, limit: int | None = None
    ) -> list[LeaseRow]:
        """Who has what in hand, of this job and on this lane, newest first; what is in transit as well.
        With a small `limit` it is cheap however many there are."""
        ...

    async def evict(self, workers: Collection[str]) -> int:
        """These workers are known to be dead: take back what they hold now, not when it runs
        out. Counts as a crash. Returns how many leases."""
        ...

    async def check(self) -> list[str]:
        """Recount everything and name each invariant that does not hold. Slow; for `doctor`."""
        ...

    async def info(self) -> Info:
        """What it is kept in, and what a person should change about how durable that is."""
        ...


class Notes(Protocol):
    """Small shared facts with an end. A note has a name on a shelf; names are short (some hundred
    characters), and shelves that are scanned have few notes."""

    async def get(self, shelf: str, name: str) -> bytes | None:
        """What is noted there; None when nothing is, or it has ended."""
        ...

    async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None:
        """Note `value` for `ttl` seconds from now, whatever was there; None removes it. A crash of the
        server may undo it."""
        ...

    async def compare_and_set(
        self, shelf: str, name: str, known: bytes | None, value: bytes | None, ttl: float
    ) -> bool:
        """The same, if what is noted now is `known` (None: nothing). Returns whether it was: of two who
        change a note at once, one sees it and looks again. Durable when it returns."""
        ...

    async def scan(self, shelf: str) -> list[Note]:
        """All notes of a shelf that have not ended, by name."""
        ...

    async def now(self) -> float:
        """The frontier's time: that of its server, where there is one."""
        ...


class Backend(Frontier, Catalog, Protocol):
    """Everything at once: what an adapter implements."""

    @property
    def notes(self) -> Notes: ...
