"""Jobs that go slower than they were asked to, because another job is more careful with the same host.

See decision 0008. The frontier keeps one pace for a host and not who asked for it, so this compares: what
the host's lane has against what the job asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal import urls
from shoal.frontier.port import Backend
from shoal.model import Job, JobState, Lane
from shoal.politeness.pacing import format_rate

LOOK = 20
"""Hosts that are looked at, at most."""
JOBS = 100
"""Jobs among which the careful one is looked for, newest first."""


class Held(msgspec.Struct, frozen=True):
    """A host on which a job does not get its own pace."""

    host: str
    rate: str
    width: int
    asked: str
    by: str | None = None
    """The other job; None when it cannot be told which one, or when it is over and its pace still there."""

    def __str__(self) -> str:
        pace = f"{self.rate}, {self.width} at a time"
        other = f"job {self.by}" if self.by else "another job"
        return f"{self.host} is held to {pace}, by {other}; this one asked for {self.asked}"


async def held_back(frontier: Backend, job: Job, lanes: Iterable[str] = ()) -> list[Held]:
    """The hosts on which this job is held back: of these `lanes`, of those where it starts and of those that
    it visits just now."""
    if job.state is not JobState.RUNNING or not job.counts.live:
        return []
    begins = (urls.lane_of(url) for url in job.spec.start)
    visits = (lease.lane for lease in await frontier.leases(job=job.id, limit=LOOK))
    names = list(dict.fromkeys([*lanes, *begins, *visits]))[:LOOK]
    slower = [lane for lane in await frontier.lanes(names=names, limit=LOOK) if slows(lane, job)]
    return [await _told(frontier, job, lane) for lane in slower]


def slows(lane: Lane, job: Job) -> bool:
    """Whether a lane is slower than the job asked for, and neither a person nor the host wanted that."""
    if lane.pinned:
        return False
    return lane.gap > max(job.spec.gap, lane.floor) or lane.width < job.spec.width


async def _told(frontier: Backend, job: Job, lane: Lane) -> Held:
    rate, asked = format_rate(lane.gap), f"{format_rate(job.spec.gap)}, {job.spec.width} at a time"
    return Held(lane.name, rate, lane.width, asked, await _careful(frontier, job, lane))


async def _careful(frontier: Backend, job: Job, lane: Lane) -> str | None:
    """The job that brought this pace: one that is not over, asked for it, and starts on this host."""
    for other in await frontier.jobs(limit=JOBS):
        if other.id == job.id or other.state not in (JobState.RUNNING, JobState.PAUSED):
            continue
        same = other.spec.gap == lane.gap if lane.gap > job.spec.gap else other.spec.width == lane.width
        if same and lane.name in {urls.lane_of(url) for url in other.spec.start}:
            return other.id
    return None
