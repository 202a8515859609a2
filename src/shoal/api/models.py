"""The bodies of requests and responses. A request body that fits none of these models gets a 422.

Descriptions and docstrings of the models are shown to users at `/docs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from shoal.app.views import Format, Status
from shoal.errors import UsageError
from shoal.model import DEFAULT_PRIORITY, Scope
from shoal.politeness.pacing import parse_rate
from shoal.queues import RESERVED_QUEUES
from shoal.schedule.book import MOST_URLS, NAME, Overlap
from shoal.schedule.timing import check_cron, parse_every, zone

MAX_URLS = 10_000
DEFAULT_PAGES = 100
BUSINESS_PAGES = ("/", "/about", "/contact", "/terms", "/privacy", "/team", "/pricing")

Url = Annotated[str, StringConstraints(min_length=1, max_length=8192, strip_whitespace=True)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=500)]


def _check_queue(queue: str) -> str:
    if queue in RESERVED_QUEUES:
        raise ValueError("this queue is reserved; the default queue is scraping")
    return queue


Queue = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,48}$"), AfterValidator(_check_queue)]
FormatName = Annotated[
    Literal["json", "jsonl", "csv", "parquet", "markdown", "md"],
    AfterValidator(lambda name: "markdown" if name == "md" else name),
]
"""An output format, with `md` as an alias of `markdown`."""
State = Annotated[
    Literal["running", "paused", "cancelled", "done"],
    Field(description="State of the job in shoal's own words."),
]
JobStatus = Annotated[
    Status,
    Field(
        description=(
            "State of the job in the words of task queues: `PENDING` before its first visit, `PROGRESS` until"
            " it ends, `SUCCESS` or `FAILURE` (it fetched no page) when it is done, `REVOKED` when it was"
            " cancelled."
        )
    ),
]
NextCursor = Annotated[
    str | None, Field(description="Value of `cursor` for the next page. null on the last page.")
]

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")
_RESERVED_HEADERS = frozenset((
    "host", "connection", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "keep-alive",
    "proxy-authorization", "proxy-connection", "expect", "accept-encoding",
))  # fmt: skip


def _validator(check: Callable[[str], object]) -> Callable[[str], str]:
    """Returns a pydantic validator that keeps the text if `check` does not raise UsageError."""

    def validate(text: str) -> str:
        try:
            check(text)
        except UsageError as error:
            raise ValueError(f"{error}: {error.hint}") from None
        return text

    return validate


Rate = Annotated[Text, AfterValidator(_validator(parse_rate))]
Cron = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_validator(check_cron))]
Every = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{1,9}[smhdw]$"), AfterValidator(_validator(parse_every))
]
Zone = Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(_validator(zone))]
ScheduleName = Annotated[str, StringConstraints(pattern=NAME)]


class StrictModel(BaseModel):
    """A request body. An unknown field is an error: it is usually a typing mistake."""

    model_config = ConfigDict(extra="forbid")


class WebhookRequest(StrictModel):
    url: Url = Field(description="URL of the receiver.", examples=["https://example.com/hooks/shoal"])
    secret: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="Key that signs the event. It is never shown again.",
        json_schema_extra={"writeOnly": True},
    )


class FetchOptions(StrictModel):
    """How pages are visited. The server's settings apply to every field that is left out."""

    rate: Rate | None = Field(
        default=None,
        description="Maximum rate of visits to one host: `2/s`, `30/m`, or `none` for no limit.",
        examples=["2/s"],
    )
    per_host: int | None = Field(
        default=None, ge=1, le=100, description="Maximum number of concurrent visits to one host."
    )
    fields: list[Text] = Field(
        default=[], max_length=50, description="Fields of an item to keep. Empty keeps all."
    )
    headers: dict[str, str] = Field(
        default={},
        max_length=50,
        description="Request headers, sent to the start hosts only. They are never shown again.",
        json_schema_extra={"writeOnly": True},
    )
    retries: int | None = Field(
        default=None, ge=0, le=20, description="Maximum number of retries after a failed visit of a URL."
    )
    page_timeout: float | None = Field(
        default=None, gt=0, le=600, description="Time limit for one page, in seconds."
    )
    robots: bool | None = Field(
        default=None, description="Whether to obey robots.txt. `false` needs the scope `admin`."
    )
    allow_private: bool | None = Field(
        default=None, description="Whether to visit non-public addresses. `true` needs the scope `admin`."
    )

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _HEADER_NAME.fullmatch(name) or name.lower() in _RESERVED_HEADERS:
                raise ValueError("a header has a malformed or reserved name")
            if not _HEADER_VALUE.fullmatch(text):
                raise ValueError("a header value must be one line of printable ASCII")
        return value


