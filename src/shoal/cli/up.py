"""`shoal up`: the HTTP API and worker processes on this machine, under one supervisor."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.cli.common import Signals, run, shared, working_session
from shoal.cli.options import (
    Concurrency,
    Dispatch,
    Flag,
    Frontier,
    LogFormat,
    LogLevel,
    Port,
    Queues,
    Quiet,
    Scrapers,
    Seconds,
    Workers,
)
from shoal.cli.output import is_live, pass_on, say
from shoal.errors import FrontierError, UsageError, ungrouped

if TYPE_CHECKING:
    from shoal.app import Session
    from shoal.engine.supervisor import Supervisor
    from shoal.frontier.port import Backend
    from shoal.settings import Settings

REFRESH = 1.0


def up(
    *,
    workers: Workers = None,
    queues: Queues = None,
    concurrency: Concurrency = None,
    lease: Seconds = None,
    app: Scrapers = None,
    host: str | None = None,
    port: Port = None,
    no_api: Flag = False,
    frontier: Frontier = None,
    dispatch: Dispatch = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    quiet: Quiet = False,
) -> int:
    """Run the HTTP API and workers, and restart them after a crash.

    It runs until it is stopped. A crashed process is restarted, with a longer delay each time, and the URLs
    of a crashed worker are released at once. Ctrl-C or SIGTERM lets workers finish the pages they are
    fetching; a second one stops at once. Exits with 0 after SIGTERM, with 130 after Ctrl-C.

    Parameters
    ----------
    workers
        Number of worker processes (default: MAX_WORKERS, or one per processor).
    lease
        Seconds after which the URLs of a worker that crashed go to other workers (default 60).
    host
        Address that the API listens on (default 127.0.0.1).
    no_api
        Run the workers only.
    """
    settings = {
        "workers": workers,
        "concurrency": concurrency,
        "lease": lease,
        "app": app,
        "host": host,
        "port": port,
        "frontier": frontier,
        "dispatch": dispatch,
        "log_level": log_level,
        "log_format": log_format,
    }
    return run(lambda: _up(settings, queues, api=not no_api, quiet=quiet))


async def _up(given: dict[str, Any], queues: str | None, *, api: bool, quiet: bool) -> int:
    from shoal.app import load_app, wait_for_broker
    from shoal.registry import in_process, place

    settings = shared(quiet=quiet, logs="info", **given)
    if in_process(settings.frontier):
        raise UsageError("worker processes cannot share a memory: frontier", hint="leave out --frontier")
    if settings.app:
        load_app(settings.app)  # an error in it must appear once and now, not in every worker
    count = settings.workers if "workers" in settings.model_fields_set else processors()
    async with working_session(settings, quiet=quiet) as session:
        await wait_for_broker(session, say)  # an error must appear once and now, not in every worker
        parts = [_workers(session, count, queues)]
        if api:
            parts.append(_service(session, queues, quiet=quiet))
        many = f"{count} workers" if count > 1 else "1 worker"
        about = f"{many} on {place(settings.frontier) or '.shoal/shoal.db'}; Ctrl-C stops"
        return await _run_parts(session.frontier, parts, "" if quiet else about)


def processors() -> int:
    """Returns how many processors this process may use; a container may limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(host: str) -> int:
    """Returns a port that is free at this moment."""
    from shoal.api.serve import listen

    made = listen(host, 0)
    try:
        return int(made.getsockname()[1])
    finally:
        made.close()


def _workers(session: Session, count: int, queues: str | None) -> Supervisor:
    from shoal.app import process_died
    from shoal.engine.supervisor import Supervisor

    settings = session.settings
    command = [sys.executable, "-m", "shoal", "worker", "--quiet"]
    command += ["--concurrency", str(settings.concurrency), "--lease", str(settings.lease)]
    command += ["--queues", queues] if queues else []
    return Supervisor(
        command,
        count,
        tell=say,
        on_line=pass_on,
        env=_environment(settings),
        lasting=True,
        on_death=partial(process_died, session.frontier),
    )


def _environment(settings: Settings) -> dict[str, str]:
    """Returns the environment of the processes. Addresses travel in it because they may hold a password,
    and command lines are public."""
    from shoal.registry import DEFAULT_FRONTIER

    env = {"SHOAL_FRONTIER": settings.frontier or DEFAULT_FRONTIER, "SHOAL_APP": settings.app}
    return env | {"SHOAL_DISPATCH": settings.dispatch} | settings.log_variables


def _service(session: Session, queues: str | None, *, quiet: bool) -> Supervisor:
    from shoal.engine.supervisor import Supervisor

    settings = session.settings
    # Chosen once, here: after a restart it must be the same.
    port = settings.port or free_port(settings.host)
    command = [sys.executable, "-m", "shoal", "serve", "--workers", "0", "--no-access-log"]
    command += ["--staff", queues or "*"]
    command += ["--host", settings.host, "--port", str(port), *(["--quiet"] if quiet else [])]
    return Supervisor(
        command, 1, tell=say, on_line=pass_on, env=_environment(settings), name="serve", lasting=True
    )


async def _run_parts(frontier: Backend, parts: list[Supervisor], about: str) -> int:
    """Runs the parts until they are stopped. Prints progress unless `about` is empty. Returns the exit
    code."""

    def stop() -> None:
        for part in parts:
            part.stop()
        if about:
            say("stopping: workers finish their pages; press Ctrl-C again to stop at once")

    with Signals(stop) as signals:
        if about:
            say(about)
        showing = asyncio.create_task(_show(frontier)) if about and is_live() else None
        try:
            with ungrouped():
                async with asyncio.TaskGroup() as group:
                    for part in parts:
                        group.create_task(part.run())
        finally:
            if showing is not None:
                showing.cancel()
                await asyncio.gather(showing, return_exceptions=True)
    return signals.code


async def _show(frontier: Backend) -> None:
    from shoal.cli.progress import show_live

    async def line() -> str:
        try:
            return await _line(frontier)
        except FrontierError as error:
            return f"waiting for the frontier: {error}"

    await show_live(line, REFRESH)


async def _line(frontier: Backend) -> str:
    from shoal.frontier.notes import Presence

    present = await Presence(frontier.notes).workers()
    states = Counter(worker.state for worker in present)
    totals: Counter[str] = Counter()
    for row in (await frontier.queues()).values():
        totals.update(row)
    rate = sum(worker.heartbeat.rate for worker in present if worker.state != "silent")
    parts = [", ".join(f"{n:,} {state}" for state, n in sorted(states.items())) or "no worker yet"]
    parts += [f"{rate:,.1f} visits/s"]
    parts += [f"{totals[name]:,} {name}" for name in ("waiting", "delayed", "leased")]
    return "  ".join(parts)
