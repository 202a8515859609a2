"""A large job is cancelled while several workers are busy with it: it is over, others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cancel import LIMIT, cancel_busy


@pytest.mark.slow
def test_nothing_of_a_cancelled_job_is_in_flight_two_seconds_later(tmp_path: Path) -> None:
    found = cancel_busy(tmp_path, urls=2_000, workers=3)
    assert found.in_flight > 16
    assert found.status == "REVOKED"
    assert found.begun_later == 0
    assert found.other_pages == 60
    assert found.counts["added"] == 2_000
    assert found.counts["cancelled"] + found.counts["done"] + found.counts["dead"] == 2_000
    assert found.counts["done"] == 0, "a page of it takes twenty seconds"
    assert found.problems == []
    assert found.seconds < LIMIT + 3.0, "what a crowded machine adds"
