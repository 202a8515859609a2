"""`shoal jobs`, `status`, `watch`, `cancel`, `pause`, `resume`, `results` and `export`."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from shoal.cli.common import OK, SOME_DEAD, Signals, open_session, run
from shoal.cli.options import Dispatch, Flag, Frontier, JobName, Json, Limit
from shoal.cli.output import at_clock, duration, emit, print_facts, print_table, say
from shoal.errors import INTERRUPTED
from shoal.model import Job, JobState
from shoal.queues import TASK_QUEUE

if TYPE_CHECKING:
    from shoal.frontier.port import Backend

BATCH_BYTES = 8 * 1024 * 1024
"""Bytes of items that `results` aims to read at a time. Items of one job differ little in size."""
FEW = 8
"""Up to this many healthy workers of a job are listed one by one."""


def jobs(*, limit: Limit = 20, json: Json = False, frontier: Frontier = None) -> int:
    """List jobs, newest first."""
    return run(lambda: _jobs(limit, frontier, json=json))


async def _jobs(limit: int, frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import job_view, lasted
    from shoal.cli.progress import pages_of

    async with open_session(create=False, frontier=frontier) as session:
        # One more than asked for shows whether there are more.
        found = await session.frontier.jobs(limit=limit + 1)
    shown, now = found[:limit], time.time()
    if json:
        emit([job_view(job, now) for job in shown])
        return OK
    if not shown:
        say("no jobs yet; start one with `shoal crawl URL`")
        return OK
    print_table(
        ("job", "state", "pages", "dead", "items", "created", "duration"),
        [
            (
                *(job.id, job.state.value, pages_of(job.counts, "/")),
                *(f"{job.counts.dead + job.counts.expired:,}", f"{job.counts.items:,}"),
                *(at_clock(job.created_at, seconds=False), duration(lasted(job, now))),
            )
            for job in shown
        ],
        right=(2, 3, 4, 6),
    )
    if len(found) > limit:
        say(f"these are the newest {limit:,}; show more with --limit")
    return OK


def status(job: str, *, json: Json = False, frontier: Frontier = None, dispatch: Dispatch = None) -> int:
    """Show the counters, workers and speed of one job.

    Parameters
    ----------
    job
        The job's name, or a run id.
    """
    return run(lambda: _status(job, json=json, frontier=frontier, dispatch=dispatch))


async def _status(job: str, *, json: bool, **where: str | None) -> int:
    from msgspec import to_builtins

    from shoal.app import broker_state, run_rate, slowdowns
    from shoal.app.views import job_view
    from shoal.cli.progress import ended_by
    from shoal.cli.workers import in_broker, on_job
    from shoal.frontier.notes import Presence, lease_counts

    async with open_session(create=False, **where) as session:
        view = await session.frontier.job(job)
        queues = await session.frontier.queues()
        present = await Presence(session.frontier.notes).workers() if not view.state.ended else []
        holders = lease_counts(await session.frontier.leases(job=job)) if view.counts.leased else {}
        broker = await broker_state(session)
        slow = await slowdowns(session.frontier, view)
    facts = job_view(view, time.time()) | {"rate": 0.0, "held_by": to_builtins(slow)}
    rate = run_rate(view, present, queues)
    if rate > 0 and view.state is JobState.RUNNING:
        facts |= {"rate": round(rate, 3), "eta_seconds": round(view.counts.live / rate, 1)}
    facts |= {"workers": on_job(view, present, holders), "in_broker": in_broker(holders)}
    # URLs that Celery tasks fetch themselves are not work for any worker.
    queues = _queues(view, queues)
    held = ended_by(view)
    if json:
        emit(facts | {"ended_by": held, "queues": queues, "broker": broker})
        return OK
    rows = _facts(view, facts, [*held, *map(str, slow)], queues)
    print_facts([*rows, *_broker_facts(broker)])
    return OK


def _queues(job: Job, found: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Returns the job's own queue, and all queues that are not empty. Only some frontiers remember empty
    queues, so those are left out."""
    own = {job.spec.queue: {"waiting": 0, "delayed": 0, "leased": 0}}
    held = {name: row for name, row in found.items() if any(row.values())}
    return {name: row for name, row in (own | held).items() if name != TASK_QUEUE}


