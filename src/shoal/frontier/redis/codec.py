"""Encodes requests and verdicts for the scripts, and decodes leases and jobs.

Pure functions: the caller knows the numbers of jobs and queues from the server. The head of `prelude.lua`
explains entries and keys.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shoal import urls
from shoal.frontier.rules import US, microseconds
from shoal.model import (
    EXPIRED,
    Added,
    Counts,
    Dead,
    Done,
    Failure,
    Job,
    JobSpec,
    JobState,
    Lease,
    Request,
    Retry,
    Verdict,
)

ADDED = {48: Added.NEW, 49: Added.KNOWN, 50: Added.REFUSED}
"""The results of an add: the digits 0, 1 and 2."""
DELAYED_HEAD = 20
"""The bytes before the entry of a delayed request: lane, line and job."""

_STATES = (JobState.RUNNING, JobState.PAUSED, JobState.CANCELLED, JobState.DONE)
_JOB = (
    *("name", "state", "created", "finished", "gap", "width", "dedicated", "max_pages", "max_per_host"),
    *("added", "known", "refused", "done", "skipped", "dead", "expired", "cancelled", "retried", "items"),
    *("stale", "leased", "delayed", "started"),
)
_PLAIN, _TTL, _RICH, _TIMED = 0, 1, 2, 4
_HEAD = struct.Struct("<dHBBH")
_TAIL = struct.Struct("<HBBH")

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.decode
_json = msgspec.json.Encoder().encode


# -- to the scripts -------------------------------------------------------------------


def add_args(requests: Iterable[Request], numbers: Mapping[str, int]) -> tuple[dict[str, Any], list[bytes]]:
    """Encode requests: their places in small tables, and their bytes (all keys, then all entries).
    `numbers` has the number of each job."""
    lanes: dict[str, int] = {}
    kinds: dict[tuple[int, str, int], int] = {}
    lane: list[int] = []
    kind: list[int] = []
    extra: dict[int, tuple[int, int | bool]] = {}
    keys: list[bytes] = []
    tails: list[bytes] = []
    for request in requests:
        name = urls.lane_of(request.url)
        lane.append(lanes.setdefault(name, len(lanes) + 1))
        sort = (numbers[request.job], request.queue, request.priority)
        kind.append(kinds.setdefault(sort, len(kinds) + 1))
        keys.append(urls.key(request.job, request.url, request.method, request.body))
        ttl: int | bool = False
        if request.ttl is not None:
            ttl = microseconds(request.ttl)
        if request.delay > 0 or ttl is not False:
            extra[len(lane)] = (max(0, microseconds(request.delay)), ttl)
        tails.append(_tail(request, _PLAIN if ttl is False else _TTL))
    rows = {
        "kinds": list(kinds),
        "lanes": list(lanes),
        "lane": lane,
        "kind": kind if len(kinds) > 1 else False,
        "extra": extra or False,
    }
    return rows, keys + tails


def settle_args(verdicts: Sequence[Verdict], numbers: Mapping[str, int]) -> tuple[list[Any], list[bytes]]:
    """Encode verdicts, and the bytes of found requests and items."""
    kinds: list[int] = []
    items: list[bytes] = []
    item_counts: list[int] = []
    found: list[Request] = []
    found_counts: list[int] = []
    failures: dict[int, tuple[int, str, str]] = {}
    for place, verdict in enumerate(verdicts, 1):
        some: Sequence[bytes] = ()
        links: Sequence[Request] = ()
        if isinstance(verdict, Done):
            kinds.append(1 if verdict.skipped else 0)
            some, links = verdict.items, verdict.found
        elif isinstance(verdict, Retry):
            kinds.append(2)
            failures[place] = (microseconds(verdict.after), *_failure(verdict.failure))
        elif isinstance(verdict, Dead):
            kinds.append(5 if verdict.failure.error == EXPIRED else 3)
            failures[place] = (0, *_failure(verdict.failure))
        else:
            kinds.append(4)
        item_counts.append(len(some))
        items += some
        found_counts.append(len(links))
        found += links
    rows, more = add_args(found, numbers)
    jobs = [numbers.get(verdict.lease.request.job, 0) for verdict in verdicts]
    tokens = [verdict.lease.token for verdict in verdicts]
    return [tokens, kinds, jobs, item_counts, found_counts, failures, rows], more + items


def bury_args(job: int, request: Request, error: str, message: str) -> tuple[list[Any], bytes, bytes]:
    """Encode a request that could not be accepted, its key and its entry."""
    lane = urls.lane_of(request.url) if "://" in request.url else ""
    key = urls.key(request.job, request.url, request.method, request.body)
    values = [job, _text(lane), request.queue, request.priority, error, _text(message)]
    return values, key, _tail(request, _PLAIN)


def spec_args(spec: JobSpec) -> list[Any]:
    """Encode a spec: its JSON, the values that the scripts need, and the lanes of the start URLs."""
    pages: int | bool = False if spec.max_pages is None else spec.max_pages
    per_host: int | bool = False if spec.max_per_host is None else spec.max_per_host
    pace = [microseconds(spec.gap), spec.width, spec.dedicated, pages, per_host]
    return [_json(spec).decode(), pace, sorted({urls.lane_of(url) for url in spec.start})]


def _tail(request: Request, flags: int) -> bytes:
    """Encode a request as an entry without its id."""
    plain = not (
        request.label
        or request.data
        or request.headers
        or request.origin
        or request.hops
        or request.body
        or request.ttl is not None
        or request.method != "GET"
        or request.starts
    )
    head = (min(request.attempt, 65535), 0)
    if plain and request.depth < 65536:
        return _TAIL.pack(*head, flags, request.depth) + request.url.encode("utf-8", "surrogatepass")
    body = _pack(
        (
            *(request.url, request.depth, request.label, request.method, request.headers),
            *(request.body, request.data, request.origin, request.hops, request.ttl, request.trail),
            request.starts,
        )
    )
    return _TAIL.pack(*head, flags | _RICH, 0) + body


def _failure(failure: Failure) -> tuple[str, str]:
    return _text(failure.error), _text(failure.message)


def _text(text: str) -> str:
    """Replace lone surrogates, and cut the text to fit the two bytes of a letter's length."""
    return text.encode("utf-8", "replace").decode()[:8000]


