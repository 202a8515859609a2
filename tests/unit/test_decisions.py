"""What the frontiers that keep tables decide, without a database."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.frontier.decisions import (
    Entry,
    Refund,
    admit,
    adopt,
    candidate,
    check_lane,
    has_host_budget,
    lane_view,
    letter_of,
    letter_row,
    pick,
    recount,
    refused_urls,
    settle,
    take_back,
    wake,
)
from shoal.frontier.rows import CRASH, JobRow, LaneRow, Line, extra_of
from shoal.frontier.rules import STAGGER, US
from shoal.model import (
    EXPIRED,
    TRANSIT,
    Added,
    Dead,
    Done,
    Failure,
    JobSpec,
    Lease,
    Release,
    Request,
    Retry,
    Verdict,
)

NOW = 1_000 * US
HOST = "a.example"
START = "http://start.example/"


def job(state: str = "running", *, used: int = 0, **spec: object) -> JobRow:
    return JobRow(1, "job", JobSpec(gap=1.0, width=2, **spec), state, used, used)  # type: ignore[arg-type]


def lane(
    *,
    busy: int = 0,
    streams: int | str = 0,
    at: int | None = None,
    sole: int | None = None,
    gap: int = 0,
    width: int = 1,
    pinned: int = 0,
) -> LaneRow:
    return LaneRow((7, gap, width, 0, 0, pinned, 0, 0, 0, busy, 0, at, streams, sole))


def line(id: int = 1, *, stream: int = 3, priority: int = 5) -> Line:
    return Line(id, 7, stream, 1, priority)


def request(page: int, host: str = HOST) -> Request:
    return Request(f"http://{host}/{page}", "job")


class Budget:
    """What counts against the budgets per host, as a backend keeps it."""

    def __init__(self) -> None:
        self.used: Counter[str] = Counter()

    def spread(self, job: JobRow, lane: str) -> int:
        return self.used[lane]

    def count(self, job: JobRow, lane: str, by: int) -> None:
        if has_host_budget(job, lane):
            self.used[lane] += by


def added(
    row: JobRow,
    requests: list[Request],
    *,
    known: tuple[int, ...] = (),
    refunds: tuple[Refund, ...] = (),
    budget: Budget | None = None,
) -> tuple[list[Added], list[str], list[bytes]]:
    budget = budget or Budget()
    batch = [candidate(each) for each in requests]
    fresh = {each.key for each in batch} - {batch[n].key for n in known}
    result = admit(batch, fresh, {"job": row}, refunds, budget.spread, budget.count)
    return result.answers, [each.request.url for each in result.new], result.refused


# -- adding ---------------------------------------------------------------------------------


def test_a_request_is_new_once() -> None:
    row = job()
    answers, new, refused = added(row, [request(1), request(2), request(1)], known=(1,))
    assert answers == [Added.NEW, Added.KNOWN, Added.KNOWN]
    assert (new, refused) == (["http://a.example/1"], [])
    assert row.delta == {"added": 1, "known": 2}
    assert row.used == 1


def test_a_cancelled_job_refuses_requests_and_forgets_their_keys() -> None:
    row = job("cancelled")
    answers, new, refused = added(row, [request(1), request(1)])
    assert answers == [Added.REFUSED] * 2
    assert (new, refused) == ([], [candidate(request(1)).key])


def test_a_request_over_the_page_budget_is_refused_again_in_the_same_batch() -> None:
    row = job(used=1, max_pages=2)
    answers, _, refused = added(row, [request(1), request(2), request(2)])
    assert answers == [Added.NEW, Added.REFUSED, Added.REFUSED]
    assert refused == [candidate(request(2)).key] * 2


def test_a_host_has_a_budget_unless_the_job_starts_there() -> None:
    row = job(max_per_host=1, start=(START,))
    budget = Budget()
    requests = [request(1), request(2), *(request(n, "start.example") for n in range(3))]
    answers, _, _ = added(row, requests, budget=budget)
    assert answers == [Added.NEW, Added.REFUSED, Added.NEW, Added.NEW, Added.NEW]
    assert budget.used == {HOST: 1}


@pytest.mark.parametrize(("found_before", "expected"), [(0, "NR"), (1, "RN"), (2, "RR")])
def test_a_visit_that_ended_between_two_requests_is_refunded_between_them(
    found_before: int, expected: str
) -> None:
    """The visit that was skipped ended after so many requests had been found: those had no room by it."""
    row = job(used=2, max_pages=2)
    got, _, _ = added(row, [request(1), request(2)], refunds=((found_before, row, HOST),))
    words = {Added.NEW: "N", Added.REFUSED: "R"}
    assert "".join(words[answer] for answer in got) == expected
    assert row.used == (2 if found_before < 2 else 1)


def test_refused_urls_are_named() -> None:
    requests = [request(1), request(2)]
    assert refused_urls(requests, [Added.NEW, Added.REFUSED]) == ["http://a.example/2"]
    assert refused_urls(requests, [Added.NEW, Added.KNOWN]) == []


def test_an_idle_lane_takes_the_pace_and_a_shared_one_keeps_the_slower() -> None:
    idle, shared, pinned = lane(), lane(busy=1, gap=5 * US, width=9), lane(pinned=1, gap=7, width=3)
    for row in (idle, shared, pinned):
        adopt(row, job())
    assert (idle.gap, idle.width) == (US, 2)
    assert (shared.gap, shared.width) == (5 * US, 2)
    assert (pinned.gap, pinned.width) == (7, 3)


def test_a_request_that_joins_a_line_gives_its_lane_a_turn() -> None:
    row = lane(streams=9, at=5)
    assert wake(row, line(), job())
    assert row.streams == (3, 9)
    assert not wake(row, line(), job())  # it is scheduled already
    row.at = None
    assert wake(row, line(), job())
    asleep = lane()
    assert not wake(asleep, line(), job("paused"))
    assert asleep.streams == ()


def test_a_lane_is_placed_by_its_counted_work() -> None:
    row = lane(streams="3,9", at=5)
    recount(row, {}, NOW)
    assert (row.streams, row.at) == ((), None)
    recount(row, {9: 5, 3: 7}, NOW)
    assert row.streams == (3, 9)
    assert row.at == NOW - 20 * US  # priority 7 counts as ready 20 s earlier


# -- claiming -------------------------------------------------------------------------------


def entries(first: int, number: int) -> list[Entry]:
    return [(id, f"http://a.example/{id}", 0, 0, None) for id in range(first, first + number)]


def test_a_step_of_priority_doubles_the_share() -> None:
    live = [(line(1, priority=5), 0), (line(2, priority=6), 0)]
    heads = {1: entries(100, 10), 2: entries(200, 10)}
    steps: list[tuple[int, int]] = []
    taken, priority = pick(lane(width=99), 9, live, heads, steps)
    assert Counter(one.id for one, _ in taken) == {1: 3, 2: 6}
    assert [entry[0] for one, entry in taken if one.id == 1] == [100, 101, 102]
    assert {id: vt for vt, id in steps} == {1: 48, 2: 48}
    assert priority == 6


def test_a_lane_stays_in_the_streams_that_have_work() -> None:
    row = lane(width=99)
    live = [(line(1, stream=3), 0), (line(2, stream=4, priority=8), 0)]
    # Line 2 was not asked for: it stays, with its priority.
    taken, priority = pick(row, 5, live, {1: entries(100, 2)}, [])
    assert len(taken) == 2
    assert (row.streams, priority) == ((4,), 8)


def test_nothing_is_taken_from_a_lane_that_is_full() -> None:
    row, steps = lane(), []  # type: ignore[var-annotated]
    assert pick(row, 0, [(line(1), 0)], {1: entries(100, 1)}, steps) == ([], 5)
    assert (row.streams, steps) == ((3,), [])


# -- ending ---------------------------------------------------------------------------------


def lease(token: int) -> Lease:
    return Lease(token, request(token), HOST, 0.0)


def held(token: int, attempt: int = 0, worker: str = "w", ttl: int | None = None) -> tuple[object, ...]:
    asked = Request(f"http://a.example/{token}", "job", ttl=None if ttl is None else 1.0)
    return (token * 10, asked.url, 0, attempt, extra_of(asked, ttl), worker)


def test_verdicts_are_counted_and_carried_out() -> None:
    row, where = job(), line()
    failed = Failure("http_500", "no luck")
    verdicts: list[Verdict] = [
        Done(lease(1), [b"1", b"2"], [request(50)]),
        Done(lease(2), skipped="robots"),
        Retry(lease(3), 2.0, failed),
        Dead(lease(4), failed),
        Dead(lease(5), Failure(EXPIRED)),
        Release(lease(6)),
    ]
    rows = {n: held(n, attempt=1 if n == 4 else 0, ttl=77 if n == 6 else None) for n in range(3, 7)}
    result = settle(verdicts, dict.fromkeys(range(1, 7), where), rows, {1: row}, {"job": row}, NOW)
    assert row.delta == {"done": 2, "skipped": 1, "retried": 1}
    assert result.items == {1: [b"1", b"2"]}
    assert [each.url for each in result.found] == ["http://a.example/50"]
    assert result.freed == {7: 6}
    assert [each[:3] for each in result.delayed] == [(NOW + 2 * US, 30, 1)]
    assert result.delayed[0][5] == 1
    [(_, dead, why)] = result.dead
    assert (dead[0], dead[3], why) == (40, 2, Failure("http_500", "no luck", "w"))
    [(_, expired, _)] = result.expired
    assert (expired[0], expired[3]) == (50, 0)
    [(_, back)] = result.back
    assert (back[0], back[4]) == (60, 77)  # nobody visited it: what was left of its ttl counts again
    assert result.tallies == [(1, "http_500")] * 2
    # Each had found one request before it ended.
    assert [(found, where) for found, _, where in result.refunds] == [(1, HOST)] * 3


def test_a_verdict_on_a_lease_that_is_gone_is_lost_and_so_is_a_second_one() -> None:
    row = job()
    result = settle(
        [Done(lease(1)), Done(lease(1)), Done(lease(2))], {1: line()}, {}, {1: row}, {"job": row}, 0
    )
    assert [each.token for each in result.lost] == [1, 2]
    assert row.delta == {"done": 1, "stale": 2}


def test_a_verdict_for_a_cancelled_job_stores_nothing() -> None:
    row = job("cancelled")
    verdicts: list[Verdict] = [Done(lease(1), [b"1"], [request(50)]), Retry(lease(2), 0.0, Failure("reset"))]
    result = settle(verdicts, {1: line(), 2: line()}, {2: held(2)}, {1: row}, {"job": row}, NOW)
    assert (row.delta, result.freed) == ({"cancelled": 2}, {7: 2})
    assert not (result.items or result.found or result.delayed or result.tallies)


def ran_out(token: int, crashes: int, worker: str = "w") -> tuple[object, ...]:
    return (0, token, 1, token, f"http://a.example/{token}", 0, crashes * CRASH + 1, None, worker)


def test_requests_of_dead_workers_come_back_then_staggered_then_dead() -> None:
    row, place = job(), lane(busy=6)
    rows = [ran_out(n, crashes) for n, crashes in ((6, 2), (5, 1), (4, 1), (3, 0))]
    result = take_back([*rows, ran_out(2, 0, f"{TRANSIT}pump")], {1: line()}, {1: row}, {7: place}, NOW)
    assert place.busy == 1
    # By token. In transit nobody crashed.
    assert [(entry[0], entry[3]) for _, entry in result.back] == [(2, 1), (3, CRASH + 1)]
    assert [(each[0], each[1]) for each in result.staggered] == [(NOW, 4), (NOW + STAGGER, 5)]
    [(_, entry, failure)] = result.dead
    assert (entry[0], entry[3], failure.error, failure.worker) == (6, 1, "worker_crashed", "w")


def test_leases_of_a_cancelled_job_end() -> None:
    row = job("cancelled")
    result = take_back([ran_out(1, 0)], {1: line()}, {1: row}, {7: lane(busy=1)}, NOW)
    assert (result, row.delta) == (([], [], []), {"cancelled": 1})


# -- what people see ------------------------------------------------------------------------


def test_a_dead_letter_is_stored_and_read() -> None:
    entry = (9, "http://a.example/9", 4, 2 * CRASH + 3, None, extra_of(Request("x", "job", "label", ttl=9.0)))
    row = letter_row((line(), entry, Failure("reset", "gone", "w")), "dead", "scraping", NOW)
    read = letter_of((*row[:3], "job", *row[4:]))
    assert (read.id, read.lane, read.state, read.ended_at) == (9, HOST, "dead", NOW / US)
    assert (read.request.depth, read.request.attempt, read.request.label) == (4, 3, "label")
    assert read.request.ttl is None
    assert read.failure == Failure("reset", "gone", "w")


def test_a_lane_is_ready_when_its_turn_and_its_rest_allow() -> None:
    row = lane(at=5 * US, gap=US, width=2)
    row.blocked = 9 * US
    view = lane_view(HOST, row, 3)
    assert (view.ready_at, view.waiting, view.gap, view.blocked_until) == (9.0, 3, 1.0, 9.0)
    row.at = None
    assert lane_view(HOST, row, 0).ready_at is None


def test_a_lane_that_agrees_with_the_count_is_not_reported() -> None:
    row = lane(busy=1, width=2, streams=3, at=NOW, sole=1)
    assert check_lane(HOST, row, 1, {3}, {(3, NOW)}, 1, NOW) == []


@pytest.mark.parametrize(
    ("counted", "sentence"),
    [
        ((2, {3}, {(3, NOW)}, 1, NOW), "counts 1 leases, there are 2"),
        ((1, {4}, {(3, NOW)}, 1, NOW), "lists the wrong streams"),
        ((1, {3}, {(3, NOW + 1)}, 1, NOW), "has other turns than its row says"),
        ((1, {3}, {(3, NOW)}, 1, NOW - 1), "later than it is ready"),
        ((1, {3}, {(3, NOW)}, None, NOW), "names the wrong line as its only one"),
    ],
)
def test_each_difference_is_reported(
    counted: tuple[int, set[int], set[tuple[int, int]], int | None, int], sentence: str
) -> None:
    row = lane(busy=1, width=2, streams=3, at=NOW, sole=1)
    [wrong] = check_lane(HOST, row, *counted)
    assert sentence in wrong


def test_an_unscheduled_lane_with_work_and_a_free_slot_is_reported() -> None:
    wrong = check_lane(HOST, lane(width=2, streams=3), 0, {3}, set(), None, NOW)
    assert wrong == [f"lane {HOST} has work and a free slot but is not scheduled"]
