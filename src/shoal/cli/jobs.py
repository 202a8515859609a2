"""`shoal jobs`, `status`, `watch`, `cancel`, `pause`, `resume`, `results` and `export`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators

from shoal.cli.common import (
    OK,
    SOME_DEAD,
    Dispatch,
    Flag,
    Frontier,
    Json,
    Signals,
    emit,
    open_session,
    printable,
    run,
    say,
    table_console,
)
from shoal.errors import INTERRUPTED
from shoal.model import TASK_QUEUE, Job, JobState

if TYPE_CHECKING:
    from shoal.frontier.port import Backend

Limit = Annotated[int, Parameter(validator=validators.Number(gte=1), help="At most this many.")]

BATCH_BYTES = 8 * 1024 * 1024
"""What `results` tries to hold at a time. Items of one job differ little in size."""
ENDED = (JobState.DONE, JobState.CANCELLED)
FEW = 8
"""Workers that are listed one by one with a job."""


def jobs(*, limit: Limit = 20, json: Json = False, frontier: Frontier = None) -> int:
    """List the jobs, newest first."""
    return run(lambda: _jobs(limit, frontier, json=json))


async def _jobs(limit: int, frontier: str | None, *, json: bool) -> int:
    from shoal.cli.progress import duration

    async with open_session(create=False, frontier=frontier) as session:
        # One more than asked for tells whether there are more.
        found = await session.frontier.jobs(limit=limit + 1)
        left = [await _left(session.frontier, job) for job in found[:limit]]
    shown, now = found[:limit], time.time()
    if json:
        emit([described(job, now) | more for job, more in zip(shown, left, strict=True)])
        return OK
    if not shown:
        say("no jobs yet: `shoal crawl URL` makes one")
        return OK
    print_table(
        ("job", "state", "pages", "dead", "items", "created", "duration"),
        [
            (
                *(job.id, "moved" if more else job.state.value, f"{job.counts.done:,}/{job.counts.added:,}"),
                *(f"{job.counts.dead + job.counts.expired:,}", f"{job.counts.items:,}"),
                *(at_clock(job.created_at)[:-3], duration(lasted(job, now))),
            )
            for job, more in zip(shown, left, strict=True)
        ],
        right=(2, 3, 4, 6),
    )
    if len(found) > limit:
        say(f"these are the newest {limit:,}; --limit shows more")
    return OK


def status(job: str, *, json: Json = False, frontier: Frontier = None, dispatch: Dispatch = None) -> int:
    """Counters of one job or run, who works on it, how fast it goes and when it will be through.

    Parameters
    ----------
    job
        The job's name, or the id of a run.
    """
    return run(lambda: _status(job, json=json, frontier=frontier, dispatch=dispatch))


async def _status(job: str, *, json: bool, **where: str | None) -> int:
    from msgspec import to_builtins

    from shoal.app import broker_state, held_back, run_rate
    from shoal.cli.progress import ended_by
    from shoal.cli.workers import on_job, travelling

    async with open_session(create=False, **where) as session:
        view = await session.frontier.job(job)
        queues = await session.frontier.queues()
        present = await session.frontier.workers() if view.state not in ENDED else []
        holders = await session.frontier.holders(job) if view.counts.leased else {}
        left = await _left(session.frontier, view)
        broker = await broker_state(session)
        slow = await held_back(session.frontier, view)
    facts = described(view, time.time()) | left | {"rate": 0.0, "held_by": to_builtins(slow)}
    rate = run_rate(view, present, queues)
    if rate > 0 and view.state is JobState.RUNNING:
        facts |= {"rate": round(rate, 3), "eta_seconds": round(view.counts.live / rate, 1)}
    facts |= {"workers": on_job(view, present, holders), "in_broker": travelling(holders)}
    # What tasks visit themselves is no work that anybody could take.
    queues = _queues(view, queues)
    held = ended_by(view)
    if json:
        emit(facts | {"ended_by": held, "queues": queues, "broker": broker})
        return OK
    rows = _told(view, facts, [*held, *map(str, slow)], queues)
    print_facts([*rows, *_told_broker(broker)])
    return OK


def _queues(job: Job, found: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The job's own queue, and those where anything is. Some frontiers remember empty queues, others do
    not: that is nobody's business."""
    own = {job.spec.queue: {"waiting": 0, "delayed": 0, "leased": 0}}
    held = {name: row for name, row in found.items() if any(row.values())}
    return {name: row for name, row in (own | held).items() if name != TASK_QUEUE}


