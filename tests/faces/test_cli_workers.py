"""`shoal workers`, and what `shoal status` tells of the workers of a job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.app import run_rate
from shoal.frontier.notes import Presence
from shoal.frontier.sqlite import SqliteFrontier
from shoal.model import (
    TRANSIT,
    Counts,
    Heartbeat,
    Job,
    JobSpec,
    JobState,
    Request,
    WorkerStatus,
)
from shoal.queues import TASK_QUEUE
from tests.rig.command import Shell

RUN = ("pending", "claimed", "completed", "failed", "remaining")


def told(place: Shell, story: Callable[[SqliteFrontier], Awaitable[object]], ago: float = 0.0) -> None:
    """Let something happen in the frontier, so many seconds ago."""

    async def tell() -> None:
        frontier = await SqliteFrontier.open(place.db, clock=lambda: time.time() - ago)
        await story(frontier)
        await frontier.close()

    asyncio.run(tell())


@pytest.fixture
def busy(shell: Shell) -> Shell:
    """`run`: six URLs. One worker of it is well, one silent with two of them; one is stuck elsewhere."""

    async def long_ago(frontier: SqliteFrontier) -> None:
        await frontier.open_job("run", JobSpec(start=("http://a.test/",), gap=0.0, width=9, dedicated=True))
        await frontier.add([Request(f"http://a.test/{n}", "run") for n in range(6)])
        await Presence(frontier.notes).heartbeat(
            Heartbeat("there_7_1", job="run", slots=10, running=2, visits=5, rate=3.0)
        )
        assert len((await frontier.claim(2, worker="there_7_1", lease_seconds=900.0, job="run")).leases) == 2

    async def now(frontier: SqliteFrontier) -> None:
        await Presence(frontier.notes).heartbeat(
            Heartbeat(
                "here_1_1", job="run", slots=10, running=1, visits=1200, failed=3, rate=2.0, version="0.1.0"
            )
        )
        await Presence(frontier.notes).heartbeat(
            Heartbeat("here_2_1", queues=("slow",), slots=4, running=4, stalled_for=200.0)
        )
        await frontier.claim(1, worker="here_1_1", lease_seconds=60.0, job="run")

    told(shell, long_ago, ago=600.0)
    told(shell, now)
    return shell


def test_each_worker_is_a_row(busy: Shell) -> None:
    ran = busy.run("workers")
    assert ran.code == 0
    rows = [row.split() for row in ran.out.splitlines()]
    head = [
        "worker",
        "state",
        "works",
        "on",
        "busy",
        "visits",
        "failed",
        "rate",
        "uptime",
        "heartbeat",
        "leases",
    ]
    assert rows[0] == head
    assert rows[1][:7] == ["here_1_1", "working", "job", "run", "1/10", "1,200", "3"]
    assert rows[1][-1] == "1"
    assert rows[2][:5] == ["here_2_1", "!", "stuck", "slow", "4/4"]
    assert rows[3][:5] == ["there_7_1", "!", "silent", "job", "run"]
    assert rows[3][-1] == "2" and "10 min" in ran.out
    assert (
        "1 worker has stopped sending heartbeats; its URLs will be retried when their leases expire"
        in ran.err
    )
    assert "1 worker is stuck" in ran.err


def test_workers_as_json(busy: Shell) -> None:
    found = {each["id"]: each for each in busy.run("workers", "--json").json()}
    assert {name: each["state"] for name, each in found.items()} == {
        "here_1_1": "working",
        "here_2_1": "stuck",
        "there_7_1": "silent",
    }
    assert found["here_2_1"]["queues"] == ["slow"] and found["here_2_1"]["still_seconds"] == 200.0
    one = found["here_1_1"]
    assert (one["job"], one["running"], one["slots"], one["rate"], one["leases"]) == ("run", 1, 10, 2.0, 1)
    assert 0 <= one["seen_ago"] < 60 and found["there_7_1"]["seen_ago"] > 500


def test_no_workers(shell: Shell) -> None:
    ran = shell.run("workers")
    assert (ran.code, ran.out) == (0, "")
    assert "no workers" in ran.err
    assert shell.run("workers", "--json").json() == []
    assert not shell.db.exists(), "asking leaves no file behind"


def test_status_of_a_run_tells_rate_end_and_workers(busy: Shell) -> None:
    found = busy.run("status", "run", "--json").json()
    assert {name: found[name] for name in RUN} == {
        "pending": 3,
        "claimed": 3,
        "completed": 0,
        "failed": 0,
        "remaining": 6,
    }
    # Only who lives counts: 2 visits a second, six to go.
    assert (found["rate"], found["eta_seconds"]) == (2.0, 3.0)
    assert [(each["id"], each["state"], each["leases"]) for each in found["workers"]] == [
        ("here_1_1", "working", 1),
        ("there_7_1", "silent", 2),
    ]
    out = busy.run("status", "run").out
    assert "2.0 visits/s now" in out
    assert "there_7_1 ! silent, 2 of 10 busy, 2 leases, heartbeat 10 min" in out


def test_what_is_in_the_broker_is_held_by_no_worker(shell: Shell) -> None:
    async def sent(frontier: SqliteFrontier) -> None:
        await frontier.open_job("sent", JobSpec(gap=0.0, width=9))
        await frontier.add([Request(f"http://a.test/{n}", "sent") for n in range(3)])
        await frontier.add([Request("http://a.test/task", "sent", queue=TASK_QUEUE)])
        await Presence(frontier.notes).heartbeat(Heartbeat("here_1_1", slots=10, running=0))
        leases = (await frontier.claim(9, worker=f"{TRANSIT}here_1_pump", lease_seconds=900.0)).leases
        assert len(leases) == 4
        await frontier.take(leases[3:], worker="here_1_1", lease_seconds=900.0)

    told(shell, sent)
    found = shell.run("status", "sent", "--json").json()
    assert found["in_broker"] == 3 and found["claimed"] == 4
    assert [(each["id"], each["leases"]) for each in found["workers"]] == [("here_1_1", 1)]
    assert list(found["queues"]) == ["scraping"]
    out = shell.run("status", "sent").out
    assert "4 (3 in the broker)" in out and TRANSIT not in out and TASK_QUEUE not in out
    explained = shell.run("explain", "http://a.test/0").out
    assert "it is in the broker" in explained and "on its way to a worker" in explained


def test_status_says_when_nobody_works(shell: Shell) -> None:
    async def fill(frontier: SqliteFrontier) -> None:
        await frontier.open_job("lonely", JobSpec(start=("http://a.test/",)))
        await frontier.add([Request("http://a.test/", "lonely")])

    told(shell, fill)
    assert "none; start one with `shoal worker`" in shell.run("status", "lonely").out
    found = shell.run("status", "lonely", "--json").json()
    assert (found["rate"], found["workers"], found["eta_seconds"]) == (0.0, [], None)


def test_a_worker_that_left_is_not_listed(busy: Shell) -> None:
    told(busy, lambda frontier: Presence(frontier.notes).leave("there_7_1"))
    assert "there_7_1" not in busy.run("workers").out


def job(**counts: int) -> Job:
    return Job("j", JobSpec(queue="q"), JobState.RUNNING, Counts(**counts), {}, 0.0)


def present(**heartbeat: Any) -> WorkerStatus:
    return WorkerStatus(Heartbeat("w", **heartbeat), since=0.0, seen=100.0, leases=0, now=100.0)


@pytest.mark.parametrize(
    ("heartbeat", "share"),
    [
        ({"job": "j"}, 1.0),
        ({"job": "another"}, 0.0),
        ({"queues": ("other",)}, 0.0),
        ({"current": {"j": "u"}}, 1.0),
        ({"current": {"j": "u", "k": "u"}}, 0.5),
        ({"current": {"k": "u"}}, 0.0),
        # Between two visits: by what waits in its queues.
        ({}, 0.25),
        ({"queues": ("q",)}, 0.5),
    ],
)
def test_the_share_of_a_job_in_what_a_worker_does(heartbeat: dict[str, Any], share: float) -> None:
    queues = {
        "q": {"waiting": 15, "delayed": 5, "leased": 0},
        "r": {"waiting": 20, "delayed": 0, "leased": 0},
    }
    assert run_rate(job(added=10), [present(rate=8.0, **heartbeat)], queues) == 8.0 * share


def test_a_silent_worker_has_no_rate() -> None:
    silent = WorkerStatus(Heartbeat("w", job="j", rate=8.0), since=0.0, seen=50.0, leases=3, now=100.0)
    assert run_rate(job(added=10), [silent], {}) == 0.0
    assert run_rate(job(added=10), [], {}) == 0.0


def test_watch_tells_who_works(busy: Shell) -> None:
    from shoal.cli.progress import Progress

    async def lines() -> str:
        frontier = await SqliteFrontier.open(busy.db)
        try:
            return await Progress(frontier, "run", workers=True)._lines()
        finally:
            await frontier.close()

    assert "workers: 1 silent, 1 working" in asyncio.run(lines())
