"""One visit, from lease to verdict. Reads top to bottom; nothing returns to a coordinator.

    permission → fetch → status → scrape → verdict

Whatever goes wrong becomes a verdict here, by `retry.verdict_for`; only cancellation passes.
Fetching and scraping end by deadlines of their own, so a visit has a hard deadline without a timer.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal import errors
from shoal.engine.brief import Brief
from shoal.engine.departure import Departure
from shoal.engine.retry import failure_of, rest_for, verdict_for
from shoal.errors import Drop, FetchError, FrontierError, classify_status
from shoal.fetch.port import NotSent
from shoal.fetch.redirects import redirect_target
from shoal.model import Done, Failure, Lease, Pace, Release, Request, Verdict
from shoal.politeness.pacing import retry_after
from shoal.scrape.page import Page

MAX_HOPS = 10

SetPace = Callable[[str, Pace], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """A verdict, and what a watcher wants to know about how it came about."""

    verdict: Verdict
    status: int = 0
    size: int = 0
    failure: Failure | None = None


async def visit(
    lease: Lease, brief: Brief, pace: SetPace, departure: Departure, *, now: Callable[[], float]
) -> Outcome:
    """Visit one URL for its job. Does not raise, except when cancelled or without its frontier."""
    outcome = await _visited(lease, brief, pace, departure, now=now)
    verdict = outcome.verdict
    if brief.skipped is not None and isinstance(verdict, Done) and verdict.skipped:
        await brief.skipped(verdict)
    return outcome


async def _visited(
    lease: Lease, brief: Brief, pace: SetPace, departure: Departure, *, now: Callable[[], float]
) -> Outcome:
    request = lease.request
    outcome = Outcome(Release(lease))
    try:
        if brief.spec.robots and not await _permitted(lease, brief, pace, departure, outcome):
            return outcome
        if not await departure.due():
            return outcome
        response = await brief.fetcher.fetch(brief.ask(request, departure))
        outcome.status, outcome.size = response.status, len(response.body)
        target = redirect_target(response)
        if target is not None:
            outcome.verdict = _redirected(lease, brief, target, response.status)
            return outcome
        if not 200 <= response.status < 300:
            raise FetchError(
                classify_status(response.status),
                f"the server answered {response.status}",
                retry_after=retry_after(response.header("retry-after"), now()),
            )
        page = Page(request, response, brief.links)
        scraped = await brief.scrape(page)
        outcome.verdict = Done(lease, scraped.items, brief.admit(page, scraped))
    except Drop as drop:
        outcome.verdict = Done(lease, skipped=drop.reason or "dropped")
    except NotSent:
        return outcome
    except FrontierError:
        raise  # not the URL's fault: it goes back in line
    except Exception as error:  # every other failure ends in a verdict: the URL must not be lost
        await _failed(lease, brief, pace, outcome, error)
    return outcome


async def _permitted(
    lease: Lease, brief: Brief, pace: SetPace, departure: Departure, outcome: Outcome
) -> bool:
    """Whether robots.txt allows the visit. Otherwise the outcome's verdict says what happens."""
    request = lease.request
    robots = await brief.permission.rules(request.url)
    if robots is None:
        if not await departure.due():
            return False
        robots = await brief.permission.ask(
            request.url, allow_private=brief.spec.allow_private, gate=departure
        )
        delay = robots.crawl_delay()
        if delay is not None:
            # The claim that brought us here knew nothing of the delay: it also counts from now.
            await pace(lease.lane, Pace(floor=delay, blocked=delay))
        if robots.reachable and (brief.spec.gap > 0 or delay):
            # Asking was this lane's turn: the page comes with the next one.
            outcome.verdict = Release(lease)
            return False
    else:
        departure.widen(robots.crawl_delay() or 0.0)
    if robots.failure is not None:
        # The page would not have come either: it fails like any other.
        error, message = robots.failure
        raise FetchError(error, f"robots.txt: {message}")
    if not robots.reachable:
        raise FetchError("robots_unreachable", robots.rule(request.url), retry_after=robots.ttl)
    if not await brief.permission.allows(robots, request.url):
        outcome.verdict = Done(lease, skipped="robots")
        return False
    return True


def _redirected(lease: Lease, brief: Brief, target: str, status: int) -> Done:
    """A redirect is a found URL: it waits for its own host's turn and is visited once."""
    request = lease.request
    if request.hops >= MAX_HOPS:
        raise FetchError("too_many_redirects", f"more than {MAX_HOPS} redirects, the last to {target}")
    if request.depth == 0:
        # Somebody asked for this very URL: it is followed wherever it leads. If that is the same
        # site under another name, its links belong to the job too.
        brief.scope.admit_start(target)
    elif brief.scope.allows(target, request.depth):
        return Done(lease, skipped="redirect_out_of_scope")
    keeps = status in (307, 308)
    found = Request(
        target,
        request.job,
        request.label,
        request.queue,
        request.priority,
        request.depth,
        method=request.method if keeps else "GET",
        body=request.body if keeps else None,
        # Headers belong to the origin they were meant for.
        headers=request.headers if _same_origin(request.url, target) else None,
        data=request.data,
        origin=request.origin or request.url,
        hops=request.hops + 1,
    )
    return Done(lease, found=(found,), skipped="redirect")


def _same_origin(one: str, other: str) -> bool:
    return one.split("/", 3)[:3] == other.split("/", 3)[:3]


async def _failed(lease: Lease, brief: Brief, pace: SetPace, outcome: Outcome, error: BaseException) -> None:
    failure = failure_of(error)
    after = getattr(error, "retry_after", None)
    if isinstance(error, errors.Retry):
        after = error.after
    rest = rest_for(failure, attempt=lease.request.attempt, after=after)
    if rest is not None:
        await pace(lease.lane, Pace(blocked=rest))
    outcome.failure = failure
    outcome.verdict = verdict_for(
        lease, failure, retries=brief.spec.retries, after=after, jitter=random.random()
    )
