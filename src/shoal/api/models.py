"""What goes in and out over HTTP. Whatever a stranger sends is one of the requests here, or a 422."""

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


def _for_work(queue: str) -> str:
    if queue in RESERVED_QUEUES:
        raise ValueError("no work may wait in this queue; scraping is the usual one")
    return queue


Queue = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,48}$"), AfterValidator(_for_work)]
FormatGiven = Annotated[
    Literal["json", "jsonl", "csv", "parquet", "markdown", "md"],
    AfterValidator(lambda name: "markdown" if name == "md" else name),
]
"""A format as people write it."""
State = Literal["running", "paused", "cancelled", "done"]

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")
_OURS = frozenset((
    "host", "connection", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "keep-alive",
    "proxy-authorization", "proxy-connection", "expect", "accept-encoding",
))  # fmt: skip


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    def checked(text: str) -> str:
        try:
            check(text)
        except UsageError as error:
            raise ValueError(f"{error}: {error.hint}") from None
        return text

    return checked


Rate = Annotated[Text, AfterValidator(_checked(parse_rate))]
Cron = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_checked(check_cron))]
Every = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{1,9}[smhdw]$"), AfterValidator(_checked(parse_every))
]
Zone = Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(_checked(zone))]
ScheduleName = Annotated[str, StringConstraints(pattern=NAME)]


class StrictModel(BaseModel):
    """A request. A field that nobody knows is an error: it is usually a typing mistake."""

    model_config = ConfigDict(extra="forbid")


class WebhookGiven(StrictModel):
    url: Url = Field(examples=["https://example.com/hooks/shoal"])
    secret: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="Signs the message; never shown again.", json_schema_extra={"writeOnly": True}
    )


class FetchOptions(StrictModel):
    """How pages are visited. What is left out is as the server's settings say."""

    rate: Rate | None = Field(
        default=None, description="Visits to one host: `2/s`, `30/m`, `none`.", examples=["2/s"]
    )
    per_host: int | None = Field(default=None, ge=1, le=100, description="Visits to one host at a time.")
    fields: list[Text] = Field(default=[], max_length=50, description="Keep only these fields of an item.")
    headers: dict[str, str] = Field(
        default={},
        max_length=50,
        description="Sent to the start hosts only; never shown again.",
        json_schema_extra={"writeOnly": True},
    )
    retries: int | None = Field(
        default=None, ge=0, le=20, description="Visits of a URL after the first, when that failed."
    )
    page_timeout: float | None = Field(default=None, gt=0, le=600, description="Seconds for one page.")
    robots: bool | None = Field(default=None, description="Obey robots.txt. `false` needs the scope admin.")
    allow_private: bool | None = Field(
        default=None, description="Allow addresses that are not public. `true` needs the scope admin."
    )

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _HEADER_NAME.fullmatch(name) or name.lower() in _OURS:
                raise ValueError("a header name that cannot be sent")
            if not _HEADER_VALUE.fullmatch(text):
                raise ValueError("a header value must be one line of plain text")
        return value


class Options(FetchOptions):
    """The same, and how far a crawl goes."""

    scope: Scope | None = Field(
        default=None, description="How far from the start: page, prefix, host, domain, any."
    )
    depth: int | None = Field(default=None, ge=0, le=1000, description="At most so many links away.")
    include: list[Text] = Field(default=[], max_length=100, description="Only URLs like these: `*/blog/*`.")
    exclude: list[Text] = Field(default=[], max_length=100)


class ScrapeRequest(Options):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"url": "https://example.com/", "expected_pages": 50}]}
    )

    url: Url | None = Field(default=None, description="Where to start.", examples=["https://example.com/"])
    urls: list[Url] = Field(default=[], max_length=MAX_URLS, description="More places to start.")
    expected_pages: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="At most so many pages: 100, or as many as there are URLs. The server caps it.",
        # Not the default of the field: whoever gives more URLs than that means all of them.
        json_schema_extra={"default": DEFAULT_PAGES},
    )
    output_format: FormatGiven = "json"
    priority: int = Field(
        default=DEFAULT_PRIORITY, ge=1, le=9, description="1-3 low, 4-6 normal, 7-9 urgent."
    )
    queue: Queue | None = Field(
        default=None, description="`scraping`, unless a routing rule of the server names another for a URL."
    )
    ttl: float | None = Field(
        default=None,
        gt=0,
        le=30 * 86400,
        description="Start URLs that were not visited within so many seconds expire.",
    )
    webhook: WebhookGiven | None = None

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if self.url is None and not self.urls:
            raise ValueError("give `url` or `urls`")
        return self

    @property
    def start(self) -> list[str]:
        return [self.url, *self.urls] if self.url is not None else self.urls


