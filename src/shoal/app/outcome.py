"""Why a job fetched no page, in one sentence, and what to do about it."""

from __future__ import annotations

from collections import Counter

from shoal.app.session import Session
from shoal.errors import NothingFetched, class_of
from shoal.events import Event, Visited
from shoal.model import Job, JobState, Selection

FEW = 3
"""Maximum number of causes in the message."""
MANY = 20
"""Maximum number of URLs that are checked or remembered."""
LONG = 120
"""Maximum number of characters of a URL in the message."""

ADVICE = {
    "dns_failed": "check the host name, and that DNS works on this machine",
    "dns_timeout": "check the host name, and that DNS works on this machine",
    "dns_not_found": "check the host name; a name of your own network needs --allow-private"
    " (allow_private=True)",
    "egress_blocked": "private addresses need --allow-private (allow_private=True)",
    "tls_invalid": "check the address: the host has no trusted certificate",
    "http_401": "the server requires a login: --header 'Authorization: …'",
    "http_403": "the server refuses access: try --header or --user-agent",
    "http_404": "check the address",
    "http_410": "check the address",
    "http_429": "the server limits the request rate: try again later, or with --rate 10/m",
    "http_503": "the server is overloaded or down: try again later",
    "robots_unreachable": "try again later, or ignore robots.txt with --no-robots",
    "body_too_large": "raise the limit with SHOAL_MAX_BODY",
    "expired": "start more workers, or give a longer ttl",
}
"""What to do, by error class; classes that are not listed here use the advice of their group below."""
GROUP_ADVICE = {
    "connection": "check that the server is running, and that this machine can reach it",
    "timeout": "try again later, or allow more time with --timeout",
    "refused": "give a full http:// or https:// URL",
    "scraper": "the scraper failed on a page that was fetched: fix it, then run `shoal dead retry`",
}
ROBOTS_ADVICE = "where you are allowed to, ignore robots.txt with --no-robots (no_robots=True)"


class Seen:
    """Facts about the visits of a worker in this process that a frontier does not count."""

    def __init__(self) -> None:
        self.came = 0
        """Pages that arrived and that no scraper failed on; dropped pages count too."""
        self.disallowed: dict[str, None] = {}
        """URLs that were skipped without a request, because robots.txt disallows them."""

    def watch(self, event: Event) -> None:
        if not isinstance(event, Visited) or event.error:
            return
        self.came += 200 <= event.status < 300
        if event.outcome == "skipped" and not event.status and len(self.disallowed) < MANY:
            self.disallowed[event.url] = None


async def nothing_fetched(session: Session, job: Job, seen: Seen | None) -> NothingFetched | None:
    """Returns the error of a job that is done and fetched nothing; None for any other job. Without `seen`
    (the workers are other processes), robots.txt is checked for the start URLs."""
    counts = job.counts
    if job.state is not JobState.DONE or counts.done > counts.skipped or (seen and seen.came):
        return None
    causes = await _causes(session, job)
    disallowed = list(seen.disallowed) if seen else await _disallowed(session, job)
    if not causes and not disallowed:
        return None  # dropped, or redirected to a page that was visited
    reasons = [f"{error}{f' {number:,}' if number > 1 else ''}{why}" for error, number, why in causes]
    if disallowed:
        more = f" and {len(disallowed) - 1:,} more" if len(disallowed) > 1 else ""
        reasons.append(f"robots.txt disallows {disallowed[0]}{more}")
    error = causes[0][0] if causes else "robots"
    hint = _advice(error) or f"`shoal dead list --job {job.id}` shows more"
    what = "nothing could be fetched" if class_of(error).group != "scraper" else "nothing could be scraped"
    return NothingFetched(f"{what}: {'; '.join(reasons)}", hint=hint, error=error)


async def _causes(session: Session, job: Job) -> list[tuple[str, int, str]]:
    """Returns why URLs failed for good: class, number and an example, the most frequent first."""
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
            message = message.partition(" (")[0]  # the hint has the rest
        where = examples[error] if len(examples[error]) <= LONG else examples[error][: LONG - 1] + "…"
        causes.append((error, number, f", {message} ({where})" if message else f" ({where})"))
    return causes


async def _disallowed(session: Session, job: Job) -> list[str]:
    """Returns the start URLs that robots.txt disallows, as it was read for this job."""
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
