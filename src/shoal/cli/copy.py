"""`shoal copy`: jobs move from one frontier to another and go on there."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.common import (
    OK,
    Flag,
    Json,
    emit,
    run,
    say,
)
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.frontier.move import Moved, Step
    from shoal.frontier.port import Backend

ALL = "all"


def copy(
    *,
    from_: Annotated[str | None, Parameter(name="--from", env_var="SHOAL_FRONTIER")] = None,
    to: str,
    job: str | None = None,
    now: Flag = False,
    json: Json = False,
) -> int:
    """Move jobs to another frontier, where they go on: URLs that wait, what is known, items, dead letters,
    counters, pace.

    The job is paused here, visits under way are waited for, and it is cancelled here when everything has
    arrived. Interrupted, it stays paused here and there; the same command goes on.

    Parameters
    ----------
    from_
        The frontier where the jobs are: sqlite:///path, redis://host or postgresql://host/database.
    to
        The frontier to which they go.
    job
        Only this job; `all` for finished ones too. All unfinished jobs without it.
    now
        Do not wait for visits under way: take them back. Their results come too late and are refused.
    """
    return run(lambda: _copy(from_, to, job, now=now, json=json))


async def _copy(from_: str | None, to: str, job: str | None, *, now: bool, json: bool) -> int:
    from contextlib import AsyncExitStack

    from shoal.app import move_job
    from shoal.frontier.move import movable
    from shoal.registry import open_frontier
    from shoal.settings import load

    source_address = load(frontier=from_).frontier
    for address in (source_address, to):
        if address.lower().startswith("memory:"):
            raise UsageError("a frontier in memory ends with this command", hint="give a file or a server")
    async with AsyncExitStack() as stack:
        source = await open_frontier(source_address, create=False)
        stack.push_async_callback(source.close)
        target = await open_frontier(to)
        stack.push_async_callback(target.close)
        here, there = _place(source, source_address), _place(target, to)
        if here == there:
            raise UsageError(f"--from and --to are both {here}", hint="give two frontiers")
        jobs = [job]
        if job is None or job == ALL:
            jobs = list(await movable(source, target, finished=job == ALL))
        told: list[dict[str, Any]] = []
        for name in jobs:
            assert name is not None
            say(f"{name}: from {here} to {there}")
            started = time.perf_counter()
            with _Bar(name) as bar:
                try:
                    moved = await move_job(source, target, name, to=there, now=now, watch=bar)
                except UsageError:
                    raise
                except BaseException:
                    say(f"{name} stays paused at {here}; the same command goes on with it")
                    raise
            told.append(_told(moved, time.perf_counter() - started))
            if not json:
                say(_sentence(moved, there, told[-1]["seconds"]))
        if not jobs:
            say(f"no unfinished job at {here}")
        if json:
            emit({"from": here, "to": there, "jobs": told})
    return OK


def _place(frontier: Backend, address: str) -> str:
    """A frontier's address as people may see it, always spelled the same."""
    from shoal.registry import shown

    path, schema = getattr(frontier, "path", None), getattr(frontier, "schema", None)
    if path is not None:
        return f"sqlite:///{path.resolve()}"
    name: str = getattr(frontier, "place", None) or getattr(frontier, "shown", None) or shown(address)
    return f"{name}?schema={schema}" if schema else name


def _told(moved: Moved, seconds: float) -> dict[str, Any]:
    return {
        "job": moved.job,
        "state": moved.state.value,
        "urls": moved.urls,
        "items": moved.items,
        "known": moved.known,
        "seconds": round(seconds, 3),
    }


def _sentence(moved: Moved, there: str, seconds: float) -> str:
    from shoal.cli.progress import duration

    what = f"{moved.urls:,} URLs to visit, {moved.items:,} items and {moved.known:,} known URLs"
    return f"{moved.job}: {what} are at {there} now ({moved.state.value}; {duration(seconds)})"


class _Bar:
    """A bar on a terminal; elsewhere only who is waited for."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._live = sys.stderr.isatty()
        self._held = 0

    def __enter__(self) -> _Bar:
        if self._live:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            from shoal.cli.common import talk

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=talk(), transient=True)
            self._progress.start()
            self._task = self._progress.add_task("pausing", total=None)
        return self

    def __call__(self, step: Step) -> None:
        waiting = step.part is None
        if waiting and step.held != self._held and not self._live:
            say(f"{self._job}: waiting for {step.held:,} visits under way")
        self._held = step.held
        if self._live:
            what = f"{step.held:,} visits under way" if waiting else str(step.part)
            total = None if waiting else max(step.total, step.rows) or None
            self._progress.update(self._task, description=what, completed=step.rows, total=total)

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()
