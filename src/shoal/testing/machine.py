"""Random histories: the same operations on a backend and on the memory frontier.

Hypothesis generates jobs, requests, claims, verdicts, the passing of time and changes by people. After each
step both must agree in everything that is visible, the `Ledger` must agree with both, and the backend's own
`check()` must find nothing.

    TestDuckMachine = machine_for(DuckHarness)

Each run plays the same histories, so that a failure is caused by the change and not by chance; and it fails
at once. `SHOAL_HYPOTHESIS=shrink` takes minutes to find the shortest history that fails.
`SHOAL_HYPOTHESIS=deep` searches longer, with new histories each time, and shrinks. Give both `--timeout 0`.
`SHOAL_HYPOTHESIS=whole` (`make contract`) plays all histories on slow backends too.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from unittest import TestCase

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal import urls
from shoal.frontier.memory import MemoryFrontier
from shoal.frontier.port import Backend
from shoal.model import (
    EXPIRED,
    TRANSIT,
    Claim,
    Dead,
    Done,
    Failure,
    JobSpec,
    JobState,
    Lease,
    Pace,
    Release,
    Request,
    Retry,
    Selection,
    Verdict,
)
from shoal.testing.harness import Harness
from shoal.testing.ledger import Ledger

T = TypeVar("T")

HOSTS = ("http://a.example", "http://b.example", "http://c.example")
LANES = tuple(urls.lane_of(host) for host in HOSTS)
QUEUES = ("scraping", "rag")
JOBS = ("red", "green", "blue")
ERRORS = ("http_500", "reset")
KINDS = ("done", "done", "done", "skip", "retry", "dead", "release", "expire")
ORDERS = ("open", "pause", "resume", "cancel", "cancel", "respec", "revive", "revive", "purge", "bury")
REAP = 1.25
"""Seconds by which a backend may notice the end of a lease too late. No claim falls into that time."""
EVERYTHING = 1000
LIVES = 60

# Sixty-fourths: exact in binary, and whole microseconds, so no backend has to round.
seconds = st.integers(0, 64 * 8).map(lambda n: n / 64) | st.sampled_from([0.0, 1.0, 10.0, 61.0])
pages = st.tuples(st.sampled_from(HOSTS), st.integers(0, 11)).map(lambda place: f"{place[0]}/{place[1]}")
specs = st.builds(
    JobSpec,
    start=st.just((f"{HOSTS[0]}/0",)),
    gap=st.sampled_from([0.0, 0.5, 2.0]),
    width=st.integers(1, 3),
    max_pages=st.sampled_from([None, None, 0, 4, 9]),
    max_per_host=st.sampled_from([None, None, 2]),
)
drafts = st.builds(
    Request,
    url=pages,
    job=st.sampled_from(JOBS),
    queue=st.sampled_from(QUEUES),
    priority=st.sampled_from([1, 5, 5, 6, 9]),
    delay=st.sampled_from([0.0, 0.0, 0.0, 3.0]),
    ttl=st.sampled_from([None, None, 2.0, 20.0]),
)
queues = st.none() | st.lists(st.sampled_from(QUEUES), unique=True, min_size=1)
paces = st.builds(
    Pace,
    gap=st.none() | st.sampled_from([0.0, 1.0, 4.0]),
    width=st.none() | st.integers(1, 3),
    burst=st.none() | st.integers(0, 2),
    blocked=st.sampled_from([None, None, None, 0.0, 5.0, 30.0]),
    floor=st.none() | st.sampled_from([0.0, 3.0]),
    pinned=st.sampled_from([None, None, False, True]),
    paused=st.sampled_from([None, None, None, False, False, True]),
)
selections = st.builds(
    Selection,
    job=st.none() | st.sampled_from(JOBS),
    lane=st.none() | st.sampled_from(LANES),
    error=st.none() | st.sampled_from([*ERRORS, "expired", "worker_crashed"]),
)


def machine_for(
    make_harness: Callable[[], Harness], *, ordered: bool = True, lives: int = LIVES
) -> type[TestCase]:
    """Return a test case for the backend. Each history gets its own harness.

    `lives` limits the number of histories for a quick run; `SHOAL_HYPOTHESIS=whole` ignores it.

    `ordered` demands exactly the order of the memory frontier: ties go to the older lane, and on one lane to
    the older line. Without it, each claim asks for everything and only the set of its requests is compared.
    """

    class Machine(FrontierMachine):
        def __init__(self) -> None:
            super().__init__(make_harness(), ordered=ordered)

    profile = os.environ.get("SHOAL_HYPOTHESIS", "")
    deep = profile == "deep"
    case: type[TestCase] = Machine.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=3000 if deep else LIVES if profile else lives,
        stateful_step_count=80 if deep else 40,
        derandomize=not deep,
        phases=tuple(Phase) if profile in ("deep", "shrink") else (Phase.generate,),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


class FrontierMachine(RuleBasedStateMachine):
    """One history. `real` is tested, `model` has the right results, `ledger` trusts neither."""

    def __init__(self, harness: Harness, *, ordered: bool = True) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.harness = harness
        self.ordered = ordered
        self.real: Backend = self.run(harness.open())
        self.model: Backend = MemoryFrontier(clock=harness.now)
        self.ledger = Ledger()
        self.opened: list[str] = []
        self.pairs: list[tuple[Lease, Lease]] = []
        """Each lease of the backend with that of the model: their tokens may differ."""
        self.bodies = 0

    def teardown(self) -> None:
        self.run(self.harness.close())
        self.runner.close()

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(doing)

    def both(self, ask: Callable[[Backend], Coroutine[Any, Any, T]], what: str) -> T:
        """Call both; their results must be equal."""
        real, model = self.run(ask(self.real)), self.run(ask(self.model))
        assert real == model, f"{what}: the backend says {real}, the model says {model}"
        return real

    # -- work -------------------------------------------------------------------------

    @initialize(first=specs, second=specs, wanted=st.lists(drafts, min_size=1, max_size=12))
    def begin(self, first: JobSpec, second: JobSpec, wanted: list[Request]) -> None:
        """Start with two jobs and some work: a history without work finds nothing."""
        self._open_job(JOBS[0], first)
        self._open_job(JOBS[1], second)
        self.add(wanted)

    @rule(wanted=st.lists(drafts, max_size=8))
    def add(self, wanted: list[Request]) -> None:
        wanted = self._of_open_jobs(wanted)
        self.both(lambda frontier: frontier.add(wanted), "add")
        for request in wanted:
            self.ledger.jobs[request.job].offered += 1

    @rule(
        limit=st.sampled_from([1, 2, 5, EVERYTHING]),
        queues=queues,
        lease_seconds=st.sampled_from([5.0, 60.0]),
    )
    def claim(self, limit: int, queues: list[str] | None, lease_seconds: float) -> None:
        self._claim(limit if self.ordered else EVERYTHING, queues, lease_seconds)

    @precondition(lambda self: self.pairs)
    @rule(
        choices=st.lists(
            st.tuples(
                st.integers(0, 99),
                st.sampled_from(KINDS),
                st.lists(drafts, max_size=3),
                st.sampled_from(ERRORS),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def settle(self, choices: list[tuple[int, str, list[Request], str]]) -> None:
        """Settle mostly recent leases, sometimes one that ended long ago, sometimes one twice."""
        ends = [
            (self.pairs[-1 - number % len(self.pairs)], kind, self._of_open_jobs(found), error)
            for number, kind, found, error in choices
        ]
        self._settle(ends)

    @rule(
        limit=st.sampled_from([1, 3, EVERYTHING]),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
        found=st.lists(drafts, max_size=3),
        pause=seconds,
    )
    def work_a_turn(self, limit: int, kinds: list[str], found: list[Request], pause: float) -> None:
        """Work like a worker: claim, settle some leases, pause. The other leases are abandoned."""
        claim = self._claim(limit if self.ordered else EVERYTHING, None, 5.0)
        if claim.leases:
            fresh = self.pairs[-len(claim.leases) :]
            links = self._of_open_jobs(found)
            self._settle([(pair, kind, links, ERRORS[0]) for pair, kind in zip(fresh, kinds, strict=False)])
        self.harness.advance(pause)

    @rule(limit=st.sampled_from([1, 3]), kind=st.sampled_from(KINDS))
    def a_worker_hangs(self, limit: int, kind: str) -> None:
        """A worker comes back after others have taken over its leases. Chance alone rarely leads there."""
        claim = self._claim(limit if self.ordered else EVERYTHING, None, 5.0)
        held = self.pairs[len(self.pairs) - len(claim.leases) :]
        self.harness.advance(5.0 + REAP)
        self._claim(EVERYTHING, None, 60.0)
        if held:
            self._settle([(pair, kind, [], ERRORS[0]) for pair in held])

    @rule(
        limit=st.sampled_from([2, 4, EVERYTHING]),
        way=st.sampled_from([0.0, 1.0, 4.0, 5.0 + REAP]),
        takers=st.lists(st.sampled_from(["w", "x", ""]), min_size=1, max_size=6),
        lost=st.sampled_from([0, 0, 2]),
    )
    def some_go_by_message(self, limit: int, way: float, takers: list[str], lost: int) -> None:
        """One worker claims in transit. Later others take the leases, or none does; a message may come twice,
        or only after others that were lost."""
        for _ in range(lost):
            self._claim(EVERYTHING, None, 5.0, f"{TRANSIT}p")
            self.harness.advance(5.0 + REAP)
        claim = self._claim(limit if self.ordered else EVERYTHING, None, 5.0, f"{TRANSIT}p")
        fresh = self.pairs[len(self.pairs) - len(claim.leases) :]
        self.harness.advance(way)
        for taker, pair in zip(takers, fresh + fresh, strict=False):
            if taker:
                self._take([pair], taker)

    def _take(self, pairs: list[tuple[Lease, Lease]], worker: str) -> None:
        real = self.run(self.real.take([mine for mine, _ in pairs], worker=worker, lease_seconds=30.0))
        model = self.run(self.model.take([theirs for _, theirs in pairs], worker=worker, lease_seconds=30.0))
        twins = {theirs.token: mine.token for mine, theirs in self.pairs}
        got, right = [x.token for x in real.leases], [twins[x.token] for x in model.leases]
        assert got == right, f"{worker} takes {got}, in the model {right}"
        now = self.harness.now()
        self.ledger.extended(real.leases, [], now, now + 30.0)

    @precondition(lambda self: self.pairs)
    @rule(numbers=st.lists(st.integers(0, 99), max_size=3, unique=True), length=st.sampled_from([0.5, 30.0]))
    def extend(self, numbers: list[int], length: float) -> None:
        chosen = list(
            {self.pairs[-1 - number % len(self.pairs)][0].token: number for number in numbers}.values()
        )
        pairs = [self.pairs[-1 - number % len(self.pairs)] for number in chosen]
        lost = self.run(self.real.extend([real for real, _ in pairs], length))
        lost_model = self.run(self.model.extend([model for _, model in pairs], length))
        self._same_lost(lost, lost_model, "extend")
        now = self.harness.now()
        self.ledger.extended([real for real, _ in pairs], lost, now, now + length)

    @rule(seconds=seconds)
    def time_passes(self, seconds: float) -> None:
        self.harness.advance(seconds)

    # -- people -----------------------------------------------------------------------

    @rule(lane=st.sampled_from(LANES), pace=paces)
    def change_pace(self, lane: str, pace: Pace) -> None:
        self.both(lambda frontier: frontier.pace(lane, pace), "pace")

    # One rule for all changes by people: each rule is drawn equally often, and work must prevail.
    @rule(
        order=st.sampled_from(ORDERS),
        number=st.integers(0, 2),
        spec=specs,
        which=selections,
        reset=st.booleans(),
        draft=drafts,
    )
    def people_decide(
        self, order: str, number: int, spec: JobSpec, which: Selection, reset: bool, draft: Request
    ) -> None:
        job = self.opened[number % len(self.opened)]
        if which.job is not None:
            which = Selection(job=job, lane=which.lane, error=which.error)
        if order == "open":
            self._open_job(JOBS[number], spec)
        elif order in ("pause", "resume"):
            state = JobState.PAUSED if order == "pause" else JobState.RUNNING
            self.both(lambda frontier: frontier.update_job(job, state=state), order)
        elif order == "cancel":
            after = self.both(lambda frontier: frontier.update_job(job, state=JobState.CANCELLED), "cancel")
            self.ledger.jobs[job].cancelled = after.state is JobState.CANCELLED
        elif order == "respec":
            self.both(lambda frontier: frontier.update_job(job, spec=spec), "respec")
        elif order == "revive":
            self.both(lambda frontier: frontier.revive(which, reset_attempts=reset), "revive")
        elif order == "purge":
            self.both(lambda frontier: frontier.purge(which), "purge")
        else:
            self._bury(self._of_open_jobs([draft])[0])

    @precondition(lambda self: self.harness.durable)
    @rule()
    def restart(self) -> None:
        self.real = self.run(self.harness.reopen())

    @precondition(lambda self: self.pairs)
    @rule()
    def finish_everything(self) -> None:
        """Without pauses, a worker that comes at the announced times gets all requests: no wake-up is
        lost."""
        for job in self.opened:
            self.both(lambda frontier, job=job: frontier.update_job(job, state=JobState.RUNNING), "resume")  # type: ignore[misc]
        for lane in LANES:
            self.both(
                lambda frontier, lane=lane: frontier.pace(lane, Pace(paused=False)),  # type: ignore[misc]
                "pace",
            )
        for _ in range(400):
            claim = self._claim(EVERYTHING, None, 5.0)
            if claim.drained:
                return
            if claim.leases:
                fresh = self.pairs[-len(claim.leases) :]
                self._settle([(pair, "done", [], "") for pair in fresh])
                continue
            assert claim.wake_at is not None
            assert claim.wake_at < math.inf, "nothing is paused, but the time of the next claim is unknown"
            assert claim.retry_in > 0.0, "a claim at the announced time got nothing"
            self.harness.advance(claim.retry_in)
        raise AssertionError("the jobs do not come to an end")

    # -- after each step --------------------------------------------------------------

    @invariant()
    def all_books_agree(self) -> None:
        now = self.harness.now()
        for name in self.opened:
            job = self.both(lambda frontier, name=name: frontier.job(name), "job")  # type: ignore[misc]
            log = self.both(
                lambda frontier, name=name: frontier.items(name, limit=10_000),  # type: ignore[misc]
                "items",
            )
            self.ledger.audit(job, (item.body for item in log), now)
        busy = [lane.name for lane in self.run(self.model.lanes()) if lane.busy or lane.waiting]
        self.both(lambda frontier: _lanes(frontier, busy), "lanes")
        self.both(_letters, "dead letters")
        self.both(_leases, "leases")
        wrong = self.run(self.real.check())
        assert wrong == [], f"check() says: {wrong}"

    # -- inside -----------------------------------------------------------------------

    def _open_job(self, job: str, spec: JobSpec) -> None:
        self.both(lambda frontier: frontier.open_job(job, spec), "open_job")
        if job not in self.opened:
            self.opened.append(job)

    def _bury(self, request: Request) -> None:
        before = self.run(self.real.job(request.job)).counts.added
        self.both(lambda frontier: frontier.bury(request, "url_invalid", "bad"), "bury")
        after = self.run(self.real.job(request.job)).counts.added
        self.ledger.jobs[request.job].offered += after - before

    def _of_open_jobs(self, drafts: Sequence[Request]) -> list[Request]:
        """Return the same requests; those of a job that is not open are given to one that is."""
        return [
            draft if draft.job in self.opened else Request(**{**_fields(draft), "job": self.opened[0]})
            for draft in drafts
        ]

    def _claim(self, limit: int, queues: list[str] | None, lease: float, worker: str = "w") -> Claim:
        self._leave_time_to_reap()
        lanes = {lane.name: lane for lane in self.run(self.real.lanes(names=LANES))}
        real = self.run(self.real.claim(limit, worker=worker, lease_seconds=lease, queues=queues))
        self.ledger.claimed(real, lanes, limit)
        model = self.run(self.model.claim(limit, worker=worker, lease_seconds=lease, queues=queues))
        got, right = [_shown(lease) for lease in real.leases], [_shown(lease) for lease in model.leases]
        order = list if self.ordered else _sorted
        assert order(got) == order(right), f"claimed {got}, the model {right}"
        by_name = {(lease.request.job, _identity(lease.request)): lease for lease in model.leases}
        self.pairs += [(mine, by_name[mine.request.job, _identity(mine.request)]) for mine in real.leases]
        if not real.leases:
            self._same_wake(real, model)
            if queues is None and real.wake_at is None:
                self.ledger.drained(self.run(self.real.jobs()))
        return real

    def _settle(self, ends: list[tuple[tuple[Lease, Lease], str, list[Request], str]]) -> None:
        real, model = [], []
        for (mine, theirs), kind, found, error in ends:
            self.bodies += 1
            body = str(self.bodies).encode()
            real.append(_verdict(mine, kind, found, error, body))
            model.append(_verdict(theirs, kind, found, error, body))
        answer, right = self.run(self.real.settle(real)), self.run(self.model.settle(model))
        self._same_lost(list(answer.lost), list(right.lost), "settle")
        assert list(answer.refused) == list(right.refused), f"refused {answer.refused}, not {right.refused}"
        self.ledger.settled(real, answer.lost, self.harness.now())

    def _leave_time_to_reap(self) -> None:
        while True:
            now = self.harness.now()
            ends = [visit.until for visit in self.ledger.visits.values() if visit.open]
            if not any(now - REAP < end <= now for end in ends):
                return
            self.harness.advance(REAP)

    def _same_lost(self, real: list[Lease], model: list[Lease], what: str) -> None:
        twins = {theirs.token: mine.token for mine, theirs in self.pairs}
        got, right = [lease.token for lease in real], [twins[lease.token] for lease in model]
        assert got == right, f"{what}: the backend calls {got} lost, the model {right}"

    def _same_wake(self, real: Claim, model: Claim) -> None:
        assert (real.wake_at is None) == (model.wake_at is None), f"{real} and {model}"
        if real.wake_at is None or model.wake_at is None:
            return
        early, late = sorted((real.wake_at, model.wake_at))
        # One second, because a backend may check for expired leases only that often.
        assert early == late or late - early <= REAP, (
            f"wake_at {real.wake_at}, the model says {model.wake_at}"
        )


def _verdict(lease: Lease, kind: str, found: list[Request], error: str, body: bytes) -> Verdict:
    if kind == "done":
        return Done(lease, items=[body], found=found)
    if kind == "skip":
        return Done(lease, found=found, skipped="redirect")
    if kind == "retry":
        return Retry(lease, 2.0, Failure(error, "again"))
    if kind == "dead":
        return Dead(lease, Failure(error, "over"))
    if kind == "expire":
        return Dead(lease, Failure(EXPIRED, "too late"))
    return Release(lease)


async def _lanes(frontier: Backend, names: list[str]) -> list[tuple[object, ...]]:
    lanes = await frontier.lanes(names=names)
    return sorted(
        (lane.name, lane.gap, lane.width, lane.burst, lane.busy, lane.waiting, lane.pinned, lane.paused)
        for lane in lanes
    )


async def _leases(frontier: Backend) -> list[tuple[str, ...]]:
    return sorted((row.worker, row.queue, row.url, row.job, row.lane) for row in await frontier.leases())


async def _letters(frontier: Backend) -> list[tuple[object, ...]]:
    letters = await frontier.dead(Selection(), limit=10_000)
    return sorted(
        (letter.request.job, letter.request.url, letter.request.attempt, letter.state, letter.failure.error)
        for letter in letters
    )


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def _shown(lease: Lease) -> Request:
    """Return the request without the fields that no longer matter once its visit has started."""
    return Request(**{**_fields(lease.request), "delay": 0.0, "ttl": None})


def _identity(request: Request) -> tuple[str, str, bytes]:
    return request.url, request.method, request.body or b""


def _sorted(found: list[Request]) -> list[Request]:
    return sorted(found, key=lambda request: (request.job, _identity(request)))
