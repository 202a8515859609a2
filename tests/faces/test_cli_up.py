"""`shoal up`: processes that are kept alive; and how commands wait for a server that is not there yet."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client import Client
from shoal.demo.site import LoopbackSite, generated_site
from shoal.engine.supervisor import Supervisor
from shoal.frontier.notes import Presence
from shoal.registry import open_frontier
from tests.rig.command import Running, Shell, wait_until
from tests.rig.redis_server import RedisServer, available, redis_server

redis = pytest.mark.skipif(not available(), reason="redis-server is not installed")

FAST = ("--allow-private", "--rate", "none", "--per-host", "8", "--no-robots")


def pids(shell: Shell) -> set[int]:
    """The processes that the workers of the frontier say they are."""
    if not shell.db.exists():
        return set()
    present = shell.ask(lambda frontier: Presence(frontier.notes).workers())
    return {int(each.heartbeat.worker.split("_")[-2]) for each in present}


def with_workers(shell: Shell, count: int, *words: str) -> tuple[Running, set[int]]:
    up = shell.start("up", "--workers", str(count), "--port", "0", *words)
    wait_until(lambda: len(pids(shell)) == count, f"{count} workers")
    return up, pids(shell)


def test_a_killed_worker_is_replaced_and_the_others_go_on(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=150, latency=0.2)) as site:
        assert shell.run("enqueue", "some", *site.expected_urls(), *FAST).code == 0
        up, first = with_workers(shell, 2)
        wait_until(lambda: len(site.log()) > 10, "ten pages")
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(pids(shell)) == 2 and victim not in pids(shell), "another worker")
        assert len(first & pids(shell)) == 1
        assert "worker" in up.err and "ended with exit code -9" in up.err
        # Its leases of a minute were not waited for: everything is done long before they end.
        wait_until(lambda: shell.job("some").counts.live == 0, "every page", 50)
        assert shell.job("some").counts.done == 150
        up.signal(signal.SIGTERM)
        ended = up.wait()
        assert ended.code == 0, ended
        assert "Traceback" not in ended.err
        wait_until(lambda: not shell.alive(), "the workers' end", 10)
        assert pids(shell) == set(), "they left as they should"
        assert shell.check() == []


def test_ctrl_c_ends_all(shell: Shell) -> None:
    up, _ = with_workers(shell, 2)
    up.signal(signal.SIGINT)
    ended = up.wait()
    assert ended.code == 130, ended
    assert "stopping" in ended.err and "Traceback" not in ended.err
    assert shell.alive() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_how_a_stopped_worker_exits(shell: Shell, number: int, code: int) -> None:
    worker = shell.start("worker")
    wait_until(lambda: bool(pids(shell)), "the worker")
    worker.signal(number)
    ended = worker.wait()
    assert ended.code == code, ended
    assert "stopping" in ended.err and "Traceback" not in ended.err
    assert pids(shell) == set()


def test_ctrl_c_in_the_middle_of_a_visit(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=1, latency=1.0)) as site:
        assert shell.run("enqueue", "some", *site.expected_urls(), *FAST).code == 0
        worker = shell.start("worker")
        wait_until(lambda: len(site.log()) > 0, "the visit")
        worker.signal(signal.SIGINT)
        assert worker.wait().code == 130
    assert shell.job("some").counts.done == 1, "it was finished all the same"


def test_an_interrupted_worker_of_a_crawl_is_no_crash(tmp_path: Path) -> None:
    async def supervised() -> list[str]:
        said: list[str] = []
        await asyncio.wait_for(Supervisor([sys.executable, "-c", "exit(130)"], 1, tell=said.append).run(), 30)
        return said

    assert asyncio.run(supervised()) == []


def port_of(up: Running) -> list[str]:
    return re.findall(r"http://127\.0\.0\.1:(\d+) on", up.err)


def test_a_service_that_is_started_again_keeps_its_port(shell: Shell) -> None:
    up, _ = with_workers(shell, 1)
    wait_until(lambda: len(port_of(up)) == 1, "the service")
    victims = [pid for pid in shell.alive() if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(max(victims), signal.SIGKILL)
    wait_until(lambda: len(port_of(up)) == 2, "the service again")
    assert len(set(port_of(up))) == 1
    up.signal(signal.SIGTERM)
    assert up.wait().code == 0


def test_a_worker_that_was_told_to_go_is_replaced(shell: Shell) -> None:
    up, first = with_workers(shell, 1)
    os.kill(min(first), signal.SIGTERM)
    wait_until(lambda: pids(shell) and not first & pids(shell), "another worker")
    up.signal(signal.SIGTERM)
    assert up.wait().code == 0


def test_workers_end_with_their_parent(shell: Shell) -> None:
    up, first = with_workers(shell, 2)
    os.kill(up.pid, signal.SIGKILL)
    up.process.wait()
    wait_until(lambda: not shell.alive(), "the workers' end")
    assert first


def test_its_service_waits_for_its_workers(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=1)) as site:
        up = shell.start("up", "--workers", "1", "--port", "0")
        wait_until(lambda: "/docs" in up.err, "the address of the service")
        [address] = re.findall(r"http://127\.0\.0\.1:\d+(?=/docs)", up.err)
        with Client(address) as client:
            answer = client.batch([site.url], distributed=True, allow_private=True, rate="none")
            assert answer["stats"]["success"] == 1
        up.signal(signal.SIGTERM)
        assert up.wait().code == 0


def test_the_job_service_is_part_of_it(shell: Shell) -> None:
    with LoopbackSite(generated_site(pages=5)) as site:
        up, _ = with_workers(shell, 1)
        wait_until(lambda: "/docs" in up.err, "the address of the service")
        [address] = re.findall(r"http://127\.0\.0\.1:\d+(?=/docs)", up.err)
        with Client(address) as client:
            job = client.scrape(site.url, allow_private=True, rate="none", expected_pages=50)
            assert client.wait(job, timeout=50)["status"] == "SUCCESS"
            assert len(list(client.items(job))) == 5
        up.signal(signal.SIGTERM)
        assert up.wait().code == 0
    assert shell.alive() == []


def test_how_many(shell: Shell) -> None:
    up = shell.start("up", "--no-api", "--queues", "slow,fast", env={"MAX_WORKERS": "3"})
    wait_until(lambda: len(pids(shell)) == 3, "three workers")
    assert "3 workers on .shoal/shoal.db" in up.err
    present = shell.ask(lambda frontier: Presence(frontier.notes).workers())
    assert {each.heartbeat.queues for each in present} == {("slow", "fast")}
    up.signal(signal.SIGTERM)
    assert up.wait().code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--frontier", "memory:"), "cannot share a memory: frontier"),
        (("--app", "missing.py"), "missing.py"),
        (("--workers", "0"), "workers"),
    ],
)
def test_what_cannot_be(shell: Shell, words: tuple[str, ...], said: str) -> None:
    ended = shell.run("up", *words)
    assert (ended.code, said in ended.err) == (2, True), ended


# -- a server that is away -------------------------------------------------------------------


@pytest.fixture
def later(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that is not started yet."""
    server = RedisServer(str(tmp_path))
    try:
        yield server
    finally:
        server.kill()