async def _left(frontier: Backend, job: Job) -> dict[str, str]:
    """Where a job has moved to, if it has."""
    from shoal.frontier.move import moving

    told = await moving(frontier, job.id) if job.state in ENDED else None
    return {"moved_to": told.to} if told is not None and told.complete else {}


def _told(
    job: Job, facts: dict[str, Any], held: list[str], queues: dict[str, dict[str, int]]
) -> list[tuple[str, str]]:
    """A job's status as rows for people; what is zero and says nothing is left out."""
    from shoal.cli.progress import duration

    counts = job.counts
    rows = [
        ("job", job.id),
        ("state", facts["state"] + (f", moved to {facts['moved_to']}" if "moved_to" in facts else "")),
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
        *(("refused", counts.refused), ("came too late", counts.stale)),
    ):
        if number:
            rows.append((name, f"{number:,}"))
    if facts["eta_seconds"] is not None:
        rows.append(("left", f"about {duration(facts['eta_seconds'])}"))
    rows += [("errors", f"{name} {number:,}") for name, number in job.errors.items()]
    rows += [("limited by", line) for line in held]
    rows += [("workers", line) for line in _working(facts)]
    if facts["failed"]:
        rows.append(("see", f"shoal dead list --job {job.id}"))
    for name, row in sorted(queues.items()):
        # A queue is shared: other jobs wait there too, and that is what one wants to know here.
        told = ", ".join(f"{number:,} {state}" for state, number in row.items())
        rows.append((f"queue {name}", f"{told} (all jobs)"))
    return rows


def _in_broker(facts: dict[str, Any]) -> str:
    return f" ({facts['in_broker']:,} in the broker)" if facts["in_broker"] else ""


def _rates(facts: dict[str, Any]) -> str:
    mean = f"{facts['pages_per_second']:,.1f} pages/s since it began"
    return f"{facts['rate']:,.1f} visits/s now, {mean}" if facts["rate"] else mean


def _working(facts: dict[str, Any]) -> Iterator[str]:
    """A line for each worker of a job; the healthy ones are summed up when they are many."""
    from shoal.cli.progress import duration
    from shoal.cli.workers import MARKED, marked

    found = facts["workers"]
    if not found and facts["remaining"] and facts["state"] == "running":
        yield "none: `shoal worker` starts one"
    well = [each for each in found if each["state"] not in MARKED]
    if len(well) > FEW:
        busy = sum(each["state"] == "working" for each in well)
        yield f"{busy:,} working, {len(well) - busy:,} idle (`shoal workers` lists them)"
    for each in found:
        if each in well and len(well) > FEW:
            continue
        ago = f", heard {duration(each['seen_ago'])} ago" if "seen_ago" in each else ", never heard of"
        busy_with = f", {each['running']} of {each['slots']} busy" if "slots" in each else ""
        yield f"{each['worker']} {marked(each['state'])}{busy_with}, {each['leases']:,} leases{ago}"


def _told_broker(broker: dict[str, Any] | None) -> list[tuple[str, str]]:
    if broker is None:
        return []
    if "error" in broker:
        return [("broker", broker["error"])]
    rows = [("broker", f"{broker['about']} at {broker['address']}")]
    for name, depth in broker["queues"].items():
        rows.append(
            (f"{name}", f"{depth['waiting']:,} messages waiting, {depth['consumers']:,} workers listen")
        )
    return rows


def watch(job: str, *, frontier: Frontier = None, dispatch: Dispatch = None, json: Json = False) -> int:
    """Follow a job until it ends.

    Exits with 0 when it is done, with 1 when some of its URLs ended dead. Ctrl-C stops watching
    and leaves the job alone.

    Parameters
    ----------
    job
        The job's name.
    json
        End with the job's counters as one JSON object.
    """
    return run(lambda: _watch(job, json=json, frontier=frontier, dispatch=dispatch))


