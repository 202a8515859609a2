"""`shoal lanes`: how fast each host is fetched, and changing that live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators

from shoal.cli.common import OK, open_session, run
from shoal.cli.options import Frontier, Json, Limit
from shoal.cli.output import duration, emit, from_now, print_table, say
from shoal.errors import UsageError
from shoal.model import Lane, Pace

if TYPE_CHECKING:
    from shoal.frontier.port import Backend

Host = Annotated[str, Parameter(help="example.com, or example.com:8080.")]

FEW = 5
MANY = 10_000
"""Hosts that are searched for one that may have been meant."""

app = App(name="lanes", help="Show and change how fast each host is fetched.", help_format="plaintext")


@app.default
def show(*, limit: Limit = 100, json: Json = False, frontier: Frontier = None) -> int:
    """List the hosts that have work or a pace of their own, busiest first.

    `rate` is the rate in force now. `asked` is the Crawl-delay of the host, which only a pinned pace
    overrides.
    """
    return run(lambda: _show(limit, frontier, json=json))


async def _show(limit: int, frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import lane_view

    async with open_session(create=False, frontier=frontier) as session:
        lanes = await session.frontier.lanes(limit=limit)
    now = time.time()
    if json:
        emit([lane_view(lane, now) for lane in lanes])
        return OK
    if not lanes:
        say("no hosts yet")
        return OK
    _table(lanes, now)
    return OK


@app.command(name="set")
def set_(
    host: Host,
    *,
    rate: str | None = None,
    concurrency: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=2000))] = None,
    burst: Annotated[int | None, Parameter(validator=validators.Number(gte=0, lte=1_000_000))] = None,
    json: Json = False,
    frontier: Frontier = None,
) -> int:
    """Pin the pace of a host, for all workers and jobs.

    The pinned pace applies at once and overrides what jobs and the host itself ask for. Values that are not
    given stay as they are; for a host that is not known yet they are those of a new job.

    Parameters
    ----------
    rate
        Maximum rate: 2/s, 30/m or none.
    concurrency
        Pages fetched from the host at a time.
    burst
        Pages that may be fetched at once after the host was idle.
    """
    from shoal.politeness.pacing import parse_rate

    if rate is None and concurrency is None and burst is None:
        raise UsageError("nothing to set", hint="give --rate 2/s, --concurrency 4 or --burst 5")
    gap = None if rate is None else parse_rate(rate)
    pace = Pace(gap=gap, width=concurrency, burst=burst, pinned=True)
    return run(lambda: _pace(host, pace, frontier, json=json))


@app.command
def unset(host: Host, *, json: Json = False, frontier: Frontier = None) -> int:
    """Unpin a host: the next URLs that a job adds set that job's pace again."""
    return run(lambda: _pace(host, Pace(pinned=False), frontier, json=json))


@app.command
def pause(host: Host, *, json: Json = False, frontier: Frontier = None) -> int:
    """Stop fetching a host until it is resumed; pages that are being fetched are finished."""
    return run(lambda: _pace(host, Pace(paused=True), frontier, json=json))


@app.command
def resume(host: Host, *, json: Json = False, frontier: Frontier = None) -> int:
    """Fetch a host again: ends a pause, and a wait that errors or the host itself imposed."""
    return run(lambda: _pace(host, Pace(paused=False, blocked=0.0), frontier, json=json))


async def _pace(host: str, pace: Pace, frontier: str | None, *, json: bool) -> int:
    from shoal.app.views import lane_view
    from shoal.urls import lane_named

    name = lane_named(host)
    async with open_session(frontier=frontier) as session:
        note = await _unused_host_note(session.frontier, name)
        lane = await session.set_pace(name, pace)
    if json:
        emit(lane_view(lane, time.time()))
    else:
        say(f"{name}: {pace_of(lane)}")
    if note:
        say(note)
    return OK


async def _unused_host_note(frontier: Backend, name: str) -> str:
    """Returns a note about a host that has no URLs: its port may have been forgotten. This is not an error:
    a pace may be set before its URLs come."""
    known = await frontier.lanes(names=[name], limit=1)
    if known and known[0].waiting + known[0].busy:
        return ""
    found = {lane.name for lane in await frontier.lanes(limit=MANY) if _bare(lane.name) == _bare(name)}
    alike = sorted(found - {name})
    if known and not alike:
        return ""
    there = f"; did you mean {', '.join(alike[:FEW])}?" if alike else ""
    what = "none of its URLs is waiting" if known else "this frontier has no URL of this host"
    return f"note: {what}{there}"


def _bare(name: str) -> str:
    """Returns a lane without its port and without `www.`."""
    head, colon, port = name.rpartition(":")
    host = head if colon and port.isdigit() else name
    return host.removeprefix("www.")


def pace_of(lane: Lane) -> str:
    """Returns a lane's pace in words."""
    from shoal.politeness.pacing import format_rate

    parts = [f"rate {format_rate(lane.gap)}", f"{lane.width} at a time"]
    if lane.burst:
        parts.append(f"bursts of {lane.burst}")
    return ", ".join(parts + _flags(lane))


def _table(lanes: list[Lane], now: float) -> None:
    from shoal.politeness.pacing import format_rate

    print_table(
        ("host", "rate", "concurrency", "active", "waiting", "next visit", "blocked", "asked", "flags"),
        [
            (
                *(lane.name, format_rate(lane.gap), str(lane.width), str(lane.busy), f"{lane.waiting:,}"),
                from_now(lane.ready_at, now),
                duration(lane.blocked_until - now) if lane.blocked_until > now else "-",
                format_rate(lane.floor) if lane.floor else "-",
                " ".join(_flags(lane)) or "-",
            )
            for lane in lanes
        ],
        right=(2, 3, 4),
    )


def _flags(lane: Lane) -> list[str]:
    return [name for name, on in (("pinned", lane.pinned), ("paused", lane.paused)) if on]