class BusinessRequest(StrictModel):
    url: Url = Field(description="The site.", examples=["https://example.com/"])
    pages_to_scrape: list[Text] = Field(
        default=list(BUSINESS_PAGES),
        min_length=1,
        max_length=200,
        description="Paths on that site. The server caps the usual ones, and refuses more that are given.",
    )
    priority: int = Field(default=DEFAULT_PRIORITY, ge=1, le=9)
    output_format: FormatGiven = "json"
    rate: Rate | None = None
    allow_private: bool | None = None
    webhook: WebhookGiven | None = None


class BatchOptions(FetchOptions):
    """How the pages of a batch are visited. There is no more: it visits what is given, and no links."""

    fields: list[Text] = Field(
        default=[],
        max_length=50,
        description="Keep only these fields of a page; each result has them in `item`. `content` is `text`.",
    )
    priority: int = Field(
        default=DEFAULT_PRIORITY, ge=1, le=9, description="1-3 low, 4-6 normal, 7-9 urgent."
    )


class BatchRequest(StrictModel):
    urls: list[Url] = Field(min_length=1, max_length=MAX_URLS)
    distributed: bool = Field(default=False, description="By the workers; otherwise by this process.")
    options: BatchOptions | None = Field(default=None, description="`null` is the same as `{}`.")
    timeout: float = Field(
        default=300.0, gt=0, le=3600, description="Answer after so many seconds at the latest."
    )


class Submitted(BaseModel):
    job_id: str
    status: Status
    expected_pages: int = Field(description="The page limit that holds.")


class Progress(BaseModel):
    job_id: str
    status: Status
    state: State
    progress: float = Field(description="Percent of the URLs known so far.", ge=0, le=100)
    pages_done: int
    pages_total: int = Field(description="Known so far; grows while links are found.")
    failed: int
    items: int
    queued: int
    active: int
    current_url: str | None = Field(
        description="Being visited, or the last one that was; null before the first and at the end."
    )
    started_at: datetime | None = Field(description="When a worker first took a URL of it; null before.")
    finished_at: datetime | None
    eta_seconds: float | None
    pages_per_second: float
    errors: dict[str, int] = Field(description="Failed visits by error class.")


class ResultPage(BaseModel):
    job_id: str
    status: Status
    items: list[dict[str, Any]]
    next_cursor: str | None = Field(description="Pass it as `cursor` for the next page; null at the end.")


class BatchResult(BaseModel):
    status: Literal["success", "failed", "pending"]
    url: str
    final_url: str | None = None
    content: str | None = None
    title: str | None = None
    item: dict[str, Any] | None = Field(
        default=None, description="The `fields` that were asked for; null when none were."
    )
    status_code: int | None = None
    worker_id: str | None = Field(
        default=None, description="Who visited it last; null for what nobody visited, or robots.txt forbade."
    )
    error: str | None = None
    message: str | None = None
    truncated: bool = Field(
        default=False, description="The answer was full: the content is in the job's result."
    )


class BatchStats(BaseModel):
    total: int
    success: int
    failed: int
    pending: int
    workers_used: int


class BatchAnswer(BaseModel):
    session_id: str
    results: list[BatchResult]
    stats: BatchStats | None
    distributed: bool
    timed_out: bool


class Availability(BaseModel):
    distributed_available: bool
    message: str
    workers: int


class WorkerView(BaseModel):
    id: str
    state: Literal["working", "idle", "stuck", "silent"]
    queues: list[str] | None = Field(description="null: all.")
    job: str | None
    running: int
    slots: int
    leases: int
    visits: int
    failed: int
    rate: float = Field(description="Visits a second in the last minute.")
    mean_seconds: float
    p95_seconds: float
    still_seconds: float = Field(description="For how long visits have been running and none has ended.")
    since: datetime
    last_heartbeat: datetime
    seen_ago: float = Field(description="Seconds since then, by the frontier's clock.")
    current: dict[str, str] = Field(description="Job to the URL of it that was begun last.")
    version: str


