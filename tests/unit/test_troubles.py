"""Troubles of several loops with one server, as people read them."""

from __future__ import annotations

import pytest

from shoal import logs
from shoal.engine.retry_reporter import RetryReporter
from shoal.errors import FrontierFull, FrontierUnreachable
from shoal.events import Event, Reconnected, Trouble
from shoal.logs import Troubles

HERE, THERE = "redis://here", "redis://there"


def away(server: str = HERE) -> FrontierUnreachable:
    return FrontierUnreachable(f"{server} does not answer", server=server)


def test_one_count_for_each_server_and_one_line_at_the_end() -> None:
    troubles, said = Troubles(), []

    def watch(event: Event) -> None:
        said.append(troubles.line(event))

    claims, settles, elsewhere = RetryReporter(watch), RetryReporter(watch), RetryReporter(watch)
    for reporter, wait in ((claims, 0.5), (settles, 0.7), (claims, 1.0)):
        reporter.failed(away(), wait)
    elsewhere.failed(away(THERE), 3.0)
    watch(Trouble(f"{HERE} does not answer", server=HERE))  # of a visit: known
    claims.succeeded()
    settles.succeeded()
    claims.succeeded()
    elsewhere.failed(away(THERE), 4.0)
    assert [line for line in said if line] == [
        f"Attempt 1 failed: {HERE} does not answer; again in 0.5 s",
        f"Attempt 2 failed: {HERE} does not answer; again in 0.7 s",
        f"Attempt 3 failed: {HERE} does not answer; again in 1.0 s",
        f"Attempt 1 failed: {THERE} does not answer; again in 3.0 s",
        f"Connected to {HERE} again",
        f"Attempt 2 failed: {THERE} does not answer; again in 4.0 s",
    ]


def test_what_began_before_the_server_came_back_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    troubles = Troubles()
    assert troubles.line(Trouble("away", 1, HERE))
    assert troubles.line(Reconnected(HERE))
    assert troubles.line(Trouble("away", 4, HERE)) is None
    assert troubles.line(Reconnected(HERE)) is None
    monkeypatch.setattr(logs, "LEFTOVERS", 0.0)
    assert troubles.line(Trouble("away", 5, HERE)) == "Attempt 1 failed: away", "it is gone once more"


def test_other_troubles_are_counted_by_who_has_them() -> None:
    heard: list[Event] = []
    reporter = RetryReporter(heard.append)
    for _ in range(2):
        reporter.failed(FrontierFull("no space left"))
    reporter.succeeded()
    lines = [Troubles().line(event) for event in heard]
    assert [str(line).partition(";")[0] for line in lines] == [
        "Attempt 1 failed: no space left",
        "Attempt 2 failed: no space left",
    ]
    assert Troubles().line(Trouble("something odd")) == "something odd"