APP = """
from shoal import Shoal
app = Shoal()

@app.scraper("far", start=["http://a.test/"], execution="distributed")
def far(page):
    yield {}
"""


@redis
@pytest.mark.parametrize(
    "words", [("worker", "--drain"), ("run", "far", "--app", "far.py"), ("up", "--port", "0")]
)
def test_a_server_that_starts_late_is_waited_for(
    shell: Shell, later: RedisServer, words: tuple[str, ...]
) -> None:
    (shell.root / "far.py").write_text(APP)
    running = shell.start(*words, "--frontier", later.url)
    wait_until(lambda: "Attempt 2 failed: " in running.err, "two attempts")
    assert f"Attempt 1 failed: {later.url}" in running.err and "does not answer; again in" in running.err
    later.start()
    wait_until(lambda: "Connected to Redis on attempt " in running.err, "the connection")
    if words[0] == "up":
        wait_until(lambda: "Ctrl-C stops" in running.err, "the workers")
        running.signal(signal.SIGTERM)
    ended = running.wait()
    assert ended.code == 0, ended
    assert " on attempt " in ended.err


@redis
@pytest.mark.parametrize("command", ["worker", "up"])
def test_a_server_that_never_comes(shell: Shell, later: RedisServer, command: str) -> None:
    ended = shell.run(command, "--frontier", later.url, env={"SHOAL_CONNECT_ATTEMPTS": "3"})
    assert ended.code == 4, ended
    lines = ended.err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "Attempt 1 failed",
        "Attempt 2 failed",
        "error",
        " hint",
    ]
    assert lines[2].endswith("does not answer, tried 3 times")


