"""The frontier: where requests wait and where the truth about them lives.

Two ports. The worker uses `Frontier` and nothing else; command line, API and dashboard use
`FrontierAdmin`. A backend is one class that has both, one line in `registry.py`, and passes
`shoal.testing.contract`.

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

from shoal.frontier.parcel import Parcel, Part
from shoal.model import (
    About,
    Added,
    Attendance,
    Beat,
    Claim,
    DeadGroup,
    DeadLetter,
    Finding,
    Item,
    Job,
    JobSpec,
    Lane,
    Lease,
    Pace,
    Remark,
    Request,
    Selection,
    Settlement,
    Verdict,
)


class Frontier(Protocol):
    """The hot path: verbs in the plural, a way to wait, and a sign of life."""

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
        lease: float,
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

    async def take(self, leases: Sequence[Lease], *, worker: str, lease: float) -> Claim:
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

    async def beat(self, beat: Beat) -> None:
        """A worker lives, and this is what it does. Replaces what it said before; who has not
        been heard of for a day is forgotten."""
        ...

    async def leave(self, worker: str) -> None:
        """A worker ended as it should: nobody needs to look for it."""
        ...


class FrontierAdmin(Protocol):
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

    async def respec_job(self, job: str, spec: JobSpec) -> Job:
        """Replace what a job is asked to do; its requests and counters stay."""
        ...

    async def pause(self, job: str) -> Job: ...

    async def resume(self, job: str) -> Job: ...

    async def cancel(self, job: str) -> Job:
        """Nothing of the job starts any more; what is in flight is lost at its next `extend`."""
        ...

    async def items(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Item]:
        """The job's item log after a position, in order, never skipping a late commit."""
        ...

    async def cursor(self, job: str, sink: str) -> int:
        """How far an exporter got; 0 at first."""
        ...

    async def save_cursor(self, job: str, sink: str, seq: int) -> None: ...

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

    async def find(self, url: str, job: str | None = None) -> list[Finding]:
        """What is known of a canonical URL, per job (all jobs when None)."""
        ...

    async def queues(self) -> dict[str, dict[str, int]]:
        """Per queue: waiting, delayed, leased."""
        ...

    async def note(self, key: str, value: bytes, ttl: float) -> None:
        """A small shared fact with an end (robots.txt of a host)."""
        ...

    async def noted(self, key: str) -> bytes | None: ...

    async def swap(self, key: str, known: bytes | None, value: bytes, ttl: float) -> bool:
        """Note `value` if what is noted now is `known` (None: nothing); tells whether it was. Of two who
        change the same note at once, one sees it and looks again. Durable when it returns."""
        ...

    async def now(self) -> float:
        """The frontier's time: that of its server, where there is one."""
        ...

    async def lock(self, name: str, owner: str, ttl: float) -> str:
        """Take or keep a lock for `ttl` seconds. Answers who holds it now: `owner`, or another."""
        ...

    async def unlock(self, name: str, owner: str) -> None:
        """Give a lock back; nothing happens if somebody else holds it."""
        ...

    async def holders(self, job: str | None = None) -> dict[str, int]:
        """Which workers hold leases (of this job), and how many."""
        ...

    async def travelling(self, lane: str) -> dict[str, int]:
        """Of the visits that a lane allows at a time, how many are leases in transit, by queue."""
        ...

    async def visiting(self, job: str) -> str | None:
        """A URL of the job that is in a worker's hands, one of the latest. None when there is none, or
        nothing but what is in transit. Cheap: people ask all the time."""
        ...

    async def evict(self, workers: Collection[str]) -> int:
        """These workers are known to be dead: take back what they hold now, not when it runs
        out. Counts as a crash. Returns how many leases."""
        ...

    async def recall(self, job: str) -> int:
        """Take back now what anybody holds of this job; it waits again, and no crash is counted.
        Whoever held it has lost it. Returns how many leases."""
        ...

    async def pack(self, job: str, part: Part, *, after: str = "", limit: int = 1000) -> Parcel:
        """A piece of a paused job to be unpacked elsewhere; `after` is the `next` of the piece before.
        Changes nothing. About `limit` rows, never an endless answer."""
        ...

    async def unpack(self, job: str, parcel: Parcel) -> int:
        """Store a piece; answers how many rows were new. The head makes the job, paused, and notes
        that it is arriving. Parts come in the order of `parcel.PARTS`; a piece that comes again
        changes nothing. Raises UsageError if there is a job of this name that is not arriving."""
        ...

    async def workers(self) -> list[Attendance]:
        """Who has beaten and not left, by name."""
        ...

    async def check(self) -> list[str]:
        """Recount everything and name each invariant that does not hold. Slow; for `doctor`."""
        ...

    async def remarks(self) -> list[Remark]:
        """What a person should change about how durable this frontier is, as it is set up now.
        Empty when nothing that was acknowledged can be lost in a crash."""
        ...

    async def about(self) -> About:
        """What it is kept in, for `doctor`."""
        ...

    async def close(self) -> None: ...


class Backend(Frontier, FrontierAdmin, Protocol):
    """Both ports at once: what an adapter implements."""