class Options(FetchOptions):
    """How pages are visited, and which links a crawl follows."""

    scope: Scope | None = Field(
        default=None,
        description=(
            "Which links to follow: none (`page`), those below the start URL's path (`prefix`), on its host"
            " (`host`), on its domain (`domain`), or all (`any`)."
        ),
    )
    depth: int | None = Field(
        default=None, ge=0, le=1000, description="Maximum number of links between a start URL and a page."
    )
    include: list[Text] = Field(
        default=[], max_length=100, description="Follow only URLs that match a pattern, such as `*/blog/*`."
    )
    exclude: list[Text] = Field(
        default=[], max_length=100, description="Do not follow URLs that match a pattern, such as `*/tag/*`."
    )


class ScrapeRequest(Options):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"url": "https://example.com/", "expected_pages": 50}]}
    )

    url: Url | None = Field(default=None, description="Start URL.", examples=["https://example.com/"])
    urls: list[Url] = Field(default=[], max_length=MAX_URLS, description="More start URLs.")
    expected_pages: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description=(
            "Page limit of the job: 100 by default, or the number of start URLs if that is higher."
            " The server's own limit holds too."
        ),
        # The field itself has no default: a caller who gives more URLs than that wants all of them.
        json_schema_extra={"default": DEFAULT_PAGES},
    )
    output_format: FormatName = Field(default="json", description="Default format of the job's result.")
    priority: int = Field(
        default=DEFAULT_PRIORITY, ge=1, le=9, description="1-3 is low, 4-6 normal, 7-9 urgent."
    )
    queue: Queue | None = Field(
        default=None,
        description="Queue of the URLs. Default: `scraping`, or the one that a routing rule names.",
    )
    ttl: float | None = Field(
        default=None,
        gt=0,
        le=30 * 86400,
        description="Seconds after which start URLs expire if they have not been visited.",
    )
    webhook: WebhookRequest | None = Field(
        default=None, description="Receiver of a signed `job.finished` event."
    )

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.url is None and not self.urls:
            raise ValueError("give `url` or `urls`")
        return self

    @property
    def start(self) -> list[str]:
        return [self.url, *self.urls] if self.url is not None else self.urls


class BusinessRequest(StrictModel):
    url: Url = Field(description="Address of the site.", examples=["https://example.com/"])
    pages_to_scrape: list[Text] = Field(
        default=list(BUSINESS_PAGES),
        min_length=1,
        max_length=200,
        description=(
            "Paths on that site. If the server's page limit is lower than the number of paths, the default"
            " list is cut and a list of your own is refused."
        ),
    )
    priority: int = Field(
        default=DEFAULT_PRIORITY, ge=1, le=9, description="1-3 is low, 4-6 normal, 7-9 urgent."
    )
    output_format: FormatName = Field(default="json", description="Default format of the job's result.")
    rate: Rate | None = Field(
        default=None,
        description="Maximum rate of visits to one host: `2/s`, `30/m`, or `none` for no limit.",
    )
    allow_private: bool | None = Field(
        default=None, description="Whether to visit non-public addresses. `true` needs the scope `admin`."
    )
    webhook: WebhookRequest | None = Field(
        default=None, description="Receiver of a signed `job.finished` event."
    )


