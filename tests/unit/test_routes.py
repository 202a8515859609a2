"""Routes: which rule wins, what an explicit wish is worth, and what a link inherits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import app
from shoal.dispatch.routes import (
    DEFAULT_RULES,
    PRIORITY_QUEUE,
    URL_QUEUE,
    Routes,
    Rule,
    broker_queue,
    frontier_queue,
)
from shoal.errors import UsageError
from shoal.model import JobSpec, Request
from shoal.settings import load

USUAL = Routes()
JOB = JobSpec()


@pytest.mark.parametrize(
    ("url", "queue", "priority", "ttl"),
    [
        ("https://example.com/news/today", PRIORITY_QUEUE, 8, 1800.0),
        ("https://live.example.com/", PRIORITY_QUEUE, 8, 1800.0),
        ("https://x.com/LIVE", PRIORITY_QUEUE, 8, 1800.0),
        ("https://x.com/News-1", PRIORITY_QUEUE, 8, 1800.0),
        ("https://olive.example/delivery", URL_QUEUE, 5, None),
        ("https://olive.example/DeLIVEry", URL_QUEUE, 5, None),
        ("https://httpbin.org/get", URL_QUEUE, 5, 300.0),
        ("https://eu.httpbin.example/get", URL_QUEUE, 5, 300.0),
        ("https://example.com/httpbin.html", URL_QUEUE, 5, None),
        ("http://httpbin/get", URL_QUEUE, 5, 300.0),
        ("http://httpbin:8080/get", URL_QUEUE, 5, 300.0),
        ("https://httpbingo.org/get", URL_QUEUE, 5, 300.0),
        ("https://eu.httpbin.org/get", URL_QUEUE, 5, 300.0),
        ("https://myhttpbinary.example/get", URL_QUEUE, 5, None),
        ("https://myhttpbin.example/get", URL_QUEUE, 5, None),
    ],
)
def test_the_usual_rules(url: str, queue: str, priority: int, ttl: float | None) -> None:
    route = USUAL.route(url)
    assert (route.queue, route.priority, route.ttl) == (queue, priority, ttl)


def test_the_first_rule_that_matches_wins() -> None:
    routes = Routes([Rule("*/a/*", "one"), Rule("*", "two", ack="fast")])
    assert [routes.route(f"http://x.example/{path}/").queue for path in ("a", "b")] == ["one", "two"]
    assert routes.fast == {"two"}
    assert set(routes.queues) == {"one", "two", URL_QUEUE}


def test_names_of_queues_go_both_ways() -> None:
    for name in ("scraping", "business", PRIORITY_QUEUE):
        assert frontier_queue(broker_queue(name)) == name
    assert broker_queue("scraping") == URL_QUEUE


def test_what_is_said_explicitly_counts_more_than_a_rule() -> None:
    request = Request("https://example.com/news/1", "job", queue="mine", priority=2, ttl=9.0)
    assert USUAL.submitted(request, JOB, queue=True, priority=True, ttl=True) == request
    routed = USUAL.submitted(request, JOB)
    assert (routed.queue, routed.priority, routed.ttl) == (PRIORITY_QUEUE, 8, 1800.0)
    patient = Request("https://example.com/news/1", "job", ttl=9000.0)
    assert USUAL.submitted(patient, JOB, ttl=True).ttl == 1800.0, "of two limits the smaller counts"
    named = USUAL.submitted(request, JobSpec(queue="mine"))
    assert (named.queue, named.priority, named.ttl) == ("mine", 8, 1800.0)


def test_a_link_does_not_inherit_the_rule_of_its_page() -> None:
    news = USUAL.submitted(Request("https://example.com/news/1", "job"), JOB)
    plain = Request("https://example.com/about", "job", queue=news.queue, priority=news.priority)
    found = USUAL.found(plain, news, JOB)
    assert (found.queue, found.priority, found.ttl) == ("scraping", 5, None)
    story = Request("https://example.com/news/2", "job", queue="scraping", priority=5)
    assert USUAL.found(story, Request("https://example.com/", "job"), JOB).queue == PRIORITY_QUEUE
    chosen = Request("https://example.com/news/3", "job", queue="mine", priority=7)
    assert USUAL.found(chosen, Request("https://example.com/", "job"), JOB).queue == "mine"


def test_routes_come_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ROUTES", '[{"pattern": "*/x/*", "queue": "slow", "ttl": 60, "ack": "fast"}]')
    [rule] = load().rules
    assert rule == Rule("*/x/*", "slow", ttl=60.0, ack="fast")
    for wrong in (
        '[{"pattern": "*", "priority": 10}]',
        '[{"pattern": "*", "ttl": 0}]',
        '[{"pattern": "re:("}]',
        '[{"patern": "*"}]',
        '[{"pattern": "*", "ack": "sometimes"}]',
        "nonsense",
    ):
        monkeypatch.setenv("SHOAL_ROUTES", wrong)
        with pytest.raises(UsageError):
            load()


def test_an_empty_list_turns_the_usual_rules_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load().rules == DEFAULT_RULES
    for empty in ("[]", " [ ] "):
        monkeypatch.setenv("SHOAL_ROUTES", empty)
        assert load().rules == ()
    monkeypatch.setenv("SHOAL_ROUTES", "")
    assert load().rules == DEFAULT_RULES, "an empty text is nothing said"
    monkeypatch.delenv("SHOAL_ROUTES")
    Path("shoal.toml").write_text("routes = []")
    assert load().rules == ()
    assert load(dispatch="amqp://").rules == ()
    Path("shoal.toml").write_text('[[routes]]\npattern = "*"\nqueue = "mine"')
    assert load().rules == (Rule("*", "mine"),)


@pytest.mark.parametrize("wrong", ["nonsense", '{"pattern": "*"}', '["*/x/*"]', "3", "null-", "[{]"])
def test_what_is_no_list_of_rules_is_told_with_an_example(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_ROUTES", wrong)
    with pytest.raises(UsageError, match=r"^SHOAL_ROUTES is not a JSON list of rules$") as refused:
        load()
    example = refused.value.hint.partition("SHOAL_ROUTES=")[2].strip("'")
    monkeypatch.setenv("SHOAL_ROUTES", example)
    assert load().rules == (Rule("*/news/*", PRIORITY_QUEUE),)
    monkeypatch.delenv("SHOAL_ROUTES")
    Path("shoal.toml").write_text("routes = 3")
    with pytest.raises(UsageError, match=r"^routes is not a list of rules$"):
        load()


def test_shoal_route_tells_the_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ROUTES", '[{"pattern": "*/x/*", "queue": "slow", "ttl": 60, "ack": "fast"}]')
    app(["route", "https://example.com/x/1", "--json"], result_action="return_value")
    told = json.loads(capsys.readouterr().out)
    assert (told["rule"], told["queue"], told["ttl"], told["ack"]) == (1, "slow", 60.0, "fast")
    app(["route", "https://example.com/y"], result_action="return_value")
    assert "no rule matches" in capsys.readouterr().out
