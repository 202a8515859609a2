"""`shoal explain`: why a URL has, or has not, been fetched."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from shoal.cli.common import OK, open_session, run
from shoal.cli.options import Dispatch, Frontier, Json, OfJob
from shoal.cli.output import duration, emit, from_now, print_facts
from shoal.model import TRANSIT, Job, JobState, Lane, RequestStatus, Selection

if TYPE_CHECKING:
    from shoal.app import Session
    from shoal.frontier.port import Backend

MAX_STRANGERS = 20
"""How many jobs that do not know the URL are checked for whether they would accept it, newest first."""

REFUSALS = {
    "depth": "it is too many links away from the start (--depth)",
    "scope": "it is outside the job's scope",
    "excluded": "--include or --exclude rules it out",
    "trap": "it looks like a crawler trap: its path or query repeats itself",
}


def explain(
    url: str,
    *,
    job: OfJob = None,
    json: Json = False,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
) -> int:
    """Explain why a URL has, or has not, been fetched.

    Reads the frontier only; nothing is fetched.

    Parameters
    ----------
    url
        The URL to explain.
    """
    return run(lambda: _explain(url, job, json=json, frontier=frontier, dispatch=dispatch))


async def _explain(given: str, job: str | None, *, json: bool, **where: str | None) -> int:
    from shoal import urls

    url = urls.canonical(given)
    async with open_session(create=False, **where) as session:
        found = await session.frontier.find(url, job)
        known = [finding for finding in found if finding.state != "unknown"]
        chosen = known or found[-MAX_STRANGERS:][::-1]
        now = time.time()
        answers = [await _with_pace(session, finding, url, now) for finding in chosen]
        robots = await _robots(session, url, chosen)
    if json:
        from shoal.app.views import moment_or_none

        for answer in answers:
            answer |= {name: moment_or_none(answer[name]) for name in ("ready_at", "leased_until")}
        emit({"url": url, "robots": robots, "known": bool(known), "jobs": answers})
        return OK
    print_facts(
        [
            ("url", url),
            ("robots.txt", robots or "not known yet: it is fetched before the first page of the host"),
        ]
    )
    if not found:
        print_facts([("", ""), ("why", "this frontier has no jobs; start one with `shoal crawl URL`")])
    for answer in answers:
        print_facts([("", ""), *_facts(answer, now)])
    if not known and len(found) > len(chosen):
        print_facts(
            [("", ""), ("", f"and {len(found) - len(chosen):,} older jobs that do not know it either")]
        )
    return OK


async def _robots(session: Session, url: str, findings: list[RequestStatus]) -> str | None:
    """Returns the robots.txt rule for the URL, for the first of these jobs that has one; None if robots.txt
    was not read lately."""
    specs = [(await session.frontier.job(finding.job)).spec for finding in findings]
    for spec in specs or [session.settings.spec(())]:
        agent, private = session.agent(spec), spec.allow_private
        robots = await session.permission.rules(url, allow_private=private, agent=agent)
        if robots is not None:
            return robots.rule(url, agent)
    return None


async def _slots(session: Session, finding: RequestStatus) -> list[dict[str, Any]]:
    """Returns the broker queues that hold this URL, or URLs that use up its host's limit: how many URLs each
    holds, and its number of consumers (None if it is unknown)."""
    from shoal.app import broker_state
    from shoal.dispatch.routes import broker_queue

    lane, found = finding.lane, Counter[str]()
    if finding.request is not None and finding.worker.startswith(TRANSIT):
        found = Counter([finding.request.queue])
    elif finding.state == "waiting" and lane is not None and lane.busy >= lane.width:
        leases = await session.frontier.leases(lane=lane.name)
        found = Counter(lease.queue for lease in leases if lease.in_transit)
    if not found:
        return []
    state = await broker_state(session)
    depths = state["queues"] if state else {}
    return [
        {
            "queue": broker_queue(name),
            "urls": number,
            "consumers": depths.get(broker_queue(name), {}).get("consumers"),
        }
        for name, number in sorted(found.items())
    ]


def _consumers(slot: dict[str, Any]) -> str:
    match slot["consumers"]:
        case None:
            return "give --dispatch to see its consumers"
        case 0:
            return "no consumers"
        case 1:
            return "1 consumer"
        case many:
            return f"{many:,} consumers"


async def _with_pace(session: Session, finding: RequestStatus, url: str, now: float) -> dict[str, Any]:
    """Returns one job's answer, with the job that slows it down on this host, if there is one."""
    from msgspec import to_builtins

    from shoal.app import slowdowns

    frontier = session.frontier
    job = await frontier.job(finding.job)
    lane = finding.lane.name if finding.lane and finding.state in ("waiting", "delayed", "leased") else None
    held = [each for each in await slowdowns(frontier, job, [lane]) if each.host == lane] if lane else []
    answer = _answer(finding, job, url, now, await _slots(session, finding))
    if finding.state == "done" and await _purged(frontier, job):
        visited = "it was visited, or it " if job.counts.done else "it "
        answer["why"] = f"{visited}failed for good and its dead letter was purged"
    return answer | {"held_by": to_builtins(held[0]) if held else None}


