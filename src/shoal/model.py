"""The words of the project as data: pure, frozen, no I/O.

Everything that travels between the parts is one of these. Durations are seconds relative to
"now", because time belongs to the frontier and never to whoever talks to it; a timestamp
(`until`, `wake_at`, `*_at`) was made by the frontier's clock.
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
"""Seconds that a note lives which somebody will remove."""
CRASH_LIMIT = 3
"""A request that took this many workers down with it ends dead as `worker_crashed`."""


class Request(Struct, frozen=True, omit_defaults=True):
    """A URL we want. `url` is canonical (see `urls.canonical`)."""

    url: str
    job: str
    label: str = ""
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    depth: int = 0
    attempt: int = 0
    """How many visits failed so far. The frontier counts; a submitter leaves it 0."""
    delay: float = 0.0
    """Not before this many seconds from when it is added."""
    ttl: float | None = None
    """Ends as `expired` if no visit began within this many seconds."""
    method: str = "GET"
    headers: dict[str, str] | None = None
    body: bytes | None = None
    data: dict[str, Any] | None = None
    """The handler's own luggage; JSON types."""
    origin: str = ""
    """The URL that redirected here; empty for a request nobody redirected."""
    hops: int = 0
    trail: str = ""
    """Every request that redirected on the way here, as the engine marks them: so a circle is seen."""
    starts: tuple[str, ...] = ()
    """Where start URLs redirected to beyond the job's scope, as far as the finder of this request knew:
    those sites belong to the job too, whoever visits it."""


class Added(Enum):
    """What `add` says of each request."""

    NEW = "new"
    KNOWN = "known"
    REFUSED = "refused"
    """The job is cancelled, or its page budget is used up. Nothing was stored."""


class Lease(Struct, frozen=True):
    """A request handed to one worker for a time. `token` grows with each claim and fences."""

    token: int
    request: Request
    lane: str
    until: float
    since: float = 0.0
    """When it was claimed, for one that travels between claim and visit; 0: just now."""
    expires: float | None = None
    """When its request's ttl runs out (frontier time), while that still counts: until the first attempt."""


class Claim(Struct, frozen=True):
    """What `claim` gave, and when to ask again.

    `wake_at` tells the earliest moment (frontier time) at which another claim can succeed;
    `inf` means "not drained, but nobody knows when" (a paused job); None means drained:
    nothing waits, nothing is delayed, nothing is leased. It is meant for an empty claim.
    """

    leases: Sequence[Lease]
    wake_at: float | None
    now: float

    @property
    def drained(self) -> bool:
        return not self.leases and self.wake_at is None

    @property
    def wait(self) -> float:
        """Seconds to wait before asking again; 0 when there is no reason to wait."""
        if self.wake_at is None:
            return 0.0
        return max(0.0, self.wake_at - self.now)


TRANSIT = "transit:"
"""Begins the worker name of leases that are on their way to whoever will `take` them. If they get
lost on the way nobody has crashed: they simply wait again."""
EXPIRED = "expired"
"""The class of failure of what waited too long. A `Dead` with it ends its request as expired."""


class Failure(Struct, frozen=True):
    """Why a visit failed: a class from `errors.CLASSES` and a sentence for people."""

    error: str
    message: str = ""
    worker: str = ""
    """Who made the last visit. The frontier fills it in, in dead letters; empty when there was none."""


TTL_OVER = Failure(EXPIRED, "its time to live ran out")
"""How a frontier ends what waited in it for too long."""
WORKER_CRASHED = "worker_crashed"
"""The class of failure of what took too many workers down with it."""


class Done(Struct, frozen=True):
    """The visit succeeded. `items` are JSON documents; `found` are the requests it discovered.

    `skipped` names the reason when there was nothing to store (robots, scope, redirect…).
    """

    lease: Lease
    items: Sequence[bytes] = ()
    found: Sequence[Request] = ()
    skipped: str = ""


class Retry(Struct, frozen=True):
    """The visit failed; try again after so many seconds. Counts as an attempt."""

    lease: Lease
    after: float
    failure: Failure


class Dead(Struct, frozen=True):
    """The visit failed for good: the request becomes a dead letter. With the class `expired` it
    was never begun: no attempt is charged, and it ends as expired."""

    lease: Lease
    failure: Failure


class Release(Struct, frozen=True):
    """Hand the request back untouched: no attempt is charged (shutdown, robots first)."""

    lease: Lease


Verdict = Done | Retry | Dead | Release


class Settlement(Struct, frozen=True):
    """What `settle` could not take: leases that were lost already (nothing of them is stored),
    and URLs that were found but turned away by the job's page budget (they are not known)."""

    lost: Sequence[Lease] = ()
    refused: Sequence[str] = ()


