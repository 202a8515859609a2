"""Every error of the project, and every error class that a failed visit can have.

ShoalError                     one line for people, and a `hint` with the way out
├── UsageError                 exit 2: the caller asked for something impossible
│   ├── BadUrl                 `error` is a class below: url_invalid, url_too_long…
│   ├── NoSuchJob
│   ├── NoFrontier             there is no frontier at this address
│   ├── NoSuchSchedule
│   ├── ScheduleExists
│   ├── MissingExtra           an optional library is not installed
│   └── BrokenPlugin           a package offers a part that cannot be loaded
├── FrontierError              exit 4: the frontier cannot serve
│   ├── FrontierLocked         another process holds it
│   ├── FrontierCorrupt
│   ├── FrontierFull           no space left
│   └── FrontierUnreachable
├── DispatchError              exit 4: the broker cannot be reached, or refuses
│   └── DispatchRefused        the broker refuses, and will not change its mind
├── ServerAway                 exit 4: a worker process could not reach a server it needs
├── NothingFetched             exit 3: a crawl ended, and not one page was fetched
├── ExportError                a file cannot be written
└── FetchError                 `error` is a class below; becomes a verdict, never a crash

Steering                       raised by handlers to decide how their visit ends
├── Retry(after=…)
└── Drop(reason)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from shoal.addresses import without_password

INTERRUPTED = 130
"""The exit code of a command that was ended with Ctrl-C. All other exit codes belong to the errors."""


class ShoalError(Exception):
    """Something went wrong that a person can do something about."""

    exit_code = 2
    server = ""
    """The address, without its password, of a server that does not respond; empty if the cause is another."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(ShoalError):
    """The caller asked for something impossible."""


class BadUrl(UsageError):
    """A URL that is refused, and why."""

    def __init__(self, url: str, error: str, why: str) -> None:
        shown = without_password(url)
        shown = shown if len(shown) <= 200 else shown[:197] + "…"
        super().__init__(f"bad URL {shown!r}: {why}", hint="give a full http:// or https:// URL")
        self.url = url
        self.error = error
        self.why = why


class NoSuchJob(UsageError):
    def __init__(self, job: str) -> None:
        super().__init__(f"no job {job!r}", hint="`shoal jobs` lists the jobs of this frontier")


class NoFrontier(UsageError):
    """There is no frontier at this address, and reading does not create one."""

    def __init__(self, where: object) -> None:
        super().__init__(
            f"there is no frontier at {where}",
            hint="check --frontier; `shoal crawl`, `shoal enqueue` and `shoal migrate` create one",
        )


class NoSuchSchedule(UsageError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"no schedule {name!r}", hint="`shoal schedule list` lists the schedules of this frontier"
        )


class ScheduleExists(UsageError):
    def __init__(self, name: str) -> None:
        super().__init__(f"schedule {name!r} exists already", hint="--replace overwrites it")


class MissingExtra(UsageError):
    def __init__(self, what: str, extra: str) -> None:
        from shoal.calling import install

        super().__init__(f"{what} needs the extra {extra!r}, which is not installed", hint=install(extra))


class BrokenPlugin(UsageError):
    """A package offers a part by an entry point, and the part cannot be used."""

    def __init__(self, package: str, entry_point: str, why: str) -> None:
        super().__init__(
            f"the package {package} is broken: {why} (its entry point is {entry_point})",
            hint=f"upgrade or uninstall {package}",
        )


class FrontierError(ShoalError):
    """The frontier cannot serve."""

    exit_code = 4


class FrontierLocked(FrontierError):
    """Another process holds the frontier."""


class FrontierCorrupt(FrontierError):
    """The frontier's file is damaged."""


class FrontierFull(FrontierError):
    """No space is left for the frontier."""


class FrontierUnreachable(FrontierError):
    """The frontier's server does not respond."""

    def __init__(self, message: str, *, hint: str = "", server: str = "") -> None:
        super().__init__(message, hint=hint)
        self.server = server


class DispatchError(ShoalError):
    """The broker cannot be reached, or refuses a message."""

    exit_code = 4


class DispatchRefused(DispatchError):
    """The broker refuses, for a reason that does not go away by waiting."""


class ServerAway(ShoalError):
    """A worker process ended because a server that it needs does not respond."""

    exit_code = 4