async def _purged(frontier: Backend, job: Job) -> bool:
    """Whether dead letters of the job were purged: their URLs stay known, but it is no longer known how
    each one ended."""
    gone = job.counts.dead + job.counts.expired
    return gone > 0 and gone > sum(group.count for group in await frontier.dead_groups(Selection(job=job.id)))


def _answer(
    finding: RequestStatus, job: Job, url: str, now: float, slots: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns one job's answer as JSON; `why` is the sentence for people."""
    from shoal.app.views import lane_view

    request, failure = finding.request, finding.failure
    return {
        "job": finding.job,
        "job_state": job.state.value,
        "state": finding.state,
        "why": _why(finding, job, url, now, slots),
        "attempts": request.attempt if request else None,
        "retries": job.spec.retries,
        "depth": request.depth if request else None,
        "queue": request.queue if request else None,
        "priority": request.priority if request else None,
        "ahead": finding.ahead,
        "ready_at": finding.ready_at,
        "worker": None if finding.worker.startswith(TRANSIT) else finding.worker or None,
        "in_broker": finding.worker.startswith(TRANSIT),
        "broker_holds": slots,
        "leased_until": finding.until,
        "error": failure.error if failure else None,
        "message": failure.message if failure else None,
        "obeys_robots": job.spec.robots,
        "lane": lane_view(finding.lane, now) if finding.lane else None,
    }


def _why(finding: RequestStatus, job: Job, url: str, now: float, slots: list[dict[str, Any]]) -> str:
    """Returns what happened to the URL, or the first thing that it waits for."""
    request, failure = finding.request, finding.failure
    match finding.state:
        case "unknown":
            return _why_unknown(job, url)
        case "dead" | "expired":
            reason = f"{failure.error}: {failure.message}" if failure else "the reason was not kept"
            return f"{reason.removesuffix(': ')}; `shoal dead show '{url}'` shows more"
        case "done" if job.state is JobState.CANCELLED:
            return "it was visited, or dropped when the job was cancelled"
        case "done":
            return "it was visited"
        case "leased" if finding.worker.startswith(TRANSIT):
            where = f" queue {slots[0]['queue']} ({_consumers(slots[0])})" if slots else ""
            return f"it is in the broker{where}, on its way to a worker"
        case "leased":
            return f"worker {finding.worker} is fetching it; the lease ends {from_now(finding.until, now)}"
    if job.state is JobState.PAUSED:
        return f"the job is paused; resume it with `shoal resume {job.id}`"
    if finding.state == "delayed":
        failed = (
            f"failed {request.attempt} of {job.spec.max_attempts} times; "
            if request and request.attempt
            else ""
        )
        return f"{failed}it is delayed; next attempt {from_now(finding.ready_at, now)}"
    return _why_waiting(finding, finding.lane, now, slots)


def _why_waiting(finding: RequestStatus, lane: Lane | None, now: float, slots: list[dict[str, Any]]) -> str:
    if lane is None:
        return "it is waiting, and nothing holds it back"
    if lane.paused:
        return f"its host is paused; resume it with `shoal lanes resume {lane.name}`"
    if lane.blocked_until > now:
        rest = duration(lane.blocked_until - now)
        ended_by = f"`shoal lanes resume {lane.name}` ends that"
        return f"its host is left alone for {rest}, after errors or because it asked for that; {ended_by}"
    if lane.busy >= lane.width and slots:
        held = "; ".join(
            f"{slot['urls']:,} held by URLs in broker queue {slot['queue']} ({_consumers(slot)})"
            for slot in slots
        )
        return f"its host is at its limit ({lane.busy} of {lane.width} at a time): {held}"
    if lane.busy >= lane.width:
        return f"its host is at its limit: {lane.busy} of {lane.width} at a time are being fetched"
    if finding.ahead:
        about = f", so its turn is in about {duration(finding.ahead * lane.gap)}" if lane.gap else ""
        return f"{finding.ahead:,} requests of this job are before it on its host{about}"
    if finding.ready_at is not None and finding.ready_at > now:
        return f"it is next on its host, {from_now(finding.ready_at, now)}"
    return "it can be fetched now: check that a worker is running (`shoal workers`)"


def _why_unknown(job: Job, url: str) -> str:
    from shoal.cli.progress import ended_by
    from shoal.politeness.scope import Scope

    if job.state is JobState.CANCELLED:
        return "the job never found it, and is cancelled"
    # A link is at least one away from the start; the depth of this URL is unknown.
    refusal = Scope(job.spec).refusal(url, 1)
    if refusal:
        scope = f": {job.spec.scope} of {job.spec.start[0]}" if refusal == "scope" and job.spec.start else ""
        return f"the job refuses it: {REFUSALS.get(refusal, refusal)}{scope}"
    limits = ended_by(job)
    if limits:
        return f"the job would accept it, but reached {limits[0]}"
    if job.state is JobState.DONE:
        return "the job would accept it, but no page that it visited links to it"
    return "the job would accept it, but no page that it has visited so far links to it"


def _facts(answer: dict[str, Any], now: float) -> list[tuple[str, str]]:
    """Returns an answer as rows to print."""
    rows = [("job", f"{answer['job']} ({answer['job_state']})"), ("state", answer["state"])]
    rows.append(("why", answer["why"]))
    if answer["attempts"]:
        rows.append(("attempts", f"{answer['attempts']} failed of {answer['retries'] + 1}"))
    if answer["error"]:
        rows.append(("last error", f"{answer['error']}: {answer['message'] or '-'}"))
    if answer["ahead"] is not None:
        rows.append(("before it", f"{answer['ahead']:,} requests of the same job and host"))
    if answer["ready_at"] is not None:
        rows.append(("next", from_now(answer["ready_at"], now)))
    if answer["worker"]:
        rows.append(("worker", f"{answer['worker']}, lease ends {from_now(answer['leased_until'], now)}"))
    if answer["queue"] is not None:
        rows.append(("queue", f"{answer['queue']}, priority {answer['priority']}, depth {answer['depth']}"))
    if lane := answer["lane"]:
        rows.append(
            (
                "lane",
                f"{lane['host']}: {lane['rate']}, {lane['active']} of {lane['concurrency']} active,"
                f" {lane['waiting']:,} waiting"
                + (", pinned" if lane["pinned"] else "")
                + (", paused" if lane["paused"] else ""),
            )
        )
    if held := answer["held_by"]:
        from shoal.app import Slowdown

        rows.append(("pace", str(Slowdown(**held))))
    if not answer["obeys_robots"]:
        rows.append(("robots.txt", "this job ignores it"))
    return rows
