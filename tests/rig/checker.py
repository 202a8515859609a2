"""Was a promise broken? A pure function over what others wrote down.

    broken = violations(evidence)
    assert not broken, "\\n".join(broken)

The witnesses are the visited site's own log and the frontier's item log, never a worker's word. Each
sentence of the answer names one violation; an empty answer means that nothing was lost, nothing was
stored twice, nobody came too fast, the counters are true and work went on soon after each kill.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Literal

from msgspec import Struct

from shoal.demo.site import Hit, by_host
from shoal.model import CRASH_LIMIT, Counts
from tests.rig.traced import Sent

SLACK = 0.1
LEAST_SLACK = 0.05
"""The share of a gap, or the seconds, that a visit may seem to come before its turn: the one before it was a
little late. docs/guarantees.md says so."""
LOOK_BACK = 0.15
"""How long before a visit a stall may have held it up."""
GRACE = 10.0
"""Seconds on top of a lease within which work goes on after a kill."""
MAX_CRASHED = 0.01
"""The share of URLs that may have been in the hands of three workers who died."""
SHOWN = 5
"""Sentences of one kind; the rest is a number."""

End = Literal["done", "dead"]


class Kill(Struct, frozen=True):
    """A worker's death: when (monotonic), and the user agent under which it visited."""

    at: float
    agent: str


def never(_begin: float, _end: float) -> float:
    """A machine that does not stall."""
    return 0.0


class Evidence(Struct, frozen=True):
    """What is known when a job is over."""

    wanted: Mapping[str, End]
    """Every URL that the job must come to, and how it must end."""
    stored: Sequence[str]
    """The URL of each item in the job's log."""
    dead: Sequence[tuple[str, str]]
    """URL and error class of each dead letter."""
    counts: Counts
    hits: Sequence[Hit]
    recount: Sequence[str] = ()
    """What `frontier.check()` said."""
    gap: float = 0.0
    width: int = 1
    lease: float = 60.0
    kills: Sequence[Kill] = ()
    outages: int = 0
    """How often the frontier's server was killed: each may have lost the answer to a claim, and then
    nobody has what was claimed until the lease ends."""
    stall: Callable[[float, float], float] = never
    """Seconds for which the machine held something up between two moments, at most."""
    sent: Sequence[Sent] = ()
    """What the workers say about the requests that they let out. It convicts nobody and acquits nobody;
    it is told along with a visit that came too early."""


def violations(evidence: Evidence) -> list[str]:
    """Every broken promise as a sentence; at most `SHOWN` of a kind, and how many more there are."""
    examined = (lost, twice, ends, paced, side_by_side, counted, resumed)
    return list(chain.from_iterable(_few(examine(evidence)) for examine in examined))


def lost(evidence: Evidence) -> Iterator[str]:
    """Wanted, and neither stored nor dead."""
    seen = set(evidence.stored) | {url for url, _ in evidence.dead}
    for url in evidence.wanted:
        if url not in seen:
            yield f"lost: {url} is neither stored nor dead"


def twice(evidence: Evidence) -> Iterator[str]:
    """Stored more often than once, or stored and dead, or dead twice."""
    dead = Counter(url for url, _ in evidence.dead)
    for url, times in Counter(evidence.stored).items():
        if times > 1:
            yield f"twice: {url} is stored {times} times"
        if url in dead:
            yield f"twice: {url} is stored and also dead"
    for url, times in dead.items():
        if times > 1:
            yield f"twice: {url} is dead {times} times"


def ends(evidence: Evidence) -> Iterator[str]:
    """Another end than it must have. Who was in the hands of three dead is rightly dead; a claim that
    nobody lived to follow leaves no trace at the site, so all that can be said is how few those are."""
    for url in set(evidence.stored) - evidence.wanted.keys():
        yield f"stranger: {url} is stored and nobody asked for it"
    for url in evidence.stored:
        if evidence.wanted.get(url) == "dead":
            yield f"wrong end: {url} is stored and should be dead"
    deaths = len(evidence.kills) + evidence.outages
    crashed = 0
    for url, error in evidence.dead:
        crashed += error == "worker_crashed"
        if url not in evidence.wanted:
            yield f"stranger: {url} is dead and nobody asked for it"
        elif error == "worker_crashed" and deaths < CRASH_LIMIT:
            yield f"wrong end: {url} is dead as worker_crashed, and only {deaths} died"
        elif error != "worker_crashed" and evidence.wanted[url] == "done":
            yield f"wrong end: {url} is dead as {error} and should be done"
    if crashed > len(evidence.wanted) * MAX_CRASHED:
        yield f"wrong end: {crashed} are dead as worker_crashed, {MAX_CRASHED:.0%} may be that unlucky"


