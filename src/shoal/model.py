"""The words of the project as data: pure, frozen, no I/O.

Everything that travels between the parts is one of these. Durations are seconds from now, because the time is
the frontier's and never its caller's. A timestamp (`until`, `wake_at`, `*_at`) is a time of the frontier's
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

from msgspec import Struct

DEFAULT_QUEUE = "scraping"
DEFAULT_PRIORITY = 5
LEASE_SECONDS = 60.0
FOREVER = 10 * 365 * 24 * 3600.0
"""The lifetime in seconds of a note that its writer will remove."""
CRASH_LIMIT = 3
"""A request that took this many workers down with it ends dead as `worker_crashed`."""


class Request(Struct, frozen=True, omit_defaults=True):
    """A URL to visit. `url` is canonical (see `urls.canonical`)."""

    url: str
    job: str
    label: str = ""
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    depth: int = 0
    attempt: int = 0
    """How many visits have failed. The frontier counts them; a submitter leaves this 0."""
    delay: float = 0.0
    """The visit begins no earlier than this many seconds after the request was added."""
    ttl: float | None = None
    """The request ends as `expired` if no visit has begun within this many seconds."""
    method: str = "GET"
    headers: dict[str, str] | None = None
    body: bytes | None = None
    data: dict[str, Any] | None = None
    """The handler's own data, in JSON types."""
    origin: str = ""
    """The first URL of the redirects that led here; empty if there were none."""
    hops: int = 0
    """How many redirects led here."""
    trail: str = ""
    """The engine's marks of the requests that redirected on the way here, to detect a circle."""
    starts: tuple[str, ...] = ()
    """Where start URLs redirected to beyond the job's scope, as far as the worker that found this request
    knew. Those sites belong to the job too, whichever worker visits it."""


class Added(Enum):
    """What `add` did with a request."""

    NEW = "new"
    KNOWN = "known"
    REFUSED = "refused"
    """The job is cancelled, or its page budget is used up. Nothing was stored."""


class Lease(Struct, frozen=True):
    """A request that one worker holds for a time. `token` grows with each claim: it is the fencing token."""

    token: int
    request: Request
    lane: str
    expires_at: float
    """When the lease ends unless it is extended (frontier time, as the next two)."""
    claimed_at: float = 0.0
    """When it was claimed, if it travels between claim and visit; 0 means a moment ago."""
    request_expires_at: float | None = None
    """When the ttl of its request runs out. None once that no longer counts: after the first attempt."""


class Claim(Struct, frozen=True):
    """The leases that `claim` gave, and when to claim again.

    `wake_at` is for an empty claim: the earliest moment (frontier time) at which another claim can succeed.
    `inf` means that this cannot be known (a paused job). None means drained: nothing waits, nothing is
    delayed, nothing is leased.
    """

    leases: Sequence[Lease]
    wake_at: float | None
    now: float

    @property
    def drained(self) -> bool:
        return not self.leases and self.wake_at is None

    @property
    def retry_in(self) -> float:
        """Seconds until another claim is worthwhile; 0 when there is no reason to wait."""
        if self.wake_at is None:
            return 0.0
        return max(0.0, self.wake_at - self.now)


TRANSIT = "transit:"
"""Prefix of the worker name of leases that are on their way to the worker that will `take` them. If they get
lost on the way no worker has crashed: their requests wait again."""
EXPIRED = "expired"
"""The error class of requests that waited too long. A `Dead` with it ends its request as expired."""


class Failure(Struct, frozen=True):
    """Why a visit failed: an error class from `errors.CLASSES`, and a sentence for people."""

    error: str
    message: str = ""
    worker: str = ""
    """The worker that made the last visit; empty if there was none. The frontier adds it to dead letters."""


TTL_OVER = Failure(EXPIRED, "its time to live ran out")
"""The failure with which a frontier ends requests that waited too long."""
WORKER_CRASHED = "worker_crashed"
"""The error class of requests that took too many workers down with them."""


class Done(Struct, frozen=True):
    """The visit succeeded. `items` are JSON documents; `found` are the requests it discovered.

    `skipped` is the reason why nothing was stored (robots, scope, redirect…), if there is one.
    """

    lease: Lease
    items: Sequence[bytes] = ()
    found: Sequence[Request] = ()
    skipped: str = ""


class Retry(Struct, frozen=True):
    """The visit failed: try again in `after` seconds. Counts as an attempt."""

    lease: Lease
    after: float
    failure: Failure


class Dead(Struct, frozen=True):
    """The visit failed for good: the request becomes a dead letter. With the error class `expired` no visit
    was made: no attempt is counted, and the request ends as expired."""

    lease: Lease
    failure: Failure


class Release(Struct, frozen=True):
    """Hand the request back untouched: no attempt is counted (shutdown, a late visit, robots.txt first)."""

    lease: Lease


