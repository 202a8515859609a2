"""A crawl that was interrupted moves to another frontier and ends there as if nothing had happened."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

import pytest

from shoal.frontier.port import Backend
from shoal.model import Done, Item, Job, JobSpec, JobState, Lease, Request
from shoal.registry import open_frontier
from shoal.testing import postgres_server, redis_server
from shoal.testing.command import Running, Shell, wait_until
from shoal.testing.site import LoopbackSite, generated_site

T = TypeVar("T")

PAGES = 60
KINDS = ("sqlite", "redis", "postgres")
NEEDS = {
    "sqlite": (),
    "redis": (pytest.mark.skipif(not redis_server.available(), reason="no redis-server"),),
    "postgres": (pytest.mark.skipif(postgres_server.binaries() is None, reason="no PostgreSQL server"),),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Addresses of empty frontiers, on servers that live as long as this module."""
    with ExitStack() as stack:
        servers: dict[str, str] = {}
        made = iter(range(1000))

        def place(kind: str) -> str:
            number = next(made)
            if kind == "sqlite":
                return f"sqlite:///{tmp_path_factory.mktemp('frontier')}/{number}.db"
            if kind not in servers:
                servers[kind] = (
                    stack.enter_context(redis_server.redis_server()).url
                    if kind == "redis"
                    else stack.enter_context(postgres_server.postgres_server())
                )
            return f"{servers[kind]}?{'prefix' if kind == 'redis' else 'schema'}=copy{number}"

        yield place


def ask(address: str, question: Callable[[Backend], Awaitable[T]]) -> T:
    async def answer() -> T:
        frontier = await open_frontier(address)
        try:
            return await question(frontier)
        finally:
            await frontier.close()

    return asyncio.run(answer())


def the_job(address: str) -> Job:
    [job] = ask(address, lambda frontier: frontier.jobs())
    return job


def all_items(address: str, job: str) -> list[Item]:
    return ask(address, lambda frontier: frontier.items(job, limit=10_000))


def crawl(url: str, frontier: str) -> list[str]:
    words = ["crawl", url, "--allow-private", "--rate", "none", "--per-host", "4", "--frontier", frontier]
    return [*words, "--json"]


def interrupted(shell: Shell, site: LoopbackSite, frontier: str, pages: int) -> Job:
    """A crawl of so many pages or a little more."""
    running = shell.start(*crawl(site.url, frontier))
    wait_until(lambda: len(site.log()) >= pages, f"{pages} pages")
    running.signal(signal.SIGINT)
    assert running.wait().code == 130
    job = the_job(frontier)
    assert 0 < job.counts.done < PAGES
    return job


def ends_well(shell: Shell, site: LoopbackSite, before: Job, source: str, target: str) -> None:
    """The crawl goes on at the target, and what it brings is what one uninterrupted crawl brings."""
    old = all_items(source, before.id)
    assert all_items(target, before.id)[: len(old)] == old
    assert the_job(source).state is JobState.CANCELLED
    last = shell.run(*crawl(site.url, target), "--resume")
    assert last.code == 0, last.err
    job = the_job(target)
    assert (job.id, job.state) == (before.id, JobState.DONE)
    items = [item.body for item in all_items(target, job.id)]
    found = Counter(body.split(b'"url":"', 1)[1].split(b'"', 1)[0].decode() for body in items)
    assert found == Counter(site.expected_urls())
    for address in (source, target):
        assert ask(address, lambda frontier: frontier.check()) == []


def pair(source: str, target: str, *more: pytest.MarkDecorator) -> object:
    marks = [*NEEDS[source], *NEEDS[target], *more]
    return pytest.param(source, target, marks=marks, id=f"{source}-{target}")


CYCLE = (("sqlite", "redis"), ("redis", "postgres"), ("postgres", "sqlite"))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(pair(*both) for both in CYCLE),
        *(
            pair(one, other, pytest.mark.slow)
            for one in KINDS
            for other in KINDS
            if (one, other) not in CYCLE
        ),
    ],
)
def test_a_crawl_goes_on_in_another_frontier(
    shell: Shell, places: Callable[[str], str], source: str, target: str
) -> None:
    here, there = places(source), places(target)
    with LoopbackSite(generated_site(pages=PAGES, links=5, seed=3, latency=0.02)) as site:
        before = interrupted(shell, site, here, 15)
        moved = shell.run("copy", "--from", here, "--to", there, "--json")
        assert moved.code == 0, moved.err
        [told] = moved.json()["jobs"]
        assert (told["job"], told["state"], told["items"]) == (before.id, "running", before.counts.items)
        assert told["urls"] == before.counts.live
        assert "moved_to" in shell.run("status", before.id, "--json", "--frontier", here).json()
        if target == "redis":
            stays = shell.run(*crawl(site.url, here), "--resume")
            assert (stays.code, "has moved to" in stays.err) == (2, True), stays.err
        ends_well(shell, site, before, here, there)
        visits = Counter(entry.path for entry in site.log() if entry.path != "/robots.txt")
        assert set(visits.values()) == {1}, "something was visited twice"


