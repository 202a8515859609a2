"""Flags that several commands have, each with its help, written once.

A help text here is shown whatever a docstring says. A flag that means something else in one command has
another text there: `Annotated[Quiet, Parameter(help=…)]`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter, validators

from shoal.errors import UsageError
from shoal.model import Scope

# -- kinds of values ---------------------------------------------------------------------------


def _file_or_stdin(_type: object, value: str | None) -> None:
    if value is not None and value.startswith("-") and value != "-":
        raise ValueError(f"{value} is an option; a file, or - for stdin, comes first")


UrlsFile = Annotated[str | None, Parameter(allow_leading_hyphen=True, validator=_file_or_stdin)]
"""`-` is stdin, which cyclopts would take for an option."""
Count = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
"""A number of things. Refused where it is typed: 0 must not pass for "not given", and the error names the
flag, not the setting behind it."""
Visits = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=2000))]
Workers = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=256))]
Seconds = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]
UrlOrStdin = Annotated[str, Parameter(allow_leading_hyphen=True, validator=_file_or_stdin)]
Many = Annotated[list[str] | None, Parameter(negative=())]
Flag = Annotated[bool, Parameter(negative=())]
Switch = Annotated[bool | None, Parameter(negative=())]
"""A flag that is a setting too: not said, the settings decide."""

# -- what is asked for -------------------------------------------------------------------------

Frontier = Annotated[
    str | None,
    Parameter(
        env_var="SHOAL_FRONTIER",
        help="Where requests wait: sqlite:///path, redis://host, postgresql://host/database or memory:.",
    ),
]
Dispatch = Annotated[
    str | None,
    Parameter(env_var="SHOAL_DISPATCH", help="How leases reach workers: amqp://host; without it they claim."),
]
Json = Annotated[bool, Parameter(negative=(), help="Machine-readable output.")]
Quiet = Annotated[bool, Parameter(alias="-q", negative=(), help="Say nothing but errors.")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    Parameter(help="Lowest level to log (info; error with --quiet)."),
]
CrawlLogLevel = Annotated[
    LogLevel,
    Parameter(help="Lowest level to log (warning; error with --quiet)."),
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    Parameter(help="Log format: text, or json with one object per line (text)."),
]
Limit = Annotated[int, Parameter(validator=validators.Number(gte=1), help="At most this many.")]
JobName = Annotated[str, Parameter(help="The job's name.")]
OfJob = Annotated[str | None, Parameter(name="--job", help="Only those of this job.")]
OnlyJob = Annotated[str | None, Parameter(help="Only this job (a crawl or a run).")]
Scrapers = Annotated[str | None, Parameter(help="Your scrapers: file.py or module:app.")]
Queues = Annotated[str | None, Parameter(help="Only these queues: scraping,business")]
Concurrency = Annotated[Visits, Parameter(help="Visits of one worker at a time (16).")]
Port = Annotated[int | None, Parameter(help="Its port (8000); 0 takes a free one.")]

# -- what a crawl is asked for -----------------------------------------------------------------

AllowPrivate = Annotated[Switch, Parameter(help="Allow addresses that are not public.")]
NoRobots = Annotated[Switch, Parameter(help="Do not ask for robots.txt.")]
Rate = Annotated[str | None, Parameter(help="Visits to one host: 2/s, 30/m, none (1/s).")]
PerHost = Annotated[Count, Parameter(help="Visits to one host at a time (1).")]
Within = Annotated[Scope | None, Parameter(help="page, prefix, host, domain or any.")]
Depth = Annotated[int | None, Parameter(help="At most this many links away from the start.")]
Include = Annotated[
    Many, Parameter(help="Only URLs like this: `*/blog/*`, or `re:` and a regular expression.")
]
Exclude = Annotated[Many, Parameter(help="No URLs like this.")]
Fields = Annotated[str | None, Parameter(help="Keep only these fields of an item: title,links")]
Header = Annotated[Many, Parameter(help='Send this to the start hosts: "Name: value".')]
Cache = Annotated[
    float | None,
    Parameter(
        help="Seconds a response may be served again; more than 60: kept in the frontier, across crawls (60)."
    ),
]
Retries = Annotated[
    int | None,
    Parameter(
        validator=validators.Number(gte=0), help="Visits of a URL after the first, when that failed (2)."
    ),
]
Timeout = Annotated[Seconds, Parameter(help="Seconds one fetch may take (60).")]
UserAgent = Annotated[str | None, Parameter(help="How we introduce ourselves.")]


def headers_of(lines: list[str] | None) -> dict[str, str] | None:
    """What `--header` was given; None if it was not. Raises UsageError."""
    if not lines:
        return None
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise UsageError(f"bad header {line!r}", hint='write it like "Name: value"')
        found[name.strip()] = value.strip()
    return found


def listed(names: str | None) -> list[str] | None:
    """The names in `a,b`; None if there are none."""
    return [name.strip() for name in names.split(",") if name.strip()] if names else None
