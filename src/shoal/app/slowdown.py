"""Jobs that are slowed down on a host, because another job asked for a slower pace there.

See decision 0008. The frontier stores one pace per host and not which job asked for it, so this module
compares the pace of the host's lane with the pace that the job asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal import urls
from shoal.frontier.port import Backend
from shoal.model import Job, JobState, Lane
from shoal.politeness.pacing import format_rate

LOOK = 20
"""Maximum number of hosts to check."""
JOBS = 100
"""How many jobs are searched for the slower one, newest first."""


class Slowdown(msgspec.Struct, frozen=True):
    """A host on which a job does not get its own pace."""

    host: str
    rate: str
    width: int
    asked: str
    by: str | None = None
    """The other job; None if it is unknown, or if it has ended and its pace is still in force."""

    def __str__(self) -> str:
        pace = f"{self.rate}, {self.width} at a time"
        other = f"job {self.by}" if self.by else "another job"
        return f"{self.host} is slowed to {pace} by {other}; this job asked for {self.asked}"


async def slowdowns(frontier: Backend, job: Job, lanes: Iterable[str] = ()) -> list[Slowdown]:
    """Returns the hosts on which another job slows this one down, among these `lanes`, its start hosts and
    the hosts that it is visiting now."""
    if job.state is not JobState.RUNNING or not job.counts.live:
        return []
    begins = (urls.lane_of(url) for url in job.spec.start)
    visits = (lease.lane for lease in await frontier.leases(job=job.id, limit=LOOK))
    names = list(dict.fromkeys([*lanes, *begins, *visits]))[:LOOK]
    slower = [lane for lane in await frontier.lanes(names=names, limit=LOOK) if is_slower(lane, job)]
    return [await _slowdown(frontier, job, lane) for lane in slower]


def is_slower(lane: Lane, job: Job) -> bool:
    """Whether a lane is slower than the job asked for, and neither an operator nor the host set that pace."""
    if lane.pinned:
        return False
    return lane.gap > max(job.spec.gap, lane.floor) or lane.width < job.spec.width


async def _slowdown(frontier: Backend, job: Job, lane: Lane) -> Slowdown:
    rate, asked = format_rate(lane.gap), f"{format_rate(job.spec.gap)}, {job.spec.width} at a time"
    return Slowdown(lane.name, rate, lane.width, asked, await _slower_job(frontier, job, lane))


async def _slower_job(frontier: Backend, job: Job, lane: Lane) -> str | None:
    """Returns the job that set this pace: an unfinished one that asked for it and starts on this host."""
    for other in await frontier.jobs(limit=JOBS):
        if other.id == job.id or other.state not in (JobState.RUNNING, JobState.PAUSED):
            continue
        same = other.spec.gap == lane.gap if lane.gap > job.spec.gap else other.spec.width == lane.width
        if same and lane.name in {urls.lane_of(url) for url in other.spec.start}:
            return other.id
    return None