class BatchOptions(FetchOptions):
    """How the pages of a batch are visited. A batch visits the given URLs only and follows no links."""

    fields: list[Text] = Field(
        default=[],
        max_length=50,
        description=(
            "Fields of a page to keep; each result has them in `item`, and its `content` is the field `text`."
        ),
    )
    priority: int = Field(
        default=DEFAULT_PRIORITY, ge=1, le=9, description="1-3 is low, 4-6 normal, 7-9 urgent."
    )


class BatchRequest(StrictModel):
    urls: list[Url] = Field(min_length=1, max_length=MAX_URLS, description="URLs to visit.")
    distributed: bool = Field(
        default=False, description="Whether workers visit the URLs. Otherwise this server process does."
    )
    options: BatchOptions | None = Field(
        default=None, description="How to visit them. `null` is the same as `{}`."
    )
    timeout: float = Field(
        default=300.0, gt=0, le=3600, description="Seconds after which the response is sent at the latest."
    )


class Submitted(BaseModel):
    job_id: str
    status: JobStatus
    expected_pages: int = Field(description="Page limit of the job, after the server's limit was applied.")


class Progress(BaseModel):
    job_id: str
    status: JobStatus
    state: State
    progress: float = Field(
        description="Percentage of the known URLs that have been visited or have failed.", ge=0, le=100
    )
    pages_done: int = Field(description="Pages visited so far.")
    pages_total: int = Field(description="Pages known so far. The number grows while links are found.")
    failed: int = Field(description="URLs that ended dead or expired.")
    items: int = Field(description="Items stored so far.")
    queued: int = Field(description="URLs waiting for a visit.")
    active: int = Field(description="URLs being visited.")
    current_url: str | None = Field(
        description="URL being visited, or the last one visited. null before the first visit and at the end."
    )
    started_at: datetime | None = Field(
        description="When a worker took the first URL of the job. null until then."
    )
    finished_at: datetime | None
    eta_seconds: float | None = Field(description="Estimated seconds until the end. null if unknown.")
    pages_per_second: float
    errors: dict[str, int] = Field(description="Number of failed visits by error class.")


class ResultPage(BaseModel):
    job_id: str
    status: JobStatus
    items: list[dict[str, Any]]
    next_cursor: NextCursor


class BatchResult(BaseModel):
    status: Literal["success", "failed", "pending"]
    url: str
    final_url: str | None = None
    content: str | None = None
    title: str | None = None
    item: dict[str, Any] | None = Field(
        default=None, description="The requested `fields` of the page. null if none were requested."
    )
    status_code: int | None = Field(default=None, description="HTTP status of the page.")
    worker_id: str | None = Field(
        default=None,
        description="Worker that made the last visit. null if there was no visit or robots.txt forbids it.",
    )
    error: str | None = Field(default=None, description="Error class, such as `http_404`.")
    message: str | None = Field(default=None, description="Description of the error.")
    truncated: bool = Field(
        default=False,
        description="Whether the response was full and `content` was left out. The job's result has it.",
    )


class BatchStats(BaseModel):
    total: int
    success: int
    failed: int
    pending: int
    workers_used: int = Field(description="Number of workers that made visits.")


class BatchAnswer(BaseModel):
    session_id: str = Field(
        description="Id of the batch's job, for `/scrape/{job_id}/progress` and `result`."
    )
    results: list[BatchResult] = Field(description="One result per URL, in the order of the request.")
    stats: BatchStats | None
    distributed: bool
    timed_out: bool = Field(description="Whether the time limit ended the wait.")


class Availability(BaseModel):
    distributed_available: bool
    message: str = Field(description="Number of live workers, or why a distributed batch is not possible.")
    workers: int