async def _watch(job: str, *, json: bool, **where: str | None) -> int:
    from shoal.cli.progress import Progress, duration

    left = asyncio.Event()
    async with open_session(create=False, **where) as session:
        view = await session.frontier.job(job)
        with Signals(left.set):
            async with Progress(session.frontier, job, workers=True).shown():
                view = await _ended(session.frontier, view, left)
    if left.is_set() and view.state not in ENDED:
        return INTERRUPTED
    counts, gone = view.counts, view.counts.dead + view.counts.expired
    say(
        f"{view.id} is {view.state.value}: {counts.done:,} of {counts.added:,} pages, {gone:,} dead,"
        f" {counts.items:,} items in {duration(lasted(view, time.time()))}"
    )
    if json:
        emit(described(view, time.time()))
    return SOME_DEAD if gone else OK


async def _ended(frontier: Backend, view: Job, left: asyncio.Event) -> Job:
    """The job when it has ended, or as it is when somebody leaves."""
    while view.state not in ENDED and not left.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                await left.wait()
        started = time.perf_counter()
        view = await frontier.job(view.id)
        # Counting a huge job takes a while: never spend more than a tenth of the time on it.
        await asyncio.sleep(min(5.0, 9 * (time.perf_counter() - started)))
    return view


def cancel(job: str, *, json: Json = False, frontier: Frontier = None) -> int:
    """Stop a job for good. What it has stored stays; cancelling twice changes nothing.

    Parameters
    ----------
    job
        The job's name.
    """
    return run(lambda: _switch("cancel", job, frontier, json=json))


def pause(job: str, *, json: Json = False, frontier: Frontier = None) -> int:
    """Let nothing of a job start; what is under way ends as usual.

    Parameters
    ----------
    job
        The job's name.
    """
    return run(lambda: _switch("pause", job, frontier, json=json))


def resume(job: str, *, json: Json = False, frontier: Frontier = None) -> int:
    """Let a paused job go on.

    Parameters
    ----------
    job
        The job's name.
    """
    return run(lambda: _switch("resume", job, frontier, json=json))


async def _switch(what: str, job: str, frontier: str | None, *, json: bool) -> int:
    from shoal.app import resume_job

    async with open_session(create=False, frontier=frontier) as session:
        before = await session.frontier.job(job)
        orders: dict[str, Callable[[str], Awaitable[Job]]] = {
            "cancel": session.frontier.cancel,
            "pause": session.frontier.pause,
            "resume": partial(resume_job, session),
        }
        after = await orders[what](job)
    changed = after.state is not before.state
    if json:
        emit(described(after, time.time()) | {"changed": changed})
        return OK
    told = "is now" if changed else "stays" if _useless(what, after) else "is already"
    rest = f", {after.counts.cancelled:,} URLs given up" if changed and after.counts.cancelled else ""
    say(f"{job} {told} {after.state.value}{rest}")
    return OK


def _useless(what: str, job: Job) -> bool:
    """Whether the job ended in another way before: not an error, but not what was asked for."""
    wanted = {"cancel": JobState.CANCELLED, "pause": JobState.PAUSED, "resume": JobState.RUNNING}[what]
    return job.state is not wanted


def results(
    job: str,
    *,
    limit: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    after: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    follow: Flag = False,
    frontier: Frontier = None,
) -> int:
    """Items of a job as JSON Lines on stdout, in the order in which they were stored.

    Parameters
    ----------
    job
        The job's name.
    limit
        At most this many (all).
    after
        Leave out the first so many: --after 1000 --limit 1000 is the second thousand.
    follow
        Wait for more until the job ends.
    """
    return run(lambda: _results(job, limit, after, frontier, follow=follow))


