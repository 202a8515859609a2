"""`shoal pump`: sends URLs to the broker from a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.cli.common import Signals, run, shared, working_session
from shoal.cli.options import Dispatch, Frontier, LogFormat, LogLevel, OnlyJob, Queues, Quiet, listed
from shoal.cli.output import say
from shoal.errors import UsageError


def pump(
    *,
    queues: Queues = None,
    job: OnlyJob = None,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    quiet: Quiet = False,
) -> int:
    """Send waiting URLs to the message broker.

    Sends each URL when its host may be fetched, until it is stopped. `shoal worker --dispatch` does the same
    beside its own work; a separate pump pays off with many workers. Only one pump is active at a time; others
    stand by and take over when it stops. Exits with 0 after SIGTERM, with 130 after Ctrl-C.
    """
    names = listed(queues)
    settings = {
        "frontier": frontier,
        "dispatch": dispatch,
        "log_level": log_level,
        "log_format": log_format,
    }
    return run(lambda: _pump(names, job, settings, quiet=quiet))


async def _pump(queues: list[str] | None, job: str | None, given: dict[str, Any], *, quiet: bool) -> int:
    from shoal.engine.supervisor import follow_parent
    from shoal.registry import broker_place, in_process, place

    settings = shared(quiet=quiet, logs="info", **given)
    if not settings.dispatch:
        raise UsageError("no broker given", hint="give --dispatch amqp://host, or set SHOAL_DISPATCH")
    if in_process(settings.frontier):
        raise UsageError("workers cannot share a memory: frontier", hint="name another one with --frontier")
    from shoal.app import running_pump, wait_for_broker  # slow to import: not before the checks above

    follow_parent()
    stopped = asyncio.Event()
    async with working_session(settings, quiet=quiet) as session:
        if job is not None:
            await session.frontier.job(job)
        await wait_for_broker(session, say, queues)
        with Signals(stopped.set) as signals:
            async with running_pump(session, queues=queues, job=job) as pumping:
                if not quiet:
                    here = place(settings.frontier) or ".shoal/shoal.db"
                    say(f"pumping from {here} to {broker_place(settings.dispatch)}")
                await stopped.wait()
        if not quiet:
            say(f"{pumping.sent:,} URLs sent")
    return signals.code
