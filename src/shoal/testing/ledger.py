"""The state machine's own record of what must be true, whatever the backend says.

It does not depend on how a frontier works: it records what was handed out and what ended, and recounts. So it
finds bugs that the backend and the model have in common.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.model import (
    EXPIRED,
    Claim,
    Counts,
    Dead,
    Done,
    Job,
    JobState,
    Lane,
    Lease,
    Release,
    Retry,
    Verdict,
)


@dataclass
class Visit:
    """A lease as it was handed out, and whether it may still be settled."""

    lease: Lease
    until: float
    open: bool = True


@dataclass
class Books:
    """What has happened to one job."""

    offered: int = 0
    """Requests offered by `add`, by settled visits and by `bury`: each is added, known or refused."""
    done: int = 0
    retried: int = 0
    stale: int = 0
    items: list[bytes] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    cancelled: bool = False


class Ledger:
    """Raises an AssertionError that names the broken promise as soon as the frontier breaks one."""

    def __init__(self) -> None:
        self.visits: dict[int, Visit] = {}
        self.jobs: defaultdict[str, Books] = defaultdict(Books)
        self._over: set[tuple[str, str]] = set()
        self._tat: dict[str, float] = {}
        self._last_token = 0

    # -- what the frontier did --------------------------------------------------------

    def claimed(self, claim: Claim, lanes: dict[str, Lane], limit: int) -> None:
        """Record a claim. `lanes` are as they were just before it."""
        assert len(claim.leases) <= limit, f"{len(claim.leases)} leases, asked for {limit}"
        self._forget_ended(claim.now)
        held = {(visit.lease.request.job, visit.lease.request.url) for visit in self._open()}
        for lease in claim.leases:
            request = lease.request
            name = (request.job, request.url)
            assert lease.token > self._last_token, f"token {lease.token} after {self._last_token}"
            assert name not in held, f"{name} was handed to two workers at once"
            assert name not in self._over, f"{name} was visited again after it was done"
            assert not self.jobs[request.job].cancelled, f"{name} began after its job was cancelled"
            self._last_token = lease.token
            held.add(name)
            self.visits[lease.token] = Visit(lease, lease.expires_at)
            self._keep_pace(lanes[lease.lane], claim.now)
        for lane in {lease.lane for lease in claim.leases}:
            busy = sum(visit.lease.lane == lane for visit in self._open())
            width = lanes[lane].width
            assert busy <= width, f"{busy} visits at once on {lane}, its width is {width}"

    def settled(self, verdicts: Sequence[Verdict], lost: Sequence[Lease], now: float) -> None:
        by_token: defaultdict[int, list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            by_token[verdict.lease.token].append(verdict)
        refused = Counter(lease.token for lease in lost)
        assert refused.keys() <= by_token.keys(), "a lease was returned as lost that was not in the verdicts"
        # A job may be named by several verdicts; they count in the order in which they came.
        for token, mine in by_token.items():
            visit, job = self.visits[token], self.jobs[mine[0].lease.request.job]
            accepted = len(mine) - refused[token]
            assert accepted in (0, 1), f"token {token} was settled {accepted} times"
            if accepted:
                assert visit.open, f"token {token} was stale and yet accepted"
                if not job.cancelled:
                    self._end(mine[0], job)
            else:
                assert not visit.open or visit.until <= now, f"token {token} was not lost"
            visit.open = False
            job.stale += refused[token]

    def extended(self, leases: Sequence[Lease], lost: Sequence[Lease], now: float, until: float) -> None:
        missing = {lease.token for lease in lost}
        for lease in leases:
            visit = self.visits[lease.token]
            if lease.token in missing:
                cancelled = self.jobs[lease.request.job].cancelled
                assert cancelled or not visit.open or visit.until <= now, f"{lease.token} was not lost"
                continue
            assert visit.open, f"token {lease.token} was stale and yet extended"
            visit.until = until

    # -- what must be true now --------------------------------------------------------

    def audit(self, job: Job, items: Iterable[bytes], now: float) -> None:
        """Recount one job and compare its counters."""
        books, counts = self.jobs[job.id], job.counts
        self._add_up(job)
        assert counts.added + counts.known + counts.refused == books.offered, (
            f"{job.id}: {counts.added} added + {counts.known} known + {counts.refused} refused"
            f" are not the {books.offered} offered"
        )
        for word in ("done", "retried", "stale"):
            assert getattr(counts, word) == getattr(books, word), f"{job.id}: {word} in {counts} and {books}"
        assert counts.items == len(books.items), f"{job.id}: {counts.items} items, {len(books.items)} stored"
        assert list(items) == books.items, f"{job.id}: the item log differs from what was settled"
        # The frontier alone counts crashes and buried requests, so it can only have more errors.
        assert not books.errors - Counter(job.errors), f"{job.id}: {job.errors} lack some of {books.errors}"
        mine = [visit for visit in self._open() if visit.lease.request.job == job.id]
        if not books.cancelled:
            alive = sum(visit.until > now for visit in mine)
            assert alive <= counts.leased <= len(mine), f"{job.id}: {counts.leased} leased, {alive} known"

    def drained(self, jobs: Iterable[Job]) -> None:
        """Check a frontier that reports that it is drained."""
        for job in jobs:
            assert job.counts.live == 0, f"drained, but {job.id} has {job.counts}"

    # -- inside -----------------------------------------------------------------------

    def _add_up(self, job: Job) -> None:
        counts: Counts = job.counts
        here = counts.waiting + counts.delayed + counts.leased
        assert counts.live == here, f"{job.id}: live is {counts.live}, there are {here}: {counts}"
        assert min(msg for msg in _numbers(counts)) >= 0, f"{job.id}: a negative counter in {counts}"
        if job.state is JobState.DONE:
            assert counts.live == 0, f"{job.id} is done with {counts.live} to go"
        if job.state is JobState.RUNNING and counts.added:
            assert counts.live > 0, f"{job.id} runs with nothing left"

    def _keep_pace(self, lane: Lane, now: float) -> None:
        tat = self._tat.get(lane.name, 0.0)
        # Backends store whole microseconds.
        assert now >= tat - lane.burst * lane.gap - 1e-6, (
            f"{lane.name} was visited {tat - lane.burst * lane.gap - now:.3f} s too early"
        )
        assert now >= lane.blocked_until - 1e-6, f"{lane.name} was visited while it was blocked"
        assert not lane.paused, f"{lane.name} was visited while it was paused"
        self._tat[lane.name] = max(tat, now) + lane.gap

    def _end(self, verdict: Verdict, job: Books) -> None:
        request = verdict.lease.request
        if isinstance(verdict, Done):
            job.done += 1
            job.items += verdict.items
            for found in verdict.found:
                self.jobs[found.job].offered += 1
            self._over.add((request.job, request.url))
        elif isinstance(verdict, Retry):
            job.retried += 1
            job.errors[verdict.failure.error] += 1
        elif isinstance(verdict, Dead) and verdict.failure.error == EXPIRED:
            pass  # no visit was made, so no error is counted
        elif isinstance(verdict, Dead):
            job.errors[verdict.failure.error] += 1
        else:
            assert isinstance(verdict, Release)

    def _forget_ended(self, now: float) -> None:
        """Forget leases that have expired: a claim takes them back, and their tokens are stale from then
        on."""
        for visit in self._open():
            if visit.until <= now:
                visit.open = False

    def _open(self) -> list[Visit]:
        return [visit for visit in self.visits.values() if visit.open]


def _numbers(counts: Counts) -> list[int]:
    return [getattr(counts, name) for name in counts.__struct_fields__]
