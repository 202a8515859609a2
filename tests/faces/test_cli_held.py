"""`status` and `explain` tell when another job holds a job to a slower pace. See decision 0008."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.app import slowdowns
from shoal.app.slowdown import is_slower
from shoal.frontier.memory import MemoryFrontier
from shoal.model import JobSpec, Pace, Request
from shoal.registry import open_frontier
from tests.rig.command import Ran

Shoal = Callable[..., Ran]

CAREFUL = JobSpec(start=("http://a.test/",), gap=60.0)
HASTY = JobSpec(start=("http://a.test/x",), gap=0.1, width=4)


async def told(frontier: MemoryFrontier) -> list[str]:
    return [str(held) for held in await slowdowns(frontier, await frontier.job("hasty"))]


@pytest.fixture
def two(place: Path) -> None:
    async def fill() -> None:
        frontier = await open_frontier()
        await frontier.open_job("careful", CAREFUL)
        await frontier.add([Request("http://a.test/", "careful")])
        await frontier.open_job("hasty", HASTY)
        await frontier.add([Request("http://a.test/x", "hasty")])
        await frontier.close()

    asyncio.run(fill())


def test_status_and_explain_say_who_holds_a_job(shoal: Shoal, two: None) -> None:
    held = {"host": "a.test", "rate": "1/m", "width": 1, "asked": "10/s, 4 at a time", "by": "careful"}
    line = "a.test is slowed to 1/m, 1 at a time by job careful"
    assert shoal("status", "hasty", "--json").json["held_by"] == [held]
    assert line in shoal("status", "hasty").out
    [answer] = shoal("explain", "http://a.test/x", "--job", "hasty", "--json").json["jobs"]
    assert answer["held_by"] == held
    assert line in shoal("explain", "http://a.test/x", "--job", "hasty").out
    assert shoal("status", "careful", "--json").json["held_by"] == []
    assert shoal("explain", "http://a.test/", "--job", "careful", "--json").json["jobs"][0]["held_by"] is None


async def test_who_holds_it_is_named_only_where_that_is_known() -> None:
    frontier = MemoryFrontier()
    await frontier.open_job("listed", JobSpec(gap=60.0))
    await frontier.add([Request("http://a.test/", "listed")])
    await frontier.open_job("elsewhere", JobSpec(start=("http://b.test/",), gap=60.0))
    await frontier.open_job("hasty", HASTY)
    await frontier.add([Request("http://a.test/x", "hasty")])
    assert [line.partition(";")[0] for line in await told(frontier)] == [
        "a.test is slowed to 1/m, 1 at a time by another job"
    ]


async def test_what_people_and_hosts_want_is_no_other_job() -> None:
    frontier = MemoryFrontier()
    await frontier.open_job("hasty", HASTY)
    await frontier.add([Request("http://a.test/x", "hasty")])
    assert await told(frontier) == []
    await frontier.pace("a.test", Pace(floor=30.0))
    assert await told(frontier) == [], "robots.txt asked for it"
    await frontier.pace("a.test", Pace(gap=60.0, width=1, pinned=True))
    [lane] = await frontier.lanes(names=["a.test"])
    assert not is_slower(lane, await frontier.job("hasty")), "somebody pinned it"


async def test_hosts_that_are_visited_now_count_too() -> None:
    frontier = MemoryFrontier()
    await frontier.open_job("careful", CAREFUL)
    await frontier.add([Request("http://a.test/", "careful")])
    await frontier.open_job("hasty", JobSpec(gap=0.1, dedicated=True))
    await frontier.add([Request("http://a.test/x", "hasty")])
    assert await told(frontier) == [], "a job without a start is looked at where it is"
    await frontier.claim(worker="w", limit=1, lease_seconds=60.0, job="hasty")
    assert [line.partition(";")[0] for line in await told(frontier)] == [
        "a.test is slowed to 1/m, 1 at a time by job careful"
    ]
