"""`shoal pump`: the pump alone, in a process of its own."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.common import Dispatch, Frontier, Signals, run, say, working_session
from shoal.errors import UsageError


def pump(
    *,
    queues: str | None = None,
    job: str | None = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    quiet: Annotated[bool, Parameter(alias="-q", negative=())] = False,
) -> int:
    """Claim what may be visited now and send it to the broker, until stopped.

    `shoal worker --dispatch` does this beside its visits. A pump of its own pays when there are many
    workers. One pump works at a time; others stand by and take over when it is gone. Exits with 0 after
    SIGTERM, with 130 after Ctrl-C.

    Parameters
    ----------
    queues
        Only these queues: scraping,business
    job
        Only this job (a crawl or a run).
    quiet
        Say nothing but errors.
    """
    names = [name.strip() for name in queues.split(",") if name.strip()] if queues else None
    return run(lambda: _pump(names, job, {"frontier": frontier, "dispatch": dispatch}, quiet=quiet))


async def _pump(queues: list[str] | None, job: str | None, given: dict[str, Any], *, quiet: bool) -> int:
    from shoal.cli.progress import Troubles
    from shoal.engine.supervisor import follow_parent
    from shoal.events import Event
    from shoal.registry import broker_place, place
    from shoal.settings import load

    troubles = Troubles()

    def watch(event: Event) -> None:
        if line := troubles.line(event):
            say(line)

    settings = load(**given)
    if not settings.dispatch:
        raise UsageError("no broker to send to", hint="give --dispatch amqp://host, or set SHOAL_DISPATCH")
    if settings.frontier.startswith("memory"):
        raise UsageError("nobody else can see memory:", hint="name a frontier that workers share")
    from shoal.app import broker_reached, pumped  # heavy: not before what can be refused without it

    follow_parent()
    stopped = asyncio.Event()
    async with working_session(settings, quiet=quiet) as session:
        if job is not None:
            await session.frontier.job(job)
        await broker_reached(session, say, queues)
        with Signals(stopped.set) as signals:
            async with pumped(session, watch=watch, queues=queues, job=job) as pumping:
                if not quiet:
                    here = place(settings.frontier) or ".shoal/shoal.db"
                    say(f"pumping from {here} to {broker_place(settings.dispatch)}")
                await stopped.wait()
        if not quiet:
            say(f"{pumping.sent:,} URLs sent")
    return signals.code
