"""`shoal workers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.cli.common import OK, open_session, run
from shoal.cli.options import Frontier, Json
from shoal.cli.output import duration, emit, print_table, say
from shoal.model import TRANSIT, Job, WorkerStatus

MARKED = ("stuck", "silent")
"""States that need attention."""


def workers(*, json: Json = False, frontier: Frontier = None) -> int:
    """List the workers of this frontier and what they do.

    Lists workers on all machines. Each one sends a heartbeat every five seconds. A worker is `silent` when it
    has sent none for 15 seconds, and `stuck` when it sends heartbeats but has finished no page for longer
    than any page may take.
    """
    return run(lambda: _workers(frontier, json=json))


async def _workers(frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import worker_view
    from shoal.frontier.notes import Presence

    async with open_session(create=False, frontier=frontier) as session:
        present = await Presence(session.frontier.notes).workers(session.frontier)
    if json:
        emit([worker_view(worker) for worker in present])
        return OK
    if not present:
        say("no workers; start one with `shoal worker`, or several with `shoal up`")
        return OK
    print_table(
        ("worker", "state", "works on", "busy", "visits", "failed", "rate", "uptime", "heartbeat", "leases"),
        [
            (
                *(worker.heartbeat.worker, marked(worker.state), works_on(worker)),
                *(f"{worker.heartbeat.running}/{worker.heartbeat.slots}", f"{worker.heartbeat.visits:,}"),
                *(f"{worker.heartbeat.failed:,}", f"{worker.heartbeat.rate:,.1f}/s"),
                *(duration(worker.now - worker.since), f"{duration(worker.now - worker.seen)} ago"),
                f"{worker.leases:,}",
            )
            for worker in present
        ],
        right=(3, 4, 5, 6, 7, 8, 9),
        styles={f"! {state}": style for state, style in STYLES.items()},
    )
    for line in hints(present):
        say(line)
    return OK


STYLES = {"stuck": "bold yellow", "silent": "bold red"}


def on_job(job: Job, present: Iterable[WorkerStatus], holders: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the workers of one job: those that take its requests, and those that still hold some.

    `leases` counts leases of this job. A holder that never sent a heartbeat is silent: it may not be a worker
    of ours. URLs in a broker are held by no worker: see `in_broker`.
    """
    from shoal.app import is_serving
    from shoal.app.views import worker_view

    known = {worker.heartbeat.worker: worker for worker in present}
    found = [
        worker_view(worker) | {"leases": holders.get(name, 0)}
        for name, worker in known.items()
        if name in holders or (is_serving(worker.heartbeat, job) and worker.state != "silent")
    ]
    unheard = sorted(name for name in set(holders) - set(known) if not name.startswith(TRANSIT))
    return found + [{"id": name, "state": "silent", "leases": holders[name]} for name in unheard]


def in_broker(holders: Mapping[str, int]) -> int:
    """Returns how many leases are in a broker, on their way to a worker."""
    return sum(number for name, number in holders.items() if name.startswith(TRANSIT))


def marked(state: str) -> str:
    """Returns a state as tables show it: those that need attention have a mark, for output without colour."""
    return f"! {state}" if state in MARKED else state


def works_on(worker: WorkerStatus) -> str:
    heartbeat = worker.heartbeat
    if heartbeat.job is not None:
        return f"job {heartbeat.job}"
    return "all" if heartbeat.queues is None else ", ".join(heartbeat.queues)


def hints(present: Iterable[WorkerStatus]) -> Iterable[str]:
    """Yields what to do about workers in a marked state."""
    states = [worker.state for worker in present]
    if silent := states.count("silent"):
        who, its = ("1 worker has", "its") if silent == 1 else (f"{silent:,} workers have", "their")
        yield f"{who} stopped sending heartbeats; {its} URLs will be retried when their leases expire"
    if stuck := states.count("stuck"):
        who = "1 worker is" if stuck == 1 else f"{stuck:,} workers are"
        yield f"{who} stuck: no page has finished for too long; --json shows the URLs (current)"
