"""From a failed visit to what happens next."""

from __future__ import annotations

import pytest

from shoal.engine.retry import verdict_for
from shoal.model import Dead, Failure, JobSpec, Lease, Request, Retry


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_retries_are_the_visits_after_the_first(retries: int) -> None:
    spec = JobSpec(retries=retries)
    ends: list[type[Retry | Dead]] = []
    for attempt in range(retries + 1):
        lease = Lease(1, Request("http://a.test/", "job", attempt=attempt), "a.test", 60.0)
        verdict = verdict_for(lease, Failure("reset"), max_attempts=spec.max_attempts, after=None, jitter=0.0)
        ends.append(type(verdict))
    assert ends == [*[Retry] * retries, Dead]


def test_a_third_failure_is_the_last_by_default() -> None:
    assert JobSpec().max_attempts == 3