def _facts(
    job: Job, facts: dict[str, Any], held: list[str], queues: dict[str, dict[str, int]]
) -> list[tuple[str, str]]:
    """Returns a job's status as rows to print, without counters that are zero and mean nothing."""
    counts = job.counts
    rows = [
        ("job", job.id),
        ("state", facts["state"]),
        ("scraper", job.spec.scraper + (f" of {job.spec.app}" if job.spec.app else "")),
        ("start", _shortened(job.spec.start)),
        ("created", at_clock(job.created_at)),
        ("lasted" if job.finished_at else "since", duration(facts["seconds"])),
        ("pending", f"{facts['pending']:,}" + (f" ({counts.delayed:,} delayed)" if counts.delayed else "")),
        ("claimed", f"{facts['claimed']:,}" + _in_broker(facts)),
        ("completed", f"{counts.done:,}" + (f" ({counts.skipped:,} skipped)" if counts.skipped else "")),
        ("failed", f"{facts['failed']:,}" + (f" ({counts.expired:,} expired)" if counts.expired else "")),
        ("remaining", f"{facts['remaining']:,}"),
        ("items", f"{counts.items:,}"),
        ("rate", _rates(facts)),
    ]
    for name, number in (
        *(("retried", counts.retried), ("cancelled", counts.cancelled)),
        *(("refused", counts.refused), ("too late", counts.stale)),
    ):
        if number:
            rows.append((name, f"{number:,}"))
    if facts["eta_seconds"] is not None:
        rows.append(("left", f"about {duration(facts['eta_seconds'])}"))
    rows += [("errors", f"{name} {number:,}") for name, number in job.errors.items()]
    rows += [("limited by", line) for line in held]
    rows += [("workers", line) for line in _worker_lines(facts)]
    if facts["failed"]:
        rows.append(("see", f"shoal dead list --job {job.id}"))
    for name, row in sorted(queues.items()):
        # A queue is shared: the rows show how many URLs of other jobs wait there too.
        urls = ", ".join(f"{number:,} {state}" for state, number in row.items())
        rows.append((f"queue {name}", f"{urls} (all jobs)"))
    return rows


def _in_broker(facts: dict[str, Any]) -> str:
    return f" ({facts['in_broker']:,} in the broker)" if facts["in_broker"] else ""


def _rates(facts: dict[str, Any]) -> str:
    mean = f"{facts['pages_per_second']:,.1f} pages/s since it began"
    return f"{facts['rate']:,.1f} visits/s now, {mean}" if facts["rate"] else mean