# -- from the scripts -----------------------------------------------------------------


def leases_of(
    reply: Sequence[Any], lasting: int, jobs: Mapping[int, str], queues: Mapping[int, str]
) -> list[Lease]:
    """Decode the leases of a claim. `jobs` and `queues` map numbers to names."""
    token, until, groups = reply[2], (reply[0] + lasting) / US, reply[5]
    leases: list[Lease] = []
    for lane, number, stream, priority, *entries in groups:
        name, job, queue = lane.decode(), jobs[number], queues[stream]
        for entry in entries:
            request = request_of(entry, job, queue, priority)
            leases.append(Lease(token, request, name, until, request_expires_at=_expires(entry)))
            token += 1
    return leases


def moment_of(at: int) -> float | None:
    """Decode when a claim may succeed: None if nothing is left, infinity if that is unknown."""
    if at >= 0:
        return at / US
    return None if at == -1 else math.inf


def request_of(entry: bytes, job: str, queue: str, priority: int) -> Request:
    _, attempt, _, flags, depth = _HEAD.unpack_from(entry)
    if not flags & _RICH:
        url = entry[14:].decode("utf-8", "surrogatepass")
        return Request(url, job, "", queue, priority, depth, attempt)
    packed = entry[14:-8] if flags & _TIMED else entry[14:]
    url, depth, label, method, headers, body, data, origin, hops, ttl, trail, starts = _unpack(packed)
    return Request(
        *(url, job, label, queue, priority, depth, attempt, 0.0, ttl),
        *(method, headers, body, data, origin, hops, trail, tuple(starts)),
    )


def id_of(entry: bytes) -> int:
    return int(_HEAD.unpack_from(entry)[0])


def delayed_line(member: bytes) -> int:
    """Return the line of a delayed request. Its entry follows after `DELAYED_HEAD` bytes."""
    return int(struct.unpack_from("<d", member, 4)[0])


def job_row(raw: bytes) -> dict[str, Any]:
    """Decode a job's record into its named fields."""
    return dict(zip(_JOB, _unpack(raw), strict=True))


def job_of(name: str, raw: bytes, spec: bytes, tally: Sequence[bytes]) -> Job:
    row = job_row(raw)
    counts = Counts(**{field: row[field] for field in Counts.__struct_fields__ if field != "waiting"})
    waiting = counts.live - counts.leased - counts.delayed
    counts = msgspec.structs.replace(counts, waiting=waiting)
    tallied = sorted(
        ((tally[i].decode(), int(tally[i + 1])) for i in range(0, len(tally), 2)),
        key=lambda pair: (-pair[1], pair[0]),
    )
    return Job(
        name,
        msgspec.json.decode(spec, type=JobSpec),
        _STATES[row["state"]],
        counts,
        dict(tallied),
        row["created"] / US,
        row["finished"] / US if row["finished"] is not False else None,
        row["started"] / US if row["started"] is not False else None,
    )


def job_name(raw: bytes) -> str:
    """Return the name in a job's record."""
    name: str = _unpack(raw)[0]
    return name


def queue_name(raw: bytes) -> str:
    """Return the queue in a stream's record."""
    queue: str = _unpack(raw)[0]
    return queue


def _expires(entry: bytes) -> float | None:
    """Return when the ttl of a leased request ends."""
    return float(struct.unpack("<d", entry[-8:])[0] / US) if entry[11] & _TIMED else None
