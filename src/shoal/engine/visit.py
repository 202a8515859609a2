"""One visit, from lease to verdict. Reads top to bottom; nothing returns to a coordinator.

    permission → fetch → status → scrape → verdict

Every failure becomes a verdict here, through `retry.verdict_for`. Only two things leave as exceptions:
cancellation, and a frontier that cannot be reached. Fetching and scraping have deadlines of their own, so a
visit has a hard deadline without a timer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal import errors, urls
from shoal.engine.context import JobContext
from shoal.engine.departure import Departure
from shoal.engine.retry import failure_of, rest_for, verdict_for
from shoal.errors import Drop, FetchError, FrontierError, classify_status
from shoal.fetch.port import NotSent, Unwanted
from shoal.fetch.redirects import circle, redirect_target
from shoal.model import Done, Failure, Lease, Pace, Release, Request, Response, Verdict
from shoal.politeness.pacing import retry_after
from shoal.scrape.meta_robots import robots_directives
from shoal.scrape.page import Page

MAX_HOPS = 10
COOKIE = "+"
"""Follows a mark in a trail: that redirect set a cookie."""

SetPace = Callable[[str, Pace], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """A verdict, and how it came about: for those who watch the worker."""

    verdict: Verdict
    status: int = 0
    size: int = 0
    failure: Failure | None = None


async def visit(
    lease: Lease, context: JobContext, pace: SetPace, departure: Departure, *, now: Callable[[], float]
) -> Outcome:
    """Visit one URL for its job. Does not raise, except when cancelled or when the frontier cannot be
    reached."""
    outcome = await _visit(lease, context, pace, departure, now=now)
    verdict = outcome.verdict
    if context.on_skip is not None and isinstance(verdict, Done) and verdict.skipped:
        await context.on_skip(verdict)
    return outcome


async def _visit(
    lease: Lease, context: JobContext, pace: SetPace, departure: Departure, *, now: Callable[[], float]
) -> Outcome:
    request = lease.request
    outcome = Outcome(Release(lease))  # the URL goes back in line unless the visit gets further
    for start in request.starts:
        context.scope.admit_start(start)
    try:
        if context.spec.robots and not await _check_robots(lease, context, pace, departure, outcome):
            return outcome
        # Only what is sent differs: redirects, items and the frontier have the request without a hook's
        # headers.
        sent = request if context.on_request is None else await context.on_request(request)
        if not await departure.wait_for_turn():
            return outcome
        response = await context.fetcher.fetch(context.ask(sent, departure))
        outcome.status, outcome.size = response.status, len(response.body)
        page = None
        if context.on_response is not None:
            await departure.wait_for_slot()
            page = await context.on_response(Page(request, response, context.links))
            response = page.response
        target = redirect_target(response)
        if target is not None:
            outcome.verdict = _follow_redirect(lease, context, target, response)
            return outcome
        if not 200 <= response.status < 300:
            raise FetchError(
                classify_status(response.status),
                f"the server answered {response.status}",
                retry_after=retry_after(response.header("retry-after"), now()),
            )
        await departure.wait_for_slot()
        if page is None:  # a hook may have parsed it already
            page = Page(request, response, context.links)
        # On a thread: to find the directives the page is parsed, however large it is.
        directives = (
            await asyncio.to_thread(robots_directives, page, context.agent)
            if context.spec.page_robots
            else ()
        )
        scraped = await context.scrape(page)
        found = [] if "nofollow" in directives else context.admit(page, scraped)
        if "noindex" in directives:
            outcome.verdict = Done(lease, (), found, "noindex")
        else:
            outcome.verdict = Done(lease, scraped.items, found)
    except Drop as drop:
        outcome.verdict = Done(lease, skipped=drop.reason or "dropped")
    except Unwanted:
        outcome.verdict = Done(lease, skipped="kind")
    except NotSent:
        return outcome
    except FrontierError:
        raise  # the URL is not to blame: it goes back in line
    except Exception as error:  # every other failure becomes a verdict: the URL must not be lost
        await _fail(lease, context, pace, outcome, error)
    return outcome


async def _check_robots(
    lease: Lease, context: JobContext, pace: SetPace, departure: Departure, outcome: Outcome
) -> bool:
    """Returns whether robots.txt allows the page to be fetched now. If not, the outcome has the verdict.

    Raises FetchError if the rules cannot be had.
    """
    request = lease.request
    permission, agent, private = context.permission, context.agent, context.spec.allow_private
    robots = await permission.rules(request.url, allow_private=private, agent=agent)
    turn_used, delay = False, None
    if robots is None:
        if not await departure.wait_for_turn():
            return False
        # Raises if the host does not answer: the page would not have come either.
        robots = await permission.ask(request.url, allow_private=private, agent=agent, gate=departure)
        delay = robots.crawl_delay(agent)
        if delay is not None:
            # The claim of this lease did not know of the delay, so it counts from now as well.
            await pace(lease.lane, Pace(floor=delay, blocked=delay))
        turn_used = robots.reachable and (context.spec.gap > 0 or bool(delay))
    else:
        departure.raise_gap(robots.crawl_delay(agent) or 0.0)
    if not robots.reachable:
        raise FetchError("robots_unreachable", robots.rule(request.url), retry_after=robots.ttl)
    if not await context.permits(robots, request):
        outcome.verdict = Done(lease, skipped="robots")
        return False
    # Fetching robots.txt took this lane's turn, so the page waits for the next one.
    return not turn_used or await departure.wait_for_next_turn(delay or 0.0)


def _follow_redirect(lease: Lease, context: JobContext, target: str, response: Response) -> Done:
    """Make a found URL of a redirect's target: it waits for its own host's turn and is visited once."""
    request = lease.request
    if request.hops >= MAX_HOPS:
        raise FetchError("too_many_redirects", f"more than {MAX_HOPS} redirects, the last to {target}")
    keeps = response.status in (307, 308)
    found = Request(
        target,
        request.job,
        request.label,
        request.queue,
        request.priority,
        request.depth,
        method=request.method if keeps else "GET",
        body=request.body if keeps else None,
        # Headers are sent only to the origin that they were meant for.
        headers=request.headers if _same_origin(request.url, target) else None,
        data=request.data,
        origin=request.origin or request.url,
        hops=request.hops + 1,
        trail=_trail(request, response),
    )
    if _mark(found) in found.trail or context.closes_circle(_mark(request), _mark(found), MAX_HOPS):
        # The target is known already: it would not be visited again, and the circle would not be noticed.
        raise circle(target, cookie=COOKIE in found.trail)
    scope = context.scope
    # A URL of depth 0 was submitted: its redirects are followed wherever they lead. If they lead to the same
    # site under another name, its links belong to the job too.
    same = request.depth == 0 and scope.admit_start(target)
    if request.depth and scope.refusal(target, request.depth):
        return Done(lease, skipped="redirect_out_of_scope")
    found = context.with_starts([found], request, target if same else "")[0]
    return Done(lease, found=(found,), skipped="redirect")


def _trail(request: Request, response: Response) -> str:
    cookie = COOKIE if response.header("set-cookie") else ""
    return f"{request.trail}{_mark(request)}{cookie} "


def _mark(request: Request) -> str:
    """A request as it stands in a trail: enough of its key to differ from the other nine."""
    return urls.key("", request.url, request.method, request.body)[-8:].hex()


def _same_origin(one: str, other: str) -> bool:
    return one.split("/", 3)[:3] == other.split("/", 3)[:3]


async def _fail(
    lease: Lease, context: JobContext, pace: SetPace, outcome: Outcome, error: BaseException
) -> None:
    """Make a verdict of the error, and let the lane rest if the host is in trouble."""
    failure = failure_of(error)
    after = getattr(error, "retry_after", None)
    if isinstance(error, errors.Retry):
        after = error.after
    rest = rest_for(failure, attempt=lease.request.attempt, after=after)
    if rest is not None:
        await pace(lease.lane, Pace(blocked=rest))
    outcome.failure = failure
    outcome.verdict = verdict_for(
        lease, failure, max_attempts=context.max_attempts(lease.request), after=after, jitter=random.random()
    )