class Pace(Struct, frozen=True):
    """How fast one lane may be visited. None leaves a value as it is.

    `gap` seconds between two visits (0 = no limit), `width` visits at a time, `burst` visits
    that may come at once after a rest, `blocked` seconds from now during which nobody may
    come, `floor` the gap that the host itself asked for (Crawl-delay) and that only
    `pinned` overrides. `paused` holds the lane until somebody resumes it.
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
"""Bytes of a body beyond which a page is large: reading it takes long, so few are read at a time."""
Private = bool | tuple[str, ...]
"""Which addresses may be visited although they are not public: all, none, or these `host:port`."""


class Webhook(Struct, frozen=True):
    """Who is told when a job has ended, and what the message is signed with."""

    url: str
    secret: str


class JobSpec(Struct, frozen=True, omit_defaults=True):
    """What a job was asked to do. Stored with the job, so any worker anywhere can do it."""

    scraper: str = "site"
    app: str = ""
    """`file.py` or `module:app` where the scraper is registered; empty for the built-in one."""
    start: tuple[str, ...] = ()
    scope: Scope = "host"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    depth: int | None = None
    max_pages: int | None = None
    """Requests that may be accepted and not yet refunded; None = no limit."""
    max_per_host: int | None = None
    """The same for each host that is not a start host."""
    gap: float = 1.0
    width: int = 1
    robots: bool = True
    page_robots: bool = False
    """Obey what a page says to robots: `<meta name="robots">` and X-Robots-Tag."""
    allow_private: Private = False
    retries: int = 2
    """Visits after a failed first one, before a request is dead."""
    lease: float = LEASE_SECONDS
    queue: str = DEFAULT_QUEUE
    dedicated: bool = False
    """Its requests can be claimed apart from all others (a crawl in the foreground, a run)."""
    priority: int = DEFAULT_PRIORITY
    headers: dict[str, str] | None = None
    fields: tuple[str, ...] = ()
    kinds: Literal["text", "any"] = "text"
    """What is fetched whole: what can be read, or films, pictures and archives too."""
    cache: float = 60.0
    """Seconds for which a response may be served again from the cache; 0 = never."""
    max_body: int = 10 * 1024 * 1024
    timeout: float = 60.0
    """Total deadline of one fetch."""
    record_worker: bool = False
    """Site items tell in `worker` which worker made them, and why a visit left nothing is noted."""
    output: str = ""
    """The format in which its submitter wants the results."""
    webhook: Webhook | None = None

    @property
    def max_attempts(self) -> int:
        """Visits a request may fail before it is dead: the first, and the retries."""
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
    """Settles that came too late and were refused."""

    @property
    def live(self) -> int:
        return self.added - self.done - self.dead - self.expired - self.cancelled


class Job(Struct, frozen=True):
    """One submitted piece of work as people see it."""

    id: str
    spec: JobSpec
    state: JobState
    counts: Counts
    errors: dict[str, int]
    """Failed visits by error class."""
    created_at: float
    finished_at: float | None = None
    started_at: float | None = None
    """When a request of it was claimed for the first time."""


class Item(Struct, frozen=True):
    """One line of a job's append-only item log."""

    seq: int
    body: bytes


class DeadLetter(Struct, frozen=True):
    """A request that ended dead or expired, with everything needed to try it again."""

    id: int
    request: Request
    lane: str
    failure: Failure
    ended_at: float
    state: Literal["dead", "expired"] = "dead"


class Selection(Struct, frozen=True):
    """Which dead letters: every given field must match."""

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
    """What a person should know of how a frontier is set up, and what mends it."""

    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.hint})" if self.hint else self.text


LASTING = Advice("through crashes and power cuts")


class Info(Struct, frozen=True):
    """What a frontier is kept in, and what a person should know of how it is set up now."""

    warnings: Sequence[Advice] = ()
    """What makes it less durable than it could be. Empty when nothing that was acknowledged can be lost
    in a crash."""
    server: str = ""
    """Its name and version; empty when it is this process or a file."""
    schema: int = 0
    newest: int = 0
    """The number of the schema there, and of this release. 0: there is none, or the file tells."""
    durable: Advice = LASTING
    """What lasts through what, when there are no remarks."""


class Note(Struct, frozen=True):
    """A small shared fact, as a scan of its shelf tells it."""

    name: str
    value: bytes
    at: float
    """When it was written (frontier time)."""


class LeaseRow(Struct, frozen=True):
    """A lease as people see it: who has which URL in hand."""

    worker: str
    queue: str
    url: str
    job: str
    lane: str

    @property
    def in_transit(self) -> bool:
        """On its way to a worker: nobody visits it yet."""
        return self.worker.startswith(TRANSIT)


class Lane(Struct, frozen=True):
    """One host as people see it."""

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
    """When the next visit may begin; None when nothing waits, it is full or paused."""
    blocked_until: float


class RequestStatus(Struct, frozen=True):
    """What the frontier knows of one URL in one job."""

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
    """What a worker tells of itself every few seconds. Counts are since it started."""

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
    """Seconds for which visits have been running and none has ended."""
    rate: float = 0.0
    """Visits a second in the last minute."""
    mean: float = 0.0
    """Seconds a visit took in the last minute, on average; `p95` is what 95 % stayed below."""
    p95: float = 0.0
    current: dict[str, str] = {}
    """Job to the URL of it that was begun last."""
    version: str = ""


HEARTBEAT_TIMEOUT = 15.0
"""A worker not heard of for so many seconds counts as gone; it beats every few."""


class WorkerStatus(Struct, frozen=True):
    """A worker as people see it."""

    heartbeat: Heartbeat
    since: float
    seen: float
    leases: int
    """Requests in its hands, as the frontier counts."""
    now: float

    @property
    def state(self) -> Literal["working", "idle", "stuck", "silent"]:
        """`stuck`: it lives, and no visit of it has ended for longer than any may take.
        `silent`: it has not been heard of."""
        if self.now - self.seen > HEARTBEAT_TIMEOUT:
            return "silent"
        if self.heartbeat.stalled_for > STUCK:
            return "stuck"
        return "working" if self.heartbeat.running else "idle"


STUCK = 180.0
"""A visit has a deadline of a minute by default, and its handler another."""


class Response(Struct, frozen=True):
    """What a server sent for one hop. `body` is decoded from its content encoding."""

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
        """The first header of this (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return default