class QueueView(BaseModel):
    active: int
    waiting: int
    delayed: int
    dead: int
    workers: int = Field(description="Live workers that take from it.")


class QueueStatus(BaseModel):
    active: int
    waiting: int
    delayed: int
    dead: int
    queues: dict[str, QueueView]
    workers: list[WorkerView]
    throughput: float = Field(description="Visits a second of all workers, in the last minute.")
    mean_seconds: float = Field(description="Processing time of a visit.")
    p95_seconds: float


class Part(BaseModel):
    name: str
    healthy: bool
    needed: bool
    detail: str


class Health(BaseModel):
    status: Literal["healthy", "starting", "unhealthy"] = Field(
        description="`starting`: its own workers are not there yet, and nothing else is wrong."
    )
    healthy: bool
    reasons: list[str]
    parts: list[Part]
    workers: int
    pending: int = Field(description="URLs that wait.")
    completed: int = Field(description="URLs that were visited, of jobs that run or ended within the hour.")
    failed: int = Field(description="URLs of the same jobs that ended dead or expired.")
    version: str


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class WebhookView(BaseModel):
    url: str
    state: Literal["waiting", "delivered", "failed"]
    attempts: int
    error: str | None = Field(
        description="Why the last attempt failed; null when none has, or it is delivered."
    )


class JobView(BaseModel):
    """Headers and secrets of a job are never told, only that there are some."""

    job: str = Field(description="The same as `job_id`, as the commands spell it.")
    job_id: str
    status: Status
    state: State
    pending: int = Field(description="URLs that wait.")
    claimed: int
    completed: int
    failed: int = Field(description="URLs that ended dead or expired.")
    remaining: int = Field(description="`pending` and `claimed`.")
    scraper: str
    start: list[str] = Field(description="At most the first hundred.")
    queue: str
    priority: int
    scope: Scope
    max_pages: int | None
    output_format: Format
    has_headers: bool
    webhook: str | None = Field(description="Where its end is told.")
    created_at: datetime
    finished_at: datetime | None
    seconds: float = Field(description="From its creation to its end, or until now.")
    pages_per_second: float
    eta_seconds: float | None
    counts: dict[str, int]
    errors: dict[str, int]


class JobDetail(JobView):
    progress: Progress
    webhook_delivery: WebhookView | None


class JobList(BaseModel):
    jobs: list[JobView]
    next_cursor: str | None


class DeadView(BaseModel):
    id: int
    job: str = Field(description="The same as `job_id`, as the commands spell it.")
    job_id: str
    url: str
    host: str
    state: Literal["dead", "expired"]
    error: str
    message: str
    attempts: int
    depth: int
    queue: str
    priority: int
    method: str
    label: str
    origin: str = Field(description="The URL that redirected here; empty when none did.")
    ended_at: datetime
    worker: str | None = Field(description="Who made the last visit; null when there was none.")


class DeadList(BaseModel):
    dead: list[DeadView]
    next_cursor: str | None


class DeadGroupView(BaseModel):
    host: str
    error: str
    count: int
    example: str


class DeadGroups(BaseModel):
    groups: list[DeadGroupView]
    next_cursor: str | None


class DeadSelection(StrictModel):
    """Which dead letters: every given field must match. All of them only if `all` says so."""

    job_id: Text | None = None
    host: Annotated[str, StringConstraints(max_length=300)] | None = None
    error: Text | None = None
    ids: list[Annotated[int, Field(ge=1, lt=2**63)]] | None = Field(
        default=None, min_length=1, max_length=10_000
    )
    all: bool = False

    @model_validator(mode="after")
    def _meant(self) -> Self:
        filtered = any(value is not None for value in (self.job_id, self.host, self.error, self.ids))
        if filtered == self.all:
            raise ValueError("give job_id, host, error or ids, or `all: true` for all of them")
        return self


