"""Events as lines of a log."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal import logs
from shoal.events import Begun, Notice, Reconnected, Settled, Trouble, Visited
from shoal.logs import JsonFormatter, LogWatcher, TextFormatter

URL = "https://example.com/a"


def visited(outcome: str, **more: Any) -> Visited:
    fields: dict[str, Any] = {"status": 200, "error": "", "message": "", "attempt": 2, "attempts": 3}
    fields |= {"seconds": 0.035, "bytes": 9, "items": 1, "found": 0}
    return Visited("some", URL, "example.com", outcome, **(fields | more))


FAILED: dict[str, Any] = {"status": 503, "error": "http_503", "message": "the server answered 503"}


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (Begun("some", URL, "example.com", 2), "DEBUG", f"begun {URL} attempt 2"),
        (visited("done"), "INFO", f"done {URL} 200 35 ms attempt 2/3"),
        (visited("done", attempts=0), "INFO", f"done {URL} 200 35 ms attempt 2"),
        (
            visited("skipped", status=0, reason="robots"),
            "INFO",
            f"skipped {URL} 35 ms attempt 2/3: robots",
        ),
        (
            visited("retry", wait=1.24, **FAILED),
            "INFO",
            f"retry {URL} 503 35 ms attempt 2/3: http_503: the server answered 503; again in 1.2 s",
        ),
        (
            visited("dead", **FAILED),
            "WARNING",
            f"given up {URL} 503 35 ms attempt 2/3: http_503: the server answered 503",
        ),
        (visited("release", status=0), "INFO", f"released {URL} 35 ms attempt 2/3"),
        (Notice("good to know"), "INFO", "good to know"),
        (Trouble("odd"), "WARNING", "odd"),
        (Trouble("full", 2, wait=0.5), "ERROR", "Attempt 2 failed: full; again in 0.5 s"),
    ],
)
def test_a_line_for_each_event(caplog: pytest.LogCaptureFixture, event: Any, level: str, line: str) -> None:
    caplog.set_level("DEBUG")
    LogWatcher("w1")(event)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [(level, line)]
    assert caplog.records[0].__dict__["worker"] == "w1"


def test_a_batch_that_is_stored_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    LogWatcher()(Settled(3, 0, 0.1))
    assert caplog.records == []


def test_what_is_off_is_not_put_into_words(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A visit must not pay for a line that nobody reads."""
    watch = LogWatcher()
    monkeypatch.setattr(logs, "one_line", pytest.fail)
    caplog.set_level("WARNING")
    for outcome in ("done", "skipped", "retry", "release"):
        watch(Begun("some", URL, "example.com", 1))
        watch(visited(outcome))
    caplog.set_level("ERROR")
    watch(visited("dead"))
    assert caplog.records == []


def test_a_server_is_told_of_by_the_part_that_missed_it(caplog: pytest.LogCaptureFixture) -> None:
    watch = LogWatcher()
    watch(Trouble("away", 1, "redis://here", 0.5, "frontier"))
    watch(Reconnected("redis://here"))
    watch(Trouble("odd", part="dispatch"))
    assert [(each.name, each.levelname) for each in caplog.records] == [
        ("shoal.frontier", "ERROR"),
        ("shoal.frontier", "WARNING"),
        ("shoal.dispatch", "WARNING"),
    ]
    assert caplog.records[0].__dict__["server"] == "redis://here"


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = {"name": "shoal.worker", "levelno": logging.INFO, "levelname": "INFO", "msg": message}
    return logging.makeLogRecord({**made, **fields})


def test_text_is_one_line_that_steers_nothing() -> None:
    line = TextFormatter().format(record("a\r\n\x1b[31mb\u202ec\x9b", worker="w1"))
    assert line[8:] == " INFO    worker w1: a \ufffd[31mb\ufffdc\ufffd"


def test_json_has_the_fields_that_are_known() -> None:
    line = JsonFormatter().format(record("a\n\x1bé", created=0.5, url=URL, status=None, reason="", ms=0))
    assert line.isascii() and "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "info",
        "logger": "shoal.worker",
        "message": "a\n\x1bé",
        "url": URL,
        "ms": 0,
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_is_kept(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("bad\x1b")
    except ValueError:
        line = formatter.format(record("failed", exc_info=sys.exc_info()))
    assert "ValueError: bad" in line and "\x1b" not in line
    assert (json.loads(line)["exception"] if isinstance(formatter, JsonFormatter) else line).count("\n") > 1


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What was written to it since it was last asked."""
    yield lambda: capsys.readouterr().err
    logs.tear_down()


def test_setting_it_up_twice_prints_once_and_can_be_undone(stderr: Callable[[], str]) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    logs.set_up("error", "text")
    logs.set_up("info", "text")
    logging.getLogger("my.scraper").info("heard")
    logging.getLogger("shoal.worker").debug("not heard")
    assert [line.split(" ", 1)[1] for line in stderr().splitlines()] == ["INFO    my.scraper: heard"]
    logs.tear_down()
    assert (root.level, list(root.handlers)) == before


def test_what_commands_tell_is_json_where_the_log_is(stderr: Callable[[], str]) -> None:
    logs.set_up("error", "text")
    assert not logs.write_json("hello")
    logs.set_up("error", "json")
    assert logs.write_json("hello") and logs.write_json("bad", error=True, hint="do it better")
    hello, bad = map(json.loads, stderr().splitlines())
    assert (hello["level"], hello["logger"], hello["message"]) == ("info", "shoal.cli", "hello")
    assert (bad["level"], bad["hint"]) == ("error", "do it better")


def test_stderr_is_looked_up_for_each_line(
    stderr: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live display puts something else in its place."""
    logs.set_up("info", "text")
    live = io.StringIO()
    monkeypatch.setattr(sys, "stderr", live)
    logging.getLogger("shoal.worker").info("above it")
    assert "above it" in live.getvalue() and stderr() == ""