def _worker_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each worker of a job; many healthy ones are summed up in one line."""
    from shoal.cli.workers import MARKED, marked

    found = facts["workers"]
    if not found and facts["remaining"] and facts["state"] == "running":
        yield "none; start one with `shoal worker`"
    well = [each for each in found if each["state"] not in MARKED]
    if len(well) > FEW:
        busy = sum(each["state"] == "working" for each in well)
        yield f"{busy:,} working, {len(well) - busy:,} idle (`shoal workers` lists them)"
    for each in found:
        if each in well and len(well) > FEW:
            continue
        ago = f", heartbeat {duration(each['seen_ago'])} ago" if "seen_ago" in each else ", no heartbeat"
        busy_with = f", {each['running']} of {each['slots']} busy" if "slots" in each else ""
        yield f"{each['id']} {marked(each['state'])}{busy_with}, {each['leases']:,} leases{ago}"


def _broker_facts(broker: dict[str, Any] | None) -> list[tuple[str, str]]:
    if broker is None:
        return []
    if "error" in broker:
        return [("broker", broker["error"])]
    rows = [("broker", f"{broker['about']} at {broker['address']}")]
    for name, depth in broker["queues"].items():
        rows.append((name, f"{depth['waiting']:,} messages waiting, {depth['consumers']:,} consumers"))
    return rows


def watch(job: JobName, *, frontier: Frontier = None, dispatch: Dispatch = None, json: Flag = False) -> int:
    """Follow a job until it ends.

    Exits with 0 when the job is done, with 1 if some of its URLs failed for good. Ctrl-C stops watching; the
    job continues.

    Parameters
    ----------
    json
        Print the job's counters as one JSON object at the end.
    """
    return run(lambda: _watch(job, json=json, frontier=frontier, dispatch=dispatch))


async def _watch(job: str, *, json: bool, **where: str | None) -> int:
    from shoal.app.views import job_view, lasted
    from shoal.cli.progress import Progress, pages_of

    left = asyncio.Event()
    async with open_session(create=False, **where) as session:
        view = await session.frontier.job(job)
        with Signals(left.set):
            async with Progress(session.frontier, job, workers=True).shown():
                view = await _wait_for_end(session.frontier, view, left)
    if left.is_set() and not view.state.ended:
        return INTERRUPTED
    counts, gone = view.counts, view.counts.dead + view.counts.expired
    say(
        f"{view.id} is {view.state.value}: {pages_of(counts)} pages, {gone:,} dead,"
        f" {counts.items:,} items in {duration(lasted(view, time.time()))}"
    )
    if json:
        emit(job_view(view, time.time()))
    return SOME_DEAD if gone else OK


async def _wait_for_end(frontier: Backend, view: Job, left: asyncio.Event) -> Job:
    """Returns the job when it has ended, or as it is when `left` is set."""
    while not view.state.ended and not left.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                await left.wait()
        started = time.perf_counter()
        view = await frontier.job(view.id)
        # Counting a huge job is slow: spend at most a tenth of the time on it.
        await asyncio.sleep(min(5.0, 9 * (time.perf_counter() - started)))
    return view


def cancel(job: JobName, *, json: Json = False, frontier: Frontier = None) -> int:
    """Stop a job for good.

    The items that it has stored are kept. Cancelling twice changes nothing."""
    return run(lambda: _switch("cancel", job, frontier, json=json))


def pause(job: JobName, *, json: Json = False, frontier: Frontier = None) -> int:
    """Pause a job; pages that are being fetched are finished."""
    return run(lambda: _switch("pause", job, frontier, json=json))


def resume(job: JobName, *, json: Json = False, frontier: Frontier = None) -> int:
    """Resume a paused job."""
    return run(lambda: _switch("resume", job, frontier, json=json))


async def _switch(what: str, job: str, frontier: str | None, *, json: bool) -> int:
    from shoal.app import resume_job
    from shoal.app.views import job_view

    async with open_session(create=False, frontier=frontier) as session:
        before = await session.frontier.job(job)
        if what == "resume":
            after = await resume_job(session, job)
        else:
            state = JobState.PAUSED if what == "pause" else JobState.CANCELLED
            after = await session.frontier.update_job(job, state=state)
    changed = after.state is not before.state
    if json:
        emit(job_view(after, time.time()) | {"changed": changed})
        return OK
    verb = "is now" if changed else "stays" if _has_ended_otherwise(what, after) else "is already"
    rest = f", {after.counts.cancelled:,} URLs dropped" if changed and after.counts.cancelled else ""
    say(f"{job} {verb} {after.state.value}{rest}")
    return OK


def _has_ended_otherwise(what: str, job: Job) -> bool:
    """Whether the job had already ended in another way: not an error, but not what was asked for."""
    wanted = {"cancel": JobState.CANCELLED, "pause": JobState.PAUSED, "resume": JobState.RUNNING}[what]
    return job.state is not wanted


def results(
    job: JobName,
    *,
    limit: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    after: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    follow: Flag = False,
    frontier: Frontier = None,
) -> int:
    """Print the items of a job as JSON Lines.

    Items are printed in the order in which they were stored.

    Parameters
    ----------
    limit
        Print at most this many (default: all).
    after
        Skip this many items: --after 1000 --limit 1000 prints the second thousand.
    follow
        Wait for more items until the job ends.
    """
    return run(lambda: _results(job, limit, after, frontier, follow=follow))


async def _results(job: str, limit: int | None, after: int, frontier: str | None, *, follow: bool) -> int:
    left = sys.maxsize if limit is None else limit
    size = 100
    async with open_session(create=False, frontier=frontier) as session:
        while left > 0:
            # Checked before reading, so that items stored in between are still read.
            ended = not follow or (await session.frontier.job(job)).state.ended
            items = await session.frontier.items(job, after=after, limit=min(left, size))
            for item in items:
                sys.stdout.buffer.write(_C1.sub(_escape, item.body) + b"\n")
            if items:
                sys.stdout.buffer.flush()
                after, left = items[-1].seq, left - len(items)
                weight = sum(len(item.body) for item in items) // len(items) + 1
                size = max(1, min(1000, BATCH_BYTES // weight))
            elif ended:
                return OK
            else:
                await asyncio.sleep(0.25)
    return OK


def export(
    job: JobName,
    *,
    to: Annotated[str, Parameter(alias="-o")],
    csv_raw: Flag = False,
    json: Json = False,
    frontier: Frontier = None,
) -> int:
    """Write the items of a job to a file.

    An interrupted export continues where it stopped. While the job runs, the items stored so far are written.

    Parameters
    ----------
    to
        The file to write; its ending sets the format: .jsonl .json .csv .parquet .md/
    csv_raw
        Write CSV cells unchanged, even those that a spreadsheet would run as a formula.
    """
    return run(lambda: _export(job, to, frontier, csv_raw=csv_raw, json=json))


async def _export(job: str, to: str, frontier: str | None, *, csv_raw: bool, json: bool) -> int:
    from shoal.app import export_job

    async with open_session(create=False, frontier=frontier) as session:
        written = await export_job(session, job, to, csv_raw=csv_raw)
        view = await session.frontier.job(job)
    if json:
        emit({"job": job, "state": view.state.value, "items": written or 0, "out": to})
    if written is None:
        say(f"{job} has no items; {to} was not changed")
    elif not json:
        say(f"{written:,} items written to {to}")
    if not view.state.ended:
        say(f"{job} is {view.state.value}: run this again when it has ended, to export the rest")
    return OK


_C1 = re.compile(rb"\x7f|\xc2[\x80-\x9f]")
"""Characters that JSON allows and some terminals obey."""


def _escape(found: re.Match[bytes]) -> bytes:
    return b"\\u00%02x" % found[0][-1]


def _shortened(start: tuple[str, ...]) -> str:
    if not start:
        return "-"
    more = f" and {len(start) - 3:,} more" if len(start) > 3 else ""
    return " ".join(start[:3]) + more