class WorkerView(BaseModel):
    id: str
    state: Literal["working", "idle", "stuck", "silent"]
    queues: list[str] | None = Field(description="Queues it takes from. null for all queues.")
    job: str | None = Field(description="The one job it works for. null for all jobs.")
    running: int = Field(description="Visits in flight.")
    slots: int = Field(description="Maximum number of concurrent visits.")
    leases: int = Field(description="URLs it holds.")
    visits: int = Field(description="Visits since it started.")
    failed: int = Field(description="Failed visits since it started.")
    rate: float = Field(description="Visits per second in the last minute.")
    mean_seconds: float = Field(description="Mean time of a visit in the last minute.")
    p95_seconds: float = Field(description="95th percentile of the time of a visit in the last minute.")
    still_seconds: float = Field(description="Seconds for which visits have been running and none has ended.")
    since: datetime = Field(description="When it started.")
    last_heartbeat: datetime
    seen_ago: float = Field(description="Seconds since the last heartbeat, by the frontier's clock.")
    current: dict[str, str] = Field(description="URL of the latest visit it began, by job.")
    version: str


class QueueView(BaseModel):
    active: int
    waiting: int
    delayed: int
    dead: int
    workers: int = Field(description="Number of live workers that take from this queue.")


class QueueStatus(BaseModel):
    active: int = Field(description="URLs being visited.")
    waiting: int = Field(description="URLs waiting for a visit.")
    delayed: int = Field(description="URLs waiting for a retry or for a later time.")
    dead: int = Field(description="URLs that ended dead or expired.")
    queues: dict[str, QueueView]
    workers: list[WorkerView]
    throughput: float = Field(description="Visits per second of all workers in the last minute.")
    mean_seconds: float = Field(description="Mean time of a visit.")
    p95_seconds: float = Field(description="The slowest worker's 95th percentile of the time of a visit.")


class Part(BaseModel):
    name: str
    healthy: bool
    needed: bool = Field(description="Whether the service cannot work without this part.")
    detail: str


class Health(BaseModel):
    status: Literal["healthy", "starting", "unhealthy"] = Field(
        description="`starting`: the service's own workers are still starting, and nothing else is wrong."
    )
    healthy: bool
    reasons: list[str] = Field(description="Why `healthy` is false.")
    parts: list[Part]
    workers: int = Field(description="Number of live workers.")
    pending: int = Field(description="URLs waiting for a visit.")
    completed: int = Field(
        description="URLs visited, of jobs that are running or ended within the last hour."
    )
    failed: int = Field(description="URLs of the same jobs that ended dead or expired.")
    version: str


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class WebhookView(BaseModel):
    url: str
    state: Literal["waiting", "delivered", "failed"]
    attempts: int = Field(description="Number of attempts so far.")
    error: str | None = Field(
        description="Why the last attempt failed. null if none has failed or the event was delivered."
    )


class JobView(BaseModel):
    """A job. Its headers and secrets are never shown, only whether it has any."""

    job: str = Field(description="The same as `job_id`: the name that the commands use.")
    job_id: str
    status: JobStatus
    state: State
    pending: int = Field(description="URLs waiting for a visit.")
    claimed: int = Field(description="URLs being visited.")
    completed: int = Field(description="URLs visited.")
    failed: int = Field(description="URLs that ended dead or expired.")
    remaining: int = Field(description="Sum of `pending` and `claimed`.")
    scraper: str
    start: list[str] = Field(description="Start URLs, the first hundred at most.")
    queue: str
    priority: int
    scope: Scope
    max_pages: int | None = Field(description="Page limit. null for none.")
    output_format: Format
    has_headers: bool = Field(description="Whether visits send headers of the job.")
    webhook: str | None = Field(description="URL that receives the `job.finished` event.")
    created_at: datetime
    finished_at: datetime | None
    seconds: float = Field(description="Seconds from its creation to its end, or until now.")
    pages_per_second: float
    eta_seconds: float | None = Field(description="Estimated seconds until the end. null if unknown.")
    counts: dict[str, int] = Field(description="The job's counters by name.")
    errors: dict[str, int] = Field(description="Number of failed visits by error class.")


class JobDetail(JobView):
    progress: Progress
    webhook_delivery: WebhookView | None


