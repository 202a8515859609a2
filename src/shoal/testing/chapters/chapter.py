"""Shared by the chapters: a frontier that is checked after each test, and helpers for common steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence

import pytest

from shoal.frontier.port import Backend
from shoal.model import Added, Done, Lease, Request
from shoal.testing.harness import Harness

HOST = "http://a.example"
REAP = 1.5
"""The frontier may notice the end of a lease up to a second late; after these seconds it has."""


class Chapter:
    """The tests of a chapter get `frontier`, and `harness` to move time. After each test, the frontier's own
    recount must find nothing wrong."""

    @pytest.fixture
    async def frontier(self, harness: Harness) -> AsyncIterator[Backend]:
        frontier = await harness.open()
        yield frontier
        # A new handle: a test may have reopened the storage, which closes the old one.
        assert await (await harness.open()).check() == []


def page(number: int | str, *, host: str = HOST) -> str:
    return f"{host}/{number}"


def pages(count: int, *, host: str = HOST, start: int = 0) -> list[str]:
    return [page(number, host=host) for number in range(start, start + count)]


def requests(
    urls: Iterable[str], *, job: str = "job", queue: str = "scraping", priority: int = 5
) -> list[Request]:
    return [Request(url=url, job=job, queue=queue, priority=priority) for url in urls]


async def claim(
    frontier: Backend,
    limit: int = 1,
    *,
    lease_seconds: float = 60.0,
    queues: Collection[str] | None = None,
    worker: str = "w",
) -> list[Lease]:
    """Return the leases of one claim."""
    return list(
        (await frontier.claim(limit, worker=worker, lease_seconds=lease_seconds, queues=queues)).leases
    )


async def claim_one(frontier: Backend, *, lease_seconds: float = 60.0) -> Lease:
    """Return the only lease of a claim that asks for many."""
    [only] = await claim(frontier, 100, lease_seconds=lease_seconds)
    return only


async def serve(frontier: Backend, visits: int, *, limit: int = 1) -> list[Request]:
    """Claim and finish up to `visits` requests, `limit` at a time. Returns them in order."""
    served: list[Request] = []
    while len(served) < visits:
        leases = await claim(frontier, min(limit, visits - len(served)))
        if not leases:
            break
        assert (await frontier.settle([Done(lease) for lease in leases])).lost == []
        served += [lease.request for lease in leases]
    return served


async def add_all(frontier: Backend, wanted: Sequence[Request]) -> None:
    """Add requests that must all be new."""
    assert await frontier.add(wanted) == [Added.NEW] * len(wanted)


def urls(leases: Iterable[Lease]) -> list[str]:
    return [lease.request.url for lease in leases]
