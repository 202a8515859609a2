"""Why a job brought no page, in a sentence, and what to do about it."""

from __future__ import annotations

from collections import Counter

from shoal.app.session import Session
from shoal.errors import NothingFetched, class_of
from shoal.events import Event, Visited
from shoal.model import Job, JobState, Selection

FEW = 3
"""Causes that are told."""
MANY = 20
"""URLs that are looked at, or kept in mind."""
LONG = 120
"""Characters of a URL that are shown."""

ADVICE = {
    "dns_failed": "check the name, and that this machine can look names up",
    "dns_timeout": "check the name, and that this machine can look names up",
    "dns_not_found": "check the name; one of your own network needs --allow-private (allow_private=True)",
    "egress_blocked": "addresses that are not public need --allow-private (allow_private=True)",
    "tls_invalid": "check the address: the host has no certificate that can be trusted",
    "http_401": "the server wants to know who asks: --header 'Authorization: …'",
    "http_403": "the server does not let us: --header and --user-agent tell it who asks",
    "http_404": "check the address",
    "http_410": "check the address",
    "http_429": "the server wants fewer requests: come back later, or with --rate 10/m",
    "http_503": "the server is in trouble: try again later",
    "robots_unreachable": "try again later; --no-robots does without robots.txt",
    "body_too_large": "SHOAL_MAX_BODY raises the limit",
    "expired": "more workers, or a longer ttl",
}
"""What to do, by class; the groups of classes below are for the rest."""
GROUP_ADVICE = {
    "connection": "check that the server runs, and that this machine reaches it",
    "timeout": "try again later, or give it more time with --timeout",
    "refused": "give a full http:// or https:// URL",
    "scraper": "the page came, and the scraper failed on it: correct it, then `shoal dead retry`",
}
ROBOTS_ADVICE = "--no-robots (no_robots=True) does not ask; do that on sites where you may"


class Seen:
    """What the visits of a worker here tell beyond what a frontier counts."""

    def __init__(self) -> None:
        self.came = 0
        """Pages that servers sent and no scraper failed on. One that was dropped came too."""
        self.disallowed: dict[str, None] = {}
        """URLs that were skipped without a request: robots.txt does not allow them."""

    def watch(self, event: Event) -> None:
        if not isinstance(event, Visited) or event.error:
            return
        self.came += 200 <= event.status < 300
        if event.outcome == "skipped" and not event.status and len(self.disallowed) < MANY:
            self.disallowed[event.url] = None


async def nothing_fetched(session: Session, job: Job, seen: Seen | None) -> NothingFetched | None:
    """The error about a job that is done and could fetch nothing at all; None about any other. Without
    `seen`, whose workers are elsewhere, the start URLs tell of robots.txt."""
    counts = job.counts
    if job.state is not JobState.DONE or counts.done > counts.skipped or (seen and seen.came):
        return None
    causes = await _causes(session, job)
    disallowed = list(seen.disallowed) if seen else await _disallowed(session, job)
    if not causes and not disallowed:
        return None  # dropped, or redirected to what was visited
    told = [f"{error}{f' {number:,}' if number > 1 else ''}{why}" for error, number, why in causes]
    if disallowed:
        more = f" and {len(disallowed) - 1:,} more" if len(disallowed) > 1 else ""
        told.append(f"robots.txt disallows {disallowed[0]}{more}")
    error = causes[0][0] if causes else "robots"
    hint = _advice(error) or f"`shoal dead list --job {job.id}` tells more"
    what = "nothing could be fetched" if class_of(error).group != "scraper" else "nothing could be scraped"
    return NothingFetched(f"{what}: {'; '.join(told)}", hint=hint, error=error)


async def _causes(session: Session, job: Job) -> list[tuple[str, int, str]]:
    """Why URLs ended dead: class, how many, and an example; the most frequent first."""
    numbers: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for group in await session.frontier.dead_groups(Selection(job=job.id)):
        numbers[group.error] += group.count
        examples.setdefault(group.error, group.example)
    causes: list[tuple[str, int, str]] = []
    for error, number in numbers.most_common(FEW):
        letters = await session.frontier.dead(Selection(job=job.id, error=error), limit=1)
        message = letters[0].failure.message if letters else ""
        if error == "egress_blocked":
            message = message.partition(" (")[0]  # the way out is in the hint
        where = examples[error] if len(examples[error]) <= LONG else examples[error][: LONG - 1] + "…"
        causes.append((error, number, f", {message} ({where})" if message else f" ({where})"))
    return causes


async def _disallowed(session: Session, job: Job) -> list[str]:
    """The start URLs that robots.txt does not allow, as it was read for this job."""
    if not job.spec.robots or not job.counts.skipped:
        return []
    agent, private = session.agent(job.spec), job.spec.allow_private
    found: list[str] = []
    for url in job.spec.start[:MANY]:
        robots = await session.permission.rules(url, allow_private=private, agent=agent)
        if robots is not None and not await session.permission.allows(robots, url, agent):
            found.append(url)
    return found


def _advice(error: str) -> str:
    if error == "robots":
        return ROBOTS_ADVICE
    return ADVICE.get(error) or GROUP_ADVICE.get(class_of(error).group, "")
