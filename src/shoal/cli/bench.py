"""`shoal bench`: measures this machine, on loopback and in a temporary directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators
from msgspec import Struct

from shoal.cli.common import OK, run
from shoal.cli.options import Json
from shoal.cli.output import emit, print_table, say

if TYPE_CHECKING:
    from shoal.demo.site import ProcessSite
    from shoal.frontier.port import Backend
    from shoal.model import Request

BATCH = 64
"""Requests claimed and settled together, as a worker with this concurrency does."""
LANES = 100
STOCK = 10_000
"""Requests added before the clock starts; refilled while it is stopped."""
CONCURRENCY = 64
HOSTS = 8
"""Addresses of the loopback site: 127.0.0.1 and so on, each a lane of its own."""


class Measured(Struct, frozen=True):
    what: str
    unit: str
    number: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.number / self.seconds if self.seconds > 0 else 0.0


Part = Callable[[Path, float], Awaitable[tuple[int, float]]]


def bench(
    *,
    seconds: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=600))] = 3.0,
    json: Json = False,
) -> int:
    """Measure the throughput of this machine.

    Measures frontiers, fetching and a whole crawl, in one process and on loopback.

    Parameters
    ----------
    seconds
        Seconds to measure each row.
    """
    return run(lambda: _bench(seconds, json=json))


async def _bench(seconds: float, *, json: bool) -> int:
    from tempfile import TemporaryDirectory

    rows: list[Measured] = []
    with TemporaryDirectory(prefix="shoal-bench-") as folder:
        for number, (what, unit, part) in enumerate(_parts()):
            if not json:
                say(f"{what}…")
            place = Path(folder) / str(number)
            place.mkdir()
            rows.append(Measured(what, unit, *await part(place, seconds)))
    if json:
        emit([_described(row) for row in rows])
        return OK
    print_table(
        ("", "per second", ""),
        [(row.what, f"{row.rate:,.0f}", row.unit) for row in rows],
        right=(1,),
    )
    return OK


def _described(row: Measured) -> dict[str, Any]:
    return {
        "what": row.what,
        "unit": row.unit,
        "number": row.number,
        "seconds": round(row.seconds, 3),
        "per_second": round(row.rate, 1),
    }


def _parts() -> Iterator[tuple[str, str, Part]]:
    for name, address in (
        ("memory", "memory:"),
        ("SQLite, durable (full)", "sqlite:///{place}/shoal.db"),
        ("SQLite, normal", "sqlite:///{place}/shoal.db?synchronous=normal"),
    ):
        for links in (0, 5):
            with_links = "5 links, 1 of them new" if links else "no links"
            yield f"frontier {name}: {with_links}", "visits", partial(_measure_frontier, address, links)
    yield f"fetch over loopback, {CONCURRENCY} at a time", "pages", _measure_fetch
    yield f"whole crawl, SQLite durable, {HOSTS} hosts, 1 process", "pages", _measure_crawl


async def _measure_frontier(address: str, links: int, place: Path, seconds: float) -> tuple[int, float]:
    """Claims and settles with items of 500 bytes. Each visit finds `links` links, one of them new."""
    from shoal.model import Done, JobSpec, Request
    from shoal.registry import open_frontier

    item = b'{"text":"' + b"x" * 489 + b'"}'
    numbers = count()
    old = Request("http://host0.test/page/0", "bench", depth=1)

    def fresh() -> Request:
        number = next(numbers)
        return Request(f"http://host{number % LANES}.test/page/{number}", "bench")

    frontier = await open_frontier(address.format(place=place))
    try:
        await frontier.open_job("bench", JobSpec(gap=0.0, width=BATCH, max_pages=None))
        settled, spent = 0, 0.0
        while spent < seconds:
            await frontier.add([fresh() for _ in range(STOCK)])
            visits, took = await _drain(
                frontier,
                lambda lease: Done(lease, (item,), [fresh(), *[old] * (links - 1)] if links else ()),
                seconds - spent,
            )
            settled, spent = settled + visits, spent + took
    finally:
        await frontier.close()
    return settled, spent


async def _drain(frontier: Backend, done: Callable[[Any], Any], seconds: float) -> tuple[int, float]:
    """Visits until nothing is left or the time is over. Returns the number of visits and the seconds."""
    settled, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        claim = await frontier.claim(BATCH, worker="bench", lease_seconds=60.0)
        if not claim.leases:
            break
        await frontier.settle([done(lease) for lease in claim.leases])
        settled += len(claim.leases)
    return settled, time.perf_counter() - started


async def _measure_fetch(place: Path, seconds: float) -> tuple[int, float]:
    from shoal.fetch.guard import Guard
    from shoal.fetch.http import HttpFetcher
    from shoal.fetch.port import Ask

    async with _site() as site:
        fetcher = HttpFetcher(guard=Guard(allow=_endpoints(site)), concurrency=CONCURRENCY)
        fetched = 0
        numbers = count(1)
        started = time.perf_counter()

        async def visit() -> None:
            nonlocal fetched
            while time.perf_counter() - started < seconds:
                number = next(numbers)
                base = site.urls[number % HOSTS]
                await fetcher.fetch(Ask(f"{base}page/{number}"))
                fetched += 1

        try:
            await asyncio.gather(*(visit() for _ in range(CONCURRENCY)))
            return fetched, time.perf_counter() - started
        finally:
            await fetcher.close()


async def _measure_crawl(place: Path, seconds: float) -> tuple[int, float]:
    from shoal.app import Run, Session
    from shoal.settings import load

    # All settings that affect the speed are given, so that no shoal.toml changes the result.
    settings = load(
        frontier=f"sqlite:///{place}/shoal.db",
        rate="none",
        per_host=CONCURRENCY // HOSTS,
        concurrency=CONCURRENCY,
        max_pages=1_000_000_000,
        scope="host",
        depth=1_000_000,
        include=(),
        exclude=(),
        fields=(),
        headers={},
        cache=0.0,
        no_robots=False,
        robots=True,
        user_agent="",
        http2=False,
        timeout=30.0,
    )
    async with _site() as site, Session.opened(settings) as session:
        spec = session.spec("site", tuple(site.urls), allow_private=_endpoints(site))
        job = await session.open_job(spec)
        await session.submit(job.id, site.urls)
        crawl = Run(session, job.id)
        started = time.perf_counter()
        work = asyncio.create_task(crawl.to_end())
        try:
            await asyncio.wait([work], timeout=seconds)
            counts = (await session.frontier.job(job.id)).counts
            return counts.done - counts.skipped, time.perf_counter() - started
        finally:
            crawl.stop()
            crawl.stop()  # the second one stops at once
            await asyncio.gather(work, return_exceptions=True)


@asynccontextmanager
async def _site() -> AsyncIterator[ProcessSite]:
    """An endless site in a process of its own: it must not share our interpreter."""
    from shoal.demo.site import ProcessSite, generated_site

    site = ProcessSite(generated_site(pages=1_000_000_000, links=5, hosts=HOSTS, size=2000))
    await asyncio.to_thread(site.start)
    try:
        yield site
    finally:
        await asyncio.to_thread(site.stop)


def _endpoints(site: ProcessSite) -> tuple[str, ...]:
    return tuple(url.split("/")[2] for url in site.urls)