class JobList(BaseModel):
    jobs: list[JobView]
    next_cursor: NextCursor


class DeadView(BaseModel):
    id: int
    job: str = Field(description="The same as `job_id`: the name that the commands use.")
    job_id: str
    url: str
    host: str
    state: Literal["dead", "expired"]
    error: str = Field(description="Error class, such as `http_404`.")
    message: str
    attempts: int = Field(description="Number of visits.")
    depth: int = Field(description="Number of links between a start URL and this one.")
    queue: str
    priority: int
    method: str
    label: str = Field(description="Label of the handler that would have taken the page.")
    origin: str = Field(description="URL that redirected to this one. Empty if none did.")
    ended_at: datetime
    worker: str | None = Field(description="Worker that made the last visit. null if there was no visit.")


class DeadList(BaseModel):
    dead: list[DeadView]
    next_cursor: NextCursor


class DeadGroupView(BaseModel):
    host: str
    error: str
    count: int
    example: str = Field(description="One URL of the group.")


class DeadGroups(BaseModel):
    groups: list[DeadGroupView]
    next_cursor: NextCursor


class DeadSelection(StrictModel):
    """Which dead letters: those that match every given field, or all of them with `all`."""

    job_id: Text | None = Field(default=None, description="Dead letters of this job.")
    host: Annotated[str, StringConstraints(max_length=300)] | None = Field(
        default=None, description="Dead letters of this host. Empty for invalid URLs, which have none."
    )
    error: Text | None = Field(
        default=None, description="Dead letters with this error class, such as `http_404`."
    )
    ids: list[Annotated[int, Field(ge=1, lt=2**63)]] | None = Field(
        default=None, min_length=1, max_length=10_000, description="Dead letters with these ids."
    )
    all: bool = Field(default=False, description="Every dead letter. Cannot be combined with other fields.")

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        filtered = any(value is not None for value in (self.job_id, self.host, self.error, self.ids))
        if filtered == self.all:
            raise ValueError("give job_id, host, error or ids; or `all: true` to select every dead letter")
        return self


class DeadRetry(DeadSelection):
    reset_attempts: bool = Field(
        default=False, description="Whether each URL gets all its attempts again, instead of one more."
    )


class Retried(BaseModel):
    retried: int


class Purged(BaseModel):
    purged: int


class LaneView(BaseModel):
    host: str
    rate: str = Field(description="Maximum rate of visits, such as `2/s`.")
    concurrency: int = Field(description="Maximum number of concurrent visits.")
    burst: int = Field(description="Number of visits that may follow each other without a delay.")
    asked: str | None = Field(description="Rate that the host itself asked for, in robots.txt for example.")
    pinned: bool = Field(description="Whether the pace was set by hand and jobs cannot change it.")
    paused: bool
    active: int = Field(description="Visits in flight.")
    waiting: int = Field(description="URLs waiting for a visit.")
    ready_at: datetime | None = Field(description="When the next visit may begin.")
    blocked_until: datetime | None = Field(description="End of a rest that errors or the host imposed.")


class LaneList(BaseModel):
    lanes: list[LaneView]
    next_cursor: NextCursor


class LaneChange(StrictModel):
    """New pace of a host. Fields that are left out keep their value; a host that is new has those of a new
    job. A pace that was set stays pinned until `pinned` is set to false."""

    rate: Rate | None = Field(
        default=None,
        description="Maximum rate of visits: `2/s`, `30/m`, or `none` for no limit.",
        examples=["2/s"],
    )
    concurrency: int | None = Field(
        default=None, ge=1, le=2000, description="Maximum number of concurrent visits."
    )
    burst: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="Number of visits that may follow each other without a delay.",
    )
    pinned: bool | None = Field(
        default=None, description="Whether this pace holds whatever jobs and the host itself ask for."
    )

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if all(value is None for value in (self.rate, self.concurrency, self.burst, self.pinned)):
            raise ValueError("nothing to change: give rate, concurrency, burst or pinned")
        return self


