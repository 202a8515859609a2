"""`shoal route`: which routing rule applies to a URL."""

from __future__ import annotations

from typing import Any

from shoal.cli.common import OK
from shoal.cli.options import Dispatch, Json
from shoal.cli.output import emit, print_facts


def route(url: str, *, json: Json = False, dispatch: Dispatch = None) -> int:
    """Show which routing rule applies to a URL.

    Prints the URL's queue, its priority and how long it may wait. The first rule whose pattern matches wins.
    Rules are `[[routes]]` in shoal.toml, or JSON in SHOAL_ROUTES; without any, built-in rules apply. Rules
    take effect when a broker is named (--dispatch), or when you have set your own.

    Parameters
    ----------
    url
        The URL, as you would enqueue it.
    """
    from shoal import urls
    from shoal.dispatch.pump import OTHER_TTL, QUEUE_TTLS
    from shoal.dispatch.routes import Routes
    from shoal.settings import load

    settings = load(dispatch=dispatch)
    routes = Routes(settings.rules)
    canonical = urls.canonical(url)
    found = routes.route(canonical)
    place = routes.rules.index(found.rule) + 1 if found.rule is not None else None
    limit = QUEUE_TTLS.get(found.queue, OTHER_TTL)
    facts: dict[str, Any] = {
        "url": canonical,
        "rule": place,
        "pattern": found.rule.pattern if found.rule is not None else None,
        "queue": found.queue,
        "priority": found.priority,
        "ttl": found.ttl,
        "queue_ttl": limit,
        "ack": "fast" if found.queue in routes.fast else "reliable",
        "source": "settings" if settings.routes is not None else "usual",
        "applied": bool(settings.dispatch or settings.routes),
    }
    if json:
        emit(facts)
        return OK
    whose = "your rules" if settings.routes is not None else "built-in rules"
    rows = [
        ("url", canonical),
        (
            "rule",
            f"{place} of {len(routes.rules)} ({whose}): {facts['pattern']}" if place else "no rule matches",
        ),
        ("queue", found.queue),
        ("priority", f"{found.priority}"),
        ("ttl", f"{found.ttl:,.0f} s" if found.ttl is not None else "none"),
        ("in the queue", f"at most {min(limit, found.ttl or limit):,.0f} s"),
        ("ack", facts["ack"]),
    ]
    if not facts["applied"]:
        rows.append(("applied", "no: rules apply with --dispatch, or when you have set your own"))
    print_facts(rows)
    return OK
