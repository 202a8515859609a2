"""The frontier: where requests wait and where the truth about them lives.

There are three ports. A worker uses `Frontier` for its work and `Notes` for what it shares with other
workers: its heartbeat, the robots.txt rules of hosts, cached pages. The command line, the API and the
dashboard also use `Catalog`. A backend implements all three, has a row in the table of `registry.py` or an
entry point in its own package, and passes `shoal.testing.contract`. Locks, cursors and the list of workers
are built on notes, once for all backends: see `notes.py`.

What every backend promises:

- A request is in exactly one state: waiting, delayed, leased, done, dead, expired, cancelled.
- The leases of a lane never exceed its width, and claims on a lane respect its gap, however many
workers claim at once and whenever one of them crashes. Pace survives restarts.
- A lane with a runnable request and a free slot is scheduled (no lost wake-up).
- Tokens grow. Every operation that ends or extends a lease compares the token; a stale token
changes nothing and is counted.
- `settle` is one transaction: items, found requests, the end of the lease and the counters
happen together or not at all.
- What `add` and `settle` have acknowledged survives `kill -9` of any process.
- Jobs and priorities on one lane share its visits by weight (each priority step doubles it), so no
request waits for ever: see docs/decisions/0002-fair-lines.md.
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
    """The hot path: eight verbs. Where it makes sense they take many requests or leases at once."""

    async def add(self, requests: Sequence[Request]) -> list[Added]:
        """Store the requests whose key is new. Returns one result per request, in order.

        Every job must have been opened. A request stays KNOWN long after its visit.
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
        """Lease up to `limit` requests whose lanes may be visited *now*, and start the delay of those lanes.

        `queues` None means all queues. `job` None means any job; a single job can be named only if its
        spec says `dedicated`. Each claim also takes back the leases of dead workers, ends expired requests
        and promotes delayed ones that are due, so no background job is needed.
        """
        ...

    async def settle(self, verdicts: Sequence[Verdict]) -> Settlement:
        """End leases with their verdicts. Returns the leases that were lost before, for which nothing was
        stored, and the found URLs that a page budget refused. A verdict for a cancelled job ends its request
        as cancelled."""
        ...

    async def take(self, leases: Sequence[Lease], *, worker: str, lease_seconds: float) -> Claim:
        """Take over leases that were claimed in transit, and hold them for `lease_seconds` from now.

        Returns those that `worker` holds now. A lease that another worker has taken stays with that
        worker, so a message that is delivered twice leads to one visit. Requests of a paused job are not
        handed out: they wait in line again, as if they had never been claimed. Requests of a cancelled
        job end."""
        ...

    async def extend(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        """Extend leases to `seconds` from now. Returns those that are lost: expired and taken
        back, settled, or of a cancelled job. Stop working on them."""
        ...

    async def pace(self, lane: str, pace: Pace) -> None:
        """Change a lane's pace from now on, for all workers. Creates the lane if it does not exist."""
        ...

    async def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when new work may have become claimable."""
        ...

    async def close(self) -> None:
        """Close connections and files. No other method may be called afterwards."""
        ...


class Catalog(Protocol):
    """Jobs, items, dead letters and lanes, for people and their tools. A worker never uses it."""

    async def open_job(self, job: str, spec: JobSpec) -> Job:
        """Create a job. Returns the existing one, with its own spec, if the id is taken."""
        ...

    async def job(self, job: str) -> Job:
        """Return a job. Raises NoSuchJob."""
        ...

    async def jobs(self, *, limit: int = 100, before: float | None = None) -> list[Job]:
        """Return jobs, newest first; with `before`, only those created before that moment."""
        ...

    async def update_job(
        self, job: str, *, spec: JobSpec | None = None, state: JobState | None = None
    ) -> Job:
        """Change a job's spec, its state, or both. None leaves a value as it is.

        A new `spec` does not touch requests or counters. PAUSED holds a running job, RUNNING resumes a
        paused one. CANCELLED is final: no further visit of the job starts, and visits in flight lose
        their leases at the next `extend`. A state that does not apply changes nothing: a job that has
        ended cannot be paused, and DONE cannot be requested.
        """
        ...

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        """Return the job's item log after a position, in order. A late commit is never skipped."""
        ...

    async def dead(self, which: Selection, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        """Return dead letters in the order of their ids."""
        ...

    async def dead_groups(self, which: Selection) -> list[DeadGroup]:
        """Count dead letters by lane and error class, largest group first."""
        ...

    async def revive(self, which: Selection, *, reset_attempts: bool = False) -> int:
        """Put dead letters back in line. Returns how many. Those of cancelled jobs stay dead."""
        ...

    async def purge(self, which: Selection) -> int:
        """Delete dead letters. Returns how many. Their URLs stay known and stay counted as dead."""
        ...

    async def bury(self, request: Request, failure_class: str, message: str) -> None:
        """Record a URL that could not be accepted (an invalid line of a bulk file) as a dead letter."""
        ...

    async def lanes(self, *, names: Collection[str] | None = None, limit: int = 100) -> list[Lane]:
        """Return lanes that have work or a pace of their own, busiest first."""
        ...

    async def find(self, url: str, job: str | None = None) -> list[RequestStatus]:
        """Return the status of a canonical URL in each job that knows it, or in `job` alone."""
        ...

    async def queues(self) -> dict[str, dict[str, int]]:
        """Return the numbers of waiting, delayed and leased requests, by queue."""
        ...

    async def leases(
        self, *, job: str | None = None, lane: str | None = None, limit: int | None = None
    ) -> list[LeaseRow]:
        """Return leases of this job and on this lane, newest first, including those in transit.
        A small `limit` keeps the call cheap however many leases there are."""
        ...

    async def evict(self, workers: Collection[str]) -> int:
        """Take back the leases of workers that are known to be dead, without waiting for them to
        expire. Each counts as a crash. Returns how many leases there were."""
        ...

    async def check(self) -> list[str]:
        """Recount everything. Returns a sentence for each broken invariant. Slow; for `doctor`."""
        ...

    async def info(self) -> Info:
        """Return where the frontier is stored, how durable that is and what would make it more durable."""
        ...


class Notes(Protocol):
    """Small shared values that expire. A note has a name on a shelf. Names are short (some hundred
    characters), and a shelf that is scanned has few notes."""

    async def get(self, shelf: str, name: str) -> bytes | None:
        """Return the value of a note; None if there is none or it has expired."""
        ...

    async def put(self, shelf: str, name: str, value: bytes | None, ttl: float) -> None:
        """Set a note for `ttl` seconds from now, whatever it was before; None removes it. A crash of the
        server may undo it."""
        ...

    async def compare_and_set(
        self, shelf: str, name: str, known: bytes | None, value: bytes | None, ttl: float
    ) -> bool:
        """Set a note only if its present value is `known` (None: there is no such note). Returns whether it
        did: when two processes change a note at once, one of them gets False and reads it again. The
        change is durable when this returns."""
        ...

    async def scan(self, shelf: str) -> list[Note]:
        """Return all notes of a shelf that have not expired, by name."""
        ...

    async def now(self) -> float:
        """Return the frontier's time: the server's clock if there is a server."""
        ...


class Backend(Frontier, Catalog, Protocol):
    """All three ports: what an adapter implements."""

    @property
    def notes(self) -> Notes: ...