class NothingFetched(ShoalError):
    """A crawl ended, and not one page was fetched. `error` is the most frequent error class, or `robots` if
    robots.txt allowed nothing."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", error: str = "") -> None:
        super().__init__(message, hint=hint)
        self.error = error
        self.add_note(f"hint: {hint}")  # scripts and notebooks show the traceback only


class ExportError(ShoalError):
    """An export cannot be written."""


class FetchError(ShoalError):
    """A fetch failed: there is no page. `error` is one of CLASSES."""

    def __init__(self, error: str, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message or error)
        self.error = error
        self.message = message
        self.retry_after = retry_after


class Steering(Exception):
    """Raised by a handler to say how its visit ends."""


class Retry(Steering):
    """Try this request again after this many seconds; None: after the usual back-off."""

    def __init__(self, after: float | None = None, reason: str = "") -> None:
        super().__init__(reason or "retry")
        self.after = after
        self.reason = reason


class Drop(Steering):
    """This page is not wanted: end the request and store nothing."""

    def __init__(self, reason: str = "dropped") -> None:
        super().__init__(reason)
        self.reason = reason


Group = Literal["timeout", "http", "connection", "content", "refused", "scraper", "internal"]


@dataclass(frozen=True, slots=True)
class ErrorClass:
    """How failures of one class are treated, everywhere."""

    group: Group
    retry: bool
    """Another attempt is worth it."""
    slows: bool = False
    """The host is in trouble: its lane rests for a while."""


# One row for each way in which a visit can fail. The name is what people filter by.
CLASSES: dict[str, ErrorClass] = {
    "dns_failed": ErrorClass("connection", retry=True),
    "dns_timeout": ErrorClass("timeout", retry=True),
    "dns_not_found": ErrorClass("connection", retry=False),
    "connect_refused": ErrorClass("connection", retry=True),
    "connect_failed": ErrorClass("connection", retry=True),
    "connect_timeout": ErrorClass("timeout", retry=True, slows=True),
    "tls_invalid": ErrorClass("connection", retry=False),
    "tls_timeout": ErrorClass("timeout", retry=True),
    "empty_reply": ErrorClass("connection", retry=True),
    "reset": ErrorClass("connection", retry=True),
    "first_byte_timeout": ErrorClass("timeout", retry=True, slows=True),
    "idle_timeout": ErrorClass("timeout", retry=True, slows=True),
    "slow_transfer": ErrorClass("timeout", retry=False, slows=True),
    "deadline": ErrorClass("timeout", retry=True, slows=True),
    "truncated": ErrorClass("content", retry=True),
    "body_too_large": ErrorClass("content", retry=False),
    "header_overflow": ErrorClass("content", retry=False),
    "decode_error": ErrorClass("content", retry=True),
    "protocol_error": ErrorClass("content", retry=False),
    "not_http": ErrorClass("content", retry=False),
    "invalid_content": ErrorClass("content", retry=False),
    "page_too_complex": ErrorClass("content", retry=False),
    "http_4xx": ErrorClass("http", retry=False),
    "http_408": ErrorClass("http", retry=True),
    "http_425": ErrorClass("http", retry=True),
    "http_429": ErrorClass("http", retry=True, slows=True),
    "http_5xx": ErrorClass("http", retry=True),
    "http_501": ErrorClass("http", retry=False),
    "http_503": ErrorClass("http", retry=True, slows=True),
    "http_other": ErrorClass("http", retry=False),
    "too_many_redirects": ErrorClass("http", retry=False),
    "redirect_invalid": ErrorClass("http", retry=False),
    "scheme_blocked": ErrorClass("refused", retry=False),
    "egress_blocked": ErrorClass("refused", retry=False),
    "url_invalid": ErrorClass("refused", retry=False),
    "url_too_long": ErrorClass("refused", retry=False),
    "url_userinfo": ErrorClass("refused", retry=False),
    "robots": ErrorClass("refused", retry=False),
    "robots_unreachable": ErrorClass("http", retry=True, slows=True),
    "handler_error": ErrorClass("scraper", retry=True),
    "handler_timeout": ErrorClass("timeout", retry=True),
    "handler_retry": ErrorClass("scraper", retry=True),
    "item_invalid": ErrorClass("scraper", retry=False),
    "no_such_scraper": ErrorClass("scraper", retry=False),
    "worker_crashed": ErrorClass("internal", retry=False),
    "expired": ErrorClass("refused", retry=False),
    "internal": ErrorClass("internal", retry=True),
}


def classify_status(status: int) -> str:
    """Returns the error class of an HTTP status that is not a success."""
    return f"http_{status}" if 400 <= status < 600 else "http_other"


def class_of(error: str) -> ErrorClass:
    """Returns how failures of a class are treated; `http_404` is treated as its family `http_4xx`."""
    known = CLASSES.get(error)
    if known is not None:
        return known
    if error.startswith("http_4"):
        return CLASSES["http_4xx"]
    if error.startswith("http_5"):
        return CLASSES["http_5xx"]
    return CLASSES["internal"]


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise one error instead of the group that a task group raises: the first ShoalError, else the first.

    Not `except*`: Python before 3.11.4 wraps what is raised in such a block in a group again.
    """
    try:
        yield
    except ExceptionGroup as group:
        errors = list(_leaves(group))
        raise next((error for error in errors if isinstance(error, ShoalError)), errors[0]) from None


def _leaves(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