async def how_many_workers(address: str) -> int:
    frontier = await open_frontier(address)
    try:
        return len(await Presence(frontier.notes).workers())
    finally:
        await frontier.close()


@redis
def test_what_a_server_may_lose_is_said_once(shell: Shell) -> None:
    said = "not durable: appendonly is off"
    with redis_server("--appendonly", "no") as server, LoopbackSite(generated_site(pages=2)) as site:
        for words in (("worker", "--drain"), ("crawl", site.url, *FAST)):
            ended = shell.run(*words, "--frontier", server.url)
            assert ended.code == 0, ended
            assert ended.err.count(said) == 1
            quiet = shell.run(*words, "--frontier", server.url, "--quiet")
            assert quiet.code == 0 and said not in quiet.err
        up = shell.start("up", "--workers", "2", "--port", "0", "--frontier", server.url)
        wait_until(lambda: asyncio.run(how_many_workers(server.url)) == 2, "both workers")
        wait_until(lambda: "/docs" in up.err, "the service")
        up.signal(signal.SIGTERM)
        assert up.wait().err.count(said) == 1, "by none of those it started"


@redis
def test_a_server_that_goes_and_comes_back_is_told_in_order(shell: Shell) -> None:
    with redis_server() as server, LoopbackSite(generated_site(pages=40, latency=0.3)) as site:
        shell.run("enqueue", "some", *site.expected_urls(), *FAST, "--frontier", server.url)
        worker = shell.start("worker", "--frontier", server.url)
        wait_until(lambda: len(site.log()) > 4, "some visits")
        server.kill()
        wait_until(lambda: "Attempt 4 failed" in worker.err, "four attempts")
        server.start()
        wait_until(lambda: "Connected to" in worker.err, "the connection")
        worker.signal(signal.SIGTERM)
        ended = worker.wait()
    assert ended.code == 0, ended
    counts = [int(n) for n in re.findall(r"Attempt (\d+) failed: .* does not answer; again in", ended.err)]
    assert counts == list(range(1, len(counts) + 1)), ended.err
    assert ended.err.count(f"Connected to {server.url} again") == 1, ended.err


@redis
def test_a_password_is_not_shown_while_waiting(shell: Shell, later: RedisServer) -> None:
    address = later.url.replace("redis://", "redis://:geheim@")
    ended = shell.run("worker", "--frontier", address, env={"SHOAL_CONNECT_ATTEMPTS": "2"})
    assert ended.code == 4
    assert "geheim" not in ended.err


def test_files_are_not_waited_for(shell: Shell) -> None:
    (shell.root / "folder").mkdir()
    ended = shell.run("worker", "--frontier", "sqlite:///folder")
    assert ended.code == 4
    assert "Attempt" not in ended.err