Verdict = Done | Retry | Dead | Release


class Settlement(Struct, frozen=True):
    """What `settle` did not store: verdicts of leases that were already lost, and found URLs that the job's
    page budget refused (they are not known)."""

    lost: Sequence[Lease] = ()
    refused: Sequence[str] = ()


class Pace(Struct, frozen=True):
    """How fast one lane may be visited. None leaves a value as it is.

    - `gap`: seconds between two visits; 0 = no limit.
    - `width`: visits at a time.
    - `burst`: visits that may begin at once after a pause.
    - `blocked`: seconds from now during which no visit may begin.
    - `floor`: the gap that the host itself asks for (Crawl-delay). Only `pinned` overrides it.
    - `paused`: no visit begins until the lane is resumed.
    """

    gap: float | None = None
    width: int | None = None
    burst: int | None = None
    blocked: float | None = None
    floor: float | None = None
    pinned: bool | None = None
    paused: bool | None = None


Scope = Literal["page", "prefix", "host", "domain", "any"]
LARGE = 256 * 1024
"""A page with a larger body (in bytes) is large: reading it takes long, so few are read at a time."""
Private = bool | tuple[str, ...]
"""The addresses that may be visited although they are not public: all, none, or these `host:port`."""


class Webhook(Struct, frozen=True):
    """The URL to notify when a job has ended, and the secret that signs the message."""

    url: str
    secret: str


class JobSpec(Struct, frozen=True, omit_defaults=True):
    """What a job was asked to do. Stored with the job, so that any worker can work on it."""

    scraper: str = "site"
    app: str = ""
    """`file.py` or `module:app`, where the scraper is registered; empty for the built-in scraper."""
    start: tuple[str, ...] = ()
    scope: Scope = "host"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    depth: int | None = None
    max_pages: int | None = None
    """The page budget: how many requests may be accepted and not yet refunded; None = no limit."""
    max_per_host: int | None = None
    """The page budget of each host that is not a start host."""
    gap: float = 1.0
    width: int = 1
    robots: bool = True
    page_robots: bool = False
    """Obey what a page says to robots: `<meta name="robots">` and X-Robots-Tag."""
    allow_private: Private = False
    retries: int = 2
    """How many visits may follow a failed first one before the request is dead."""
    lease: float = LEASE_SECONDS
    queue: str = DEFAULT_QUEUE
    dedicated: bool = False
    """Its requests can be claimed without those of other jobs (a crawl in the foreground, a run)."""
    priority: int = DEFAULT_PRIORITY
    headers: dict[str, str] | None = None
    fields: tuple[str, ...] = ()
    kinds: Literal["text", "any"] = "text"
    """What is fetched: only what holds text, or images, video and archives as well."""
    cache: float = 60.0
    """For how many seconds the cache may serve a response again; 0 = never."""
    max_body: int = 10 * 1024 * 1024
    timeout: float = 60.0
    """Seconds that one fetch may take in all."""
    record_worker: bool = False
    """Site items have the worker that made them in `worker`, and the reason of a visit that left nothing is
    noted."""
    output: str = ""
    """The format in which the submitter wants the results."""
    webhook: Webhook | None = None

    @property
    def max_attempts(self) -> int:
        """How many visits of a request may fail before it is dead: the first, and the retries."""
        return self.retries + 1


class JobState(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DONE = "done"

    @property
    def ended(self) -> bool:
        return self in (JobState.CANCELLED, JobState.DONE)


class Counts(Struct, frozen=True):
    """A job's counters. Always: added = done + dead + expired + cancelled + live,
    and live = waiting + delayed + leased."""

    added: int = 0
    known: int = 0
    refused: int = 0
    waiting: int = 0
    delayed: int = 0
    leased: int = 0
    done: int = 0
    skipped: int = 0
    """Part of `done`: visits with nothing to store."""
    dead: int = 0
    expired: int = 0
    cancelled: int = 0
    retried: int = 0
    items: int = 0
    stale: int = 0
    """Verdicts that came too late and were refused."""

    @property
    def live(self) -> int:
        return self.added - self.done - self.dead - self.expired - self.cancelled


class Job(Struct, frozen=True):
    """One submitted piece of work, as shown to people."""

    id: str
    spec: JobSpec
    state: JobState
    counts: Counts
    errors: dict[str, int]
    """Failed visits by error class."""
    created_at: float
    finished_at: float | None = None
    started_at: float | None = None
    """When one of its requests was first claimed."""


class Item(Struct, frozen=True):
    """One line of a job's append-only item log."""

    seq: int
    body: bytes


class DeadLetter(Struct, frozen=True):
    """A request that ended dead or expired, with everything that is needed to try it again."""

    id: int
    request: Request
    lane: str
    failure: Failure
    ended_at: float
    state: Literal["dead", "expired"] = "dead"


class Selection(Struct, frozen=True):
    """Selects dead letters: all that are given must match."""

    job: str | None = None
    lane: str | None = None
    error: str | None = None
    ids: tuple[int, ...] | None = None
    since: float | None = None
    """Those that ended after this moment (frontier time)."""


class DeadGroup(Struct, frozen=True):
    lane: str
    error: str
    count: int
    example: str


class Advice(Struct, frozen=True):
    """What a person should know about how a frontier is set up; `hint` says what to change."""

    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.hint})" if self.hint else self.text


