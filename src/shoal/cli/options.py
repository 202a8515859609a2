"""Flags that several commands share, each with its help text.

A help text here wins over a docstring. Where a flag means something else in one command, that command
overrides the text: `Annotated[Quiet, Parameter(help=…)]`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter, validators

from shoal.errors import UsageError
from shoal.model import Scope

# -- kinds of values ---------------------------------------------------------------------------


def _file_or_stdin(_type: object, value: str | None) -> None:
    if value is not None and value.startswith("-") and value != "-":
        raise ValueError(f"{value} is an option; give a file, or - for stdin, before it")


UrlsFile = Annotated[str | None, Parameter(allow_leading_hyphen=True, validator=_file_or_stdin)]
"""Accepts `-` for stdin, which cyclopts would take for an option."""
Count = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
"""A number of things. It is checked when the flag is parsed: 0 must not pass for "not given", and the error
must name the flag, not the setting behind it."""
Visits = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=2000))]
Workers = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=256))]
Seconds = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]
UrlOrStdin = Annotated[str, Parameter(allow_leading_hyphen=True, validator=_file_or_stdin)]
Many = Annotated[list[str] | None, Parameter(negative=())]
Flag = Annotated[bool, Parameter(negative=())]
Switch = Annotated[bool | None, Parameter(negative=())]
"""A flag that is a setting too: without it, the settings decide."""

# -- flags of many commands -------------------------------------------------------------------------

Frontier = Annotated[
    str | None,
    Parameter(
        env_var="SHOAL_FRONTIER",
        help="Where URLs and results are stored: sqlite:///path, redis://host, postgresql://host/database"
        " or memory: (default .shoal/shoal.db).",
    ),
]
Dispatch = Annotated[
    str | None,
    Parameter(
        env_var="SHOAL_DISPATCH",
        help="Message broker that delivers URLs to workers: amqp://host. Without one, workers claim URLs from"
        " the frontier.",
    ),
]
Json = Annotated[bool, Parameter(negative=(), help="Print JSON.")]
Quiet = Annotated[bool, Parameter(alias="-q", negative=(), help="Print nothing but errors.")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    Parameter(help="Lowest level to log (default info; error with --quiet)."),
]
CrawlLogLevel = Annotated[
    LogLevel,
    Parameter(help="Lowest level to log (default warning; error with --quiet)."),
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    Parameter(help="Log format: text, or json with one object per line (default text)."),
]
Limit = Annotated[int, Parameter(validator=validators.Number(gte=1), help="Show at most this many.")]
JobName = Annotated[str, Parameter(help="The job's name.")]
OfJob = Annotated[str | None, Parameter(name="--job", help="Limit to this job.")]
OnlyJob = Annotated[str | None, Parameter(help="Limit to this job (a crawl or a run).")]
Scrapers = Annotated[str | None, Parameter(help="Where your scrapers are defined: file.py or module:app.")]
Queues = Annotated[
    str | None, Parameter(help="Limit to these queues, separated by commas: scraping,business")
]
Concurrency = Annotated[Visits, Parameter(help="Pages that each worker fetches at a time (default 16).")]
Port = Annotated[int | None, Parameter(help="Port to listen on (default 8000); 0 picks a free one.")]

# -- flags of a crawl -----------------------------------------------------------------

AllowPrivate = Annotated[
    Switch, Parameter(help="Allow private and loopback addresses; they are blocked by default.")
]
NoRobots = Annotated[Switch, Parameter(help="Neither fetch nor obey robots.txt.")]
Rate = Annotated[str | None, Parameter(help="Maximum rate per host: 2/s, 30/m or none (default 1/s).")]
PerHost = Annotated[Count, Parameter(help="Pages fetched from one host at a time (default 1).")]
Within = Annotated[Scope | None, Parameter(help="How far to follow links (default host).")]
Depth = Annotated[
    int | None,
    Parameter(
        help="Maximum number of links away from the start (default: no limit; 5 with --scope domain or any)."
    ),
]
Include = Annotated[
    Many,
    Parameter(
        help="Fetch only URLs that match: `*/blog/*`, or `re:` and a regular expression; can be repeated."
    ),
]
Exclude = Annotated[Many, Parameter(help="Skip URLs that match; written like --include.")]
Fields = Annotated[str | None, Parameter(help="Keep only these fields of each item: title,links")]
Header = Annotated[
    Many, Parameter(help='Send this header to the start hosts: "Name: value". Can be repeated.')
]
Cache = Annotated[
    float | None,
    Parameter(
        help="Reuse a response for this many seconds (default 60). Above 60, responses are kept in the"
        " frontier, and later crawls reuse them."
    ),
]
Retries = Annotated[
    int | None,
    Parameter(
        validator=validators.Number(gte=0),
        help="How many times a failed URL is retried (default 2).",
    ),
]
Timeout = Annotated[Seconds, Parameter(help="Maximum number of seconds for one fetch (default 60).")]
UserAgent = Annotated[str | None, Parameter(help="The User-Agent header to send.")]


def headers_of(lines: list[str] | None) -> dict[str, str] | None:
    """Returns the headers that `--header` named; None if there were none. Raises UsageError."""
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
    """Returns the names in `a,b`; None if there are none."""
    return [name.strip() for name in names.split(",") if name.strip()] if names else None