def kill_soon(running: Running, seconds: float) -> bool:
    """Kill a copy so long after it has begun to move. False if it ended before."""
    wait_until(lambda: running.over or "from " in running.err, "a copy that begins")
    end = time.monotonic() + seconds
    while time.monotonic() < end and not running.over:
        time.sleep(0.0005)
    if running.over:
        return False
    running.kill()
    return True


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_copy_that_is_killed_is_run_again(shell: Shell, places: Callable[[str], str], seed: int) -> None:
    dice = random.Random(seed)
    here, there = places("sqlite"), places("sqlite" if seed != 2 or NEEDS["redis"][0].args[0] else "redis")
    with LoopbackSite(generated_site(pages=PAGES, links=5, seed=3, latency=0.02)) as site:
        before = interrupted(shell, site, here, 15)
        words = ["copy", "--from", here, "--to", there]
        killed = 0
        for _ in range(6):
            running = shell.start(*words)
            killed += kill_soon(running, dice.uniform(0.0, 0.15))
            if running.over and "now (running" in running.err:
                break
            if ask(here, lambda frontier: frontier.job(before.id)).state is not JobState.CANCELLED:
                runs = ask(there, lambda frontier: frontier.jobs())
                assert all(job.state is JobState.PAUSED for job in runs), "it could run in two places"
        last = shell.run(*words)
        assert last.code == 0, last.err
        assert killed or "now (running" in shell.started[1].err
        ends_well(shell, site, before, here, there)


def test_now_takes_back_what_a_worker_holds(shell: Shell, places: Callable[[str], str]) -> None:
    """What it brings is refused; the URL is visited at the target. Without --now the copy waits."""
    here, there = places("sqlite"), places("sqlite")

    async def begin(frontier: Backend) -> Sequence[Lease]:
        await frontier.open_job("job", JobSpec(gap=0.0, width=9))
        await frontier.add([Request(f"https://a.example/{n}", "job") for n in range(3)])
        return (await frontier.claim(2, worker="elsewhere_1_1", lease=600.0)).leases

    leases = ask(here, begin)
    waits = shell.start("copy", "--from", here, "--to", there)
    wait_until(lambda: "waiting for 2 visits" in waits.err, "a copy that waits")
    waits.signal(signal.SIGINT)
    assert waits.wait().code == 130
    assert "paused" in waits.err
    moved = shell.run("copy", "--from", here, "--to", there, "--now", "--json")
    assert moved.code == 0, moved.err
    assert ask(here, lambda frontier: frontier.settle([Done(x, [b"{}"]) for x in leases])).lost == leases
    job = the_job(there)
    assert (job.state, job.counts.waiting, job.counts.items) == (JobState.RUNNING, 3, 0)


def test_half_a_job_cannot_be_resumed(shell: Shell, places: Callable[[str], str]) -> None:
    here, there = places("sqlite"), places("sqlite")

    async def half(target: Backend) -> None:
        source = await open_frontier(here)
        await source.open_job("job", JobSpec())
        await source.add([Request("https://a.example/", "job")])
        await target.unpack("job", await source.pack("job", "head"))
        await source.close()

    ask(there, half)
    refused = shell.run("resume", "job", "--frontier", there)
    assert (refused.code, "arriving" in refused.err) == (2, True), refused.err
    assert shell.run("copy", "--from", here, "--to", there).code == 0
    assert the_job(there).state is JobState.RUNNING


def test_bad_wishes_are_one_line(shell: Shell, places: Callable[[str], str]) -> None:
    here, there = places("sqlite"), places("sqlite")
    assert ask(here, lambda frontier: frontier.jobs()) == []  # it is there now
    for words, told in (
        (("--from", here, "--to", here), "both"),
        (("--from", here, "--to", "memory:"), "memory"),
        (("--from", here, "--to", there, "--job", "nobody"), "no job"),
    ):
        ended = shell.run("copy", *words)
        assert ended.code == 2
        assert told in ended.err and "Traceback" not in ended.err
    nothing = shell.run("copy", "--from", here, "--to", there, "--json")
    assert (nothing.code, nothing.json()["jobs"]) == (0, [])


def test_a_job_of_the_same_name_stays_untouched(shell: Shell, places: Callable[[str], str]) -> None:
    here, there = places("sqlite"), places("sqlite")
    for address in (here, there):
        assert shell.run("enqueue", "news", "https://a.example/", "--frontier", address).code == 0
    ended = shell.run("copy", "--from", here, "--to", there)
    assert (ended.code, "already" in ended.err) == (2, True)
    assert the_job(there).state is JobState.RUNNING
    again = Request("https://a.example/", "news")
    assert ask(there, lambda frontier: frontier.add([again]))[0].value == "known"