LASTING = Advice("through crashes and power cuts")


class Info(Struct, frozen=True):
    """How a frontier is stored, and what a person should know about how it is set up."""

    warnings: Sequence[Advice] = ()
    """What makes it less durable than it could be. Empty if a crash can lose nothing that was
    acknowledged."""
    server: str = ""
    """The server's name and version; empty if the frontier is a file or in this process."""
    schema: int = 0
    newest: int = 0
    """The version of the schema that is there, and that of this release. 0: there is none, or it is read from
    the file."""
    durable: Advice = LASTING
    """What data survives, if there are no warnings."""


class Note(Struct, frozen=True):
    """A small shared fact, as a scan of its shelf returns it."""

    name: str
    value: bytes
    at: float
    """When it was written (frontier time)."""


class LeaseRow(Struct, frozen=True):
    """A lease as shown to people: which worker holds which URL."""

    worker: str
    queue: str
    url: str
    job: str
    lane: str

    @property
    def in_transit(self) -> bool:
        """Whether the lease is still on its way to a worker."""
        return self.worker.startswith(TRANSIT)


class Lane(Struct, frozen=True):
    """One host, as shown to people."""

    name: str
    gap: float
    width: int
    burst: int
    floor: float
    pinned: bool
    paused: bool
    busy: int
    waiting: int
    ready_at: float | None
    """When the next visit may begin; None if nothing waits, or the lane is full or paused."""
    blocked_until: float


class RequestStatus(Struct, frozen=True):
    """What the frontier knows about one URL in one job."""

    job: str
    state: Literal["unknown", "waiting", "delayed", "leased", "done", "dead", "expired"]
    request: Request | None = None
    lane: Lane | None = None
    job_state: JobState | None = None
    ahead: int | None = None
    """Requests of the same job and lane before it."""
    ready_at: float | None = None
    worker: str = ""
    until: float | None = None
    failure: Failure | None = None


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    """What a worker reports about itself every few seconds. Counts begin at its start."""

    worker: str
    queues: tuple[str, ...] | None = None
    """None: all."""
    job: str | None = None
    slots: int = 0
    running: int = 0
    visits: int = 0
    failed: int = 0
    """Part of `visits`: those that ended in an error."""
    stalled_for: float = 0.0
    """For how many seconds visits have been running without one that ended."""
    rate: float = 0.0
    """Visits per second in the last minute."""
    mean: float = 0.0
    """Seconds that a visit took in the last minute, on average; 95 % took at most `p95`."""
    p95: float = 0.0
    current: dict[str, str] = {}
    """By job: the URL of its visit that began last."""
    version: str = ""


HEARTBEAT_TIMEOUT = 15.0
"""A worker whose last heartbeat is older (in seconds) counts as gone. It sends one every few seconds."""


class WorkerStatus(Struct, frozen=True):
    """A worker, as shown to people."""

    heartbeat: Heartbeat
    since: float
    seen: float
    leases: int
    """How many leases it holds, by the frontier's count."""
    now: float

    @property
    def state(self) -> Literal["working", "idle", "stuck", "silent"]:
        """`stuck`: it sends heartbeats, and none of its visits has ended for longer than a visit may take.
        `silent`: it has sent no heartbeat for a while."""
        if self.now - self.seen > HEARTBEAT_TIMEOUT:
            return "silent"
        if self.heartbeat.stalled_for > STUCK:
            return "stuck"
        return "working" if self.heartbeat.running else "idle"


STUCK = 180.0
"""Seconds without the end of a visit after which a worker is stuck. A visit has a deadline of a minute by
default, and its handler another."""


class Response(Struct, frozen=True):
    """A server's response to one request. `body` is decoded from its content encoding."""

    url: str
    status: int
    headers: tuple[tuple[str, str], ...]
    """Lower-case names, in the order received."""
    body: bytes
    seconds: float
    address: str = ""
    http: str = "1.1"
    cached: bool = False

    def header(self, name: str, default: str = "") -> str:
        """Returns the first header of this (lower-case) name, else `default`."""
        for key, value in self.headers:
            if key == name:
                return value
        return default
