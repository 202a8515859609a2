"""Routes: which queue a URL goes to, its priority, and how long it may wait. Pure functions.

The first rule whose pattern matches wins. Patterns are written as for `--include`: `*news*`, or
`re:` followed by a regular expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from shoal.model import DEFAULT_PRIORITY, DEFAULT_QUEUE, JobSpec, Request
from shoal.politeness.scope import pattern
from shoal.queues import check_queue

URL_QUEUE = "url_queue_ttl"
PRIORITY_QUEUE = "priority_queue"

Ack = Literal["reliable", "fast"]


class Rule(Struct, frozen=True):
    """A pattern, and where URLs that match it go."""

    pattern: str
    queue: str = URL_QUEUE
    priority: int = DEFAULT_PRIORITY
    ttl: float | None = None
    """Seconds that a URL may wait for its visit; None means as long as its queue allows."""
    ack: Ack = "reliable"


class Route(Struct, frozen=True):
    queue: str
    priority: int
    ttl: float | None
    rule: Rule | None
    """The rule that won; None for the default."""


DEFAULT_RULES = (
    # Case does not matter: LIVE is live. Only whole words match: `olive` and `delivery` do not.
    Rule("re:(?i)(^|[^a-z])(news|live)([^a-z]|$)", PRIORITY_QUEUE, priority=8, ttl=1800.0),
    Rule("re:(?i)^https?://([^/]*\\.)?httpbin(go)?([.:/]|$)", URL_QUEUE, ttl=300.0),
)


class Routes:
    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        """Raises UsageError for an invalid pattern or queue name."""
        for rule in rules:
            check_queue(rule.queue)
        self.rules = tuple(rules)
        self._matches = [(pattern(rule.pattern), rule) for rule in rules]

    def route(self, url: str) -> Route:
        for matches, rule in self._matches:
            if matches(url):
                return Route(rule.queue, rule.priority, rule.ttl, rule)
        return Route(URL_QUEUE, DEFAULT_PRIORITY, None, None)

    def submitted(
        self,
        request: Request,
        spec: JobSpec,
        *,
        queue: bool = False,
        priority: bool = False,
        ttl: bool = False,
    ) -> Request:
        """Return the request with the queue, priority and ttl of its rule. A value that was given explicitly
        (True), for the request or for its job, stays; of two ttls the smaller counts."""
        route = self.route(request.url)
        if route.rule is None:
            return request
        queue = queue or spec.queue != DEFAULT_QUEUE
        priority = priority or spec.priority != DEFAULT_PRIORITY
        limits = (request.ttl if ttl else None, route.ttl)
        return replace(
            request,
            queue=request.queue if queue else frontier_queue(route.queue),
            priority=request.priority if priority else route.priority,
            ttl=min((limit for limit in limits if limit is not None), default=None),
        )

    def found(self, request: Request, parent: Request, spec: JobSpec) -> Request:
        """Return the same for a link. A link inherits the queue and priority of its page. If these came from
        a rule for the page's own URL, they are dropped: that rule does not apply to the link."""
        inherited = request.queue == parent.queue and request.priority == parent.priority
        if inherited and self.route(parent.url).rule is not None:
            request = replace(request, queue=spec.queue, priority=spec.priority)
        explicit = (request.queue, request.priority) != (spec.queue, spec.priority)
        return self.submitted(request, spec, queue=explicit, priority=explicit, ttl=request.ttl is not None)

    def ttl(self, url: str) -> float | None:
        """Return how long a message with this URL may wait."""
        return self.route(url).ttl

    @property
    def fast(self) -> frozenset[str]:
        """Queues whose messages the broker forgets as soon as it delivers them."""
        return frozenset(rule.queue for rule in self.rules if rule.ack == "fast")

    @property
    def queues(self) -> tuple[str, ...]:
        """Every queue that a rule names, urgent ones first."""
        named = {rule.queue: rule.priority for rule in reversed(self.rules)}
        return tuple(sorted({**named, URL_QUEUE: 0}, key=lambda name: -named.get(name, 0)))


def broker_queue(queue: str) -> str:
    """Return the broker's name for a queue of the frontier. They differ for the default queue."""
    return URL_QUEUE if queue == DEFAULT_QUEUE else queue


def frontier_queue(queue: str) -> str:
    """Return the frontier's name for a queue of the broker."""
    return DEFAULT_QUEUE if queue == URL_QUEUE else queue