async def _results(job: str, limit: int | None, after: int, frontier: str | None, *, follow: bool) -> int:
    left = sys.maxsize if limit is None else limit
    size = 100
    async with open_session(create=False, frontier=frontier) as session:
        while left > 0:
            # Asked before reading: items stored in between are still seen.
            ended = not follow or (await session.frontier.job(job)).state in ENDED
            items = await session.frontier.items(job, after=after, limit=min(left, size))
            for item in items:
                sys.stdout.buffer.write(item.body + b"\n")
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
    job: str,
    *,
    to: Annotated[str, Parameter(alias="-o")],
    csv_raw: Flag = False,
    json: Json = False,
    frontier: Frontier = None,
) -> int:
    """Write the items of a job to a file.

    An export that was broken off goes on where it stopped. Of a job that still runs it writes
    what is there.

    Parameters
    ----------
    job
        The job's name.
    to
        The file; its ending tells the format: .jsonl .json .csv .parquet .md/
    csv_raw
        Write cells as they are, even those that a spreadsheet would take for a formula.
    """
    return run(lambda: _export(job, to, frontier, csv_raw=csv_raw, json=json))


async def _export(job: str, to: str, frontier: str | None, *, csv_raw: bool, json: bool) -> int:
    from shoal.app import export_job

    async with open_session(create=False, frontier=frontier) as session:
        written = await export_job(session, job, to, csv_raw=csv_raw)
        view = await session.frontier.job(job)
    if json:
        emit({"job": job, "state": view.state.value, "items": written, "out": to})
        return OK
    say(f"{written:,} items written to {to}")
    if view.state not in ENDED:
        say(f"{job} is {view.state.value}: run this again when it has ended for the rest")
    return OK


# -- what the other commands show with ---------------------------------------------------


def described(job: Job, now: float) -> dict[str, Any]:
    """A job as JSON: the words of runs (pending, claimed…), then every counter by its own name."""
    import msgspec

    from shoal.app import run_counts

    counts = job.counts
    seconds = lasted(job, now)
    pages = counts.done - counts.skipped
    ended = counts.done + counts.dead + counts.expired
    # Live and running only: a paused job has no end in sight, whatever it did before.
    eta = counts.live * seconds / ended if job.state is JobState.RUNNING and ended and counts.live else None
    return {
        "job": job.id,
        "state": job.state.value,
        **run_counts(counts),
        **msgspec.to_builtins(counts),
        "errors": job.errors,
        "scraper": job.spec.scraper,
        "start": list(job.spec.start[:100]),
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "seconds": round(seconds, 3),
        "pages_per_second": round(pages / seconds, 3) if seconds > 0 else 0.0,
        "eta_seconds": None if eta is None else round(eta, 1),
    }


def lasted(job: Job, now: float) -> float:
    """Seconds from the job's beginning to its end, or until now."""
    return max(0.0, (job.finished_at or now) - job.created_at)


def at_clock(moment: float) -> str:
    """A timestamp as the wall clock here shows it."""
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def from_now(moment: float | None, now: float) -> str:
    """`in 3 s` for a moment to come, `now` for one that has come, `-` for none."""
    from shoal.cli.progress import duration

    if moment is None:
        return "-"
    return f"in {duration(moment - now)}" if moment > now else "now"


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """A table on stdout. On a terminal it fits the width; elsewhere nothing is ever cut off.
    `styles` are for cells that say exactly this."""
    from rich.table import Table
    from rich.text import Text

    console = table_console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, header in enumerate(headers):
        # The first column names the row and is what people copy: it is never broken.
        side: Literal["left", "right"] = "right" if number in right else "left"
        table.add_column(header, justify=side, overflow="fold", no_wrap=number == 0)
    for row in rows:
        # Text, not str: a URL with brackets in it is not markup.
        table.add_row(*(Text(printable(cell), style=(styles or {}).get(cell, "")) for cell in row))
    if not console.is_terminal:
        console.width = max(80, console.measure(table, options=console.options.update(width=100_000)).maximum)
    console.print(table)


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """Names and values below each other on stdout; a name that repeats is written once."""
    from rich.table import Table
    from rich.text import Text

    console = table_console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    last = ""
    for name, value in rows:
        table.add_row(Text(printable("" if name == last else name)), Text(printable(value)))
        last = name
    if not console.is_terminal:
        console.width = max(80, console.measure(table, options=console.options.update(width=100_000)).maximum)
    console.print(table)


def _shortened(start: tuple[str, ...]) -> str:
    if not start:
        return "-"
    more = f" and {len(start) - 3:,} more" if len(start) > 3 else ""
    return " ".join(start[:3]) + more
