"""Events as log records, and how commands print them. Each part has a child of the logger `shoal`:

    shoal.worker     one line per visit: begun (debug), finished (info), given up (warning)
    shoal.frontier   each failed attempt to use the frontier (error), and the recovery (warning)
    shoal.pump       the same for the pump
    shoal.dispatch   the same for the broker

`LogWatcher` creates records and configures nothing: a program that uses the library decides where they go.
Commands call `set_up`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from shoal.events import Begun, Event, Notice, Part, Reconnected, Settled, Trouble, Visited
from shoal.printing import one_line

LEFTOVERS = 2.0
"""Seconds after a server came back in which failures are of attempts that began before."""
VERDICTS = {"release": "released"}
"""Names of verdicts in the log that differ from those in events."""
WORDS = {"dead": "given up"}
"""First words of lines that differ from the verdict."""

_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""Attributes of every record: all others are fields."""

_loggers: dict[Part, logging.Logger] = {
    part: logging.getLogger(f"shoal.{part}") for part in ("worker", "frontier", "pump", "dispatch")
}
_worker = _loggers["worker"]


class Troubles:
    """Troubles as lines for people: one count of the attempts for each server, however many loops of a
    worker try, and one line when it is there again."""

    def __init__(self) -> None:
        self._attempts: Counter[str] = Counter()
        self._over: dict[str, float] = {}

    def line(self, event: Event) -> str | None:
        """What to say of an event; None for most."""
        if isinstance(event, Reconnected):
            if not self._attempts.pop(event.server, 0):
                return None
            self._over[event.server] = time.monotonic()
            return f"Connected to {event.server} again"
        if isinstance(event, Notice):
            return event.what
        if not isinstance(event, Trouble):
            return None
        attempt = event.attempt
        if event.server:
            if time.monotonic() - self._over.get(event.server, -LEFTOVERS) < LEFTOVERS:
                return None
            if not attempt and self._attempts[event.server]:
                return None  # known
            if attempt:
                self._attempts[event.server] += 1
                attempt = self._attempts[event.server]
        again = f"; again in {event.wait:.1f} s" if event.wait is not None else ""
        return f"Attempt {attempt} failed: {event.what}{again}" if attempt else event.what


class LogWatcher:
    """A watcher that logs events. With the level off, a visit costs half a microsecond (two events)."""

    def __init__(self, worker: str = "", troubles: Troubles | None = None) -> None:
        """`worker` is the name in the records. Watchers with the same `troubles` share the count of attempts
        to reach a server."""
        self._worker = worker
        self._troubles = troubles or Troubles()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Visited):
            level = logging.WARNING if event.outcome == "dead" else logging.INFO
            if _worker.isEnabledFor(level):
                self._visited(event, level)
        elif isinstance(event, Begun):
            if _worker.isEnabledFor(logging.DEBUG):
                self._begun(event)
        elif not isinstance(event, Settled):
            self._happened(event)

    def _begun(self, event: Begun) -> None:
        fields: dict[str, Any] = {"url": event.url, "host": event.lane, "job": event.job}
        fields |= {"worker": self._worker, "verdict": "begun", "attempt": event.attempt}
        _worker.debug("begun %s attempt %d", one_line(event.url), event.attempt, extra=fields)

    def _visited(self, event: Visited, level: int) -> None:
        verdict = VERDICTS.get(event.outcome, event.outcome)
        ms = round(event.seconds * 1000)
        fields: dict[str, Any] = {
            "url": event.url,
            "host": event.lane,
            "job": event.job,
            "worker": self._worker,
            "verdict": verdict,
            "status": event.status or None,
            "ms": ms,
            "attempt": event.attempt,
            "max_attempts": event.attempts or None,
        }
        why = event.reason
        if event.error:
            fields |= {"error": event.error, "error_message": event.message}
            why = f"{event.error}: {event.message}" if event.message else event.error
        elif event.reason:
            fields["reason"] = event.reason
        if event.outcome == "retry":
            fields["wait"] = round(event.wait, 3)
            why += f"; again in {event.wait:.1f} s"
        _worker.log(
            level,
            "%s %s %s%d ms attempt %d%s%s",
            WORDS.get(verdict, verdict),
            one_line(event.url),
            f"{event.status} " if event.status else "",
            ms,
            event.attempt,
            f"/{event.attempts}" if event.attempts else "",
            f": {one_line(why)}" if why else "",
            extra=fields,
        )

    def _happened(self, event: Event) -> None:
        # Counted even if it is not logged: later lines depend on the count.
        line = self._troubles.line(event)
        if line is None or isinstance(event, Begun | Visited | Settled):
            return
        level = logging.INFO if isinstance(event, Notice) else logging.WARNING
        fields: dict[str, Any] = {"worker": self._worker} if self._worker else {}
        if not isinstance(event, Notice) and event.server:
            fields["server"] = event.server
        if isinstance(event, Trouble) and event.attempt:
            level = logging.ERROR
            fields["attempt"] = event.attempt
            if event.wait is not None:
                fields["wait"] = round(event.wait, 3)
        _loggers[event.part].log(level, "%s", one_line(line), extra=fields)


class TextFormatter(logging.Formatter):
    """`12:03:04 INFO    worker host_123_1: done https://example.com/a 200 35 ms attempt 1/3`"""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        who = " ".join(filter(None, (record.name.removeprefix("shoal."), record.__dict__.get("worker"))))
        line = one_line(f"{when} {record.levelname:<7} {who}: {record.getMessage()}")
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line = "\n".join([line, *map(one_line, trace)])
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object: time, level, logger, message, and the fields that have a value."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = record.__dict__.items()
        line |= {name: value for name, value in fields if name not in _USUAL and value not in (None, "")}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: no control character is left


class Stderr(logging.Handler):
    """Writes each record at once to the current `sys.stderr`: a live display replaces it while it is shown,
    and prints lines above itself."""

    def __init__(self) -> None:
        super().__init__()
        root = logging.getLogger()
        self._before = root.level
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def remove(self) -> None:
        root = logging.getLogger()
        root.removeHandler(self)
        root.setLevel(self._before)


def set_up(level: str, form: str) -> None:
    """Log to stderr from this level on, as `text` or `json`. Includes what scrapers log."""
    tear_down()
    handler = Stderr()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(_is_wanted)
    logging.getLogger().setLevel(level.upper())


def _is_wanted(record: logging.LogRecord) -> bool:
    """Commands report themselves that the API server starts and stops."""
    return record.levelno >= logging.WARNING or not record.name.startswith("uvicorn")


def tear_down() -> None:
    """Undo `set_up`, for a command that runs inside another program."""
    for handler in _ours():
        handler.remove()


def is_json() -> bool:
    """Whether a command logs as JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in _ours())


def write_json(text: str, *, error: bool = False, **fields: str) -> bool:
    """Log a message of a command whatever the level, if the format is JSON: a reader of it expects no other
    lines. Returns False if the format is another."""
    for handler in _ours():
        if isinstance(handler.formatter, JsonFormatter):
            level = logging.ERROR if error else logging.INFO
            values = {"name": "shoal.cli", "msg": text, "levelno": level}
            handler.handle(
                logging.makeLogRecord({**values, "levelname": logging.getLevelName(level), **fields})
            )
            return True
    return False


def _ours() -> list[Stderr]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, Stderr)]