class ScheduleTiming(StrictModel):
    """When a schedule fires."""

    cron: Cron | None = Field(
        default=None,
        description="Cron expression: minute, hour, day of month, month, weekday; or `@daily` and the like.",
        examples=["0 6 * * MON-FRI"],
    )
    every: Every | None = Field(default=None, description="Interval, instead of `cron`: `15m`, `6h`, `1d`.")
    timezone: Zone | None = Field(
        default=None, description="Time zone of `cron`. Default: UTC.", examples=["Europe/Berlin"]
    )
    overlap: Overlap | None = Field(
        default=None,
        description=(
            "What to do when it is due while its last job is still running: `skip` the firing (default)"
            " or `allow` it."
        ),
    )
    catch_up: bool | None = Field(
        default=None,
        description=(
            "Whether firings missed while no service was running are made up for one by one, instead of by a"
            " single one. Needs overlap `allow`."
        ),
    )
    paused: bool | None = Field(default=None, description="Whether it does not fire.")


class ScheduleRequest(ScheduleTiming, ScrapeRequest):
    """A job, with the fields of `POST /scrape`, and when to submit it. Give `cron` or `every`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "news", "cron": "0 6 * * *", "url": "https://example.com/", "depth": 1}]
        }
    )

    name: ScheduleName = Field(examples=["news"])
    scraper: Text | None = Field(
        default=None,
        description="A scraper of the server's application. If no URLs are given, it starts from its own.",
    )
    replace: bool = Field(default=False, description="Whether to replace a schedule of the same name.")
    urls: list[Url] = Field(default=[], max_length=MOST_URLS, description="More start URLs.")

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.url is None and not self.urls and self.scraper is None:
            raise ValueError("give `url`, `urls` or `scraper`")
        if (self.cron is None) == (self.every is None):
            raise ValueError("give either `cron` or `every`")
        return self


class ScheduleChange(ScheduleTiming):
    """When a schedule fires. Fields that are left out keep their value. To change the job that it submits,
    use `POST` with `replace`."""

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if all(value is None for value in self.model_dump().values()):
            raise ValueError("nothing to change: give cron, every, timezone, overlap, catch_up or paused")
        return self


class ScheduleView(BaseModel):
    """A schedule. Headers and secrets of its jobs are never shown, only whether there are any."""

    name: str
    cron: str | None
    every: str | None
    timezone: str
    overlap: Overlap
    catch_up: bool
    paused: bool
    scraper: str
    start: list[str] = Field(
        description="Start URLs, the first hundred at most. Empty if the scraper starts from its own."
    )
    queue: str
    priority: int
    scope: Scope
    depth: int | None
    max_pages: int | None = Field(description="Page limit of its jobs. null for none.")
    output_format: Format
    has_headers: bool = Field(description="Whether visits send headers of the job.")
    webhook: str | None = Field(description="URL that receives the `job.finished` event.")
    created_at: datetime
    next_at: datetime | None = Field(
        description="Next firing. null if the schedule is paused or will never fire again."
    )
    last_at: datetime | None = Field(description="Last firing.")
    last_job: str | None = Field(description="Job of the last firing.")
    fired: int = Field(description="Number of firings.")
    skipped: int = Field(description="Number of firings skipped because the last job was still running.")
    error: str | None = Field(description="Why the last firing failed. It is tried again.")


class ScheduleList(BaseModel):
    schedules: list[ScheduleView]
    next_cursor: NextCursor


class WorkerList(BaseModel):
    workers: list[WorkerView]
    next_cursor: NextCursor


class FieldError(BaseModel):
    where: str = Field(description="Path of the field, such as `body.url`.")
    message: str


class ProblemView(BaseModel):
    """A problem document (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str = Field(description="Name of the HTTP status.")
    status: int = Field(description="HTTP status.")
    detail: str = Field(description="What went wrong.")
    hint: str | None = Field(default=None, description="How to solve it.")
    errors: list[FieldError] | None = Field(default=None, description="Every invalid field of the request.")
