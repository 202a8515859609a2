"""`--dispatch` on every command that could need it, and what is said when the broker is away."""

from __future__ import annotations

import msgspec
import pytest

from shoal.frontier.port import Backend
from shoal.model import TRANSIT, Claim, JobSpec, Request
from tests.faces.conftest import Shoal
from tests.rig.command import Shell

NOBODY = "amqp://guest:secret-word@127.0.0.1:9/"


COMMANDS = [
    "crawl",
    "worker",
    "pump",
    "enqueue",
    "discover",
    "route",
    "status",
    "doctor",
    "up",
    "run",
    "explain",
    "watch",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_it(shoal: Shoal, command: str) -> None:
    assert "--dispatch" in shoal(command, "--help").out


@pytest.mark.parametrize("words", [(), ("--workers", "2"), ("--json",)])
def test_a_crawl_without_its_broker_ends(shell: Shell, words: tuple[str, ...]) -> None:
    few = {"SHOAL_CONNECT_ATTEMPTS": "2"}
    ended = shell.run("crawl", "http://a.test/", "--dispatch", NOBODY, *words, env=few)
    assert (ended.code, ended.out) == (4, ""), ended
    assert "Attempt 1 failed: " in ended.err and "tried 2 times" in ended.err and "hint:" in ended.err
    assert "secret-word" not in ended.err
    assert msgspec.json.decode(shell.run("jobs", "--json").out) == []


def test_up_without_its_broker_ends(shell: Shell) -> None:
    few = {"SHOAL_CONNECT_ATTEMPTS": "2"}
    ended = shell.run("up", "--no-api", "--workers", "1", "--dispatch", NOBODY, env=few)
    assert (ended.code, "tried 2 times" in ended.err) == (4, True), ended


def test_the_flag_alone_makes_the_rules_count(shell: Shell) -> None:
    ended = shell.run("enqueue", "some", "http://a.test/news/1", "http://a.test/2", "--dispatch", NOBODY)
    assert ended.code == 0, ended
    assert {*shell.ask(lambda frontier: frontier.queues())} == {"priority_queue", "scraping"}
    assert shell.run("route", "http://a.test/news/1", "--json", "--dispatch", NOBODY).json()["applied"]
    assert not shell.run("route", "http://a.test/news/1", "--json").json()["applied"]


def test_a_worker_that_pumps_nothing_needs_a_broker(shell: Shell) -> None:
    ended = shell.run("worker", "--no-pump", "--drain")
    assert (ended.code, "--no-pump needs --dispatch" in ended.err) == (2, True), ended


def test_who_holds_a_host_from_the_broker_is_told(shell: Shell) -> None:
    async def send(frontier: Backend) -> Claim:
        await frontier.open_job("job", JobSpec(gap=0.0, width=1))
        await frontier.add(
            [Request("http://a.test/1", "job", queue="slow"), Request("http://a.test/2", "job")]
        )
        claim = await frontier.claim(1, worker=f"{TRANSIT}pump", lease_seconds=60.0, queues=["slow"])
        assert len(claim.leases) == 1
        return claim

    shell.run("migrate")
    shell.ask(send)
    [waiting] = shell.run("explain", "http://a.test/2", "--json").json()["jobs"]
    assert waiting["broker_holds"] == [{"queue": "slow", "urls": 1, "consumers": None}]
    assert "broker queue slow (give --dispatch" in waiting["why"]
    [sent] = shell.run("explain", "http://a.test/1", "--json").json()["jobs"]
    assert sent["in_broker"] and "queue slow" in sent["why"]
    dead = shell.run("explain", "http://a.test/2", "--dispatch", NOBODY)
    assert dead.code == 0 and "queue slow" in dead.out
