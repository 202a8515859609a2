"""`shoal workers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.cli.common import OK, open_session, run
from shoal.cli.options import Frontier, Json
from shoal.cli.output import duration, emit, print_table, say
from shoal.model import TRANSIT, Job, WorkerStatus

MARKED = ("stuck", "silent")
"""States that a person should look at."""


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
        say("no workers: `shoal worker` starts one, `shoal up` several")
        return OK
    print_table(
        ("worker", "state", "on", "busy", "visits", "failed", "rate", "since", "heard", "leases"),
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
    """The workers of one job: those that take its requests, and those that still hold some.

    `leases` are of this job. A holder that never said anything is silent: it may be no worker of ours.
    What is on its way in a broker is held by no worker: see `travelling`.
    """
    from shoal.app import serves
    from shoal.app.views import worker_view

    known = {worker.heartbeat.worker: worker for worker in present}
    found = [
        worker_view(worker) | {"leases": holders.get(name, 0)}
        for name, worker in known.items()
        if name in holders or (serves(worker.heartbeat, job) and worker.state != "silent")
    ]
    unheard = sorted(name for name in set(holders) - set(known) if not name.startswith(TRANSIT))
    return found + [{"id": name, "state": "silent", "leases": holders[name]} for name in unheard]


def travelling(holders: Mapping[str, int]) -> int:
    """How many leases are on their way in a broker."""
    return sum(number for name, number in holders.items() if name.startswith(TRANSIT))


def marked(state: str) -> str:
    """A state as a table shows it: what needs a look has a mark, also where there is no colour."""
    return f"! {state}" if state in MARKED else state


def works_on(worker: WorkerStatus) -> str:
    heartbeat = worker.heartbeat
    if heartbeat.job is not None:
        return f"job {heartbeat.job}"
    return "all" if heartbeat.queues is None else ", ".join(heartbeat.queues)


def hints(present: Iterable[WorkerStatus]) -> Iterable[str]:
    """What to do about those that are marked."""
    states = [worker.state for worker in present]
    if silent := states.count("silent"):
        who = "a worker is silent" if silent == 1 else f"{silent:,} workers are silent"
        yield f"{who}: what they hold comes back when its lease ends"
    if stuck := states.count("stuck"):
        who = "a worker is stuck" if stuck == 1 else f"{stuck:,} workers are stuck"
        yield f"{who}: none of their visits ends; --json tells the URLs they are at (current)"