def paced(evidence: Evidence) -> Iterator[str]:
    """Two starts on one host closer than its gap."""
    for address, hits in by_host(evidence.hits).items():
        for before, after in pairwise(hits):
            between = after.start - before.start
            slack = max(LEAST_SLACK, SLACK * evidence.gap) + evidence.stall(
                before.start - LOOK_BACK, before.start
            )
            if between < evidence.gap - slack:
                yield (
                    f"too fast: {after.url} on {address} came {between:.3f} s after {before.url},"
                    f" the gap is {evidence.gap:g} s and {slack:.3f} s are allowed for stalls"
                    f" ({_story(before, evidence.sent)}; then {_story(after, evidence.sent)})"
                )


def _story(hit: Hit, sent: Sequence[Sent]) -> str:
    """One visit as the site saw it and, where that is known, as its worker did."""
    seen = f"{hit.agent} at {hit.start:.3f}"
    theirs = [
        one
        for one in sent
        if one.went and (one.agent, one.address) == (hit.agent, hit.address) and one.at <= hit.start
    ]
    return f"{seen}: {max(theirs, key=lambda one: one.at).told()}" if theirs else seen


def side_by_side(evidence: Evidence) -> Iterator[str]:
    """More visits at a time on one host than its width."""
    for address, hits in by_host(evidence.hits).items():
        under_way: list[Hit] = []
        for hit in hits:
            under_way = [other for other in under_way if other.end > hit.start]
            under_way.append(hit)
            if len(under_way) > evidence.width:
                yield (
                    f"too wide: {len(under_way)} visits at a time on {address}, the width is"
                    f" {evidence.width}: {', '.join(other.path for other in under_way)}"
                )


def counted(evidence: Evidence) -> Iterator[str]:
    """Counters that are not what a recount gives."""
    counts, stored, dead = evidence.counts, len(evidence.stored), len(evidence.dead)
    expected = {"added": len(evidence.wanted), "dead": dead, "items": stored, "done": stored, "live": 0}
    for name, number in expected.items():
        if getattr(counts, name) != number:
            yield f"miscounted: {name} is {getattr(counts, name)}, a recount gives {number}"
    for sentence in evidence.recount:
        yield f"inconsistent: {sentence}"


def resumed(evidence: Evidence) -> Iterator[str]:
    """A silence longer than a lease and some grace; a cut visit that nobody repeated in that time."""
    limit = evidence.lease + GRACE
    starts = sorted(hit.start for hit in evidence.hits)
    for before, after in pairwise(starts):
        if after - before > limit:
            yield f"silence: nobody came for {after - before:.1f} s, {limit:g} s are allowed"
    if any(url not in evidence.stored for url, end in evidence.wanted.items() if end == "done"):
        return  # told already, by its name
    visits: dict[str, list[float]] = defaultdict(list)
    for hit in evidence.hits:
        visits[hit.url].append(hit.start)
    deaths = {kill.agent: kill.at for kill in evidence.kills}
    for hit in evidence.hits:
        if hit.status or hit.agent not in deaths:
            continue
        later = [start for start in visits[hit.url] if start > hit.start]
        if later and min(later) - deaths[hit.agent] > limit:
            late = min(later) - deaths[hit.agent]
            yield (
                f"late: {hit.url} was cut by a kill and visited again {late:.1f} s later,"
                f" {limit:g} s are allowed"
            )


def longest_silence(hits: Sequence[Hit]) -> float:
    """Seconds between two starts, at most."""
    starts = sorted(hit.start for hit in hits)
    return max((after - before for before, after in pairwise(starts)), default=0.0)


def _few(sentences: Iterator[str]) -> list[str]:
    told = list(sentences)
    if len(told) <= SHOWN:
        return told
    return [*told[:SHOWN], f"…and {len(told) - SHOWN} more of the kind `{told[0].partition(':')[0]}`"]