class DeadRetry(DeadSelection):
    reset_attempts: bool = Field(
        default=False, description="Each gets all its attempts again, instead of one."
    )


class Retried(BaseModel):
    retried: int


class Purged(BaseModel):
    purged: int


class LaneView(BaseModel):
    host: str
    rate: str
    concurrency: int
    burst: int
    asked: str | None = Field(description="The pace that the host itself asked for.")
    pinned: bool
    paused: bool
    active: int
    waiting: int
    ready_at: datetime | None
    blocked_until: datetime | None


class LaneList(BaseModel):
    lanes: list[LaneView]
    next_cursor: str | None


class LaneChange(StrictModel):
    """What is left out stays as it is; for a host not seen yet it is as for a new job. A pace that is
    set is pinned until `pinned` is false."""

    rate: Rate | None = None
    concurrency: int | None = Field(default=None, ge=1, le=2000)
    burst: int | None = Field(default=None, ge=0, le=1_000_000)
    pinned: bool | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if all(value is None for value in (self.rate, self.concurrency, self.burst, self.pinned)):
            raise ValueError("say what to change: rate, concurrency, burst or pinned")
        return self


class ScheduleTiming(StrictModel):
    """When a schedule fires."""

    cron: Cron | None = Field(
        default=None,
        description="Minute, hour, day of month, month, weekday; or @daily and the like.",
        examples=["0 6 * * MON-FRI"],
    )
    every: Every | None = Field(default=None, description="Instead of `cron`: `15m`, `6h`, `1d`.")
    timezone: Zone | None = Field(
        default=None, description="Of `cron`; UTC by default.", examples=["Europe/Berlin"]
    )
    overlap: Overlap | None = Field(
        default=None, description="`skip` (usual): not while its last job runs. `allow`: all the same."
    )
    catch_up: bool | None = Field(
        default=None,
        description="Firings that nobody was there for come one by one, not as one. Needs overlap `allow`.",
    )
    paused: bool | None = None


class ScheduleRequest(ScheduleTiming, ScrapeRequest):
    """A job as `POST /scrape` takes it, and when to submit it. Give `cron` or `every`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "news", "cron": "0 6 * * *", "url": "https://example.com/", "depth": 1}]
        }
    )

    name: ScheduleName = Field(examples=["news"])
    scraper: Text | None = Field(
        default=None, description="A scraper of the server's application. Without URLs its own start counts."
    )
    replace: bool = Field(default=False, description="Take the place of one that has this name.")
    urls: list[Url] = Field(default=[], max_length=MOST_URLS, description="More places to start.")

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if self.url is None and not self.urls and self.scraper is None:
            raise ValueError("give `url`, `urls` or `scraper`")
        if (self.cron is None) == (self.every is None):
            raise ValueError("give `cron` or `every`")
        return self


class ScheduleChange(ScheduleTiming):
    """What is left out stays as it is. What it submits is replaced by `POST` with `replace`."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if all(value is None for value in self.model_dump().values()):
            raise ValueError("say what to change: cron, every, timezone, overlap, catch_up or paused")
        return self


class ScheduleView(BaseModel):
    """Headers and secrets of its jobs are never told, only that there are some."""

    name: str
    cron: str | None
    every: str | None
    timezone: str
    overlap: Overlap
    catch_up: bool
    paused: bool
    scraper: str
    start: list[str] = Field(description="At most the first hundred; empty for the scraper's own.")
    queue: str
    priority: int
    scope: Scope
    depth: int | None
    max_pages: int | None
    output_format: Format
    has_headers: bool
    webhook: str | None
    created_at: datetime
    next_at: datetime | None = Field(description="null: it is paused, or never comes again.")
    last_at: datetime | None
    last_job: str | None
    fired: int
    skipped: int = Field(description="How often it was due while its last job still ran.")
    error: str | None = Field(description="Why it could not fire when it was due; it is tried again.")


class ScheduleList(BaseModel):
    schedules: list[ScheduleView]
    next_cursor: str | None


class WorkerList(BaseModel):
    workers: list[WorkerView]
    next_cursor: str | None


class FieldError(BaseModel):
    where: str
    message: str


class ProblemView(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    hint: str | None = None
    errors: list[FieldError] | None = None
