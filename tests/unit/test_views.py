"""One place turns things into JSON: `--json` prints it, and the API tells the same, field by field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import BaseModel

from shoal.api import models
from shoal.app import views
from shoal.model import (
    Counts,
    DeadGroup,
    DeadLetter,
    Failure,
    Heartbeat,
    Job,
    JobSpec,
    JobState,
    Lane,
    Request,
    Webhook,
    WorkerStatus,
)
from shoal.schedule.book import Schedule

NOW = 1_700_000_100.25
SPEC = JobSpec(
    start=tuple(f"http://a.test/{number}" for number in range(101)),
    headers={"Authorization": "planted-secret"},
    webhook=Webhook("http://hook.test/", "planted-secret"),
    output="csv",
)
COUNTS = Counts(added=10, waiting=2, delayed=1, leased=1, done=4, skipped=1, dead=1, expired=1, items=3)
JOB = Job("news", SPEC, JobState.RUNNING, COUNTS, {"http_404": 1}, NOW - 100.0, started_at=NOW - 60.0)
ENDED = Job("old", JobSpec(), JobState.CANCELLED, Counts(added=1, cancelled=1), {}, NOW - 9.5, NOW - 4.0)
BEAT = Heartbeat(
    "here_1_1", ("scraping",), "news", 10, 3, 7, 1, 2.5, 0.5, 1.5, 3.0, {"news": "http://a.test/"}
)
WORKER = WorkerStatus(BEAT, NOW - 50.0, NOW - 2.5, 4, NOW)
LETTER = DeadLetter(
    3,
    Request("http://a.test/", "news", label="page", attempt=3, origin="http://b.test/"),
    "a.test",
    Failure("http_404", "gone", "here_1_1"),
    NOW,
)
LANE = Lane("a.test", 2.0, 3, 1, 10.0, True, False, 2, 8, NOW + 1.5, NOW + 60.0)
FREE = Lane("b.test", 0.0, 1, 0, 0.0, False, True, 0, 0, None, math.inf)
SCHEDULE = Schedule("news", SPEC, cron="0 6 * * *", created_at=int(NOW), next_at=int(NOW) + 60)

VIEWS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (models.JobView, views.job_view(JOB, NOW)),
    (models.JobView, views.job_view(ENDED, NOW)),
    (models.WorkerView, views.worker_view(WORKER)),
    (models.DeadView, views.dead_view(LETTER)),
    (models.DeadGroupView, views.dead_group_view(DeadGroup("a.test", "http_404", 2, "http://a.test/"))),
    (models.LaneView, views.lane_view(LANE, NOW)),
    (models.LaneView, views.lane_view(FREE, NOW)),
    (models.ScheduleView, views.schedule_view(SCHEDULE)),
]


@pytest.mark.parametrize(("model", "view"), VIEWS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_api_tells_the_same_in_the_same_words(model: type[BaseModel], view: dict[str, Any]) -> None:
    assert model.model_validate(view).model_dump(mode="json") == view
    assert list(model.model_fields) == list(view), "in the same order, and nothing more"
    assert "planted-secret" not in str(view)


def test_a_job_has_the_words_of_runs_and_every_counter() -> None:
    view = views.job_view(JOB, NOW)
    runs = ("pending", "claimed", "completed", "failed", "remaining")
    assert [view[word] for word in runs] == [3, 1, 4, 2, 4]
    assert view["counts"]["skipped"] == 1 and view["status"] == "PROGRESS"
    assert (view["created_at"], view["finished_at"]) == ("2023-11-14T22:13:20.250000Z", None)
    # Three pages in the minute since a worker took the first; four URLs left, six have ended.
    assert (view["seconds"], view["pages_per_second"], view["eta_seconds"]) == (100.0, 0.05, 40.0)
    assert len(view["start"]) == views.SHOWN_STARTS
    old = views.job_view(ENDED, NOW)
    assert (old["status"], old["seconds"], old["eta_seconds"]) == ("REVOKED", 5.5, None)


def test_a_lane_is_told_as_people_write_it() -> None:
    view = views.lane_view(LANE, NOW)
    assert (view["rate"], view["asked"], view["concurrency"], view["active"]) == ("30/m", "6/m", 3, 2)
    assert view["blocked_until"] == "2023-11-14T22:16:00.250000Z"
    assert views.lane_view(LANE, NOW + 61.0)["blocked_until"] is None, "it is over"
    assert views.lane_view(FREE, NOW)["blocked_until"] is None, "for ever has no date"
