"""What a worker's beat tells."""

from __future__ import annotations

import pytest

from shoal.engine import stats
from shoal.engine.stats import WorkerStats
from shoal.model import Heartbeat, Request


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def heartbeat(of: WorkerStats, running: int = 1) -> Heartbeat:
    return of.heartbeat("w", None, None, slots=4, running=running)


def test_the_last_minute_is_summed_up(clock: list[float]) -> None:
    told = WorkerStats()
    for number in range(100):
        clock[0] += 1.0
        told.count_end(number / 100, failed=number % 10 == 0)
    said = heartbeat(told)
    # Sixty-one visits ended within a minute, both ends included: those numbered 39 to 99.
    assert (said.visits, said.failed) == (100, 10)
    assert said.rate == pytest.approx(61 / 60, abs=0.001)
    assert said.mean == pytest.approx(0.69)
    assert said.p95 == pytest.approx(0.96)


def test_a_rate_is_not_thinned_by_what_was_forgotten(clock: list[float]) -> None:
    told = WorkerStats()
    for _ in range(stats.SAMPLES * 3):
        clock[0] += 0.01
        told.count_end(0.1, failed=False)
    assert heartbeat(told).rate == pytest.approx(100.0, rel=0.01)


def test_it_is_still_only_while_something_runs(clock: list[float]) -> None:
    told = WorkerStats()
    clock[0] += 50.0
    assert heartbeat(told, running=0).stalled_for == 0.0
    clock[0] += 7.0
    assert heartbeat(told, running=2).stalled_for == 7.0
    told.count_end(1.0, failed=False)
    assert heartbeat(told, running=1).stalled_for == 0.0


def test_the_urls_of_the_latest_jobs_are_told() -> None:
    told = WorkerStats()
    for number in range(30):
        told.count_start(Request(f"http://a.example/{number}", f"job {number}"))
    told.count_start(Request("http://a.example/again", "job 15"))
    current = heartbeat(told).current
    assert len(current) == stats.JOBS
    assert list(current)[-1] == "job 15"
    assert current["job 15"] == "http://a.example/again"
    told.count_end(1.0, failed=False)
    assert heartbeat(told, running=0).current == current, "the last one, between two visits"
